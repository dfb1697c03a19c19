//! Guests and host programs that do what the specification does not allow.

mod guest;

use std::io::{Read, Write};

use guest::{CID, CREDIT_UPDATE, Guest, HOST, Packet, REQUEST, RESPONSE, RST, RW, SHUTDOWN};

const ALLOC: u32 = 64 << 10;

/// Nothing that was tried has done any harm.
#[track_caller]
fn still_works(guest: &mut Guest) {
    let (ports, mut socket) = guest.dial(1024, ALLOC);
    guest.send_data(ports, b"fine");
    socket.read_exact(&mut [0; 4]).unwrap();
    drop(socket);
    guest.wait("the shutdown", |guest| guest.streams[&ports].shut == 3);
    let farewell = guest.packet(RST, ports);
    guest.send(&farewell);
}

#[test]
fn packets_for_nobody_are_answered_with_rst() {
    let mut guest = Guest::start();
    for op in [RESPONSE, SHUTDOWN, RW, CREDIT_UPDATE, 7] {
        guest.send(&Packet::new(op, 11, 22));
        let reset = guest.stray();
        assert_eq!(
            (reset.op, reset.src_cid, reset.src_port, reset.dst_port),
            (RST, HOST, 22, 11),
            "operation {op}"
        );
    }
    guest.send(&Packet::new(RST, 11, 22));
    guest.settle();
    assert!(guest.strays.is_empty(), "a RST is not answered");
    still_works(&mut guest);
}

#[test]
fn other_addresses_types_and_operations() {
    let mut guest = Guest::start();
    let elsewhere = Packet {
        dst_cid: 77,
        ..Packet::new(REQUEST, 1, 2)
    };
    guest.send(&elsewhere);
    assert_eq!(guest.stray().src_cid, 77);
    let seqpacket = Packet {
        kind: 2,
        ..Packet::new(REQUEST, 1, 2)
    };
    guest.send(&seqpacket);
    let reset = guest.stray();
    assert_eq!((reset.op, reset.kind), (RST, 2));
    for op in [0, 8, 0xffff] {
        guest.send(&Packet::new(op, 1, 2));
        assert_eq!(guest.stray().op, RST);
    }
    let forged = Packet {
        src_cid: CID + 1,
        ..Packet::new(REQUEST, 1, 2)
    };
    guest.send(&forged);
    guest.settle();
    assert!(guest.strays.is_empty(), "nobody is told about a forged address");
    still_works(&mut guest);
}

#[test]
fn headers_that_lie_about_length() {
    let mut guest = Guest::start();
    guest.send_parts(&[&[1; 43]]);
    guest.send_parts(&[&[0; 1]]);
    guest.wait("both to be seen", |guest| guest.metric("vsock_malformed_total") == 2);
    guest.settle();
    assert!(guest.strays.is_empty());

    let long = Packet {
        len: 101,
        ..Packet::new(RW, 1, 2)
    };
    guest.send_parts(&[&long.bytes(), &[0; 100]]);
    assert_eq!(guest.stray().op, RST);
    for len in [5, u32::MAX] {
        let (ports, mut socket) = guest.dial(1, ALLOC);
        let lie = Packet {
            len,
            ..guest.packet(RW, ports)
        };
        guest.send_parts(&[&lie.bytes(), b"four"]);
        guest.wait("a reset", |guest| guest.streams[&ports].reset);
        assert_eq!(socket.read_to_end(&mut Vec::new()).unwrap(), 0);
    }
    still_works(&mut guest);
}

#[test]
fn a_packet_in_pieces_is_a_packet() {
    let mut guest = Guest::start();
    let (ports, mut socket) = guest.dial(1, ALLOC);
    let packet = Packet {
        len: 10,
        ..guest.packet(RW, ports)
    };
    let bytes = packet.bytes();
    // Behind the payload lies more, which does not belong to it.
    guest.send_parts(&[&bytes[..7], &bytes[7..40], &bytes[40..], b"abc", b"defg", b"hijKLM"]);
    let mut text = [0; 10];
    socket.read_exact(&mut text).unwrap();
    assert_eq!(&text, b"abcdefghij");
}

#[test]
fn more_than_the_credit() {
    let mut guest = Guest::start();
    let (ports, mut socket) = guest.dial(1, ALLOC);
    // The host does not read: the socket takes some, the device 256 KiB, and then the guest goes on.
    let mut sent = 0;
    while !guest.streams[&ports].reset {
        let mut packet = Packet::new(RW, ports.0, ports.1);
        packet.len = 60_000;
        let mut bytes = packet.bytes();
        bytes.resize(44 + 60_000, 1);
        guest.send_parts(&[&bytes]);
        guest.pump();
        sent += 60_000;
        assert!(sent < 20 << 20, "nobody stops it");
    }
    assert!(sent > 256 << 10);
    let mut left = Vec::new();
    socket.read_to_end(&mut left).unwrap();
    // It sends on to a connection that is no more.
    guest.settle();
    still_works(&mut guest);
}

#[test]
fn operations_out_of_order() {
    let mut guest = Guest::start();
    // A second request on the same ports ends the first connection.
    let (ports, mut socket) = guest.dial(1, ALLOC);
    let again = guest.packet(REQUEST, ports);
    guest.send(&again);
    guest.wait("a reset", |guest| guest.streams[&ports].reset);
    assert_eq!(socket.read_to_end(&mut Vec::new()).unwrap(), 0);
    // A response that nobody waits for.
    let (ports, _socket) = guest.dial(1, ALLOC);
    let response = guest.packet(RESPONSE, ports);
    guest.send(&response);
    guest.wait("a reset", |guest| guest.streams[&ports].reset);
    // Data after its end.
    let (ports, _socket) = guest.dial(1, ALLOC);
    guest.shut(ports, 2);
    guest.send_data(ports, b"one more thing");
    guest.wait("a reset", |guest| guest.streams[&ports].reset);
    // Data instead of an answer.
    let mut socket = guest.host_connects();
    socket.write_all(b"CONNECT 5\n").unwrap();
    let request = guest.stray();
    guest.send(&Packet::new(RW, 5, request.src_port));
    assert_eq!(guest.stray().op, RST);
    assert_eq!(socket.read_to_end(&mut Vec::new()).unwrap(), 0);
    still_works(&mut guest);
}

#[test]
fn a_flood_without_receive_buffers_is_bounded_and_nothing_is_lost() {
    let mut guest = Guest::start();
    // Use up every receive buffer.
    guest.refill = false;
    for port in 0..128 {
        guest.send(&Packet::new(RW, 9, port));
    }
    guest.wait("all buffers used", |guest| guest.strays.len() == 128);
    guest.strays.clear();
    // The same again and again is held once.
    for _ in 0..1000 {
        guest.send(&Packet::new(RW, 1, 1));
    }
    guest.wait("all taken", |guest| guest.driver.free_descriptors(1) == 128);
    // Different ones fill the list, and then the device takes no more: what is sent waits for a free descriptor.
    for port in 2..=256 + 128 {
        guest.send(&Packet::new(RW, 1, port));
    }
    guest.settle();
    assert_eq!(
        guest.driver.free_descriptors(1),
        0,
        "the device stopped where its list was full"
    );
    // Each answer that goes out makes room for a packet.
    guest.offer(100, 4096);
    guest.wait("a hundred taken", |guest| guest.driver.free_descriptors(1) == 100);
    guest.refill = true;
    guest.fill();
    guest.wait("every answer", |guest| guest.strays.len() == 384);
    let mut ports: Vec<u32> = guest.strays.drain(..).map(|packet| packet.src_port).collect();
    ports.sort_unstable();
    assert_eq!(ports, (1..=384).collect::<Vec<u32>>());
    still_works(&mut guest);
}

#[test]
fn receive_buffers_that_are_of_no_use() {
    let mut guest = Guest::start();
    let (ports, mut socket) = guest.dial(1, ALLOC);
    guest.refill = false;
    for port in 0..127 {
        guest.send(&Packet::new(RW, 9, port));
    }
    guest.wait("few buffers left", |guest| guest.strays.len() == 127);
    guest.strays.clear();
    guest.pump();
    // No room for a header, for a header only, and for one byte: each comes back, and the stream goes on.
    socket.write_all(b"abc").unwrap();
    guest.wait("by the last good one", |guest| guest.streams[&ports].inbox == b"abc");
    socket.write_all(b"defg").unwrap();
    for length in [1, 43, 44, 45, 46, 4096] {
        guest.offer(1, length);
    }
    guest.wait("the rest", |guest| guest.streams[&ports].inbox == b"abcdefg");
    assert_eq!(guest.metric("vsock_malformed_total"), 3);
}

#[test]
fn first_lines_that_are_none() {
    let mut guest = Guest::start();
    for bytes in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &[b'x'; 100_000],
        b"CONNECT 99999999999\n",
        b"CONNECT \xff\xfe\n",
        b"\0\0\0\0\n",
        b"CONNECT 5 and more\n",
    ] {
        let mut socket = guest.host_connects();
        // The device may close while this is written.
        drop(socket.write_all(bytes));
        let mut answer = Vec::new();
        match socket.read_to_end(&mut answer) {
            Ok(_) => assert_eq!(answer, b""),
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
        }
    }
    guest.settle();
    assert!(guest.strays.is_empty(), "the guest hears of none of them");
    assert_eq!(guest.metric("vsock_connections_refused_total"), 6);
    // One that never ends its line keeps nobody from connecting.
    let mut silent = guest.host_connects();
    silent.write_all(b"CONNECT 5").unwrap();
    let mut socket = guest.host_connects();
    socket.write_all(b"CONNECT 5\n").unwrap();
    guest.answer(5, ALLOC);
    assert!(guest::line(&mut socket).starts_with("OK "));
}

#[test]
fn requests_that_are_taken_back_leave_nothing() {
    let mut guest = Guest::start();
    guest.refill = false;
    for round in 0..2000_u32 {
        let mut request = Packet::new(REQUEST, 7, 7);
        request.fwd_cnt = round;
        guest.send(&request);
        guest.send(&Packet::new(RST, 7, 7));
        guest.accept(7);
    }
    guest.refill = true;
    guest.pump();
    guest.fill();
    guest.strays.clear();
    guest.settle();
    guest.strays.clear();
    still_works(&mut guest);
}
