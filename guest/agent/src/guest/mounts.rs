//! What is mounted over the root: file systems in memory and directories of the host, in the order of their paths, so that
//! one can lie within another. Knows neither kind.

use agent_api::Prepare;

use super::{shares, tmpfs};
use crate::Error;

/// Mounts them all, outer ones first.
pub(crate) fn mount_all(prepare: &Prepare) -> Result<(), Error> {
    let tmpfs = prepare.tmpfs.iter().map(|one| (&one.path, Err(one)));
    let shares = prepare.shares.iter().map(|one| (&one.path, Ok(one)));
    let mut ordered: Vec<_> = tmpfs.chain(shares).collect();
    // A path sorts before those below it.
    ordered.sort_by_key(|(path, _)| *path);
    for (_, one) in ordered {
        match one {
            Ok(share) => shares::mount_one(share)?,
            Err(memory) => tmpfs::mount_one(memory)?,
        }
    }
    Ok(())
}
