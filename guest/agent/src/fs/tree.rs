//! The directories that are watched by one inotify(7), and what its events mean. Sends nothing and waits for nothing.
//!
//! ```text
//!  directory appears ─► watched ─► what is in it is looked for: it may have come before the watch did
//!  directory moves   ─► it and those below are watched no more, unless another one is in its place by now; where it appears, see above
//!  events were lost  ─► all is watched anew, when nothing is watched any more: watches are few
//! ```

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::ops::Bound;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use agent_api::{RequestFailure, RequestFailureKind, WatchEvent, WatchEventKind};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::fs::{CWD, FileType, Mode, OFlags, openat};
use rustix::io::Errno;

use super::entries::is_kernels_own;
use super::failure::{Result, failed};
use super::names::{DIRECTORY, entries};

/// The most directories that one request watches: each takes memory of the guest's, about a kilobyte.
const MAX_WATCHES: usize = 65_536;

/// The most files that are remembered as told before their event came.
const MAX_FOUND: usize = 100_000;

/// Bytes of events that are read at once.
const EVENTS: usize = 16 << 10;

/// The kernel numbers watches from 1 on.
const NO_WATCH: i32 = 0;

/// What an event has before its name: watch, mask, cookie, length of the name.
const HEADER: usize = 16;

/// What is told of what is in a directory.
const CONTENT: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MODIFY)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::MOVED_FROM)
    .union(WatchFlags::MOVED_TO)
    .union(WatchFlags::ONLYDIR)
    .union(WatchFlags::EXCL_UNLINK);

/// Takes what happened; an error of it ends all.
pub(super) type Tell<'t, E> = dyn FnMut(WatchEvent) -> std::result::Result<(), E> + 't;

/// What is watched.
pub(super) struct Tree {
    inotify: OwnedFd,
    root: PathBuf,
    recursive: bool,
    root_watch: i32,
    /// By number and by path relative to the root, which is empty for the root.
    paths: HashMap<i32, Rc<Path>>,
    watches: BTreeMap<Rc<Path>, i32>,
    /// What was found in a directory that appeared: its own event, if it comes, is old.
    found: HashSet<(i32, OsString)>,
    buffer: Vec<u8>,
}

/// What came of one more watch.
enum Added {
    /// It is new.
    New(i32),
    /// It was there, or there is no directory that could be.
    Nothing,
    /// There can be no more.
    TooMany(RequestFailure),
}

impl Tree {
    /// Watches a directory, with `recursive` also those in it.
    pub(super) fn open(root: &Path, recursive: bool) -> Result<Self> {
        let mut tree = Self {
            inotify: instance(root)?,
            root: root.to_owned(),
            recursive,
            root_watch: NO_WATCH,
            paths: HashMap::new(),
            watches: BTreeMap::new(),
            found: HashSet::new(),
            buffer: vec![0; EVENTS],
        };
        tree.watch_all()?;
        Ok(tree)
    }

    /// Watches the root, and with `recursive` what is in it. Nothing is watched yet.
    fn watch_all(&mut self) -> Result<()> {
        let self_flags = CONTENT | WatchFlags::DELETE_SELF | WatchFlags::MOVE_SELF;
        self.root_watch = inotify::add_watch(&self.inotify, &self.root, self_flags).map_err(too_many(&self.root))?;
        self.know(self.root_watch, Rc::from(Path::new("")));
        if self.recursive {
            // Nobody is told, and so nobody says no.
            if let Ok(Some(failure)) = self.look_into(self.root_watch, None::<&mut Tell<'_, ()>>) {
                return Err(failure);
            }
        }
        Ok(())
    }

    /// The same once more, by another instance: with the one that there was its watches go.
    fn watch_anew(&mut self) -> Result<()> {
        self.inotify = instance(&self.root)?;
        self.paths.clear();
        self.watches.clear();
        self.found.clear();
        self.watch_all()
    }

    /// To wait for.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.inotify.as_fd()
    }

    /// Events may be queued that are of what was found.
    pub(super) fn expects_old(&self) -> bool {
        !self.found.is_empty()
    }

    /// No event is queued.
    pub(super) fn has_caught_up(&mut self) {
        self.found.clear();
    }

    /// Takes some of the events that are queued.
    pub(super) fn take<E>(&mut self, tell: &mut Tell<'_, E>) -> std::result::Result<Result<()>, E> {
        let mut buffer = std::mem::take(&mut self.buffer);
        let got = match rustix::io::read(&self.inotify, &mut buffer[..]) {
            Ok(got) => got,
            Err(Errno::AGAIN | Errno::INTR) => 0,
            Err(error) => return Ok(Err(failed("reading what happens in", &self.root)(error))),
        };
        let mut rest = buffer.get(..got).unwrap_or_default();
        while let Some((event, behind)) = Event::split(rest) {
            rest = behind;
            if event.mask.contains(ReadFlags::QUEUE_OVERFLOW) {
                self.buffer = buffer;
                if let Err(failure) = self.watch_anew() {
                    return Ok(Err(failure));
                }
                // Whoever looks now misses nothing that comes later.
                return tell(lost()).map(Ok);
            }
            self.handle(&event, tell)?;
        }
        self.buffer = buffer;
        Ok(Ok(()))
    }

    fn handle<E>(&mut self, event: &Event<'_>, tell: &mut Tell<'_, E>) -> std::result::Result<(), E> {
        if event.mask.contains(ReadFlags::IGNORED) {
            self.forget(event.watch);
            return Ok(());
        }
        // One that was given up has events left.
        let Some(directory) = self.paths.get(&event.watch).map(Rc::clone) else {
            return Ok(());
        };
        let Some(kind) = kind_of(event.mask) else {
            return Ok(());
        };
        if event.name.is_empty() {
            return self.handle_own(event, kind, tell);
        }
        let path = directory.join(event.name);
        let was_found = !self.found.is_empty() && self.found.remove(&(event.watch, event.name.to_owned()));
        // Removed or moved, it may come again.
        if !(was_found && kind == WatchEventKind::Create) {
            tell(WatchEvent {
                name: path.as_os_str().into(),
                kind,
            })?;
        }
        if !(self.recursive && event.mask.contains(ReadFlags::ISDIR)) {
            return Ok(());
        }
        match kind {
            WatchEventKind::Rename => {
                if !self.is_watched_there(&path) {
                    self.give_up(&path);
                }
                Ok(())
            }
            WatchEventKind::Create => match self.add(&path) {
                Added::New(watch) => self.look_further(watch, tell),
                Added::Nothing => Ok(()),
                Added::TooMany(_) => tell(lost()),
            },
            _ => Ok(()),
        }
    }

    /// Something happened to a directory itself. Of others than the root, the one above tells.
    fn handle_own<E>(
        &mut self,
        event: &Event<'_>,
        kind: WatchEventKind,
        tell: &mut Tell<'_, E>,
    ) -> std::result::Result<(), E> {
        if event.watch != self.root_watch {
            return Ok(());
        }
        if kind != WatchEventKind::Attributes {
            // Where it is now, and what is in its place, is another matter.
            self.give_up(Path::new(""));
        }
        tell(WatchEvent { name: ".".into(), kind })
    }

    fn look_further<E>(&mut self, watch: i32, tell: &mut Tell<'_, E>) -> std::result::Result<(), E> {
        match self.look_into(watch, Some(tell))? {
            None => Ok(()),
            Some(_) => tell(lost()),
        }
    }

    /// Watches the directories in one that is watched, and those below them; tells what is in all of them. The failure is that there are
    /// too many.
    fn look_into<E>(
        &mut self,
        watch: i32,
        mut tell: Option<&mut Tell<'_, E>>,
    ) -> std::result::Result<Option<RequestFailure>, E> {
        let mut left = vec![watch];
        while let Some(watch) = left.pop() {
            let Some(directory) = self.paths.get(&watch).map(Rc::clone) else {
                continue;
            };
            // One that is gone, or cannot be read, has nothing that could be told.
            let flags = DIRECTORY
                | if directory.as_os_str().is_empty() {
                    OFlags::empty()
                } else {
                    OFlags::NOFOLLOW
                };
            let opened = openat(CWD, self.root.join(&directory), flags, Mode::empty());
            let Ok(all) = opened.and_then(entries) else {
                continue;
            };
            for entry in all.map_while(std::result::Result::ok) {
                let name = OsStr::from_bytes(entry.file_name().to_bytes());
                let path = directory.join(name);
                if let Some(tell) = &mut tell {
                    if self.found.len() >= MAX_FOUND {
                        self.found.clear();
                    }
                    self.found.insert((watch, name.to_owned()));
                    tell(WatchEvent {
                        name: path.as_os_str().into(),
                        kind: WatchEventKind::Create,
                    })?;
                }
                if !matches!(entry.file_type(), FileType::Directory | FileType::Unknown) {
                    continue;
                }
                match self.add(&path) {
                    Added::New(watch) => left.push(watch),
                    Added::Nothing => {}
                    Added::TooMany(failure) => return Ok(Some(failure)),
                }
            }
        }
        Ok(None)
    }

    /// Watches one directory more.
    fn add(&mut self, relative: &Path) -> Added {
        let path = self.root.join(relative);
        if self.paths.len() >= MAX_WATCHES {
            return Added::TooMany(RequestFailure {
                kind: RequestFailureKind::Other,
                message: format!(
                    "{} has more than {MAX_WATCHES} directories in it: watch a part of it",
                    self.root.display()
                ),
            });
        }
        // The kernel says nothing of what happens in its own, of which there are many.
        match is_kernels_own(&path) {
            Ok(false) => {}
            Ok(true) | Err(_) => return Added::Nothing,
        }
        match inotify::add_watch(&self.inotify, &path, CONTENT | WatchFlags::DONT_FOLLOW) {
            // The root itself, by a mount in it.
            Ok(watch) if watch == self.root_watch => Added::Nothing,
            Ok(watch) if self.paths.get(&watch).is_some_and(|known| **known == *relative) => Added::Nothing,
            Ok(watch) => {
                // What was there went elsewhere, and its event is to come: two have changed places.
                self.give_up(relative);
                self.forget(watch);
                self.know(watch, Rc::from(relative));
                Added::New(watch)
            }
            Err(error @ Errno::NOSPC) => Added::TooMany(too_many(&path)(error)),
            // Gone, or no directory any more, or none that can be watched.
            Err(_) => Added::Nothing,
        }
    }

    /// Whether the directory that is at this path now is the one that is known there.
    fn is_watched_there(&self, relative: &Path) -> bool {
        let Some(known) = self.watches.get(relative) else {
            return false;
        };
        match inotify::add_watch(
            &self.inotify,
            self.root.join(relative),
            CONTENT | WatchFlags::DONT_FOLLOW,
        ) {
            Ok(watch) if watch == *known => true,
            Ok(watch) => {
                // Its own event is to come, unless it is known by another name.
                if !self.paths.contains_key(&watch) {
                    let _ = inotify::remove_watch(&self.inotify, watch);
                }
                false
            }
            Err(_) => false,
        }
    }

    fn know(&mut self, watch: i32, path: Rc<Path>) {
        self.paths.insert(watch, Rc::clone(&path));
        self.watches.insert(path, watch);
    }

    /// The kernel watches it no more.
    fn forget(&mut self, watch: i32) {
        if let Some(path) = self.paths.remove(&watch)
            && self.watches.get(&path) == Some(&watch)
        {
            self.watches.remove(&path);
        }
    }

    /// Watches a directory and those below it no more.
    fn give_up(&mut self, path: &Path) {
        let below = self.watches.range::<Path, _>((Bound::Included(path), Bound::Unbounded));
        let below = below.take_while(|(known, _)| known.starts_with(path));
        let below: Vec<_> = below.map(|(_, watch)| *watch).collect();
        for watch in below {
            // Fails for one that the kernel has given up by itself.
            let _ = inotify::remove_watch(&self.inotify, watch);
            self.forget(watch);
        }
    }
}

fn instance(root: &Path) -> Result<OwnedFd> {
    inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).map_err(failed("making an inotify instance for", root))
}

fn lost() -> WatchEvent {
    WatchEvent {
        name: ".".into(),
        kind: WatchEventKind::Lost,
    }
}

fn too_many(path: &Path) -> impl FnOnce(Errno) -> RequestFailure {
    move |error| match error {
        Errno::NOSPC => RequestFailure {
            kind: RequestFailureKind::Other,
            message: format!(
                "watching {}: the machine has no more watches; end others, or raise fs.inotify.max_user_watches in it",
                path.display()
            ),
        },
        error => failed("watching", path)(error),
    }
}

fn kind_of(mask: ReadFlags) -> Option<WatchEventKind> {
    let kinds = [
        (ReadFlags::CREATE | ReadFlags::MOVED_TO, WatchEventKind::Create),
        (ReadFlags::MODIFY, WatchEventKind::Write),
        (
            ReadFlags::DELETE | ReadFlags::DELETE_SELF | ReadFlags::UNMOUNT,
            WatchEventKind::Remove,
        ),
        (ReadFlags::MOVED_FROM | ReadFlags::MOVE_SELF, WatchEventKind::Rename),
        (ReadFlags::ATTRIB, WatchEventKind::Attributes),
    ];
    let found = kinds.into_iter().find(|(flags, _)| mask.intersects(*flags));
    found.map(|(_, kind)| kind)
}

/// One event as the kernel writes it.
struct Event<'b> {
    watch: i32,
    mask: ReadFlags,
    /// Empty if the directory itself is meant.
    name: &'b OsStr,
}

impl<'b> Event<'b> {
    /// The first event, and what is behind it.
    fn split(bytes: &'b [u8]) -> Option<(Self, &'b [u8])> {
        let (header, rest) = bytes.split_first_chunk::<HEADER>()?;
        let [w0, w1, w2, w3, m0, m1, m2, m3, _, _, _, _, l0, l1, l2, l3] = *header;
        let length = usize::try_from(u32::from_ne_bytes([l0, l1, l2, l3])).ok()?;
        let (name, behind) = rest.split_at_checked(length)?;
        // Padded with zeros.
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
        let event = Self {
            watch: i32::from_ne_bytes([w0, w1, w2, w3]),
            mask: ReadFlags::from_bits_retain(u32::from_ne_bytes([m0, m1, m2, m3])),
            name: OsStr::from_bytes(name),
        };
        Some((event, behind))
    }
}
