//! The files by which Linux tells of PCI functions and is told what to do with them: sysfs, proc, dev. Behind a trait, so that tests have a
//! kernel in memory ([`super::simulated`]). Knows paths and text, not what they mean.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base::PciAddress;
use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, statx};

use super::error::DeviceError;

/// More than any attribute of sysfs has (a page), or table of proc that is read here.
const MOST: u64 = 16 << 20;

/// How files are reached.
pub trait Files: fmt::Debug + Send + Sync {
    /// Opens one for reading.
    ///
    /// # Errors
    /// The kernel's.
    fn open(&self, path: &Path) -> io::Result<Box<dyn BufRead>>;

    /// Writes an attribute, in one call of the kernel.
    ///
    /// # Errors
    /// The kernel's: what the attribute does has failed.
    fn write(&self, path: &Path, text: &str) -> io::Result<()>;

    /// Where a symbolic link leads.
    ///
    /// # Errors
    /// The kernel's.
    fn link(&self, path: &Path) -> io::Result<PathBuf>;

    /// The names in a directory.
    ///
    /// # Errors
    /// The kernel's.
    fn list(&self, path: &Path) -> io::Result<Vec<String>>;

    /// Whether somebody has a device to itself: of a block device a file system, swap, a RAID, whoever opened it so (open(2), `O_EXCL`
    /// without `O_CREAT`), of a group of VFIO whoever has it open. This is nobody for who may not open it.
    ///
    /// # Errors
    /// The kernel's.
    fn is_claimed(&self, device: &Path) -> io::Result<bool>;

    /// Which character device a path leads to; nothing where it is another file.
    ///
    /// # Errors
    /// The kernel's.
    fn device_number(&self, path: &Path) -> io::Result<Option<DeviceNumber>>;
}

/// Major and minor number of a device (makedev(3)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceNumber(pub u32, pub u32);

/// Those of this host.
#[derive(Clone, Copy, Debug)]
struct OfHost;

impl Files for OfHost {
    fn open(&self, path: &Path) -> io::Result<Box<dyn BufRead>> {
        Ok(Box::new(BufReader::new(File::open(path)?)))
    }

    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        // No attribute is made by writing it.
        let mut file = File::options().write(true).open(path)?;
        match file.write(text.as_bytes())? {
            written if written == text.len() => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    fn link(&self, path: &Path) -> io::Result<PathBuf> {
        fs::read_link(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        let names = fs::read_dir(path)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        names.collect()
    }

    fn is_claimed(&self, device: &Path) -> io::Result<bool> {
        let flags = rustix::fs::OFlags::EXCL | rustix::fs::OFlags::NONBLOCK;
        let flags = i32::try_from(flags.bits()).unwrap_or_default();
        match File::options().read(true).custom_flags(flags).open(device) {
            Ok(_) => Ok(false),
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => Ok(true),
            // A cgroup may keep the daemon from disks; a drive may have no medium.
            Err(error) if is_absent(&error) || error.kind() == io::ErrorKind::PermissionDenied => Ok(false),
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::NOMEDIUM.raw_os_error()) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn device_number(&self, path: &Path) -> io::Result<Option<DeviceNumber>> {
        // As the kernel knows it: the server of somebody's file system may never answer (statx(2)).
        let found = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE)?;
        let number = DeviceNumber(found.stx_rdev_major, found.stx_rdev_minor);
        let is_device = FileType::from_raw_mode(found.stx_mode.into()) == FileType::CharacterDevice;
        Ok(is_device.then_some(number))
    }
}

/// Where Linux's files are, and how they are reached.
#[derive(Clone, Debug)]
pub struct Sysfs {
    files: Arc<dyn Files>,
    sys: PathBuf,
    dev: PathBuf,
    proc: PathBuf,
    /// Where the names of devices are.
    share: PathBuf,
}

impl Sysfs {
    /// This host's.
    pub fn of_host() -> Self {
        Self::below(Path::new("/"))
    }

    /// The same below another root.
    pub fn below(root: &Path) -> Self {
        Self::with(Arc::new(OfHost), root)
    }

    /// Reached by `files`.
    pub fn with(files: Arc<dyn Files>, root: &Path) -> Self {
        Self {
            files,
            sys: root.join("sys"),
            dev: root.join("dev"),
            proc: root.join("proc"),
            share: root.join("usr/share"),
        }
    }

    /// A path below /sys.
    pub(super) fn sys(&self, path: &str) -> PathBuf {
        self.sys.join(path)
    }

    /// A path below /proc.
    pub(super) fn proc(&self, path: &str) -> PathBuf {
        self.proc.join(path)
    }

    /// A path below /dev.
    pub(super) fn dev(&self, path: &str) -> PathBuf {
        self.dev.join(path)
    }

    /// A path below /usr/share.
    pub(super) fn share(&self, path: &str) -> PathBuf {
        self.share.join(path)
    }

    /// A function's directory, or what is in it.
    pub(super) fn function(&self, address: PciAddress, name: &str) -> PathBuf {
        let directory = self.sys(&format!("bus/pci/devices/{address}"));
        match name {
            "" => directory,
            name => directory.join(name),
        }
    }

    /// What a file says; nothing where there is no such file.
    pub(super) fn text(&self, path: &Path) -> Result<Option<String>, DeviceError> {
        let Some(file) = self.open(path)? else { return Ok(None) };
        let mut bytes = Vec::new();
        match file.take(MOST).read_to_end(&mut bytes) {
            Ok(_) => Ok(Some(String::from_utf8_lossy(&bytes).trim_end().to_owned())),
            Err(error) if is_absent(&error) => Ok(None),
            Err(error) => Err(DeviceError::file("read", path)(error)),
        }
    }

    /// Opens a file, where there is one.
    pub(super) fn open(&self, path: &Path) -> Result<Option<Box<dyn BufRead>>, DeviceError> {
        match self.files.open(path) {
            Err(error) if is_absent(&error) => Ok(None),
            opened => opened.map(Some).map_err(DeviceError::file("read", path)),
        }
    }

    /// Where a link leads; nothing where there is none.
    pub(super) fn link(&self, path: &Path) -> Result<Option<PathBuf>, DeviceError> {
        match self.files.link(path) {
            // The last is what something says that is no link.
            Err(error) if is_absent(&error) || error.kind() == io::ErrorKind::InvalidInput => Ok(None),
            found => found.map(Some).map_err(DeviceError::file("read", path)),
        }
    }

    /// The last part of a link's destination.
    pub(super) fn link_name(&self, path: &Path) -> Result<Option<String>, DeviceError> {
        let to = self.link(path)?;
        Ok(to.and_then(|to| Some(to.file_name()?.to_string_lossy().into_owned())))
    }

    /// The names in a directory, in order; none where there is no such directory.
    pub(super) fn list(&self, path: &Path) -> Result<Vec<String>, DeviceError> {
        match self.files.list(path) {
            Err(error) if is_absent(&error) => Ok(Vec::new()),
            listed => {
                let mut names = listed.map_err(DeviceError::file("read", path))?;
                names.sort();
                Ok(names)
            }
        }
    }

    /// Whether there is such a directory.
    pub(super) fn has_directory(&self, path: &Path) -> Result<bool, DeviceError> {
        match self.files.list(path) {
            Err(error) if is_absent(&error) => Ok(false),
            listed => listed.map(|_| true).map_err(DeviceError::file("read", path)),
        }
    }

    /// Writes an attribute.
    pub(super) fn write(&self, path: &Path, text: &str) -> Result<(), DeviceError> {
        self.files.write(path, text).map_err(DeviceError::file("write", path))
    }

    /// See [`Files::is_claimed`].
    pub(super) fn is_claimed(&self, device: &Path) -> Result<bool, DeviceError> {
        self.files.is_claimed(device).map_err(DeviceError::file("open", device))
    }

    /// Which character device a path leads to; nothing where there is none, or nobody may know.
    pub(super) fn device_number(&self, path: &Path) -> Result<Option<DeviceNumber>, DeviceError> {
        match self.files.device_number(path) {
            Err(error) if is_absent(&error) || error.kind() == io::ErrorKind::PermissionDenied => Ok(None),
            found => found.map_err(DeviceError::file("look at", path)),
        }
    }
}

/// There is no such file, or what it was of has just gone.
fn is_absent(error: &io::Error) -> bool {
    let gone = [rustix::io::Errno::NODEV, rustix::io::Errno::NXIO].map(rustix::io::Errno::raw_os_error);
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
        || error.raw_os_error().is_some_and(|code| gone.contains(&code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_the_host_are_read_written_and_told_apart_from_none() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        fs::create_dir_all(root.join("sys/bus/pci/devices/0000:01:00.0")).unwrap();
        let address: PciAddress = "0000:01:00.0".parse().unwrap();
        let sysfs = Sysfs::below(root);
        let attribute = sysfs.function(address, "driver_override");
        assert_eq!(sysfs.text(&attribute).unwrap(), None);
        // No attribute comes to be by being written.
        let refused = sysfs.write(&attribute, "x").unwrap_err();
        assert!(refused.to_string().contains("driver_override"), "{refused}");
        fs::write(&attribute, "(null)\n").unwrap();
        assert_eq!(sysfs.text(&attribute).unwrap().as_deref(), Some("(null)"));
        sysfs.write(&attribute, "abcdefg").unwrap();
        assert_eq!(fs::read_to_string(&attribute).unwrap(), "abcdefg");
        std::os::unix::fs::symlink("../../drivers/nvme", sysfs.function(address, "driver")).unwrap();
        assert_eq!(
            sysfs.link_name(&sysfs.function(address, "driver")).unwrap().as_deref(),
            Some("nvme")
        );
        assert_eq!(sysfs.link_name(&attribute).unwrap(), None, "it is no link");
        assert_eq!(
            sysfs.list(&sysfs.function(address, "")).unwrap(),
            ["driver", "driver_override"]
        );
        assert!(sysfs.list(&sysfs.sys("nowhere")).unwrap().is_empty());
        assert!(!sysfs.has_directory(&sysfs.sys("nowhere")).unwrap());
        assert!(!sysfs.is_claimed(&sysfs.dev("nvme0n1")).unwrap(), "it is not there");
        // A directory can be no attribute: this is an error, and not an absence.
        let error = sysfs.text(&sysfs.sys("bus")).unwrap_err();
        assert!(error.to_string().contains("sys/bus"), "{error}");
    }
}
