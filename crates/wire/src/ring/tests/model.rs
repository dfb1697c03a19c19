//! Both ends in all orders in which threads may see memory, by loom: no record is torn, lost or taken twice, no bell is missed.
//!
//! A missed bell is a thread that waits for ever, which loom reports as a deadlock. Of a body one word is modelled, and a cell beside it
//! that no two threads may touch without an order between them: loom sees no value of the future, but it sees that.

use std::sync::Arc as Shared;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use loom::sync::{Arc, Notify};
use loom::thread;

use super::super::{Consumer, Index, Memory, Producer, Record, Sequence, WORDS};

struct Ring {
    head: AtomicU32,
    record_event: AtomicU32,
    record_patience: AtomicU32,
    space_event: AtomicU32,
    slots: Vec<Slot>,
    /// Rung for the consumer, and for the producer.
    records: Notify,
    space: Notify,
}

struct Slot {
    stamp: AtomicU64,
    word: AtomicU64,
    touched: UnsafeCell<()>,
}

#[derive(Clone)]
struct Model(Arc<Ring>);

impl Model {
    fn new(capacity: u32) -> Self {
        let slot = |_| Slot {
            stamp: AtomicU64::new(0),
            word: AtomicU64::new(0),
            touched: UnsafeCell::new(()),
        };
        Self(Arc::new(Ring {
            head: AtomicU32::new(0),
            record_event: AtomicU32::new(0),
            record_patience: AtomicU32::new(0),
            space_event: AtomicU32::new(0),
            slots: (0..capacity).map(slot).collect(),
            records: Notify::new(),
            space: Notify::new(),
        }))
    }

    fn index(&self, index: Index) -> &AtomicU32 {
        match index {
            Index::Head => &self.0.head,
            Index::RecordEvent => &self.0.record_event,
            Index::RecordPatience => &self.0.record_patience,
            Index::SpaceEvent => &self.0.space_event,
        }
    }

    fn slot(&self, slot: u32) -> &Slot {
        &self.0.slots[slot as usize]
    }
}

impl Memory for Model {
    fn capacity(&self) -> u32 {
        u32::try_from(self.0.slots.len()).unwrap()
    }

    fn load_index(&self, index: Index, order: Ordering) -> u32 {
        self.index(index).load(order)
    }

    fn store_index(&self, index: Index, value: u32, order: Ordering) {
        self.index(index).store(value, order);
    }

    fn load_stamp(&self, slot: u32, order: Ordering) -> u64 {
        self.slot(slot).stamp.load(order)
    }

    fn store_stamp(&self, slot: u32, stamp: u64, order: Ordering) {
        self.slot(slot).stamp.store(stamp, order);
    }

    fn load_body(&self, slot: u32) -> [u64; WORDS] {
        self.slot(slot).touched.with(|_| ());
        [self.slot(slot).word.load(Ordering::Relaxed); WORDS]
    }

    fn store_body(&self, slot: u32, body: &[u64; WORDS]) {
        self.slot(slot).touched.with_mut(|_| ());
        self.slot(slot).word.store(body[0], Ordering::Relaxed);
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

fn push(producer: &mut Producer<Model>, model: &Model, value: u64) {
    let record = Record::from_words([value; WORDS]);
    while producer.push(&record).unwrap().is_none() {
        publish(producer, model);
        if !producer.arm().unwrap() {
            model.0.space.wait();
        }
    }
}

fn publish(producer: &mut Producer<Model>, model: &Model) {
    if producer.publish() {
        model.0.records.notify();
    }
}

/// Takes the next record, and sleeps until it is there.
fn pop(consumer: &mut Consumer<Model>, model: &Model) -> Record {
    loop {
        if let Some(record) = consumer.pop().unwrap() {
            return record;
        }
        release(consumer, model);
        if !consumer.arm() {
            model.0.records.wait();
        }
    }
}

fn release(consumer: &mut Consumer<Model>, model: &Model) {
    if consumer.release() {
        model.0.space.notify();
    }
}

/// What goes through a ring of two.
#[derive(Clone, Copy)]
struct Run {
    put: u64,
    /// Published when so many are put.
    batch: u64,
    /// The consumer leaves then.
    taken: u64,
    /// It gives each slot back at once, and not before it sleeps alone.
    at_once: bool,
}

fn run(run: Run) {
    let executions = Shared::new(std::sync::atomic::AtomicU64::new(0));
    let counted = Shared::clone(&executions);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        let model = Model::new(2);
        let far = model.clone();
        let producing = thread::spawn(move || {
            let mut producer = Producer::new(far.clone(), Sequence::Stamped);
            for value in 0..run.put {
                push(&mut producer, &far, 100 + value);
                if (value + 1) % run.batch == 0 {
                    publish(&mut producer, &far);
                }
            }
            publish(&mut producer, &far);
        });
        let mut consumer = Consumer::new(model.clone(), Sequence::Stamped);
        for value in 0..run.taken {
            let record = pop(&mut consumer, &model);
            assert_eq!((record.sequence(), record.words()[0]), (value, 100 + value));
            if run.at_once {
                release(&mut consumer, &model);
            }
        }
        producing.join().unwrap();
    });
    // One order alone would show nothing.
    assert!(executions.load(Ordering::Relaxed) > 100);
}

#[test]
fn records_one_by_one_in_all_orders() {
    run(Run {
        put: 3,
        batch: 1,
        taken: 3,
        at_once: false,
    });
}

#[test]
fn records_in_batches_in_all_orders() {
    run(Run {
        put: 4,
        batch: 2,
        taken: 4,
        at_once: false,
    });
}

#[test]
fn a_producer_waits_for_space_in_all_orders() {
    // The event of the first wait is what zeroes say; that of the second has to be seen.
    run(Run {
        put: 4,
        batch: 1,
        taken: 2,
        at_once: true,
    });
}

#[test]
fn a_consumer_that_leaves_records_is_woken_by_who_waits_in_all_orders() {
    const RECORDS: u64 = 3;
    let executions = Shared::new(std::sync::atomic::AtomicU64::new(0));
    let counted = Shared::clone(&executions);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        let model = Model::new(4);
        let far = model.clone();
        let producing = thread::spawn(move || {
            let mut producer = Producer::new(far.clone(), Sequence::Stamped);
            for value in 0..RECORDS {
                push(&mut producer, &far, 100 + value);
                publish(&mut producer, &far);
            }
            // It waits for what the consumer does with the last one.
            if producer.consumer_may_sleep() {
                far.0.records.notify();
            }
        });
        let mut consumer = Consumer::new(model.clone(), Sequence::Stamped);
        let mut value = 0;
        while value < RECORDS {
            match consumer.pop().unwrap() {
                Some(record) => {
                    assert_eq!((record.sequence(), record.words()[0]), (value, 100 + value));
                    value += 1;
                }
                // Without end, and woken by none before the third.
                None => {
                    if !consumer.arm_for(3) {
                        model.0.records.wait();
                    }
                    consumer.disarm();
                }
            }
        }
        producing.join().unwrap();
    });
    assert!(executions.load(Ordering::Relaxed) > 100);
}
