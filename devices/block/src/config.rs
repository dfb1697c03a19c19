//! Features and configuration space (5.2.3, 5.2.4): a table of fields.

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO,
    VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};

use crate::disk::{Disk, SECTOR};

/// Entries of each queue.
pub(crate) const QUEUE_SIZE: u16 = 256;

/// Data buffers of one request: what a chain has room for beside header and status (2.7.5.3: no chain is longer than
/// its queue).
const SEG_MAX: u32 = QUEUE_SIZE as u32 - 2;

/// The most sectors of one discard or write-zeroes request: 1 GiB, so that one cannot keep the file system busy for ever.
pub(crate) const MAX_RANGE_SECTORS: u32 = 1 << 21;

/// Ranges of one discard or write-zeroes request.
const MAX_RANGES: u32 = 1;

/// What files are best read and discarded in: pages, as powers of two of logical blocks and in sectors.
const PHYSICAL_BLOCK: u32 = 4096;

/// Bytes up to and including `write_zeroes_may_unmap`, padded.
const LENGTH: usize = 60;

/// Offsets in `struct virtio_blk_config`.
mod field {
    pub(super) const CAPACITY: usize = 0;
    pub(super) const SEG_MAX: usize = 12;
    pub(super) const BLK_SIZE: usize = 20;
    pub(super) const PHYSICAL_BLOCK_EXP: usize = 24;
    pub(super) const NUM_QUEUES: usize = 34;
    pub(super) const MAX_DISCARD_SECTORS: usize = 36;
    pub(super) const MAX_DISCARD_SEG: usize = 40;
    pub(super) const DISCARD_SECTOR_ALIGNMENT: usize = 44;
    pub(super) const MAX_WRITE_ZEROES_SECTORS: usize = 48;
    pub(super) const MAX_WRITE_ZEROES_SEG: usize = 52;
    pub(super) const WRITE_ZEROES_MAY_UNMAP: usize = 56;
}

/// The features of a disk with so many queues.
pub(crate) fn features(disk: &Disk, queues: u16) -> u64 {
    let mut features = 1 << VIRTIO_BLK_F_SEG_MAX | 1 << VIRTIO_BLK_F_BLK_SIZE | 1 << VIRTIO_BLK_F_TOPOLOGY;
    if disk.read_only() {
        features |= 1 << VIRTIO_BLK_F_RO;
    } else {
        features |= 1 << VIRTIO_BLK_F_FLUSH;
    }
    if disk.discards() {
        features |= 1 << VIRTIO_BLK_F_DISCARD | 1 << VIRTIO_BLK_F_WRITE_ZEROES;
    }
    if queues > 1 {
        features |= 1 << VIRTIO_BLK_F_MQ;
    }
    features
}

/// The configuration space of a disk with so many queues.
pub(crate) struct ConfigSpace([u8; LENGTH]);

impl ConfigSpace {
    pub(crate) fn new(disk: &Disk, queues: u16) -> Self {
        let mut space = Self([0; LENGTH]);
        let exponent = (PHYSICAL_BLOCK / disk.block_size()).max(1).ilog2();
        space.set(field::CAPACITY, &(disk.bytes() / SECTOR).to_le_bytes());
        space.set(field::SEG_MAX, &SEG_MAX.to_le_bytes());
        space.set(field::BLK_SIZE, &disk.block_size().to_le_bytes());
        space.set(field::PHYSICAL_BLOCK_EXP, &exponent.to_le_bytes()[..1]);
        space.set(field::NUM_QUEUES, &queues.to_le_bytes());
        if disk.discards() {
            let alignment = u64::from(PHYSICAL_BLOCK) / SECTOR;
            space.set(field::MAX_DISCARD_SECTORS, &MAX_RANGE_SECTORS.to_le_bytes());
            space.set(field::MAX_DISCARD_SEG, &MAX_RANGES.to_le_bytes());
            space.set(field::DISCARD_SECTOR_ALIGNMENT, &alignment.to_le_bytes()[..4]);
            space.set(field::MAX_WRITE_ZEROES_SECTORS, &MAX_RANGE_SECTORS.to_le_bytes());
            space.set(field::MAX_WRITE_ZEROES_SEG, &MAX_RANGES.to_le_bytes());
            space.set(field::WRITE_ZEROES_MAY_UNMAP, &[1]);
        }
        space
    }

    /// Reads; what lies beyond stays as it is.
    pub(crate) fn read(&self, offset: usize, data: &mut [u8]) {
        let rest = self.0.get(offset..).unwrap_or_default();
        for (byte, value) in data.iter_mut().zip(rest) {
            *byte = *value;
        }
    }

    fn set(&mut self, offset: usize, value: &[u8]) {
        self.0[offset..offset + value.len()].copy_from_slice(value);
    }
}
