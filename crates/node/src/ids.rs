//! Ids that nobody else has: of sandboxes, and of the machines in them.

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

/// So many random bytes, as hexadecimal digits.
fn random_hex<const BYTES: usize>() -> Result<String, Error> {
    let mut bytes = [0; BYTES];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(Error::host("reading entropy"))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
