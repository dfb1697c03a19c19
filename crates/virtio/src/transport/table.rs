//! MSI-X vectors whose table is memory of the guest's, for guests whose accesses to memory nobody sees: an entry is read when its
//! vector is triggered.
//!
//! Nobody learns when an entry is unmasked. Drivers mask one for the time of a few writes, when they point it elsewhere: so long a
//! trigger waits. One that meets a longer mask is kept until the next trigger or the next access to the device's registers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use engine::{Interrupt, MsiMessage};
use memory::GuestRam;
use pci::msix::ENTRY_SIZE;
use vm_memory::{Bytes, GuestAddress};

/// How long a trigger waits for an entry to be unmasked. A processor takes a microsecond; an emulated one is held up at times.
const PATIENCE: Duration = Duration::from_millis(2);

/// Words of an entry (PCI 3.0, 6.8.2.6): address low, address high, data, vector control.
type Entry = [u32; 4];

/// Vector control: the entry is masked (6.8.2.9).
const MASKED: u32 = 1;

/// The vectors of one device.
pub(crate) struct Table {
    memory: Arc<GuestRam>,
    /// Where the table is; 0 while vectors must not fire.
    address: AtomicU64,
    vectors: Vec<Kept>,
}

struct Kept {
    interrupt: Arc<dyn Interrupt>,
    waits: AtomicBool,
}

impl Table {
    pub(crate) fn new(memory: Arc<GuestRam>, interrupts: Vec<Arc<dyn Interrupt>>) -> Self {
        let kept = |interrupt| Kept {
            interrupt,
            waits: AtomicBool::new(false),
        };
        Self {
            memory,
            address: AtomicU64::new(0),
            vectors: interrupts.into_iter().map(kept).collect(),
        }
    }

    /// The vectors, as sources.
    pub(crate) fn sources(self: &Arc<Self>) -> Vec<Arc<dyn Interrupt>> {
        let source = |index| -> Arc<dyn Interrupt> {
            Arc::new(Source {
                table: Arc::clone(self),
                index,
            })
        };
        (0..self.vectors.len()).map(source).collect()
    }

    /// Takes the table for what is in memory at `address`, or lets no vector fire.
    pub(crate) fn put_at(&self, address: Option<u64>) {
        self.address.store(address.unwrap_or(0), Ordering::SeqCst);
        self.send_kept();
    }

    /// Sends what was kept and can be sent now. Whoever keeps one looks again afterwards, and whoever lets vectors fire looks at what
    /// is kept afterwards, all in one order (`SeqCst`): one of them sends it.
    pub(crate) fn send_kept(&self) {
        for (index, vector) in self.vectors.iter().enumerate() {
            while vector.waits.swap(false, Ordering::SeqCst) && !self.send(index) {
                vector.waits.store(true, Ordering::SeqCst);
                if self.message(index).is_none() {
                    break;
                }
            }
        }
    }

    fn trigger(&self, index: usize) {
        self.send_kept();
        let mut begun = None;
        while !self.send(index) {
            let begun = *begun.get_or_insert_with(Instant::now);
            let may_fire = self.address.load(Ordering::SeqCst) != 0;
            if !may_fire || begun.elapsed() > PATIENCE {
                self.vectors[index].waits.store(true, Ordering::SeqCst);
                self.send_kept();
                return;
            }
            std::hint::spin_loop();
        }
    }

    /// Sends a vector's message, if there is one that may be sent.
    fn send(&self, index: usize) -> bool {
        let Some(message) = self.message(index) else {
            return false;
        };
        let interrupt = &self.vectors[index].interrupt;
        interrupt.route(Some(message));
        interrupt.trigger();
        true
    }

    fn message(&self, index: usize) -> Option<MsiMessage> {
        let table = self.address.load(Ordering::SeqCst);
        let at = table.checked_add((index * ENTRY_SIZE) as u64).filter(|_| table != 0)?;
        // Twice the same, or somebody writes it.
        let [low, high, data, control] = self.entry(at)?;
        let stands = self.entry(at)? == [low, high, data, control];
        (stands && control & MASKED == 0).then(|| MsiMessage {
            address: u64::from(high) << 32 | u64::from(low),
            data,
        })
    }

    fn entry(&self, at: u64) -> Option<Entry> {
        let mut entry = Entry::default();
        for (word, place) in entry.iter_mut().zip((at..).step_by(4)) {
            *word = self.memory.load(GuestAddress(place), Ordering::Acquire).ok()?;
        }
        Some(entry)
    }
}

struct Source {
    table: Arc<Table>,
    index: usize,
}

impl Interrupt for Source {
    fn trigger(&self) {
        self.table.trigger(self.index);
    }

    /// The table says where to.
    fn route(&self, _: Option<MsiMessage>) {}

    fn is_pending(&self) -> bool {
        self.table.vectors[self.index].waits.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::ByteSize;
    use memory::Ram;
    use std::sync::Mutex;

    #[derive(Default)]
    struct Sent {
        route: Mutex<Option<MsiMessage>>,
        sent: Mutex<Vec<MsiMessage>>,
    }

    impl Interrupt for Sent {
        fn trigger(&self) {
            self.sent.lock().unwrap().extend(*self.route.lock().unwrap());
        }
        fn route(&self, message: Option<MsiMessage>) {
            *self.route.lock().unwrap() = message;
        }
        fn is_pending(&self) -> bool {
            false
        }
    }

    const AT: u64 = 0x10_0000;

    fn table() -> (Arc<Table>, Ram, Arc<Sent>) {
        let ram = Ram::allocate(ByteSize::mib(32)).unwrap();
        let sent = Arc::<Sent>::default();
        let interrupts: Vec<Arc<dyn Interrupt>> = vec![Arc::<Sent>::default(), Arc::<Sent>::clone(&sent)];
        (Arc::new(Table::new(Arc::clone(ram.guest()), interrupts)), ram, sent)
    }

    fn write(ram: &Ram, entry: Entry) {
        for (word, at) in entry.iter().zip((AT + 16..).step_by(4)) {
            ram.guest().write_obj(*word, GuestAddress(at)).unwrap();
        }
    }

    #[test]
    fn what_memory_says_when_it_is_triggered_is_sent() {
        let (table, ram, sent) = table();
        let source = table.sources().remove(1);
        write(&ram, [0xfee0_1000, 1, 0x41, 0]);
        source.trigger();
        assert!(
            source.is_pending() && sent.sent.lock().unwrap().is_empty(),
            "it is not on"
        );
        table.put_at(Some(AT));
        let first = MsiMessage {
            address: 0x1_fee0_1000,
            data: 0x41,
        };
        assert_eq!(*sent.sent.lock().unwrap(), [first]);
        assert!(!source.is_pending());
        write(&ram, [0xfee0_2000, 0, 0x42, 0]);
        source.trigger();
        assert_eq!(sent.sent.lock().unwrap()[1].data, 0x42);
        table.put_at(None);
        source.trigger();
        assert!(source.is_pending());
    }

    #[test]
    fn a_trigger_waits_for_a_short_mask_and_is_kept_for_a_long_one() {
        let (table, ram, sent) = table();
        let source = table.sources().remove(1);
        table.put_at(Some(AT));
        write(&ram, [0xfee0_0000, 0, 0x41, MASKED]);
        source.trigger();
        assert!(source.is_pending());
        write(&ram, [0xfee0_0000, 0, 0x43, 0]);
        table.send_kept();
        assert!(!source.is_pending());
        write(&ram, [0xfee0_0000, 0, 0x41, MASKED]);
        std::thread::scope(|scope| {
            let trigger = scope.spawn(|| source.trigger());
            write(&ram, [0xfee0_0000, 0, 0x44, 0]);
            trigger.join().unwrap();
        });
        table.send_kept();
        let data: Vec<u32> = sent.sent.lock().unwrap().iter().map(|message| message.data).collect();
        assert_eq!(data, [0x43, 0x44]);
    }

    #[test]
    fn nothing_is_lost_when_vectors_may_fire_at_the_moment_of_a_trigger() {
        let (table, ram, sent) = table();
        const ROUNDS: u64 = 20_000;
        let source = table.sources().remove(1);
        write(&ram, [0xfee0_0000, 0, 0x41, 0]);
        let (begun, over) = (AtomicU64::new(0), AtomicU64::new(0));
        let wait = |reached: &AtomicU64, round| {
            while reached.load(Ordering::SeqCst) < round {
                std::hint::spin_loop();
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 1..=ROUNDS {
                    wait(&begun, round);
                    source.trigger();
                    over.store(round, Ordering::SeqCst);
                }
            });
            for round in 1..=ROUNDS {
                table.put_at(None);
                begun.store(round, Ordering::SeqCst);
                // Now earlier, now later than the trigger.
                (0..round % 128).for_each(|_| std::hint::spin_loop());
                table.put_at(Some(AT));
                wait(&over, round);
                let pending = source.is_pending();
                if pending {
                    // The other thread has to end.
                    begun.store(ROUNDS, Ordering::SeqCst);
                }
                assert!(!pending, "round {round}");
            }
        });
        assert!(sent.sent.lock().unwrap().len() as u64 >= ROUNDS);
    }

    #[test]
    fn a_table_that_is_nowhere_sends_nothing() {
        let (table, _ram, sent) = table();
        let source = table.sources().remove(1);
        for address in [u64::MAX, 1 << 40, (32 << 20) - 16] {
            table.put_at(Some(address));
            source.trigger();
        }
        assert!(sent.sent.lock().unwrap().is_empty());
    }
}
