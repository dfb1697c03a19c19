//! Who a jailed process is outside of its user namespace: one unprivileged user and group, of which no other sandbox
//! has the number. Does not know which sandbox has which.

use std::io;

use crate::Error;

/// A user and a group of the host that nobody else has; inside the jail it is root, whose rights end at the jail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

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
        })
    }
}

impl Identity {
    /// Makes process `pid`'s root this user and group (user_namespaces(7)). Needs CAP_SETUID and CAP_SETGID here.
    pub(super) fn map(self, pid: u32) -> Result<(), Error> {
        for (file, number) in [("uid_map", self.uid), ("gid_map", self.gid)] {
            let written = std::fs::write(format!("/proc/{pid}/{file}"), format!("0 {number} 1\n"));
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
    }
}
