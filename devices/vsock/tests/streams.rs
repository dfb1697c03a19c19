//! Connections in both directions, as a well-behaved guest and host use them.

mod guest;

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use guest::{CREDIT_REQUEST, Guest, Packet, REQUEST, RESPONSE, RST, line, pattern};
use rustix::net::SendFlags;

const ALLOC: u32 = 64 << 10;

/// An application that answers with what it gets.
fn echo(mut socket: UnixStream) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        let mut buffer = vec![0; 30_000];
        loop {
            let count = socket.read(&mut buffer).unwrap();
            if count == 0 {
                return;
            }
            socket.write_all(&buffer[..count]).unwrap();
        }
    })
}

/// Sends until the socket and the device's buffer are full: until credit is used up and none comes.
fn fill(guest: &mut Guest, ports: guest::Ports) -> usize {
    let data = pattern(3 << 20, 2);
    let mut sent = 0;
    loop {
        if guest.streams[&ports].credit() == 0 {
            guest.settle();
        }
        let count = (guest.streams[&ports].credit() as usize).min(9000);
        if count == 0 {
            return sent;
        }
        guest.send_data(ports, &data[sent..sent + count]);
        sent += count;
        guest.pump();
    }
}

fn echoed(guest: &mut Guest, ports: guest::Ports, length: usize, most: usize) {
    let data = pattern(length, 1);
    guest.send_all(ports, &data, most);
    guest.wait("the echo", |guest| guest.streams[&ports].inbox.len() >= length);
    assert!(guest.streams[&ports].inbox == data, "the echo differs");
}

#[test]
fn the_guest_dials_the_host() {
    let mut guest = Guest::start();
    let (ports, mut socket) = guest.dial(1024, ALLOC);
    guest.send_data(ports, b"hello");
    let mut text = [0; 5];
    socket.read_exact(&mut text).unwrap();
    assert_eq!(&text, b"hello");
    socket.write_all(b"and back").unwrap();
    guest.wait("the answer", |guest| guest.streams[&ports].inbox == b"and back");
    assert_eq!(guest.metric("vsock_connections_opened_total"), 1);
    assert_eq!(guest.metric("vsock_bytes_total"), 13);
}

#[test]
fn the_host_dials_the_guest() {
    let mut guest = Guest::start();
    let mut first = guest.host_connects();
    let mut second = guest.host_connects();
    first.write_all(b"CONNECT 52\nearly").unwrap();
    let one = guest.answer(52, ALLOC);
    second.write_all(b"CONNECT 52\n").unwrap();
    let two = guest.answer(52, ALLOC);
    assert_ne!(one, two, "each has a port of its own");
    assert_eq!(line(&mut first), format!("OK {}\n", one.1));
    assert_eq!(line(&mut second), format!("OK {}\n", two.1));
    guest.wait("what came with the line", |guest| guest.streams[&one].inbox == b"early");
    guest.send_data(two, b"x");
    assert_eq!(second.read(&mut [0; 9]).unwrap(), 1);
}

#[test]
fn the_guest_refuses() {
    let mut guest = Guest::start();
    let mut socket = guest.host_connects();
    socket.write_all(b"CONNECT 9\n").unwrap();
    let request = guest.stray();
    guest.send(&Packet::new(RST, 9, request.src_port));
    assert_eq!(socket.read_to_end(&mut Vec::new()).unwrap(), 0, "no OK, just the end");
    assert_eq!(guest.metric("vsock_connections_refused_total"), 1);
}

#[test]
fn whoever_gives_up_before_the_answer_is_forgotten() {
    let mut guest = Guest::start();
    let mut socket = guest.host_connects();
    socket.write_all(b"CONNECT 9\n").unwrap();
    let request = guest.stray();
    drop(socket);
    let reset = guest.stray();
    assert_eq!((reset.op, reset.src_port, reset.dst_port), (RST, request.src_port, 9));
    // The answer comes too late, and is told so.
    guest.send(&Packet::new(RESPONSE, 9, request.src_port));
    assert_eq!(guest.stray().op, RST);
}

#[test]
fn nobody_accepts() {
    let mut guest = Guest::start();
    guest.acceptor = None;
    for _ in 0..2 {
        let ports = guest.request(1024, ALLOC);
        guest.wait("a refusal", |guest| guest.streams[&ports].reset);
    }
    assert_eq!(guest.metric("vsock_connections_refused_total"), 2);
    assert_eq!(guest.metric("vsock_resets_sent_total"), 2);
}

#[test]
fn megabytes_go_both_ways_with_little_credit() {
    for (features, alloc, most) in [(u64::MAX, 4096, 65_536), (!(1 << 29), 100_000, 1500)] {
        let mut guest = Guest::start_with(features);
        let (ports, socket) = guest.dial(7, alloc);
        let echo = echo(socket);
        echoed(&mut guest, ports, 4 << 20, most);
        guest.shut(ports, 3);
        guest.wait("the end", |guest| guest.streams[&ports].reset);
        echo.join().unwrap();
    }
}

#[test]
fn an_application_that_does_not_read_stops_the_host_and_nobody_else() {
    let mut guest = Guest::start();
    let (slow, mut to_slow) = guest.dial(1, 10_000);
    let (quick, to_quick) = guest.dial(2, ALLOC);
    guest.streams.get_mut(&slow).unwrap().reading = false;
    to_slow.set_nonblocking(true).unwrap();
    let data = pattern(1 << 20, 5);
    let written = to_slow.write(&data).unwrap();
    guest.wait("a full buffer", |guest| guest.streams[&slow].inbox.len() == 10_000);
    let echo = echo(to_quick);
    echoed(&mut guest, quick, 1 << 20, 65_536);
    assert_eq!(guest.streams[&slow].inbox.len(), 10_000);
    assert_eq!(guest.streams[&slow].credit_requests, 1, "asked once");
    guest.read_all(slow);
    guest.wait("the rest", |guest| guest.streams[&slow].inbox.len() >= written);
    assert!(guest.streams[&slow].inbox == data[..written]);
    guest.shut(quick, 3);
    echo.join().unwrap();
}

#[test]
fn a_host_that_does_not_read_stops_the_guest_by_credit() {
    let mut guest = Guest::start();
    let (ports, mut socket) = guest.dial(1, ALLOC);
    let data = pattern(3 << 20, 2);
    let sent = fill(&mut guest, ports);
    assert!(sent >= 256 << 10, "the device holds what it promised: {sent}");
    let reader = std::thread::spawn(move || {
        let mut all = Vec::new();
        socket.read_to_end(&mut all).unwrap();
        all
    });
    guest.send_all(ports, &data[sent..], 65_536);
    guest.shut(ports, 3);
    assert!(reader.join().unwrap() == data);
}

#[test]
fn with_many_connections_each_has_less_room_and_all_work() {
    let mut guest = Guest::start();
    let mut dialled: Vec<_> = (0..200).map(|port| guest.dial(port, ALLOC)).collect();
    let room: Vec<u32> = dialled.iter().map(|(ports, _)| guest.streams[ports].credit()).collect();
    assert_eq!((room[0], room[199]), (256 << 10, 32 << 10));
    let (last, socket) = dialled.pop().unwrap();
    let echo = echo(socket);
    echoed(&mut guest, last, 1 << 20, 65_536);
    guest.shut(last, 3);
    echo.join().unwrap();
    // A host that does not read stops it at what it was promised.
    let (stuck, _socket) = dialled.pop().unwrap();
    fill(&mut guest, stuck);
    assert_eq!(guest.streams[&stuck].credit(), 0);
    assert!(!guest.streams[&stuck].reset);
}

#[test]
fn each_side_can_finish_alone() {
    let mut guest = Guest::start();
    let (ports, mut socket) = guest.dial(1, ALLOC);
    guest.send_data(ports, b"question");
    guest.shut(ports, 2);
    let mut question = String::new();
    socket.read_to_string(&mut question).unwrap();
    assert_eq!(question, "question");
    socket.write_all(b"answer").unwrap();
    guest.wait("the answer", |guest| guest.streams[&ports].inbox == b"answer");
    assert_eq!(guest.streams[&ports].shut, 0);
    socket.shutdown(Shutdown::Write).unwrap();
    guest.wait("the end of the answer", |guest| guest.streams[&ports].shut & 2 != 0);
    guest.shut(ports, 3);
    guest.wait("the farewell", |guest| guest.streams[&ports].reset);

    let (ports, mut socket) = guest.dial(1, ALLOC);
    socket.write_all(b"last words").unwrap();
    socket.shutdown(Shutdown::Write).unwrap();
    guest.wait("the host's end", |guest| guest.streams[&ports].shut == 2);
    assert_eq!(guest.streams[&ports].inbox, b"last words");
    guest.send_data(ports, b"heard");
    let mut text = [0; 5];
    socket.read_exact(&mut text).unwrap();
    // Now it closes altogether, which is seen without reading.
    drop(socket);
    guest.wait("the full close", |guest| guest.streams[&ports].shut == 3);
}

#[test]
fn a_guest_that_reads_no_more_stops_the_host() {
    let mut guest = Guest::start();
    let (ports, mut socket) = guest.dial(1, ALLOC);
    guest.shut(ports, 1);
    // Of nothing only the error is told.
    guest.wait("the end of writing", |_| {
        rustix::net::send(&socket, &[], SendFlags::NOSIGNAL).is_err()
    });
    let error = socket.write_all(b"x").unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::BrokenPipe);
    guest.send_data(ports, b"still talking");
    let mut text = [0; 13];
    socket.read_exact(&mut text).unwrap();
}

#[test]
fn the_peer_disappears_in_mid_stream() {
    let mut guest = Guest::start();
    let (ports, mut socket) = guest.dial(1, ALLOC);
    socket.write_all(b"the last of it").unwrap();
    fill(&mut guest, ports);
    guest.wait("the bytes", |guest| guest.streams[&ports].inbox.len() == 14);
    // Unread bytes make this a reset on the host's side; the guest hears of a shutdown all the same.
    socket.write_all(b" and more").unwrap();
    drop(socket);
    guest.wait("the shutdown", |guest| guest.streams[&ports].shut == 3);
    assert_eq!(guest.streams[&ports].inbox, b"the last of it and more");
    // A guest that goes on writes into the void and gets its credit back.
    for _ in 0..40 {
        guest.send_all(ports, &pattern(20_000, 4), 20_000);
    }
    let farewell = guest.packet(RST, ports);
    guest.send(&farewell);
    guest.settle();
    assert!(!guest.streams[&ports].reset, "a RST is not answered");
}

#[test]
fn what_the_guest_sent_before_it_closed_arrives() {
    for early_rst in [false, true] {
        let mut guest = Guest::start();
        let (ports, mut socket) = guest.dial(1, ALLOC);
        let data = pattern(400_000, 6);
        guest.send_all(ports, &data, 65_536);
        guest.shut(ports, 3);
        guest.settle();
        assert!(!guest.streams[&ports].reset, "not all of it has been delivered");
        if early_rst {
            // The driver's patience ends, and the ports are used again at once.
            guest.send(&Packet::new(RST, ports.0, ports.1));
            guest.send(&Packet::new(REQUEST, ports.0, ports.1));
            guest.streams.get_mut(&ports).unwrap().connected = false;
            guest.wait("a new connection", |guest| guest.streams[&ports].connected);
        }
        let mut all = Vec::new();
        socket.read_to_end(&mut all).unwrap();
        assert!(all == data);
        if !early_rst {
            guest.wait("the farewell", |guest| guest.streams[&ports].reset);
        }
    }
}

#[test]
fn a_thousand_connections_and_no_more_than_promised() {
    let limit = rustix::process::Rlimit {
        current: Some(8192),
        maximum: rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum,
    };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    let mut guest = Guest::start();
    let mut open: Vec<_> = (0..1024).map(|_| guest.dial(80, 4096)).collect();
    for (number, (ports, _)) in open.iter().enumerate() {
        guest.send_data(*ports, &number.to_le_bytes());
    }
    for (number, (_, socket)) in open.iter_mut().enumerate() {
        let mut bytes = [0; 8];
        socket.read_exact(&mut bytes).unwrap();
        assert_eq!(bytes, number.to_le_bytes());
        socket.write_all(&bytes).unwrap();
    }
    for (number, (ports, _)) in open.iter().enumerate() {
        guest.wait("the answer", |guest| guest.streams[ports].inbox == number.to_le_bytes());
    }
    let refused = guest.request(80, 4096);
    guest.wait("a refusal", |guest| guest.streams[&refused].reset);
    let mut unwelcome = guest.host_connects();
    assert_eq!(unwelcome.read_to_end(&mut Vec::new()).unwrap(), 0);
    // One ends, and its place is free.
    let (ports, socket) = open.swap_remove(500);
    drop(socket);
    guest.wait("the shutdown", |guest| guest.streams[&ports].shut == 3);
    let farewell = guest.packet(RST, ports);
    guest.send(&farewell);
    guest.dial(80, 4096);
    assert_eq!(guest.metric("vsock_connections_opened_total"), 1025);
}

#[test]
fn a_busy_connection_leaves_room_for_others() {
    let mut guest = Guest::start();
    let (busy, mut to_busy) = guest.dial(1, 1 << 20);
    let (other, mut to_other) = guest.dial(2, 1 << 20);
    to_busy.set_nonblocking(true).unwrap();
    to_other.set_nonblocking(true).unwrap();
    // Both have bytes waiting before the guest offers a buffer.
    guest.refill = false;
    guest.driver.device().pause();
    let data = pattern(150_000, 1);
    let (first, second) = (to_busy.write(&data).unwrap(), to_other.write(&data).unwrap());
    assert!(first > 50_000 && second > 50_000);
    guest.driver.device().resume().unwrap();
    let total = |guest: &Guest| guest.streams[&busy].inbox.len() + guest.streams[&other].inbox.len();
    guest.wait("some of it", |guest| total(guest) > 60_000);
    let (one, two) = (guest.streams[&busy].inbox.len(), guest.streams[&other].inbox.len());
    assert!(one.abs_diff(two) <= total(&guest) / 4, "{one} and {two} bytes");
}

#[test]
fn a_pause_in_mid_stream_is_not_noticed() {
    let mut guest = Guest::start();
    let (ports, socket) = guest.dial(1, 9000);
    let echo = echo(socket);
    let data = pattern(2 << 20, 8);
    for (round, part) in data.chunks(100_000).enumerate() {
        guest.driver.device().pause();
        if round % 3 == 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
        guest.pump();
        guest.driver.device().resume().unwrap();
        guest.send_all(ports, part, 30_000);
    }
    // Connections that are made while it sleeps wait for it.
    guest.driver.device().pause();
    let mut late = guest.host_connects();
    late.write_all(b"CONNECT 5\n").unwrap();
    guest.driver.device().resume().unwrap();
    guest.answer(5, ALLOC);
    assert!(line(&mut late).starts_with("OK "));
    guest.wait("the echo", |guest| guest.streams[&ports].inbox.len() == data.len());
    assert!(guest.streams[&ports].inbox == data);
    guest.shut(ports, 3);
    echo.join().unwrap();
}

#[test]
fn a_reset_closes_what_the_guest_had_open() {
    let mut guest = Guest::start();
    let (_, mut socket) = guest.dial(1, ALLOC);
    let mut undecided = guest.host_connects();
    undecided.write_all(b"CONN").unwrap();
    guest.settle();
    guest.restart();
    assert_eq!(socket.read_to_end(&mut Vec::new()).unwrap(), 0);
    // Who had not reached the guest does now.
    undecided.write_all(b"ECT 6\n").unwrap();
    guest.answer(6, ALLOC);
    assert!(line(&mut undecided).starts_with("OK "));
    let (ports, mut socket) = guest.dial(1, ALLOC);
    guest.send_data(ports, b"anew");
    socket.read_exact(&mut [0; 4]).unwrap();
}

#[test]
fn interrupts_come_in_batches() {
    let mut guest = Guest::start();
    let (ports, mut socket) = guest.dial(1, 1 << 20);
    let before = guest.driver.interrupts(0);
    socket.write_all(&pattern(150_000, 1)).unwrap();
    guest.wait("the bytes", |guest| guest.streams[&ports].inbox.len() == 150_000);
    let count = guest.driver.interrupts(0) - before;
    // 38 packets of 4 KiB.
    assert!(count < 30, "{count} interrupts");
    let requests = guest.streams[&ports].credit_requests;
    assert_eq!((requests, CREDIT_REQUEST), (0, 7), "credit was never short");
}
