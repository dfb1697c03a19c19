//! Volumes of tenants: each is a file system of a fixed size, which its tenant's sandboxes share, and whose files can be asked for without any
//! of them. Plain data; does not know where they are.

use base::ByteSize;
use serde::{Deserialize, Serialize};

/// The longest path of a file in a volume, in bytes.
pub const MAX_PATH: usize = 4096;

/// The most that one list of files has, and how many directories below each other it goes down.
pub const MAX_ENTRIES: usize = 10_000;
/// The deepest that one list of files goes down.
pub const MAX_DEPTH: u32 = 64;

/// What is asked about volumes of the tenant for whom it is asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TenantVolumeRequest {
    /// Make one. [`TenantVolumeReply::Volume`]; refused where the tenant has one of this name.
    Make {
        /// Its name: as of other volumes.
        name: String,
        /// The size of its file system.
        size: ByteSize,
        /// The most volumes that the tenant may have, this one included.
        most: u32,
        /// The most that their sizes may be together, likewise; not limited where it is not said.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        most_space: Option<ByteSize>,
    },
    /// All of them; of all tenants where an administrator names none. Each is an item; then `done`.
    List,
    /// One of them. [`TenantVolumeReply::Volume`].
    Inspect {
        /// Its name.
        name: String,
    },
    /// Remove one with its files; refused while a sandbox has it. `done`.
    Remove {
        /// Its name.
        name: String,
    },
    /// Something about its files.
    Files {
        /// Its name.
        name: String,
        /// When it was made, if it has to be that one and no later one of the same name.
        created_ns: Option<u64>,
        /// What.
        request: FileRequest,
    },
}

/// What is asked about files of a volume. Paths begin at the volume's root, whether with a slash or not, and have no `..`; symbolic links
/// lead nowhere else.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FileRequest {
    /// What is there. [`TenantVolumeReply::File`]; of a symbolic link the link.
    Stat {
        /// Where.
        path: String,
    },
    /// What is in a directory, by name. Items of up to [`MAX_ENTRIES`] files, then `done`.
    List {
        /// Where.
        path: String,
        /// How many directories below each other are gone through, 1 for this one alone; [`MAX_DEPTH`] at most.
        depth: u32,
    },
    /// Make a directory. [`TenantVolumeReply::File`].
    MakeDirectory {
        /// Where.
        path: String,
        /// Whose it is to be.
        attributes: FileAttributes,
        /// With those above it, where they are missing; it is fine if it is there.
        force: bool,
    },
    /// Change whose something is. [`TenantVolumeReply::File`].
    Update {
        /// Where.
        path: String,
        /// What is to be changed.
        attributes: FileAttributes,
    },
    /// Remove a file, or a directory with all that is in it. `done`.
    Remove {
        /// Where.
        path: String,
    },
    /// Read a file. [`TenantVolumeReply::File`] with its descriptor, open for reading.
    Read {
        /// Where.
        path: String,
    },
    /// Write a file. [`TenantVolumeReply::File`] with the descriptor of an empty file, open for writing.
    Write {
        /// Where.
        path: String,
        /// Whose it is to be.
        attributes: FileAttributes,
        /// One that is there is written anew, and missing directories above it are made.
        force: bool,
    },
}

/// Whose a file is; what is not given is left as it is, and of a new file 0, 0 and 0644, or 0755 of a directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileAttributes {
    /// The user's number in the guest.
    pub uid: Option<u32>,
    /// The group's number in the guest.
    pub gid: Option<u32>,
    /// The twelve lowest bits of the mode.
    pub mode: Option<u32>,
}

impl FileAttributes {
    /// Those of something new: with this mode where none is asked for.
    #[must_use]
    pub fn or_mode(self, mode: u32) -> Self {
        Self {
            mode: self.mode.or(Some(mode)),
            ..self
        }
    }
}

/// A volume of a tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantVolume {
    /// Its name.
    pub name: String,
    /// The size of its file system.
    pub size: ByteSize,
    /// Bytes that it takes on the node's disk.
    #[serde(default)]
    pub bytes: u64,
    /// Whose it is.
    #[serde(default)]
    pub tenant: String,
    /// When it was made: nanoseconds since 1970.
    pub created_ns: u64,
    /// The ids of the sandboxes that have it, also of those that have ended.
    pub used_by: Vec<String>,
}

/// What a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A FIFO, a socket or a device.
    Other,
}

/// A file of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// The last part of its path; `/` of the root.
    pub name: String,
    /// Its path from the volume's root on, with a slash before it. What is no UTF-8 in it is replaced.
    pub path: String,
    /// What it is.
    pub kind: FileKind,
    /// Bytes.
    pub size: u64,
    /// The twelve lowest bits of the mode.
    pub mode: u32,
    /// The user's number in the guest.
    pub uid: u32,
    /// The group's number in the guest.
    pub gid: u32,
    /// When it was last read: nanoseconds since 1970, 0 before that.
    pub accessed_ns: u64,
    /// When it was last written.
    pub modified_ns: u64,
    /// When anything about it was last changed.
    pub changed_ns: u64,
    /// Where a symbolic link leads, as it says.
    pub target: Option<String>,
}

/// The answer to [`TenantVolumeRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TenantVolumeReply {
    /// A volume.
    Volume(TenantVolume),
    /// A file of one.
    File(Box<FileEntry>),
}

/// One of several things.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TenantVolumeItem {
    /// Of a list of volumes.
    Volume(TenantVolume),
    /// Of a list of files.
    Files(Vec<FileEntry>),
}
