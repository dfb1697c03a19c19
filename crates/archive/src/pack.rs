//! A tree becomes a tar stream. Links are packed as links and never followed; devices, pipes, sockets and the kernel's own file
//! systems are left out and counted. Directories are walked by descriptors, so that what is moved meanwhile leads nowhere else.

use std::collections::HashMap;
use std::ffi::{CStr, CString, OsStr};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, fstat, fstatfs, openat, readlinkat, statat};
use tar::{Builder, EntryType, Header};

use crate::holes::{self, Data, Part};
use crate::{Error, MAX_DEPTH};

/// File systems that are the kernel's own words, by their numbers in linux/magic.h: proc, sysfs, cgroup2, devpts.
const KERNELS_OWN: [u64; 4] = [0x9fa0, 0x6265_6572, 0x6367_7270, 0x1cd1];

/// What a tree is, roughly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measured {
    /// It is a directory, and not a single file or link.
    pub directory: bool,
    /// Bytes in its files, holes left out.
    pub bytes: u64,
}

/// What was not packed as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Packed {
    /// Devices, pipes, sockets, kernel file systems.
    pub left_out: u64,
    /// Files that became shorter while they were read.
    pub changed: u64,
}

/// Looks at the tree at `path`.
///
/// # Errors
/// There is none, or it cannot be read.
pub fn measure(path: &Path) -> Result<Measured, Error> {
    let mut bytes = 0;
    let stat = root_stat(path)?;
    let mut left_out = 0;
    walk(path, Path::new("."), &mut left_out, &mut |found| {
        if found.kind == FileType::RegularFile {
            bytes += size(found.stat).min(found.stat.st_blocks.unsigned_abs().saturating_mul(512));
        }
        Ok(())
    })?;
    Ok(Measured {
        directory: kind(&stat) == FileType::Directory,
        bytes,
    })
}

/// Packs the tree at `path` as `name` into `out`, which gets a whole archive.
///
/// # Errors
/// The tree cannot be read, or `out` does not take it.
pub fn pack(path: &Path, name: &OsStr, out: impl Write) -> Result<Packed, Error> {
    root_stat(path)?;
    let mut packed = Packed::default();
    let mut writer = Writer {
        builder: Builder::new(out),
        linked: HashMap::new(),
        changed: 0,
    };
    walk(path, Path::new(name), &mut packed.left_out, &mut |found| {
        writer.add(found)
    })?;
    writer.builder.finish().map_err(Error::Sink)?;
    let mut out = writer.builder.into_inner().map_err(Error::Sink)?;
    out.flush().map_err(Error::Sink)?;
    packed.changed = writer.changed;
    Ok(packed)
}

fn root_stat(path: &Path) -> Result<Stat, Error> {
    let stat = statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW).map_err(Error::file("looking at", path))?;
    match kind(&stat) {
        FileType::Directory | FileType::RegularFile | FileType::Symlink => Ok(stat),
        _ => Err(Error::Special(path.to_owned())),
    }
}

fn kind(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

fn size(stat: &Stat) -> u64 {
    u64::try_from(stat.st_size).unwrap_or(0)
}

/// One file, link or directory, where it was found.
struct Found<'a> {
    directory: BorrowedFd<'a>,
    entry: &'a CStr,
    /// Where it is, for messages.
    path: &'a Path,
    /// What it is called in the archive.
    name: &'a Path,
    kind: FileType,
    stat: &'a Stat,
}

/// A directory that is being walked.
struct Level {
    directory: OwnedFd,
    path: PathBuf,
    name: PathBuf,
    entries: std::vec::IntoIter<CString>,
}

/// Calls `each` for everything, directories before what is in them.
fn walk(
    path: &Path,
    name: &Path,
    left_out: &mut u64,
    each: &mut dyn FnMut(&Found<'_>) -> Result<(), Error>,
) -> Result<(), Error> {
    let entry = CString::new(path.as_os_str().as_bytes()).map_err(|_| Error::Outside(path.to_owned()))?;
    let mut levels = Vec::new();
    levels.extend(visit(CWD, &entry, (path, name), left_out, each)?);
    while let Some(level) = levels.last_mut() {
        let Some(entry) = level.entries.next() else {
            levels.pop();
            continue;
        };
        let here = OsStr::from_bytes(entry.to_bytes());
        let (path, name) = (level.path.join(here), level.name.join(here));
        let deeper = visit(level.directory.as_fd(), &entry, (&path, &name), left_out, each)?;
        if deeper.is_some() && levels.len() >= MAX_DEPTH {
            return Err(Error::TooDeep(path));
        }
        levels.extend(deeper);
    }
    Ok(())
}

/// Calls `each` for one; a directory is opened to be walked.
fn visit(
    directory: BorrowedFd<'_>,
    entry: &CStr,
    (path, name): (&Path, &Path),
    left_out: &mut u64,
    each: &mut dyn FnMut(&Found<'_>) -> Result<(), Error>,
) -> Result<Option<Level>, Error> {
    let stat = match statat(directory, entry, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => stat,
        // It was removed since its directory was read.
        Err(rustix::io::Errno::NOENT) => return Ok(None),
        Err(error) => return Err(Error::file("looking at", path)(error)),
    };
    let kind = kind(&stat);
    if !matches!(kind, FileType::Directory | FileType::RegularFile | FileType::Symlink) {
        *left_out += 1;
        return Ok(None);
    }
    let found = Found {
        directory,
        entry,
        path,
        name,
        kind,
        stat: &stat,
    };
    if kind != FileType::Directory {
        each(&found)?;
        return Ok(None);
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let failed = || Error::file("reading", path);
    let directory = openat(directory, entry, flags, Mode::empty()).map_err(failed())?;
    let file_system = fstatfs(&directory).map_err(failed())?.f_type;
    if u64::try_from(file_system).is_ok_and(|number| KERNELS_OWN.contains(&number)) {
        *left_out += 1;
        return Ok(None);
    }
    each(&found)?;
    let mut entries = Vec::new();
    for entry in Dir::read_from(&directory).map_err(failed())? {
        let entry = entry.map_err(failed())?;
        if entry.file_name() != c"." && entry.file_name() != c".." {
            entries.push(entry.file_name().to_owned());
        }
    }
    entries.sort();
    Ok(Some(Level {
        directory,
        path: path.to_owned(),
        name: name.to_owned(),
        entries: entries.into_iter(),
    }))
}

struct Writer<W: Write> {
    builder: Builder<W>,
    /// Files with several names that were packed under one: by device and number.
    linked: HashMap<(u64, u64), PathBuf>,
    changed: u64,
}

impl<W: Write> Writer<W> {
    fn add(&mut self, found: &Found<'_>) -> Result<(), Error> {
        let mut header = header(found.stat);
        match found.kind {
            FileType::Directory => {
                header.set_entry_type(EntryType::Directory);
                self.append(&mut header, found.name, io::empty())
            }
            FileType::Symlink => {
                let target = readlinkat(found.directory, found.entry, Vec::new());
                let target = target.map_err(Error::file("reading", found.path))?;
                header.set_entry_type(EntryType::Symlink);
                self.link(&mut header, found.name, Path::new(OsStr::from_bytes(target.to_bytes())))
            }
            _ => self.file(header, found),
        }
    }

    fn file(&mut self, mut header: Header, found: &Found<'_>) -> Result<(), Error> {
        // A pipe that took its place must not hold us up.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let failed = || Error::file("reading", found.path);
        let file = openat(found.directory, found.entry, flags, Mode::empty()).map_err(failed())?;
        let stat = fstat(&file).map_err(failed())?;
        if kind(&stat) != FileType::RegularFile {
            return Err(Error::Special(found.path.to_owned()));
        }
        if stat.st_nlink > 1 {
            let key = (stat.st_dev, stat.st_ino);
            if let Some(first) = self.linked.get(&key).cloned() {
                header.set_entry_type(EntryType::Link);
                return self.link(&mut header, found.name, &first);
            }
            self.linked.insert(key, found.name.to_owned());
        }
        let (file, size) = (File::from(file), size(&stat));
        let blocks = stat.st_blocks.unsigned_abs();
        header.set_entry_type(EntryType::Regular);
        header.set_size(size);
        let (parts, more) = match holes::parts(&file, size, blocks).map_err(failed())? {
            Some(parts) => {
                let more = holes::describe(&mut header, &parts, size);
                (parts, more)
            }
            None => (
                vec![Part {
                    offset: 0,
                    length: size,
                }],
                Vec::new(),
            ),
        };
        let mut data = Data::new(&file, parts);
        let result = self.append(&mut header, found.name, more.as_slice().chain(&mut data));
        self.changed += u64::from(data.changed);
        match data.error {
            Some(error) => Err(failed()(error)),
            None => result,
        }
    }

    fn append(&mut self, header: &mut Header, name: &Path, data: impl Read) -> Result<(), Error> {
        self.builder.append_data(header, name, data).map_err(Error::Sink)
    }

    fn link(&mut self, header: &mut Header, name: &Path, target: &Path) -> Result<(), Error> {
        self.builder.append_link(header, name, target).map_err(Error::Sink)
    }
}

fn header(stat: &Stat) -> Header {
    let mut header = Header::new_gnu();
    header.set_mode(stat.st_mode & 0o7777);
    header.set_uid(stat.st_uid.into());
    header.set_gid(stat.st_gid.into());
    header.set_mtime(u64::try_from(stat.st_mtime).unwrap_or(0));
    header.set_size(0);
    header
}
