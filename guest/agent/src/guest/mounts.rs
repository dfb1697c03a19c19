//! What is mounted over the root: file systems in memory and directories of the host, in the order of their paths, so that
//! one can lie within another. Knows neither kind.

use std::collections::BTreeSet;

use agent_api::{Share, TmpfsMount};

use super::{shares, tmpfs};
use crate::Error;

#[cfg_attr(test, derive(Debug, PartialEq))]
enum Mount<'a> {
    Memory(&'a TmpfsMount),
    Share(&'a Share),
}

/// Mounts them all, outer ones first. What is `done` is left as it is, and what is mounted here is added: after a failure the
/// same can be asked for again.
pub(crate) fn mount_all(memory: &[TmpfsMount], shared: &[Share], done: &mut BTreeSet<String>) -> Result<(), Error> {
    for (path, mount) in ordered(memory, shared) {
        if done.contains(path) {
            continue;
        }
        match mount {
            Mount::Memory(tmpfs) => tmpfs::mount_one(tmpfs)?,
            Mount::Share(share) => shares::mount_one(share)?,
        }
        done.insert(path.clone());
    }
    Ok(())
}

fn ordered<'a>(tmpfs: &'a [TmpfsMount], shares: &'a [Share]) -> Vec<(&'a String, Mount<'a>)> {
    let memory = tmpfs.iter().map(|one| (&one.path, Mount::Memory(one)));
    let shares = shares.iter().map(|one| (&one.path, Mount::Share(one)));
    let mut ordered: Vec<_> = memory.chain(shares).collect();
    // A path sorts before those below it.
    ordered.sort_by_key(|(path, _)| *path);
    ordered
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outer_directories_are_mounted_first() {
        let share = |path: &str| Share {
            tag: "volume0".to_owned(),
            path: path.to_owned(),
            read_only: false,
        };
        let tmpfs = ["/x/y", "/a/b"].map(|path| TmpfsMount {
            path: path.to_owned(),
            bytes: None,
            mode: 0o755,
            exec: false,
        });
        let shares = ["/x/y/z", "/x-y", "/x", "/a"].map(share);
        let [xyz, x_y, x, a] = shares.each_ref().map(Mount::Share);
        let [xy, ab] = tmpfs.each_ref().map(Mount::Memory);
        let found = ordered(&tmpfs, &shares).into_iter().map(|(_, mount)| mount);
        assert_eq!(found.collect::<Vec<_>>(), [a, ab, x, x_y, xy, xyz]);
    }

    #[test]
    fn what_is_asked_for_again_is_not_mounted_again() {
        // Others cannot mount.
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let base = std::env::temp_dir().join(format!("basalt-agent-mounts-{}", std::process::id()));
        let at = |name: &str| TmpfsMount {
            path: base.join(name).to_str().unwrap().to_owned(),
            bytes: Some(1 << 20),
            mode: 0o700,
            exec: false,
        };
        let mounted = |wanted: &TmpfsMount| {
            let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
            mounts
                .lines()
                .filter(|line| line.split(' ').nth(1) == Some(&wanted.path))
                .count()
        };
        let (good, inner) = (at("a"), at("a/b"));
        let bad = TmpfsMount {
            path: "z".to_owned(),
            ..good.clone()
        };
        let mut done = BTreeSet::new();
        let refused = mount_all(&[inner.clone(), good.clone(), bad], &[], &mut done).unwrap_err();
        let after_failure = (mounted(&good), mounted(&inner));
        mount_all(&[good.clone(), inner.clone()], &[], &mut done).unwrap();
        let again = (mounted(&good), mounted(&inner));
        for mount in [&inner, &good] {
            rustix::mount::unmount(mount.path.as_str(), rustix::mount::UnmountFlags::DETACH).unwrap();
        }
        std::fs::remove_dir_all(&base).unwrap();
        assert!(refused.to_string().contains("absolute"), "{refused}");
        assert_eq!((after_failure, again), ((1, 1), (1, 1)));
    }
}
