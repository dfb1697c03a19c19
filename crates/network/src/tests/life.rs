//! Opening, attaching, what is left by a process that was killed, and the end.

use std::net::{IpAddr, UdpSocket};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::world::{Guest, PATIENCE, World};
use crate::{Egresses, Error, Network, SlotState};
use netlink::Links;

#[test]
fn a_network_that_is_opened_again_has_everything() {
    let mut world = World::new();
    world.world.serve_tcp("192.0.2.2:7000");
    let guest = world.guest(4);
    guest.place.serve_tcp("0.0.0.0:80");
    world.with(|network| network.publish(4, &["8080:80".parse().unwrap()]).unwrap());
    world.with(|network| network.prepare([6, 7]).unwrap());
    let ranges = world.with(|network| *network.ranges());
    // As after kill -9: nothing was undone.
    world.open();
    assert_eq!(world.with(|network| *network.ranges()), ranges);
    let slots = world.with(|network| network.slots().unwrap());
    let state = |slot, in_use, published: &[&str]| SlotState {
        slot,
        in_use,
        published: published.iter().map(|text| text.parse().unwrap()).collect(),
    };
    assert_eq!(
        slots,
        [state(4, true, &["8080:80"]), state(6, false, &[]), state(7, false, &[])]
    );
    guest.place.tcp("192.0.2.2:7000").unwrap();
    world.world.tcp("192.0.2.1:8080").unwrap();
}

#[test]
fn what_is_missing_is_made_again() {
    let mut world = World::new();
    world.world.serve_tcp("192.0.2.2:7000");
    world.world.serve_tcp("[2001:db8::2]:7000");
    let guest = world.guest(4);
    let link = crate::host::link_name(&world.instance);
    let instance = world.instance.clone();
    world.host.run(move || {
        let links = Links::open().unwrap();
        links.remove(links.index(&link).unwrap()).unwrap();
        crate::rules::apply("a test", &format!("delete table inet {instance}")).unwrap();
    });
    assert!(guest.place.is_cut_off("192.0.2.2:7000"));
    world.open();
    guest.place.tcp("192.0.2.2:7000").unwrap();
    guest.place.tcp("[2001:db8::2]:7000").unwrap();
}

#[test]
fn tables_that_somebody_deletes_are_put_back_with_published_ports() {
    let world = World::new();
    world.world.serve_tcp("192.0.2.2:7000");
    let guest = world.guest(4);
    guest.place.serve_tcp("0.0.0.0:80");
    let ports: crate::Ports = [
        (4, vec!["8080:80".parse().unwrap()]),
        (5, vec!["8080:81".parse().unwrap()]),
    ]
    .into();
    let mapping = ports[&4].clone();
    world.with(move |network| network.publish(4, &mapping).unwrap());
    assert!(!world.with(|network| network.is_damaged().unwrap()));
    let flush = |network: &Network| {
        crate::rules::apply("a test", "flush ruleset").unwrap();
        network.flush_for_test();
        assert!(network.is_damaged().unwrap());
    };
    world.with(flush);
    assert!(world.world.is_cut_off("192.0.2.1:8080"));
    assert!(guest.place.is_cut_off("192.0.2.2:7000"));
    let (again, lost) = (ports.clone(), ports.clone());
    let egresses = Egresses::from([(4, base::Egress::default())]);
    world.with(move |network| network.restore(&again, &egresses).unwrap());
    assert!(!world.with(|network| network.is_damaged().unwrap()));
    guest.place.tcp("192.0.2.2:7000").unwrap();
    world.world.tcp("192.0.2.1:8080").unwrap();
    // As where it was lost while no daemon ran.
    world.with(|network| network.unpublish(4).unwrap());
    world.with(move |network| network.publish_again(&lost).unwrap());
    world.world.tcp("192.0.2.1:8080").unwrap();
    world.with(move |network| network.publish_again(&ports).unwrap());
}

#[test]
fn a_guest_has_so_many_connections_and_others_have_theirs() {
    const MOST: usize = 40;
    let mut world = World::new();
    world.connections = Some(u32::try_from(MOST).unwrap());
    world.open();
    world.world.serve_udp("192.0.2.2:7000");
    world.world.serve_udp("[2001:db8::2]:7000");
    let (greedy, other) = (world.guest(1), world.guest(2));
    for (any, to) in [("0.0.0.0:0", "192.0.2.2:7000"), ("[::]:0", "[2001:db8::2]:7000")] {
        let heard = greedy.place.run(move || {
            let sockets: Vec<UdpSocket> = (0..2 * MOST).map(|_| UdpSocket::bind(any).unwrap()).collect();
            for socket in &sockets {
                socket.set_read_timeout(Some(Duration::from_millis(400))).unwrap();
                socket.send_to(b"hello", to).unwrap();
            }
            sockets
                .iter()
                .filter(|socket| socket.recv(&mut [0; 64]).is_ok())
                .count()
        });
        // A host that is busy may lose some.
        assert!((MOST / 2..=MOST).contains(&heard), "{to}: {heard}");
        other.place.udp(to, 10).unwrap();
    }
    // What ends makes room.
    world.with(|network| network.release(1).unwrap());
    let next = world.guest(1);
    next.place.udp("192.0.2.2:7000", 10).unwrap();
}

#[test]
fn a_slot_that_is_in_use_is_not_given_twice() {
    let world = World::new();
    let first = world.with(|network| network.attach(9, 2).unwrap());
    assert_eq!(first.taps.len(), 2);
    let again = world.with(|network| network.attach(9, 1).map(drop));
    assert!(matches!(again, Err(Error::InUse(9))), "{again:?}");
    // Detaching does not ask who still has it.
    world.with(|network| network.detach(9).unwrap());
    let error = rustix::io::write(&first.taps[0], &[0; 64]).unwrap_err();
    assert_eq!(error, rustix::io::Errno::BADFD);
    assert!(world.with(|network| network.slots().unwrap()).is_empty());
    world.with(|network| network.attach(9, 1).map(drop).unwrap());
    // Nobody has it open any more: it is one of the pool.
    world.with(|network| network.release(9).unwrap());
    let slots = world.with(|network| network.slots().unwrap());
    assert_eq!(
        slots.iter().map(|state| (state.slot, state.in_use)).collect::<Vec<_>>(),
        [(9, false)]
    );
    for queues in [0, 65] {
        assert!(world.with(move |network| network.attach(1, queues).map(drop)).is_err());
    }
    let error = world.with(|network| network.attach(1 << 20, 1).map(drop)).unwrap_err();
    assert!(error.to_string().contains("beyond the last one"), "{error}");
}

#[test]
fn the_next_guest_of_a_slot_hears_nothing_of_the_last_ones() {
    let world = World::new();
    let far = world.world.run(|| {
        let socket = UdpSocket::bind("192.0.2.2:7000").unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket
    });
    let guest = world.guest(0);
    guest.place.run(|| {
        let socket = UdpSocket::bind("0.0.0.0:5555").unwrap();
        socket.send_to(b"hello", "192.0.2.2:7000").unwrap();
    });
    let (_, from) = far.recv_from(&mut [0; 16]).unwrap();
    drop(guest);
    world.with(|network| network.detach(0).unwrap());
    let next = Guest::new(world.with(|network| network.attach(0, 1).unwrap()));
    let socket = next.place.run(|| UdpSocket::bind("0.0.0.0:5555").unwrap());
    socket.set_read_timeout(Some(Duration::from_millis(400))).unwrap();
    far.send_to(b"for the one before", from).unwrap();
    assert!(socket.recv(&mut [0; 32]).is_err(), "the old connection goes on");
}

#[test]
fn a_host_has_room_for_many_networks() {
    let world = World::new();
    let mut others: Vec<Network> = Vec::new();
    for number in 0..6 {
        let mut config = world.config();
        config.instance.push_str(&format!("-{number}"));
        others.push(
            world
                .host
                .run(move || Network::open(&config, &Egresses::default()).unwrap()),
        );
    }
    let mut ranges: Vec<_> = others.iter().map(|network| network.ranges().v4.to_string()).collect();
    ranges.push(world.with(|network| network.ranges().v4.to_string()));
    ranges.sort();
    ranges.dedup();
    assert_eq!(ranges.len(), 7, "{ranges:?}");
    for other in others {
        world.host.run(move || other.teardown().unwrap());
    }
}

#[test]
fn two_networks_on_one_host_keep_apart() {
    let world = World::new();
    world.world.serve_tcp("192.0.2.2:7000");
    let mut config = world.config();
    config.instance.push_str("-b");
    let other = world
        .host
        .run(move || Network::open(&config, &Egresses::default()).unwrap());
    assert_ne!(other.ranges().v4, world.with(|network| network.ranges().v4));
    let there = other.ranges().slot_v4(0).unwrap();
    let (attachment, other) = world.host.run(move || (other.attach(0, 1).unwrap(), other));
    let (one, two) = (world.guest(0), Guest::new(attachment));
    two.place.serve_tcp("0.0.0.0:80");
    two.place.tcp("192.0.2.2:7000").unwrap();
    assert!(one.place.is_cut_off(&format!("{there}:80")));
    drop(two);
    world.host.run(move || other.teardown()).unwrap();
    one.place.tcp("192.0.2.2:7000").unwrap();
}

#[test]
fn the_end_leaves_nothing() {
    let mut world = World::new();
    let before = ["table inet", "v-"];
    let guest = world.guest(0);
    world.with(|network| network.publish(0, &["8080:80".parse().unwrap()]).unwrap());
    let name = Path::new("/run/netns").join(&world.instance);
    assert!(name.exists());
    world.teardown();
    assert!(!name.exists());
    let rest = world.host.run(|| {
        let output = Command::new("nft").args(["list", "ruleset"]).output().unwrap();
        let links = Links::open().unwrap().list().unwrap();
        let names: Vec<String> = links.into_iter().map(|link| link.name).collect();
        format!("{} {}", String::from_utf8_lossy(&output.stdout), names.join(" "))
    });
    for word in before {
        assert!(!rest.contains(word), "{rest}");
    }
    drop(guest);
}

#[test]
fn a_range_that_the_host_uses_is_not_taken() {
    let mut world = World::new();
    let used = world.with(|network| network.ranges().v4);
    world.teardown();
    let first = used.to_string();
    world.host.run(|| {
        let links = Links::open().unwrap();
        let to: IpAddr = "10.88.77.0".parse().unwrap();
        links.route((to, 24), links.index("eth0").unwrap(), None).unwrap();
    });
    assert_eq!(first, "10.88.0.0/16");
    world.open();
    assert_eq!(world.with(|network| network.ranges().v4.to_string()), "10.216.0.0/16");
}

#[test]
fn packets_are_as_large_as_the_hosts_own() {
    let mut world = World::new();
    assert_eq!(world.with(|network| network.guest().mtu), 1500);
    world.host.run(|| {
        let links = Links::open().unwrap();
        links.up(links.index("eth0").unwrap(), Some(1400), None).unwrap();
    });
    world.open();
    world.world.serve_tcp("192.0.2.2:7000");
    let guest = Guest::new(world.with(|network| {
        let attachment = network.attach(0, 1).unwrap();
        assert_eq!((attachment.mtu, attachment.guest.mtu), (1400, 1400));
        attachment
    }));
    guest.place.tcp("192.0.2.2:7000").unwrap();
}

#[test]
fn a_tap_is_made_anew_where_it_has_too_few_queues() {
    let world = World::new();
    world.world.serve_tcp("192.0.2.2:7000");
    world.with(|network| network.prepare([3]).unwrap());
    let index = || world.with(|network| network.tap_for_test(3).index);
    let attached = |queues| world.with(move |network| network.attach(3, queues).unwrap().taps.len());
    let first = index();
    assert_eq!((attached(1), index()), (1, first));
    assert_eq!(attached(2), 2);
    let second = index();
    assert_ne!(second, first);
    for queues in [1, 1, 4, 2] {
        assert_eq!((attached(queues), index()), (queues, second));
    }
    // The next ones are like the last one.
    world.with(|network| network.prepare([4]).unwrap());
    let ahead = world.with(|network| network.tap_for_test(4).index);
    world.with(|network| drop(network.attach(4, 2).unwrap()));
    assert_eq!(world.with(|network| network.tap_for_test(4).index), ahead);
    // Ahead for whoever comes next: it stays what it is.
    world.with(|network| {
        network.forget_for_test(3);
        network.prepare([3]).unwrap();
    });
    // And has all that one has that was made ahead.
    world.guest(3).place.tcp("192.0.2.2:7000").unwrap();
    assert_eq!(world.with(|network| network.tap_for_test(3).queueing), "noqueue");
}

#[test]
fn packets_wait_in_a_taps_descriptors_alone() {
    let mut world = World::new();
    world.with(|network| network.prepare([5]).unwrap());
    let guest = world.guest(5);
    let queueing = |world: &World| world.with(|network| network.tap_for_test(5).queueing);
    assert_eq!(queueing(&world), "noqueue");
    // Made sure of again, as by a daemon that finds the TAP.
    world.open();
    world.with(|network| {
        network.forget_for_test(5);
        network.prepare([5]).unwrap();
    });
    assert_eq!(queueing(&world), "noqueue");
    world.world.serve_tcp("192.0.2.2:7000");
    guest.place.tcp("192.0.2.2:7000").unwrap();
}
