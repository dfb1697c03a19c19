//! A guest with the lab host's own kernel, which has drivers that ours has not, and our agent: an initramfs in which this program
//! loads what the agent needs and then becomes it. Knows no case.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use cpio::Archive;

use crate::Host;

/// What reaches the agent and the image.
const DRIVERS: [&str; 6] = [
    "virtio_pci",
    "virtio_blk",
    "virtio_console",
    "vmw_vsock_virtio_transport",
    "erofs",
    "overlay",
];

/// In the initramfs.
const DIRECTORY: &str = "/drivers";
const AGENT: &str = "/agent";

/// Makes the initramfs.
pub(crate) fn initramfs(host: &Host) -> Result<File> {
    let mut archive = Archive::default();
    for directory in ["dev", "proc", "sys", &DIRECTORY[1..]] {
        archive.directory(directory, 0o755)?;
    }
    archive.character_device("dev/console", 0o600, 5, 1)?;
    archive.character_device("dev/null", 0o666, 1, 3)?;
    archive.file("init", 0o755, &fs::read("/proc/self/exe")?)?;
    archive.file(&AGENT[1..], 0o755, &fs::read(host.binaries.join("basalt-agent"))?)?;
    for (number, path) in drivers()?.iter().enumerate() {
        let bytes = fs::read(path).with_context(|| path.display().to_string())?;
        // Loaded in the order of their names.
        archive.file(&format!("{}/{number:03}", &DIRECTORY[1..]), 0o644, &bytes)?;
    }
    let path = host.scratch.join("initramfs");
    fs::write(&path, archive.finish())?;
    Ok(File::open(path)?)
}

/// The drivers' files, each after those that it needs.
fn drivers() -> Result<Vec<PathBuf>> {
    let mut files: Vec<PathBuf> = Vec::new();
    for driver in DRIVERS {
        let output = Command::new("modprobe").args(["--show-depends", driver]).output()?;
        ensure!(
            output.status.success(),
            "modprobe --show-depends {driver}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        let text = String::from_utf8(output.stdout)?;
        // What is built in is called so, and needs no file.
        let needed = text.lines().filter_map(|line| line.strip_prefix("insmod "));
        for path in needed.map(|path| PathBuf::from(path.trim())) {
            if !files.contains(&path) {
                files.push(path);
            }
        }
    }
    Ok(files)
}

/// Whether this program is the first process of such a guest.
pub(crate) fn is_init() -> bool {
    std::process::id() == 1 && Path::new(AGENT).exists()
}

/// Becomes the agent; returns why it could not.
pub(crate) fn become_agent() -> anyhow::Error {
    match load_drivers() {
        Ok(()) => Command::new(AGENT).args(std::env::args_os().skip(1)).exec().into(),
        Err(error) => error,
    }
}

fn load_drivers() -> Result<()> {
    let entries = fs::read_dir(DIRECTORY)?;
    let mut files = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    files.sort();
    for file in files {
        match rustix::system::init_module(&fs::read(&file)?, c"") {
            Err(error) if std::io::Error::from(error).kind() != ErrorKind::AlreadyExists => {
                return Err(error).with_context(|| file.display().to_string());
            }
            _ => (),
        }
    }
    Ok(())
}
