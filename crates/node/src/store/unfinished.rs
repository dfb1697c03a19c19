//! What a directory is called that is half made or half removed: as nothing is that belongs to somebody. It goes when
//! the daemon starts. Knows nothing of what is in it.

use std::io;

/// What begins so is being made, or being removed. Names of volumes, snapshots, templates and sandboxes begin with a
/// letter or digit.
pub(crate) const UNFINISHED: &str = ".";

/// A name that nobody else has.
pub(crate) fn unfinished() -> io::Result<String> {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(format!("{UNFINISHED}{:016x}", u64::from_ne_bytes(bytes)))
}
