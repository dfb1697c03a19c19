//! Files of the window that clients get: which of them nobody has any more. Knows no client.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

/// What their names begin with.
const PREFIX: &str = "slot-";

/// Those that nobody else has open or mapped, by name. They are open meanwhile, and so nobody else's.
///
/// The kernel grants a lease for writing (fcntl(2), `F_SETLEASE`) to nobody who is not alone with the file: a program that was killed, its
/// children that have inherited the mapping, and descriptors under way in sockets all count.
pub(crate) fn free(directory: &Path) -> io::Result<Vec<(String, File)>> {
    let mut free = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let Some(name) = entry.file_name().to_str().map(str::to_owned) else {
            continue;
        };
        if !name.starts_with(PREFIX) {
            continue;
        }
        let file = File::options().read(true).write(true).open(entry.path())?;
        if is_alone(&file)? {
            free.push((name, file));
        }
    }
    free.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok(free)
}

fn is_alone(file: &File) -> io::Result<bool> {
    let lease = |kind: i32| {
        // SAFETY: 1. The descriptor is open, and no memory is touched.
        match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, kind) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    match lease(libc::F_WRLCK) {
        Ok(()) => lease(libc::F_UNLCK).map(|()| true),
        Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;

    #[test]
    fn a_file_is_free_when_nobody_has_it_open_or_mapped() {
        let directory = tempfile::tempdir().unwrap();
        for name in ["slot-1", "slot-0", "library.so"] {
            File::create(directory.path().join(name))
                .unwrap()
                .set_len(4096)
                .unwrap();
        }
        let names = || {
            let free = free(directory.path()).unwrap();
            free.into_iter().map(|(name, _)| name).collect::<Vec<_>>()
        };
        assert_eq!(names(), ["slot-0", "slot-1"]);
        let all = free(directory.path()).unwrap();
        assert!(names().is_empty(), "whoever has them has them alone");
        drop(all);

        let mapped = File::options()
            .read(true)
            .write(true)
            .open(directory.path().join("slot-0"))
            .unwrap();
        // SAFETY: a fresh mapping of a file of this test's, which is taken away below.
        let at = unsafe {
            libc::mmap(
                ptr::null_mut(),
                4096,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                mapped.as_raw_fd(),
                0,
            )
        };
        assert_ne!(at, libc::MAP_FAILED);
        drop(mapped);
        assert_eq!(names(), ["slot-1"], "a mapping has the file open");
        // SAFETY: the mapping from above, which nobody uses.
        assert_eq!(unsafe { libc::munmap(at, 4096) }, 0);
        assert_eq!(names(), ["slot-0", "slot-1"]);
    }
}
