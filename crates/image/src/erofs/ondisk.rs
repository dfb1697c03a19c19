//! erofs on disk, with the names of Linux's `fs/erofs/erofs_fs.h`; see also Documentation/filesystems/erofs.rst.
//! All numbers are little-endian. Only what an uncompressed image on one device needs is here.

/// `EROFS_SUPER_OFFSET`: the first 1024 bytes are for boot sectors.
pub(crate) const SUPER_OFFSET: usize = 1024;
/// `sizeof(struct erofs_super_block)` without extension slots.
pub(crate) const SUPER_SIZE: usize = 128;
/// `EROFS_SUPER_MAGIC_V1` (uapi/linux/magic.h).
pub(crate) const SUPER_MAGIC_V1: u32 = 0xe0f5_e1e2;
/// `blkszbits`: 4096-byte blocks, the page size, which DAX asks for.
pub(crate) const BLKSZBITS: u8 = 12;
/// Bytes of a block.
pub(crate) const BLOCK: usize = 1 << BLKSZBITS;
/// A `nid` counts slots of this size from `meta_blkaddr`, which is block 0 here (`EROFS_ISLOTBITS`).
pub(crate) const SLOT: usize = 32;
/// `EROFS_NULL_ADDR` as a `raw_blkaddr`: no block.
pub(crate) const NULL_ADDR: u32 = u32::MAX;

/// `EROFS_FEATURE_COMPAT_SB_CHKSUM`: `checksum` is crc32c over the superblock and the rest of its block.
const FEATURE_COMPAT_SB_CHKSUM: u32 = 0x1;
/// `EROFS_FEATURE_COMPAT_MTIME`: times are modification times.
const FEATURE_COMPAT_MTIME: u32 = 0x2;

/// `EROFS_INODE_FLAT_PLAIN`: contents are blocks from `raw_blkaddr`.
pub(crate) const INODE_FLAT_PLAIN: u16 = 0;
/// `EROFS_INODE_FLAT_INLINE`: the same, but the last, partial block follows the inode and its attributes.
pub(crate) const INODE_FLAT_INLINE: u16 = 2;
/// `EROFS_INODE_LAYOUT_EXTENDED`, bit `EROFS_I_VERSION_BIT` of `i_format`; 0 is compact.
const INODE_LAYOUT_EXTENDED: u16 = 1;
/// `EROFS_I_DATALAYOUT_BIT`.
const I_DATALAYOUT_BIT: u16 = 1;
/// `sizeof(struct erofs_inode_compact)`.
pub(crate) const INODE_COMPACT_SIZE: usize = 32;
/// `sizeof(struct erofs_inode_extended)`.
pub(crate) const INODE_EXTENDED_SIZE: usize = 64;
/// `sizeof(struct erofs_dirent)`.
pub(crate) const DIRENT_SIZE: usize = 12;

/// `struct erofs_super_block`, less what is zero in every image of ours: no incompatible feature, no compression, no
/// further devices, metadata from block 0, no shared attributes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SuperBlock {
    pub(crate) root_nid: u16,
    pub(crate) inos: u64,
    pub(crate) build_time: u64,
    pub(crate) blocks: u32,
    pub(crate) uuid: [u8; 16],
}

impl SuperBlock {
    /// With `checksum` zero; [`seal`] sets it when the rest of the block is there.
    pub(crate) fn encode(&self) -> [u8; SUPER_SIZE] {
        let mut out = [0; SUPER_SIZE];
        out[0..4].copy_from_slice(&SUPER_MAGIC_V1.to_le_bytes());
        out[8..12].copy_from_slice(&(FEATURE_COMPAT_SB_CHKSUM | FEATURE_COMPAT_MTIME).to_le_bytes());
        out[12] = BLKSZBITS;
        out[14..16].copy_from_slice(&self.root_nid.to_le_bytes());
        out[16..24].copy_from_slice(&self.inos.to_le_bytes());
        out[24..32].copy_from_slice(&self.build_time.to_le_bytes());
        out[36..40].copy_from_slice(&self.blocks.to_le_bytes());
        out[48..64].copy_from_slice(&self.uuid);
        out
    }
}

/// Sets the superblock's `checksum` in block 0.
pub(crate) fn seal(block0: &mut [u8]) {
    let checksum = superblock_checksum(block0);
    block0[SUPER_OFFSET + 4..SUPER_OFFSET + 8].copy_from_slice(&checksum.to_le_bytes());
}

/// The number of blocks that the superblock in `block0` states; what is wrong with it is the error.
pub(crate) fn check_superblock(block0: &[u8; BLOCK]) -> Result<u32, String> {
    let field = |at: usize| {
        let at = SUPER_OFFSET + at;
        u32::from_le_bytes([block0[at], block0[at + 1], block0[at + 2], block0[at + 3]])
    };
    if field(0) != SUPER_MAGIC_V1 {
        return Err(format!(
            "its magic number is {:#010x} instead of {SUPER_MAGIC_V1:#010x}",
            field(0)
        ));
    }
    let checksum = superblock_checksum(block0);
    if field(4) != checksum {
        return Err(format!(
            "its superblock's checksum is {:#010x} instead of {checksum:#010x}",
            field(4)
        ));
    }
    Ok(field(36))
}

/// crc32c (Castagnoli, reflected), begun with all ones and not inverted at the end, as the kernel's `crc32c(~0, ...)`;
/// from the superblock to the end of the block, `checksum` itself as zero.
fn superblock_checksum(block0: &[u8]) -> u32 {
    const POLYNOMIAL: u32 = 0x82f6_3b78;
    let bytes = block0[SUPER_OFFSET..BLOCK].iter().enumerate();
    bytes.fold(u32::MAX, |sum, (at, &byte)| {
        let byte = if (4..8).contains(&at) { 0 } else { byte };
        (0..8).fold(sum ^ u32::from(byte), |sum, _| {
            (sum >> 1) ^ (POLYNOMIAL & (sum & 1).wrapping_neg())
        })
    })
}

/// `struct erofs_inode_compact` or `struct erofs_inode_extended`, whichever [`InodeFields::is_compact`] says.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InodeFields {
    pub(crate) datalayout: u16,
    pub(crate) xattr_icount: u16,
    /// `i_mode` with its type bits.
    pub(crate) mode: u16,
    pub(crate) nlink: u32,
    pub(crate) size: u64,
    /// `i_u`: `raw_blkaddr` or `rdev`.
    pub(crate) u: u32,
    pub(crate) ino: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mtime: i64,
    pub(crate) mtime_nsec: u32,
}

impl InodeFields {
    /// A compact inode has 16 bits for owners and links, 32 for the size, and the superblock's time.
    pub(crate) fn is_compact(&self, build_time: u64) -> bool {
        let time = u64::try_from(self.mtime).is_ok_and(|mtime| mtime == build_time) && self.mtime_nsec == 0;
        time && self.uid.max(self.gid).max(self.nlink) <= u32::from(u16::MAX) && self.size <= u64::from(u32::MAX)
    }

    pub(crate) fn encode(&self, build_time: u64) -> Vec<u8> {
        if self.is_compact(build_time) {
            self.compact()
        } else {
            self.extended()
        }
    }

    fn compact(&self) -> Vec<u8> {
        let mut out = vec![0; INODE_COMPACT_SIZE];
        out[0..2].copy_from_slice(&(self.datalayout << I_DATALAYOUT_BIT).to_le_bytes());
        out[2..4].copy_from_slice(&self.xattr_icount.to_le_bytes());
        out[4..6].copy_from_slice(&self.mode.to_le_bytes());
        // The lower halves: is_compact() has made sure that the upper ones are zero.
        out[6..8].copy_from_slice(&self.nlink.to_le_bytes()[..2]);
        out[8..12].copy_from_slice(&self.size.to_le_bytes()[..4]);
        out[16..20].copy_from_slice(&self.u.to_le_bytes());
        out[20..24].copy_from_slice(&self.ino.to_le_bytes());
        out[24..26].copy_from_slice(&self.uid.to_le_bytes()[..2]);
        out[26..28].copy_from_slice(&self.gid.to_le_bytes()[..2]);
        out
    }

    fn extended(&self) -> Vec<u8> {
        let mut out = vec![0; INODE_EXTENDED_SIZE];
        let format = (self.datalayout << I_DATALAYOUT_BIT) | INODE_LAYOUT_EXTENDED;
        out[0..2].copy_from_slice(&format.to_le_bytes());
        out[2..4].copy_from_slice(&self.xattr_icount.to_le_bytes());
        out[4..6].copy_from_slice(&self.mode.to_le_bytes());
        out[8..16].copy_from_slice(&self.size.to_le_bytes());
        out[16..20].copy_from_slice(&self.u.to_le_bytes());
        out[20..24].copy_from_slice(&self.ino.to_le_bytes());
        out[24..28].copy_from_slice(&self.uid.to_le_bytes());
        out[28..32].copy_from_slice(&self.gid.to_le_bytes());
        out[32..40].copy_from_slice(&self.mtime.to_le_bytes());
        out[40..44].copy_from_slice(&self.mtime_nsec.to_le_bytes());
        out[44..48].copy_from_slice(&self.nlink.to_le_bytes());
        out
    }
}

/// `struct erofs_dirent`.
pub(crate) fn dirent(nid: u64, nameoff: u16, file_type: u8) -> [u8; DIRENT_SIZE] {
    let mut out = [0; DIRENT_SIZE];
    out[0..8].copy_from_slice(&nid.to_le_bytes());
    out[8..10].copy_from_slice(&nameoff.to_le_bytes());
    out[10] = file_type;
    out
}

/// A device number as `i_u.rdev` has it: the kernel's `new_encode_dev`.
pub(crate) fn rdev(major: u32, minor: u32) -> u32 {
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}
