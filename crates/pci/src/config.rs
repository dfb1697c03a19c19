//! The configuration space of a type-0 function: bytes, and which of their bits a guest may write.
//!
//! Every access is served byte by byte through the write mask, so width and alignment need no cases. Knows nothing of
//! what registers do; whoever owns the space looks at it after a write.

use crate::decode::MemoryRange;
use crate::{BAR_COUNT, MemoryRanges, PciError};

/// Bytes of configuration space of a conventional function (6.1).
pub const SIZE: usize = 256;

/// Registers of the type-0 header (figure 6-1), by offset.
pub mod register {
    #![allow(missing_docs, reason = "the names are the specification's")]
    pub const VENDOR_ID: usize = 0x00;
    pub const DEVICE_ID: usize = 0x02;
    pub const COMMAND: usize = 0x04;
    pub const STATUS: usize = 0x06;
    pub const REVISION_ID: usize = 0x08;
    pub const CLASS_CODE: usize = 0x09;
    pub const CACHE_LINE_SIZE: usize = 0x0c;
    pub const BASE_ADDRESS: usize = 0x10;
    pub const SUBSYSTEM_VENDOR_ID: usize = 0x2c;
    pub const SUBSYSTEM_ID: usize = 0x2e;
    pub const CAPABILITIES_POINTER: usize = 0x34;
    pub const INTERRUPT_LINE: usize = 0x3c;
    /// Where capabilities begin: right after the header.
    pub const HEADER_END: usize = 0x40;
}

bitflags::bitflags! {
    /// The command register (6.2.2).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Command: u16 {
        /// Respond to accesses to ports.
        const PORT_SPACE = 1 << 0;
        /// Respond to memory accesses.
        const MEMORY_SPACE = 1 << 1;
        /// Act as a master.
        const BUS_MASTER = 1 << 2;
        /// Do not assert INTx#.
        const INTERRUPT_DISABLE = 1 << 10;
    }
}

/// What a guest may change of it in every function; `PORT_SPACE` in those that have BARs of ports.
const COMMAND_WRITABLE: Command = Command::MEMORY_SPACE
    .union(Command::BUS_MASTER)
    .union(Command::INTERRUPT_DISABLE);

/// Status register: there is a capabilities list (6.2.3).
const STATUS_CAPABILITIES_LIST: u16 = 1 << 4;

/// One writable register of the header: its offset and the mask of bits a guest may change.
struct Writable {
    offset: usize,
    mask: &'static [u8],
}

/// What a guest may write in the header besides BARs. Everything else is read-only, the error bits of the status
/// register too, as none is ever set.
const WRITABLE: [Writable; 3] = [
    Writable {
        offset: register::COMMAND,
        mask: &COMMAND_WRITABLE.bits().to_le_bytes(),
    },
    Writable {
        offset: register::CACHE_LINE_SIZE,
        mask: &[0xff],
    },
    Writable {
        offset: register::INTERRUPT_LINE,
        mask: &[0xff],
    },
];

/// Capability ids (appendix H).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum CapabilityId {
    /// Power management.
    PowerManagement = 0x01,
    /// Message signalled interrupts.
    Msi = 0x05,
    /// Vendor specific.
    VendorSpecific = 0x09,
    /// PCI Express.
    PciExpress = 0x10,
    /// MSI-X.
    MsiX = 0x11,
}

/// How a BAR decodes (6.2.5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarKind {
    /// 32-bit memory, not prefetchable.
    Memory32,
    /// 64-bit memory; takes two registers.
    Memory64 {
        /// Reads have no side effects.
        prefetchable: bool,
    },
    /// Ports, 256 at most, for guests whose accesses to memory nobody sees.
    Ports,
}

/// One BAR of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bar {
    /// Its first register, 0 to 5.
    pub index: usize,
    /// How it decodes.
    pub kind: BarKind,
    /// Its size, a power of two from 16 on.
    pub size: u64,
}

impl Bar {
    fn type_bits(self) -> u8 {
        match self.kind {
            BarKind::Memory32 => 0,
            BarKind::Memory64 { prefetchable: false } => 0b0100,
            BarKind::Memory64 { prefetchable: true } => 0b1100,
            BarKind::Ports => 0b01,
        }
    }

    fn check(self) -> Result<(), PciError> {
        let (registers, most) = match self.kind {
            BarKind::Memory32 => (1, 1 << 31),
            BarKind::Memory64 { .. } => (2, 1 << 62),
            BarKind::Ports => (1, 256),
        };
        let fits = self.index + registers <= BAR_COUNT;
        if fits && self.size.is_power_of_two() && (16..=most).contains(&self.size) {
            Ok(())
        } else {
            Err(PciError::Bar {
                index: self.index,
                size: self.size,
            })
        }
    }
}

/// Who a function says it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// Revision.
    pub revision: u8,
    /// Class code: base class, sub-class, programming interface (appendix D).
    pub class: [u8; 3],
    /// Subsystem vendor id.
    pub subsystem_vendor: u16,
    /// Subsystem id.
    pub subsystem: u16,
}

/// A type-0 configuration space.
#[derive(Clone, Debug)]
pub struct ConfigSpace {
    bytes: [u8; SIZE],
    writable: [u8; SIZE],
    bars: [Option<Bar>; BAR_COUNT],
    /// By capabilities.
    taken: [bool; SIZE],
    // Where the next capability goes, and the byte that shall point to it.
    next_capability: usize,
    last_link: usize,
}

impl ConfigSpace {
    /// A function without BARs and capabilities.
    pub fn new(identity: &Identity) -> Self {
        let mut space = Self {
            bytes: [0; SIZE],
            writable: [0; SIZE],
            bars: [None; BAR_COUNT],
            taken: [false; SIZE],
            next_capability: register::HEADER_END,
            last_link: register::CAPABILITIES_POINTER,
        };
        let [base, sub, interface] = identity.class;
        space.set(register::VENDOR_ID, &identity.vendor.to_le_bytes());
        space.set(register::DEVICE_ID, &identity.device.to_le_bytes());
        space.set(register::REVISION_ID, &[identity.revision]);
        space.set(register::CLASS_CODE, &[interface, sub, base]);
        space.set(register::SUBSYSTEM_VENDOR_ID, &identity.subsystem_vendor.to_le_bytes());
        space.set(register::SUBSYSTEM_ID, &identity.subsystem.to_le_bytes());
        for Writable { offset, mask } in &WRITABLE {
            space.allow(*offset, mask);
        }
        space
    }

    /// Adds a BAR, at address 0.
    ///
    /// # Errors
    /// No register can express it.
    pub fn add_bar(&mut self, bar: Bar) -> Result<(), PciError> {
        bar.check()?;
        let offset = register::BASE_ADDRESS + 4 * bar.index;
        let mask = (!(bar.size - 1)).to_le_bytes();
        let registers = match bar.kind {
            BarKind::Memory32 | BarKind::Ports => 4,
            BarKind::Memory64 { .. } => 8,
        };
        if bar.kind == BarKind::Ports {
            let command = COMMAND_WRITABLE.union(Command::PORT_SPACE);
            self.allow(register::COMMAND, &command.bits().to_le_bytes());
        }
        self.set(offset, &[bar.type_bits()]);
        // The low bits stay as they are: that is how a guest learns the size (6.2.5.1).
        self.allow(offset, &mask[..registers]);
        self.bars[bar.index] = Some(bar);
        Ok(())
    }

    /// Appends a capability of `body` after id and link; `writable` masks the body's bits a guest may change.
    /// Returns the offset of the capability.
    ///
    /// # Errors
    /// No room is left.
    pub fn add_capability(&mut self, id: CapabilityId, body: &[u8], writable: &[u8]) -> Result<usize, PciError> {
        let start = self.next_capability;
        let placed = self.put_capability(start, id, body, writable);
        placed.map_err(|_| PciError::Capability(2 + body.len()))?;
        Ok(start)
    }

    /// Adds a capability as [`ConfigSpace::add_capability`] does, behind the last one in the list and at `start`: for a function whose
    /// driver may know where its capabilities are. Afterwards none can be appended before its end.
    ///
    /// # Errors
    /// It is not behind the header on a multiple of four, not within the space, or another one is there.
    pub fn put_capability(
        &mut self,
        start: usize,
        id: CapabilityId,
        body: &[u8],
        writable: &[u8],
    ) -> Result<(), PciError> {
        let length = 2 + body.len();
        let place = PciError::CapabilityPlace { start, length };
        let end = start.saturating_add(length);
        let within = start >= register::HEADER_END && start.is_multiple_of(4) && end <= SIZE;
        if !within || writable.len() > body.len() || self.taken[start..end].contains(&true) {
            return Err(place);
        }
        let link = u8::try_from(start).map_err(|_| place)?;
        self.taken[start..end].fill(true);
        self.set(start, &[id as u8]);
        self.set(start + 2, body);
        self.allow(start + 2, writable);
        self.set(self.last_link, &[link]);
        self.set(register::STATUS, &STATUS_CAPABILITIES_LIST.to_le_bytes());
        self.last_link = start + 1;
        self.next_capability = self.next_capability.max(end.next_multiple_of(4));
        Ok(())
    }

    /// Changes registers that their owner has changed, whether or not a guest may; they lie within the space.
    pub fn put(&mut self, offset: usize, value: &[u8]) {
        self.set(offset, value);
    }

    /// Reads; bytes outside of the space are all ones.
    pub fn read(&self, offset: usize, data: &mut [u8]) {
        for (at, byte) in data.iter_mut().enumerate() {
            *byte = offset
                .checked_add(at)
                .and_then(|at| self.bytes.get(at))
                .copied()
                .unwrap_or(0xff);
        }
    }

    /// Takes a guest's write: only writable bits change, bytes outside of the space are dropped.
    pub fn write(&mut self, offset: usize, data: &[u8]) {
        for (at, &value) in data.iter().enumerate() {
            let Some(at) = offset.checked_add(at).filter(|&at| at < SIZE) else {
                return;
            };
            let mask = self.writable[at];
            self.bytes[at] = (self.bytes[at] & !mask) | (value & mask);
        }
    }

    /// All of its bytes.
    pub fn save(&self) -> Vec<u8> {
        self.bytes.to_vec()
    }

    /// Takes over what [`ConfigSpace::save`] gave. Whoever owns the space looks at all of it afterwards.
    ///
    /// # Errors
    /// Something that a guest cannot write is different: it was another function's. Nothing has changed then.
    pub fn restore(&mut self, saved: &[u8]) -> Result<(), PciError> {
        let differs = |at: usize| (self.bytes[at] ^ saved[at]) & !self.writable[at] != 0;
        if saved.len() != SIZE {
            return Err(PciError::OtherFunction(saved.len()));
        }
        if let Some(at) = (0..SIZE).find(|&at| differs(at)) {
            return Err(PciError::OtherFunction(at));
        }
        self.bytes.copy_from_slice(saved);
        Ok(())
    }

    /// The command register.
    pub fn command(&self) -> Command {
        Command::from_bits_truncate(self.u16(register::COMMAND))
    }

    /// The 16-bit register at `offset`, which lies within the space.
    pub fn u16(&self, offset: usize) -> u16 {
        let mut bytes = [0; 2];
        self.read(offset, &mut bytes);
        u16::from_le_bytes(bytes)
    }

    /// The 32-bit register at `offset`, which lies within the space.
    pub fn u32(&self, offset: usize) -> u32 {
        let mut bytes = [0; 4];
        self.read(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    /// Whether an access may change what [`ConfigSpace::memory_ranges`] and [`ConfigSpace::port_ranges`] give.
    pub fn moves_memory(offset: usize, length: usize) -> bool {
        let overlaps = |start: usize, end: usize| offset < end && offset.saturating_add(length) > start;
        overlaps(register::COMMAND, register::COMMAND + 2)
            || overlaps(register::BASE_ADDRESS, register::BASE_ADDRESS + 4 * BAR_COUNT)
    }

    /// What the BARs decode of memory now.
    pub fn memory_ranges(&self) -> MemoryRanges {
        self.ranges(Command::MEMORY_SPACE, |kind| kind != BarKind::Ports)
    }

    /// What the BARs decode of ports now.
    pub fn port_ranges(&self) -> MemoryRanges {
        self.ranges(Command::PORT_SPACE, |kind| kind == BarKind::Ports)
    }

    fn ranges(&self, enabled_by: Command, is_meant: impl Fn(BarKind) -> bool) -> MemoryRanges {
        let mut ranges = [None; BAR_COUNT];
        if !self.command().contains(enabled_by) {
            return ranges;
        }
        for bar in self.bars.iter().flatten().filter(|bar| is_meant(bar.kind)) {
            let start = self.bar_address(*bar);
            ranges[bar.index] = MemoryRange::new(start, bar.size);
        }
        ranges
    }

    fn bar_address(&self, bar: Bar) -> u64 {
        let offset = register::BASE_ADDRESS + 4 * bar.index;
        let low = u64::from(self.u32(offset) & !0xf);
        match bar.kind {
            BarKind::Memory32 | BarKind::Ports => low,
            BarKind::Memory64 { .. } => low | (u64::from(self.u32(offset + 4)) << 32),
        }
    }

    fn set(&mut self, offset: usize, value: &[u8]) {
        self.bytes[offset..offset + value.len()].copy_from_slice(value);
    }

    fn allow(&mut self, offset: usize, mask: &[u8]) {
        self.writable[offset..offset + mask.len()].copy_from_slice(mask);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space() -> ConfigSpace {
        let mut space = ConfigSpace::new(&Identity {
            vendor: 0x1af4,
            device: 0x1042,
            revision: 1,
            class: [1, 0x80, 0],
            ..Identity::default()
        });
        space
            .add_bar(Bar {
                index: 0,
                kind: BarKind::Memory32,
                size: 0x8000,
            })
            .unwrap();
        space
            .add_bar(Bar {
                index: 2,
                kind: BarKind::Memory64 { prefetchable: true },
                size: 1 << 33,
            })
            .unwrap();
        space
    }

    #[test]
    fn a_guest_learns_sizes_by_writing_ones() {
        let mut space = space();
        for bar in 0..BAR_COUNT {
            space.write(register::BASE_ADDRESS + 4 * bar, &[0xff; 4]);
        }
        let bars: Vec<u32> = (0..6).map(|bar| space.u32(0x10 + 4 * bar)).collect();
        assert_eq!(bars, [0xffff_8000, 0, 0x0000_000c, 0xffff_fffe, 0, 0]);
    }

    #[test]
    fn identity_is_read_only_and_accesses_may_straddle() {
        let mut space = space();
        space.write(0, &[0; 8]);
        assert_eq!(space.u32(0), 0x1042_1af4);
        assert_eq!(space.u16(register::COMMAND), 0);
        space.write(3, &[0xff; 4]);
        assert_eq!(space.u16(register::COMMAND), COMMAND_WRITABLE.bits());
        let mut end = [0; 8];
        space.read(SIZE - 2, &mut end);
        assert_eq!(end, [0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]);
        space.write(usize::MAX, &[1, 2]);
        space.write(SIZE - 1, &[1, 2]);
    }

    #[test]
    fn ranges_follow_the_registers_while_decoding_is_on() {
        let mut space = space();
        space.write(0x10, &0xc000_0000_u32.to_le_bytes());
        space.write(0x18, &0x40_0000_0000_u64.to_le_bytes());
        assert_eq!(space.memory_ranges(), [None; 6]);
        space.write(register::COMMAND, &[2]);
        let ranges = space.memory_ranges();
        assert_eq!(ranges[0], MemoryRange::new(0xc000_0000, 0x8000));
        assert_eq!(ranges[2], MemoryRange::new(0x40_0000_0000, 1 << 33));
        assert!(ConfigSpace::moves_memory(2, 4));
        assert!(ConfigSpace::moves_memory(0x27, 1));
        assert!(!ConfigSpace::moves_memory(0x28, 4));
        assert!(!ConfigSpace::moves_memory(6, 2));
    }

    #[test]
    fn a_saved_space_fits_only_its_like() {
        let mut original = space();
        original.write(0x10, &0xc000_0000_u32.to_le_bytes());
        original.write(register::COMMAND, &[6]);
        let saved = original.save();
        let mut copy = space();
        copy.restore(&saved).unwrap();
        assert_eq!(copy.save(), saved);
        assert_eq!(copy.memory_ranges(), original.memory_ranges());
        let mut other = saved.clone();
        other[register::DEVICE_ID] ^= 1;
        assert_eq!(copy.restore(&other), Err(PciError::OtherFunction(register::DEVICE_ID)));
        // A bit below a BAR's size can never have been written.
        other = saved.clone();
        other[0x11] |= 0x10;
        assert_eq!(copy.restore(&other), Err(PciError::OtherFunction(0x11)));
        assert_eq!(copy.restore(&saved[1..]), Err(PciError::OtherFunction(SIZE - 1)));
        assert_eq!(copy.save(), saved);
    }

    #[test]
    fn capabilities_form_a_list() {
        let mut space = space();
        let a = space.add_capability(CapabilityId::MsiX, &[1; 10], &[0xff]).unwrap();
        let b = space
            .add_capability(CapabilityId::VendorSpecific, &[2; 3], &[])
            .unwrap();
        assert_eq!((a, b), (0x40, 0x4c));
        assert_eq!(space.u16(0x34) & 0xff, 0x40);
        assert_eq!(space.u16(a), 0x4c11);
        assert_eq!(space.u16(b), 0x0009);
        assert_eq!(space.u16(register::STATUS), STATUS_CAPABILITIES_LIST);
        space.write(a + 2, &[0, 0]);
        assert_eq!(space.u16(a + 2), 0x0100);
        assert_eq!(
            space.add_capability(CapabilityId::VendorSpecific, &[0; 200], &[]),
            Err(PciError::Capability(202))
        );
    }

    #[test]
    fn capabilities_lie_where_they_are_put() {
        let mut space = space();
        space.put_capability(0x90, CapabilityId::Msi, &[1; 8], &[0xff]).unwrap();
        space
            .put_capability(0x40, CapabilityId::PowerManagement, &[2; 6], &[])
            .unwrap();
        assert_eq!(space.u16(0x34) & 0xff, 0x90);
        assert_eq!((space.u16(0x90), space.u16(0x40)), (0x4005, 0x0001));
        for (start, length) in [
            (0x3c, 8),
            (0x42, 8),
            (0x44, 4),
            (0x4a, 4),
            (0x8c, 8),
            (0x98, 2),
            (0xfc, 8),
            (usize::MAX - 3, 8),
        ] {
            let refused = space.put_capability(start, CapabilityId::Msi, &[0; 8][..length - 2], &[]);
            assert_eq!(refused, Err(PciError::CapabilityPlace { start, length }), "{start:#x}");
        }
        assert_eq!(
            space.add_capability(CapabilityId::VendorSpecific, &[3; 2], &[]),
            Ok(0x9c)
        );
    }

    #[test]
    fn what_a_guest_cannot_write_its_owner_can() {
        let mut space = space();
        let at = space
            .add_capability(CapabilityId::Msi, &[0x80, 0, 5], &[0xff, 0, 0x0f])
            .unwrap();
        space.write(at, &[0xff; 5]);
        assert_eq!((space.u16(at + 2), space.u16(at + 4) & 0xff), (0x00ff, 0x0f));
        space.put(at + 3, &[9]);
        assert_eq!(space.u16(at + 2), 0x09ff);
    }

    #[test]
    fn impossible_bars_are_refused() {
        let mut space = space();
        for (index, kind, size) in [
            (0, BarKind::Memory32, 8),
            (0, BarKind::Memory32, 0x3000),
            (6, BarKind::Memory32, 0x1000),
            (5, BarKind::Memory64 { prefetchable: false }, 0x1000),
            (0, BarKind::Memory32, 1 << 32),
        ] {
            let bar = Bar { index, kind, size };
            assert_eq!(space.add_bar(bar), Err(PciError::Bar { index, size }));
        }
    }
}
