//! Files and directories that are open: their content.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::PoisonError;

use rustix::fs::{FallocateFlags, FileType, Mode, OFlags, RawDir, SeekFrom};
use rustix::io::{Errno, ReadWriteFlags};

use crate::abi::{FSYNC_FDATASYNC, OPEN_KILL_SUIDGID, WRITE_CACHE, WRITE_KILL_SUIDGID};
use crate::message::{Body, Header, MAX_IO, Reply};
use crate::server::{Number, Outcome, Server};
use crate::tree::{NAMED, mode};

/// How much of a directory is read at a time.
const DIRECTORY_PIECE: usize = 32 << 10;

/// The most that one request copies: others wait for it.
const MAX_COPY: usize = 16 << 20;

/// What of a program's flags is for this side; the rest has been dealt with by its kernel.
fn access(flags: OFlags) -> OFlags {
    flags & OFlags::ACCMODE
}

impl Server {
    pub(crate) fn open(&self, header: &Header, mut body: Body<'_>, reply: &mut Reply) -> Outcome {
        let (raw, more) = (body.u32()?, body.u32()?);
        let flags = OFlags::from_bits_retain(raw);
        let writes = access(flags) != OFlags::RDONLY || flags.contains(OFlags::TRUNC);
        if writes && self.options.read_only {
            return Err(Errno::ROFS);
        }
        let node = self.nodes.get(header.node)?;
        if node.kind == FileType::Directory {
            return Err(Errno::ISDIR);
        }
        self.handles.room()?;
        let file = self.reopen(&node, access(flags) | (flags & OFlags::TRUNC))?;
        if flags.contains(OFlags::TRUNC) && more & OPEN_KILL_SUIDGID != 0 {
            self.drop_privileges(&file)?;
        }
        self.tell_handle(file, flags, reply)
    }

    /// `struct fuse_open_out`.
    fn tell_handle(&self, file: OwnedFd, flags: OFlags, reply: &mut Reply) -> Outcome {
        reply.space(16)?;
        let id = self.handles.add(file, access(flags), flags.contains(OFlags::APPEND))?;
        reply.u64(id)?;
        reply.u64(0)
    }

    pub(crate) fn create(&self, header: &Header, mut body: Body<'_>, reply: &mut Reply) -> Outcome {
        let (raw, permissions) = (body.u32()?, body.u32()?);
        body.skip(8)?;
        let (parent, name) = (self.directory(header.node)?, body.name()?);
        let flags = OFlags::from_bits_retain(raw);
        self.handles.room()?;
        reply.space(128 + 16)?;
        let made = {
            let _acting = self.options.owners.act_as(header.uid, header.gid)?;
            let create = OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NOCTTY;
            rustix::fs::openat(&parent.file, name, access(flags) | create, mode(permissions))
        };
        match made {
            Ok(file) => {
                let named = self.by_descriptor(&file)?;
                self.tell_entry(named, reply)?;
                self.tell_handle(file, flags, reply)
            }
            // Somebody else was quicker.
            Err(Errno::EXIST) if !flags.contains(OFlags::EXCL) => {
                let named = rustix::fs::openat(&parent.file, name, NAMED, Mode::empty())?;
                let stat = rustix::fs::fstat(&named)?;
                if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
                    return Err(Errno::EXIST);
                }
                let flags_here = access(flags) | (flags & OFlags::TRUNC) | OFlags::CLOEXEC | OFlags::NONBLOCK;
                let file =
                    rustix::fs::openat(&self.descriptors, Number::of(&named)?.name(), flags_here, Mode::empty())?;
                self.tell_entry(named, reply)?;
                self.tell_handle(file, flags, reply)
            }
            Err(error) => Err(error),
        }
    }

    /// The same file once more, to be named by.
    fn by_descriptor(&self, file: &OwnedFd) -> Result<OwnedFd, Errno> {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        rustix::fs::openat(&self.descriptors, Number::of(file)?.name(), flags, Mode::empty())
    }

    pub(crate) fn read(&self, mut body: Body<'_>, reply: &mut Reply) -> Outcome {
        let handle = self.handles.get(body.u64()?)?;
        let mut offset = body.u64()?;
        let wanted = usize::try_from(body.u32()?).unwrap_or(MAX_IO).min(MAX_IO);
        let end = wanted.min(reply.left());
        let mut done = 0;
        while done < end {
            match rustix::io::pread(&handle.file, &mut *reply.space(end - done)?, offset) {
                Ok(0) => break,
                Ok(count) => {
                    reply.advance(count);
                    done += count;
                    offset = offset.saturating_add(count as u64);
                }
                Err(Errno::INTR) => (),
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(())
    }

    pub(crate) fn write(&self, mut body: Body<'_>, reply: &mut Reply) -> Outcome {
        let handle = self.handles.get(body.u64()?)?;
        let offset = body.u64()?;
        let (size, flags) = (body.u32()?, body.u32()?);
        body.skip(16)?;
        let data = body.bytes(usize::try_from(size).map_err(|_| Errno::INVAL)?)?;
        if flags & WRITE_KILL_SUIDGID != 0 {
            self.drop_privileges(&handle.file)?;
        }
        // Pages of a cache have their place.
        let how = match handle.append && flags & WRITE_CACHE == 0 {
            true => ReadWriteFlags::APPEND,
            false => ReadWriteFlags::empty(),
        };
        let mut done = 0;
        while let Some(rest @ [_, ..]) = data.get(done..) {
            let at = offset.checked_add(done as u64).ok_or(Errno::FBIG)?;
            match rustix::io::pwritev2(&handle.file, &[IoSlice::new(rest)], at, how) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(Errno::INTR) => (),
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
        }
        reply.u32(u32::try_from(done).unwrap_or(u32::MAX))?;
        reply.u32(0)
    }

    pub(crate) fn release(&self, mut body: Body<'_>) -> Outcome {
        self.handles.remove(body.u64()?)
    }

    pub(crate) fn fsync(&self, mut body: Body<'_>) -> Outcome {
        let handle = self.handles.get(body.u64()?)?;
        match body.u32()? & FSYNC_FDATASYNC {
            0 => rustix::fs::fsync(&handle.file),
            _ => rustix::fs::fdatasync(&handle.file),
        }
    }

    pub(crate) fn seek(&self, mut body: Body<'_>, reply: &mut Reply) -> Outcome {
        let handle = self.handles.get(body.u64()?)?;
        let offset = body.u64()?;
        if offset > i64::MAX.cast_unsigned() {
            return Err(Errno::INVAL);
        }
        // The numbers of lseek(2); the rest is the other kernel's own affair.
        let to = match body.u32()? {
            3 => SeekFrom::Data(offset),
            4 => SeekFrom::Hole(offset),
            _ => return Err(Errno::INVAL),
        };
        reply.u64(rustix::fs::seek(&handle.file, to)?)
    }

    pub(crate) fn allocate(&self, mut body: Body<'_>) -> Outcome {
        let handle = self.handles.get(body.u64()?)?;
        let (offset, length) = (body.u64()?, body.u64()?);
        let flags = FallocateFlags::from_bits_retain(body.u32()?);
        let known = FallocateFlags::KEEP_SIZE | FallocateFlags::PUNCH_HOLE | FallocateFlags::ZERO_RANGE;
        if !known.contains(flags) {
            return Err(Errno::OPNOTSUPP);
        }
        rustix::fs::fallocate(&handle.file, flags, offset, length)
    }

    pub(crate) fn copy(&self, mut body: Body<'_>, reply: &mut Reply) -> Outcome {
        let from = self.handles.get(body.u64()?)?;
        let mut from_offset = body.u64()?;
        body.skip(8)?;
        let to = self.handles.get(body.u64()?)?;
        let (mut to_offset, length) = (body.u64()?, body.u64()?);
        if body.u64()? != 0 {
            return Err(Errno::INVAL);
        }
        let length = usize::try_from(length).unwrap_or(MAX_COPY).min(MAX_COPY);
        let copied = rustix::fs::copy_file_range(
            &from.file,
            Some(&mut from_offset),
            &to.file,
            Some(&mut to_offset),
            length,
        )?;
        reply.u32(u32::try_from(copied).unwrap_or(u32::MAX))?;
        reply.u32(0)
    }

    pub(crate) fn open_directory(&self, header: &Header, reply: &mut Reply) -> Outcome {
        let node = self.directory(header.node)?;
        self.handles.room()?;
        let file = self.reopen(&node, OFlags::RDONLY | OFlags::DIRECTORY)?;
        self.tell_handle(file, OFlags::empty(), reply)
    }

    /// `struct fuse_dirent`, as many as fit.
    pub(crate) fn read_directory(&self, header: &Header, mut body: Body<'_>, reply: &mut Reply) -> Outcome {
        let handle = self.handles.get(body.u64()?)?;
        let offset = body.u64()?;
        let wanted = usize::try_from(body.u32()?).unwrap_or(MAX_IO).min(reply.left());
        if offset > i64::MAX.cast_unsigned() {
            return Err(Errno::INVAL);
        }
        let _reading = handle.reading.lock().unwrap_or_else(PoisonError::into_inner);
        rustix::fs::seek(&handle.file, SeekFrom::Start(offset))?;
        let mut buffer = vec![MaybeUninit::uninit(); DIRECTORY_PIECE];
        let mut entries = RawDir::new(&handle.file, &mut buffer);
        let mut left = wanted;
        loop {
            let entry = match entries.next() {
                None => return Ok(()),
                Some(Err(error)) => return Err(error),
                Some(Ok(entry)) => entry,
            };
            let name = entry.file_name().to_bytes();
            let whole = (24 + name.len()).next_multiple_of(8);
            if whole > left {
                return Ok(());
            }
            left -= whole;
            // What is above the root is nothing that anybody asks for.
            let number = match name {
                b".." => header.node,
                _ => entry.ino(),
            };
            reply.u64(number)?;
            reply.u64(entry.next_entry_cookie())?;
            reply.u32(u32::try_from(name.len()).unwrap_or(0))?;
            // DT_* are the type bits of a mode (readdir(3)).
            reply.u32(entry.file_type().as_raw_mode() >> 12)?;
            reply.bytes(name)?;
            reply.bytes(&[0; 8][..whole - 24 - name.len()])?;
        }
    }

    pub(crate) fn syncfs(&self) -> Outcome {
        let root = self.nodes.get(crate::abi::ROOT_ID)?;
        rustix::fs::syncfs(self.reopen(&root, OFlags::RDONLY | OFlags::DIRECTORY)?)
    }

    /// `struct fuse_kstatfs`.
    pub(crate) fn statfs(&self, reply: &mut Reply) -> Outcome {
        let root = self.nodes.get(crate::abi::ROOT_ID)?;
        let stat = rustix::fs::fstatvfs(&root.file)?;
        for value in [stat.f_blocks, stat.f_bfree, stat.f_bavail, stat.f_files, stat.f_ffree] {
            reply.u64(value)?;
        }
        for value in [stat.f_bsize, stat.f_namemax, stat.f_frsize] {
            reply.u32(u32::try_from(value).unwrap_or(u32::MAX))?;
        }
        reply.bytes(&[0; 28])
    }
}
