//! What guests cannot reach, whatever they say they are.

use std::net::IpAddr;

use super::world::{HOST4, HOST6, METADATA, World};

#[test]
fn guests_reach_neither_each_other_nor_the_host_nor_metadata() {
    let world = World::new();
    let (one, two) = (world.guest(0), world.guest(1));
    for address in ["0.0.0.0:7000", "[::]:7001"] {
        two.place.serve_tcp(address);
        two.place.serve_udp(address);
        world.host.serve_tcp(address);
        world.host.serve_udp(address);
        world.world.serve_tcp(address);
    }
    let ranges = world.with(|network| *network.ranges());
    let (slot4, slot6) = (ranges.slot_v4(1).unwrap(), ranges.slot_v6(1).unwrap());
    // They are there, for those who may.
    assert!(world.host.reaches(&format!("{slot4}:7000")));
    assert!(world.host.reaches(&format!("[{slot6}]:7001")));
    assert!(world.host.reaches(&format!("{METADATA}:7000")));
    assert!(one.place.reaches("192.0.2.2:7000"));
    let mut forbidden = vec![format!("{slot4}:7000"), format!("[{slot6}]:7001")];
    for address in [
        HOST4.to_owned(),
        ranges.host_v4().to_string(),
        ranges.namespace_v4().to_string(),
        METADATA.to_owned(),
    ] {
        forbidden.push(format!("{address}:7000"));
    }
    for address in [
        HOST6.to_owned(),
        ranges.host_v6().to_string(),
        ranges.namespace_v6().to_string(),
    ] {
        forbidden.push(format!("[{address}]:7001"));
    }
    for address in &forbidden {
        assert!(one.place.is_cut_off(address), "{address} is reached by TCP");
        let from = if address.starts_with('[') { "::" } else { "0.0.0.0" };
        assert!(!one.place.hears(from, address), "{address} is reached by UDP");
    }
    // Nor by way of a published port.
    world.with(|network| network.publish(1, &["8080:7000".parse().unwrap()]).unwrap());
    assert!(world.world.reaches("192.0.2.1:8080"));
    assert!(one.place.is_cut_off("192.0.2.1:8080"));
    // Multicast and broadcast go nowhere.
    for address in ["224.0.0.1:7000", "255.255.255.255:7000"] {
        assert!(!one.place.hears("0.0.0.0", address), "{address}");
    }
}

#[test]
fn a_guest_is_who_its_tap_says() {
    let world = World::new();
    world.world.serve_udp("192.0.2.2:7000");
    world.world.serve_udp("[2001:db8::2]:7000");
    let (one, two) = (world.guest(0), world.guest(1));
    let ranges = world.with(|network| *network.ranges());
    // As itself it is heard; under another name it is still known as itself, so the answer does not come back to the name.
    assert_eq!(
        one.place.udp("192.0.2.2:7000", 10).unwrap(),
        HOST4.parse::<IpAddr>().unwrap()
    );
    let (slot4, slot6) = (ranges.slot_v4(1).unwrap(), ranges.slot_v6(1).unwrap());
    one.pretend("198.51.100.1");
    one.pretend(Box::leak(slot4.to_string().into_boxed_str()));
    one.pretend(Box::leak(slot6.to_string().into_boxed_str()));
    for name in ["198.51.100.1".to_owned(), slot4.to_string()] {
        assert!(!one.place.hears(&name, "192.0.2.2:7000"), "{name}");
    }
    assert!(!one.place.hears(&slot6.to_string(), "[2001:db8::2]:7000"));
    let seen = connections(&world);
    let own = ranges.slot_v4(0).unwrap().to_string();
    assert!(seen.contains(&format!("src={own} ")), "{seen}");
    assert!(!seen.contains("198.51.100.1"), "{seen}");
    assert!(!seen.contains(&format!("src={slot4} ")), "{seen}");
    assert!(!seen.contains(&slot6.to_string()), "{seen}");
    drop(two);
}

/// The connections that the host tracks; the sources, as text.
fn connections(world: &World) -> String {
    world.host.run(|| {
        crate::conntrack::sources()
            .unwrap()
            .into_iter()
            .map(|address| format!("src={address} \n"))
            .collect()
    })
}

#[test]
fn a_tap_that_the_table_does_not_know_carries_nothing() {
    let world = World::new();
    world.world.serve_udp("192.0.2.2:7000");
    let guest = world.guest(2);
    assert!(guest.place.udp("192.0.2.2:7000", 10).is_ok());
    world.with(|network| network.forget_for_test(2));
    assert!(!guest.place.hears("0.0.0.0", "192.0.2.2:7000"));
    world.with(|network| network.prepare([2]).unwrap());
    assert!(guest.place.udp("192.0.2.2:7000", 10).is_ok());
}

#[test]
fn a_slots_connections_are_forgotten_each_time_it_is_given_back() {
    let world = World::new();
    world.world.serve_udp("192.0.2.2:7000");
    world.world.serve_udp("[2001:db8::2]:7000");
    let ranges = world.with(|network| *network.ranges());
    let (v4, v6) = (ranges.slot_v4(4).unwrap(), ranges.slot_v6(4).unwrap());
    let own = [format!("src={v4} "), format!("src={v6} ")];
    let other = world.guest(5);
    other.place.udp("192.0.2.2:7000", 10).unwrap();
    for _ in 0..2 {
        let guest = world.guest(4);
        guest.place.udp("192.0.2.2:7000", 10).unwrap();
        guest.place.udp("[2001:db8::2]:7000", 10).unwrap();
        let seen = connections(&world);
        assert!(own.iter().all(|own| seen.contains(own)), "{seen}");
        drop(guest);
        // The second finds nothing to do.
        world.with(|network| network.release(4).unwrap());
        world.with(|network| network.release(4).unwrap());
        let seen = connections(&world);
        assert!(!own.iter().any(|own| seen.contains(own)), "{seen}");
        let others = format!("src={} ", ranges.slot_v4(5).unwrap());
        assert!(seen.contains(&others), "another slot's: {seen}");
    }
}
