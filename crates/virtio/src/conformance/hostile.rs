//! Rings as a hostile guest makes them. A device may do with such a buffer what it likes, except: panic, hang, lose a
//! buffer or a queue, or stop working after the next reset.

use std::time::Duration;

use super::checks::one_request;
use super::driver::{Descriptor, Driver, INDIRECT, MEMORY, NEXT, RINGS, WRITE};
use super::{Outcome, Subject};

/// One way to be hostile, on one queue.
pub(super) struct Case {
    pub(super) name: &'static str,
    attack: fn(&mut Driver, u16),
}

const fn case(name: &'static str, attack: fn(&mut Driver, u16)) -> Case {
    Case { name, attack }
}

/// All of them.
pub(super) static ALL: &[Case] = &[
    case("a chain that is its own next", |driver, queue| {
        chain(driver, queue, &[at(0, 64, NEXT, 0)]);
    }),
    case("a chain that loops", |driver, queue| {
        chain(driver, queue, &[at(0, 64, NEXT, 1), at(64, 64, NEXT | WRITE, 0)]);
    }),
    case("a next outside of the table", |driver, queue| {
        chain(driver, queue, &[at(0, 64, NEXT, 0x7fff)]);
    }),
    case("a buffer beyond memory", |driver, queue| {
        everywhere(driver, queue, MEMORY, 64);
    }),
    case("a buffer that crosses the end of memory", |driver, queue| {
        everywhere(driver, queue, MEMORY - 8, 64);
    }),
    case("a buffer that wraps around", |driver, queue| {
        everywhere(driver, queue, u64::MAX - 7, 64);
    }),
    case("a buffer of 4 GiB", |driver, queue| {
        everywhere(driver, queue, 0x1000, u32::MAX);
    }),
    case("a chain of more than 4 GiB", |driver, queue| {
        chain(
            driver,
            queue,
            &[
                at(0, 0xc000_0000, NEXT, 1),
                at(0, 0xc000_0000, NEXT | WRITE, 2),
                at(0, 64, WRITE, 0),
            ],
        );
    }),
    case("empty buffers", |driver, queue| {
        everywhere(driver, queue, 0x1000, 0);
    }),
    case("only readable buffers", |driver, queue| {
        chain(driver, queue, &[at(0, 4096, NEXT, 1), at(0, 4096, 0, 0)]);
    }),
    case("only writable buffers", |driver, queue| {
        chain(driver, queue, &[at(0, 4096, NEXT | WRITE, 1), at(0, 4096, WRITE, 0)]);
    }),
    case("single bytes", |driver, queue| {
        chain(driver, queue, &[at(0, 1, NEXT, 1), at(1, 1, WRITE, 0)]);
    }),
    case("a readable buffer after a writable one", |driver, queue| {
        chain(driver, queue, &[at(0, 64, NEXT | WRITE, 1), at(64, 64, 0, 0)]);
    }),
    case("buffers on the ring itself", |driver, queue| {
        chain(driver, queue, &[at(0, 64, NEXT, 1), on_rings(0x1000)]);
    }),
    case("an indirect table of odd length", |driver, queue| {
        indirect(driver, queue, 0x1000, 17);
    }),
    case("an empty indirect table", |driver, queue| {
        indirect(driver, queue, 0x1000, 0);
    }),
    case("an indirect table beyond memory", |driver, queue| {
        indirect(driver, queue, MEMORY, 64);
    }),
    case("a huge indirect table", |driver, queue| {
        fill_table(driver, 0xffff, NEXT);
        indirect(driver, queue, BASE, 0xffff * 16);
    }),
    case("an indirect table in an indirect table", |driver, queue| {
        fill_table(driver, 4, INDIRECT);
        indirect(driver, queue, BASE, 64);
    }),
    case("a head outside of the table", |driver, queue| {
        driver.make_available(queue, 0x7fff);
    }),
    case("the same head over and over", |driver, queue| {
        driver.put(queue, 0, at(0, 64, WRITE, 0));
        for _ in 0..driver.ring_size(queue) {
            driver.make_available(queue, 0);
        }
    }),
    case("an available index that jumps ahead", |driver, queue| {
        driver.jump(queue, 0x4000)
    }),
    case("an available index that goes back", |driver, queue| {
        driver.jump(queue, u16::MAX)
    }),
];

/// Where the cases have their buffers.
const BASE: u64 = 48 << 20;

fn at(offset: u64, length: u32, flags: u16, next: u16) -> Descriptor {
    Descriptor {
        address: BASE + offset,
        length,
        flags,
        next,
    }
}

/// A writable buffer that covers the first queue's own descriptors.
fn on_rings(length: u32) -> Descriptor {
    Descriptor {
        address: RINGS,
        length,
        flags: WRITE,
        next: 0,
    }
}

/// Puts descriptors at the table's start, unlinked as they are, and makes the first available.
fn chain(driver: &mut Driver, queue: u16, descriptors: &[Descriptor]) {
    for (index, descriptor) in (0..).zip(descriptors) {
        driver.put(queue, index, *descriptor);
    }
    driver.make_available(queue, 0);
}

/// Such a buffer alone in either direction, and as the last of a chain that begins well.
fn everywhere(driver: &mut Driver, queue: u16, address: u64, length: u32) {
    let bad = |flags| Descriptor {
        address,
        length,
        flags,
        next: 0,
    };
    driver.put(queue, 0, bad(0));
    driver.make_available(queue, 0);
    driver.put(queue, 1, bad(WRITE));
    driver.make_available(queue, 1);
    driver.put(queue, 2, at(0, 64, NEXT, 3));
    driver.put(queue, 3, bad(WRITE));
    driver.make_available(queue, 2);
}

fn indirect(driver: &mut Driver, queue: u16, address: u64, length: u32) {
    driver.put(
        queue,
        0,
        Descriptor {
            address,
            length,
            flags: INDIRECT,
            next: 0,
        },
    );
    driver.make_available(queue, 0);
}

/// A table at [`BASE`] whose entries point to itself, each followed by the next.
fn fill_table(driver: &Driver, entries: u16, flags: u16) {
    use vm_memory::{Bytes, GuestAddress};
    for index in 0..entries {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&BASE.to_le_bytes());
        bytes[8..12].copy_from_slice(&64_u32.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&(index + 1).to_le_bytes());
        let address = GuestAddress(BASE + 16 * u64::from(index));
        driver
            .memory()
            .write_slice(&bytes, address)
            .unwrap_or_else(|error| panic!("table: {error}"));
    }
}

/// Attacks each queue of a fresh device, then resets it and wants it to work.
pub(super) fn run(subject: &Subject, case: &'static Case) -> Outcome {
    let (mut driver, log) = subject.driver();
    for queue in 0..driver.queue_count() {
        driver.start();
        (case.attack)(&mut driver, queue);
        driver.kick(queue);
        // Nothing has to come back of such a buffer, so there is nothing to wait for: a moment in which to go wrong.
        std::thread::sleep(Duration::from_millis(3));
        driver.device().pause();
        log.verdict()?;
        driver
            .device()
            .resume()
            .map_err(|error| format!("it does not resume: {error}"))?;
        driver.reset();
        log.verdict()?;
    }
    driver.start();
    if let Some(request) = &subject.request {
        one_request(&mut driver, request)?;
    }
    driver.reset();
    log.verdict()
}
