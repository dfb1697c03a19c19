//! What the figures need of the lab host: programs, kernels, files made for the run and removed after it.

use std::fs::{self, File};
use std::io::{BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use cpio::Archive;
use sha2::{Digest, Sha256};

use crate::guard::Kept;
use crate::guest::{DISK_BYTES, Random};
use crate::machine::{QEMU, Setup};
use crate::scratch;
use crate::trace::INSTANCES;

/// Words that both peers' guests get; the only console is the serial port, and only the marker is written to it.
const CMDLINE: &str = "console=ttyS0 quiet panic=-1 reboot=t";
/// Asks the agent for its marker.
const MARKER: &str = "basalt.marker";

/// Paths, and a directory that is removed with this.
pub(crate) struct World {
    /// The directory with the programs.
    pub(crate) binaries: PathBuf,
    pub(crate) vmm: PathBuf,
    pub(crate) kernel: PathBuf,
    pub(crate) initramfs: PathBuf,
    pub(crate) debian_kernel: PathBuf,
    pub(crate) scratch: PathBuf,
}

impl World {
    pub(crate) fn new(binaries: &Path, debian_kernel: &Path, scratch: &Path) -> Result<Self> {
        remove_stale(Path::new(INSTANCES), |path| Ok(fs::remove_dir(path)?))?;
        remove_stale(scratch, scratch::remove)?;
        let scratch = scratch.join(own_name());
        Kept::Scratch(scratch.clone()).tell(true);
        fs::create_dir_all(&scratch).with_context(|| format!("cannot make {}", scratch.display()))?;
        let assets = binaries.join("basalt-assets");
        let world = Self {
            binaries: binaries.to_owned(),
            vmm: binaries.join("basalt-vmm"),
            kernel: assets.join("vmlinux"),
            initramfs: assets.join("initramfs.cpio"),
            debian_kernel: debian_kernel.to_owned(),
            scratch,
        };
        for file in [
            &world.vmm,
            &world.kernel,
            &world.initramfs,
            &world.debian_kernel,
            Path::new(QEMU),
        ] {
            ensure!(
                file.exists(),
                "{} is not there: run this inside the lab, after `basalt-lab sync`",
                file.display()
            );
        }
        Ok(world)
    }

    /// A guest that runs the agent and says so on the serial port.
    pub(crate) fn agent(&self, kernel: &Path) -> Setup {
        Setup {
            kernel: kernel.to_owned(),
            initramfs: self.initramfs.clone(),
            cmdline: format!("{CMDLINE} {MARKER}"),
        }
    }

    /// The same with the words that `basalt run` gives its sandboxes.
    pub(crate) fn sandbox(&self) -> Setup {
        let words = node::command_line(log::LevelFilter::Warn);
        Setup {
            cmdline: format!("{words} {MARKER}"),
            ..self.agent(&self.kernel)
        }
    }

    /// A guest whose init is this program.
    pub(crate) fn reader(&self) -> Result<Setup> {
        let mut archive = Archive::default();
        archive.directory("dev", 0o755)?;
        archive.character_device("dev/console", 0o600, 5, 1)?;
        archive.file("init", 0o755, &fs::read("/proc/self/exe")?)?;
        let initramfs = self.scratch.join("reader.cpio");
        fs::write(&initramfs, archive.finish())?;
        Ok(Setup {
            kernel: self.kernel.clone(),
            initramfs,
            cmdline: CMDLINE.to_owned(),
        })
    }

    /// A small image, for a root disk that nobody looks into before the marker.
    pub(crate) fn root(&self) -> Result<PathBuf> {
        let (tree, image) = (self.scratch.join("tree"), self.scratch.join("root.erofs"));
        // Made once for all figures of a run.
        if image.exists() {
            return Ok(image);
        }
        fs::create_dir(&tree)?;
        fs::write(tree.join("file"), "a root\n")?;
        let made = Command::new("mkfs.erofs")
            .arg(&image)
            .arg(&tree)
            .output()
            .context("mkfs.erofs cannot be started")?;
        ensure!(
            made.status.success(),
            "mkfs.erofs failed: {}",
            String::from_utf8_lossy(&made.stderr)
        );
        Ok(image)
    }

    /// An empty disk, as large as a sandbox's.
    pub(crate) fn writable(&self) -> Result<PathBuf> {
        let path = self.scratch.join("writable");
        File::create(&path)?.set_len(10 << 30)?;
        Ok(path)
    }

    /// The file that is read as a disk, whole and in the host's page cache.
    pub(crate) fn disk(&self) -> Result<PathBuf> {
        let path = self.scratch.join("disk");
        let mut file = BufWriter::with_capacity(1 << 20, File::create(&path)?);
        let mut random = Random::new(0);
        for _ in 0..DISK_BYTES / 8 {
            file.write_all(&random.next().to_le_bytes())?;
        }
        file.into_inner()?.sync_all()?;
        let (mut file, mut buffer) = (File::open(&path)?, vec![0; 1 << 20]);
        while file.read(&mut buffer)? > 0 {}
        Ok(path)
    }

    /// What the figures stand on.
    pub(crate) fn facts(&self) -> Result<Vec<(String, String)>> {
        let mut facts = Vec::new();
        let mut fact = |name: &str, value: String| facts.push((name.to_owned(), value));
        fact("host", first_line(Command::new("uname").arg("-srvm"))?);
        fact("host's processor", cpu_model()?);
        fact("QEMU", first_line(Command::new(QEMU).arg("--version"))?);
        fact("Basalt", first_line(Command::new(&self.vmm).arg("--version"))?);
        for (name, path) in [
            ("SHA-256 of basalt-vmm", &self.vmm),
            ("SHA-256 of our kernel", &self.kernel),
            ("SHA-256 of Debian's kernel", &self.debian_kernel),
            ("SHA-256 of the initramfs", &self.initramfs),
        ] {
            fact(name, sha256(path)?);
        }
        let huge = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
        fact("host's transparent huge pages", huge.trim().to_owned());
        Ok(facts)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        match scratch::remove(&self.scratch) {
            Ok(()) => Kept::Scratch(self.scratch.clone()).tell(false),
            // The guard tries it once more, when all processes have ended.
            Err(error) => log::warn!("{} is still there: {error:#}", self.scratch.display()),
        }
    }
}

/// What directories of a run are called.
const PREFIX: &str = "basalt-bench-";

/// The name of this run's.
pub(crate) fn own_name() -> String {
    format!("{PREFIX}{}", std::process::id())
}

/// Removes what a run has left that was killed.
fn remove_stale(directory: &Path, remove: fn(&Path) -> Result<()>) -> Result<()> {
    let entries = fs::read_dir(directory).with_context(|| format!("cannot read {}", directory.display()))?;
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let process = name.strip_prefix(PREFIX).filter(|rest| rest.parse::<u32>().is_ok());
        if process.is_some_and(|process| !Path::new("/proc").join(process).exists()) {
            remove(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
    }
    Ok(())
}

fn first_line(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().next().unwrap_or_default().to_owned())
}

fn cpu_model() -> Result<String> {
    let text = fs::read_to_string("/proc/cpuinfo")?;
    let count = text.lines().filter(|line| line.starts_with("processor")).count();
    let model = text
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
        .map_or("unknown", |(_, name)| name.trim());
    Ok(format!("{count} x {model}"))
}

fn sha256(path: &Path) -> Result<String> {
    let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(hex::encode(Sha256::digest(bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_dead_runs_have_left_goes_and_nothing_else() {
        let directory = std::env::temp_dir().join(format!("bench-stale-{}", std::process::id()));
        let living = own_name();
        // No process has such a number (PID_MAX_LIMIT is 4 194 304).
        for name in [living.as_str(), "basalt-bench-4194305", "basalt-bench-x", "other"] {
            fs::create_dir_all(directory.join(name)).unwrap();
        }
        remove_stale(&directory, scratch::remove).unwrap();
        let mut left: Vec<_> = fs::read_dir(&directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        fs::remove_dir_all(&directory).unwrap();
        assert_eq!(left, [living.as_str(), "basalt-bench-x", "other"]);
    }
}
