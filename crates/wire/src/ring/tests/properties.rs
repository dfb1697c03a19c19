//! Long random lives beside a model, and beside a peer that writes anything anywhere.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use super::super::{Error, Index, Memory, Producer, Record, RingMemory, SEQUENCE_LIMIT, Sequence, needs_bell};
use super::{Random, region, ring};

fn record(random: &mut Random) -> Record {
    Record::from_words(std::array::from_fn(|_| random.next()))
}

/// What a ring is to be: records in their order, of which the consumer sees the published ones.
#[derive(Default)]
struct Model {
    records: VecDeque<Record>,
    published: usize,
    put: u64,
    held_by_consumer: u64,
}

#[test]
fn a_ring_is_a_queue() {
    for seed in 1..40 {
        let random = &mut Random(seed);
        let capacity = 2_u32 << random.below(6);
        let sequence = [Sequence::Stamped, Sequence::Callers][usize::from(seed % 2 == 0)];
        let (mut producer, mut consumer, _region) = ring(capacity, sequence);
        let mut model = Model::default();
        for _ in 0..4000 {
            match random.below(5) {
                0 | 1 => {
                    let sent = record(random);
                    let free = u64::from(capacity) - model.records.len() as u64 - model.held_by_consumer;
                    let number = producer.push(&sent).unwrap();
                    assert_eq!(number.is_some(), free > 0, "capacity {capacity}, seed {seed}");
                    if let Some(number) = number {
                        let expected = match sequence {
                            Sequence::Stamped => model.put,
                            Sequence::Callers => sent.sequence() % SEQUENCE_LIMIT,
                        };
                        assert_eq!(number, expected);
                        model.records.push_back(sent.with_sequence(number));
                        model.put += 1;
                    }
                }
                2 => {
                    let _rung = producer.publish();
                    model.published = model.records.len();
                    assert_eq!(producer.unpublished(), 0);
                }
                3 => {
                    let expected = (model.published > 0).then(|| model.records.pop_front().unwrap());
                    assert_eq!(consumer.pop().unwrap(), expected);
                    if expected.is_some() {
                        model.published -= 1;
                        model.held_by_consumer += 1;
                    }
                }
                _ => {
                    let _rung = consumer.release();
                    model.held_by_consumer = 0;
                    assert_eq!(consumer.arm(), model.published > 0);
                }
            }
        }
        assert!(model.put > 200, "{} records went through", model.put);
    }
}

#[test]
fn bells_are_for_who_asked_and_one_for_a_batch() {
    let (mut producer, mut consumer, _region) = ring(4, Sequence::Stamped);
    let mut put = |count: u32| {
        for _ in 0..count {
            producer.push(&Record::default()).unwrap().unwrap();
        }
        producer.publish()
    };
    assert!(!consumer.arm());
    assert!(put(3), "the consumer sleeps");
    assert!(!put(1), "it was woken");
    assert!(consumer.arm(), "records are there");
    for _ in 0..4 {
        consumer.pop().unwrap().unwrap();
    }
    assert_eq!(consumer.pop().unwrap(), None);
    assert!(
        producer.push(&Record::default()).unwrap().is_none(),
        "nothing was given back"
    );
    assert!(!producer.arm().unwrap());
    assert!(consumer.should_release());
    assert!(consumer.release(), "the producer sleeps");
    assert!(!consumer.release(), "nothing more was taken");
    assert!(producer.arm().unwrap());
    producer.push(&Record::default()).unwrap().unwrap();
    assert!(!producer.publish(), "the consumer did not arm");
    assert!(consumer.pop().unwrap().is_some());
    assert!(!consumer.release(), "the producer had space when it armed");
}

#[test]
fn a_consumer_that_leaves_records_says_for_how_many_and_how_long() {
    let (mut producer, mut consumer, _region) = ring(4, Sequence::Stamped);
    consumer.leave_for(70);
    assert_eq!(producer.patience(), 70);
    let put = |producer: &mut Producer| {
        producer.push(&Record::default()).unwrap().unwrap();
        producer.publish()
    };
    assert!(!consumer.arm_for(3));
    assert!(!put(&mut producer) && !put(&mut producer) && producer.consumer_may_sleep());
    assert!(put(&mut producer), "the third wakes it");
    assert!(!producer.consumer_may_sleep(), "and it is awake");
    for _ in 0..3 {
        assert!(consumer.pop().unwrap().is_some());
    }
    let _rung = consumer.release();
    assert!(!consumer.arm_for(100));
    assert!(producer.consumer_may_sleep());
    consumer.disarm();
    assert!(!producer.consumer_may_sleep(), "it says that it is awake");
    assert!(!put(&mut producer) && consumer.has_record());
}

#[test]
fn events_are_compared_as_virtio_does() {
    assert!(needs_bell(7, 8, 7));
    assert!(needs_bell(7, 20, 3));
    assert!(!needs_bell(7, 7, 3));
    assert!(!needs_bell(7, 9, 8));
    assert!(needs_bell(u32::MAX, 1, u32::MAX - 2));
    assert!(!needs_bell(5, 5, 5));
}

#[test]
fn a_head_that_cannot_be_is_named() {
    for (head, sound) in [
        (0_u32, true),
        (2, true),
        (3, false),
        (u32::MAX, false),
        (1 << 31, false),
    ] {
        let (mut producer, _consumer, region) = ring(4, Sequence::Stamped);
        let hostile = RingMemory::new(&region, 4).unwrap();
        for _ in 0..2 {
            producer.push(&Record::default()).unwrap().unwrap();
        }
        let _rung = producer.publish();
        for _ in 0..2 {
            producer.push(&Record::default()).unwrap().unwrap();
        }
        hostile.store_index(Index::Head, head, Ordering::Relaxed);
        let pushed = producer.push(&Record::default());
        match sound {
            true => assert_eq!(pushed.unwrap().is_some(), head > 0),
            false => {
                let error = Error::Head {
                    head,
                    taken: 0,
                    published: 2,
                };
                assert_eq!(pushed.unwrap_err(), error);
                assert!(error.to_string().contains(&format!("up to {head}")), "{error}");
            }
        }
    }
    // Backwards is as wrong as too far.
    let (mut producer, mut consumer, region) = ring(2, Sequence::Stamped);
    for _ in 0..2 {
        producer.push(&Record::default()).unwrap().unwrap();
        let _rung = producer.publish();
        consumer.pop().unwrap().unwrap();
    }
    let _rung = consumer.release();
    assert!(producer.arm().unwrap());
    RingMemory::new(&region, 2)
        .unwrap()
        .store_index(Index::Head, 1, Ordering::Relaxed);
    assert!(matches!(producer.arm(), Err(Error::Head { head: 1, taken: 2, .. })));
}

#[test]
fn a_number_out_of_its_order_is_named() {
    let (mut producer, mut consumer, region) = ring(4, Sequence::Stamped);
    producer.push(&Record::default()).unwrap().unwrap();
    let _rung = producer.publish();
    let hostile = RingMemory::new(&region, 4).unwrap();
    hostile.store_stamp(0, SEQUENCE_LIMIT | 9, Ordering::Relaxed);
    assert_eq!(consumer.pop(), Err(Error::Sequence { expected: 0, got: 9 }));
    // It stays wrong: nothing is skipped.
    assert!(consumer.pop().is_err());
    hostile.store_stamp(0, SEQUENCE_LIMIT, Ordering::Relaxed);
    assert!(consumer.pop().unwrap().is_some());
}

#[test]
fn a_hostile_peer_gets_errors_and_nothing_else() {
    let mut errors = 0;
    for seed in 1..200 {
        let random = &mut Random(seed);
        let (mut producer, mut consumer, region) = ring(8, Sequence::Stamped);
        let mut failed = (false, false);
        for _ in 0..300 {
            let mut bytes = [0; 8];
            match random.below(3) {
                0 => {
                    let at = random.below(region.length() - 8);
                    bytes.copy_from_slice(&random.next().to_le_bytes());
                    region.write(at, &bytes).unwrap();
                }
                1 if !failed.0 => {
                    failed.0 = producer.push(&record(random)).is_err() || producer.arm().is_err();
                    let _rung = producer.publish();
                }
                _ if !failed.1 => {
                    failed.1 = consumer.pop().is_err();
                    let _rung = consumer.release() | consumer.arm();
                }
                _ => (),
            }
        }
        errors += u32::from(failed.0) + u32::from(failed.1);
        assert!(consumer.count() <= 300);
    }
    assert!(errors > 100, "{errors}");
}

#[test]
fn rings_have_sound_sizes_and_places() {
    for bad in [0, 1, 3, 6, (1 << 16) + 1, 1 << 17] {
        assert_eq!(RingMemory::size(bad), Err(Error::Capacity(bad)));
    }
    assert_eq!(RingMemory::size(256), Ok(256 + 256 * 64));
    let region = region(8192);
    assert!(matches!(RingMemory::new(&region, 128), Err(Error::Bounds { .. })));
    let odd = region.part(4, 4096).unwrap();
    assert!(matches!(RingMemory::new(&odd, 2), Err(Error::Alignment { .. })));
    assert!(matches!(
        region.word(6),
        Err(Error::Alignment {
            offset: 6,
            alignment: 4
        })
    ));
    assert!(matches!(region.slots(0, 3), Err(Error::Capacity(3))));
}

#[test]
fn parts_are_within_however_large_the_numbers_are() {
    let region = region(4096);
    for (offset, length) in [(4096, 1), (0, 4097), (u64::MAX, 1), (1, u64::MAX), (u64::MAX, u64::MAX)] {
        let error = region.part(offset, length).unwrap_err();
        let expected = Error::Bounds {
            offset,
            length,
            available: 4096,
        };
        assert_eq!(error, expected);
    }
    assert_eq!(region.part(4096, 0).unwrap().length(), 0);
    let part = region.part(1000, 100).unwrap();
    assert!(part.part(50, 51).is_err());
    assert!(part.read(99, &mut [0; 2]).is_err());
    assert!(part.write(100, &[1]).is_err());
}

#[test]
fn bytes_are_copied_whole_at_any_place() {
    let region = region(4096);
    let bytes: Vec<u8> = (1..=64).collect();
    for offset in 0..17 {
        for length in 0..40 {
            let part = region.part(offset, 64).unwrap();
            part.write(0, &[0; 64]).unwrap();
            part.write(3, &bytes[..length]).unwrap();
            let mut all = [0; 64];
            part.read(0, &mut all).unwrap();
            assert_eq!(all[..3], [0; 3]);
            assert_eq!(all[3..3 + length], bytes[..length]);
            assert!(all[3 + length..].iter().all(|byte| *byte == 0));
            let mut some = vec![0; length];
            part.read(3, &mut some).unwrap();
            assert_eq!(some, bytes[..length]);
        }
    }
}

#[test]
fn long_copies_and_zeroes_end_where_they_are_to() {
    let region = region(8192);
    let bytes: Vec<u8> = (1..=255).cycle().take(6000).collect();
    for (offset, length) in [(0, 511), (0, 512), (1, 513), (7, 4096), (4095, 3000), (2192, 6000)] {
        region.zero(0, 8192).unwrap();
        region.write(offset, &bytes[..length]).unwrap();
        let mut all = vec![7; 8192];
        region.read(0, &mut all).unwrap();
        let (begin, end) = (
            usize::try_from(offset).unwrap(),
            usize::try_from(offset).unwrap() + length,
        );
        assert_eq!(all[begin..end], bytes[..length], "{offset} {length}");
        assert!(
            all[..begin].iter().chain(&all[end..]).all(|byte| *byte == 0),
            "{offset} {length}"
        );
        let mut some = vec![0; length];
        region.read(offset, &mut some).unwrap();
        assert_eq!(some, bytes[..length]);
        region.zero(offset + 1, length as u64 - 2).unwrap();
        region.read(0, &mut all).unwrap();
        let left: Vec<_> = (0..8192).filter(|at| all[*at] != 0).collect();
        assert_eq!(left, [begin, end - 1], "{offset} {length}");
    }
    let part = region.part(1000, 600).unwrap();
    assert!(part.read(0, &mut [0; 601]).is_err() && part.write(1, &[0; 600]).is_err());
    assert!(part.zero(0, 601).is_err() && part.zero(1, u64::MAX).is_err() && part.zero(600, 0).is_ok());
}
