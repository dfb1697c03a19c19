//! MSI-X: the table, the pending bits and the capability (6.8.2).
//!
//! A vector is an [`engine::Interrupt`]. While its entry may fire, the entry's message is routed to it; otherwise
//! nothing is, and the interrupt keeps triggers for later: it *is* the pending bit. Routes are changed only when the
//! message that may fire has changed.

use std::sync::Arc;

use engine::{Interrupt, MsiMessage};
use serde::{Deserialize, Serialize};

use crate::PciError;

/// Bytes of one table entry (6.8.2.6): address low, address high, data, vector control.
pub const ENTRY_SIZE: usize = 16;

/// Vector control: the entry is masked (6.8.2.9).
const VECTOR_MASKED: u8 = 1;

/// Message control (6.8.2.3): the writable bits.
const CONTROL_FUNCTION_MASK: u16 = 1 << 14;
const CONTROL_ENABLE: u16 = 1 << 15;

/// The body of the capability for a table of `vectors` in BAR `bar`, and its write mask.
pub fn capability(vectors: u16, bar: u8, table_offset: u32, pba_offset: u32) -> ([u8; 10], [u8; 2]) {
    let mut body = [0; 10];
    body[..2].copy_from_slice(&vectors.saturating_sub(1).to_le_bytes());
    body[2..6].copy_from_slice(&(table_offset | u32::from(bar)).to_le_bytes());
    body[6..].copy_from_slice(&(pba_offset | u32::from(bar)).to_le_bytes());
    (body, (CONTROL_FUNCTION_MASK | CONTROL_ENABLE).to_le_bytes())
}

struct Vector {
    entry: [u8; ENTRY_SIZE],
    interrupt: Arc<dyn Interrupt>,
    routed: Option<MsiMessage>,
}

impl Vector {
    fn message(&self) -> MsiMessage {
        let word = |at: usize| {
            let mut bytes = [0; 4];
            bytes.copy_from_slice(&self.entry[at..at + 4]);
            u32::from_le_bytes(bytes)
        };
        MsiMessage {
            address: u64::from(word(4)) << 32 | u64::from(word(0)),
            data: word(8),
        }
    }

    fn wanted(&self, function_may_fire: bool) -> Option<MsiMessage> {
        let may_fire = function_may_fire && self.entry[12] & VECTOR_MASKED == 0;
        may_fire.then(|| self.message())
    }

    fn update(&mut self, function_may_fire: bool) {
        let wanted = self.wanted(function_may_fire);
        if wanted == self.routed {
            return;
        }
        self.routed = wanted;
        self.interrupt.route(wanted);
    }
}

/// A vector as it is saved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VectorState {
    /// The table's entry.
    pub entry: [u8; ENTRY_SIZE],
    /// Triggered while it could not fire.
    pub pending: bool,
}

/// The vectors of one function.
pub struct MsixTable {
    vectors: Vec<Vector>,
    may_fire: bool,
}

impl MsixTable {
    /// A table whose entries are masked, for these interrupts.
    pub fn new(interrupts: Vec<Arc<dyn Interrupt>>) -> Self {
        let vectors = interrupts
            .into_iter()
            .map(|interrupt| {
                let mut entry = [0; ENTRY_SIZE];
                entry[12] = VECTOR_MASKED;
                Vector {
                    entry,
                    interrupt,
                    routed: None,
                }
            })
            .collect();
        Self {
            vectors,
            may_fire: false,
        }
    }

    /// How many vectors there are.
    pub fn len(&self) -> usize {
        self.vectors.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.vectors.is_empty()
    }

    /// Takes over the message control register.
    pub fn set_control(&mut self, control: u16) {
        let may_fire = control & CONTROL_ENABLE != 0 && control & CONTROL_FUNCTION_MASK == 0;
        if may_fire == self.may_fire {
            return;
        }
        self.may_fire = may_fire;
        // All of them first: an engine may then need no more for all than for one.
        for vector in &self.vectors {
            if let Some(message) = vector.wanted(may_fire).filter(|_| vector.routed.is_none()) {
                vector.interrupt.prepare(message);
            }
        }
        for vector in &mut self.vectors {
            vector.update(may_fire);
        }
    }

    /// All entries are as they were at first: zeroes, and masked. MSI-X is off.
    pub fn reset(&mut self) {
        self.set_control(0);
        for index in 0..self.vectors.len() {
            let mut entry = [0; ENTRY_SIZE];
            entry[12] = VECTOR_MASKED;
            self.write(index * ENTRY_SIZE, &entry);
        }
    }

    /// Whether the function's vectors may fire that are not masked.
    pub fn may_fire(&self) -> bool {
        self.may_fire
    }

    /// Reads from the table; beyond its end there are zeroes.
    pub fn read(&self, offset: usize, data: &mut [u8]) {
        for (at, byte) in data.iter_mut().enumerate() {
            let at = offset.saturating_add(at);
            *byte = self
                .vectors
                .get(at / ENTRY_SIZE)
                .map_or(0, |vector| vector.entry[at % ENTRY_SIZE]);
        }
    }

    /// Takes a write to the table; beyond its end it is dropped.
    pub fn write(&mut self, offset: usize, data: &[u8]) {
        for (at, &value) in data.iter().enumerate() {
            let at = offset.saturating_add(at);
            let Some(vector) = self.vectors.get_mut(at / ENTRY_SIZE) else {
                break;
            };
            // Of vector control only the mask bit exists; the message address is aligned to four bytes (6.8.2.7).
            let mask = match at % ENTRY_SIZE {
                0 => !0b11,
                12 => VECTOR_MASKED,
                13..ENTRY_SIZE => 0,
                _ => 0xff,
            };
            vector.entry[at % ENTRY_SIZE] = value & mask;
        }
        let first = offset / ENTRY_SIZE;
        let last = offset.saturating_add(data.len().saturating_sub(1)) / ENTRY_SIZE;
        for vector in self.vectors.iter_mut().take(last.saturating_add(1)).skip(first) {
            vector.update(self.may_fire);
        }
    }

    /// Every vector, its pending bit included.
    pub fn save(&self) -> Vec<VectorState> {
        let vectors = self.vectors.iter();
        vectors
            .map(|vector| VectorState {
                entry: vector.entry,
                pending: vector.routed.is_none() && vector.interrupt.is_pending(),
            })
            .collect()
    }

    /// Takes over what [`MsixTable::save`] gave, with the message control register, into a table that nobody has used.
    /// What was pending is sent at once if it may fire now.
    ///
    /// # Errors
    /// It was another function's.
    pub fn restore(&mut self, saved: &[VectorState], control: u16) -> Result<(), PciError> {
        if saved.len() != self.vectors.len() {
            return Err(PciError::Vectors {
                saved: saved.len(),
                here: self.vectors.len(),
            });
        }
        for (index, vector) in saved.iter().enumerate() {
            self.write(index * ENTRY_SIZE, &vector.entry);
            if vector.pending {
                self.vectors[index].interrupt.trigger();
            }
        }
        self.set_control(control);
        Ok(())
    }

    /// Reads from the pending bit array (6.8.2.10).
    pub fn read_pending(&self, offset: usize, data: &mut [u8]) {
        for (at, byte) in data.iter_mut().enumerate() {
            *byte = 0;
            for bit in 0..8 {
                let number = offset.saturating_add(at).saturating_mul(8).saturating_add(bit);
                let pending = self
                    .vectors
                    .get(number)
                    .is_some_and(|vector| vector.routed.is_none() && vector.interrupt.is_pending());
                *byte |= u8::from(pending) << bit;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[derive(Default)]
    struct Fake {
        pending: AtomicBool,
        routes: Mutex<Vec<Option<MsiMessage>>>,
        /// What all of a table's were told, in order.
        told: Arc<Mutex<Vec<Told>>>,
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Told {
        Prepare(MsiMessage),
        Route(Option<MsiMessage>),
    }

    impl Interrupt for Fake {
        fn prepare(&self, message: MsiMessage) {
            self.told.lock().unwrap().push(Told::Prepare(message));
        }
        fn trigger(&self) {
            self.pending.store(true, Ordering::Relaxed);
        }
        fn route(&self, message: Option<MsiMessage>) {
            self.routes.lock().unwrap().push(message);
            self.told.lock().unwrap().push(Told::Route(message));
        }
        fn is_pending(&self) -> bool {
            self.pending.load(Ordering::Relaxed)
        }
    }

    fn table(vectors: usize) -> (MsixTable, Vec<Arc<Fake>>) {
        let told = Arc::<Mutex<Vec<Told>>>::default();
        let fake = || Fake {
            told: Arc::clone(&told),
            ..Fake::default()
        };
        let fakes: Vec<Arc<Fake>> = (0..vectors).map(|_| Arc::new(fake())).collect();
        let table = MsixTable::new(fakes.iter().map(|f| Arc::clone(f) as Arc<dyn Interrupt>).collect());
        (table, fakes)
    }

    const MESSAGE: MsiMessage = MsiMessage {
        address: 0xfee0_0000,
        data: 0x41,
    };

    #[test]
    fn a_message_is_routed_once_and_only_while_it_may_fire() {
        let (mut table, fakes) = table(2);
        table.set_control(CONTROL_ENABLE | CONTROL_FUNCTION_MASK);
        table.write(16, &0xfee0_0000_u64.to_le_bytes());
        table.write(24, &0x41_u32.to_le_bytes());
        table.write(28, &0_u32.to_le_bytes());
        assert!(fakes[1].routes.lock().unwrap().is_empty());
        table.set_control(CONTROL_ENABLE);
        table.set_control(CONTROL_ENABLE);
        table.write(28, &0xffff_fffe_u32.to_le_bytes());
        assert_eq!(*fakes[1].routes.lock().unwrap(), [Some(MESSAGE)]);
        assert!(fakes[0].routes.lock().unwrap().is_empty(), "entry 0 is still masked");
        table.write(28, &1_u32.to_le_bytes());
        table.set_control(0);
        assert_eq!(*fakes[1].routes.lock().unwrap(), [Some(MESSAGE), None]);
        let mut entry = [0; 16];
        table.read(16, &mut entry);
        assert_eq!(entry, [0, 0, 0xe0, 0xfe, 0, 0, 0, 0, 0x41, 0, 0, 0, 1, 0, 0, 0]);
    }

    #[test]
    fn a_table_that_is_reset_routes_nothing() {
        let (mut table, fakes) = table(2);
        table.set_control(CONTROL_ENABLE);
        table.write(16, &0xfee0_0000_u64.to_le_bytes());
        table.write(28, &0_u32.to_le_bytes());
        table.reset();
        assert_eq!(fakes[1].routes.lock().unwrap().last(), Some(&None));
        table.set_control(CONTROL_ENABLE);
        assert_eq!(fakes[1].routes.lock().unwrap().last(), Some(&None), "it is masked");
        let mut entry = [9; 16];
        table.read(16, &mut entry);
        assert_eq!(entry, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]);
    }

    #[test]
    fn vectors_that_may_fire_together_are_told_before_the_first_is_routed() {
        let (mut table, fakes) = table(3);
        for vector in [0, 2] {
            table.write(vector * 16, &0xfee0_0000_u64.to_le_bytes());
            table.write(vector * 16 + 8, &0x41_u64.to_le_bytes());
        }
        table.set_control(CONTROL_ENABLE);
        let (prepare, route) = (Told::Prepare(MESSAGE), Told::Route(Some(MESSAGE)));
        let told = |fakes: &[Arc<Fake>]| std::mem::take(&mut *fakes[0].told.lock().unwrap());
        assert_eq!(told(&fakes), [prepare, prepare, route, route], "entry 1 is masked");
        // One that changes alone has nobody to wait for, and what is turned off has no message.
        table.write(8 + 16, &0x41_u64.to_le_bytes());
        table.set_control(0);
        assert!(!told(&fakes).iter().any(|told| matches!(told, Told::Prepare(_))));
    }

    #[test]
    fn masked_signals_are_pending() {
        let (table, fakes) = table(10);
        fakes[0].trigger();
        fakes[9].trigger();
        let mut pending = [0; 8];
        table.read_pending(0, &mut pending);
        assert_eq!(pending, [1, 2, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn a_pending_vector_survives_being_saved() {
        let (mut original, fakes) = table(2);
        original.write(16, &0xfee0_0000_u64.to_le_bytes());
        original.write(24, &0x41_u32.to_le_bytes());
        fakes[0].trigger();
        original.set_control(CONTROL_ENABLE);
        original.write(28, &0_u32.to_le_bytes());
        let saved = original.save();
        let (mut copy, fakes) = table(2);
        copy.restore(&saved, CONTROL_ENABLE).unwrap();
        assert_eq!(copy.save(), saved);
        assert!(fakes[0].is_pending() && !fakes[1].is_pending());
        assert_eq!(*fakes[1].routes.lock().unwrap(), [Some(MESSAGE)]);
        assert!(fakes[0].routes.lock().unwrap().is_empty());
        let error = table(3).0.restore(&saved, 0);
        assert_eq!(error, Err(PciError::Vectors { saved: 2, here: 3 }));
    }

    #[test]
    fn hostile_offsets_hit_nothing() {
        let (mut table, fakes) = table(1);
        table.set_control(CONTROL_ENABLE);
        let mut data = [9; 8];
        for offset in [12, 15, 16, 17, 4096, usize::MAX] {
            table.read(offset, &mut data);
            table.read_pending(offset, &mut data);
            table.write(offset, &[0xff; 8]);
        }
        assert!(fakes[0].routes.lock().unwrap().is_empty());
    }
}
