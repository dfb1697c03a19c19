//! The file or block device behind a disk: what it is, how large, what it can do.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;

use ::device::CreateError;
use rustix::fs::{FallocateFlags, OFlags};
use virtio_bindings::virtio_blk::VIRTIO_BLK_ID_BYTES;

/// The unit of positions and lengths (5.2.4).
pub(crate) const SECTOR: u64 = 512;

/// Bytes of a serial number (5.2.6).
pub(crate) const SERIAL_BYTES: usize = VIRTIO_BLK_ID_BYTES as usize;

/// An open disk.
#[derive(Debug)]
pub(crate) struct Disk {
    file: File,
    bytes: u64,
    block_size: u32,
    read_only: bool,
    discards: bool,
    serial: [u8; SERIAL_BYTES],
}

impl Disk {
    /// Looks at what `fd` is.
    pub(crate) fn open(fd: OwnedFd, read_only: bool, serial: &str) -> Result<Self, CreateError> {
        let host = |what| move |source| CreateError::Host { what, source };
        let mut padded = [0; SERIAL_BYTES];
        match padded.get_mut(..serial.len()) {
            Some(slot) if serial.bytes().all(|byte| byte.is_ascii_graphic()) => slot.copy_from_slice(serial.as_bytes()),
            _ => {
                let most = format!("the serial number {serial:?} is not {SERIAL_BYTES} printable characters at most");
                return Err(CreateError::Value(most));
            }
        }
        let mut file = File::from(fd);
        let metadata = file.metadata().map_err(host("the disk's file cannot be examined"))?;
        let is_device = metadata.file_type().is_block_device();
        if !is_device && !metadata.is_file() {
            return Err(CreateError::Value(
                "the disk is neither a regular file nor a block device".to_owned(),
            ));
        }
        let flags =
            rustix::fs::fcntl_getfl(&file).map_err(|error| host("the disk's file cannot be examined")(error.into()))?;
        if !read_only && flags & OFlags::RWMODE != OFlags::RDWR {
            return Err(CreateError::Value(
                "the disk was not opened for reading and writing: open it so, or make it read-only".to_owned(),
            ));
        }
        // The end of a block device is its size; a file's offset is used by nobody.
        let bytes = file
            .seek(SeekFrom::End(0))
            .map_err(host("the disk's size cannot be found out"))?;
        if bytes % SECTOR != 0 {
            return Err(CreateError::Value(format!(
                "the disk has {bytes} bytes, which is no multiple of {SECTOR}: extend it to one"
            )));
        }
        let block_size = if is_device { logical_block_size(&file) } else { 512 };
        let discards = !read_only && (is_device || punches_holes(&file, bytes));
        Ok(Self {
            file,
            bytes,
            block_size,
            read_only,
            discards,
            serial: padded,
        })
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// The size; fixed, whatever becomes of the file.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn block_size(&self) -> u32 {
        self.block_size
    }

    pub(crate) fn read_only(&self) -> bool {
        self.read_only
    }

    /// Whether parts can be given back to the file system.
    pub(crate) fn discards(&self) -> bool {
        self.discards
    }

    pub(crate) fn serial(&self) -> &[u8; SERIAL_BYTES] {
        &self.serial
    }

    /// The byte offset of a range of the disk; `None` when it is not all within.
    pub(crate) fn range(&self, sector: u64, length: u64) -> Option<u64> {
        let start = sector.checked_mul(SECTOR)?;
        let end = start.checked_add(length)?;
        (end <= self.bytes).then_some(start)
    }
}

fn logical_block_size(file: &File) -> u32 {
    rustix::fs::ioctl_blksszget(file).unwrap_or_else(|error| {
        log::debug!("a block device does not tell its block size: {error}");
        512
    })
}

/// Whether the file system can: asked for a range beyond the end, where nothing is.
fn punches_holes(file: &File, end: u64) -> bool {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let result: io::Result<()> = rustix::fs::fallocate(file, flags, end, 4096).map_err(Into::into);
    if let Err(error) = &result {
        log::debug!("no discard on this disk: {error}");
    }
    result.is_ok()
}
