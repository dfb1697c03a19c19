//! Removes a tree. By descriptors, of which two are open at once, and without recursion: a tree may be deeper than a path can say and than
//! a thread's stack would last. Links are removed, not followed.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use agent_api::{RequestFailure, RequestFailureKind};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, fstat, openat, unlinkat};
use rustix::io::Errno;

use super::failure::{Result, failed};
use super::names::{DIRECTORY, Names, entries};
use super::paths::parent;

/// How often a directory is emptied again in which somebody makes files meanwhile.
const MAX_TRIES: u32 = 10;

/// A directory that is being emptied.
struct Level {
    /// In the one above.
    name: CString,
    /// Device and inode: what is found by `..` must be it.
    id: (u64, u64),
    /// Directories in it that are left.
    left: Names,
    tries: u32,
}

/// Removes what is at a path, with all that is in it. It is fine if nothing is there.
pub(super) fn remove_tree(path: &Path) -> Result<()> {
    let above = match openat(CWD, parent(path)?, DIRECTORY, Mode::empty()) {
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(()),
        above => above.map_err(failed("opening", parent(path)?))?,
    };
    let name = CString::new(path.file_name().unwrap_or_default().as_bytes())
        .map_err(|error| failed("removing", path)(std::io::Error::from(error)))?;
    let mut removal = Removal {
        path,
        base: id(&above).map_err(failed("looking at", parent(path)?))?,
        now: above,
        levels: Vec::new(),
    };
    removal.take(name, 0)?;
    while !removal.levels.is_empty() {
        removal.step()?;
    }
    Ok(())
}

struct Removal<'a> {
    path: &'a Path,
    /// The directory that all is in.
    base: (u64, u64),
    /// The directory of the last level; above the first, the one that all is in.
    now: OwnedFd,
    levels: Vec<Level>,
}

impl Removal<'_> {
    fn fail(&self, what: &str, name: &CStr) -> impl FnOnce(Errno) -> RequestFailure + use<> {
        // Where in the tree it is may be longer than a message can say.
        match self.levels.is_empty() {
            true => failed(what, self.path),
            false => failed(&format!("{what} {} somewhere in", name.to_string_lossy()), self.path),
        }
    }

    /// Removes what is here by this name; if it is a directory, goes into it.
    fn take(&mut self, name: CString, tries: u32) -> Result<()> {
        match openat(&self.now, &name, DIRECTORY | OFlags::NOFOLLOW, Mode::empty()) {
            Ok(directory) => {
                let left = self.empty(&directory, &name)?;
                let stat = fstat(&directory).map_err(self.fail("looking at", &name))?;
                self.levels.push(Level {
                    name,
                    id: (stat.st_dev, stat.st_ino),
                    left,
                    tries,
                });
                self.now = directory;
                Ok(())
            }
            Err(Errno::NOENT) => Ok(()),
            Err(Errno::NOTDIR | Errno::LOOP) => match unlinkat(&self.now, &name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => Ok(()),
                Err(error) => Err(self.fail("removing", &name)(error)),
            },
            Err(error) => Err(self.fail("opening", &name)(error)),
        }
    }

    /// Removes everything in a directory but the directories, which are the answer.
    fn empty(&self, directory: &OwnedFd, name: &CStr) -> Result<Names> {
        let mut left = Names::default();
        // The same one, so that it is not read by two.
        let again = openat(directory, c".", DIRECTORY, Mode::empty()).map_err(self.fail("opening", name))?;
        for entry in entries(again).map_err(self.fail("listing", name))? {
            let entry = entry.map_err(self.fail("listing", name))?;
            let here = entry.file_name();
            if entry.file_type() == FileType::Directory {
                left.push(here);
                continue;
            }
            match unlinkat(directory, here, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                // A file system that does not say in a list what is a directory.
                Err(Errno::ISDIR) => left.push(here),
                Err(error) => return Err(self.fail("removing a file in", name)(error)),
            }
        }
        Ok(left)
    }

    /// Goes into the next directory, or removes the last level's, which is empty.
    fn step(&mut self) -> Result<()> {
        let Some(level) = self.levels.last_mut() else {
            return Ok(());
        };
        if let Some(name) = level.left.take() {
            let name = CString::new(name.as_bytes()).unwrap_or_default();
            return self.take(name, 0);
        }
        let above = openat(&self.now, c"..", DIRECTORY, Mode::empty()).map_err(self.fail("opening", c".."))?;
        let Some(done) = self.levels.pop() else {
            return Ok(());
        };
        let expected = self.levels.last().map_or(self.base, |level| level.id);
        if id(&above).map_err(self.fail("looking at", c".."))? != expected {
            return Err(RequestFailure {
                kind: RequestFailureKind::Other,
                message: format!(
                    "removing {}: a directory in it was moved away meanwhile; remove it again",
                    self.path.display()
                ),
            });
        }
        self.now = above;
        match unlinkat(&self.now, &done.name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(Errno::NOTEMPTY) if done.tries < MAX_TRIES => self.take(done.name, done.tries + 1),
            Err(error) => Err(self.fail("removing", &done.name)(error)),
        }
    }
}

fn id(directory: impl AsFd) -> std::result::Result<(u64, u64), Errno> {
    let stat = fstat(directory)?;
    Ok((stat.st_dev, stat.st_ino))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_tree_goes_deeper_than_any_path_and_what_links_lead_to_stays() {
        let directory = tempfile::tempdir().unwrap();
        let kept = directory.path().join("kept");
        std::fs::create_dir(&kept).unwrap();
        std::fs::write(kept.join("file"), "").unwrap();
        let top = directory.path().join("top");
        std::fs::create_dir(&top).unwrap();
        symlink(&kept, top.join("link")).unwrap();
        let mut now = openat(CWD, &top, DIRECTORY, Mode::empty()).unwrap();
        for _ in 0..6000 {
            rustix::fs::mkdirat(&now, "d", Mode::RWXU).unwrap();
            rustix::fs::symlinkat("..", &now, "up").unwrap();
            now = openat(&now, "d", DIRECTORY, Mode::empty()).unwrap();
        }
        drop(now);
        let remove = {
            let top = top.clone();
            move || remove_tree(&top)
        };
        let thread = std::thread::Builder::new().stack_size(crate::STACK_SIZE);
        thread.spawn(remove).unwrap().join().unwrap().unwrap();
        assert!(!top.exists() && kept.join("file").exists());
        remove_tree(&top).unwrap();
        remove_tree(&top.join("below/it")).unwrap();
        remove_tree(&kept.join("file/below")).unwrap();
        assert!(remove_tree(Path::new("/")).is_err());
    }

    #[test]
    fn a_link_to_a_directory_is_removed_itself() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("there")).unwrap();
        let link = directory.path().join("link");
        symlink("there", &link).unwrap();
        remove_tree(&link).unwrap();
        assert!(!link.is_symlink() && directory.path().join("there").exists());
    }
}
