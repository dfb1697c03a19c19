//! What is mounted over the root: file systems in memory and directories of the host, in the order of their paths, so that
//! one can lie within another. Knows neither kind.

use agent_api::{Prepare, Share, TmpfsMount};

use super::{shares, tmpfs};
use crate::Error;

enum Mount<'a> {
    Memory(&'a TmpfsMount),
    Share(&'a Share),
}

/// Mounts them all, outer ones first.
pub(crate) fn mount_all(prepare: &Prepare) -> Result<(), Error> {
    let memory = prepare.tmpfs.iter().map(|one| (&one.path, Mount::Memory(one)));
    let shares = prepare.shares.iter().map(|one| (&one.path, Mount::Share(one)));
    let mut ordered: Vec<_> = memory.chain(shares).collect();
    // A path sorts before those below it.
    ordered.sort_by_key(|(path, _)| *path);
    for (_, mount) in ordered {
        match mount {
            Mount::Memory(tmpfs) => tmpfs::mount_one(tmpfs)?,
            Mount::Share(share) => shares::mount_one(share)?,
        }
    }
    Ok(())
}
