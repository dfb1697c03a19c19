//! A guest with the host's own kernel, which has drivers that ours has not, and takes modules: an initramfs in which the program that
//! made it loads what the agent needs, and then becomes the agent. For tests and measurements; knows neither.
//!
//! ```text
//!  on the host:   initramfs() = this program as /init, the agent, the drivers in their order
//!  in the guest:  is_init() ─▶ become_agent()
//! ```

use std::convert::Infallible;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use cpio::Archive;

/// What reaches the agent, the image, and a disk that is given. (A kernel's checksum code asks for `crc32c_generic` by an alias.)
const DRIVERS: [&str; 8] = [
    "virtio_pci",
    "virtio_blk",
    "virtio_console",
    "vmw_vsock_virtio_transport",
    "crc32c_generic",
    "erofs",
    "overlay",
    "nvme",
];

/// In the initramfs.
const DIRECTORY: &str = "/drivers";
const AGENT: &str = "/agent";

/// Why there is no such guest.
#[derive(Debug, thiserror::Error)]
pub enum ForeignError {
    /// modprobe does not know a driver, or cannot be run.
    #[error("modprobe tells no files of the driver {driver}: {why}")]
    Driver {
        /// Which.
        driver: &'static str,
        /// What it says.
        why: String,
    },
    /// A file could not be read, or loaded as a driver.
    #[error("{path}: {source}")]
    File {
        /// Which.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// Something cannot be in an initramfs.
    #[error(transparent)]
    Archive(#[from] cpio::Error),
}

fn at(path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> ForeignError {
    let path = path.as_ref().display().to_string();
    move |source| ForeignError::File { path, source }
}

fn read(path: impl AsRef<Path>) -> Result<Vec<u8>, ForeignError> {
    fs::read(&path).map_err(at(path))
}

/// The initramfs: this program, which calls [`is_init`] first of all, the agent, the drivers of the kernel that runs here, and more of
/// them.
///
/// # Errors
/// A file is missing, or modprobe.
pub fn initramfs(agent: &Path, more: &[PathBuf]) -> Result<Vec<u8>, ForeignError> {
    let mut archive = Archive::default();
    for directory in ["dev", "proc", "sys", &DIRECTORY[1..]] {
        archive.directory(directory, 0o755)?;
    }
    archive.character_device("dev/console", 0o600, 5, 1)?;
    archive.character_device("dev/null", 0o666, 1, 3)?;
    archive.file("init", 0o755, &read("/proc/self/exe")?)?;
    archive.file(&AGENT[1..], 0o755, &read(agent)?)?;
    for (number, path) in drivers()?.iter().chain(more).enumerate() {
        // Loaded in the order of their names.
        archive.file(&format!("{}/{number:03}", &DIRECTORY[1..]), 0o644, &read(path)?)?;
    }
    Ok(archive.finish())
}

/// The drivers' files, each after those that it needs.
fn drivers() -> Result<Vec<PathBuf>, ForeignError> {
    let mut files: Vec<PathBuf> = Vec::new();
    for driver in DRIVERS {
        let refused = |why| ForeignError::Driver { driver, why };
        let output = Command::new("modprobe").args(["--show-depends", driver]).output();
        let output = output.map_err(|error| refused(error.to_string()))?;
        if !output.status.success() {
            return Err(refused(String::from_utf8_lossy(&output.stderr).into_owned()));
        }
        for path in needed(&String::from_utf8_lossy(&output.stdout)) {
            if !files.contains(&path) {
                files.push(path);
            }
        }
    }
    Ok(files)
}

/// Of what modprobe says of one driver. What is built in is called so, and needs no file.
fn needed(said: &str) -> impl Iterator<Item = PathBuf> {
    let files = said.lines().filter_map(|line| line.strip_prefix("insmod "));
    files.map(|path| PathBuf::from(path.trim()))
}

/// Whether this process is the first of such a guest.
pub fn is_init() -> bool {
    std::process::id() == 1 && Path::new(AGENT).exists()
}

/// Becomes the agent, with this process's arguments.
///
/// # Errors
/// Why it could not.
pub fn become_agent() -> Result<Infallible, ForeignError> {
    let mut files: Vec<PathBuf> = fs::read_dir(DIRECTORY)
        .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect())
        .map_err(at(DIRECTORY))?;
    files.sort();
    for file in &files {
        match rustix::system::init_module(&read(file)?, c"").map_err(io::Error::from) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(at(file)(error)),
            _ => (),
        }
    }
    Err(at(AGENT)(run(AGENT)))
}

fn run(program: impl AsRef<OsStr>) -> io::Error {
    Command::new(program).args(std::env::args_os().skip(1)).exec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_built_in_needs_no_file() {
        let said = "builtin virtio\ninsmod /lib/modules/6.1/virtio_pci.ko \ninsmod /lib/a.ko\n";
        let files: Vec<_> = needed(said).collect();
        assert_eq!(
            files,
            ["/lib/modules/6.1/virtio_pci.ko", "/lib/a.ko"].map(PathBuf::from)
        );
    }

    #[test]
    fn this_is_no_guest() {
        assert!(!is_init());
        let error = become_agent().unwrap_err().to_string();
        assert!(error.starts_with("/drivers: "), "{error}");
        let error = initramfs(Path::new("/nonexistent"), &[]).unwrap_err().to_string();
        assert!(error.starts_with("/nonexistent: "), "{error}");
    }
}
