//! What a guest is shown of a function: its ids, its BARs and its MSI-X vectors. All other capabilities are left out, as is what is
//! behind the first 256 bytes: what a guest does with them would be the host's business. Data only.

use std::ops::Range;

use pci::config::register;
use pci::{BAR_COUNT, Bar, BarKind, CapabilityId, ConfigSpace, Identity, PciError, msix};

/// MSI-X (6.8.2.3): how many vectors there are but one.
const TABLE_SIZE: u16 = 0x7ff;

/// A BAR's number, in the lowest bits of where something is (6.8.2.4).
const BAR_NUMBER: u32 = 7;

/// In a BAR's register (6.2.5.1).
const IO_SPACE: u8 = 1;
const TYPE: u8 = 0b110;
const TYPE_64: u8 = 0b100;
const PREFETCHABLE: u8 = 0b1000;

/// What can be mapped.
const PAGE: u64 = 4096;

/// Where bytes are: in which BAR, from where on, how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    bar: usize,
    start: u64,
    length: u64,
}

impl Place {
    fn of(word: u32, length: u64) -> Self {
        Self {
            bar: (word & BAR_NUMBER) as usize,
            start: u64::from(word & !BAR_NUMBER),
            length,
        }
    }

    /// Whether it has bytes among those.
    fn overlaps(&self, bar: usize, start: u64, end: u64) -> bool {
        bar == self.bar && start < self.start + self.length && self.start < end
    }

    /// Where in it an access begins, if it does.
    pub(crate) fn hit(&self, bar: usize, offset: u64) -> Option<usize> {
        let within = offset.checked_sub(self.start).filter(|within| *within < self.length)?;
        usize::try_from(within).ok().filter(|_| bar == self.bar)
    }
}

/// A function as it is shown.
#[derive(Debug)]
pub(crate) struct Description {
    identity: Identity,
    bars: Vec<Bar>,
    vectors: u16,
    table: u32,
    pending: u32,
}

impl Description {
    /// Out of a function's configuration space and the sizes of its BARs.
    pub(crate) fn read(bytes: &[u8; pci::config::SIZE], sizes: [u64; BAR_COUNT]) -> Result<Self, &'static str> {
        let capability = find(bytes, CapabilityId::MsiX).ok_or(
            "the PCI function has no MSI-X, by which alone it could interrupt the guest: it cannot be given away",
        )?;
        Ok(Self {
            identity: Identity {
                vendor: u16_at(bytes, register::VENDOR_ID),
                device: u16_at(bytes, register::DEVICE_ID),
                revision: bytes[register::REVISION_ID],
                class: [2, 1, 0].map(|byte| bytes[register::CLASS_CODE + byte]),
                subsystem_vendor: u16_at(bytes, register::SUBSYSTEM_VENDOR_ID),
                subsystem: u16_at(bytes, register::SUBSYSTEM_ID),
            },
            bars: bars(bytes, sizes),
            vectors: (u16_at(bytes, capability + 2) & TABLE_SIZE) + 1,
            table: u32_at(bytes, capability + 4),
            pending: u32_at(bytes, capability + 8),
        })
    }

    /// How many interrupts it has.
    pub(crate) fn vectors(&self) -> u16 {
        self.vectors
    }

    /// Where its table is.
    pub(crate) fn table(&self) -> Place {
        Place::of(self.table, u64::from(self.vectors) * msix::ENTRY_SIZE as u64)
    }

    /// And its pending bits (6.8.2.10): whole words of 64.
    pub(crate) fn pending(&self) -> Place {
        Place::of(self.pending, u64::from(self.vectors.div_ceil(64)) * 8)
    }

    /// Of a BAR with so many bytes, the pages that a guest may reach itself: those without table and pending bits, in runs.
    pub(crate) fn open_pages(&self, bar: usize, size: u64) -> Vec<Range<u64>> {
        let mut runs: Vec<Range<u64>> = Vec::new();
        for page in 0..size / PAGE {
            let (start, end) = (page * PAGE, (page + 1) * PAGE);
            if self.table().overlaps(bar, start, end) || self.pending().overlaps(bar, start, end) {
                continue;
            }
            match runs.last_mut() {
                Some(run) if run.end == start => run.end = end,
                _ => runs.push(start..end),
            }
        }
        runs
    }

    /// The configuration space, and where in it MSI-X is.
    pub(crate) fn space(&self) -> Result<(ConfigSpace, usize), PciError> {
        let mut space = ConfigSpace::new(&self.identity);
        for bar in &self.bars {
            space.add_bar(*bar)?;
        }
        let (mut body, writable) = msix::capability(self.vectors, 0, self.table, 0);
        body[6..].copy_from_slice(&self.pending.to_le_bytes());
        let msix = space.add_capability(CapabilityId::MsiX, &body, &writable)?;
        Ok((space, msix))
    }
}

/// Those of memory; no kernel of today needs ports of a function that has both.
fn bars(bytes: &[u8; pci::config::SIZE], sizes: [u64; BAR_COUNT]) -> Vec<Bar> {
    let mut bars = Vec::new();
    for (index, size) in sizes.into_iter().enumerate() {
        let low = bytes[register::BASE_ADDRESS + 4 * index];
        // The upper half of one that has two registers has no size.
        if size == 0 || low & IO_SPACE != 0 {
            continue;
        }
        let kind = match low & TYPE {
            TYPE_64 => BarKind::Memory64 {
                prefetchable: low & PREFETCHABLE != 0,
            },
            _ => BarKind::Memory32,
        };
        bars.push(Bar { index, kind, size });
    }
    bars
}

/// Where a capability is (6.7). A list that goes round in a circle has an end here.
fn find(bytes: &[u8; pci::config::SIZE], wanted: CapabilityId) -> Option<usize> {
    let mut at = usize::from(bytes[register::CAPABILITIES_POINTER] & !3);
    for _ in 0..pci::config::SIZE / 4 {
        if at < register::HEADER_END {
            return None;
        }
        if bytes[at] == wanted as u8 && at + 12 <= bytes.len() {
            return Some(at);
        }
        at = usize::from(bytes[at + 1] & !3);
    }
    None
}

fn u16_at(bytes: &[u8; pci::config::SIZE], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8; pci::config::SIZE], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An NVMe disk: a BAR of two registers, one of ports, a power management capability and MSI-X behind it.
    fn disk() -> [u8; pci::config::SIZE] {
        let mut bytes = [0; pci::config::SIZE];
        bytes[..4].copy_from_slice(&[0x36, 0x1b, 0x10, 0]);
        bytes[8..12].copy_from_slice(&[2, 2, 8, 1]);
        bytes[0x10] = 4;
        bytes[0x18] = 1;
        bytes[0x34] = 0x40;
        bytes[0x40..0x42].copy_from_slice(&[1, 0x60]);
        bytes[0x60..0x64].copy_from_slice(&[0x11, 0, 64, 0x80]);
        bytes[0x64..0x68].copy_from_slice(&0x2000_u32.to_le_bytes());
        bytes[0x68..0x6c].copy_from_slice(&0x3000_u32.to_le_bytes());
        bytes
    }

    const SIZES: [u64; BAR_COUNT] = [0x4000, 0, 0x20, 0, 0, 0];

    #[test]
    fn a_function_is_shown_with_its_ids_its_bars_and_msix() {
        let shown = Description::read(&disk(), SIZES).unwrap();
        assert_eq!(shown.vectors(), 65);
        let (mut space, msix) = shown.space().unwrap();
        assert_eq!((space.u32(0), space.u32(8)), (0x0010_1b36, 0x0108_0202));
        // Power management is not there, and MSI-X is off whatever the function was.
        assert_eq!(msix, register::HEADER_END);
        assert_eq!(space.u32(msix) & 0xff, 0x11);
        assert_eq!(space.u32(msix) >> 16, 64);
        assert_eq!((space.u32(msix + 4), space.u32(msix + 8)), (0x2000, 0x3000));
        space.write(0x10, &[0xff; 16]);
        assert_eq!((space.u32(0x10), space.u32(0x14)), (0xffff_c004, u32::MAX));
        assert_eq!(space.u32(0x18), 0, "no ports");
    }

    #[test]
    fn tables_are_where_the_function_says() {
        let shown = Description::read(&disk(), SIZES).unwrap();
        let (table, pending) = (shown.table(), shown.pending());
        assert_eq!((table.hit(0, 0x2000), table.hit(0, 0x240f)), (Some(0), Some(0x40f)));
        for (bar, offset) in [(0, 0x1fff), (0, 0x2410), (1, 0x2000), (0, u64::MAX)] {
            assert_eq!(table.hit(bar, offset), None, "{bar} {offset:#x}");
        }
        assert_eq!((pending.hit(0, 0x300f), pending.hit(0, 0x3010)), (Some(15), None));
        assert_eq!(shown.open_pages(0, 0x6000), [0..0x2000, 0x4000..0x6000]);
        assert_eq!(shown.open_pages(2, 0x1000).len(), 1);
        assert!(shown.open_pages(2, 0x800).is_empty(), "not a page");
    }

    #[test]
    fn what_a_function_says_wrongly_ends() {
        let mut circle = disk();
        circle[0x41] = 0x40;
        assert!(Description::read(&circle, SIZES).is_err());
        let mut late = disk();
        late[0x41] = 0xfc;
        late[0xfc] = 0x11;
        assert!(Description::read(&late, SIZES).is_err());
        let mut odd = disk();
        odd[0x10] = 0;
        assert!(Description::read(&odd, [3, 0, 0, 0, 0, 0]).unwrap().space().is_err());
    }
}
