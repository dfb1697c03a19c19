//! Functions of the machine's PCI bus that come and leave while it runs.

use serde::{Deserialize, Serialize};

/// What happens to a function, by its address as Linux writes it: `0000:00:05.0`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PciRequest {
    /// It is on the bus: look for it, and give its driver time to make what it is used by.
    Add {
        /// The function's address.
        address: String,
        /// How long, in milliseconds, the driver of a disk or of a network interface may take to name it.
        wait_ms: u32,
    },
    /// It is to leave the bus: its driver lets go of it. Nothing is done where there is none.
    Remove {
        /// The function's address.
        address: String,
    },
}

/// A function as the guest's Linux sees it (Documentation/PCI/sysfs-pci.rst).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PciDevice {
    /// Its address.
    pub address: String,
    /// Base class, sub-class and interface (PCI Code and ID Assignment), such as `0x010802`.
    pub class: String,
    /// The driver that has it, if any.
    pub driver: Option<String>,
    /// What it is used by: names of disks and network interfaces.
    pub names: Vec<String>,
}
