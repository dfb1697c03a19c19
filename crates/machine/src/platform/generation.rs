//! The VM generation ID (Microsoft, "Virtual Machine Generation ID"): 16 random bytes in guest memory that are others whenever the
//! machine goes on from a state of before, in another machine or in the same. Does not know how the guest is told.

use memory::GuestRam;
use rustix::rand::{GetRandomFlags, getrandom};
use vm_memory::{Bytes, GuestAddress};

use crate::error::MachineError;
use crate::machine::host;

const LENGTH: usize = 16;

/// Writes a new one. `address` may come from a saved state: one that is not in memory is damage.
pub(crate) fn write_new(guest: &GuestRam, address: u64) -> Result<(), MachineError> {
    let mut id = [0; LENGTH];
    // So few bytes come whole (getrandom(2)).
    getrandom(&mut id, GetRandomFlags::empty()).map_err(|error| host("random bytes")(error.into()))?;
    let written = guest.write_slice(&id, GuestAddress(address));
    written.map_err(|error| MachineError::Damaged {
        what: "the generation ID",
        source: std::io::Error::new(std::io::ErrorKind::InvalidData, error),
    })
}
