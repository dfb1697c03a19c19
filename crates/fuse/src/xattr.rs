//! Extended attributes, those of users only: others are the host's security, or mean something there.

use std::ffi::CStr;
use std::os::fd::OwnedFd;

use rustix::fs::{FileType, OFlags, XattrFlags};
use rustix::io::Errno;

use crate::message::{Body, Header, Reply};
use crate::server::{Outcome, Server};

/// The only ones that the other side sees.
const PREFIX: &[u8] = b"user.";

/// `XATTR_SIZE_MAX` and `XATTR_LIST_MAX` of Linux.
const MOST: usize = 64 << 10;

fn check(name: &CStr) -> Result<&CStr, Errno> {
    match name.to_bytes() {
        bytes if bytes.len() > 255 => Err(Errno::RANGE),
        bytes if bytes.starts_with(PREFIX) && bytes.len() > PREFIX.len() => Ok(name),
        _ => Err(Errno::OPNOTSUPP),
    }
}

impl Server {
    /// Other kinds of files have none of users' (xattr(7)).
    fn with_attributes(&self, header: &Header) -> Result<OwnedFd, Errno> {
        let node = self.nodes.get(header.node)?;
        match node.kind {
            FileType::RegularFile | FileType::Directory => self.reopen(&node, OFlags::RDONLY),
            _ => Err(Errno::OPNOTSUPP),
        }
    }

    pub(crate) fn get_xattr(&self, header: &Header, mut body: Body<'_>, reply: &mut Reply) -> Outcome {
        let wanted = body.u32()?;
        body.skip(4)?;
        let name = check(body.string()?)?;
        let file = self.with_attributes(header)?;
        let mut value = vec![0; MOST];
        let length = rustix::fs::fgetxattr(file, name, &mut value[..])?;
        value.truncate(length);
        tell(&value, wanted, reply)
    }

    pub(crate) fn list_xattr(&self, header: &Header, mut body: Body<'_>, reply: &mut Reply) -> Outcome {
        let wanted = body.u32()?;
        body.skip(4)?;
        let file = match self.with_attributes(header) {
            // They have none, which is no failure.
            Err(Errno::OPNOTSUPP) => return tell(&[], wanted, reply),
            other => other?,
        };
        let mut all = vec![0; MOST];
        let length = rustix::fs::flistxattr(file, &mut all[..])?;
        all.truncate(length);
        let names = all.split_inclusive(|&byte| byte == 0);
        let list: Vec<u8> = names
            .filter(|name| name.starts_with(PREFIX))
            .flatten()
            .copied()
            .collect();
        tell(&list, wanted, reply)
    }

    pub(crate) fn set_xattr(&self, header: &Header, mut body: Body<'_>) -> Outcome {
        let (size, flags) = (body.u32()?, body.u32()?);
        let name = check(body.string()?)?;
        let value = body.bytes(usize::try_from(size).map_err(|_| Errno::INVAL)?)?;
        let flags = XattrFlags::from_bits_retain(flags);
        if !(XattrFlags::CREATE | XattrFlags::REPLACE).contains(flags) {
            return Err(Errno::INVAL);
        }
        rustix::fs::fsetxattr(self.with_attributes(header)?, name, value, flags)
    }

    pub(crate) fn remove_xattr(&self, header: &Header, mut body: Body<'_>) -> Outcome {
        let name = check(body.string()?)?;
        rustix::fs::fremovexattr(self.with_attributes(header)?, name)
    }
}

/// How long it is, for whoever asks with no room; else the value.
fn tell(value: &[u8], wanted: u32, reply: &mut Reply) -> Outcome {
    if wanted == 0 {
        reply.u32(u32::try_from(value.len()).unwrap_or(u32::MAX))?;
        return reply.u32(0);
    }
    match usize::try_from(wanted) {
        Ok(wanted) if value.len() <= wanted => reply.bytes(value),
        _ => Err(Errno::RANGE),
    }
}
