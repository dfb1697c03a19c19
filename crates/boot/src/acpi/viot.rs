//! The VIOT (ACPI 6.5, 5.2.36): which PCI functions stand behind a paravirtualized IOMMU. Linux takes what the table names to be behind it, also
//! functions that come later; what it does not name reaches all memory, as the machine's own devices do.

use acpi_tables::viot::{PciDevice, PciRange, VIOT, VirtIoPciIommu};

use super::{GuestIommu, OEM_ID, OEM_REVISION, OEM_TABLE_ID};

/// Function 0 of a device on bus 0 of segment 0.
fn device(number: u8) -> PciDevice {
    PciDevice::new(0, 0, number, 0)
}

/// Builds the table.
pub(super) fn build(iommu: GuestIommu) -> VIOT {
    let mut table = VIOT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    let node = table.add_virtio_pci_iommu(VirtIoPciIommu::new(device(iommu.device)));
    table.add_pci_range(PciRange::new(device(iommu.first), device(iommu.last), &node));
    table
}
