//! The host's side of a comparison with guests: the file system of an image, in which the host itself runs the programs that guests
//! run, on as many CPUs. Knows images by digest, and no guest.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use anyhow::Result;
use base::CpuSet;

use crate::class::run;

/// The image's file system with a writable layer in memory, as a guest has it; unmounted with this.
pub(crate) struct Root {
    mounts: Vec<PathBuf>,
    merged: PathBuf,
}

impl Root {
    /// Of the image with this digest, below `scratch`.
    ///
    /// # Errors
    /// The image is not among these, or the host's.
    pub(crate) fn mount(images: &Path, digest: &str, scratch: &Path) -> Result<Self> {
        let blob = images
            .join("blobs")
            .join(format!("{}.erofs", digest.trim_start_matches("sha256:")));
        let place = |name: &str| scratch.join("root").join(name);
        let (lower, layer, merged) = (place("lower"), place("layer"), place("merged"));
        let mut root = Self {
            mounts: Vec::new(),
            merged: merged.clone(),
        };
        for directory in [&lower, &layer, &merged] {
            fs::create_dir_all(directory)?;
        }
        let text = |path: &Path| path.display().to_string();
        root.add(&["-t", "erofs", "-o", "ro,loop", &text(&blob), &text(&lower)], &lower)?;
        root.add(&["-t", "tmpfs", "none", &text(&layer)], &layer)?;
        let (upper, work) = (layer.join("upper"), layer.join("work"));
        fs::create_dir_all(&upper)?;
        fs::create_dir_all(&work)?;
        let options = format!(
            "lowerdir={},upperdir={},workdir={}",
            text(&lower),
            text(&upper),
            text(&work)
        );
        root.add(&["-t", "overlay", "-o", &options, "none", &text(&merged)], &merged)?;
        for directory in ["proc", "dev", "run"] {
            fs::create_dir_all(merged.join(directory))?;
        }
        let at = |name: &str| merged.join(name);
        root.add(&["-t", "proc", "none", &text(&at("proc"))], &at("proc"))?;
        root.add(&["--bind", "/dev", &text(&at("dev"))], &at("dev"))?;
        Ok(root)
    }

    fn add(&mut self, arguments: &[&str], place: &Path) -> Result<()> {
        run("mount", arguments)?;
        self.mounts.push(place.to_owned());
        Ok(())
    }

    /// A script in it, on these CPUs, as the leader of a group of its own.
    pub(crate) fn script(&self, cpus: &str, script: &str) -> Command {
        let mut command = Command::new("taskset");
        command.args(["--cpu-list", cpus, "chroot"]).arg(&self.merged);
        command.args(["sh", "-c", script]).process_group(0);
        command
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        for place in self.mounts.iter().rev() {
            if let Err(error) = run("umount", &[&place.display().to_string()]) {
                eprintln!("{} stays mounted: {error:#}", place.display());
            }
        }
    }
}

/// Programs of a load, which end with this.
pub(crate) struct Busy(pub(crate) Vec<Child>);

impl Drop for Busy {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let group = i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw);
            let killed = group.map(|group| rustix::process::kill_process_group(group, rustix::process::Signal::KILL));
            if let Some(Err(error)) = killed {
                eprintln!("process group {} stays: {error}", child.id());
            }
            drop(child.wait());
        }
    }
}

/// The CPUs that guests of this node get that own theirs: the last. Not isolated, as nothing of this program's own could run there then.
pub(crate) fn last_cpus(count: usize) -> Result<String> {
    Ok(last(
        &fs::read_to_string("/sys/devices/system/cpu/online")?.trim().parse()?,
        count,
    ))
}

fn last(online: &CpuSet, count: usize) -> String {
    let mut cpus: Vec<String> = online.iter().rev().take(count).map(|cpu| cpu.to_string()).collect();
    cpus.reverse();
    cpus.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_uses_the_cpus_that_a_guest_would_own() {
        assert_eq!(last(&"0-1,4-6".parse().unwrap(), 2), "5,6");
    }
}
