//! Where the structures of a virtio-pci device are (4.1.4), and the capabilities that say so: in one 32-bit BAR, a page each, or, for
//! guests whose accesses to memory nobody sees, in one of ports, with the MSI-X table in a BAR that is plain memory.
//!
//! One small BAR below 4 GiB can be placed by every guest; the 64-bit window is for devices with large BARs.

use engine::Doorbell;
use pci::{Bar, BarKind, CapabilityId, ConfigSpace, Identity, PciError};

use super::common;

/// The BAR with the registers.
pub(crate) const BAR: u8 = 0;

/// Where the regions of a device's registers are.
pub(crate) struct Layout {
    /// Of the BAR.
    kind: BarKind,
    pub(crate) size: u64,
    /// Each region's start, the last one's first; a region ends where the one before it begins. Those of MSI-X are not there where its
    /// table is elsewhere.
    regions: &'static [(u64, Region)],
    /// Vectors that have room.
    pub(crate) vectors: usize,
    /// The MSI-X table's BAR, if it is plain memory.
    table: Option<Bar>,
}

/// Registers in memory.
pub(crate) const IN_MEMORY: Layout = Layout {
    kind: BarKind::Memory32,
    size: 0x8000,
    regions: &[
        (0x6000, Region::None),
        (0x5000, Region::MsixPending),
        (0x4000, Region::MsixTable),
        (0x3000, Region::Notify),
        (0x2000, Region::Device),
        (0x1000, Region::Isr),
        (0, Region::Common),
    ],
    // As many as have entries in the table's page.
    vectors: 256,
    table: None,
};

/// Registers in ports: there are 256. The table is in a page of memory.
pub(crate) const IN_PORTS: Layout = Layout {
    kind: BarKind::Ports,
    size: 0x100,
    regions: &[
        (0x100, Region::None),
        (0xc0, Region::Notify),
        (0x40, Region::Device),
        (0x3c, Region::Isr),
        (0, Region::Common),
    ],
    // As many queues have doorbells, and there is the device's own.
    vectors: 17,
    table: Some(Bar {
        index: TABLE_BAR as usize,
        kind: BarKind::Memory64 { prefetchable: true },
        size: 0x1000,
    }),
};

/// The BAR of a table that is plain memory, and where in it pending bits are, which nobody sets there.
pub(crate) const TABLE_BAR: u8 = 2;
const TABLE_PENDING: u64 = 0x800;

impl Layout {
    /// Where a region begins.
    pub(crate) fn start(&self, region: Region) -> u64 {
        let found = self.regions.iter().find(|&&(_, other)| other == region);
        found.map_or(self.size, |&(start, _)| start)
    }

    /// The region at an offset of the BAR, and the offset in it.
    pub(crate) fn region(&self, offset: u64) -> (Region, usize) {
        self.regions
            .iter()
            .find(|&&(start, _)| offset >= start)
            .and_then(|&(start, region)| Some((region, usize::try_from(offset - start).ok()?)))
            .unwrap_or((Region::None, 0))
    }

    /// What rings the doorbell of a queue, with the BAR at `base`.
    pub(crate) fn doorbell(&self, base: u64, queue: usize) -> Option<Doorbell> {
        let at = base + self.start(Region::Notify) + u64::from(NOTIFY_OFF_MULTIPLIER) * queue as u64;
        match self.kind {
            BarKind::Ports => u16::try_from(at).ok().map(Doorbell::Port),
            BarKind::Memory32 | BarKind::Memory64 { .. } => Some(Doorbell::Mmio(at)),
        }
    }

    /// Where the BAR is now.
    pub(crate) fn base(&self, space: &ConfigSpace) -> Option<u64> {
        let ranges = match self.kind {
            BarKind::Ports => space.port_ranges(),
            BarKind::Memory32 | BarKind::Memory64 { .. } => space.memory_ranges(),
        };
        ranges[usize::from(BAR)].map(|range| range.start())
    }
}

/// Queues are told apart by the address of their doorbell, four bytes each (4.1.4.4).
pub(crate) const NOTIFY_OFF_MULTIPLIER: u32 = 4;

/// `VIRTIO_PCI_CAP_*_CFG` (4.1.4).
const CAP_COMMON: u8 = 1;
const CAP_NOTIFY: u8 = 2;
const CAP_ISR: u8 = 3;
const CAP_DEVICE: u8 = 4;
const CAP_PCI: u8 = 5;

/// Bytes of `struct virtio_pci_cap`.
const CAP_LENGTH: u8 = 16;

/// Offsets in the PCI configuration access capability (4.1.4.9).
pub(crate) const PCI_CFG_BAR: usize = 4;
pub(crate) const PCI_CFG_OFFSET: usize = 8;
pub(crate) const PCI_CFG_LENGTH: usize = 12;
pub(crate) const PCI_CFG_DATA: usize = 16;

/// Which structure an offset of the BAR belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Region {
    Common,
    Isr,
    Device,
    Notify,
    MsixTable,
    MsixPending,
    None,
}

/// The class code that fits a device type (PCI Code and ID Assignment 1.11); drivers do not look at it, people do.
fn class(device_type: u16) -> [u8; 3] {
    match device_type {
        1 => [0x02, 0x00, 0x00],
        2 => [0x01, 0x80, 0x00],
        3 => [0x07, 0x80, 0x00],
        19 => [0x02, 0x80, 0x00],
        _ => [0xff, 0x00, 0x00],
    }
}

/// A finished configuration space and where its capabilities that have side effects are.
pub(crate) struct Space {
    pub(crate) space: ConfigSpace,
    pub(crate) msix: usize,
    pub(crate) pci_cfg: usize,
}

/// The configuration space of a device of type `device_type` with so many queues, each of which has a vector, as has the device (4.1.2).
pub(crate) fn build(layout: &Layout, device_type: u16, queues: u16) -> Result<Space, PciError> {
    let mut space = ConfigSpace::new(&Identity {
        vendor: 0x1af4,
        device: 0x1040 + device_type,
        revision: 1,
        class: class(device_type),
        subsystem_vendor: 0x1af4,
        subsystem: 0x40,
    });
    space.add_bar(Bar {
        index: usize::from(BAR),
        kind: layout.kind,
        size: layout.size,
    })?;
    let low = |offset: u64| u32::try_from(offset).unwrap_or(u32::MAX);
    let at = |region| low(layout.start(region));
    let vectors = queues + 1;
    let (body, writable) = match layout.table {
        Some(bar) => {
            space.add_bar(bar)?;
            pci::msix::capability(vectors, TABLE_BAR, 0, low(TABLE_PENDING))
        }
        None => pci::msix::capability(vectors, BAR, at(Region::MsixTable), at(Region::MsixPending)),
    };
    let msix = space.add_capability(CapabilityId::MsiX, &body, &writable)?;
    let notify_length = u32::from(queues) * NOTIFY_OFF_MULTIPLIER;
    let vendor = CapabilityId::VendorSpecific;
    space.add_capability(vendor, &structure(CAP_COMMON, at(Region::Common), common::LENGTH), &[])?;
    space.add_capability(vendor, &structure(CAP_ISR, at(Region::Isr), 1), &[])?;
    let mut notify = structure(CAP_NOTIFY, at(Region::Notify), notify_length).to_vec();
    notify[0] += 4;
    notify.extend(NOTIFY_OFF_MULTIPLIER.to_le_bytes());
    space.add_capability(vendor, &notify, &[])?;
    let device = at(Region::Device);
    let own = structure(CAP_DEVICE, device, at(Region::Notify) - device);
    space.add_capability(vendor, &own, &[])?;
    let mut access = structure(CAP_PCI, 0, 0).to_vec();
    access[0] += 4;
    access.extend([0; 4]);
    let mut writable = [0xff; 18];
    // Read-only: cap_len, cfg_type, id and padding.
    for fixed in [0, 1, 3, 4, 5] {
        writable[fixed] = 0;
    }
    let pci_cfg = space.add_capability(vendor, &access, &writable)?;
    Ok(Space { space, msix, pci_cfg })
}

/// The body of `struct virtio_pci_cap` after id and link.
fn structure(kind: u8, offset: u32, length: u32) -> [u8; 14] {
    let mut body = [0; 14];
    body[..3].copy_from_slice(&[CAP_LENGTH, kind, BAR]);
    body[6..10].copy_from_slice(&offset.to_le_bytes());
    body[10..].copy_from_slice(&length.to_le_bytes());
    body
}
