//! An address space and a function without hardware, for tests of whoever maps memory and gives functions away. Knows no guest.
//!
//! What they do is what Linux 6.1 does, as far as that was measured: mappings that overlap are refused, what is unmapped is what was mapped,
//! and DMA to an address that is not mapped is a fault.

mod device;
pub mod random;
mod space;

pub use device::{FakeDevice, Written};
pub use space::{FakeSpace, Fault, Op};
