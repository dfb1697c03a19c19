//! What the other side knows of files, for another server of the same directory to go on with. Descriptors are one process's own, so
//! files are taken along by their names; by what they were found at in the other server they may be others, which their inode numbers
//! and times of birth tell.
//!
//! ```text
//!  number ─► descriptor ─► name, inode, birth ═══ Known ═══► name ─► descriptor ─► the same inode and birth? ─► number
//! ```
//! A file that is not found, or is another one, is unknown from then on (`ESTALE`, `EBADF`), and its number is not used again. A
//! kernel that hears `ESTALE` of something that it looked up by a path looks it up once more.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;

use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::nodes::Node;
use crate::server::{Number, Server};
use crate::tree::NAMED;

/// More numbers than are ever given out.
const MOST_NUMBERS: u64 = 1 << 62;

/// Bytes of all names that are told: a state has an end, and a guest can make its paths long.
const MOST_NAMES: usize = 16 << 20;

/// A path beneath the directory, as components between slashes; nothing is the directory itself.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Path {
    /// Most.
    Text(String),
    /// One that is no text.
    Bytes(Vec<u8>),
}

impl Path {
    fn new(bytes: Vec<u8>) -> Self {
        match String::from_utf8(bytes) {
            Ok(text) => Self::Text(text),
            Err(error) => Self::Bytes(error.into_bytes()),
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Self::Text(text) => text.as_bytes(),
            Self::Bytes(bytes) => bytes,
        }
    }
}

/// A file of any kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownFile {
    /// Where it was.
    pub path: Path,
    /// Its inode's number.
    pub inode: u64,
    /// When it was made, in nanoseconds since 1970; 0 where its file system does not know.
    pub born_ns: u64,
}

/// A file that the other side has looked up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownNode {
    /// How often it was told of it, and has not forgotten.
    pub lookups: u64,
    /// Which.
    pub file: KnownFile,
}

/// A file that the other side has open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownHandle {
    /// `O_RDONLY`, `O_WRONLY` or `O_RDWR` (open(2)).
    pub access: u32,
    /// `O_APPEND`.
    pub append: bool,
    /// Which.
    pub file: KnownFile,
}

/// All that the other side knows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Known {
    /// The last number that a file got.
    pub last_node: u64,
    /// The last number that an open file got.
    pub last_handle: u64,
    /// By their numbers, without the directory itself.
    pub nodes: BTreeMap<u64, KnownNode>,
    /// By their numbers.
    pub handles: BTreeMap<u64, KnownHandle>,
}

/// What tells a file from another one of its name.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Identity {
    inode: u64,
    born_ns: u64,
}

impl KnownFile {
    fn identity(&self) -> Identity {
        Identity {
            inode: self.inode,
            born_ns: self.born_ns,
        }
    }
}

/// A device's numbers, and an inode's: of one file on this host, as long as that is open.
type Place = (u32, u32, u64);

/// Where it is, what it is, and how many names it has.
fn identity(file: &OwnedFd) -> Result<(Place, Identity, u32), Errno> {
    let wanted = StatxFlags::INO | StatxFlags::NLINK | StatxFlags::BTIME;
    let stat = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, wanted)?;
    let born_ns = match stat.stx_mask & StatxFlags::BTIME.bits() {
        0 => 0,
        _ => u64::try_from(stat.stx_btime.tv_sec)
            .unwrap_or_default()
            .saturating_mul(1_000_000_000)
            .saturating_add(stat.stx_btime.tv_nsec.into()),
    };
    let inode = stat.stx_ino;
    let place = (stat.stx_dev_major, stat.stx_dev_minor, inode);
    Ok((place, Identity { inode, born_ns }, stat.stx_nlink))
}

impl Server {
    /// What the other side knows. Nothing may be served meanwhile. A file that has no name any more, or none that can be told, is
    /// left out; so is what is known beyond [`MOST_NAMES`].
    ///
    /// # Errors
    /// The directory itself cannot be looked at.
    pub fn known(&self) -> Result<Known, Error> {
        let system = |cause| Error::System {
            step: "looking at a directory that a guest knows",
            cause,
        };
        let (last_node, nodes) = self.nodes.all();
        let (last_handle, handles) = self.handles.all();
        let mut known = Known {
            last_node,
            last_handle,
            ..Known::default()
        };
        let root = self.name_of(&self.nodes.root().file).map_err(system)?;
        let mut room = MOST_NAMES;
        let mut named = HashMap::new();
        for (id, lookups, node) in nodes {
            if let Some((place, file)) = self.known_file(&root, &node.file, &mut room) {
                named.insert(place, file.clone());
                known.nodes.insert(id, KnownNode { lookups, file });
            }
        }
        for (id, handle) in handles {
            let found = self.known_file(&root, &handle.file, &mut room);
            // A file may have been opened by a name that it has no more.
            if let Some(file) = found.map(|(place, file)| named.get(&place).cloned().unwrap_or(file)) {
                let handle = KnownHandle {
                    access: handle.access.bits(),
                    append: handle.append,
                    file,
                };
                known.handles.insert(id, handle);
            }
        }
        Ok(known)
    }

    /// What the kernel calls it, from wherever its mount ends.
    fn name_of(&self, file: &OwnedFd) -> Result<Vec<u8>, Errno> {
        let name = rustix::fs::readlinkat(&self.descriptors, Number::of(file)?.name(), Vec::new())?;
        Ok(name.into_bytes())
    }

    /// Where it is on this host, device and inode, and what it is elsewhere.
    fn known_file(&self, root: &[u8], file: &OwnedFd, room: &mut usize) -> Option<(Place, KnownFile)> {
        let (place, Identity { inode, born_ns }, names) = identity(file).ok()?;
        let name = self.name_of(file).ok().filter(|_| names > 0)?;
        let path = beneath(root, &name)?;
        *room = room.checked_sub(path.len())?;
        let path = Path::new(path.to_vec());
        Some((place, KnownFile { path, inode, born_ns }))
    }

    /// Goes on with what the other side knows of another server, in place of what it knew of this one; how much of that was not found.
    ///
    /// # Errors
    /// It is more than this one may tell, or numbers that nobody has given out.
    pub fn know(&self, known: &Known) -> Result<usize, Error> {
        self.clear();
        let refuse = |cause| Error::System {
            step: "finding the files that a guest knows",
            cause,
        };
        if known.nodes.len() >= self.options.max_nodes || known.handles.len() > self.options.max_handles {
            return Err(refuse(Errno::NFILE));
        }
        let given_out = |last: u64, most: Option<u64>| last < MOST_NUMBERS && most.is_none_or(|most| most <= last);
        let nodes = given_out(known.last_node, known.nodes.keys().next_back().copied());
        if !nodes || !given_out(known.last_handle, known.handles.keys().next_back().copied()) {
            return Err(refuse(Errno::INVAL));
        }
        let root = self.nodes.root();
        let mut finder = Finder::new(&root);
        let mut lost = 0;
        let mut nodes: Vec<_> = known.nodes.iter().collect();
        nodes.sort_by(|(_, a), (_, b)| a.file.path.cmp(&b.file.path));
        for (&id, node) in nodes {
            let entered = finder
                .find(&node.file)
                .and_then(|file| self.nodes.enter_as(id, node.lookups, file));
            lost += usize::from(entered.is_err());
        }
        for (&id, handle) in &known.handles {
            let opened = self.open_again(&mut finder, id, handle);
            lost += usize::from(opened.is_err());
        }
        self.nodes.go_on_after(known.last_node);
        self.handles.go_on_after(known.last_handle);
        Ok(lost)
    }

    fn open_again(&self, finder: &mut Finder<'_>, id: u64, handle: &KnownHandle) -> Result<(), Errno> {
        let access = OFlags::from_bits_retain(handle.access) & OFlags::ACCMODE;
        if access != OFlags::RDONLY && self.options.read_only {
            return Err(Errno::ROFS);
        }
        let file = match handle.file.path.bytes() {
            [] => self.reopen(&self.nodes.root(), access)?,
            _ => self.reopen(&Node::of(finder.find(&handle.file)?)?, access)?,
        };
        self.handles.add_as(id, file, access, handle.append);
        Ok(())
    }
}

/// The part of a name that is beneath a directory; nothing for that itself.
fn beneath<'n>(root: &[u8], name: &'n [u8]) -> Option<&'n [u8]> {
    let root = root.strip_suffix(b"/").unwrap_or(root);
    match name.strip_prefix(root)? {
        [] => Some(&[]),
        [b'/', rest @ ..] => Some(rest),
        _ => None,
    }
}

/// Goes to files by their names, one component after the other and through no link; the directories on the way to the last one stay
/// open.
struct Finder<'r> {
    root: &'r OwnedFd,
    way: Vec<(Vec<u8>, OwnedFd)>,
}

impl<'r> Finder<'r> {
    fn new(root: &'r Node) -> Self {
        Self {
            root: &root.file,
            way: Vec::new(),
        }
    }

    /// The same file as then.
    fn find(&mut self, wanted: &KnownFile) -> Result<OwnedFd, Errno> {
        let file = self.at(wanted.path.bytes())?;
        match identity(&file)?.1 == wanted.identity() {
            true => Ok(file),
            false => Err(Errno::STALE),
        }
    }

    fn at(&mut self, path: &[u8]) -> Result<OwnedFd, Errno> {
        let mut components: Vec<&[u8]> = path.split(|byte| *byte == b'/').collect();
        let strange = |component: &&[u8]| matches!(**component, [] | [b'.'] | [b'.', b'.']) || component.contains(&0);
        if components.iter().any(strange) {
            return Err(Errno::INVAL);
        }
        let last = components.pop().ok_or(Errno::INVAL)?;
        let common = self
            .way
            .iter()
            .zip(&components)
            .take_while(|((name, _), component)| name == *component);
        let common = common.count();
        self.way.truncate(common);
        for component in components.get(common..).unwrap_or_default() {
            let directory = rustix::fs::openat(self.directory(), *component, NAMED, Mode::empty())?;
            self.way.push((component.to_vec(), directory));
        }
        rustix::fs::openat(self.directory(), last, NAMED, Mode::empty())
    }

    fn directory(&self) -> &OwnedFd {
        self.way.last().map_or(self.root, |(_, directory)| directory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_beneath_a_directory_or_elsewhere() {
        assert_eq!(beneath(b"/", b"/a/b"), Some(&b"a/b"[..]));
        assert_eq!(beneath(b"/", b"/"), Some(&b""[..]));
        assert_eq!(beneath(b"/srv/x", b"/srv/x/a"), Some(&b"a"[..]));
        assert_eq!(beneath(b"/srv/x", b"/srv/x"), Some(&b""[..]));
        assert_eq!(beneath(b"/srv/x", b"/srv/xy"), None);
        assert_eq!(beneath(b"/srv/x", b"/srv"), None);
    }

    #[test]
    fn no_path_leads_out() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("root")).unwrap();
        std::os::unix::fs::symlink("..", directory.path().join("root/up")).unwrap();
        std::fs::write(directory.path().join("secret"), "").unwrap();
        let root = rustix::fs::open(directory.path().join("root"), OFlags::PATH, Mode::empty()).unwrap();
        let mut finder = Finder {
            root: &root,
            way: Vec::new(),
        };
        for path in [
            "../secret",
            "up/secret",
            "/secret",
            "up/../secret",
            "",
            ".",
            "a//b",
            "up/",
            "a\0b",
        ] {
            assert!(finder.at(path.as_bytes()).is_err(), "{path:?}");
        }
        assert!(finder.at(b"up").is_ok(), "a link itself is a file like any other");
    }
}
