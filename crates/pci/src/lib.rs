//! PCI configuration space, BARs, MSI, MSI-X and the host bridge. Knows no device and no machine.
//!
//! ```text
//!  0xcf8-0xcff ─┐                    ┌─ config_read/config_write ─▶ PciFunction (00:01.0 ...)
//!  ECAM        ─┼─▶ PciBus (00:00.0) ┤
//!  windows     ─┘                    └─ bar_read/bar_write ──────▶ whichever function decodes the address
//! ```
//! Sections cited are those of the PCI Local Bus Specification 3.0 unless another is named. The bus assigns every BAR
//! itself, as firmware would; guests may move them.

pub mod bus;
pub mod config;
pub mod decode;
pub mod msi;
pub mod msix;
#[cfg(test)]
mod tests;
pub mod window;

pub use bus::{PciBus, PciState, SLOTS};
pub use config::{Bar, BarKind, CapabilityId, ConfigSpace, Identity};
pub use decode::MemoryRange;
pub use msi::{Msi, MsiLayout};
pub use msix::{MsixTable, VectorState};
pub use window::{Window, WindowKind, Windows};

/// The ports of configuration mechanism #1 (3.2.2.3.2): `CONFIG_ADDRESS` and `CONFIG_DATA`.
pub const CONFIG_PORTS: u16 = 0xcf8;

/// How many ports from [`CONFIG_PORTS`] on.
pub const CONFIG_PORT_COUNT: u16 = 8;

/// The number of base address registers of a type-0 function (6.2.5.1).
pub const BAR_COUNT: usize = 6;

/// The memory, or the ports, that a function's BARs decode now; `None` where there is no BAR or decoding is off.
pub type MemoryRanges = [Option<MemoryRange>; BAR_COUNT];

/// One function of bus 0. Guests call it from every vCPU at once, at any offset and width.
pub trait PciFunction: Send + Sync {
    /// How many bytes of configuration space it has: 256, or 4096 with the extended configuration space of PCI Express (PCI Express 5.0,
    /// 7.2). What is behind the first 256 is reached by memory alone.
    fn config_size(&self) -> usize {
        config::SIZE
    }

    /// Reads the function's configuration space; the access lies within [`PciFunction::config_size`].
    fn config_read(&self, offset: usize, data: &mut [u8]);

    /// Writes to the function's configuration space; the access lies within [`PciFunction::config_size`].
    fn config_write(&self, offset: usize, data: &[u8]);

    /// Whether such a write may change what BARs decode: those to BARs and the command register do; a function that can be reset by a write
    /// elsewhere says so.
    fn moves_memory(&self, offset: usize, length: usize) -> bool {
        ConfigSpace::moves_memory(offset, length)
    }

    /// What the BARs decode now. The bus asks again after each write that may have changed it.
    fn memory_ranges(&self) -> MemoryRanges;

    /// The same of ports.
    fn port_ranges(&self) -> MemoryRanges {
        [None; BAR_COUNT]
    }

    /// Reads from BAR `bar`; the access lies within it.
    fn bar_read(&self, bar: usize, offset: u64, data: &mut [u8]);

    /// Writes to BAR `bar`; the access lies within it.
    fn bar_write(&self, bar: usize, offset: u64, data: &[u8]);
}

/// Why a function cannot be put on the bus or built.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum PciError {
    /// All 32 device numbers are taken.
    #[error("the PCI bus is full: it has room for 31 devices")]
    BusFull,
    /// A window has no room left for a BAR.
    #[error("no room for a BAR of {size:#x} bytes in the PCI window at {window:#x}")]
    WindowFull {
        /// What the BAR needs.
        size: u64,
        /// Where the window begins.
        window: u64,
    },
    /// A BAR that no register can express; a bug of the device.
    #[error(
        "BAR {index} of {size:#x} bytes cannot be: sizes are powers of two from 16 bytes on, 64-bit BARs take two registers"
    )]
    Bar {
        /// Its register.
        index: usize,
        /// Its size.
        size: u64,
    },
    /// The capabilities do not fit into 256 bytes; a bug of the device.
    #[error("no room for a capability of {0} bytes in configuration space")]
    Capability(usize),
    /// A capability lies where another one is, or outside of configuration space.
    #[error("no capability of {length} bytes can be at {start:#x} in configuration space")]
    CapabilityPlace {
        /// Where it would begin.
        start: usize,
        /// Its bytes.
        length: usize,
    },
    /// Saved configuration space is that of another function.
    #[error(
        "the saved PCI configuration space differs at offset {0:#x}: restore with the devices that were there when it was saved"
    )]
    OtherFunction(usize),
    /// Saved vectors are those of another function.
    #[error("{saved} MSI-X vectors were saved, the device has {here}: restore with the devices that were there then")]
    Vectors {
        /// How many were saved.
        saved: usize,
        /// How many there are.
        here: usize,
    },
}
