//! Numbers of the FUSE protocol, 7.34: Linux's `include/uapi/linux/fuse.h` has them with these names. Knows no message.

/// `FUSE_KERNEL_VERSION`.
pub const VERSION: u32 = 7;
/// `FUSE_KERNEL_MINOR_VERSION`: the newest whose messages are understood here.
pub const MINOR_VERSION: u32 = 34;
/// The oldest that is: `fuse_init_out` has had `max_pages` since 7.28, which every kernel with virtio-fs has.
pub const LEAST_MINOR_VERSION: u32 = 28;

/// `FUSE_ROOT_ID`.
pub const ROOT_ID: u64 = 1;

/// Length of `struct fuse_in_header`.
pub const IN_HEADER: usize = 40;
/// Length of `struct fuse_out_header`.
pub const OUT_HEADER: usize = 16;

/// `enum fuse_opcode`.
#[allow(missing_docs, reason = "the header has one word for each, which is its name")]
pub mod op {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const SETXATTR: u32 = 21;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const REMOVEXATTR: u32 = 24;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
    pub const COPY_FILE_RANGE: u32 = 47;
    pub const SYNCFS: u32 = 50;
}

/// Flags of `FUSE_INIT`.
#[allow(missing_docs, reason = "the header has one line for each, which is its name")]
pub mod init {
    pub const ASYNC_READ: u32 = 1 << 0;
    pub const BIG_WRITES: u32 = 1 << 5;
    pub const AUTO_INVAL_DATA: u32 = 1 << 12;
    pub const ASYNC_DIO: u32 = 1 << 15;
    pub const PARALLEL_DIROPS: u32 = 1 << 18;
    pub const MAX_PAGES: u32 = 1 << 22;
    pub const HANDLE_KILLPRIV_V2: u32 = 1 << 28;
}

/// `valid` of `struct fuse_setattr_in`.
pub(crate) mod fattr {
    pub(crate) const MODE: u32 = 1 << 0;
    pub(crate) const UID: u32 = 1 << 1;
    pub(crate) const GID: u32 = 1 << 2;
    pub(crate) const SIZE: u32 = 1 << 3;
    pub(crate) const ATIME: u32 = 1 << 4;
    pub(crate) const MTIME: u32 = 1 << 5;
    pub(crate) const FH: u32 = 1 << 6;
    pub(crate) const ATIME_NOW: u32 = 1 << 7;
    pub(crate) const MTIME_NOW: u32 = 1 << 8;
    pub(crate) const KILL_SUIDGID: u32 = 1 << 11;
}

/// `FUSE_FSYNC_FDATASYNC`.
pub(crate) const FSYNC_FDATASYNC: u32 = 1 << 0;
/// `FUSE_WRITE_CACHE`: pages of the guest's cache, not a program's write.
pub(crate) const WRITE_CACHE: u32 = 1 << 0;
/// `FUSE_WRITE_KILL_SUIDGID`.
pub(crate) const WRITE_KILL_SUIDGID: u32 = 1 << 2;
/// `FUSE_OPEN_KILL_SUIDGID`.
pub(crate) const OPEN_KILL_SUIDGID: u32 = 1 << 0;
