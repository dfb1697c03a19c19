//! Ids that nobody else has: of sandboxes, and of the machines in them; and the host's own of this boot.

use std::fs;
use std::path::Path;

use crate::Error;

/// Bytes of a sandbox's id; as hexadecimal digits twice as many.
pub(crate) const ID_BYTES: usize = 6;

/// Bytes of a machine id (machine-id(5)).
const MACHINE_ID_BYTES: usize = 16;

/// An id for a sandbox.
pub(crate) fn sandbox() -> Result<String, Error> {
    random_hex::<ID_BYTES>()
}

/// A machine id.
pub(crate) fn machine() -> Result<String, Error> {
    random_hex::<MACHINE_ID_BYTES>()
}

/// The boot of the host that it is up since.
pub(crate) fn boot() -> Result<String, Error> {
    let path = Path::new("/proc/sys/kernel/random/boot_id");
    let id = fs::read_to_string(path).map_err(Error::file("read", path))?;
    Ok(id.trim().to_owned())
}

/// So many random bytes, as hexadecimal digits.
fn random_hex<const BYTES: usize>() -> Result<String, Error> {
    let mut bytes = [0; BYTES];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(Error::host("reading entropy"))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
