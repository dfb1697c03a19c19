//! PCI functions of the host as Linux's VFIO gives them away (Documentation/driver-api/vfio.rst), for whoever takes one and whoever
//! is given it. Knows no guest, no bus of a guest's, and not what a function is for.
//!
//! ```text
//!  host::open_container() ─▶ the VMM: Type1, an AddressSpace: map() ─▶ Mapped ─▶ unmap(Mapped)
//!                                        ▲ join
//!  host::open_group(0000:00:04.0) ─▶ the VMM: Group ── take("0000:00:04.0") ─▶ Function: registers and interrupts, a Device
//! ```
//! All are descriptors: a function is the host's again, reset, when its last copies are closed. [`fake`] has both for tests without
//! hardware.
#![allow(
    unsafe_code,
    reason = "requests to a driver take raw addresses; each block says what it relies on"
)]

pub mod fake;
mod function;
mod group;
pub mod host;
mod info;
mod interrupts;
mod iommufd;
mod layout;
mod mapping;
mod region;
mod runs;
mod space;
mod type1;
mod uapi;

use std::io;

use base::PciAddress;

pub use function::{Device, Function};
pub use group::Group;
pub use interrupts::{IntxMask, Irq, IrqInfo};
pub use iommufd::Iommufd;
pub use layout::{MSI_WINDOW, check_layout};
pub use mapping::Mapping;
pub use region::Region;
pub use runs::{CHUNK, MapAllError, map_all, map_runs, runs, unmap_all};
pub use space::{AddressSpace, DmaAccess, Mapped, Piece, UnmapError};
pub use type1::{DirtyTracking, IommuInfo, Type1};
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
    /// What sysfs says of a function could not be had.
    #[error(transparent)]
    Device(#[from] host::DeviceError),
    /// The function is behind no IOMMU.
    #[error(
        "the PCI function {0} is in no IOMMU group, so that nothing would keep it from the host's memory: turn the host's IOMMU on, in \
         the firmware and on the kernel's command line (intel_iommu=on, amd_iommu=on)"
    )]
    NoIommu(PciAddress),
    /// The function has another driver.
    #[error("the PCI function {function} is {driver}'s: take it for guests first (`basalt device bind {function}`)")]
    OtherDriver {
        /// Which function.
        function: PciAddress,
        /// What drives it.
        driver: String,
    },
    /// The group cannot be used as a whole.
    #[error(
        "of the IOMMU group {group} the host uses {others}: all that is in the group has to be vfio-pci's, or without a driver; give those \
         to vfio-pci as well, or put the function into a slot with a group of its own"
    )]
    Group {
        /// The group's number.
        group: u32,
        /// The other functions, each with its driver.
        others: String,
    },
    /// Somebody has the group.
    #[error(
        "the PCI function {function} is in use: the IOMMU group {group} is open already. End the VM that has a function of this group, or \
         take all functions that are wanted of it together"
    )]
    InUse {
        /// Which function.
        function: PciAddress,
        /// The group's number.
        group: u32,
    },
    /// A function has no file that iommufd could be given.
    #[error(
        "the kernel makes no file of its own for the PCI function {0}: it has no iommufd for VFIO (Linux 6.6 with \
         CONFIG_VFIO_DEVICE_CDEV); give the function by its IOMMU group"
    )]
    NoOwnFile(PciAddress),
    /// Somebody has the function by its own file, or its group.
    #[error(
        "the PCI function is in use: another process has opened it or its IOMMU group, or the host's drivers use another function of the \
         group. End the VM that has it, or give all functions of the group to vfio-pci ({0})"
    )]
    HasUser(io::Error),
    /// Nothing keeps a function from sending other interrupts than its own.
    #[error(
        "the host's IOMMU does not remap interrupts, so that a guest could have its PCI function send interrupts to anybody: turn \
         interrupt remapping on (in the firmware; not intremap=off), or trust the guest with \
         `echo 1 > /sys/module/{0}/parameters/allow_unsafe_interrupts`"
    )]
    NoRemapping(&'static str),
    /// Nobody wants it any more.
    #[error("the mapping of memory for DMA was given up: the function was detached")]
    GivenUp,
    /// Memory could not be mapped; nothing has changed.
    #[error("{length:#x} bytes cannot be mapped for DMA at {iova:#x}: {source}{next}")]
    Map {
        /// Where functions would have seen it.
        iova: u64,
        /// Bytes.
        length: u64,
        /// Why.
        source: io::Error,
        /// What to do; empty, or begins with a colon.
        next: &'static str,
    },
    /// Less was unmapped than was mapped.
    #[error(
        "of {asked:#x} bytes that are mapped for DMA at {iova:#x} the kernel has unmapped {done:#x}: the memory must stay as it is until the \
         functions are closed"
    )]
    Unmapped {
        /// Where functions see it.
        iova: u64,
        /// What was mapped, in bytes.
        asked: u64,
        /// What was unmapped, in bytes.
        done: u64,
    },
    /// A mapping was given to an address space that it is not of; a bug.
    #[error("the mapping at {0:#x} is another address space's")]
    OtherSpace(u64),
    /// Functions could not reach all memory.
    #[error(
        "functions of the host's cannot reach guest memory at {start:#x} to {end:#x}, which the host's IOMMU has reserved or does not \
         translate: give the guest less memory, or a machine layout that leaves this out ({allowed} can be reached)"
    )]
    Layout {
        /// First address.
        start: u64,
        /// Last address.
        end: u64,
        /// What can be reached.
        allowed: String,
    },
    /// The address space takes no more mappings.
    #[error(
        "{needed} mappings are needed, the container has room for {available}: map larger pieces, or raise \
         /sys/module/vfio_iommu_type1/parameters/dma_entry_limit"
    )]
    Mappings {
        /// How many are needed.
        needed: usize,
        /// How many there can be.
        available: u32,
    },
    /// The host has not so many interrupts.
    #[error("{asked} interrupts were asked for, the host can give the function {available}")]
    Vectors {
        /// How many were asked for.
        asked: usize,
        /// How many it would get.
        available: u32,
    },
    /// The descriptor is not what it is said to be.
    #[error("{0}")]
    Other(&'static str),
}

pub(crate) fn failed(call: &'static str) -> impl Fn(io::Error) -> VfioError {
    move |source| VfioError::Call { call, source }
}
