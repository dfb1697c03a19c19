//! CPUs that Linux gives up: reservations of basalt.ko (kmod/), for whoever makes them and whoever is given one. Knows nothing of what runs
//! on such CPUs.
//!
//! ```text
//!  Device ── reserve(CPUs) ──▶ Reservation, a descriptor: CPUs are Linux's again when its last copy is closed
//! ```
#![allow(
    unsafe_code,
    reason = "requests to a driver take raw addresses; each block says what it relies on"
)]

mod device;
pub mod request;
mod uapi;

pub use device::{Device, Reservation, ReservationError, ReservedMemory};
pub use uapi::MAX_CPUS;
