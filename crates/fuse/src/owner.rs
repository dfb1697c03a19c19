//! Whose files are: the caller's own where this process may say so, or else one user's. Knows no message.
#![allow(
    unsafe_code,
    reason = "neither the C library nor rustix offers setfsuid and setfsgid with their results"
)]

use rustix::fs::Stat;
use rustix::io::Errno;

/// How the other side's users and groups are those of files here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owners {
    /// The same numbers. The serving thread has the rights to make files anybody's: `CAP_CHOWN`, `CAP_DAC_OVERRIDE`,
    /// `CAP_FOWNER`, `CAP_FSETID`, `CAP_SETUID`, `CAP_SETGID`, kept whatever its file system user is
    /// (`SECBIT_NO_SETUID_FIXUP`).
    Kept,
    /// All files that are made are this process's user's, who is the other side's root; all others are nobody's.
    One {
        /// The user.
        uid: u32,
        /// The group.
        gid: u32,
    },
}

/// What others' files are shown to belong to, as in the kernel (`overflowuid`).
const NOBODY: u32 = 65534;

/// -1 changes nothing (chown(2)).
const UNCHANGED: u32 = u32::MAX;

impl Owners {
    /// Whose this file is, for the other side.
    pub(crate) fn shown(self, stat: &Stat) -> (u32, u32) {
        let one = |id: u32, own: u32| if id == own { 0 } else { NOBODY };
        match self {
            Self::Kept => (stat.st_uid, stat.st_gid),
            Self::One { uid, gid } => (one(stat.st_uid, uid), one(stat.st_gid, gid)),
        }
    }

    /// Whom a file is to be given to.
    pub(crate) fn given(self, uid: Option<u32>, gid: Option<u32>) -> Result<(Option<u32>, Option<u32>), Errno> {
        let one = |id: Option<u32>, own: u32| match id {
            None => Ok(None),
            Some(0) => Ok(Some(own)),
            // It stays nobody's.
            Some(_) => Err(Errno::PERM),
        };
        if uid == Some(UNCHANGED) || gid == Some(UNCHANGED) {
            return Err(Errno::INVAL);
        }
        match self {
            Self::Kept => Ok((uid, gid)),
            Self::One { uid: u, gid: g } => Ok((one(uid, u)?, one(gid, g)?)),
        }
    }

    /// Makes what is made next the caller's.
    pub(crate) fn act_as(self, uid: u32, gid: u32) -> Result<Acting, Errno> {
        let acting = Acting(self == Self::Kept && (uid, gid) != (0, 0));
        if acting.0 {
            // Dropped, and so undone, where it fails.
            become_one(libc::SYS_setfsgid, gid)?;
            become_one(libc::SYS_setfsuid, uid)?;
        }
        Ok(acting)
    }
}

/// This thread acts for somebody, until this is dropped.
#[must_use]
pub(crate) struct Acting(bool);

impl Drop for Acting {
    fn drop(&mut self) {
        if self.0 {
            let undone = become_one(libc::SYS_setfsuid, 0).and(become_one(libc::SYS_setfsgid, 0));
            if let Err(error) = undone {
                // Going on as somebody else would give their files to the wrong one.
                log::error!("the file system's user cannot be changed back: {error}");
                std::process::abort();
            }
        }
    }
}

/// setfsuid(2) and setfsgid(2) return what it was, also when they change nothing.
fn become_one(call: libc::c_long, id: u32) -> Result<(), Errno> {
    let set = |id: u32| {
        // SAFETY: the argument is a number; it changes this thread's rights to files and nothing in memory.
        unsafe { libc::syscall(call, libc::c_ulong::from(id)) }
    };
    set(id);
    // No such id: the answer is what it is now.
    if u32::try_from(set(UNCHANGED)) == Ok(id) {
        Ok(())
    } else {
        Err(Errno::PERM)
    }
}
