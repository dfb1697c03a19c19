//! Names: looking them up, making, linking, renaming and removing what they stand for.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use crate::abi::op;
use crate::message::{Body, Header, Reply};
use crate::nodes::Node;
use crate::server::{Number, Outcome, Server};

/// The two forms of a rename's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Plain,
    WithFlags,
}

/// A file that can be looked at and named by its descriptor, and nothing else.
pub(crate) const NAMED: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

impl Server {
    pub(crate) fn directory(&self, id: u64) -> Result<Arc<Node>, Errno> {
        let node = self.nodes.get(id)?;
        match node.kind {
            FileType::Directory => Ok(node),
            _ => Err(Errno::NOTDIR),
        }
    }

    pub(crate) fn look_up(&self, header: &Header, mut body: Body<'_>, reply: &mut Reply) -> Outcome {
        let (parent, name) = (self.directory(header.node)?, body.name()?);
        let file = rustix::fs::openat(&parent.file, name, NAMED, Mode::empty())?;
        self.tell_entry(file, reply)
    }

    /// The reply that tells of a file by its number (`struct fuse_entry_out`).
    pub(crate) fn tell_entry(&self, file: OwnedFd, reply: &mut Reply) -> Outcome {
        let stat = rustix::fs::fstat(&file)?;
        // Before it is counted: what does not fit is not told.
        reply.space(128)?;
        let id = self.nodes.enter(file, &stat)?;
        self.entry(id, &stat, reply)
    }

    pub(crate) fn read_link(&self, header: &Header, reply: &mut Reply) -> Outcome {
        let node = self.nodes.get(header.node)?;
        if node.kind != FileType::Symlink {
            return Err(Errno::INVAL);
        }
        // An empty path: the link that the descriptor is (readlinkat(2)).
        let target = rustix::fs::readlinkat(&node.file, c"", Vec::new())?;
        reply.bytes(target.as_bytes())
    }

    /// `MKNOD`, `MKDIR` and `SYMLINK`.
    pub(crate) fn make(&self, header: &Header, mut body: Body<'_>, reply: &mut Reply) -> Outcome {
        let parent = self.directory(header.node)?;
        let owners = self.options.owners;
        let name = match header.opcode {
            op::MKDIR => {
                let mode = mode(body.u32()?);
                body.skip(4)?;
                let name = body.name()?;
                let _acting = owners.act_as(header.uid, header.gid)?;
                rustix::fs::mkdirat(&parent.file, name, mode)?;
                name
            }
            op::MKNOD => {
                let raw = body.u32()?;
                body.skip(12)?;
                let name = body.name()?;
                let kind = FileType::from_raw_mode(raw);
                // A device node of the host is nothing that a guest may make.
                if !matches!(kind, FileType::RegularFile | FileType::Fifo | FileType::Socket) {
                    return Err(Errno::PERM);
                }
                let _acting = owners.act_as(header.uid, header.gid)?;
                rustix::fs::mknodat(&parent.file, name, kind, mode(raw), 0)?;
                name
            }
            _ => {
                let (name, target) = (body.name()?, body.string()?);
                let _acting = owners.act_as(header.uid, header.gid)?;
                rustix::fs::symlinkat(target, &parent.file, name)?;
                name
            }
        };
        let file = rustix::fs::openat(&parent.file, name, NAMED, Mode::empty())?;
        self.tell_entry(file, reply)
    }

    pub(crate) fn link(&self, header: &Header, mut body: Body<'_>, reply: &mut Reply) -> Outcome {
        let node = self.nodes.get(body.u64()?)?;
        let (parent, name) = (self.directory(header.node)?, body.name()?);
        if node.kind == FileType::Directory {
            return Err(Errno::PERM);
        }
        let number = Number::of(&node.file)?;
        let follow = AtFlags::SYMLINK_FOLLOW;
        rustix::fs::linkat(&self.descriptors, number.name(), &parent.file, name, follow)?;
        let file = rustix::fs::openat(&parent.file, name, NAMED, Mode::empty())?;
        self.tell_entry(file, reply)
    }

    pub(crate) fn remove(&self, header: &Header, mut body: Body<'_>, flags: AtFlags) -> Outcome {
        let (parent, name) = (self.directory(header.node)?, body.name()?);
        rustix::fs::unlinkat(&parent.file, name, flags)
    }

    pub(crate) fn rename(&self, header: &Header, mut body: Body<'_>, form: Form) -> Outcome {
        let from = self.directory(header.node)?;
        let to = self.directory(body.u64()?)?;
        let flags = match form {
            Form::Plain => RenameFlags::empty(),
            Form::WithFlags => {
                let flags = RenameFlags::from_bits_retain(body.u32()?);
                body.skip(4)?;
                flags
            }
        };
        // A whiteout is a device node.
        if !(RenameFlags::NOREPLACE | RenameFlags::EXCHANGE).contains(flags) {
            return Err(Errno::INVAL);
        }
        let (old, new) = (body.name()?, body.name()?);
        rustix::fs::renameat_with(&from.file, old, &to.file, new, flags)
    }
}

/// The permission bits of a mode.
pub(crate) fn mode(raw: u32) -> Mode {
    Mode::from_bits_retain(raw & 0o7777)
}
