//! The guest physical address map. One page of constants; everything else refers to it.
//!
//! ```text
//! 0                RAM
//! 3 GiB            32-bit PCI window
//! 3.5 GiB          PCI configuration space (ECAM), bus 0 only
//! 0xfec0_0000      I/O APIC
//! 0xfee0_0000      local APICs
//! 4 GiB            RAM, what did not fit below 3 GiB
//! above all RAM    hot-pluggable memory, and what addresses its device has beside
//! 256 GiB or more  64-bit PCI window
//! above that       files as memory (virtio-pmem)
//! ```

use base::ByteSize;

/// A range of guest physical addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// First address.
    pub start: u64,
    /// Number of bytes.
    pub length: u64,
}

/// How much memory a VM has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemorySize {
    /// What it boots with.
    pub boot: ByteSize,
    /// The most that can be plugged while it runs.
    pub hotplug: ByteSize,
    /// Addresses that are kept for what can be plugged, also in a machine that goes on from this one and can plug more: at least as many.
    pub hotplug_region: ByteSize,
}

impl MemorySize {
    /// The same, and so much can be plugged in a region of that size.
    #[must_use]
    pub fn with_hotplug(self, hotplug: ByteSize) -> Self {
        Self {
            hotplug,
            hotplug_region: self.hotplug_region.max(hotplug),
            ..self
        }
    }

    /// What it boots with and what can be plugged: what a file of all of it has.
    pub fn all(self) -> ByteSize {
        ByteSize(self.boot.0.saturating_add(self.hotplug.0))
    }

    /// Whether a machine that was saved with this much can go on with `other`: the same, or more that can be plugged where nothing could be.
    pub fn can_become(self, other: Self) -> bool {
        let Self {
            boot,
            hotplug,
            hotplug_region,
        } = other;
        let is_alike = (self.boot, self.hotplug_region) == (boot, hotplug_region);
        is_alike && (self.hotplug == hotplug || self.hotplug == ByteSize(0))
    }
}

/// Nothing can be plugged.
impl From<ByteSize> for MemorySize {
    fn from(boot: ByteSize) -> Self {
        Self {
            boot,
            hotplug: ByteSize(0),
            hotplug_region: ByteSize(0),
        }
    }
}

/// Where RAM ends below 4 GiB and the 32-bit PCI window begins.
pub const LOW_RAM_END: u64 = 3 << 30;

/// The 32-bit PCI window.
pub const PCI_WINDOW_32: Range = Range {
    start: LOW_RAM_END,
    length: 512 << 20,
};

/// PCI configuration space by memory (ECAM; PCI Express 5.0, 7.2.2): 1 MiB for bus 0.
pub const ECAM: Range = Range {
    start: 0xe000_0000,
    length: 1 << 20,
};

/// The I/O APIC's registers (Intel 82093AA).
pub const IOAPIC: Range = Range {
    start: 0xfec0_0000,
    length: 0x20,
};

/// The local APICs' registers (Intel SDM 3A, 11.4.1).
pub const LOCAL_APIC: u64 = 0xfee0_0000;

/// Where RAM goes on above the hole.
pub const HIGH_RAM_START: u64 = 4 << 30;

/// The least start of the 64-bit PCI window.
const PCI_WINDOW_64_START: u64 = 256 << 30;

/// The size of the 64-bit PCI window. Small enough for the 40 address bits of the least CPU model.
const PCI_WINDOW_64_LENGTH: u64 = 64 << 30;

/// What hot-pluggable memory begins at a multiple of: what Linux adds memory by at least on x86-64 (`SECTION_SIZE_BITS`, 27).
const HOTPLUG_ALIGNMENT: u64 = 128 << 20;

/// The RAM regions of a VM that boots with `size` bytes.
pub fn ram(size: ByteSize) -> Vec<Range> {
    let low = size.bytes().min(LOW_RAM_END);
    let mut regions = vec![Range { start: 0, length: low }];
    if size.bytes() > low {
        regions.push(Range {
            start: HIGH_RAM_START,
            length: size.bytes() - low,
        });
    }
    regions
}

/// Where memory lies that can be plugged: above all RAM, and above 4 GiB. It has no bytes where addresses alone are kept for some, and is
/// `None` where there are none.
pub fn hotplug(size: MemorySize) -> Option<Range> {
    hotplug_region(size).map(|region| Range {
        start: region.start,
        length: size.hotplug.bytes(),
    })
}

/// All addresses that are kept for memory that can be plugged, from the same on. `None` if there are none.
pub fn hotplug_region(size: MemorySize) -> Option<Range> {
    let ram_end = ram(size.boot).last().map_or(0, |range| range.start + range.length);
    let start = ram_end.max(HIGH_RAM_START).next_multiple_of(HOTPLUG_ALIGNMENT);
    let length = size.hotplug_region.max(size.hotplug).bytes();
    (length > 0).then_some(Range { start, length })
}

/// All regions of memory, lowest address first: RAM, and what can be plugged.
pub fn regions(size: MemorySize) -> Vec<Range> {
    let hotplug = hotplug(size).filter(|range| range.length > 0);
    ram(size.boot).into_iter().chain(hotplug).collect()
}

/// The 64-bit PCI window of a VM with so much memory: above all of it and what addresses are kept for more, aligned to its own size.
pub fn pci_window_64(size: impl Into<MemorySize>) -> Range {
    let size = size.into();
    let last = hotplug_region(size).or_else(|| ram(size.boot).pop());
    let memory_end = last.map_or(0, |range| range.start + range.length);
    let start = memory_end
        .max(PCI_WINDOW_64_START)
        .next_multiple_of(PCI_WINDOW_64_LENGTH);
    Range {
        start,
        length: PCI_WINDOW_64_LENGTH,
    }
}

/// What a file that is memory begins at a multiple of: Linux describes memory by sections of that size.
pub const PMEM_ALIGNMENT: u64 = HOTPLUG_ALIGNMENT;

/// Where files may lie that are memory: above all else, as far as the address bits of the least CPU model go; without bytes where that is full.
pub fn pmem(size: MemorySize) -> Range {
    const END: u64 = 1 << 40;
    let window = pci_window_64(size);
    let start = window.start + window.length;
    Range {
        start,
        length: END.saturating_sub(start),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ram_leaves_the_hole_free() {
        assert_eq!(
            ram(ByteSize::mib(128)),
            [Range {
                start: 0,
                length: 128 << 20
            }]
        );
        assert_eq!(ram(ByteSize::gib(3)).len(), 1);
        assert_eq!(
            ram(ByteSize::gib(8)),
            [
                Range {
                    start: 0,
                    length: 3 << 30
                },
                Range {
                    start: 4 << 30,
                    length: 5 << 30
                }
            ]
        );
    }

    #[test]
    fn hot_pluggable_memory_is_above_ram_and_below_the_window() {
        let sizes = [
            (64, 128),
            (3 << 10, 512),
            (3073, 128),
            (5 << 10, 1 << 10),
            (200 << 10, 512 << 10),
        ];
        for (boot, hotplug_mib) in sizes {
            let size = MemorySize {
                boot: ByteSize::mib(boot),
                hotplug: ByteSize::mib(hotplug_mib),
                hotplug_region: ByteSize(0),
            };
            let range = hotplug(size).unwrap();
            let end = |range: &Range| range.start + range.length;
            assert_eq!(range.length, hotplug_mib << 20);
            assert_eq!(range.start % HOTPLUG_ALIGNMENT, 0);
            assert!(range.start >= HIGH_RAM_START && range.start >= end(ram(size.boot).last().unwrap()));
            assert!(end(&range) <= pci_window_64(size).start, "{size:?}");
            assert_eq!(
                regions(size).iter().map(|range| range.length).sum::<u64>(),
                size.all().bytes()
            );
        }
        let none = MemorySize::from(ByteSize::gib(8));
        assert_eq!((hotplug(none), regions(none)), (None, ram(ByteSize::gib(8))));
        assert_eq!(pci_window_64(none).start, 256 << 30);
    }

    #[test]
    fn addresses_are_kept_for_memory_that_a_machine_may_plug_one_day() {
        let mut size = MemorySize::from(ByteSize::gib(1));
        size.hotplug_region = ByteSize::gib(128);
        let start = HIGH_RAM_START;
        let range = |length| Some(Range { start, length });
        assert_eq!((hotplug(size), hotplug_region(size)), (range(0), range(128 << 30)));
        assert_eq!((regions(size), size.all()), (ram(size.boot), size.boot));
        let more = size.with_hotplug(ByteSize::gib(2));
        assert_eq!(
            (hotplug(more), hotplug_region(more)),
            (range(2 << 30), range(128 << 30))
        );
        assert_eq!(
            (regions(more).last().copied(), more.all()),
            (range(2 << 30), ByteSize::gib(3))
        );
        for size in [size, more] {
            assert_eq!(pci_window_64(size).start, 256 << 30, "{size:?}");
        }
        assert!(size.can_become(size) && size.can_become(more) && !more.can_become(size));
        assert!(!more.can_become(size.with_hotplug(ByteSize::gib(4))));
        assert!(
            !size.can_become(MemorySize::from(size.boot)),
            "its addresses are the PCI window's"
        );
        size.hotplug_region = ByteSize::gib(512);
        assert_eq!(
            pci_window_64(size).start,
            576 << 30,
            "512 GiB from 4 GiB on, and then whole windows"
        );
    }

    #[test]
    fn the_high_window_is_above_ram_and_aligned() {
        for gib in [1, 8, 255, 256, 300, 1000] {
            let window = pci_window_64(ByteSize::gib(gib));
            assert!(window.start >= ram(ByteSize::gib(gib)).last().map(|r| r.start + r.length).unwrap());
            assert_eq!(window.start % window.length, 0);
        }
    }
}
