//! What a file is, and changing that.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Stat, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, Uid};
use rustix::io::Errno;

use crate::abi::fattr;
use crate::message::{Body, Header, Reply};
use crate::nodes::Node;
use crate::server::{Number, Outcome, Server, VALID_SECONDS};
use crate::tree::mode;

/// What is to be changed (`struct fuse_setattr_in`).
struct Change {
    valid: u32,
    handle: u64,
    size: u64,
    accessed: (u64, u32),
    modified: (u64, u32),
    mode: u32,
    uid: u32,
    gid: u32,
}

impl Change {
    fn parse(body: &mut Body<'_>) -> Result<Self, Errno> {
        let valid = body.u32()?;
        body.skip(4)?;
        let (handle, size) = (body.u64()?, body.u64()?);
        body.skip(8)?;
        let (accessed, modified) = (body.u64()?, body.u64()?);
        body.skip(8)?;
        let (accessed_ns, modified_ns) = (body.u32()?, body.u32()?);
        body.skip(4)?;
        let mode = body.u32()?;
        body.skip(4)?;
        Ok(Self {
            valid,
            handle,
            size,
            accessed: (accessed, accessed_ns),
            modified: (modified, modified_ns),
            mode,
            uid: body.u32()?,
            gid: body.u32()?,
        })
    }

    fn has(&self, bits: u32) -> bool {
        self.valid & bits != 0
    }

    fn times(&self) -> Timestamps {
        let time = |set: u32, now: u32, (seconds, nanoseconds): (u64, u32)| Timespec {
            // Seconds before 1970 are negative.
            tv_sec: seconds.cast_signed(),
            tv_nsec: match () {
                () if self.has(now) => UTIME_NOW,
                () if self.has(set) => i64::from(nanoseconds),
                () => UTIME_OMIT,
            },
        };
        Timestamps {
            last_access: time(fattr::ATIME, fattr::ATIME_NOW, self.accessed),
            last_modification: time(fattr::MTIME, fattr::MTIME_NOW, self.modified),
        }
    }
}

impl Server {
    pub(crate) fn get_attributes(&self, header: &Header, mut body: Body<'_>, reply: &mut Reply) -> Outcome {
        // Which of its handles the file is asked of makes no difference.
        body.skip(16)?;
        let node = self.nodes.get(header.node)?;
        self.tell_attributes(&node, reply)
    }

    /// `struct fuse_attr_out`.
    fn tell_attributes(&self, node: &Node, reply: &mut Reply) -> Outcome {
        let stat = rustix::fs::fstat(&node.file)?;
        reply.u64(VALID_SECONDS)?;
        reply.u64(0)?;
        self.attributes(&stat, reply)
    }

    /// `struct fuse_entry_out`.
    pub(crate) fn entry(&self, id: u64, stat: &Stat, reply: &mut Reply) -> Outcome {
        // Numbers are not used again, so their generation is always the first.
        for value in [id, 0, VALID_SECONDS, VALID_SECONDS, 0] {
            reply.u64(value)?;
        }
        self.attributes(stat, reply)
    }

    /// `struct fuse_attr`.
    fn attributes(&self, stat: &Stat, reply: &mut Reply) -> Outcome {
        let (uid, gid) = self.options.owners.shown(stat);
        reply.u64(stat.st_ino)?;
        for value in [
            stat.st_size,
            stat.st_blocks,
            stat.st_atime,
            stat.st_mtime,
            stat.st_ctime,
        ] {
            reply.u64(value.cast_unsigned())?;
        }
        let small = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        let fields = [
            small(stat.st_atime_nsec),
            small(stat.st_mtime_nsec),
            small(stat.st_ctime_nsec),
            stat.st_mode,
            small(stat.st_nlink),
            uid,
            gid,
            device(stat.st_rdev),
            small(stat.st_blksize.cast_unsigned()),
            0,
        ];
        fields.into_iter().try_for_each(|value| reply.u32(value))
    }

    pub(crate) fn set_attributes(&self, header: &Header, mut body: Body<'_>, reply: &mut Reply) -> Outcome {
        let node = self.nodes.get(header.node)?;
        let change = Change::parse(&mut body)?;
        if change.has(fattr::UID | fattr::GID) {
            self.change_owner(&node, &change)?;
        }
        // After the owner, whose change takes set-user-id bits away.
        if change.has(fattr::MODE) {
            self.change_mode(&node, mode(change.mode))?;
        }
        if change.has(fattr::SIZE) {
            self.change_size(&node, &change)?;
        }
        let times = fattr::ATIME | fattr::MTIME | fattr::ATIME_NOW | fattr::MTIME_NOW;
        if change.has(times) {
            rustix::fs::utimensat(&node.file, c"", &change.times(), AtFlags::EMPTY_PATH)?;
        }
        self.tell_attributes(&node, reply)
    }

    fn change_owner(&self, node: &Node, change: &Change) -> Outcome {
        let uid = change.has(fattr::UID).then_some(change.uid);
        let gid = change.has(fattr::GID).then_some(change.gid);
        let (uid, gid) = self.options.owners.given(uid, gid)?;
        let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
        rustix::fs::chownat(&node.file, c"", uid, gid, AtFlags::EMPTY_PATH)
    }

    /// By its descriptor's name, as a file that cannot be opened has a mode, too.
    fn change_mode(&self, node: &Node, mode: Mode) -> Outcome {
        if node.kind == FileType::Symlink {
            return Err(Errno::OPNOTSUPP);
        }
        let number = Number::of(&node.file)?;
        rustix::fs::chmodat(&self.descriptors, number.name(), mode, AtFlags::empty())
    }

    fn change_size(&self, node: &Node, change: &Change) -> Outcome {
        if node.kind != FileType::RegularFile {
            return Err(Errno::INVAL);
        }
        if change.has(fattr::KILL_SUIDGID) {
            self.drop_privileges(&node.file)?;
        }
        // A file that was opened for writing may have become read-only for everybody since.
        if change.has(fattr::FH) {
            return rustix::fs::ftruncate(&self.handles.get(change.handle)?.file, change.size);
        }
        let file: OwnedFd = self.reopen(node, OFlags::WRONLY)?;
        rustix::fs::ftruncate(file, change.size)
    }

    /// Takes the bits away that a write by somebody without rights must not leave (`setattr_should_drop_suidgid` of
    /// Linux): this thread's right to keep them (`CAP_FSETID`) keeps the kernel from it.
    pub(crate) fn drop_privileges(&self, file: &impl AsFd) -> Outcome {
        let raw = rustix::fs::fstat(file)?.st_mode;
        let group = if raw & 0o2010 == 0o2010 { 0o2000 } else { 0 };
        let dropped = raw & (0o4000 | group);
        if dropped == 0 {
            return Ok(());
        }
        let number = Number::of(file)?;
        let mode = mode(raw & !dropped);
        rustix::fs::chmodat(&self.descriptors, number.name(), mode, AtFlags::empty())
    }
}

/// A device's number in the kernel's 32 bits (`new_encode_dev`).
fn device(device: u64) -> u32 {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}
