//! What `basalt-lab` outside and this program inside have agreed on. Knows values only, not what is done with them.

/// TCP port in the lab that speaks the agent protocol.
pub const AGENT_PORT: u16 = 1024;

/// File in the initramfs that holds the token a client must know, as 64 hexadecimal digits.
pub const TOKEN_FILE: &str = "/lab/token";

/// `serial=` of the virtio-blk disk that is the root image.
pub const ROOT_DISK: &str = "basalt-root";

/// `serial=` of the disk with the modules of a kernel that the root image has none of.
pub const MODULES_DISK: &str = "basalt-modules";

/// `serial=` of the disk that becomes XFS.
pub const XFS_DISK: &str = "basalt-xfs";

/// `serial=` of the disk that becomes ext4.
pub const EXT4_DISK: &str = "basalt-ext4";

/// Where the binaries are kept in the lab; on the XFS disk, so they are still there at the next start.
pub const BINARIES: &str = "/opt/basalt/bin";

/// Every console line of this program begins so.
pub const LOG_PREFIX: &str = "lab-init: ";

/// The console line of a start that failed begins so; the reason follows.
pub const FAILED_PREFIX: &str = "lab-init: failed: ";

/// The console line after which the agent protocol is served.
pub const READY_LINE: &str = "lab-init: ready";
