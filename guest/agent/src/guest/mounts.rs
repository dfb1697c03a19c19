//! What is mounted over the root: file systems in memory and directories of the host, in the order of their paths, so that
//! one can lie within another. Knows neither kind.

use agent_api::{Prepare, Share, TmpfsMount};

use super::{shares, tmpfs};
use crate::Error;

#[cfg_attr(test, derive(Debug, PartialEq))]
enum Mount<'a> {
    Memory(&'a TmpfsMount),
    Share(&'a Share),
}

/// Mounts them all, outer ones first.
pub(crate) fn mount_all(prepare: &Prepare) -> Result<(), Error> {
    for mount in ordered(&prepare.tmpfs, &prepare.shares) {
        match mount {
            Mount::Memory(tmpfs) => tmpfs::mount_one(tmpfs)?,
            Mount::Share(share) => shares::mount_one(share)?,
        }
    }
    Ok(())
}

fn ordered<'a>(tmpfs: &'a [TmpfsMount], shares: &'a [Share]) -> Vec<Mount<'a>> {
    let memory = tmpfs.iter().map(|one| (&one.path, Mount::Memory(one)));
    let shares = shares.iter().map(|one| (&one.path, Mount::Share(one)));
    let mut ordered: Vec<_> = memory.chain(shares).collect();
    // A path sorts before those below it.
    ordered.sort_by_key(|(path, _)| *path);
    ordered.into_iter().map(|(_, mount)| mount).collect()
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
        assert_eq!(ordered(&tmpfs, &shares), [a, ab, x, x_y, xy, xyz]);
    }
}
