//! Where the structures of a virtio-pci device are (4.1.4): one 32-bit BAR, a page each, and the capabilities that say so.
//!
//! One small BAR below 4 GiB can be placed by every guest; the 64-bit window is for devices with large BARs.

use pci::{Bar, BarKind, CapabilityId, ConfigSpace, Identity, PciError};

use super::common;

/// The one BAR.
pub(crate) const BAR: u8 = 0;
pub(crate) const BAR_SIZE: u64 = 0x8000;

/// Each region's start; a region ends where the next begins.
pub(crate) const COMMON: u64 = 0x0000;
pub(crate) const ISR: u64 = 0x1000;
pub(crate) const DEVICE: u64 = 0x2000;
pub(crate) const NOTIFY: u64 = 0x3000;
pub(crate) const MSIX_TABLE: u64 = 0x4000;
pub(crate) const MSIX_PENDING: u64 = 0x5000;
const END: u64 = 0x6000;

/// Queues are told apart by the address of their doorbell, four bytes each (4.1.4.4).
pub(crate) const NOTIFY_OFF_MULTIPLIER: u32 = 4;

/// As many as have entries in the table's page.
pub(crate) const MAX_VECTORS: usize = 256;

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

/// The region at an offset of the BAR, and the offset in it.
pub(crate) fn region(offset: u64) -> (Region, usize) {
    const REGIONS: [(u64, Region); 7] = [
        (END, Region::None),
        (MSIX_PENDING, Region::MsixPending),
        (MSIX_TABLE, Region::MsixTable),
        (NOTIFY, Region::Notify),
        (DEVICE, Region::Device),
        (ISR, Region::Isr),
        (COMMON, Region::Common),
    ];
    REGIONS
        .into_iter()
        .find(|&(start, _)| offset >= start)
        .and_then(|(start, region)| Some((region, usize::try_from(offset - start).ok()?)))
        .unwrap_or((Region::None, 0))
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

/// The configuration space of a device of type `device_type` with so many queues and vectors (4.1.2).
pub(crate) fn build(device_type: u16, queues: u16, vectors: u16) -> Result<Space, PciError> {
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
        kind: BarKind::Memory32,
        size: BAR_SIZE,
    })?;
    let low = |offset: u64| u32::try_from(offset).unwrap_or(u32::MAX);
    let (body, writable) = pci::msix::capability(vectors, BAR, low(MSIX_TABLE), low(MSIX_PENDING));
    let msix = space.add_capability(CapabilityId::MsiX, &body, &writable)?;
    let notify_length = u32::from(queues) * NOTIFY_OFF_MULTIPLIER;
    let vendor = CapabilityId::VendorSpecific;
    space.add_capability(vendor, &structure(CAP_COMMON, low(COMMON), common::LENGTH), &[])?;
    space.add_capability(vendor, &structure(CAP_ISR, low(ISR), 1), &[])?;
    let mut notify = structure(CAP_NOTIFY, low(NOTIFY), notify_length).to_vec();
    notify[0] += 4;
    notify.extend(NOTIFY_OFF_MULTIPLIER.to_le_bytes());
    space.add_capability(vendor, &notify, &[])?;
    space.add_capability(vendor, &structure(CAP_DEVICE, low(DEVICE), low(NOTIFY - DEVICE)), &[])?;
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
