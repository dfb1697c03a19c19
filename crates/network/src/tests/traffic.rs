//! What guests can reach, and how guests are reached.

use std::net::IpAddr;

use super::world::{HOST4, HOST6, WORLD4, WORLD6, World};
use crate::plan::{DNS_V6, GATEWAY_V4};
use crate::ports::PortMapping;

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

#[test]
fn two_guests_of_one_address_reach_the_world() {
    let world = World::new();
    for address in ["192.0.2.2:7000", "[2001:db8::2]:7000"] {
        world.world.serve_tcp(address);
        world.world.serve_udp(address);
    }
    let guests = [world.guest(0), world.guest(1)];
    std::thread::scope(|scope| {
        for guest in &guests {
            scope.spawn(move || {
                for _ in 0..3 {
                    assert_eq!(guest.place.tcp("192.0.2.2:7000").unwrap(), ip(HOST4));
                    assert_eq!(guest.place.tcp("[2001:db8::2]:7000").unwrap(), ip(HOST6));
                    // The large ones come in fragments, the same ones from both guests.
                    for length in [1, 1400, 5000] {
                        assert_eq!(guest.place.udp("192.0.2.2:7000", length).unwrap(), ip(HOST4));
                        assert_eq!(guest.place.udp("[2001:db8::2]:7000", length).unwrap(), ip(HOST6));
                    }
                }
            });
        }
    });
}

#[test]
fn names_are_asked_for_at_the_gateway() {
    let world = World::new();
    let guest = world.guest(5);
    for server in [WORLD4, WORLD6] {
        let address = if server.contains(':') {
            format!("[{server}]:53")
        } else {
            format!("{server}:53")
        };
        world.world.serve_udp(&address);
        world.world.serve_tcp(&address);
    }
    let (dns4, dns6) = (format!("{GATEWAY_V4}:53"), format!("[{DNS_V6}]:53"));
    // The socket is connected: an answer from anybody else would not be heard.
    assert_eq!(guest.place.udp(&dns4, 40).unwrap(), ip(HOST4));
    assert_eq!(guest.place.udp(&dns6, 40).unwrap(), ip(HOST6));
    assert_eq!(guest.place.tcp(&dns4).unwrap(), ip(HOST4));
    assert_eq!(guest.place.tcp(&dns6).unwrap(), ip(HOST6));
    let told = world.with(|network| network.guest());
    assert_eq!(told.dns, [IpAddr::V4(GATEWAY_V4), IpAddr::V6(DNS_V6)]);
    assert_eq!(told.search, ["example"]);
}

fn publish(world: &World, slot: u32, mappings: &[&str]) -> Result<(), String> {
    let mappings: Vec<PortMapping> = mappings.iter().map(|text| text.parse().unwrap()).collect();
    world.with(move |network| network.publish(slot, &mappings).map_err(|error| error.to_string()))
}

#[test]
fn published_ports_lead_to_their_guest() {
    let world = World::new();
    let guest = world.guest(3);
    for address in ["0.0.0.0:80", "[::]:81"] {
        guest.place.serve_tcp(address);
        guest.place.serve_udp(address);
    }
    publish(&world, 3, &["8080:80", "8080:80/udp", "8081:81", "127.0.0.1:9000:80"]).unwrap();
    // From outside the guest sees who asks; from the host itself it sees the host's end of the link.
    assert_eq!(world.world.tcp("192.0.2.1:8080").unwrap(), ip(WORLD4));
    assert_eq!(world.world.udp("192.0.2.1:8080", 100).unwrap(), ip(WORLD4));
    assert_eq!(world.world.tcp("[2001:db8::1]:8081").unwrap(), ip(WORLD6));
    let near = IpAddr::V4(world.with(|network| network.ranges().host_v4()));
    let near6 = IpAddr::V6(world.with(|network| network.ranges().host_v6()));
    assert_eq!(world.host.tcp("127.0.0.1:8080").unwrap(), near);
    assert_eq!(world.host.tcp("192.0.2.1:8080").unwrap(), near);
    assert_eq!(world.host.tcp("127.0.0.1:9000").unwrap(), near);
    assert_eq!(world.host.tcp("[2001:db8::1]:8081").unwrap(), near6);
    assert!(
        world.world.is_cut_off("192.0.2.1:9000"),
        "that one is for 127.0.0.1 only"
    );
    // Again is no error; taking back takes all of it.
    publish(&world, 3, &["8080:80"]).unwrap();
    world.with(|network| network.unpublish(3).unwrap());
    assert!(world.world.is_cut_off("192.0.2.1:8080"));
    assert!(world.host.is_cut_off("127.0.0.1:9000"));
    world.with(|network| network.unpublish(3).unwrap());
}

#[test]
fn a_port_that_is_taken_is_told_and_nothing_is_published() {
    let world = World::new();
    publish(&world, 1, &["8080:80"]).unwrap();
    let error = publish(&world, 2, &["8082:80", "192.0.2.1:8080:80"]).unwrap_err();
    assert!(
        error.contains("192.0.2.1:8080/tcp is published by another sandbox"),
        "{error}"
    );
    world.host.serve_tcp("192.0.2.1:8083");
    let error = publish(&world, 2, &["8082:80", "8083:80"]).unwrap_err();
    assert!(error.contains("8083/tcp is taken"), "{error}");
    let error = publish(&world, 2, &["198.51.100.1:8084:80"]).unwrap_err();
    assert!(error.contains("198.51.100.1 is no address of this host"), "{error}");
    let slots = world.with(|network| network.slots().unwrap());
    assert_eq!(slots.len(), 1, "{slots:?}");
    publish(&world, 2, &["8080:80/udp"]).unwrap();
}

/// What a UDP socket hears when nobody listens at the other end.
fn refused(place: &super::world::Place, address: &str) -> Option<i32> {
    let address: std::net::SocketAddr = address.parse().unwrap();
    place.run(move || {
        let any = if address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let socket = std::net::UdpSocket::bind(any).unwrap();
        socket.set_read_timeout(Some(super::world::PATIENCE)).unwrap();
        socket.connect(address).unwrap();
        socket.send(b"?").unwrap();
        socket.recv(&mut [0; 16]).unwrap_err().raw_os_error()
    })
}

#[test]
fn errors_about_a_packet_reach_who_sent_it() {
    let world = World::new();
    let guest = world.guest(700);
    for nobody in ["192.0.2.2:9", "[2001:db8::2]:9"] {
        assert_eq!(refused(&guest.place, nobody), Some(libc::ECONNREFUSED), "{nobody}");
    }
    publish(&world, 700, &["8080:9/udp"]).unwrap();
    for nobody in ["192.0.2.1:8080", "[2001:db8::1]:8080"] {
        assert_eq!(refused(&world.world, nobody), Some(libc::ECONNREFUSED), "{nobody}");
    }
}
