//! The structures of ext4 on the device. Names and numbers are those of Linux' Documentation/filesystems/ext4, whose files the comments name.
//!
//! No journal and no checksums. FLEX_BG lets the bitmaps and inode tables of all groups be in front, and SPARSE_SUPER2 without backups leaves
//! the insides of the other groups to the slots. All times are 0: the same layout and contents make the same image.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use super::{
    BLOCK, DESCRIPTOR, EXTENT_BLOCKS, FIRST_INODE, GROUP_BLOCKS, GROUP_INODES, INODE, INODE_EXTENTS, LABEL,
    LEAF_EXTENTS, Layout, TABLE_BLOCKS, UUID,
};
use crate::Error;

const PAGE: usize = 4096;

/// The root directory's inode (special_inodes.rst).
const ROOT: usize = 2;

/// Writes the metadata and the files' contents into a file that is a hole as long as the image; slots' bytes stay holes.
///
/// # Errors
/// [`Error::ImageContents`] if the contents are not those of the layout's files, [`Error::ImageFresh`] for a file with another size or with
/// data in it, and those of pwrite(2).
pub fn write(file: &File, layout: &Layout, contents: &[&[u8]]) -> Result<(), Error> {
    let (given, wanted) = (
        contents.iter().map(|it| it.len() as u64),
        layout.files().iter().map(|it| it.length),
    );
    if !given.eq(wanted) {
        return Err(Error::ImageContents);
    }
    let size = file.metadata().map_err(Error::io("ask for the size"))?.len();
    let data = base::sparse::blocks_with_data(file, 0..size, size.max(1)).map_err(Error::io("look for data"))?;
    if size != layout.size() || !data.is_empty() {
        return Err(Error::ImageFresh {
            size,
            wanted: layout.size(),
        });
    }
    let put = |bytes: &[u8], offset| {
        file.write_all_at(bytes, offset)
            .map_err(Error::io("write a file system"))
    };
    for (entry, bytes) in layout.files().iter().zip(contents) {
        put(bytes, entry.offset)?;
    }
    write_inodes(layout, &put)?;
    put(&directory(layout), layout.root() * BLOCK)?;
    for group in 0..layout.groups() {
        put(&descriptor(layout, group), BLOCK + group * DESCRIPTOR)?;
        put(
            &bitmap(&intersection(&layout.free(), group)),
            (layout.block_bitmaps() + group) * BLOCK,
        )?;
        let used = used_inodes(layout, group);
        put(
            &bitmap(&(used..GROUP_INODES as u64)),
            (layout.inode_bitmaps() + group) * BLOCK,
        )?;
    }
    put(&superblock(layout), 1024)
}

/// The first group's inodes, which are all that are used, and the blocks of extents that do not fit them.
fn write_inodes(layout: &Layout, put: &impl Fn(&[u8], u64) -> Result<(), Error>) -> Result<(), Error> {
    let mut table = [[0; INODE]; GROUP_INODES];
    let root = extents(layout.root(), 1, INODE_EXTENTS);
    Inode {
        mode: 0o40755,
        links: 2,
        length: BLOCK,
        blocks: 1,
        extents: &root,
    }
    .put(&mut table[ROOT - 1]);
    let mut leaf = layout.first_leaf();
    for (number, entry) in (FIRST_INODE..).zip(layout.entries()) {
        let (first, blocks) = (entry.offset / BLOCK, entry.blocks());
        let (extents, beside) = if entry.has_leaf() {
            put(&extents(first, blocks, LEAF_EXTENTS), leaf * BLOCK)?;
            leaf += 1;
            (index(leaf - 1), 1)
        } else {
            (extents(first, blocks, INODE_EXTENTS), 0)
        };
        let mode = 0o100_000 | u64::from(entry.mode);
        Inode {
            mode,
            links: 1,
            length: entry.length,
            blocks: blocks + beside,
            extents: &extents,
        }
        .put(&mut table[number - 1]);
    }
    put(table.as_flattened(), layout.inode_tables() * BLOCK)
}

/// What of a run of blocks lies in a group, counted from its start.
fn intersection(run: &Range<u64>, group: u64) -> Range<u64> {
    let (first, end) = (group * GROUP_BLOCKS, (group + 1) * GROUP_BLOCKS);
    run.start.clamp(first, end) - first..run.end.clamp(first, end) - first
}

/// Inodes of a group that are used: in the first those that are reserved and the files', and no others.
fn used_inodes(layout: &Layout, group: u64) -> u64 {
    let used = FIRST_INODE - 1 + layout.entries().count();
    if group == 0 { used as u64 } else { 0 }
}

/// A bitmap in which nothing is free but `free`. What is behind the end of the group or its inodes is used, too (bitmaps.rst).
fn bitmap(free: &Range<u64>) -> [u8; PAGE] {
    let mut bitmap = [0; PAGE];
    for (byte, first) in bitmap.iter_mut().zip((0..).step_by(8)) {
        let [start, end] = [free.start, free.end].map(|bit| bit.clamp(first, first + 8) - first);
        let zeroes = (1_u64 << end) - (1 << start);
        *byte = (!zeroes).to_le_bytes()[0];
    }
    bitmap
}

/// Numbers one after the other: bytes and value of each.
fn packed(fields: &[(usize, u64)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for &(width, value) in fields {
        bytes.extend_from_slice(&value.to_le_bytes()[..width]);
    }
    bytes
}

/// Numbers at their offsets: offset, bytes and value of each.
fn set(bytes: &mut [u8], fields: &[(usize, usize, u64)]) {
    for &(at, width, value) in fields {
        bytes[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
    }
}

/// `struct ext4_super_block` (super.rst).
fn superblock(layout: &Layout) -> [u8; 1024] {
    let mut bytes = [0; 1024];
    let (free, groups) = (layout.free(), layout.groups());
    let compat = 0x200; // SPARSE_SUPER2; s_backup_bgs stays 0: there are no backups.
    let incompat = 0x2 | 0x40 | 0x200; // FILETYPE, EXTENTS, FLEX_BG
    let ro_compat = 0x2 | 0x40; // LARGE_FILE, EXTRA_ISIZE
    let fields = [
        (0x00, 4, groups * GROUP_INODES as u64), // s_inodes_count
        (0x04, 4, layout.blocks()),
        (0x0c, 4, free.end - free.start),
        (0x10, 4, groups * GROUP_INODES as u64 - used_inodes(layout, 0)),
        (0x18, 4, 2), // s_log_block_size: 1024 << 2
        (0x1c, 4, 2), // s_log_cluster_size
        (0x20, 4, GROUP_BLOCKS),
        (0x24, 4, GROUP_BLOCKS), // s_clusters_per_group
        (0x28, 4, GROUP_INODES as u64),
        (0x36, 2, 0xffff), // s_max_mnt_count: never checked for that
        (0x38, 2, 0xef53),
        (0x3a, 2, 1), // s_state: cleanly unmounted
        (0x3c, 2, 1), // s_errors: continue, as with mke2fs
        (0x4c, 4, 1), // s_rev_level
        (0x54, 4, FIRST_INODE as u64),
        (0x58, 2, INODE as u64),
        (0x5c, 4, compat),
        (0x60, 4, incompat),
        (0x64, 4, ro_compat),
        (0xfc, 1, 1),   // s_def_hash_version: half MD4
        (0x15c, 2, 32), // s_min_extra_isize
        (0x15e, 2, 32), // s_want_extra_isize
        (0x160, 4, 1),  // s_flags: signed hashes
        (0x174, 1, 9),  // s_log_groups_per_flex: 512 groups, which is the largest image
    ];
    set(&mut bytes, &fields);
    bytes[0x68..0x78].copy_from_slice(&UUID);
    bytes[0x78..0x78 + LABEL.len()].copy_from_slice(LABEL.as_bytes());
    bytes
}

/// `struct ext4_group_desc` (group_descr.rst) up to the flags, of which there are none.
fn descriptor(layout: &Layout, group: u64) -> Vec<u8> {
    let free = intersection(&layout.free(), group);
    packed(&[
        (4, layout.block_bitmaps() + group),
        (4, layout.inode_bitmaps() + group),
        (4, layout.inode_tables() + group * TABLE_BLOCKS),
        (2, free.end - free.start),
        (2, GROUP_INODES as u64 - used_inodes(layout, group)),
        (2, u64::from(group == 0)), // bg_used_dirs_count
    ])
}

/// What an inode says of its file, beside its number.
struct Inode<'a> {
    mode: u64,
    links: u64,
    length: u64,
    /// Blocks of it and of its extents.
    blocks: u64,
    extents: &'a [u8],
}

impl Inode<'_> {
    /// `struct ext4_inode` (inodes.rst).
    fn put(&self, inode: &mut [u8; INODE]) {
        let fields = [
            (0x00, 2, self.mode),
            (0x04, 4, self.length),
            (0x1a, 2, self.links),
            (0x1c, 4, self.blocks * (BLOCK / 512)),
            (0x20, 4, 0x80000), // i_flags: EXTENTS
            (0x6c, 4, self.length >> 32),
            (0x80, 2, 32), // i_extra_isize
        ];
        set(inode, &fields);
        inode[0x28..0x28 + self.extents.len()].copy_from_slice(self.extents);
    }
}

/// `struct ext4_extent_header` (ifork.rst).
fn header(entries: u64, most: u64, depth: u64) -> Vec<u8> {
    packed(&[(2, 0xf30a), (2, entries), (2, most), (2, depth), (4, 0)])
}

/// Header and `struct ext4_extent` of blocks that follow each other. A length of up to 32768 says that the blocks are written.
fn extents(first: u64, blocks: u64, most: u64) -> Vec<u8> {
    let mut tree = header(blocks.div_ceil(EXTENT_BLOCKS), most, 0);
    for block in (0..blocks.div_ceil(EXTENT_BLOCKS)).map(|extent| extent * EXTENT_BLOCKS) {
        let count = (blocks - block).min(EXTENT_BLOCKS);
        tree.extend(packed(&[(4, block), (2, count), (2, 0), (4, first + block)]));
    }
    tree
}

/// Header and one `struct ext4_extent_idx`: the extents are in the block `leaf`.
fn index(leaf: u64) -> Vec<u8> {
    let mut tree = header(1, INODE_EXTENTS, 1);
    tree.extend(packed(&[(4, 0), (4, leaf), (4, 0)]));
    tree
}

/// The root directory's only block: `struct ext4_dir_entry_2` of each name (directory.rst). The last one takes what is left.
fn directory(layout: &Layout) -> Vec<u8> {
    const REGULAR: u64 = 1;
    const DIRECTORY: u64 = 2;
    let files = (FIRST_INODE..)
        .zip(layout.entries())
        .map(|(inode, entry)| (inode, entry.name.as_str(), REGULAR));
    let names: Vec<_> = [(ROOT, ".", DIRECTORY), (ROOT, "..", DIRECTORY)]
        .into_iter()
        .chain(files)
        .collect();
    let mut block = Vec::new();
    for (place, (inode, name, kind)) in names.iter().enumerate() {
        let last = place + 1 == names.len();
        let length = if last {
            PAGE - block.len()
        } else {
            (8 + name.len()).next_multiple_of(4)
        };
        let end = block.len() + length;
        block.extend(packed(&[
            (4, *inode as u64),
            (2, length as u64),
            (1, name.len() as u64),
            (1, *kind),
        ]));
        block.extend_from_slice(name.as_bytes());
        block.resize(end, 0);
    }
    block
}
