//! Where a slot may send: packets, and what is left of connections.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream, UdpSocket};

use base::Egress;
use netlink::Links;

use super::world::{ENOUGH, HOST4, HOST6, METADATA, PATIENCE, Place, WORLD4, WORLD6, World};
use crate::plan::{DNS_V6, GATEWAY_V4};
use crate::{Egresses, Network};

/// Others in the world.
const OTHER4: &str = "203.0.113.5";
const OTHER6: &str = "2001:db8:1::5";

fn egress(allow: &[&str], deny: &[&str]) -> Egress {
    let ranges = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
    Egress::new(ranges(allow), ranges(deny)).unwrap()
}

fn restrict(world: &World, slot: u32, allow: &[&str], deny: &[&str]) {
    let egress = egress(allow, deny);
    world.with(move |network| network.restrict(slot, &egress).unwrap());
}

/// One in which two hosts answer by either family, and name servers do.
fn world() -> World {
    let world = World::new();
    for address in [OTHER4, OTHER6] {
        let prefix = if address.contains(':') { 128 } else { 32 };
        world.world.run(move || {
            let links = Links::open().unwrap();
            links
                .address(links.index("lo").unwrap(), address.parse().unwrap(), prefix)
                .unwrap();
        });
    }
    for address in [WORLD4, OTHER4, WORLD6, OTHER6] {
        for port in [7000, 53] {
            let address = at(address, port);
            world.world.serve_tcp(&address);
            world.world.serve_udp(&address);
        }
    }
    world
}

fn at(address: &str, port: u16) -> String {
    match address.contains(':') {
        true => format!("[{address}]:{port}"),
        false => format!("{address}:{port}"),
    }
}

/// Of all that answers in that world, what answers this guest, by TCP and by UDP.
fn reached(place: &Place, wanted: &[&str]) {
    let (dns4, dns6) = (GATEWAY_V4.to_string(), DNS_V6.to_string());
    let all = [
        (WORLD4, 7000),
        (OTHER4, 7000),
        (WORLD6, 7000),
        (OTHER6, 7000),
        (dns4.as_str(), 53),
        (dns6.as_str(), 53),
    ];
    for (address, port) in all {
        let to = at(address, port);
        if wanted.contains(&address) {
            assert!(place.reaches(&to), "{to} is not reached by TCP");
            place
                .udp(&to, 10)
                .unwrap_or_else(|error| panic!("{to} is not reached by UDP: {error}"));
        } else {
            assert!(place.is_cut_off(&to), "{to} is reached by TCP");
            let from = if address.contains(':') { "::" } else { "0.0.0.0" };
            assert!(!place.hears(from, &to), "{to} is reached by UDP");
        }
    }
}

const EVERYBODY: [&str; 6] = [WORLD4, OTHER4, WORLD6, OTHER6, "100.127.255.253", "fdba:5a17::1"];

#[test]
fn a_guest_reaches_what_it_may_and_others_reach_what_they_may() {
    let world = world();
    let (guest, other) = (world.guest(3), world.guest(4));
    // Without a policy, all of them.
    reached(&guest.place, &EVERYBODY);
    restrict(&world, 3, &[], &["0.0.0.0/0"]);
    reached(&guest.place, &[]);
    restrict(&world, 3, &[OTHER4, "2001:db8:1::/48"], &["0.0.0.0/0"]);
    reached(&guest.place, &[OTHER4, OTHER6]);
    // Names are asked for at an address like any other.
    restrict(&world, 3, &[OTHER4, "100.127.255.253"], &["0.0.0.0/0"]);
    reached(&guest.place, &[OTHER4, "100.127.255.253"]);
    restrict(&world, 3, &[], &["203.0.113.0/24", WORLD6]);
    reached(&guest.place, &[WORLD4, OTHER6, "100.127.255.253", "fdba:5a17::1"]);
    restrict(&world, 3, &[], &["::/0"]);
    reached(&guest.place, &[WORLD4, OTHER4, "100.127.255.253"]);
    reached(&other.place, &EVERYBODY);
    // What is allowed alone restricts nothing.
    restrict(&world, 3, &[OTHER4], &[]);
    reached(&guest.place, &EVERYBODY);
}

#[test]
fn what_nobody_reaches_is_not_reached_by_who_is_allowed_to() {
    let world = world();
    let (one, two) = (world.guest(0), world.guest(1));
    for address in ["0.0.0.0:7000", "[::]:7001"] {
        two.place.serve_tcp(address);
        world.host.serve_tcp(address);
    }
    world.world.serve_tcp(&at(METADATA, 7000));
    let ranges = world.with(|network| *network.ranges());
    let (slot4, slot6) = (
        ranges.slot_v4(1).unwrap().to_string(),
        ranges.slot_v6(1).unwrap().to_string(),
    );
    let (near4, near6) = (ranges.host_v4().to_string(), ranges.host_v6().to_string());
    for deny in [&["0.0.0.0/0"][..], &[]] {
        let all = [
            "0.0.0.0/0",
            "::/0",
            METADATA,
            HOST4,
            HOST6,
            &slot4,
            &slot6,
            &near4,
            &near6,
        ];
        restrict(&world, 0, &all, deny);
        assert!(one.place.reaches(&at(WORLD4, 7000)) && one.place.reaches(&at(WORLD6, 7000)));
        for address in [METADATA, HOST4, &slot4, &near4] {
            assert!(one.place.is_cut_off(&at(address, 7000)), "{address}");
        }
        for address in [HOST6, &slot6, &near6] {
            assert!(one.place.is_cut_off(&at(address, 7001)), "{address}");
        }
    }
}

/// A connection that somebody echoes.
fn connect(place: &Place, address: &str) -> TcpStream {
    let address = at(address, 7000).parse().unwrap();
    let mut stream = place.run(move || TcpStream::connect_timeout(&address, PATIENCE).unwrap());
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut byte = [0];
    while byte != *b"\n" {
        stream.read_exact(&mut byte).unwrap();
    }
    assert!(echoes(&mut stream));
    stream
}

fn echoes(stream: &mut TcpStream) -> bool {
    let mut back = [0; 4];
    stream.write_all(b"ping").is_ok() && stream.read_exact(&mut back).is_ok() && back == *b"ping"
}

#[test]
fn what_is_open_to_who_is_denied_is_cut_both_ways_and_the_rest_goes_on() {
    let world = world();
    let guest = world.guest(3);
    let far = world.world.run(|| {
        let socket = UdpSocket::bind(at(WORLD4, 7100)).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket
    });
    let near = guest.place.run(|| {
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.send_to(b"here I am", at(WORLD4, 7100)).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket
    });
    let (_, from) = far.recv_from(&mut [0; 16]).unwrap();
    far.send_to(b"I see", from).unwrap();
    near.recv(&mut [0; 16]).unwrap();
    let (mut cut4, mut cut6) = (connect(&guest.place, WORLD4), connect(&guest.place, WORLD6));
    let (mut kept4, mut kept6) = (connect(&guest.place, OTHER4), connect(&guest.place, OTHER6));
    restrict(&world, 3, &[OTHER4, OTHER6], &["0.0.0.0/0"]);
    for stream in [&mut cut4, &mut cut6] {
        stream.set_read_timeout(Some(ENOUGH)).unwrap();
        assert!(!echoes(stream), "it is open still");
    }
    assert!(echoes(&mut kept4) && echoes(&mut kept6), "what is allowed was cut");
    // Nor does anybody reach the guest by what it had opened.
    near.set_read_timeout(Some(ENOUGH)).unwrap();
    far.send_to(b"are you there?", from).unwrap();
    assert!(near.recv(&mut [0; 16]).is_err(), "it is heard still");
    let ranges = world.with(|network| *network.ranges());
    let slot: [std::net::IpAddr; 2] = [ranges.slot_v4(3).unwrap().into(), ranges.slot_v6(3).unwrap().into()];
    let tracked = world.host.run(|| crate::conntrack::sources().unwrap());
    let its = tracked.iter().filter(|source| slot.contains(source)).count();
    assert_eq!(its, 2, "the host tracks what cannot go on: {tracked:?}");
    // What is allowed again begins anew.
    restrict(&world, 3, &[], &[]);
    connect(&guest.place, WORLD4);
}

#[test]
fn published_ports_answer_whom_the_guest_may_send_to_and_the_host() {
    let world = world();
    let guest = world.guest(3);
    guest.place.serve_tcp("0.0.0.0:80");
    world.with(|network| network.publish(3, &["8080:80".parse().unwrap()]).unwrap());
    assert!(world.world.reaches("192.0.2.1:8080"));
    restrict(&world, 3, &[], &["0.0.0.0/0"]);
    assert!(world.world.is_cut_off("192.0.2.1:8080"));
    world.host.tcp("127.0.0.1:8080").unwrap();
    restrict(&world, 3, &[WORLD4], &["0.0.0.0/0"]);
    assert!(world.world.reaches("192.0.2.1:8080"));
}

#[test]
fn a_policy_is_there_before_the_guest_and_for_each_new_table() {
    let mut world = world();
    restrict(&world, 3, &[OTHER4], &["0.0.0.0/0"]);
    // Somebody else's is at no time the next one's.
    restrict(&world, 5, &[], &["0.0.0.0/0"]);
    let guest = world.guest(3);
    reached(&guest.place, &[OTHER4]);
    let told: Egresses = [(3, egress(&[OTHER4], &["0.0.0.0/0"]))].into();
    world.egresses = told.clone();
    world.open();
    reached(&guest.place, &[OTHER4]);
    reached(&world.guest(5).place, &EVERYBODY);
    // As another program does.
    world.with(|network| network.flush_for_test());
    reached(&guest.place, &[]);
    world.with(move |network| network.restore(&crate::Ports::default(), &told).unwrap());
    reached(&guest.place, &[OTHER4]);
}

#[test]
fn of_whom_nobody_knows_the_policy_reaches_nothing() {
    let mut world = world();
    let (restricted, free) = (world.guest(3), world.guest(4));
    restrict(&world, 3, &[OTHER4], &["0.0.0.0/0"]);
    world.egresses = Egresses::default();
    world.open();
    reached(&restricted.place, &[]);
    // The table said that this one may.
    reached(&free.place, &EVERYBODY);
    let flushed = |network: &Network| {
        network.flush_for_test();
        network.restore(&crate::Ports::default(), &Egresses::default()).unwrap();
    };
    world.with(flushed);
    reached(&free.place, &[]);
}

#[test]
fn a_policy_can_be_as_large_as_it_may() {
    let world = world();
    let guest = world.guest(3);
    let denied = (0..510).map(|at| format!("{}/31", Ipv4Addr::from(0x0b00_0000 + 4 * at)));
    let mut denied: Vec<String> = denied.collect();
    denied.extend([OTHER4.to_owned(), "255.255.255.254/31".to_owned()]);
    let denied: Vec<&str> = denied.iter().map(String::as_str).collect();
    restrict(&world, 3, &[], &denied);
    assert!(guest.place.is_cut_off(&at(OTHER4, 7000)));
    assert!(guest.place.reaches(&at(WORLD4, 7000)));
    let refused = world.with(|network| network.restrict(1 << 20, &Egress::nothing()).unwrap_err());
    assert!(refused.to_string().contains("beyond the last one"), "{refused}");
}

#[test]
fn what_is_open_to_who_is_denied_is_cut_by_whoever_opens_the_network_next() {
    let mut world = world();
    let (guest, other) = (world.guest(3), world.guest(4));
    let (mut cut4, mut cut6) = (connect(&guest.place, WORLD4), connect(&guest.place, WORLD6));
    let (mut kept, mut others) = (connect(&guest.place, OTHER4), connect(&other.place, WORLD4));
    let tracked = |world: &World| world.host.run(|| crate::conntrack::sources().unwrap().len());
    assert_eq!(tracked(&world), 4);
    // As after kill -9 of one that had written the record, and nothing else.
    world.egresses = [(3, egress(&[OTHER4], &["0.0.0.0/0"])), (4, Egress::default())].into();
    world.open();
    assert_eq!(tracked(&world), 2, "the host tracks what cannot go on");
    for stream in [&mut cut4, &mut cut6] {
        stream.set_read_timeout(Some(ENOUGH)).unwrap();
        assert!(!echoes(stream), "it is open still");
    }
    assert!(echoes(&mut kept) && echoes(&mut others), "what is allowed was cut");
}

#[test]
fn a_slot_that_was_found_restricted_is_not_any_more_when_that_is_said() {
    let mut world = world();
    let guest = world.guest(3);
    restrict(&world, 3, &[], &["0.0.0.0/0"]);
    world.egresses = Egresses::default();
    world.open();
    reached(&guest.place, &[]);
    drop(guest);
    world.with(|network| network.detach(3).unwrap());
    restrict(&world, 3, &[], &[]);
    reached(&world.guest(3).place, &EVERYBODY);
}

/// nft runs for both in one namespace.
#[test]
fn taps_are_made_while_others_are_restricted() {
    let world = world();
    let guest = world.guest(3);
    let ranges = (0..500_u32).map(|at| Ipv4Addr::from(0x0b00_0000 + 4 * at).to_string());
    let ranges: Vec<String> = ranges.collect();
    let denied: Vec<&str> = ranges.iter().map(String::as_str).collect();
    let policies = [egress(&[], &denied), egress(&[], &["0.0.0.0/0"])];
    world.with(move |network| {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..20 {
                    network.restrict(3, &policies[round % 2]).unwrap();
                }
            });
            for slot in 10..30 {
                network.attach(slot, 1).unwrap();
            }
        });
    });
    reached(&guest.place, &[]);
    reached(&world.guest(30).place, &EVERYBODY);
}
