//! The device against the conformance kit, and its packets against a real TAP. Needs root, for the TAPs.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use ::device::{DeviceContext, DeviceModule, FdTable};
use observe::Registry;
use virtio::VirtioDevice;
use virtio::conformance::driver::{Driver, PATIENCE, Pushed};
use virtio::conformance::{Request, Subject, run};
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_MQ, VIRTIO_NET_F_MRG_RXBUF,
};
use vmm_api::devices::{MacAddress, NetConfig, NetLimits, RateLimit};
use vmm_api::{DeviceSpec, FdRef};

use crate::MODULE;
use crate::config::HEADER;
use crate::device::NetState;
use crate::testing::{FarSide, tap};

const RECEIVE: u16 = 0;
const TRANSMIT: u16 = 1;
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];

fn config(pairs: usize) -> NetConfig {
    NetConfig {
        taps: (0..pairs).map(|index| FdRef(u32::try_from(index).unwrap())).collect(),
        mac: MacAddress(MAC),
        mtu: 1500,
        limits: NetLimits::default(),
    }
}

fn create(config: &NetConfig, fds: Vec<OwnedFd>, registry: &Registry) -> Result<Box<dyn VirtioDevice>, String> {
    let spec = DeviceSpec::new("net", config).unwrap();
    let context = DeviceContext {
        id: "net",
        metrics: registry,
        no_space: &::device::SpaceAlarm::new().unwrap(),
    };
    let made = MODULE.create(&spec, &mut FdTable::new(fds), &context);
    made.map_err(|error| error.to_string())
}

/// A device, its driver, and what lies behind its TAP.
struct Link {
    driver: Driver,
    far: FarSide,
    registry: Registry,
}

impl Link {
    fn new(pairs: usize) -> Self {
        Self::with(&config(pairs))
    }

    fn with(config: &NetConfig) -> Self {
        let registry = Registry::new();
        let (fds, far) = tap(config.taps.len()).unwrap();
        let driver = Driver::new(create(config, fds, &registry).unwrap()).with_queue_size(256);
        Self { driver, far, registry }
    }

    fn send(&mut self, frame: &[u8]) {
        self.driver.push(TRANSMIT, &[&[0; HEADER], frame], &[]);
        self.driver.kick(TRANSMIT);
        assert_eq!(self.driver.wait_used(TRANSMIT).unwrap().written, 0);
    }

    fn offer(&mut self, count: usize, bytes: usize) -> Vec<Pushed> {
        let pushed = (0..count).map(|_| self.driver.push(RECEIVE, &[], &[bytes])).collect();
        self.driver.kick(RECEIVE);
        pushed
    }

    /// The packet in the next `count` used chains: the header's number of buffers, and the frame.
    fn received(&mut self, offered: &[Pushed]) -> (u16, Vec<u8>) {
        let mut bytes = Vec::new();
        let mut count = 1;
        let mut at = 0;
        while at < count {
            let used = self.driver.wait_used(RECEIVE).expect("a packet");
            let pushed = offered.iter().find(|pushed| pushed.head == used.head).unwrap();
            let buffer = self.driver.bytes(pushed.writable[0]);
            bytes.extend(&buffer[..used.written as usize]);
            if at == 0 {
                count = u16::from_le_bytes([bytes[10], bytes[11]]);
            }
            at += 1;
        }
        (count, bytes.split_off(HEADER))
    }

    fn metric(&self, name: &str, direction: &str) -> u64 {
        let samples = self.registry.samples();
        let found = samples.iter().find(|sample| {
            let labels = &sample.labels;
            sample.name == name && (direction.is_empty() || labels.iter().any(|(_, value)| value == direction))
        });
        found.unwrap_or_else(|| panic!("no metric {name}")).value
    }
}

/// An Ethernet frame of `length` bytes that no protocol knows (local experimental type of IEEE 802).
fn frame(length: usize, seed: u8) -> Vec<u8> {
    let mut frame = [[0xff; 6], MAC].concat();
    frame.extend([0x88, 0xb5]);
    frame.extend((0_u8..=255).cycle().map(|byte| byte ^ seed).take(length - 14));
    frame
}

#[test]
fn it_conforms() {
    for pairs in [1, 2] {
        let make = move || create(&config(pairs), tap(pairs).unwrap().0, &Registry::new()).unwrap();
        let mut readable = vec![0; HEADER];
        readable.extend(frame(64, 0));
        let request = Request {
            queue: TRANSMIT,
            readable,
            writable: 0,
        };
        run(&Subject::new(make, request)).unwrap();
    }
}

#[test]
fn its_configuration_space() {
    let link = Link::new(3);
    let mac: Vec<u8> = (0..6)
        .map(|at| u8::try_from(link.driver.config(at, 1)).unwrap())
        .collect();
    assert_eq!(mac, MAC);
    assert_eq!(link.driver.config(8, 2), 3, "max_virtqueue_pairs");
    assert_eq!(link.driver.config(10, 2), 1500, "mtu");
}

#[test]
fn packets_go_out_whole() {
    let mut link = Link::new(1);
    link.driver.start();
    for (seed, length) in [(1, 14), (2, 60), (3, 1514)] {
        let frame = frame(length, seed);
        link.send(&frame);
        assert_eq!(link.far.receive().unwrap(), frame);
    }
    assert_eq!(link.metric("net_packets_total", "transmit"), 3);
    assert_eq!(link.metric("net_bytes_total", "transmit"), 14 + 60 + 1514);
}

#[test]
fn packets_come_in_whole() {
    let mut link = Link::new(1);
    link.driver.start();
    let offered = link.offer(100, 1536);
    for (seed, length) in [(1, 60), (2, 1514)] {
        let frame = frame(length, seed);
        link.far.send(&frame).unwrap();
        assert_eq!(link.received(&offered), (1, frame));
    }
    assert_eq!(link.metric("net_packets_total", "receive"), 2);
    assert_eq!(link.metric("net_bytes_total", "receive"), 60 + 1514);
}

#[test]
fn a_driver_that_sleeps_is_woken_for_each_direction() {
    let mut link = Link::new(1);
    link.driver.start();
    let offered = link.offer(64, 1536);
    for count in 1..4 {
        link.far.send(&frame(64, 1)).unwrap();
        link.driver.push(TRANSMIT, &[&[0; HEADER], &frame(64, 2)], &[]);
        link.driver.kick(TRANSMIT);
        // A driver that looked by itself would not want to be woken.
        for queue in [RECEIVE, TRANSMIT] {
            let woken = link.driver.wait_until(|driver| driver.interrupts(queue) >= count);
            assert!(woken, "queue {queue} has {} interrupts", link.driver.interrupts(queue));
        }
        link.received(&offered);
        link.driver.wait_used(TRANSMIT).unwrap();
    }
}

#[test]
fn a_packet_in_several_buffers_is_told_as_one() {
    let mut link = Link::new(1);
    link.driver.start();
    let offered = link.offer(200, 400);
    for seed in 0..3 {
        let frame = frame(1514, seed);
        link.far.send(&frame).unwrap();
        assert_eq!(link.received(&offered), (4, frame), "1526 bytes in buffers of 400");
    }
}

#[test]
fn a_packet_waits_for_buffers_and_is_lost_only_if_it_never_fits() {
    let mut link = Link::new(1);
    link.driver.start();
    let frame = frame(1514, 9);
    link.far.send(&frame).unwrap();
    let mut offered = link.offer(1, 600);
    assert_eq!(link.driver.poll_used(RECEIVE), None);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(link.driver.poll_used(RECEIVE), None, "it does not fit yet");
    offered.extend(link.offer(2, 600));
    assert_eq!(link.received(&offered), (3, frame.clone()));
    // Without merging one buffer is all that there is for a packet.
    let mask = !(1 << VIRTIO_NET_F_MRG_RXBUF | 1 << VIRTIO_NET_F_GUEST_TSO4 | 1 << VIRTIO_NET_F_GUEST_TSO6);
    link.driver.start_with(mask);
    let offered = link.offer(4, 1200);
    link.far.send(&frame).unwrap();
    let small = self::frame(64, 1);
    link.far.send(&small).unwrap();
    assert_eq!(link.received(&offered), (1, small));
    assert_eq!(link.metric("net_dropped_packets_total", "receive"), 1);
}

#[test]
fn buffers_that_were_taken_are_there_again_after_a_pause() {
    let mut link = Link::new(1);
    link.driver.start();
    let offered = link.offer(100, 1536);
    link.far.send(&frame(64, 1)).unwrap();
    link.received(&offered);
    link.driver.device().pause();
    link.driver.device().resume().unwrap();
    for seed in 2..60 {
        let frame = frame(200, seed);
        link.far.send(&frame).unwrap();
        assert_eq!(link.received(&offered), (1, frame));
    }
}

#[test]
fn useless_buffers_among_good_ones_are_neither_lost_nor_used_twice() {
    let mut link = Link::new(1);
    link.driver.start();
    let mut offered = link.offer(2, 1536);
    offered.extend(link.offer(1, 4));
    offered.extend(link.offer(60, 1536));
    let mut seen = Vec::new();
    for round in 0..3 {
        link.far.send(&frame(64, round)).unwrap();
        let used = link.driver.wait_used(RECEIVE).unwrap();
        seen.push(used.head);
        link.driver.device().pause();
        link.driver.device().resume().unwrap();
    }
    let heads: Vec<u16> = offered.iter().map(|pushed| pushed.head).collect();
    assert_eq!(seen, heads[..3]);
}

#[test]
fn what_is_no_packet_is_given_back_and_does_not_stop_others() {
    let mut link = Link::new(1);
    link.driver.start();
    let huge = vec![0; 70_000];
    for nonsense in [&[0_u8; 5][..], &[0; 12], &[0xff; 20], &huge] {
        link.driver.push(TRANSMIT, &[nonsense], &[]);
        link.driver.kick(TRANSMIT);
        assert!(link.driver.wait_used(TRANSMIT).is_some(), "{} bytes", nonsense.len());
    }
    let frame = frame(64, 5);
    link.send(&frame);
    assert_eq!(link.far.receive().unwrap(), frame);
    assert_eq!(link.metric("net_refused_chains_total", ""), 3);
    assert_eq!(link.metric("net_dropped_packets_total", "transmit"), 1);
}

#[test]
fn segmentation_is_the_kernels() {
    let mut link = Link::new(1);
    link.driver.start();
    // VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_TCPV4: the checksum at 34 + 16, segments of 1000.
    let header = [1, 1, 54, 0, 0xe8, 3, 34, 0, 16, 0, 0, 0];
    let frame = tcp(4000);
    link.driver.push(TRANSMIT, &[&header, &frame], &[]);
    link.driver.kick(TRANSMIT);
    assert!(link.driver.wait_used(TRANSMIT).is_some());
    let seen = link.far.receive().unwrap();
    assert_eq!(seen.len(), frame.len(), "a packet socket is given it unsegmented");
    assert_eq!(link.metric("net_dropped_packets_total", "transmit"), 0);
}

/// An IPv4 datagram from a port of its own.
fn udp(port: u16) -> Vec<u8> {
    let mut frame = [MAC, [0xff; 6]].concat();
    frame.extend([
        0x08, 0x00, 0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2,
    ]);
    frame.extend((1000 + 7 * port).to_be_bytes());
    frame.extend([0, 53, 0, 8, 0, 0]);
    frame
}

/// An IPv4 TCP segment with so many bytes of data.
fn tcp(data: usize) -> Vec<u8> {
    let mut frame = [[0xff; 6], MAC].concat();
    frame.extend([0x08, 0x00]);
    let length = u16::try_from(40 + data).unwrap().to_be_bytes();
    frame.extend([
        0x45, 0, length[0], length[1], 0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 2, 10, 0, 0, 1,
    ]);
    frame.extend([0, 80, 0, 80, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, 0x10, 0xff, 0xff, 0, 0, 0, 0]);
    frame.resize(frame.len() + data, 7);
    frame
}

fn command(driver: &mut Driver, queue: u16, bytes: &[u8]) -> u8 {
    let pushed = driver.push(queue, &[bytes], &[1]);
    driver.kick(queue);
    assert_eq!(driver.wait_used(queue).unwrap().written, 1);
    driver.bytes(pushed.writable[0])[0]
}

/// How many packets of 40 flows come by the receive queues of two pairs, each of which is given 64 buffers.
fn spread(driver: &mut Driver, far: &FarSide) -> [u32; 2] {
    let queues = [RECEIVE, 2];
    for queue in queues {
        for _ in 0..64 {
            driver.push(queue, &[], &[1536]);
        }
        driver.kick(queue);
    }
    for port in 0..40 {
        far.send(&udp(port)).unwrap();
    }
    let began = Instant::now();
    let mut got = [0, 0];
    while got[0] + got[1] < 40 {
        for (queue, count) in queues.into_iter().zip(&mut got) {
            *count += u32::from(driver.poll_used(queue).is_some());
        }
        assert!(began.elapsed() < PATIENCE, "not all packets came: {got:?}");
    }
    got
}

#[test]
fn the_driver_says_how_many_pairs_it_uses() {
    let mut link = Link::new(2);
    link.driver.start();
    let control = 4;
    assert_eq!(command(&mut link.driver, control, &[4, 0, 2, 0]), 0);
    for refused in [[4, 0, 0, 0], [4, 0, 3, 0], [4, 1, 1, 0], [0, 0, 1, 0], [0xff; 4]] {
        assert_eq!(command(&mut link.driver, control, &refused), 1, "{refused:?}");
    }
    assert_eq!(command(&mut link.driver, control, &[4, 0]), 1, "too short");
    assert_eq!(link.metric("net_refused_commands_total", ""), 6);
    // Both transmit queues lead out, and still do after a pause, of which the driver does not know.
    link.driver.device().pause();
    link.driver.device().resume().unwrap();
    for queue in [1, 3] {
        let frame = frame(64, u8::try_from(queue).unwrap());
        link.driver.push(queue, &[&[0; HEADER], &frame], &[]);
        link.driver.kick(queue);
        assert_eq!(link.far.receive().unwrap(), frame);
    }
    // Packets of many flows come by both receive queues.
    let offered = [RECEIVE, 2].map(|queue| {
        let pushed: Vec<_> = (0..64).map(|_| link.driver.push(queue, &[], &[1536])).collect();
        link.driver.kick(queue);
        pushed
    });
    for port in 0..40 {
        link.far.send(&udp(port)).unwrap();
    }
    let mut got = [0, 0];
    for _ in 0..40 {
        let began = Instant::now();
        let mut poll = || {
            let mut queues = [RECEIVE, 2].into_iter().zip(&mut got);
            queues.any(|(queue, count)| link.driver.poll_used(queue).map(|_| *count += 1).is_some())
        };
        while !poll() {
            assert!(began.elapsed() < PATIENCE, "not all packets came");
        }
    }
    assert!(got[0] > 0 && got[1] > 0, "{got:?}");
    // One pair only: everything comes by its queue, whatever the flow.
    assert_eq!(command(&mut link.driver, control, &[4, 0, 1, 0]), 0);
    let mut offered = offered[0].clone();
    offered.extend(link.offer(64, 1536));
    for seed in 0..20 {
        let frame = frame(64, seed);
        link.far.send(&frame).unwrap();
        assert_eq!(link.received(&offered), (1, frame));
    }
}

#[test]
fn a_driver_that_does_not_know_of_pairs_has_one() {
    let mut link = Link::new(2);
    link.driver.negotiate(!(1 << VIRTIO_NET_F_MQ));
    link.driver.set_up_queues();
    link.driver.go();
    assert_eq!(
        command(&mut link.driver, 2, &[0, 0, 1]),
        1,
        "its control queue is the third"
    );
    let offered = link.offer(100, 1536);
    for seed in 0..20 {
        let frame = frame(64, seed);
        link.far.send(&frame).unwrap();
        assert_eq!(link.received(&offered), (1, frame));
    }
}

/// Of 40 000 bytes 10 000 pass at once, the others take 0.3 s: never less, and more only on a machine that is busy just
/// then.
#[track_caller]
fn holds(mut pass: impl FnMut()) {
    let mut took = Duration::ZERO;
    for _ in 0..10 {
        let began = Instant::now();
        pass();
        took = began.elapsed();
        assert!(took >= Duration::from_millis(250), "{took:?}");
        if took < Duration::from_secs(1) {
            return;
        }
    }
    panic!("{took:?}, and the times before were no better");
}

#[test]
fn rates_hold_in_both_directions() {
    let rate = RateLimit {
        bytes_per_second: Some(100_000),
        packets_per_second: None,
    };
    let mut link = Link::with(&NetConfig {
        limits: NetLimits {
            receive: rate.clone(),
            transmit: rate,
        },
        ..config(1)
    });
    link.driver.start();
    let frame = frame(1000, 3);
    holds(|| {
        for _ in 0..40 {
            link.send(&frame);
        }
    });
    let mut offered = Vec::new();
    holds(|| {
        offered.extend(link.offer(40, 1536));
        for _ in 0..40 {
            link.far.send(&frame).unwrap();
        }
        for _ in 0..40 {
            link.received(&offered);
        }
    });
    assert!(link.metric("net_throttled_total", "") > 0);
}

#[test]
fn bad_configurations_are_told_with_the_next_step() {
    let make = |change: fn(&mut NetConfig)| {
        let mut config = config(1);
        change(&mut config);
        create(&config, tap(1).unwrap().0, &Registry::new()).err().unwrap()
    };
    assert!(make(|c| c.taps.clear()).contains("1 to 64"));
    assert!(make(|c| c.mac.0[0] = 3).contains("clear the lowest bit"));
    assert!(make(|c| c.mtu = 500).contains("1280 to 65535"));
    assert!(make(|c| c.limits.receive.packets_per_second = Some(0)).contains("leave it out"));
    assert!(make(|c| c.taps = vec![FdRef(7)]).contains('7'));
    let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let error = create(&config(1), vec![file], &Registry::new()).err().unwrap();
    assert!(error.contains("not that of a TAP"), "{error}");
}

#[test]
fn the_number_of_pairs_survives_being_saved() {
    let mut link = Link::new(2);
    link.driver.start();
    assert_eq!(command(&mut link.driver, 4, &[4, 0, 2, 0]), 0);
    let (fds, far) = tap(2).unwrap();
    let registry = Registry::new();
    let other = create(&config(2), fds, &registry).unwrap();
    link.driver.migrate(other).unwrap();
    (link.far, link.registry) = (far, registry);
    // Both pairs are at work, without having been asked for again.
    let got = spread(&mut link.driver, &link.far);
    assert!(got[0] > 0 && got[1] > 0, "{got:?}");
    // A device with fewer TAPs is another one.
    let (fds, _far) = tap(1).unwrap();
    let error = link.driver.migrate(create(&config(1), fds, &Registry::new()).unwrap());
    // Found by its queues before its configuration space is looked at.
    let error = error.unwrap_err().to_string();
    assert!(error.contains("features or queues"), "{error}");
}

#[test]
fn taps_that_another_device_has_had_are_taken_as_they_are() {
    let (fds, far) = tap(2).unwrap();
    let copies = fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
    let registry = Registry::new();
    let mut driver = Driver::new(create(&config(2), fds, &Registry::new()).unwrap()).with_queue_size(256);
    driver.start();
    // It lets go of the second.
    assert_eq!(command(&mut driver, 4, &[4, 0, 1, 0]), 0);
    let mut driver = Driver::new(create(&config(2), copies, &registry).unwrap()).with_queue_size(256);
    driver.start();
    assert_eq!(command(&mut driver, 4, &[4, 0, 2, 0]), 0);
    let got = spread(&mut driver, &far);
    assert!(got[0] > 0 && got[1] > 0, "{got:?}");
}

#[test]
fn the_state_is_what_the_golden_file_says() {
    state::golden::check(env!("CARGO_MANIFEST_DIR"), &NetState { pairs: 2 });
}
