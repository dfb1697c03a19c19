//! `/proc/sys/kernel/random/boot_id`, which the kernel makes once a boot and never changes: a file in memory lies over it. The
//! file is in the initial root, to which no path leads once the container's root is entered.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use rustix::fs::{Mode, OFlags, open, openat};
use rustix::mount::{MountFlags, mount_bind, mount_remount};

use crate::Error;

/// Where everybody reads it.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Gives a new random UUID at each reading.
const UUID: &str = "/proc/sys/kernel/random/uuid";

/// What a boot id looks like: 8-4-4-4-12 hexadecimal digits (RFC 9562, section 4) and a line's end.
const LENGTH: usize = 37;

/// The file's name in the initial root.
const FILE: &str = "boot_id";

/// The file that lies over it, once there is one.
pub(crate) struct BootId {
    target: PathBuf,
    /// A directory in memory.
    dir: OwnedFd,
    file: Mutex<Option<File>>,
}

impl BootId {
    /// Its file will be in the root that this process has now.
    pub(crate) fn in_initial_root() -> Result<Self, Error> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = open("/", flags, Mode::empty()).map_err(Error::system("keeping the initial root"))?;
        Ok(Self::at(dir, PathBuf::from(BOOT_ID)))
    }

    fn at(dir: OwnedFd, target: PathBuf) -> Self {
        Self {
            target,
            dir,
            file: Mutex::default(),
        }
    }

    /// Lays the file over it, with what is there now: it need not be done any more when it changes.
    pub(crate) fn prepare(&self) -> Result<(), Error> {
        let id = fs::read_to_string(&self.target).map_err(Error::system(format!("reading {BOOT_ID}")))?;
        self.set(&id)
    }

    /// A new one for this machine, made by the kernel's generator, which has been reseeded.
    pub(crate) fn reidentify(&self) -> Result<String, Error> {
        let id = fs::read_to_string(UUID).map_err(Error::system(format!("reading {UUID}")))?;
        self.set(&id)?;
        Ok(id.trim_end().to_owned())
    }

    /// Everybody who shares this process's view of the file system reads `id` from now on, open files included.
    fn set(&self, id: &str) -> Result<(), Error> {
        if id.len() != LENGTH {
            return Err(Error::Refused(format!("{id:?} is no boot id")));
        }
        let fail = |what| Error::system(format!("{what} {}", self.target.display()));
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let file = match &mut *file {
            Some(file) => file,
            none => none.insert(self.create().map_err(fail("making a file to lie over"))?),
        };
        file.write_all_at(id.as_bytes(), 0).map_err(fail("writing the new"))?;
        let read = || fs::read_to_string(&self.target).map_err(fail("reading"));
        // It lies there already, unless this is the first time or somebody has taken it away.
        if read()? == id {
            return Ok(());
        }
        self.cover(file).map_err(fail("mounting a file over"))?;
        if read()? == id {
            return Ok(());
        }
        Err(Error::Refused(format!(
            "{} does not say what was mounted over it",
            self.target.display()
        )))
    }

    fn create(&self) -> io::Result<File> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC;
        let file = File::from(openat(&self.dir, FILE, flags, Mode::empty())?);
        // Whatever the umask is.
        file.set_permissions(fs::Permissions::from_mode(0o444))?;
        Ok(file)
    }

    fn cover(&self, file: &File) -> io::Result<()> {
        let source = format!("/proc/self/fd/{}", file.as_raw_fd());
        mount_bind(source.as_str(), &self.target)?;
        // As the kernel's own: nobody writes to it.
        let flags = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        Ok(mount_remount(&self.target, flags, "")?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_change, unmount};
    use rustix::thread::{UnshareFlags, unshare_unsafe};

    /// In a thread whose mounts nobody else sees.
    fn apart(test: impl FnOnce() + Send + 'static) {
        let work = move || {
            #[expect(unsafe_code, reason = "the thread shares no descriptors that it would close")]
            // SAFETY: 1. NEWNS touches no memory and no descriptors.
            unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.unwrap();
            mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
            test();
        };
        thread::spawn(work).join().unwrap();
    }

    fn boot_id(name: &str) -> (BootId, PathBuf) {
        let path = std::env::temp_dir().join(format!("basalt-agent-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        let dir = open(&path, OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap();
        (BootId::at(dir, PathBuf::from(BOOT_ID)), path)
    }

    #[test]
    fn each_reidentification_is_seen_and_the_kernels_own_is_not() {
        apart(|| {
            let (boot_id, dir) = boot_id("boot-id");
            let kernels = fs::read_to_string(BOOT_ID).unwrap();
            // Open across all of it, as a frozen process may have it.
            let mut seen = vec![kernels.trim_end().to_owned()];
            for _ in 0..3 {
                let id = boot_id.reidentify().unwrap();
                assert_eq!(fs::read_to_string(BOOT_ID).unwrap(), format!("{id}\n"));
                assert!(!seen.contains(&id), "{id} again");
                seen.push(id);
            }
            let mounts = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
            let covers: Vec<_> = mounts.lines().filter(|line| line.contains(BOOT_ID)).collect();
            assert_eq!(covers.len(), 1, "{covers:?}");
            assert!(fs::write(BOOT_ID, "x").is_err(), "it can be written");

            // Somebody has taken it away.
            unmount(BOOT_ID, UnmountFlags::DETACH).unwrap();
            assert_eq!(fs::read_to_string(BOOT_ID).unwrap(), kernels);
            let id = boot_id.reidentify().unwrap();
            assert_eq!(fs::read_to_string(BOOT_ID).unwrap(), format!("{id}\n"));
            fs::remove_dir_all(dir).unwrap();
        });
    }

    #[test]
    fn what_is_no_boot_id_is_not_put_there() {
        let (boot_id, dir) = boot_id("no-boot-id");
        assert!(boot_id.set("short\n").is_err());
        fs::remove_dir_all(dir).unwrap();
    }
}
