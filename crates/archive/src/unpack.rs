//! A tar stream becomes files. Each file is written beside its place and moved there when it is whole, so that a copy that ends
//! early leaves whole files and nothing else. Devices, pipes and what else is no file are left out and counted.

use std::cell::Cell;
use std::collections::VecDeque;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, UTIME_OMIT, Uid, chownat, fchmod, fchown, futimens,
    linkat, mkdirat, openat, renameat, statat, symlinkat, unlinkat, utimensat,
};
use rustix::io::Errno;
use tar::{Archive, EntryType, Header};

use crate::Error;
use crate::holes::{self, WriteError};
use crate::place::{Base, Lead, Place, Target};

/// The most that lies between two files' data: names and other headers. A stream with more is up to no good.
const MOST_HEADERS: u64 = 1 << 20;

/// Directories that wait for their times and modes until what is in them is there.
const MOST_WAITING: usize = 10_000;

/// Whose files they become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// As the stream says, set-user-id bits included.
    Kept,
    /// Of whoever unpacks; what would lend his rights to others, set-user-id bits, is dropped.
    Mine,
}

/// What was not unpacked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unpacked {
    /// Files, links and directories that are there now.
    pub entries: u64,
    /// Devices, pipes and what is not known.
    pub left_out: u64,
}

/// Unpacks the archive that `stream` holds. What comes behind the archive's end is not read.
///
/// # Errors
/// The stream is none or breaks off, leads out of the target, or a file cannot be written. What was whole before stays.
pub fn unpack(stream: impl Read, target: &Target, owner: Owner) -> Result<Unpacked, Error> {
    let allowance = Rc::new(Cell::new(None));
    let mut archive = Archive::new(Guarded {
        stream,
        allowance: Rc::clone(&allowance),
    });
    let mut unpacker = Unpacker {
        base: Base::open(target)?,
        owner,
        waiting: VecDeque::new(),
        done: Unpacked::default(),
        seen: false,
    };
    let mut entries = archive.entries().map_err(Error::Stream)?;
    let result = loop {
        allowance.set(Some(MOST_HEADERS));
        let entry = entries.next();
        allowance.set(None);
        match entry {
            None => break Ok(()),
            Some(Err(error)) => break Err(Error::Stream(error)),
            Some(Ok(mut entry)) => {
                if let Err(error) = unpacker.add(&mut entry) {
                    break Err(error);
                }
            }
        }
    };
    // Also what a broken stream has made gets its modes.
    let finished = unpacker.finish();
    result.and(finished)?;
    if unpacker.seen {
        Ok(unpacker.done)
    } else {
        Err(Error::Empty)
    }
}

/// Lets no more bytes through than are allowed just now.
struct Guarded<R> {
    stream: R,
    allowance: Rc<Cell<Option<u64>>>,
}

impl<R: Read> Read for Guarded<R> {
    fn read(&mut self, space: &mut [u8]) -> io::Result<usize> {
        let got = self.stream.read(space)?;
        if let Some(left) = self.allowance.get() {
            let left = left.checked_sub(got as u64);
            self.allowance
                .set(Some(left.ok_or_else(|| io::Error::other("its headers have no end"))?));
        }
        Ok(got)
    }
}

/// What a file gets besides its data.
struct Attributes {
    mode: Mode,
    owner: Option<(Uid, Gid)>,
    times: Timestamps,
}

struct Unpacker {
    base: Base,
    owner: Owner,
    waiting: VecDeque<(OpenOrPath, Attributes)>,
    done: Unpacked,
    seen: bool,
}

/// A directory that waits for its attributes: the root, which is open, or one beneath it.
enum OpenOrPath {
    Open(OwnedFd),
    Path(PathBuf),
}

impl Unpacker {
    fn add<R: Read>(&mut self, entry: &mut tar::Entry<'_, R>) -> Result<(), Error> {
        self.seen = true;
        let name = entry.path().map_err(Error::Stream)?.into_owned();
        let kind = entry.header().entry_type();
        let attributes = self.attributes(entry.header())?;
        match self.base.lead(&name)? {
            Lead::Base if kind == EntryType::Directory => Ok(()),
            Lead::Base => Err(Error::InTheWay {
                path: name,
                there: "a directory",
                wanted: "a file",
            }),
            Lead::Root(place) => {
                self.write(entry, &place, attributes, None)?;
                if kind == EntryType::Directory {
                    self.base.enter(&place)?;
                }
                Ok(())
            }
            Lead::Beneath(path) => {
                let place = self.base.place(&path)?;
                self.write(entry, &place, attributes, Some(path))
            }
        }
    }

    fn write<R: Read>(
        &mut self,
        entry: &mut tar::Entry<'_, R>,
        place: &Place,
        attributes: Attributes,
        beneath: Option<PathBuf>,
    ) -> Result<(), Error> {
        match entry.header().entry_type() {
            EntryType::Directory => self.directory(place, attributes, beneath)?,
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                let size = entry.size();
                file(entry, size, place, &attributes)?;
            }
            EntryType::Symlink => {
                let target = link_name(entry)?;
                clear(place, "a link")?;
                symlinkat(&target, place, &place.name).map_err(Error::file("making the link", &place.path))?;
                set_link(place, &attributes)?;
            }
            EntryType::Link => {
                let target = link_name(entry)?;
                self.hard_link(&target, place)?;
            }
            _ => {
                self.done.left_out += 1;
                return Ok(());
            }
        }
        self.done.entries += 1;
        Ok(())
    }

    /// Makes a directory; one that is there stays as it is.
    fn directory(&mut self, place: &Place, attributes: Attributes, beneath: Option<PathBuf>) -> Result<(), Error> {
        match mkdirat(place, &place.name, Mode::RWXU) {
            Ok(()) => (),
            Err(Errno::EXIST) => {
                let there = statat(place, &place.name, AtFlags::SYMLINK_NOFOLLOW);
                let there = there.map_err(Error::file("looking at", &place.path))?;
                let is_directory = FileType::from_raw_mode(there.st_mode) == FileType::Directory;
                // A link to a directory beneath is as good as one.
                if is_directory || beneath.is_some_and(|path| self.base.directory(&path).is_ok()) {
                    return Ok(());
                }
                return Err(Error::InTheWay {
                    path: place.path.clone(),
                    there: "no directory",
                    wanted: "one",
                });
            }
            Err(error) => return Err(Error::file("making", &place.path)(error)),
        }
        if self.waiting.len() >= MOST_WAITING
            && let Some((directory, attributes)) = self.waiting.pop_front()
        {
            self.set_directory(&directory, &attributes)?;
        }
        let directory = match beneath {
            Some(path) => OpenOrPath::Path(path),
            None => {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let open = openat(place, &place.name, flags, Mode::empty());
                OpenOrPath::Open(open.map_err(Error::file("opening", &place.path))?)
            }
        };
        self.waiting.push_back((directory, attributes));
        Ok(())
    }

    /// Gives a file that was unpacked before another name.
    fn hard_link(&mut self, target: &Path, place: &Place) -> Result<(), Error> {
        let Lead::Beneath(path) = self.base.lead(target)? else {
            return Err(Error::Outside(target.to_owned()));
        };
        let from = self.base.place(&path)?;
        clear(place, "a file")?;
        // A link is not followed: it gets a second name itself.
        linkat(&from, &from.name, place, &place.name, AtFlags::empty()).map_err(Error::file("linking", &place.path))
    }

    fn attributes(&self, header: &Header) -> Result<Attributes, Error> {
        let mode = header.mode().map_err(Error::Stream)?;
        let number = |number: io::Result<u64>| {
            let number = number.and_then(|number| u32::try_from(number).map_err(io::Error::other));
            // The greatest is no user, but the word for "leave it".
            number
                .and_then(|number| match number {
                    u32::MAX => Err(io::Error::other("an owner that cannot be")),
                    number => Ok(number),
                })
                .map_err(Error::Stream)
        };
        let owner = match self.owner {
            Owner::Kept => Some((
                Uid::from_raw(number(header.uid())?),
                Gid::from_raw(number(header.gid())?),
            )),
            Owner::Mine => None,
        };
        let seconds = header.mtime().map_err(Error::Stream)?;
        let omit = Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_OMIT,
        };
        Ok(Attributes {
            mode: Mode::from_raw_mode(mode & if owner.is_some() { 0o7777 } else { 0o777 }),
            owner,
            times: Timestamps {
                last_access: omit,
                last_modification: Timespec {
                    tv_sec: i64::try_from(seconds).unwrap_or(i64::MAX),
                    tv_nsec: 0,
                },
            },
        })
    }

    fn set_directory(&self, directory: &OpenOrPath, attributes: &Attributes) -> Result<(), Error> {
        match directory {
            OpenOrPath::Open(fd) => {
                set(fd, attributes).map_err(Error::file("setting the attributes of", Path::new(".")))
            }
            OpenOrPath::Path(path) => self
                .base
                .directory(path)
                .and_then(|fd| set(fd, attributes))
                .map_err(Error::file("setting the attributes of", path)),
        }
    }

    /// The attributes of directories, the inner ones first: what is done in a directory changes its time.
    fn finish(&mut self) -> Result<(), Error> {
        while let Some((directory, attributes)) = self.waiting.pop_back() {
            self.set_directory(&directory, &attributes)?;
        }
        Ok(())
    }
}

fn link_name<R: Read>(entry: &tar::Entry<'_, R>) -> Result<PathBuf, Error> {
    let name = entry.link_name().map_err(Error::Stream)?;
    match name {
        Some(name) => Ok(name.into_owned()),
        None => Err(Error::Stream(io::Error::other("a link that leads nowhere"))),
    }
}

/// Removes what is there, unless it is a directory.
fn clear(place: &Place, wanted: &'static str) -> Result<(), Error> {
    match unlinkat(place, &place.name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(Errno::ISDIR) => Err(Error::InTheWay {
            path: place.path.clone(),
            there: "a directory",
            wanted,
        }),
        Err(error) => Err(Error::file("replacing", &place.path)(error)),
    }
}

/// A file beside its place; removed again unless it gets there.
struct Part<'p> {
    place: &'p Place,
    name: String,
    moved: bool,
}

impl Drop for Part<'_> {
    fn drop(&mut self) {
        if !self.moved {
            // What it was written for has failed already, and that is told.
            unlinkat(self.place, self.name.as_str(), AtFlags::empty()).unwrap_or_default();
        }
    }
}

fn file(data: &mut impl Read, size: u64, place: &Place, attributes: &Attributes) -> Result<(), Error> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let mut part = Part {
        place,
        name: format!(
            ".basalt-part-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        ),
        moved: true,
    };
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let failed = || Error::file("writing", &place.path);
    let fd = openat(place, part.name.as_str(), flags, Mode::RUSR | Mode::WUSR).map_err(failed())?;
    part.moved = false;
    match holes::write(data, &fd) {
        Ok(count) if count == size => (),
        Ok(_) => return Err(Error::Truncated(place.path.clone())),
        Err(WriteError::Source(error)) => return Err(Error::Stream(error)),
        Err(WriteError::File(error)) => return Err(failed()(error)),
    }
    set(&fd, attributes).map_err(Error::file("setting the attributes of", &place.path))?;
    match renameat(place, part.name.as_str(), place, &place.name) {
        Ok(()) => part.moved = true,
        Err(Errno::ISDIR) => {
            return Err(Error::InTheWay {
                path: place.path.clone(),
                there: "a directory",
                wanted: "a file",
            });
        }
        Err(error) => return Err(failed()(error)),
    }
    Ok(())
}

/// The owner first: a change of it takes the set-user-id bits away.
fn set(fd: impl AsFd, attributes: &Attributes) -> Result<(), Errno> {
    if let Some((user, group)) = attributes.owner {
        fchown(&fd, Some(user), Some(group))?;
    }
    fchmod(&fd, attributes.mode)?;
    futimens(&fd, &attributes.times)
}

fn set_link(place: &Place, attributes: &Attributes) -> Result<(), Error> {
    let failed = || Error::file("setting the attributes of", &place.path);
    if let Some((user, group)) = attributes.owner {
        chownat(place, &place.name, Some(user), Some(group), AtFlags::SYMLINK_NOFOLLOW).map_err(failed())?;
    }
    utimensat(place, &place.name, &attributes.times, AtFlags::SYMLINK_NOFOLLOW).map_err(failed())
}
