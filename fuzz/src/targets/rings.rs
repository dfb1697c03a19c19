//! Both ends of a ring beside a peer that writes anything anywhere in its memory: errors may come of it, and records of garbage.
//!
//! An input is a list of steps: four bytes each, what is done, and where and what the peer writes.

use std::sync::atomic::Ordering;

use base::Mapping;
use wire::ring::{Consumer, Index, Memory, Producer, Record, Region, RingMemory, SEQUENCE_LIMIT, Sequence};

use crate::run::{Target, outcome};

const CAPACITY: u32 = 4;

/// What a step may do, by its first byte.
const STEPS: u8 = 8;

/// A ring's two ends.
pub(crate) fn hostile_peer() -> Target {
    let step = |what: u8, place: u8, value: u16| {
        let [low, high] = value.to_le_bytes();
        [what, place, low, high]
    };
    let (push, publish, pop, release) = (step(0, 0, 0), step(1, 0, 0), step(2, 0, 0), step(3, 0, 0));
    let good = [push, push, publish, pop, pop, release, push, publish, pop].concat();
    let full = [push, push, push, push, publish, push, pop, release, push, publish].concat();
    let head = [push, push, publish, step(5, 0, 3), step(4, 0, 0)].concat();
    let stamp = [step(6, 0, 9), pop].concat();
    Target {
        name: "ring-hostile-peer",
        seeds: vec![good, full, head, stamp, Vec::new()],
        parse: live,
    }
}

fn live(input: &[u8]) -> u64 {
    let length = RingMemory::size(CAPACITY).expect("a capacity");
    let file = base::memfd::sized("fuzz-ring", length).expect("a memfd");
    let bytes = usize::try_from(length).expect("a small ring");
    let region = Region::new(Mapping::new(&file, bytes).expect("a mapping"));
    let memory = || RingMemory::new(&region, CAPACITY).expect("a ring");
    let mut producer = Producer::new(memory(), Sequence::Stamped);
    let mut consumer = Consumer::new(memory(), Sequence::Stamped);
    let peer = memory();
    let mut seen = String::new();
    for [what, place, low, high] in input.as_chunks::<4>().0 {
        let value = u32::from(u16::from_le_bytes([*low, *high]));
        let before = (producer.count(), consumer.count());
        let step = match what % STEPS {
            0 => producer
                .push(&Record::from_bytes(&[*place; 64]))
                .map(|put| put.is_some()),
            1 => Ok(producer.publish()),
            2 => consumer.pop().map(|record| record.is_some()),
            3 => Ok(consumer.release()),
            4 => producer.arm(),
            5 => {
                let index = [
                    Index::Head,
                    Index::RecordEvent,
                    Index::RecordPatience,
                    Index::SpaceEvent,
                ][usize::from(place % 4)];
                peer.store_index(index, value, Ordering::Relaxed);
                Ok(false)
            }
            6 => {
                let stamp = SEQUENCE_LIMIT | u64::from(value);
                peer.store_stamp(u32::from(*place), stamp, Ordering::Relaxed);
                Ok(false)
            }
            _ => {
                let at = u64::from(value << 8 | u32::from(*place)) % (length - 8);
                region.write(at, &[*low; 8]).expect("a place");
                Ok(consumer.arm())
            }
        };
        let put = producer.count() - before.0;
        let taken = consumer.count() - before.1;
        assert!(put + taken <= 1, "a step moved {put} and {taken} records");
        assert!(producer.unpublished() <= CAPACITY.into());
        match step {
            Ok(done) => seen.push(char::from(b'a' + what % STEPS + u8::from(done) * STEPS)),
            Err(error) => return outcome(format!("{seen}: {error}")),
        }
    }
    outcome(seen)
}
