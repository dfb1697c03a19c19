//! Levels, as functions and guests may have them in any order: none that is asserted is lost, none is delivered before the last one was ended.

use virtio::conformance::fakes::{FakeInterrupt, FakeVm};

use super::*;

const VECTORS: [u8; 2] = [0x31, 0x42];

struct Rig {
    apic: Arc<IoApic>,
    pins: Vec<Arc<FakeInterrupt>>,
}

impl Rig {
    fn new() -> Self {
        let vm = FakeVm::default();
        let apic = IoApic::new(&vm);
        let pins = (0..usize::from(PINS)).map(|pin| vm.interrupt(pin).unwrap());
        Self {
            apic,
            pins: pins.collect(),
        }
    }

    /// The lower half of a pin's entry, as a guest writes it.
    fn program(&self, pin: u32, entry: u32) {
        self.apic.write(IOREGSEL, &[IOREDTBL + 2 * u8::try_from(pin).unwrap()]);
        self.apic.write(IOWIN, &entry.to_le_bytes());
    }

    fn entry(&self, pin: u32) -> u32 {
        let mut data = [0; 4];
        self.apic.write(IOREGSEL, &[IOREDTBL + 2 * u8::try_from(pin).unwrap()]);
        self.apic.read(IOWIN, &mut data);
        u32::from_le_bytes(data)
    }

    fn source(&self, pin: u32) -> &FakeInterrupt {
        &self.pins[usize::try_from(pin).unwrap()]
    }

    fn connect(&self, number: u64, pin: u32) -> EventFd {
        let ended = EventFd::new().unwrap();
        self.apic.connect(number, pin, ended.try_clone().unwrap());
        ended
    }
}

#[test]
fn an_engine_is_told_of_levels_whose_ends_are_to_come_out() {
    let rig = Rig::new();
    let pin = SLOT_PINS[0];
    rig.program(pin, 0xa931);
    let told = rig.source(pin).ends().unwrap();
    // A level that is asserted, lowest priority; polarity is nothing to a message.
    assert_eq!((told.data, rig.source(pin).routed()), (0xc131, Some(told)));
    // One may be under way while it is masked.
    rig.program(pin, 0x1_a931);
    assert_eq!((rig.source(pin).ends(), rig.source(pin).routed()), (Some(told), None));
    rig.program(pin, 0x0931);
    assert_eq!(rig.source(pin).ends(), None);
    assert_eq!(rig.source(pin).routed().unwrap().data, 0x131);
    // The board's own devices trigger edges, whatever a guest says.
    rig.program(4, 0x8031);
    assert_eq!(
        (rig.source(4).ends(), rig.source(4).routed().unwrap().data),
        (None, 0x31)
    );
    rig.apic.pin(4).unwrap().trigger();
    rig.apic.pin(4).unwrap().trigger();
    assert_eq!((rig.source(4).delivered(), rig.entry(4)), (2, 0x8031));
}

#[test]
fn a_pin_is_asserted_while_one_of_its_lines_is() {
    let rig = Rig::new();
    let pin = SLOT_PINS[2];
    let (first, second) = (rig.connect(1, pin), rig.connect(2, pin));
    // Of another pin, which is masked: nobody asks it.
    let other = rig.connect(3, SLOT_PINS[0]);
    rig.apic.assert(3, true);
    rig.program(pin, 0x8031);
    rig.apic.assert(1, true);
    assert_eq!((rig.source(pin).delivered(), rig.entry(pin)), (1, 0xc031));
    rig.apic.assert(2, true);
    rig.apic.assert(1, false);
    assert_eq!(rig.source(pin).delivered(), 1);
    rig.apic.end(0x32);
    assert_eq!(rig.entry(pin), 0xc031, "that was another's");
    rig.apic.end(0x31);
    assert_eq!(
        (first.consume(), second.consume(), rig.entry(pin)),
        (false, true, 0x8031)
    );
    assert!(!other.consume());
    assert_eq!(rig.source(pin).delivered(), 1, "who has asserted it is asked first");
    rig.apic.assert(2, true);
    assert_eq!(rig.source(pin).delivered(), 2);
    // It goes with its function.
    rig.apic.disconnect(2);
    rig.apic.assert(2, true);
    rig.apic.end(0x31);
    assert_eq!((second.consume(), rig.source(pin).delivered()), (false, 2));
    rig.apic.assert(1, true);
    assert_eq!(rig.source(pin).delivered(), 3);
}

#[test]
fn what_is_saved_of_a_level_is_what_a_guest_may_write() {
    let rig = Rig::new();
    let pin = SLOT_PINS[1];
    drop(rig.connect(1, pin));
    rig.program(pin, 0x8031);
    rig.apic.assert(1, true);
    rig.apic.disconnect(1);
    let saved = rig.apic.save();
    assert_eq!(saved.entries[usize::try_from(pin).unwrap()], 0x8031);
    let next = Rig::new();
    next.apic.restore(&saved);
    assert_eq!(
        (next.entry(pin), next.source(pin).ends().unwrap().data),
        (0x8031, 0xc031)
    );
    let ended = next.connect(1, pin);
    next.apic.assert(1, true);
    next.apic.end(0x31);
    assert!(ended.consume() && next.source(pin).delivered() == 1);
}

/// A function and its driver, as VFIO is: it signals once, and then when it is asked.
struct Function {
    ended: EventFd,
    pin: u32,
    wants: bool,
    is_masked: bool,
}

/// Numerical Recipes' linear congruence, of which the high bits are good.
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }

    fn index(&mut self, bound: usize) -> usize {
        usize::try_from(self.below(bound as u64)).unwrap()
    }
}

/// Two pins, three functions, of which two share one, and a guest whose local APIC has what was delivered.
struct Model {
    rig: Rig,
    functions: Vec<Function>,
    /// Of each of the two pins: what the guest has written last, how much was delivered, and the vectors that are not ended yet.
    entries: [u32; 2],
    seen: [u64; 2],
    in_service: [Vec<u8>; 2],
}

impl Model {
    fn new() -> Self {
        let rig = Rig::new();
        let pins = [SLOT_PINS[0], SLOT_PINS[0], SLOT_PINS[3]];
        let functions = (0..).zip(pins).map(|(number, pin)| Function {
            ended: rig.connect(number, pin),
            pin,
            wants: false,
            is_masked: false,
        });
        Self {
            functions: functions.collect(),
            rig,
            entries: [0x1_0000; 2],
            seen: [0; 2],
            in_service: Default::default(),
        }
    }

    const PINS: [u32; 2] = [SLOT_PINS[0], SLOT_PINS[3]];

    fn signal(&mut self) {
        for (number, function) in (0..).zip(&mut self.functions) {
            function.is_masked &= !function.ended.consume();
            if function.wants && !function.is_masked {
                function.is_masked = true;
                self.rig.apic.assert(number, true);
            }
        }
    }

    /// What has reached the guest since; none before the last one was ended.
    fn look(&mut self, told: &str) {
        for (index, pin) in Self::PINS.into_iter().enumerate() {
            let delivered = self.rig.source(pin).delivered();
            let is_level = self.entries[index] & 0x8000 != 0;
            for _ in self.seen[index]..delivered {
                assert!(
                    !is_level || self.in_service[index].is_empty(),
                    "{told}: a second one before the first was ended"
                );
                if is_level {
                    self.in_service[index].push(self.entries[index].to_le_bytes()[0]);
                }
            }
            self.seen[index] = delivered;
        }
    }

    fn step(&mut self, chance: &mut Chance) {
        let index = chance.index(2);
        match chance.below(6) {
            0 | 1 => {
                let number = chance.index(3);
                self.functions[number].wants = chance.below(3) > 0;
                self.signal();
            }
            2 => self.end(index),
            3 => {
                // Its driver gives it up and takes it again.
                let number = chance.index(3);
                self.functions[number].is_masked = false;
                self.functions[number].ended.consume();
                self.rig.apic.assert(number as u64, false);
            }
            _ => {
                let mask = if chance.below(2) == 0 { 0x1_0000 } else { 0 };
                // While one is under way a vector stays what it is, as in Linux.
                let vector = match self.in_service[index].first() {
                    Some(vector) => *vector,
                    None => VECTORS[chance.index(2)],
                };
                self.write(index, 0x8000 | mask | u32::from(vector));
            }
        }
    }

    fn write(&mut self, index: usize, entry: u32) {
        self.entries[index] = entry;
        self.rig.program(Self::PINS[index], entry);
    }

    fn end(&mut self, index: usize) {
        if let Some(vector) = self.in_service[index].pop() {
            self.rig.apic.end(vector);
            // Both pins may have it.
            let other = 1 - index;
            if self.in_service[other].first() == Some(&vector) {
                self.in_service[other].clear();
            }
        }
        self.signal();
    }
}

#[test]
fn no_level_is_lost_or_delivered_before_the_last_was_ended() {
    let mut delivered = 0;
    for seed in 0..200 {
        let (mut model, mut chance) = (Model::new(), Chance(seed));
        for step in 0..200 {
            model.step(&mut chance);
            model.look(&format!("seed {seed}, step {step}"));
            model.signal();
            model.look(&format!("seed {seed}, step {step}"));
        }
        // The guest ends what it has, unmasks, and serves who asks: each that wants something is served.
        for index in 0..2 {
            let vector = model.in_service[index].first().copied().unwrap_or(VECTORS[0]);
            model.write(index, 0x8000 | u32::from(vector));
        }
        model.signal();
        model.look(&format!("seed {seed}, unmasked"));
        for round in 0..8 {
            for index in 0..2 {
                // Who is served wants nothing more.
                if !model.in_service[index].is_empty() {
                    let pin = Model::PINS[index];
                    let first = model.functions.iter_mut().find(|one| one.pin == pin && one.wants);
                    if let Some(function) = first {
                        function.wants = false;
                    }
                }
                model.end(index);
                model.look(&format!("seed {seed}, round {round}"));
            }
        }
        assert!(
            model.functions.iter().all(|function| !function.wants),
            "seed {seed}: a level is lost"
        );
        for pin in Model::PINS {
            assert_eq!(model.rig.entry(pin) & 0x4000, 0, "seed {seed}: one is not ended");
        }
        delivered += model.seen.iter().sum::<u64>();
    }
    assert!(delivered > 5000, "{delivered} were delivered: it tests little");
}
