//! The image's file tree in memory: inodes in an arena, directories as sorted maps, file contents as positions in a
//! spool file. Layers are applied to it; every path, also through symbolic links, is resolved inside it, so that
//! nothing can lead out. Knows nothing of tar, and nothing of erofs.

use std::collections::{BTreeMap, VecDeque};

use crate::{Error, Limits};

/// As in Linux's path walk (MAXSYMLINKS).
const MAX_SYMLINKS: u32 = 40;
/// EROFS_NAME_LEN, NAME_MAX.
const MAX_NAME: usize = 255;

/// Index of an inode in its tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct NodeId(u32);

/// The root directory.
pub(crate) const ROOT: NodeId = NodeId(0);

/// Everything about an inode but its contents.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Meta {
    /// The lower 12 bits of `st_mode`.
    pub(crate) mode: u16,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mtime: i64,
    pub(crate) mtime_nsec: u32,
    pub(crate) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// What an inode is.
#[derive(Debug)]
pub(crate) enum Content {
    Directory(BTreeMap<Vec<u8>, Link>),
    /// Position and length in the spool file.
    File {
        offset: u64,
        size: u64,
    },
    Symlink(Vec<u8>),
    Char {
        major: u32,
        minor: u32,
    },
    Block {
        major: u32,
        minor: u32,
    },
    Fifo,
}

/// A name in a directory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Link {
    pub(crate) node: NodeId,
    /// The layer that gave this name last: an opaque marker removes only what is from layers below its own.
    layer: u32,
}

/// An inode.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) meta: Meta,
    pub(crate) content: Content,
}

/// The tree.
#[derive(Debug)]
pub(crate) struct Tree {
    nodes: Vec<Node>,
    depth: usize,
}

/// A place in the tree where an entry goes: a directory and a name in it.
#[derive(Debug)]
pub(crate) struct Place {
    directory: NodeId,
    name: Vec<u8>,
}

/// The layer being applied and the entry, for messages and for opaque markers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Origin<'a> {
    pub(crate) what: &'a str,
    pub(crate) layer: u32,
    pub(crate) path: &'a [u8],
}

impl Origin<'_> {
    pub(crate) fn bad_name(&self, problem: &'static str) -> Error {
        Error::BadName {
            what: self.what.to_owned(),
            name: Error::show(self.path),
            problem,
        }
    }
}

impl Tree {
    /// An empty root directory.
    pub(crate) fn new(limits: &Limits) -> Self {
        let depth = usize::try_from(limits.depth).unwrap_or(usize::MAX);
        Self {
            nodes: vec![Node {
                meta: default_directory(),
                content: Content::Directory(BTreeMap::new()),
            }],
            depth,
        }
    }

    pub(crate) fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0 as usize]
    }

    fn children(&mut self, id: NodeId) -> Option<&mut BTreeMap<Vec<u8>, Link>> {
        match &mut self.nodes[id.0 as usize].content {
            Content::Directory(children) => Some(children),
            _ => None,
        }
    }

    fn child(&self, directory: NodeId, name: &[u8]) -> Option<NodeId> {
        match &self.node(directory).content {
            Content::Directory(children) => children.get(name).map(|link| link.node),
            _ => None,
        }
    }

    fn add(&mut self, node: Node, origin: Origin<'_>) -> Result<NodeId, Error> {
        let id = u32::try_from(self.nodes.len()).map_err(|_| Error::TooLarge {
            what: format!("the number of inodes with {}", origin.what),
            found: self.nodes.len() as u64,
            limit: u64::from(u32::MAX),
        })?;
        self.nodes.push(node);
        Ok(NodeId(id))
    }

    /// Where `components` lead: the last one is a name (not followed), the others are directories, which are made if
    /// `create` says so. `None`: the root itself, or (without `create`) a parent does not exist.
    pub(crate) fn place(
        &mut self,
        components: &[&[u8]],
        create: bool,
        origin: Origin<'_>,
    ) -> Result<Option<Place>, Error> {
        let Some((name, parents)) = components.split_last() else {
            return Ok(None);
        };
        let place = |directory| Place {
            directory,
            name: name.to_vec(),
        };
        Ok(self.directory(parents, create, origin)?.map(place))
    }

    /// The directory that `components` lead to, following symbolic links inside the tree.
    pub(crate) fn directory(
        &mut self,
        components: &[&[u8]],
        create: bool,
        origin: Origin<'_>,
    ) -> Result<Option<NodeId>, Error> {
        let mut queue: VecDeque<Vec<u8>> = components.iter().map(|component| component.to_vec()).collect();
        let mut walked = vec![ROOT];
        let mut followed = 0;
        while let Some(component) = queue.pop_front() {
            let here = walked[walked.len() - 1];
            match component.as_slice() {
                b"" | b"." => continue,
                // Only a link's target has this; above the root is the root.
                b".." => {
                    walked.truncate((walked.len() - 1).max(1));
                    continue;
                }
                _ => {}
            }
            let Some(next) = self.child(here, &component) else {
                if !create {
                    return Ok(None);
                }
                let made = Node {
                    meta: default_directory(),
                    content: Content::Directory(BTreeMap::new()),
                };
                let node = self.add(made, origin)?;
                self.link(here, component, node, origin)?;
                walked.push(node);
                self.check_depth(walked.len(), origin)?;
                continue;
            };
            match &self.node(next).content {
                Content::Directory(_) => walked.push(next),
                Content::Symlink(target) => {
                    followed += 1;
                    if followed > MAX_SYMLINKS {
                        let (what, name) = (origin.what.to_owned(), Error::show(origin.path));
                        return Err(Error::SymlinkLoop {
                            what,
                            name,
                            limit: MAX_SYMLINKS,
                        });
                    }
                    if target.starts_with(b"/") {
                        walked.truncate(1);
                    }
                    for component in target.split(|&byte| byte == b'/').rev() {
                        queue.push_front(component.to_vec());
                    }
                }
                _ => return Err(not_a_directory(origin, &component)),
            }
            self.check_depth(walked.len(), origin)?;
        }
        Ok(walked.pop())
    }

    fn check_depth(&self, depth: usize, origin: Origin<'_>) -> Result<(), Error> {
        let what = || format!("the depth of {:?} in {}", Error::show(origin.path), origin.what);
        Limits::check(what, depth as u64, self.depth as u64)
    }

    /// Puts a name for `node` into `directory`.
    fn link(&mut self, directory: NodeId, name: Vec<u8>, node: NodeId, origin: Origin<'_>) -> Result<(), Error> {
        if name.len() > MAX_NAME {
            return Err(origin.bad_name("of which a component has more than 255 bytes"));
        }
        let link = Link {
            node,
            layer: origin.layer,
        };
        let children = self.children(directory).ok_or_else(|| not_a_directory(origin, &name))?;
        children.insert(name, link);
        Ok(())
    }

    /// Puts a new inode at `place`; what was there is replaced, but a directory put on a directory keeps its children.
    pub(crate) fn put(&mut self, place: Place, node: Node, origin: Origin<'_>) -> Result<(), Error> {
        if let (Content::Directory(_), Some(there)) = (&node.content, self.child(place.directory, &place.name))
            && self.children(there).is_some()
        {
            self.nodes[there.0 as usize].meta = node.meta;
            return self.link(place.directory, place.name, there, origin);
        }
        let id = self.add(node, origin)?;
        self.link(place.directory, place.name, id, origin)
    }

    /// The root directory's own entry.
    pub(crate) fn set_root(&mut self, meta: Meta) {
        self.nodes[0].meta = meta;
    }

    /// A second name for the inode at `target`.
    pub(crate) fn hard_link(&mut self, place: Place, target: &Place, origin: Origin<'_>) -> Result<(), &'static str> {
        let node = self
            .child(target.directory, &target.name)
            .ok_or("which does not exist")?;
        if self.children(node).is_some() {
            return Err("which is a directory");
        }
        self.link(place.directory, place.name, node, origin)
            .map_err(|_| "whose name is too long")
    }

    /// A whiteout: removes what layers below `origin`'s have put at `place`.
    pub(crate) fn remove(&mut self, place: &Place, origin: Origin<'_>) {
        let Some(children) = self.children(place.directory) else {
            return;
        };
        let Some(&link) = children.get(&place.name) else { return };
        self.clear(link.node, origin);
        if link.layer < origin.layer && self.children(link.node).is_none_or(|children| children.is_empty()) {
            self.children(place.directory)
                .map(|children| children.remove(&place.name));
        }
    }

    /// An opaque marker: removes from `directory`, if it is one, all that layers below `origin`'s have put there.
    pub(crate) fn clear(&mut self, directory: NodeId, origin: Origin<'_>) {
        let Some(children) = self.children(directory) else {
            return;
        };
        let names: Vec<_> = children.keys().cloned().collect();
        for name in names {
            self.remove(&Place { directory, name }, origin);
        }
    }
}

/// What a directory is that no layer describes.
fn default_directory() -> Meta {
    Meta {
        mode: 0o755,
        ..Meta::default()
    }
}

fn not_a_directory(origin: Origin<'_>, through: &[u8]) -> Error {
    Error::NotADirectory {
        what: origin.what.to_owned(),
        name: Error::show(origin.path),
        through: Error::show(through),
    }
}
