//! Removing a tree that a guest has shaped: as deep and as wide as it likes, with whatever links. Takes few descriptors, and
//! memory and stack that do not depend on the tree; follows no link and leads nowhere by path. Does not know whose tree it is.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags, RenameFlags, openat, renameat_with, unlinkat};
use rustix::io::Errno;

/// How many directories are remembered to be emptied next; those beyond are found again.
const MAX_NEXT: usize = 1024;

/// Removes a directory with all that is in it, or whatever else is there. Nobody must change the tree meanwhile.
///
/// Nothing goes down into the tree: directories that are found one level below the top are moved up into it, until there
/// are none left.
///
/// # Errors
/// There is nothing, or it cannot be removed; what was removed until then is gone.
pub fn remove(path: &Path) -> io::Result<()> {
    remove_until(path, None)
}

/// The same of a tree that somebody may change meanwhile, who could go on with that for ever.
///
/// # Errors
/// The same; `TimedOut` where it is not done within that time.
pub fn remove_within(path: &Path, limit: Duration) -> io::Result<()> {
    remove_until(path, Instant::now().checked_add(limit))
}

fn remove_until(path: &Path, end: Option<Instant>) -> io::Result<()> {
    let top = match directory(CWD, path) {
        Err(Errno::NOTDIR | Errno::LOOP) => return Ok(unlinkat(CWD, path, AtFlags::empty())?),
        top => top?,
    };
    let mut removal = Removal {
        names: Names::new()?,
        next: Vec::new(),
        progress: false,
        failed: None,
        top,
        end,
    };
    removal.run()?;
    Ok(unlinkat(CWD, path, AtFlags::REMOVEDIR)?)
}

fn directory<P: rustix::path::Arg>(place: BorrowedFd<'_>, name: P) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(place, name, flags, Mode::empty())
}

/// Names that nothing in the tree has: a guest cannot guess their beginning.
struct Names {
    beginning: u64,
    count: u64,
}

impl Names {
    fn new() -> Result<Self, Errno> {
        let mut bytes = [0; 8];
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
        Ok(Self {
            beginning: u64::from_ne_bytes(bytes),
            count: 0,
        })
    }

    fn next(&mut self) -> String {
        self.count += 1;
        format!("{:016x}-{}", self.beginning, self.count)
    }
}

struct Removal {
    top: OwnedFd,
    names: Names,
    /// Directories in the top that were moved there; the last one is next.
    next: Vec<CString>,
    /// Something was removed or moved since the top was last looked through.
    progress: bool,
    /// Why the first thing that stayed where it was did.
    failed: Option<Errno>,
    /// When it is given up.
    end: Option<Instant>,
}

impl Removal {
    /// Empties the top.
    fn run(&mut self) -> Result<(), Errno> {
        loop {
            (self.progress, self.failed) = (false, None);
            let mut empty = true;
            for entry in Dir::read_from(&self.top)? {
                let entry = entry?;
                if is_link_of_tree(entry.file_name()) {
                    continue;
                }
                empty = false;
                self.take_away(entry.file_name());
                while let Some(name) = self.next.pop() {
                    self.has_time()?;
                    self.take_away(&name);
                }
                self.has_time()?;
            }
            if empty {
                return Ok(());
            }
            // A full disk or a full directory may refuse one thing as long as others are not gone.
            if !self.progress {
                return Err(self.failed.unwrap_or(Errno::NOTEMPTY));
            }
        }
    }

    fn has_time(&self) -> Result<(), Errno> {
        match self.end.is_some_and(|end| Instant::now() >= end) {
            true => Err(Errno::TIMEDOUT),
            false => Ok(()),
        }
    }

    /// Removes what has this name in the top; of a directory only its own level.
    fn take_away(&mut self, name: &CStr) {
        let done = match unlinkat(&self.top, name, AtFlags::empty()) {
            Err(Errno::ISDIR) => self.take_level(name),
            other => other,
        };
        self.note(done);
    }

    fn note(&mut self, done: Result<(), Errno>) {
        match done {
            Ok(()) => self.progress = true,
            // Found twice, once where it was moved to.
            Err(Errno::NOENT) => (),
            Err(error) => {
                self.failed.get_or_insert(error);
            }
        }
    }

    /// Removes files and empty directories in a directory of the top, moves the other directories up, and then removes it.
    fn take_level(&mut self, name: &CStr) -> Result<(), Errno> {
        let level = directory(self.top.as_fd(), name)?;
        for entry in Dir::read_from(&level)? {
            let entry = entry?;
            self.has_time()?;
            if is_link_of_tree(entry.file_name()) {
                continue;
            }
            let done = match unlinkat(&level, entry.file_name(), AtFlags::empty()) {
                Err(Errno::ISDIR) => match unlinkat(&level, entry.file_name(), AtFlags::REMOVEDIR) {
                    Err(Errno::NOTEMPTY | Errno::EXIST) => self.move_up(&level, entry.file_name()),
                    other => other,
                },
                other => other,
            };
            self.note(done);
        }
        match unlinkat(&self.top, name, AtFlags::REMOVEDIR) {
            // Something could not be moved, which is noted, or was not told while others went: it is its turn again.
            Err(Errno::NOTEMPTY | Errno::EXIST) if self.progress => Ok(()),
            other => other,
        }
    }

    fn move_up(&mut self, level: &OwnedFd, name: &CStr) -> Result<(), Errno> {
        loop {
            let fresh = self.names.next();
            match renameat_with(level, name, &self.top, &fresh, RenameFlags::NOREPLACE) {
                Err(Errno::EXIST) => (),
                Err(error) => return Err(error),
                Ok(()) => {
                    if self.next.len() < MAX_NEXT
                        && let Ok(fresh) = CString::new(fresh)
                    {
                        self.next.push(fresh);
                    }
                    return Ok(());
                }
            }
        }
    }
}

fn is_link_of_tree(name: &CStr) -> bool {
    name == c"." || name == c".."
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use rustix::fs::mkdirat;

    use super::*;

    /// A chain of directories, as only whoever goes by descriptors can make it, each with a file.
    fn chain(top: &Path, depth: usize) {
        let mut place = directory(CWD, top).unwrap();
        for _ in 0..depth {
            let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
            openat(&place, "file", flags, Mode::RUSR).unwrap();
            mkdirat(&place, "d", Mode::RWXU).unwrap();
            place = directory(place.as_fd(), "d").unwrap();
        }
    }

    /// In a thread whose stack has no room for a frame a level.
    fn with_a_small_stack(work: impl FnOnce() -> io::Result<()> + Send + 'static) -> io::Result<()> {
        let thread = std::thread::Builder::new().stack_size(128 << 10);
        thread.spawn(work).unwrap().join().unwrap()
    }

    #[test]
    fn a_tree_may_be_deeper_than_stack_and_descriptors_reach() {
        let directory = tempfile::tempdir().unwrap();
        let tree = directory.path().join("tree");
        fs::create_dir(&tree).unwrap();
        chain(&tree, 5000);
        let gone = tree.clone();
        with_a_small_stack(move || remove(&tree)).unwrap();
        assert!(!gone.exists());
    }

    #[test]
    fn a_tree_may_be_wide_and_links_lead_nowhere() {
        let directory = tempfile::tempdir().unwrap();
        let tree = directory.path().join("tree");
        let outside = directory.path().join("outside");
        fs::create_dir_all(outside.join("kept")).unwrap();
        for number in 0..MAX_NEXT + 500 {
            let place = tree.join(format!("wide/{number}/below"));
            fs::create_dir_all(&place).unwrap();
            symlink(&outside, place.join("link")).unwrap();
        }
        symlink(&outside, tree.join("link")).unwrap();
        symlink("nowhere", tree.join("wide/link")).unwrap();
        remove(&tree).unwrap();
        assert!(!tree.exists() && outside.join("kept").exists());
        // A link itself, a file, and nothing.
        symlink(&outside, &tree).unwrap();
        remove(&tree).unwrap();
        fs::write(&tree, "x").unwrap();
        remove(&tree).unwrap();
        assert!(outside.join("kept").exists());
        assert_eq!(remove(&tree).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_removal_ends_when_its_time_is_over() {
        let directory = tempfile::tempdir().unwrap();
        let tree = directory.path().join("tree");
        fs::create_dir_all(tree.join("below/deep")).unwrap();
        let error = remove_within(&tree, Duration::ZERO).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        remove_within(&tree, Duration::from_secs(60)).unwrap();
        assert!(!tree.exists());
    }

    #[test]
    fn what_cannot_be_removed_is_told() {
        // The kernel's: its directories cannot be removed by anybody.
        let error = remove(Path::new("/proc/self/ns")).unwrap_err();
        assert_ne!(error.kind(), io::ErrorKind::NotFound, "{error}");
    }
}
