//! The server: which operation a request is, and what all operations share. The operations are in the other files.

use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::abi::{LEAST_MINOR_VERSION, MINOR_VERSION, VERSION, init, op};
use crate::handles::Handles;
use crate::message::{Body, Header, MAX_IO, Reply, parse};
use crate::nodes::{Node, Nodes};
use crate::owner::Owners;
use crate::{Error, tree};

/// How long the other side may believe what it was told, in seconds: others may change files meanwhile.
pub(crate) const VALID_SECONDS: u64 = 1;

/// How many requests the other side may have under way that nobody waits for; Linux's own default is 12.
const MAX_BACKGROUND: u16 = 64;

/// Timestamps are as fine as this, in nanoseconds.
const TIME_GRANULARITY: u32 = 1;

/// How a directory is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Nothing is changed.
    pub read_only: bool,
    /// Whose files are.
    pub owners: Owners,
    /// The most files that the other side can know at a time; each costs a descriptor.
    pub max_nodes: usize,
    /// The most files that it can have open at a time.
    pub max_handles: usize,
}

/// A directory with everything that the other side knows of it. Several threads may serve at once. The process's file
/// creation mask must be 0: the other side has applied its own.
#[derive(Debug)]
pub struct Server {
    pub(crate) options: Options,
    pub(crate) nodes: Nodes,
    pub(crate) handles: Handles,
    /// `/proc/self/fd`, in which a file is found by its descriptor's number, whatever has become of its name.
    pub(crate) descriptors: OwnedFd,
}

/// The result of an operation whose reply has been written, but for its header.
pub(crate) type Outcome = Result<(), Errno>;

/// A number as the name that a descriptor has in `/proc/self/fd`.
pub(crate) struct Number([u8; 16]);

impl Number {
    pub(crate) fn of(file: &impl AsFd) -> Result<Self, Errno> {
        let mut text = [0; 16];
        write!(&mut text[..15], "{}", file.as_fd().as_raw_fd()).map_err(|_| Errno::BADF)?;
        Ok(Self(text))
    }

    pub(crate) fn name(&self) -> &std::ffi::CStr {
        std::ffi::CStr::from_bytes_until_nul(&self.0).unwrap_or_default()
    }
}

impl Server {
    /// Serves `root`, open with `O_PATH` at least; `descriptors` is `/proc/self/fd` of this process.
    ///
    /// # Errors
    /// It is no directory.
    pub fn new(root: OwnedFd, descriptors: OwnedFd, options: Options) -> Result<Self, Error> {
        let system = |step| move |cause| Error::System { step, cause };
        let stat = rustix::fs::fstat(&root).map_err(system("looking at the directory"))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
            return Err(Error::NoDirectory);
        }
        Ok(Self {
            nodes: Nodes::new(root, &stat, options.max_nodes),
            handles: Handles::new(options.max_handles),
            descriptors,
            options,
        })
    }

    /// Answers one request. `room` is how long the reply may be; there is none for requests that want none, and for what
    /// is no request at all.
    pub fn answer(&self, request: &[u8], room: usize, reply: &mut Reply) {
        reply.none();
        let Some((header, body)) = parse(request) else {
            return;
        };
        if !header.wants_reply() {
            if let Ok(body) = body {
                self.forget(header, body);
            }
            return;
        }
        reply.begin(room);
        let result = body.and_then(|body| self.dispatch(&header, body, reply));
        reply.finish(header.unique, result);
    }

    fn forget(&self, header: Header, mut body: Body<'_>) {
        if header.opcode == op::FORGET {
            if let Ok(count) = body.u64() {
                self.nodes.forget(header.node, count);
            }
            return;
        }
        if header.opcode == op::BATCH_FORGET && body.skip(8).is_ok() {
            // As many as there are: the count before them can say nothing else.
            while let (Ok(node), Ok(count)) = (body.u64(), body.u64()) {
                self.nodes.forget(node, count);
            }
        }
    }

    fn dispatch(&self, header: &Header, body: Body<'_>, reply: &mut Reply) -> Outcome {
        match header.opcode {
            op::INIT => self.init(body, reply),
            op::DESTROY => {
                self.clear();
                Ok(())
            }
            op::STATFS => self.statfs(reply),
            op::SYNCFS => self.syncfs(),
            op::GETATTR => self.get_attributes(header, body, reply),
            op::OPEN => self.open(header, body, reply),
            op::READ => self.read(body, reply),
            op::OPENDIR => self.open_directory(header, reply),
            op::READDIR => self.read_directory(header, body, reply),
            op::RELEASE | op::RELEASEDIR => self.release(body),
            op::FSYNC | op::FSYNCDIR => self.fsync(body),
            op::LSEEK => self.seek(body, reply),
            op::LOOKUP => self.look_up(header, body, reply),
            op::READLINK => self.read_link(header, reply),
            op::GETXATTR => self.get_xattr(header, body, reply),
            op::LISTXATTR => self.list_xattr(header, body, reply),
            other if self.options.read_only && changes(other) => Err(Errno::ROFS),
            op::SETATTR => self.set_attributes(header, body, reply),
            op::CREATE => self.create(header, body, reply),
            op::MKNOD | op::MKDIR | op::SYMLINK => self.make(header, body, reply),
            op::LINK => self.link(header, body, reply),
            op::UNLINK => self.remove(header, body, rustix::fs::AtFlags::empty()),
            op::RMDIR => self.remove(header, body, rustix::fs::AtFlags::REMOVEDIR),
            op::RENAME => self.rename(header, body, tree::Form::Plain),
            op::RENAME2 => self.rename(header, body, tree::Form::WithFlags),
            op::WRITE => self.write(body, reply),
            op::FALLOCATE => self.allocate(body),
            op::COPY_FILE_RANGE => self.copy(body, reply),
            op::SETXATTR => self.set_xattr(header, body),
            op::REMOVEXATTR => self.remove_xattr(header, body),
            // The kernel then does without: locks are the guest's own, `close` needs no word.
            _ => Err(Errno::NOSYS),
        }
    }

    fn init(&self, mut body: Body<'_>, reply: &mut Reply) -> Outcome {
        let (major, minor) = (body.u32()?, body.u32()?);
        let (read_ahead, offered) = (body.u32()?, body.u32()?);
        if major < VERSION || (major == VERSION && minor < LEAST_MINOR_VERSION) {
            return Err(Errno::PROTO);
        }
        // Whoever mounts it knows nothing of it.
        self.clear();
        reply.u32(VERSION)?;
        reply.u32(MINOR_VERSION)?;
        if major > VERSION {
            // It will ask again, with our version.
            return Ok(());
        }
        let wanted = init::ASYNC_READ
            | init::BIG_WRITES
            | init::AUTO_INVAL_DATA
            | init::ASYNC_DIO
            | init::PARALLEL_DIROPS
            | init::MAX_PAGES
            | init::HANDLE_KILLPRIV_V2;
        reply.u32(read_ahead)?;
        reply.u32(offered & wanted)?;
        reply.u16(MAX_BACKGROUND)?;
        reply.u16(MAX_BACKGROUND / 4 * 3)?;
        reply.u32(u32::try_from(MAX_IO).unwrap_or(u32::MAX))?;
        reply.u32(TIME_GRANULARITY)?;
        reply.u16(u16::try_from(MAX_IO / 4096).unwrap_or(u16::MAX))?;
        // map_alignment, flags2, max_stack_depth and what is unused.
        reply.bytes(&[0; 34])
    }

    /// Forgets everything that the other side knew.
    pub fn clear(&self) {
        self.handles.clear();
        self.nodes.clear();
    }

    /// Opens a file anew by its descriptor. Only regular files and directories: opening others has effects.
    pub(crate) fn reopen(&self, node: &Node, flags: OFlags) -> Result<OwnedFd, Errno> {
        match node.kind {
            FileType::RegularFile | FileType::Directory => {
                let flags = flags | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
                rustix::fs::openat(&self.descriptors, Number::of(&node.file)?.name(), flags, Mode::empty())
            }
            FileType::Symlink => Err(Errno::LOOP),
            _ => Err(Errno::NXIO),
        }
    }
}

/// Operations that a read-only directory refuses; opening for writing is another matter.
fn changes(opcode: u32) -> bool {
    matches!(
        opcode,
        op::SETATTR
            | op::CREATE
            | op::MKNOD
            | op::MKDIR
            | op::SYMLINK
            | op::LINK
            | op::UNLINK
            | op::RMDIR
            | op::RENAME
            | op::RENAME2
            | op::WRITE
            | op::FALLOCATE
            | op::COPY_FILE_RANGE
            | op::SETXATTR
            | op::REMOVEXATTR
    )
}
