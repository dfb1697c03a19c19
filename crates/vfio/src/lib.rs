//! PCI functions of the host as Linux's VFIO gives them away (Documentation/driver-api/vfio.rst), for whoever takes one and whoever
//! is given it. Knows no guest, no bus of a guest's, and not what a function is for.
//!
//! ```text
//!  host::take("0000:00:04.0") ─▶ Container: whose memory the function reaches ─▶ the VMM: map()
//!                              └▶ Function: its registers and interrupts      ─▶ the VMM: read(), write(), set_interrupts()
//! ```
//! Both are descriptors: the function is the host's again, reset, when their last copies are closed.
#![allow(
    unsafe_code,
    reason = "requests to a driver take raw addresses; each block says what it relies on"
)]

mod container;
mod function;
pub mod host;
mod mapping;
mod uapi;

use std::io;

pub use container::Container;
pub use function::{Function, Region};
pub use mapping::Mapping;
pub use uapi::CONFIG_REGION;

/// Why a function could not be had, or used.
#[derive(Debug, thiserror::Error)]
pub enum VfioError {
    /// A request failed.
    #[error("{call} failed: {source}")]
    Call {
        /// Which.
        call: &'static str,
        /// Why.
        source: io::Error,
    },
    /// A file of the host's could not be used.
    #[error("{path}: {source}")]
    File {
        /// Which.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// The function is behind no IOMMU.
    #[error(
        "the PCI function {0} is in no IOMMU group, so that nothing would keep it from the host's memory: turn the host's IOMMU on, in \
         the firmware and on the kernel's command line (intel_iommu=on, amd_iommu=on)"
    )]
    NoIommu(String),
    /// The function has another driver.
    #[error(
        "the PCI function {function} is {driver}'s: give it to vfio-pci (`echo vfio-pci > /sys/bus/pci/devices/{function}/driver_override`, \
         then unbind it there and write its name to /sys/bus/pci/drivers_probe)"
    )]
    OtherDriver {
        /// Which function.
        function: String,
        /// What drives it.
        driver: String,
    },
    /// The group cannot be used as a whole.
    #[error(
        "of the IOMMU group {0} another function is in the host's use: all that is in the group has to be vfio-pci's, or without a driver"
    )]
    Group(String),
    /// The descriptor is not what it is said to be.
    #[error("{0}")]
    Other(&'static str),
}

pub(crate) fn failed(call: &'static str) -> impl Fn(io::Error) -> VfioError {
    move |source| VfioError::Call { call, source }
}
