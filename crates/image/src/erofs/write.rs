//! Gives every inode and block its place and writes the image.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::FileExt;

use super::inode::{Body, Inode, Inodes};
use super::ondisk::{self, BLOCK, INODE_FLAT_INLINE, INODE_FLAT_PLAIN, NULL_ADDR, SLOT, SUPER_OFFSET, SUPER_SIZE};
use super::ondisk::{INODE_COMPACT_SIZE, INODE_EXTENDED_SIZE, SuperBlock};
use crate::tree::Tree;

/// Where things are: one `nid`, one first block and the length of the inline tail for each inode.
struct Plan {
    nids: Vec<u64>,
    blkaddr: Vec<u32>,
    tails: Vec<usize>,
    /// Blocks with inodes; the blocks of directories and links come after them, those of files after these.
    meta_blocks: u64,
    file_blkaddr: u64,
    blocks: u32,
}

/// Writes `tree`, whose files' contents are in `spool`, to `out`, an empty file. `progress` gets the bytes written and
/// the bytes there will be. An image of more blocks than 32 bits can count is `FileTooLarge`.
pub(crate) fn write(
    tree: &Tree,
    spool: &File,
    uuid: [u8; 16],
    out: impl Write,
    progress: &mut dyn FnMut(u64, u64),
) -> io::Result<u64> {
    let mut inodes = Inodes::of(tree);
    let build_time = commonest_time(&inodes);
    let plan = Plan::of(&inodes, build_time)?;
    for (index, inode) in inodes.list.iter_mut().enumerate() {
        inode.fields.datalayout = if plan.tails[index] > 0 {
            INODE_FLAT_INLINE
        } else {
            INODE_FLAT_PLAIN
        };
        if !matches!(inode.body, Body::None) {
            inode.fields.u = plan.blkaddr[index];
        }
    }
    let (meta, data) = plan.metadata(&inodes, build_time, uuid);
    let total = u64::from(plan.blocks) * BLOCK as u64;
    let mut out = BufWriter::with_capacity(1 << 20, out);
    out.write_all(&meta)?;
    out.write_all(&data)?;
    let mut done = (meta.len() + data.len()) as u64;
    progress(done, total);
    let mut buf = vec![0; 1 << 20];
    for inode in &inodes.list {
        if let Body::File { offset } = inode.body {
            let size = inode.fields.size;
            copy(spool, offset, size, &mut out, &mut buf)?;
            done += size.next_multiple_of(BLOCK as u64);
            progress(done, total);
        }
    }
    out.flush()?;
    Ok(total)
}

/// The superblock's time is that of all compact inodes: the one that most inodes have (the earliest of several).
fn commonest_time(inodes: &Inodes<'_>) -> u64 {
    let mut counts = BTreeMap::<u64, usize>::new();
    for inode in &inodes.list {
        if let (Ok(mtime), 0) = (u64::try_from(inode.fields.mtime), inode.fields.mtime_nsec) {
            *counts.entry(mtime).or_default() += 1;
        }
    }
    counts
        .into_iter()
        .max_by_key(|&(mtime, count)| (count, Reverse(mtime)))
        .map_or(0, |(mtime, _)| mtime)
}

fn copy(spool: &File, mut offset: u64, size: u64, out: &mut impl Write, buf: &mut [u8]) -> io::Result<()> {
    let mut left = size;
    while left > 0 {
        let want = usize::try_from(left).unwrap_or(usize::MAX).min(buf.len());
        spool.read_exact_at(&mut buf[..want], offset)?;
        out.write_all(&buf[..want])?;
        offset += want as u64;
        left -= want as u64;
    }
    let padding = size.next_multiple_of(BLOCK as u64) - size;
    out.write_all(&[0; BLOCK][..usize::try_from(padding).unwrap_or(0)])
}

impl Plan {
    fn of(inodes: &Inodes<'_>, build_time: u64) -> io::Result<Self> {
        let count = inodes.list.len();
        let mut plan = Self {
            nids: Vec::with_capacity(count),
            blkaddr: vec![NULL_ADDR; count],
            tails: Vec::with_capacity(count),
            meta_blocks: 0,
            file_blkaddr: 0,
            blocks: 0,
        };
        let mut position = SUPER_OFFSET + SUPER_SIZE;
        for inode in &inodes.list {
            let fixed = fixed_size(inode, build_time);
            let (at, tail) = fit(position, fixed, inline_tail(inode));
            plan.nids.push((at / SLOT) as u64);
            plan.tails.push(tail);
            position = (at + fixed + tail).next_multiple_of(SLOT);
        }
        plan.meta_blocks = position.div_ceil(BLOCK) as u64;
        let mut next = plan.meta_blocks;
        for (index, inode) in inodes.list.iter().enumerate() {
            if matches!(inode.body, Body::Directory(_) | Body::Symlink(_)) {
                let blocks = (inode.fields.size - plan.tails[index] as u64).div_ceil(BLOCK as u64);
                next = plan.place(index, next, blocks)?;
            }
        }
        plan.file_blkaddr = next;
        for (index, inode) in inodes.list.iter().enumerate() {
            if matches!(inode.body, Body::File { .. }) {
                next = plan.place(index, next, inode.fields.size.div_ceil(BLOCK as u64))?;
            }
        }
        plan.blocks = u32::try_from(next).map_err(|_| io::ErrorKind::FileTooLarge)?;
        Ok(plan)
    }

    /// Gives the inode `blocks` blocks from `next`; the block after them.
    fn place(&mut self, index: usize, next: u64, blocks: u64) -> io::Result<u64> {
        if blocks > 0 {
            self.blkaddr[index] = u32::try_from(next).map_err(|_| io::ErrorKind::FileTooLarge)?;
        }
        Ok(next + blocks)
    }

    /// The blocks with inodes, and those of directories and links.
    fn metadata(&self, inodes: &Inodes<'_>, build_time: u64, uuid: [u8; 16]) -> (Vec<u8>, Vec<u8>) {
        let bytes = |blocks: u64| usize::try_from(blocks).unwrap_or(usize::MAX) * BLOCK;
        let mut meta = vec![0; bytes(self.meta_blocks)];
        let mut data = Vec::with_capacity(bytes(self.file_blkaddr - self.meta_blocks));
        for (index, inode) in inodes.list.iter().enumerate() {
            let mut out = inode.fields.encode(build_time);
            out.extend(&inode.xattrs);
            let contents = match &inode.body {
                Body::Directory(directory) => inodes.encode(directory, &self.nids),
                Body::Symlink(target) => target.to_vec(),
                Body::File { .. } | Body::None => Vec::new(),
            };
            let (whole, tail) = contents.split_at(contents.len() - self.tails[index]);
            out.extend(tail);
            let at = usize::try_from(self.nids[index]).unwrap_or(usize::MAX) * SLOT;
            meta[at..at + out.len()].copy_from_slice(&out);
            data.extend(whole);
            data.resize(data.len().next_multiple_of(BLOCK), 0);
        }
        let superblock = SuperBlock {
            // The root is the first inode, right after the superblock.
            root_nid: u16::try_from(self.nids[0]).unwrap_or(0),
            inos: inodes.list.len() as u64,
            build_time,
            blocks: self.blocks,
            uuid,
        };
        meta[SUPER_OFFSET..SUPER_OFFSET + SUPER_SIZE].copy_from_slice(&superblock.encode());
        ondisk::seal(&mut meta[..BLOCK]);
        (meta, data)
    }
}

/// Bytes of the inode and its attributes.
fn fixed_size(inode: &Inode<'_>, build_time: u64) -> usize {
    let size = if inode.fields.is_compact(build_time) {
        INODE_COMPACT_SIZE
    } else {
        INODE_EXTENDED_SIZE
    };
    size + inode.xattrs.len()
}

/// Bytes of the last, partial block that may stand after the inode. A regular file's may not: see [`super`].
fn inline_tail(inode: &Inode<'_>) -> usize {
    match inode.body {
        // The last block of less than 4096 bytes.
        Body::Directory(_) | Body::Symlink(_) => usize::try_from(inode.fields.size % BLOCK as u64).unwrap_or(0),
        Body::File { .. } | Body::None => 0,
    }
}

/// The first slot from `position` on where an inode of `fixed` bytes crosses no block boundary if it can help it and
/// its inline tail lies in one block, as it must. A tail for which that is impossible is not inline (0).
fn fit(position: usize, fixed: usize, tail: usize) -> (usize, usize) {
    let next_block = position.next_multiple_of(BLOCK);
    for (at, tail) in [(position, tail), (next_block, tail), (position, 0)] {
        let crosses = at % BLOCK + fixed > BLOCK && fixed <= BLOCK;
        let tail_crosses = tail > 0 && (at + fixed) % BLOCK + tail > BLOCK;
        if !crosses && !tail_crosses {
            return (at, tail);
        }
    }
    (next_block, 0)
}
