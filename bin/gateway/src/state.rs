//! Whose a state directory is: who works with it beside a gateway is its owner for that, and one gateway at a time serves with it. Knows not
//! what is in it.

use std::fs::{File, OpenOptions, TryLockError};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use anyhow::{Context, Result, bail};
use rustix::process::{Gid, Uid, getegid, geteuid, getgroups};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

/// Who has it locked serves.
const LOCK: &str = "lock";

/// Who root was before.
pub(crate) struct Before {
    group: Gid,
    groups: Vec<Gid>,
}

/// The owner of a directory, if this is root and that is somebody else.
fn other_owner(state: &Path) -> Option<(Uid, Gid)> {
    let metadata = std::fs::metadata(state).ok()?;
    let is_other = geteuid().is_root() && metadata.uid() != 0;
    is_other.then(|| (Uid::from_raw(metadata.uid()), Gid::from_raw(metadata.gid())))
}

/// Root does it as whose the state directory is: a file of root's there would be of no use to a gateway that is somebody else.
pub(crate) fn become_owner(state: &Path) -> Result<Option<Before>> {
    let Some((user, group)) = other_owner(state) else {
        return Ok(None);
    };
    let failed = || format!("cannot become the owner of {}", state.display());
    let before = Before {
        group: getegid(),
        groups: getgroups().with_context(failed)?,
    };
    // This process has one thread yet. What is saved leads back.
    set_thread_groups(&[group])
        .and_then(|()| set_thread_res_gid(group, group, Gid::ROOT))
        .and_then(|()| set_thread_res_uid(user, user, Uid::ROOT))
        .with_context(failed)?;
    Ok(Some(before))
}

impl Before {
    /// Becomes root again.
    pub(crate) fn restore(self) -> Result<()> {
        set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT)
            .and_then(|()| set_thread_res_gid(self.group, self.group, self.group))
            .and_then(|()| set_thread_groups(&self.groups))
            .context("cannot become root again")
    }
}

/// Root does not serve with somebody else's directory: what it would make there could not be used by that one's gateway.
pub(crate) fn refuse_others(state: &Path) -> Result<()> {
    match other_owner(state) {
        None => Ok(()),
        Some((user, _)) => bail!(
            "{} is the directory of user {}, whose gateway could not use what root's makes there: serve as that user, or with another --state",
            state.display(),
            user.as_raw()
        ),
    }
}

/// Takes a directory for a gateway that serves, until what is returned is dropped.
pub(crate) fn lock(state: &Path) -> Result<File> {
    let path = state.join(LOCK);
    let file = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(&path)
        .with_context(|| format!("cannot open {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => bail!(
            "another gateway serves with {}: end that one, or give this one a directory of its own by --state",
            state.display()
        ),
        Err(TryLockError::Error(error)) => Err(error).with_context(|| format!("cannot lock {}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_gateway_serves_with_a_directory() {
        let directory = tempfile::tempdir().unwrap();
        let held = lock(directory.path()).unwrap();
        let second = lock(directory.path()).unwrap_err().to_string();
        assert!(second.contains("another gateway"), "{second}");
        drop(held);
        lock(directory.path()).unwrap();
    }

    #[test]
    fn root_serves_with_its_own_directory_alone() {
        let directory = tempfile::tempdir().unwrap();
        refuse_others(directory.path()).unwrap();
        refuse_others(&directory.path().join("none")).unwrap();
        // Only root can give it away, and only to root that matters.
        if std::os::unix::fs::chown(directory.path(), Some(65534), Some(65534)).is_ok() {
            let refused = refuse_others(directory.path()).unwrap_err().to_string();
            assert!(refused.contains("65534"), "{refused}");
        }
    }

    #[test]
    fn root_is_the_owner_and_then_root_again() {
        let directory = tempfile::tempdir().unwrap();
        if !geteuid().is_root() {
            assert!(become_owner(directory.path()).unwrap().is_none());
            return;
        }
        std::os::unix::fs::chown(directory.path(), Some(65534), Some(65534)).unwrap();
        // In a thread of its own, as no other test is to be somebody else.
        let path = directory.path().to_owned();
        let work = std::thread::spawn(move || {
            let groups = getgroups().unwrap();
            let before = become_owner(&path).unwrap().unwrap();
            std::fs::write(path.join("a"), "").unwrap();
            assert_eq!(std::fs::metadata(path.join("a")).unwrap().uid(), 65534);
            before.restore().unwrap();
            std::fs::write(path.join("b"), "").unwrap();
            assert_eq!(std::fs::metadata(path.join("b")).unwrap().uid(), 0);
            assert_eq!(getgroups().unwrap(), groups);
        });
        work.join().unwrap();
    }
}
