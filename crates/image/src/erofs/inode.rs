//! A tree as a list of inodes in the order that they will have on disk, and directories as blocks. Knows where nothing
//! is yet: `nid`s and block addresses come from [`super::write`].

use std::collections::HashMap;
use std::ops::Range;

use super::ondisk::{self, BLOCK, DIRENT_SIZE, InodeFields};
use super::xattr;
use crate::tree::{Content, Node, NodeId, ROOT, Tree};

/// What an inode's data are.
#[derive(Debug)]
pub(super) enum Body<'t> {
    None,
    File { offset: u64 },
    Symlink(&'t [u8]),
    Directory(Directory<'t>),
}

/// Names of a directory, sorted bytewise, `.` and `..` among them.
#[derive(Debug)]
pub(super) struct Directory<'t> {
    entries: Vec<(&'t [u8], NodeId)>,
    /// The entries of each block.
    blocks: Vec<Range<usize>>,
}

/// One inode.
#[derive(Debug)]
pub(super) struct Inode<'t> {
    pub(super) fields: InodeFields,
    pub(super) xattrs: Vec<u8>,
    pub(super) body: Body<'t>,
}

/// All inodes, the root's first.
#[derive(Debug)]
pub(super) struct Inodes<'t> {
    pub(super) list: Vec<Inode<'t>>,
    index: HashMap<NodeId, usize>,
}

impl<'t> Inodes<'t> {
    /// A depth-first walk; an inode with several names stands where the first of them is.
    pub(super) fn of(tree: &'t Tree) -> Self {
        let mut inodes = Self {
            list: Vec::new(),
            index: HashMap::new(),
        };
        let mut open = vec![(ROOT, ROOT)];
        while let Some((id, parent)) = open.pop() {
            if let Some(&known) = inodes.index.get(&id) {
                inodes.list[known].fields.nlink += 1;
                continue;
            }
            inodes.index.insert(id, inodes.list.len());
            let node = tree.node(id);
            let inode = inode(node, id, parent, inodes.list.len());
            inodes.list.push(inode);
            if let Content::Directory(children) = &node.content {
                open.extend(children.values().rev().map(|link| (link.node, id)));
            }
        }
        inodes.count_subdirectories(tree);
        inodes
    }

    /// A directory has its own name, its `.`, and the `..` of each directory in it.
    fn count_subdirectories(&mut self, tree: &Tree) {
        for inode in &mut self.list {
            if let Body::Directory(directory) = &inode.body {
                let is_directory = |id: &NodeId| matches!(tree.node(*id).content, Content::Directory(_));
                let count = directory.entries.iter().filter(|(_, id)| is_directory(id)).count();
                inode.fields.nlink = u32::try_from(count).unwrap_or(u32::MAX);
            }
        }
    }

    /// The blocks of a directory (the last one cut off after its last name), given the `nid` of each inode.
    pub(super) fn encode(&self, directory: &Directory<'_>, nids: &[u64]) -> Vec<u8> {
        let mut out = Vec::new();
        for block in &directory.blocks {
            out.resize(out.len().next_multiple_of(BLOCK), 0);
            let entries = &directory.entries[block.clone()];
            let mut nameoff = entries.len() * DIRENT_SIZE;
            for (name, id) in entries {
                let index = self.index[id];
                let file_type = file_type(self.list[index].fields.mode);
                // A block has 4096 bytes, so any offset in it fits.
                out.extend(ondisk::dirent(
                    nids[index],
                    u16::try_from(nameoff).unwrap_or(u16::MAX),
                    file_type,
                ));
                nameoff += name.len();
            }
            for (name, _) in entries {
                out.extend(*name);
            }
        }
        out
    }
}

impl<'t> Directory<'t> {
    fn new(children: impl Iterator<Item = (&'t [u8], NodeId)>, id: NodeId, parent: NodeId) -> Self {
        let mut entries: Vec<_> = children
            .chain([(b".".as_slice(), id), (b"..".as_slice(), parent)])
            .collect();
        entries.sort_unstable();
        let mut blocks = Vec::new();
        let (mut start, mut used) = (0, 0);
        for (at, (name, _)) in entries.iter().enumerate() {
            let size = DIRENT_SIZE + name.len();
            if used + size > BLOCK {
                blocks.push(start..at);
                (start, used) = (at, 0);
            }
            used += size;
        }
        blocks.push(start..entries.len());
        Self { entries, blocks }
    }

    fn size(&self) -> u64 {
        let last = self.blocks.last().cloned().unwrap_or_default();
        let tail: usize = self.entries[last]
            .iter()
            .map(|(name, _)| DIRENT_SIZE + name.len())
            .sum();
        ((self.blocks.len() - 1) * BLOCK + tail) as u64
    }
}

fn inode(node: &Node, id: NodeId, parent: NodeId, index: usize) -> Inode<'_> {
    let (body, type_bits, size, u) = match &node.content {
        Content::Directory(children) => {
            let children = children.iter().map(|(name, link)| (name.as_slice(), link.node));
            let directory = Directory::new(children, id, parent);
            let size = directory.size();
            (Body::Directory(directory), 0o040_000, size, 0)
        }
        Content::File { offset, size } => (Body::File { offset: *offset }, 0o100_000, *size, 0),
        Content::Symlink(target) => (Body::Symlink(target), 0o120_000, target.len() as u64, 0),
        Content::Char { major, minor } => (Body::None, 0o020_000, 0, ondisk::rdev(*major, *minor)),
        Content::Block { major, minor } => (Body::None, 0o060_000, 0, ondisk::rdev(*major, *minor)),
        Content::Fifo => (Body::None, 0o010_000, 0, 0),
    };
    let xattrs = xattr::encode(&node.meta.xattrs);
    let fields = InodeFields {
        datalayout: ondisk::INODE_FLAT_PLAIN,
        xattr_icount: xattr::icount(&xattrs),
        mode: type_bits | node.meta.mode,
        nlink: 1,
        size,
        u,
        ino: u32::try_from(index + 1).unwrap_or(0),
        uid: node.meta.uid,
        gid: node.meta.gid,
        mtime: node.meta.mtime,
        mtime_nsec: node.meta.mtime_nsec,
    };
    Inode { fields, xattrs, body }
}

/// The kernel's generic `FT_*` numbers.
fn file_type(mode: u16) -> u8 {
    match mode >> 12 {
        0o10 => 1,
        0o04 => 2,
        0o02 => 3,
        0o06 => 4,
        0o01 => 5,
        0o12 => 7,
        _ => 0,
    }
}
