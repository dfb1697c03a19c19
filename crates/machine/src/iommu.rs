//! An IOMMU that the guest has: where it is on the bus, and which slots are behind it. Knows neither its requests nor what stands there.

use boot::GuestIommu;
use device::Endpoints;

use crate::devices::NamedDevice;

/// An IOMMU that the guest has.
#[derive(Clone)]
pub struct Iommu {
    /// The device's name.
    pub id: String,
    /// What stands behind it.
    pub endpoints: Endpoints,
}

impl Iommu {
    /// Where it is, and the slots that are left for functions behind it: devices are put on the bus in this order, behind the host bridge.
    /// `None` if it is not among them, or no slot is left.
    pub(crate) fn place_among(&self, devices: &[NamedDevice]) -> Option<GuestIommu> {
        let slot = devices.iter().position(|device| device.id == self.id)? + 1;
        let first = devices.len() + 1;
        (first < pci::SLOTS).then_some(GuestIommu {
            device: u8::try_from(slot).ok()?,
            first: u8::try_from(first).ok()?,
            last: u8::try_from(pci::SLOTS - 1).ok()?,
        })
    }
}
