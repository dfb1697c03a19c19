//! Where an archive's names lead: beneath one directory and never out of it, whatever links are on the way. Knows no tar.

use std::ffi::{CString, OsStr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, mkdirat, openat, openat2};
use rustix::io::Errno;

use crate::{Error, MAX_DEPTH, ROOT};

/// Where a stream goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// Its one tree, whose root is called [`ROOT`] in it, becomes this path. The directory above must be there; a link at the
    /// path itself is replaced or refused, not followed.
    Root(PathBuf),
    /// What is in its one tree, whose root is a directory called [`ROOT`], goes into this directory, which must be there.
    Into(PathBuf),
    /// Whatever is in it goes below this directory, which must be there.
    Below(PathBuf),
}

/// A file's directory, open, and its name in it.
pub(crate) struct Place {
    pub(crate) directory: OwnedFd,
    pub(crate) name: CString,
    /// For messages.
    pub(crate) path: PathBuf,
}

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// Links are followed where they stay beneath; the kernel sees to it.
const BENEATH: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_MAGICLINKS);

/// Where one name leads.
pub(crate) enum Lead {
    /// To the tree's root, which does not lie in the base.
    Root(Place),
    /// To the base itself, which is as it is.
    Base,
    /// Beneath the base: by this path.
    Beneath(PathBuf),
}

/// The directory that everything goes beneath.
pub(crate) struct Base {
    target: Target,
    /// For a root, once it is there and is a directory.
    directory: Option<OwnedFd>,
    /// The directory that the last name was in; the next is likely to be there, too.
    last: Option<(PathBuf, OwnedFd)>,
}

impl Base {
    pub(crate) fn open(target: &Target) -> Result<Self, Error> {
        let directory = match target {
            Target::Root(_) => None,
            Target::Into(path) | Target::Below(path) => {
                Some(openat(CWD, path, DIRECTORY, Mode::empty()).map_err(Error::file("opening", path))?)
            }
        };
        Ok(Self {
            target: target.clone(),
            directory,
            last: None,
        })
    }

    fn path(&self) -> &Path {
        match &self.target {
            Target::Root(path) | Target::Into(path) | Target::Below(path) => path,
        }
    }

    /// Where `name`, as it stands in the archive, leads.
    pub(crate) fn lead(&self, name: &Path) -> Result<Lead, Error> {
        let mut plain = PathBuf::new();
        for (index, component) in name.components().enumerate() {
            match component {
                Component::Normal(part) if index < MAX_DEPTH => plain.push(part),
                Component::Normal(_) => return Err(Error::TooDeep(name.to_owned())),
                Component::CurDir | Component::RootDir => (),
                Component::ParentDir | Component::Prefix(_) => return Err(Error::Outside(name.to_owned())),
            }
        }
        if plain.as_os_str().as_bytes().contains(&0) {
            return Err(Error::Outside(name.to_owned()));
        }
        match &self.target {
            Target::Below(_) if plain.as_os_str().is_empty() => Ok(Lead::Base),
            Target::Below(_) => Ok(Lead::Beneath(plain)),
            Target::Into(_) => match below_root(&plain, name)? {
                rest if rest.as_os_str().is_empty() => Ok(Lead::Base),
                rest => Ok(Lead::Beneath(rest.to_owned())),
            },
            Target::Root(path) => {
                let rest = below_root(&plain, name)?;
                match (&self.directory, rest.as_os_str().is_empty()) {
                    (None, true) => Ok(Lead::Root(root(path)?)),
                    // The root comes once, and first.
                    (Some(_), true) | (None, false) => Err(Error::Outside(name.to_owned())),
                    (Some(_), false) => Ok(Lead::Beneath(rest.to_owned())),
                }
            }
        }
    }

    /// The root has become a directory, or was one: the rest goes beneath it.
    pub(crate) fn enter(&mut self, root: &Place) -> Result<(), Error> {
        let flags = DIRECTORY | OFlags::NOFOLLOW;
        let opened = openat(&root.directory, &root.name, flags, Mode::empty());
        self.directory = Some(opened.map_err(Error::file("opening", &root.path))?);
        Ok(())
    }

    fn base(&self) -> Result<&OwnedFd, Error> {
        self.directory
            .as_ref()
            .ok_or_else(|| Error::Outside(self.path().to_owned()))
    }

    /// Opens a directory beneath.
    pub(crate) fn directory(&self, path: &Path) -> Result<OwnedFd, Errno> {
        let Some(base) = &self.directory else {
            return Err(Errno::NOENT);
        };
        let path = if path.as_os_str().is_empty() {
            Path::new(".")
        } else {
            path
        };
        openat2(base, path, DIRECTORY, Mode::empty(), BENEATH)
    }

    /// The place of a path beneath; directories on the way that are not in the archive are made.
    pub(crate) fn place(&mut self, path: &Path) -> Result<Place, Error> {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(Error::Outside(path.to_owned()));
        };
        let whole = self.path().join(path);
        if self.last.as_ref().is_none_or(|(last, _)| last != parent) {
            let directory = self.make(parent)?;
            self.last = Some((parent.to_owned(), directory));
        }
        let Some((_, directory)) = &self.last else {
            return Err(Error::Outside(whole));
        };
        let again = directory.try_clone().map_err(|cause| Error::File {
            what: "opening",
            path: whole.clone(),
            cause,
        })?;
        Ok(Place {
            directory: again,
            name: c_string(name)?,
            path: whole,
        })
    }

    /// Opens a directory beneath, which is made with those above it if it is missing.
    fn make(&self, path: &Path) -> Result<OwnedFd, Error> {
        let whole = || self.path().join(path);
        match self.directory(path) {
            Ok(directory) => return Ok(directory),
            Err(Errno::NOENT) => (),
            Err(error) => return Err(not_beneath(error, whole())),
        }
        let mut now = self.base()?.try_clone().map_err(|cause| Error::File {
            what: "opening",
            path: whole(),
            cause,
        })?;
        let mut so_far = PathBuf::new();
        for part in path {
            so_far.push(part);
            now = match self.directory(&so_far) {
                Err(Errno::NOENT) => {
                    mkdirat(&now, part, Mode::from_raw_mode(0o755)).map_err(Error::file("making", &whole()))?;
                    self.directory(&so_far).map_err(|error| not_beneath(error, whole()))?
                }
                other => other.map_err(|error| not_beneath(error, whole()))?,
            };
        }
        Ok(now)
    }
}

/// The rest of a name whose first part is [`ROOT`].
fn below_root<'p>(plain: &'p Path, name: &Path) -> Result<&'p Path, Error> {
    plain.strip_prefix(ROOT).map_err(|_| Error::Outside(name.to_owned()))
}

/// XDEV: out of the base. LOOP: by a link of /proc, or round and round.
fn not_beneath(error: Errno, path: PathBuf) -> Error {
    match error {
        Errno::XDEV | Errno::LOOP => Error::Outside(path),
        Errno::NOTDIR => Error::InTheWay {
            path,
            there: "no directory",
            wanted: "one",
        },
        error => Error::file("opening", &path)(error),
    }
}

/// The place of a tree's root.
fn root(path: &Path) -> Result<Place, Error> {
    let name = path.file_name().ok_or_else(|| Error::InTheWay {
        path: path.to_owned(),
        there: "a directory without a name",
        wanted: "anything else",
    })?;
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    Ok(Place {
        directory: openat(CWD, parent, DIRECTORY, Mode::empty()).map_err(Error::file("opening", parent))?,
        name: c_string(name)?,
        path: path.to_owned(),
    })
}

fn c_string(name: &OsStr) -> Result<CString, Error> {
    CString::new(name.as_bytes()).map_err(|_| Error::Outside(name.into()))
}

impl AsFd for Place {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.directory.as_fd()
    }
}
