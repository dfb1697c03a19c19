//! What is put into a machine that is built: devices by their names, and who else acts on them. Knows no machine.

use std::sync::Arc;

use memory::Pins;
use virtio::VirtioDevice;
use vm_memory::GuestRegionMmap;

use crate::deflation::Ballooned;
use crate::functions::NamedFunction;
use crate::growth::Pluggable;
use crate::iommu::Iommu;

/// A device and its name.
pub struct NamedDevice {
    /// Its name within the VM.
    pub id: String,
    /// The device.
    pub device: Box<dyn VirtioDevice>,
}

/// What is put into a machine that is built.
#[derive(Default)]
pub struct Devices {
    /// Those that this process is.
    pub devices: Vec<NamedDevice>,
    /// Those that the host has.
    pub functions: Vec<NamedFunction>,
    /// Of the device among them that plugs memory.
    pub pluggable: Option<Pluggable>,
    /// Of the one that is the guest's balloon, if functions do without what is in it.
    pub ballooned: Option<Ballooned>,
    /// Of the one among them that is an IOMMU.
    pub iommu: Option<Iommu>,
    /// Files that are memory beside RAM.
    pub pmem: Vec<Arc<GuestRegionMmap<()>>>,
    /// Whether the host's pages of the guest's memory have to stay, as devices are told.
    pub pins: Pins,
}
