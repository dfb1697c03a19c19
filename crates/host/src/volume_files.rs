//! The files of a volume of a tenant's, asked for by paths of theirs while guests change what is there: no path leads out of the volume, no
//! symbolic link is followed out of it, nothing but regular files is opened, and whatever has no end is given up. Does not know whose
//! volume it is, nor how it came to be mounted.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use node_api::ErrorKind;
use node_api::tenant_volume::{FileAttributes, FileEntry, FileKind, FileRequest, MAX_DEPTH, MAX_ENTRIES, MAX_PATH};
use rustix::fs::{
    AtFlags, Dir, FileType, Gid, Mode, OFlags, RenameFlags, ResolveFlags, Stat, Uid, chownat, fstat, ftruncate,
    mkdirat, openat2, readlinkat, renameat_with, statat, unlinkat,
};
use rustix::io::Errno;

use crate::tree;

/// How long what was a directory may take to be removed: then the rest is removed when the volume is opened the next time.
const REMOVAL: Duration = Duration::from_secs(60);

/// Bytes of all paths of one list.
const MAX_TEXT: usize = 4 << 20;

/// Bits of a mode that can be set.
const MODE: u32 = 0o7777;

const NEW_FILE: u32 = 0o644;
const NEW_DIRECTORY: u32 = 0o755;

/// Why something was not done with a file.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// What is asked for cannot be.
    #[error("{0}")]
    Invalid(String),
    /// There is nothing.
    #[error("there is no `{0}` in the volume")]
    Missing(String),
    /// There is something already.
    #[error("`{0}` is there already: remove it first, or say that it is to be replaced (`force`)")]
    Exists(String),
    /// The volume has no space.
    #[error("the volume is full: remove something in it")]
    Full,
    /// The host had no space for what was written to the volume.
    #[error(
        "the volume takes no changes, as its host had no space for some: once there is space it takes them again when it is needed next and no sandbox runs that has it, so end or pause those"
    )]
    Stuck,
    /// Something takes too long.
    #[error("a directory is being filled while it is removed: what is left of it is out of the volume's sight already")]
    Endless,
    /// The host failed.
    #[error("cannot {doing} `{path}` in a volume: {cause}")]
    Host {
        /// What was to be done.
        doing: &'static str,
        /// The path.
        path: String,
        /// What the kernel said.
        #[source]
        cause: io::Error,
    },
}

impl FilesError {
    /// What kind of refusal it is.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Invalid(_) => ErrorKind::Invalid,
            Self::Missing(_) => ErrorKind::NotFound,
            Self::Exists(_) | Self::Full | Self::Stuck | Self::Endless => ErrorKind::Conflict,
            Self::Host { .. } => ErrorKind::Host,
        }
    }
}

/// What came of a request.
#[derive(Debug)]
pub enum Done {
    /// It is done.
    Nothing,
    /// What is there, and its descriptor if it was asked for.
    File(Box<FileEntry>, Option<OwnedFd>),
    /// What is in a directory.
    List(Vec<FileEntry>),
}

/// A volume's files.
#[derive(Debug)]
pub struct VolumeFiles {
    /// The volume's root.
    root: OwnedFd,
    /// A directory of the same file system that no guest sees.
    trash: OwnedFd,
}

impl VolumeFiles {
    /// Those below `root`; `trash` is a directory beside it, in which nothing is kept.
    ///
    /// # Errors
    /// They cannot be opened.
    pub fn open(root: &Path, trash: &Path) -> io::Result<Self> {
        let open = |path: &Path| {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            rustix::fs::open(path, flags, Mode::empty())
        };
        Ok(Self {
            root: open(root)?,
            trash: open(trash)?,
        })
    }

    /// The volume's root.
    #[must_use]
    pub fn into_root(self) -> OwnedFd {
        self.root
    }

    /// Carries a request out.
    ///
    /// # Errors
    /// [`FilesError`].
    pub fn carry_out(&self, request: &FileRequest) -> Result<Done, FilesError> {
        let file = |entry, fd| Done::File(Box::new(entry), fd);
        match request {
            FileRequest::Stat { path } => Ok(file(self.stat(&Parts::of(path)?)?, None)),
            FileRequest::List { path, depth } => self.list(&Parts::of(path)?, *depth).map(Done::List),
            FileRequest::MakeDirectory {
                path,
                attributes,
                force,
            } => Ok(file(self.make_directory(&Parts::of(path)?, *attributes, *force)?, None)),
            FileRequest::Update { path, attributes } => {
                let parts = Parts::of(path)?;
                let there = self.open_link(&parts)?;
                apply(&there, *attributes).map_err(parts.failed("change"))?;
                Ok(file(entry(&there, &parts).map_err(parts.failed("look at"))?, None))
            }
            FileRequest::Remove { path } => self.remove(&Parts::of(path)?).map(|()| Done::Nothing),
            FileRequest::Read { path } => {
                let (entry, fd) = self.read(&Parts::of(path)?)?;
                Ok(file(entry, Some(fd)))
            }
            FileRequest::Write {
                path,
                attributes,
                force,
            } => {
                let (entry, fd) = self.write(&Parts::of(path)?, *attributes, *force)?;
                Ok(file(entry, Some(fd)))
            }
        }
    }

    /// What these parts lead to, opened as a place alone.
    fn place(&self, parts: &[&str], more: OFlags) -> Result<OwnedFd, Errno> {
        below(self.root.as_fd(), &joined(parts), OFlags::PATH | more)
    }

    /// The same; a symbolic link at its end is what is opened.
    fn open_link(&self, parts: &Parts<'_>) -> Result<OwnedFd, FilesError> {
        self.place(&parts.all, OFlags::NOFOLLOW).map_err(parts.failed("open"))
    }

    fn stat(&self, parts: &Parts<'_>) -> Result<FileEntry, FilesError> {
        let there = self.open_link(parts)?;
        entry(&there, parts).map_err(parts.failed("look at"))
    }

    fn list(&self, parts: &Parts<'_>, depth: u32) -> Result<Vec<FileEntry>, FilesError> {
        if depth == 0 || depth > MAX_DEPTH {
            return Err(FilesError::Invalid(format!("`depth` is from 1 to {MAX_DEPTH}")));
        }
        let top = below(
            self.root.as_fd(),
            &joined(&parts.all),
            OFlags::RDONLY | OFlags::DIRECTORY,
        );
        let mut listing = Listing::default();
        listing.go(&top.map_err(parts.failed("list"))?, &parts.path(), depth)?;
        Ok(listing.entries)
    }

    fn make_directory(
        &self,
        parts: &Parts<'_>,
        attributes: FileAttributes,
        force: bool,
    ) -> Result<FileEntry, FilesError> {
        let Some((name, above)) = parts.all.split_last() else {
            return match force {
                true => self.stat(parts),
                false => Err(FilesError::Exists("/".into())),
            };
        };
        let parent = self.directory_above(parts, above, force)?;
        let made = match mkdirat(&parent, *name, Mode::RWXU) {
            Ok(()) => true,
            Err(Errno::EXIST) if force => false,
            Err(error) => return Err(parts.failed("make")(error)),
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW;
        let there = within(parent.as_fd(), name, flags).map_err(parts.failed("make"))?;
        let attributes = match made {
            true => attributes.or_mode(NEW_DIRECTORY),
            false => attributes,
        };
        apply(&there, attributes).map_err(parts.failed("change"))?;
        entry(&there, parts).map_err(parts.failed("look at"))
    }

    /// The directory that something is to be made in; made too, with those above it, if `make`.
    fn directory_above(&self, parts: &Parts<'_>, above: &[&str], make: bool) -> Result<OwnedFd, FilesError> {
        let open = |parts: &[&str]| self.place(parts, OFlags::DIRECTORY);
        let missing = |error| match error {
            Errno::NOENT => FilesError::Missing(format!("/{}", above.join("/"))),
            other => parts.failed("open")(other),
        };
        match open(above) {
            Err(Errno::NOENT) if make => (),
            opened => return opened.map_err(missing),
        }
        let mut parent = open(&[]).map_err(missing)?;
        for end in 1..=above.len() {
            let (so_far, name) = (above.get(..end).unwrap_or(above), above.get(end - 1).unwrap_or(&"."));
            parent = match open(so_far) {
                Err(Errno::NOENT) => {
                    match mkdirat(&parent, *name, Mode::RWXU) {
                        // Somebody was quicker.
                        Ok(()) | Err(Errno::EXIST) => (),
                        Err(error) => return Err(parts.failed("make")(error)),
                    }
                    let made = open(so_far).map_err(missing)?;
                    apply(&made, FileAttributes::default().or_mode(NEW_DIRECTORY)).map_err(parts.failed("change"))?;
                    made
                }
                opened => opened.map_err(missing)?,
            };
        }
        Ok(parent)
    }

    fn read(&self, parts: &Parts<'_>) -> Result<(FileEntry, OwnedFd), FilesError> {
        let there = self.place(&parts.all, OFlags::empty()).map_err(parts.failed("open"))?;
        let entry = entry(&there, parts).map_err(parts.failed("look at"))?;
        require_regular(entry.kind, parts)?;
        // It is what it was looked at as: a place leads to the same file for ever.
        let open = rustix::fs::open(again(&there), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        Ok((entry, open.map_err(parts.failed("open"))?))
    }

    fn write(
        &self,
        parts: &Parts<'_>,
        attributes: FileAttributes,
        force: bool,
    ) -> Result<(FileEntry, OwnedFd), FilesError> {
        let Some((name, above)) = parts.all.split_last() else {
            return Err(FilesError::Invalid("`/` is the volume itself, and no file".into()));
        };
        let parent = self.directory_above(parts, above, force)?;
        // Nobody waits for the other end of a FIFO.
        let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
        let make = within(parent.as_fd(), name, flags | OFlags::CREATE | OFlags::EXCL);
        let (fd, attributes) = match make {
            Ok(fd) => (fd, attributes.or_mode(NEW_FILE)),
            Err(Errno::EXIST) if force => match within(parent.as_fd(), name, flags) {
                Ok(fd) => (fd, attributes),
                Err(Errno::LOOP | Errno::NXIO | Errno::ISDIR) => return Err(not_regular(parts)),
                Err(error) => return Err(parts.failed("open")(error)),
            },
            Err(error) => return Err(parts.failed("make")(error)),
        };
        let kind = kind(fstat(&fd).map_err(parts.failed("look at"))?.st_mode);
        require_regular(kind, parts)?;
        ftruncate(&fd, 0).map_err(parts.failed("empty"))?;
        apply(&fd, attributes).map_err(parts.failed("change"))?;
        Ok((entry(&fd, parts).map_err(parts.failed("look at"))?, fd))
    }

    /// Removes something: out of the volume's sight first, so that it is gone at once, and whole.
    fn remove(&self, parts: &Parts<'_>) -> Result<(), FilesError> {
        let Some((name, above)) = parts.all.split_last() else {
            return Err(FilesError::Invalid(
                "`/` is the volume itself: remove what is in it, or the volume".into(),
            ));
        };
        let parent = self.place(above, OFlags::DIRECTORY).map_err(parts.failed("remove"))?;
        match unlinkat(&parent, *name, AtFlags::empty()) {
            Err(Errno::ISDIR) => (),
            done => return done.map_err(parts.failed("remove")),
        }
        let mut random = [0; 8];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty()).map_err(parts.failed("remove"))?;
        let hidden = format!("{:016x}", u64::from_ne_bytes(random));
        renameat_with(&parent, *name, &self.trash, &hidden, RenameFlags::NOREPLACE).map_err(parts.failed("remove"))?;
        self.empty(&hidden, REMOVAL).map_err(|error| match error.kind() {
            io::ErrorKind::TimedOut => FilesError::Endless,
            _ => parts.host("remove", error),
        })
    }

    fn empty(&self, hidden: &str, limit: Duration) -> io::Result<()> {
        match tree::remove_within(&again(&self.trash).join(hidden), limit) {
            // Somebody else has done it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done,
        }
    }

    /// Removes what earlier removals have left.
    ///
    /// # Errors
    /// It cannot be, or not within that time; what is left stays for the next time.
    pub fn empty_trash(&self, limit: Duration) -> io::Result<()> {
        let began = Instant::now();
        let trash = within(self.trash.as_fd(), ".", OFlags::RDONLY | OFlags::DIRECTORY)?;
        for left in Dir::read_from(&trash)? {
            let left = left?;
            let name = left.file_name();
            if name != c"." && name != c".." {
                self.empty(&name.to_string_lossy(), limit.saturating_sub(began.elapsed()))?;
            }
        }
        Ok(())
    }
}

/// A path, by its parts.
struct Parts<'p> {
    all: Vec<&'p str>,
}

impl<'p> Parts<'p> {
    fn of(path: &'p str) -> Result<Self, FilesError> {
        let refused = |why: String| Err(FilesError::Invalid(why));
        if path.is_empty() || path.len() > MAX_PATH || path.contains('\0') {
            return refused(format!(
                "a path in a volume has 1 to {MAX_PATH} bytes, and no zero character"
            ));
        }
        let all: Vec<_> = path
            .split('/')
            .filter(|part| !part.is_empty() && *part != ".")
            .collect();
        if all.contains(&"..") {
            return refused(format!("`{path}` has `..` in it: give the path that is meant"));
        }
        Ok(Self { all })
    }

    /// From the root on.
    fn path(&self) -> String {
        format!("/{}", self.all.join("/"))
    }

    /// What it is that an error is about.
    fn failed(&self, doing: &'static str) -> impl FnOnce(Errno) -> FilesError {
        let path = self.path();
        move |error| match error {
            Errno::NOENT => FilesError::Missing(path),
            Errno::EXIST => FilesError::Exists(path),
            Errno::NOSPC | Errno::DQUOT => FilesError::Full,
            Errno::ROFS => FilesError::Stuck,
            Errno::NOTDIR => FilesError::Invalid(format!("`{path}` is no directory, or leads through what is none")),
            Errno::LOOP | Errno::XDEV => FilesError::Invalid(format!(
                "`{path}` leads through symbolic links without an end, or out of the volume"
            )),
            Errno::NAMETOOLONG => FilesError::Invalid(format!("a part of `{path}` has more than 255 bytes")),
            Errno::ISDIR => FilesError::Invalid(format!("`{path}` is a directory")),
            // Of a symbolic link.
            Errno::OPNOTSUPP => FilesError::Invalid(format!("`{path}` has no mode of its own")),
            other => host(doing, path, other.into()),
        }
    }

    fn host(&self, doing: &'static str, cause: io::Error) -> FilesError {
        host(doing, self.path(), cause)
    }
}

fn host(doing: &'static str, path: String, cause: io::Error) -> FilesError {
    FilesError::Host { doing, path, cause }
}

fn joined(parts: &[&str]) -> String {
    match parts {
        [] => ".".to_owned(),
        some => some.join("/"),
    }
}

/// Opens a path below a directory; its symbolic links are seen as if that directory were the root.
fn below(top: BorrowedFd<'_>, path: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_XDEV | ResolveFlags::NO_MAGICLINKS;
    openat2(top, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve)
}

/// Opens what has a name in a directory, or makes it if the flags say so.
fn within(directory: BorrowedFd<'_>, name: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_XDEV | ResolveFlags::NO_MAGICLINKS;
    // Another mode than none is refused where nothing can be made.
    let mode = match flags.contains(OFlags::CREATE) {
        true => Mode::RUSR | Mode::WUSR,
        false => Mode::empty(),
    };
    openat2(directory, name, flags | OFlags::CLOEXEC, mode, resolve)
}

/// A path to what is open.
fn again(fd: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

fn apply(fd: &OwnedFd, attributes: FileAttributes) -> Result<(), Errno> {
    let FileAttributes { uid, gid, mode } = attributes;
    if uid == Some(u32::MAX) || gid == Some(u32::MAX) {
        return Err(Errno::INVAL);
    }
    if uid.is_some() || gid.is_some() {
        let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
        chownat(fd, c"", uid, gid, AtFlags::EMPTY_PATH)?;
    }
    match mode {
        Some(mode) => rustix::fs::chmod(again(fd), Mode::from_raw_mode(mode & MODE)),
        None => Ok(()),
    }
}

fn kind(mode: u32) -> FileKind {
    match FileType::from_raw_mode(mode) {
        FileType::RegularFile => FileKind::File,
        FileType::Directory => FileKind::Directory,
        FileType::Symlink => FileKind::Symlink,
        _ => FileKind::Other,
    }
}

fn require_regular(kind: FileKind, parts: &Parts<'_>) -> Result<(), FilesError> {
    match kind {
        FileKind::File => Ok(()),
        _ => Err(not_regular(parts)),
    }
}

fn not_regular(parts: &Parts<'_>) -> FilesError {
    FilesError::Invalid(format!("`{}` is no regular file", parts.path()))
}

fn nanoseconds(seconds: i64, nanoseconds: u64) -> u64 {
    let seconds = u64::try_from(seconds).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds)
}

fn describe(stat: &Stat, name: String, path: String, target: Option<String>) -> FileEntry {
    FileEntry {
        name,
        path,
        kind: kind(stat.st_mode),
        size: u64::try_from(stat.st_size).unwrap_or(0),
        mode: stat.st_mode & MODE,
        uid: stat.st_uid,
        gid: stat.st_gid,
        accessed_ns: nanoseconds(stat.st_atime, stat.st_atime_nsec),
        modified_ns: nanoseconds(stat.st_mtime, stat.st_mtime_nsec),
        changed_ns: nanoseconds(stat.st_ctime, stat.st_ctime_nsec),
        target,
    }
}

/// What is open.
fn entry(fd: &OwnedFd, parts: &Parts<'_>) -> Result<FileEntry, Errno> {
    let stat = fstat(fd)?;
    let target = match kind(stat.st_mode) {
        FileKind::Symlink => Some(link(fd.as_fd(), c"")?),
        _ => None,
    };
    let name = parts.all.last().map_or("/", |name| *name);
    Ok(describe(&stat, name.to_owned(), parts.path(), target))
}

fn link(place: BorrowedFd<'_>, name: &CStr) -> Result<String, Errno> {
    Ok(readlinkat(place, name, Vec::new())?.to_string_lossy().into_owned())
}

/// A list that is being made.
#[derive(Default)]
struct Listing {
    entries: Vec<FileEntry>,
    /// How many were found, those that wait for their turn too; and bytes of what they say.
    found: usize,
    text: usize,
}

impl Listing {
    /// Adds what is in a directory, and in those below it.
    fn go(&mut self, directory: &OwnedFd, path: &str, depth: u32) -> Result<(), FilesError> {
        let failed = |error: Errno| host("list", path.to_owned(), error.into());
        let mut found = Vec::new();
        for entry in Dir::read_from(directory).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            let Some(one) = describe_in(directory, name, path).map_err(failed)? else {
                continue;
            };
            self.found += 1;
            self.text += one.path.len() + one.target.as_ref().map_or(0, String::len);
            if self.found > MAX_ENTRIES || self.text > MAX_TEXT {
                return Err(FilesError::Invalid(format!(
                    "there are more than {MAX_ENTRIES} files, or their paths have more than {MAX_TEXT} bytes: list directories below, or with a smaller `depth`"
                )));
            }
            found.push((name.to_owned(), one));
        }
        found.sort_by(|(one, _), (other, _)| one.cmp(other));
        for (name, one) in found {
            let (is_directory, path) = (one.kind == FileKind::Directory, one.path.clone());
            self.entries.push(one);
            if !is_directory || depth == 1 {
                continue;
            }
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_XDEV;
            match openat2(directory, name.as_c_str(), flags, Mode::empty(), resolve) {
                Ok(below) => self.go(&below, &path, depth - 1)?,
                // Somebody was quicker.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => (),
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(())
    }
}

/// What has a name in a directory; `None` if it has gone.
fn describe_in(directory: &OwnedFd, name: &CStr, above: &str) -> Result<Option<FileEntry>, Errno> {
    let gone = |error| match error {
        Errno::NOENT | Errno::INVAL => Ok(None),
        other => Err(other),
    };
    let stat = match statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => stat,
        Err(error) => return gone(error),
    };
    let target = match kind(stat.st_mode) {
        FileKind::Symlink => match link(directory.as_fd(), name) {
            Ok(target) => Some(target),
            // Or it is another file by now.
            Err(error) => return gone(error),
        },
        _ => None,
    };
    let name = name.to_string_lossy().into_owned();
    let path = format!("{}/{name}", above.trim_end_matches('/'));
    Ok(Some(describe(&stat, name, path, target)))
}

#[cfg(test)]
mod tests;
