//! Whose request it is: where its paths begin, and who owns what is made for it. The agent is root and checks no permissions of the user's:
//! whoever speaks to it may name any user.

use std::ffi::OsString;
use std::fs::{self, DirBuilder};
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use agent_api::{OsText, RequestFailure, RequestFailureKind};
use rustix::fs::{CWD, Gid, Mode, OFlags, Uid, fchown, fstat, openat};

use super::failure::{Result, failed, invalid, not_a_directory};
use crate::identity;

/// The longest path that the kernel takes (`PATH_MAX` without its zero).
pub(super) const MAX_PATH: usize = 4095;

/// How often a link leads to a link before that is taken for a circle, as the kernel does (path_resolution(7)).
const MAX_LINKS: usize = 40;

/// A request's user.
#[derive(Debug)]
pub(super) struct User {
    uid: u32,
    gid: u32,
    home: PathBuf,
}

impl User {
    /// By the root's `/etc/passwd` and `/etc/group`.
    pub(super) fn resolve(spec: Option<&str>) -> Result<Self> {
        let identity = identity::resolve(spec).map_err(|message| RequestFailure {
            kind: RequestFailureKind::NotFound,
            message,
        })?;
        Ok(Self {
            uid: identity.uid,
            gid: identity.gid,
            home: PathBuf::from(identity.home),
        })
    }

    /// The absolute path that is meant, without `.`, `..` and what is empty. `..` takes back the part before it, even where that is a
    /// link.
    pub(super) fn path(&self, text: &OsText) -> Result<PathBuf> {
        let text = Path::new(text.as_os_str());
        // What follows an absolute path takes its place; a home that is none begins in the root.
        let whole = match text.strip_prefix("~") {
            Ok(rest) => Path::new("/").join(&self.home).join(rest),
            Err(_) => Path::new("/").join(&self.home).join(text),
        };
        let bytes = whole.as_os_str().as_bytes();
        if bytes.contains(&0) {
            return Err(invalid(
                "a path has a zero byte in it, which no path can have".to_owned(),
            ));
        }
        let mut clean = PathBuf::from("/");
        for component in whole.components() {
            match component {
                Component::Normal(part) => clean.push(part),
                Component::ParentDir => drop(clean.pop()),
                Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
            }
        }
        if clean.as_os_str().len() > MAX_PATH {
            return Err(invalid(format!(
                "a path has {} bytes, Linux takes {MAX_PATH} at most: use a shorter one",
                clean.as_os_str().len()
            )));
        }
        Ok(clean)
    }

    /// Gives the user what was just made and is open.
    pub(super) fn own(&self, file: impl AsFd, path: &Path) -> Result<()> {
        let stat = fstat(&file).map_err(failed("looking at", path))?;
        if (stat.st_uid, stat.st_gid) == (self.uid, self.gid) {
            return Ok(());
        }
        let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
        fchown(file, Some(uid), Some(gid)).map_err(failed("changing the owner of", path))
    }

    /// Makes the directory and those above it that are missing.
    pub(super) fn make_directories(&self, path: &Path) -> Result<()> {
        let mut missing = Vec::new();
        for directory in path.ancestors() {
            match fs::metadata(directory) {
                Ok(data) if data.is_dir() => break,
                Ok(_) => return Err(not_a_directory(directory)),
                Err(error) if error.kind() == ErrorKind::NotFound => missing.push(directory),
                Err(error) => return Err(failed("looking at", directory)(error)),
            }
        }
        missing
            .into_iter()
            .rev()
            .try_for_each(|directory| self.make_directory(directory))
    }

    fn make_directory(&self, path: &Path) -> Result<()> {
        match DirBuilder::new().mode(0o755).create(path) {
            Ok(()) => {}
            // Somebody was quicker.
            Err(error) if error.kind() == ErrorKind::AlreadyExists && path.is_dir() => return Ok(()),
            Err(error) => return Err(failed("making the directory", path)(error)),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = openat(CWD, path, flags, Mode::empty()).map_err(failed("opening", path))?;
        self.own(directory, path)
    }
}

/// The directory that a path lies in.
pub(super) fn parent(path: &Path) -> Result<&Path> {
    path.parent()
        .ok_or_else(|| invalid("/ is there always: it is neither written, renamed nor removed".to_owned()))
}

/// Where links at the path's end lead in the end, whether something is there or not.
pub(super) fn follow(path: &Path) -> Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        // What is no link, or is not there, is the end.
        let Ok(target) = fs::read_link(&path) else {
            return Ok(path);
        };
        path = parent(&path)?.join(target);
    }
    Err(invalid(format!(
        "{}: more than {MAX_LINKS} links lead from one to the next",
        path.display()
    )))
}

/// A name beside the path that nobody else uses.
pub(super) fn beside(path: &Path) -> Result<PathBuf> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::SeqCst);
    let name = OsString::from(format!(".basalt.{}.{number}", std::process::id()));
    Ok(parent(path)?.join(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(home: &str) -> User {
        User {
            uid: 7,
            gid: 8,
            home: home.into(),
        }
    }

    #[test]
    fn paths_begin_where_they_say() {
        for (text, path) in [
            ("/a//b/", "/a/b"),
            ("/a/./../../b", "/b"),
            ("~", "/home/u"),
            ("~/", "/home/u"),
            ("~/x/..", "/home/u"),
            ("~//x", "/home/u/x"),
            ("", "/home/u"),
            (".", "/home/u"),
            ("x/y", "/home/u/x/y"),
            ("../x", "/home/x"),
            ("~x", "/home/u/~x"),
            ("/", "/"),
        ] {
            assert_eq!(user("/home/u").path(&text.into()).unwrap(), Path::new(path), "{text}");
        }
        assert_eq!(user("odd").path(&"x".into()).unwrap(), Path::new("/odd/x"));
        assert_eq!(user("").path(&"~/x".into()).unwrap(), Path::new("/x"));
    }

    #[test]
    fn what_no_path_can_be_is_said() {
        for text in ["/a\0b".to_owned(), "x/".repeat(3000)] {
            let failure = user("/").path(&text.into()).unwrap_err();
            assert_eq!(failure.kind, RequestFailureKind::Invalid, "{failure}");
        }
        assert!(user("/a\0").path(&"x".into()).is_err());
        assert!(user("/").path(&"/./".repeat(5000).into()).is_ok());
    }
}
