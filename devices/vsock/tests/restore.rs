//! A driver whose device was saved and restored: it is told that connections are gone, before it hears of new ones.

mod guest;

use std::collections::BTreeSet;
use std::io::Write;
use std::time::Duration;

use guest::{Guest, REQUEST, RST};

/// What the specification calls VIRTIO_VSOCK_EVENT_TRANSPORT_RESET.
const RESET: [u8; 4] = [0; 4];
const EVENT: u16 = 2;
const BUFFERS: usize = 8;

const ALLOC: u32 = 64 << 10;

/// As a Linux driver has it: eight buffers of an event's size. Where they are, and whether the device wanted a kick.
fn offer_events(guest: &mut Guest) -> (Vec<(u64, usize)>, bool) {
    let mut buffers = Vec::new();
    for _ in 0..BUFFERS {
        let buffer = guest.driver.push(EVENT, &[], &[RESET.len()]).writable[0];
        guest.poison(buffer.0);
        buffers.push(buffer);
    }
    let kicked = guest.driver.kick_if_wanted(EVENT);
    (buffers, kicked)
}

/// Every event there is.
fn events(guest: &mut Guest) -> Vec<u32> {
    let mut events = Vec::new();
    while let Some(used) = guest.driver.poll_used(EVENT) {
        events.push(used.written);
    }
    events
}

#[test]
fn the_reset_comes_before_any_new_connection() {
    let mut guest = Guest::start();
    let (buffers, _) = offer_events(&mut guest);
    guest.dial(1024, ALLOC);
    assert_eq!(events(&mut guest), [0; 0], "nothing has happened yet");
    guest.migrate();

    let mut host = guest.host_connects();
    host.write_all(b"CONNECT 52\n").unwrap();
    // The first carries it, and all others come back: the next that is offered is one that the driver has dealt with.
    let written: Vec<u32> = (0..BUFFERS)
        .map(|_| guest.driver.wait_used(EVENT).expect("no event came").written)
        .collect();
    assert_eq!((written[0], written[1..].iter().sum()), (4, 0), "{written:?}");
    assert_eq!(guest.driver.bytes(buffers[0]), RESET);
    std::thread::sleep(Duration::from_millis(200));
    guest.pump();
    assert!(guest.strays.is_empty(), "it came too early: {:?}", guest.strays);

    assert!(offer_events(&mut guest).1, "the device wants no kick");
    let request = guest.stray();
    assert_eq!((request.op, request.dst_port), (REQUEST, 52));
    assert_eq!(events(&mut guest), [0; 0], "it is told once");
}

#[test]
fn old_connections_are_reset_where_no_event_can_be_sent() {
    let mut guest = Guest::start();
    let (ports, _socket) = guest.dial(1024, ALLOC);
    guest.migrate();
    guest.send_data(ports, b"hello");
    guest.wait("the reset", |guest| guest.streams[&ports].reset);
    let mut host = guest.host_connects();
    host.write_all(b"CONNECT 52\n").unwrap();
    assert_eq!(guest.stray().op, REQUEST);
}

#[test]
fn a_reset_that_was_not_heard_of_is_told_again_after_the_next_restore() {
    let mut guest = Guest::start();
    guest.migrate();
    guest.migrate();
    offer_events(&mut guest);
    assert_eq!(guest.driver.wait_used(EVENT).map(|used| used.written), Some(4));
}

#[test]
fn a_driver_that_starts_anew_has_nothing_to_hear() {
    let mut guest = Guest::start();
    guest.dial(1024, ALLOC);
    guest.migrate();
    guest.restart();
    offer_events(&mut guest);
    let (ports, _socket) = guest.dial(1024, ALLOC);
    guest.send_data(ports, b"hello");
    guest.settle();
    assert!(!guest.streams[&ports].reset && guest.strays.iter().all(|packet| packet.op != RST));
    assert_eq!(events(&mut guest), [0; 0]);
}

/// A guest's program may hold on to its end, and then its kernel has no room for another connection with the same ports.
#[test]
fn ports_of_connections_before_the_restore_are_not_given_again() {
    let mut guest = Guest::start();
    let (mut ports, mut open) = (BTreeSet::new(), Vec::new());
    for _ in 0..4 {
        for _ in 0..3 {
            let mut host = guest.host_connects();
            host.write_all(b"CONNECT 52\n").unwrap();
            let request = guest.stray();
            assert_eq!(request.op, REQUEST);
            assert!(ports.insert(request.src_port), "{} again", request.src_port);
            open.push(host);
        }
        guest.migrate();
    }
}
