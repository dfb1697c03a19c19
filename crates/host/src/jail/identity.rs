//! Who a jailed process is outside of its user namespace: one unprivileged user and group, of which no other sandbox
//! has the number. One that serves shared directories has room for these files' owners beside it. Does not know which
//! sandbox has which.

use std::io;

use crate::Error;

/// A user and a group of the host that nobody else has; inside the jail it is root, whose rights end at the jail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// Whether files' owners have users and groups, too: those from 1 on are the host's from [`OWNERS_BASE`] on.
    pub owners: bool,
}

/// The host's users and groups that stand for files' owners, from user 1 on: above the pool of identities and below 2^31.
/// They are the same for all sandboxes. No process runs as one of them, and no file outside of mounts whose owners are
/// mapped so belongs to one, so that nothing is gained by having them mapped.
pub const OWNERS_BASE: u32 = 0x7ba6_0000;

/// How many there are: owners beyond them are nobody's to a guest.
pub const OWNERS_COUNT: u32 = 1 << 26;

/// The users and groups set aside for sandboxes: so many from a number on.
///
/// The default lies above what distributions hand out (systemd's table "Users, Groups, UIDs and GIDs" ends its container
/// ranges at 0x6fff_ffff) and below 2^31, beyond which some file systems and tools do not go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool {
    /// The first user and group.
    pub base: u32,
    /// How many.
    pub count: u32,
}

impl Default for Pool {
    fn default() -> Self {
        Self {
            base: 0x7ba5_0000,
            count: 0x1_0000,
        }
    }
}

impl Pool {
    /// The identity of the sandbox with this index; `None` beyond the last.
    pub fn identity(self, index: u32) -> Option<Identity> {
        let number = (index < self.count).then(|| self.base.checked_add(index)).flatten()?;
        Some(Identity {
            uid: number,
            gid: number,
            owners: false,
        })
    }
}

impl Identity {
    /// The same with files' owners.
    pub fn with_owners(self) -> Self {
        Self { owners: true, ..self }
    }

    /// Makes process `pid`'s root this user and group (user_namespaces(7)). Needs CAP_SETUID and CAP_SETGID here.
    pub(super) fn map(self, pid: u32) -> Result<(), Error> {
        for (file, number) in [("uid_map", self.uid), ("gid_map", self.gid)] {
            let owners = match self.owners {
                true => format!("1 {OWNERS_BASE} {OWNERS_COUNT}\n"),
                false => String::new(),
            };
            // One write, as the kernel takes no second one.
            let map = format!("0 {number} 1\n{owners}");
            let written = std::fs::write(format!("/proc/{pid}/{file}"), map);
            written.map_err(|cause| refused(file, cause))?;
        }
        Ok(())
    }
}

fn refused(file: &str, cause: io::Error) -> Error {
    match cause.kind() {
        io::ErrorKind::PermissionDenied => Error::NoJail {
            why: format!("the kernel does not take the jail's {file} from this user ({cause})"),
            next: "run the node's daemon as root of the host's user namespace",
        },
        _ => Error::Launch {
            step: "writing the identity's maps",
            cause,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_index_has_a_user_of_its_own_and_there_is_an_end() {
        let pool = Pool::default();
        assert_eq!(pool.identity(7).unwrap().uid, 0x7ba5_0007);
        assert_ne!(pool.identity(7), pool.identity(8));
        assert_eq!(pool.identity(pool.count), None);
        let last = Pool {
            base: u32::MAX,
            count: 2,
        };
        assert!(last.identity(0).is_some() && last.identity(1).is_none());
        let end = Pool::default().base + Pool::default().count;
        assert!(end <= OWNERS_BASE && OWNERS_BASE + OWNERS_COUNT < 1 << 31);
    }
}
