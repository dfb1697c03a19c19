//! The namespace: a file under `/run/netns`, and a thread that lives in it and does what has to be done there.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use rustix::io::Errno;
use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_bind, mount_bind_recursive, mount_change, unmount};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};

use crate::Error;

const DIRECTORY: &str = "/run/netns";

/// `NSFS_MAGIC` (linux/magic.h): what a mounted namespace is on.
const NSFS: u64 = 0x6e73_6673;

type Job = Box<dyn FnOnce() + Send>;

/// A thread in the namespace.
#[derive(Debug)]
pub(crate) struct Inside {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    namespace: File,
    path: PathBuf,
}

impl Inside {
    /// Goes into the namespace called `name`, which is made if it is not there.
    pub(crate) fn enter(name: &str) -> Result<Self, Error> {
        let path = Path::new(DIRECTORY).join(name);
        let namespace = match existing(&path)? {
            Some(namespace) => namespace,
            None => make(&path)?,
        };
        let own = namespace
            .try_clone()
            .map_err(Error::host("opening the namespace again"))?;
        let (jobs, queue) = channel::<Job>();
        let (entered, result) = channel();
        let thread = std::thread::Builder::new()
            .name("network".to_owned())
            .spawn(move || {
                let moved = move_into_link_name_space(own.as_fd(), Some(LinkNameSpaceType::Network));
                let is_inside = moved.is_ok();
                // It is waited for below; nobody is there only if `enter` has panicked.
                if entered.send(moved).is_ok() && is_inside {
                    queue.into_iter().for_each(|job| job());
                }
            })
            .map_err(Error::host("starting a thread"))?;
        let moved = result.recv().map_err(|_| Error::ThreadGone)?;
        moved.map_err(Error::host(format!("entering {}", path.display())))?;
        Ok(Self {
            jobs: Some(jobs),
            thread: Some(thread),
            namespace,
            path,
        })
    }

    /// Does something in the namespace and waits for it.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let (sender, result) = channel();
        let jobs = self.jobs.as_ref().ok_or(Error::ThreadGone)?;
        let job = move || {
            if sender.send(job()).is_err() {
                log::error!("the result of work in the network namespace is dropped: its caller is gone");
            }
        };
        jobs.send(Box::new(job)).map_err(|_| Error::ThreadGone)?;
        result.recv().map_err(|_| Error::ThreadGone)?
    }

    /// The same on a thread of its own, for what takes long: others' work in the namespace goes on meanwhile.
    pub(crate) fn run_aside<T: Send>(&self, job: impl FnOnce() -> Result<T, Error> + Send) -> Result<T, Error> {
        let work = || {
            let moved = move_into_link_name_space(self.namespace(), Some(LinkNameSpaceType::Network));
            moved.map_err(Error::host(format!("entering {}", self.path.display())))?;
            job()
        };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("network".to_owned());
            let thread = thread
                .spawn_scoped(scope, work)
                .map_err(Error::host("starting a thread"))?;
            thread.join().map_err(|_| Error::ThreadGone)?
        })
    }

    pub(crate) fn namespace(&self) -> BorrowedFd<'_> {
        self.namespace.as_fd()
    }

    /// Takes the name away. The namespace itself ends with whoever is still in it, and so do its links.
    pub(crate) fn remove(mut self) -> Result<(), Error> {
        self.end();
        remove(&self.path)
    }

    fn end(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the thread in the network namespace panicked");
        }
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        self.end();
    }
}

/// The namespace that `path` names. A file that names none was left by somebody who was killed while making it.
fn existing(path: &Path) -> Result<Option<File>, Error> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => {
            return Err(Error::File {
                path: path.to_owned(),
                source,
            });
        }
    };
    let system = rustix::fs::fstatfs(&file).map_err(Error::host(format!("looking at {}", path.display())))?;
    Ok((u64::try_from(system.f_type) == Ok(NSFS)).then_some(file))
}

/// Makes a namespace on a thread of its own and gives it a name.
fn make(path: &Path) -> Result<File, Error> {
    let failed = |source| Error::File {
        path: path.to_owned(),
        source,
    };
    make_directory().map_err(|source| Error::File {
        path: DIRECTORY.into(),
        source,
    })?;
    be_a_mount_point()?;
    File::create(path).map_err(failed)?;
    let made = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: 1. only the network namespace of this thread changes, which ends below; nothing that other threads
            // have, such as descriptors, becomes separate.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }?;
            mount_bind("/proc/thread-self/ns/net", path)
        });
        thread.join().unwrap_or(Err(Errno::CHILD))
    });
    made.map_err(Error::host(format!("making the namespace {}", path.display())))?;
    File::open(path).map_err(failed)
}

/// Others' namespaces have their names there, too: whoever makes it makes it as `ip netns add` does, whatever the umask.
fn make_directory() -> io::Result<()> {
    match fs::create_dir(DIRECTORY) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made.and_then(|()| fs::set_permissions(DIRECTORY, fs::Permissions::from_mode(0o755))),
    }
}

/// Makes the directory a mount point whose mounts other mount namespaces see, as `ip netns add` does where it is none. Done
/// later, by that program, it would cover the mounts that are there, and nobody could remove their files any more.
fn be_a_mount_point() -> Result<(), Error> {
    let shared = || mount_change(DIRECTORY, MountPropagationFlags::SHARED | MountPropagationFlags::REC);
    let made = match shared() {
        Err(Errno::INVAL) => mount_bind_recursive(DIRECTORY, DIRECTORY).and_then(|()| shared()),
        done => done,
    };
    made.map_err(Error::host(format!("making {DIRECTORY} a mount point")))
}

/// Removes the name of a namespace, if there is one.
fn remove(path: &Path) -> Result<(), Error> {
    match unmount(path, UnmountFlags::DETACH) {
        // Not there, or no mount.
        Ok(()) | Err(Errno::NOENT | Errno::INVAL) => {}
        Err(error) => return Err(Error::host(format!("unmounting {}", path.display()))(error)),
    }
    // Mounts of it in other mount namespaces go with the file.
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(Error::File {
                path: path.to_owned(),
                source: error,
            });
        }
        _ => {}
    }
    // Others may have namespaces there.
    if fs::read_dir(DIRECTORY).is_ok_and(|mut names| names.next().is_none()) {
        match unmount(DIRECTORY, UnmountFlags::empty()) {
            // Not there, no mount, or in use by then.
            Ok(()) | Err(Errno::NOENT | Errno::INVAL | Errno::BUSY) => {}
            Err(error) => return Err(Error::host(format!("unmounting {DIRECTORY}"))(error)),
        }
    }
    match fs::remove_dir(DIRECTORY) {
        Ok(()) => Ok(()),
        Err(error)
            if [libc::ENOTEMPTY, libc::EBUSY, libc::ENOENT]
                .map(Some)
                .contains(&error.raw_os_error()) =>
        {
            Ok(())
        }
        Err(source) => Err(Error::File {
            path: DIRECTORY.into(),
            source,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_is_removed_after_other_programs_made_theirs() {
        // In a mount namespace of its own, whose /run nobody else sees.
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                // SAFETY: 1. only this thread's view of mounts changes, and it ends below.
                unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }.unwrap();
                mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
                rustix::mount::mount("tmpfs", "/run", "tmpfs", rustix::mount::MountFlags::empty(), None).unwrap();
                let inside = Inside::enter("basalt-test").unwrap();
                // What `ip netns add` begins with (iproute2, ip/ipnetns.c, `netns_add`).
                be_a_mount_point().unwrap();
                inside.remove().unwrap();
                assert!(!Path::new(DIRECTORY).exists());
            });
            thread.join().unwrap();
        });
    }
}
