//! The file system of a window that is a device of a virtual machine (virtio-pmem): which files there are, and at which offset of the device
//! each file's bytes are, so that the host has the memory that programs of the guest map.
//!
//! A [`Layout`] is computed from numbers alone; [`write`] makes a minimal ext4 of it, which the guest's kernel mounts by DAX. Every block of
//! every file is mapped as written, by extents that are one run: a guest maps zeroes of its own where there is a hole or an unwritten
//! extent, and never sees what the host puts there. Knows no device, no agent and nothing of what is in the files; nothing is ever read
//! back, since the guest may change the file system as it likes.

mod format;
#[cfg(test)]
mod tests;

use std::ops::Range;

pub use format::write;

use crate::Error;

/// The volume label, by which the guest's agent finds the device.
pub const LABEL: &str = "basalt-accel";

/// The file system's UUID, the same in all images: it names the format, as no guest has two such devices.
pub const UUID: [u8; 16] = *b"BSLTACCW\x80\0\0\0ext4";

/// A block, and what slots are multiples of and begin at multiples of: what one entry of an upper page table maps.
const BLOCK: u64 = 4096;
const UNIT: u64 = 2 << 20;

/// The smallest and the largest image.
const LEAST: u64 = 32 << 20;
const MOST: u64 = 64 << 30;

/// The most blocks of an extent that is mapped as written, and the most extents: in an inode, and in one block beside it (ifork.rst).
const EXTENT_BLOCKS: u64 = 32768;
const INODE_EXTENTS: u64 = 4;
const LEAF_EXTENTS: u64 = 340;

/// Blocks of a group, whose bitmap is one block; bytes of a group's descriptor without the feature 64BIT (group_descr.rst).
const GROUP_BLOCKS: u64 = 32768;
const DESCRIPTOR: u64 = 32;

/// Inodes of a group, so many that the first group's are enough, and the first that is not reserved (special_inodes.rst).
const GROUP_INODES: usize = 64;
const INODE: usize = 256;
const FIRST_INODE: usize = 11;

/// Blocks of a group's inode table.
const TABLE_BLOCKS: u64 = (GROUP_INODES * INODE) as u64 / BLOCK;

/// Slots beside the two large ones.
const SMALL_SLOTS: u64 = 8;

/// A file of the image: its name in the root directory, mode, size in bytes, and where its bytes are in the image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The name.
    pub name: String,
    /// The permission bits.
    pub mode: u32,
    /// Where its first byte is in the image; all others follow.
    pub offset: u64,
    /// Its size in bytes.
    pub length: u64,
}

impl Entry {
    fn blocks(&self) -> u64 {
        self.length.div_ceil(BLOCK)
    }

    fn extents(&self) -> u64 {
        self.blocks().div_ceil(EXTENT_BLOCKS)
    }

    /// Whether its extents do not fit its inode.
    fn has_leaf(&self) -> bool {
        self.extents() > INODE_EXTENTS
    }
}

/// Which files an image has, and where. In blocks, from the image's start: superblock, group descriptors, the block bitmaps of all groups,
/// their inode bitmaps, their inode tables, the root directory, files with contents, blocks of extents; then what is free, which is less
/// than a slot; slots to the end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    size: u64,
    files: Vec<Entry>,
    slots: Vec<Entry>,
}

impl Layout {
    /// Slots of an image of `size` bytes beside files with contents, each a name, permission bits and a length: half of the space, a
    /// quarter, and eight of what is left, or as many as there are. Each is a multiple of 2 MiB and at a multiple of 2 MiB in the image
    /// (huge DAX mappings), named `slot-0` and so on, with mode 0600. Nothing but what precedes the first slot stays free.
    ///
    /// # Errors
    /// [`Error::ImageSize`], [`Error::ImageFile`] for a name, a mode or a length that cannot be, and [`Error::ImageFull`].
    pub fn new(size: u64, files: &[(&str, u32, u64)]) -> Result<Self, Error> {
        if !(LEAST..=MOST).contains(&size) || !size.is_multiple_of(UNIT) {
            return Err(Error::ImageSize { size });
        }
        let mut layout = Self {
            size,
            files: Vec::new(),
            slots: Vec::new(),
        };
        let mut offset = layout.first_file() * BLOCK;
        for &(name, mode, length) in files {
            layout.check_file(name, mode, length)?;
            layout.files.push(Entry {
                name: name.to_owned(),
                mode,
                offset,
                length,
            });
            offset += length.next_multiple_of(BLOCK);
        }
        // So many blocks of extents are kept free as there could be, since how many there are follows from the slots' sizes.
        let leaves = files.len() as u64 + SMALL_SLOTS + 2;
        let start = (offset + leaves * BLOCK).next_multiple_of(UNIT);
        layout.add_slots(start)?;
        Ok(layout)
    }

    /// Bytes of the image.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The slots, largest first.
    pub fn slots(&self) -> &[Entry] {
        &self.slots
    }

    /// The files with contents, in the order in which they were asked for.
    pub fn files(&self) -> &[Entry] {
        &self.files
    }

    fn add_slots(&mut self, start: u64) -> Result<(), Error> {
        let units = self.size.saturating_sub(start) / UNIT;
        let (half, quarter) = (units / 2, units / 4);
        let left = units - half - quarter;
        if quarter == 0 {
            return Err(Error::ImageFull {
                size: self.size,
                needed: start.saturating_add(4 * UNIT),
            });
        }
        let small = left.min(SMALL_SLOTS);
        let shares = (0..small).map(|slot| left / small + u64::from(slot < left % small));
        let mut offset = start;
        for (slot, share) in [half, quarter].into_iter().chain(shares).enumerate() {
            let length = share * UNIT;
            self.slots.push(Entry {
                name: format!("slot-{slot}"),
                mode: 0o600,
                offset,
                length,
            });
            offset += length;
        }
        Ok(())
    }

    fn check_file(&self, name: &str, mode: u32, length: u64) -> Result<(), Error> {
        let names = || self.files.iter().map(|file| file.name.as_str());
        // Every name with its header, rounded up, and of slots and the directory itself less than 20 bytes each (directory.rst).
        let directory: usize = names().chain([name]).map(|name| name.len() + 8 + 4).sum();
        let refused = match name {
            "" | "." | ".." => Some("the name is none"),
            _ if name.len() > 255 => Some("the name has more than 255 bytes"),
            _ if name.contains(['/', '\0']) => Some("the name has a slash or a zero in it"),
            _ if name.starts_with("slot-") => Some("slots have such names"),
            _ if names().any(|other| other == name) => Some("there is one of that name already"),
            _ if mode & !0o7777 != 0 => Some("the mode has more than permission bits"),
            _ if directory > 3500 || names().count() >= 32 => {
                Some("there are too many files, or too long names, for the root directory")
            }
            _ if length > EXTENT_BLOCKS * LEAF_EXTENTS * BLOCK => {
                Some("a block of extents is not enough for so long a file")
            }
            _ => None,
        };
        refused.map_or(Ok(()), |why| {
            Err(Error::ImageFile {
                name: name.to_owned(),
                why,
            })
        })
    }

    fn blocks(&self) -> u64 {
        self.size / BLOCK
    }

    fn groups(&self) -> u64 {
        self.blocks().div_ceil(GROUP_BLOCKS)
    }

    fn block_bitmaps(&self) -> u64 {
        1 + (self.groups() * DESCRIPTOR).div_ceil(BLOCK)
    }

    fn inode_bitmaps(&self) -> u64 {
        self.block_bitmaps() + self.groups()
    }

    fn inode_tables(&self) -> u64 {
        self.inode_bitmaps() + self.groups()
    }

    fn root(&self) -> u64 {
        self.inode_tables() + self.groups() * TABLE_BLOCKS
    }

    fn first_file(&self) -> u64 {
        self.root() + 1
    }

    fn first_leaf(&self) -> u64 {
        self.first_file() + self.files.iter().map(Entry::blocks).sum::<u64>()
    }

    /// All files, in the order of their inodes.
    fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.files.iter().chain(&self.slots)
    }

    /// The blocks that nothing uses: one run.
    fn free(&self) -> Range<u64> {
        let leaves = self.entries().filter(|entry| entry.has_leaf()).count() as u64;
        self.first_leaf() + leaves..self.slots[0].offset / BLOCK
    }
}
