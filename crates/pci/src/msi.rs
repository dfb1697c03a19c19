//! Message signalled interrupts: the capability of one function, in its four layouts (6.8.1).
//!
//! As with MSI-X, a vector is an [`engine::Interrupt`], which has a message routed to it while it may fire, and is the pending bit while it
//! may not. All registers lie in configuration space: after each write there [`Msi::follow`] looks at them.

use std::sync::Arc;

use engine::{Interrupt, MsiMessage};

use crate::ConfigSpace;

/// Message control (6.8.1.3).
const CONTROL: usize = 2;
const ENABLE: u16 = 1 << 0;
const MULTIPLE_CAPABLE_SHIFT: u16 = 1;
const MULTIPLE_ENABLE_SHIFT: u16 = 4;
const MULTIPLE_MASK: u16 = 0b111;
const IS_64_BIT: u16 = 1 << 7;
const PER_VECTOR_MASKING: u16 = 1 << 8;

/// Message address (6.8.1.4), of which the lowest two bits are zero.
const ADDRESS: usize = 4;
const UPPER_ADDRESS: usize = 8;

/// As many vectors as a function may have.
const MAX_VECTORS: u16 = 32;

/// Which registers a capability has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MsiLayout {
    /// How many vectors, a power of two up to 32.
    vectors: u16,
    is_64_bit: bool,
    has_masks: bool,
}

impl MsiLayout {
    /// That of a function whose message control register is `control`, but for no more than `most` vectors, of which there is one at
    /// least.
    pub fn of_control(control: u16, most: u32) -> Self {
        let capable = 1_u16 << (control >> MULTIPLE_CAPABLE_SHIFT & MULTIPLE_MASK);
        let most = u16::try_from(most).unwrap_or(MAX_VECTORS).clamp(1, MAX_VECTORS);
        Self {
            vectors: capable.min(1 << most.ilog2()),
            is_64_bit: control & IS_64_BIT != 0,
            has_masks: control & PER_VECTOR_MASKING != 0,
        }
    }

    /// How many vectors there are.
    pub fn vectors(&self) -> u16 {
        self.vectors
    }

    /// Bytes of the capability, its id and link included (figure 6-9).
    pub fn length(&self) -> usize {
        match self.has_masks {
            true => self.pending() + 4,
            false => self.data() + 2,
        }
    }

    /// The body of the capability, with the rest of its registers zero, and its write mask.
    pub fn capability(&self) -> (Vec<u8>, Vec<u8>) {
        let mut body = vec![0; self.length() - 2];
        let mut writable = vec![0; self.length() - 2];
        let mut set = |at: usize, value: &[u8], mask: &[u8]| {
            body[at - 2..at - 2 + value.len()].copy_from_slice(value);
            writable[at - 2..at - 2 + mask.len()].copy_from_slice(mask);
        };
        let capable = u16::try_from(self.vectors.ilog2()).unwrap_or(0) << MULTIPLE_CAPABLE_SHIFT;
        let wide = if self.is_64_bit { IS_64_BIT } else { 0 };
        let masks = if self.has_masks { PER_VECTOR_MASKING } else { 0 };
        let control_mask = ENABLE | MULTIPLE_MASK << MULTIPLE_ENABLE_SHIFT;
        set(
            CONTROL,
            &(capable | wide | masks).to_le_bytes(),
            &control_mask.to_le_bytes(),
        );
        set(ADDRESS, &[], &(!0b11_u32).to_le_bytes());
        if self.is_64_bit {
            set(UPPER_ADDRESS, &[], &[0xff; 4]);
        }
        set(self.data(), &[], &[0xff; 2]);
        if self.has_masks {
            // Of bits without a vector there are none (6.8.1.6).
            let vectors = u32::MAX >> (32 - self.vectors);
            set(self.masks(), &[], &vectors.to_le_bytes());
        }
        (body, writable)
    }

    /// Where the pending bits are, if there are any (6.8.1.7).
    pub fn pending_bits(&self) -> Option<usize> {
        self.has_masks.then(|| self.pending())
    }

    fn data(&self) -> usize {
        if self.is_64_bit { 12 } else { 8 }
    }

    fn masks(&self) -> usize {
        self.data() + 4
    }

    fn pending(&self) -> usize {
        self.data() + 8
    }
}

/// The vectors of one function.
pub struct Msi {
    layout: MsiLayout,
    at: usize,
    interrupts: Vec<Arc<dyn Interrupt>>,
    routed: Vec<Option<MsiMessage>>,
}

impl Msi {
    /// Vectors that are off, for the capability at `at`, with an interrupt for each.
    pub fn new(layout: MsiLayout, at: usize, interrupts: Vec<Arc<dyn Interrupt>>) -> Self {
        Self {
            layout,
            at,
            routed: vec![None; interrupts.len()],
            interrupts,
        }
    }

    /// Which registers there are.
    pub fn layout(&self) -> MsiLayout {
        self.layout
    }

    /// How many vectors the guest has turned on; none while MSI is off.
    pub fn enabled(&self, space: &ConfigSpace) -> u16 {
        let control = space.u16(self.at + CONTROL);
        let wanted = control >> MULTIPLE_ENABLE_SHIFT & MULTIPLE_MASK;
        match control & ENABLE {
            0 => 0,
            // More than there are, and what is reserved, counts as all (6.8.1.3).
            _ => (1_u16 << wanted).min(self.layout.vectors),
        }
    }

    /// Takes over what the registers say, or nothing while the vectors `may_fire` not.
    pub fn follow(&mut self, space: &ConfigSpace, may_fire: bool) {
        let count = if may_fire { self.enabled(space) } else { 0 };
        let masks = match self.layout.has_masks {
            true => space.u32(self.at + self.layout.masks()),
            false => 0,
        };
        let upper = match self.layout.is_64_bit {
            true => space.u32(self.at + UPPER_ADDRESS),
            false => 0,
        };
        let address = u64::from(upper) << 32 | u64::from(space.u32(self.at + ADDRESS));
        let data = space.u16(self.at + self.layout.data());
        for (number, (interrupt, routed)) in (0..).zip(self.interrupts.iter().zip(&mut self.routed)) {
            let fires = number < count && masks >> number & 1 == 0;
            // Which one it is, is in the lowest bits of the data (6.8.1.3).
            let wanted = fires.then(|| MsiMessage {
                address,
                data: u32::from(data & !(count - 1) | number),
            });
            if wanted != *routed {
                *routed = wanted;
                interrupt.route(wanted);
            }
        }
    }

    /// Which vectors wait to be unmasked, a bit each.
    pub fn pending(&self) -> u32 {
        let vectors = (0..).zip(self.interrupts.iter().zip(&self.routed));
        let waiting = vectors.filter(|(_, (interrupt, routed))| routed.is_none() && interrupt.is_pending());
        waiting.fold(0, |bits, (number, _)| bits | 1 << number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CapabilityId, Identity};
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[derive(Default)]
    struct Fake {
        pending: AtomicBool,
        route: Mutex<Option<MsiMessage>>,
        changes: Mutex<usize>,
    }

    impl Interrupt for Fake {
        fn trigger(&self) {
            self.pending.store(true, Ordering::Relaxed);
        }
        fn route(&self, message: Option<MsiMessage>) {
            *self.route.lock().unwrap() = message;
            *self.changes.lock().unwrap() += 1;
        }
        fn is_pending(&self) -> bool {
            self.pending.load(Ordering::Relaxed)
        }
    }

    const AT: usize = 0x50;

    fn function(control: u16, most: u32) -> (ConfigSpace, Msi, Vec<Arc<Fake>>) {
        let layout = MsiLayout::of_control(control, most);
        let mut space = ConfigSpace::new(&Identity::default());
        let (body, writable) = layout.capability();
        space.put_capability(AT, CapabilityId::Msi, &body, &writable).unwrap();
        let fakes: Vec<Arc<Fake>> = (0..layout.vectors()).map(|_| Arc::default()).collect();
        let interrupts = fakes
            .iter()
            .map(|fake| Arc::clone(fake) as Arc<dyn Interrupt>)
            .collect();
        (space, Msi::new(layout, AT, interrupts), fakes)
    }

    fn data(fakes: &[Arc<Fake>]) -> Vec<Option<u32>> {
        let route = |fake: &Arc<Fake>| fake.route.lock().unwrap().map(|message| message.data);
        fakes.iter().map(route).collect()
    }

    #[test]
    fn the_four_layouts_have_their_registers() {
        for (control, length) in [
            (0, 10),
            (IS_64_BIT, 14),
            (PER_VECTOR_MASKING, 20),
            (IS_64_BIT | PER_VECTOR_MASKING, 24),
        ] {
            let (mut space, msi, _) = function(control | 0b001 << 1, 32);
            assert_eq!(msi.layout().length(), length, "{control:#x}");
            space.write(0, &[0xff; 256]);
            assert_eq!(space.u16(AT + CONTROL), control | 0x71 | 0b001 << 1);
            assert_eq!(space.u32(AT + ADDRESS), 0xffff_fffc);
            let wide = control & IS_64_BIT != 0;
            assert_eq!(space.u32(AT + 8), if wide { u32::MAX } else { 0xffff });
            let data = if wide { 12 } else { 8 };
            assert_eq!(space.u16(AT + data), 0xffff);
            if control & PER_VECTOR_MASKING != 0 {
                // Two vectors, and pending bits that nobody writes.
                assert_eq!((space.u32(AT + data + 4), space.u32(AT + data + 8)), (0b11, 0));
                assert_eq!(msi.layout().pending_bits(), Some(data + 8));
            }
            assert_eq!(space.u16(AT + length), 0, "nothing behind it");
        }
    }

    #[test]
    fn each_vector_has_its_number_in_the_lowest_bits_of_the_data() {
        let (mut space, mut msi, fakes) = function(0b010 << 1, 32);
        space.write(AT + ADDRESS, &0xfee0_1000_u32.to_le_bytes());
        space.write(AT + 8, &0x4143_u16.to_le_bytes());
        msi.follow(&space, true);
        assert_eq!(data(&fakes), [None; 4], "it is off");
        space.write(AT + CONTROL, &(ENABLE | 2 << 4).to_le_bytes());
        msi.follow(&space, true);
        msi.follow(&space, true);
        assert_eq!(msi.enabled(&space), 4);
        assert_eq!(data(&fakes), [Some(0x4140), Some(0x4141), Some(0x4142), Some(0x4143)]);
        assert_eq!(*fakes[3].changes.lock().unwrap(), 1);
        // Two of four.
        space.write(AT + CONTROL, &(ENABLE | 1 << 4).to_le_bytes());
        msi.follow(&space, true);
        assert_eq!(data(&fakes), [Some(0x4142), Some(0x4143), None, None]);
        // More than there are.
        space.write(AT + CONTROL, &(ENABLE | 7 << 4).to_le_bytes());
        assert_eq!(msi.enabled(&space), 4);
        msi.follow(&space, false);
        assert_eq!(data(&fakes), [None; 4]);
    }

    #[test]
    fn a_masked_vector_is_pending() {
        let (mut space, mut msi, fakes) = function(0b001 << 1 | IS_64_BIT | PER_VECTOR_MASKING, 32);
        space.write(AT + UPPER_ADDRESS, &[1]);
        space.write(AT + CONTROL, &(ENABLE | 1 << 4).to_le_bytes());
        space.write(AT + 16, &[0b10]);
        fakes.iter().for_each(|fake| fake.trigger());
        msi.follow(&space, true);
        assert_eq!(data(&fakes), [Some(0), None]);
        assert_eq!(fakes[0].route.lock().unwrap().unwrap().address, 1 << 32);
        assert_eq!(msi.pending(), 0b10);
    }

    #[test]
    fn there_are_no_more_vectors_than_the_host_has() {
        for (most, vectors) in [(0, 1), (1, 1), (3, 2), (16, 16), (u32::MAX, 32)] {
            assert_eq!(MsiLayout::of_control(0b101 << 1, most).vectors(), vectors, "{most}");
        }
        // Reserved numbers of vectors are no more than all.
        assert_eq!(MsiLayout::of_control(0b111 << 1, 32).vectors(), 32);
    }
}
