//! The guest's half of the tests: a vsock driver at packet level, over the conformance kit's driver and transport.
//!
//! Written against the specification (virtio 1.2, 5.10), not against the device's code. It can misbehave.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use device::{DeviceContext, DeviceModule, FdTable};
use observe::Registry;
use virtio::VirtioDevice;
use virtio::conformance::driver::{Driver, Pushed};
use vm_memory::{Bytes, GuestAddress};
use vmm_api::devices::{VsockConfig, VsockSink};
use vmm_api::{DeviceSpec, FdRef};
use wire::packet::PacketSocket;

pub(crate) const CID: u64 = 3;
pub(crate) const HOST: u64 = 2;
pub(crate) const REQUEST: u16 = 1;
pub(crate) const RESPONSE: u16 = 2;
pub(crate) const RST: u16 = 3;
pub(crate) const SHUTDOWN: u16 = 4;
pub(crate) const RW: u16 = 5;
pub(crate) const CREDIT_UPDATE: u16 = 6;
pub(crate) const CREDIT_REQUEST: u16 = 7;

const RX: u16 = 0;
const TX: u16 = 1;
const BUFFER: usize = 4096;
const LIMIT: Duration = Duration::from_secs(90);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Packet {
    pub(crate) src_cid: u64,
    pub(crate) dst_cid: u64,
    pub(crate) src_port: u32,
    pub(crate) dst_port: u32,
    pub(crate) len: u32,
    pub(crate) kind: u16,
    pub(crate) op: u16,
    pub(crate) flags: u32,
    pub(crate) buf_alloc: u32,
    pub(crate) fwd_cnt: u32,
}

impl Packet {
    /// A stream packet from the guest's `src_port` to the host's `dst_port`.
    pub(crate) fn new(op: u16, src_port: u32, dst_port: u32) -> Self {
        Self {
            src_cid: CID,
            dst_cid: HOST,
            src_port,
            dst_port,
            kind: 1,
            op,
            buf_alloc: 65536,
            ..Self::default()
        }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(self.src_cid.to_le_bytes());
        bytes.extend(self.dst_cid.to_le_bytes());
        bytes.extend(self.src_port.to_le_bytes());
        bytes.extend(self.dst_port.to_le_bytes());
        bytes.extend(self.len.to_le_bytes());
        bytes.extend(self.kind.to_le_bytes());
        bytes.extend(self.op.to_le_bytes());
        bytes.extend(self.flags.to_le_bytes());
        bytes.extend(self.buf_alloc.to_le_bytes());
        bytes.extend(self.fwd_cnt.to_le_bytes());
        assert_eq!(bytes.len(), 44);
        bytes
    }

    fn parse(bytes: &[u8]) -> Self {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        let half = |at: usize| u16::from_le_bytes(bytes[at..at + 2].try_into().unwrap());
        Self {
            src_cid: long(0),
            dst_cid: long(8),
            src_port: word(16),
            dst_port: word(20),
            len: word(24),
            kind: half(28),
            op: half(30),
            flags: word(32),
            buf_alloc: word(36),
            fwd_cnt: word(40),
        }
    }
}

/// One connection as the guest sees it.
#[derive(Debug, Default)]
pub(crate) struct Stream {
    pub(crate) connected: bool,
    pub(crate) inbox: Vec<u8>,
    pub(crate) shut: u32,
    pub(crate) reset: bool,
    pub(crate) credit_requests: usize,
    pub(crate) alloc: u32,
    received: u32,
    announced: u32,
    /// Whether what arrives counts as read by an application.
    pub(crate) reading: bool,
    sent: u32,
    peer_alloc: u32,
    peer_forwarded: u32,
}

impl Stream {
    pub(crate) fn credit(&self) -> u32 {
        self.peer_alloc - self.sent.wrapping_sub(self.peer_forwarded)
    }
}

pub(crate) type Ports = (u32, u32);

pub(crate) struct Guest {
    pub(crate) driver: Driver,
    pub(crate) streams: HashMap<Ports, Stream>,
    /// Requests from the host, and packets for nobody.
    pub(crate) strays: VecDeque<Packet>,
    pub(crate) refill: bool,
    pub(crate) acceptor: Option<PacketSocket>,
    pub(crate) metrics: Registry,
    address: SocketAddr,
    buffers: HashMap<u16, Pushed>,
    next_port: u32,
}

/// The port of the file.
pub(crate) const SINK: u32 = 1025;

/// A device with a listener and an acceptor; the host's ends of both.
pub(crate) fn device(metrics: &Registry) -> (Box<dyn VirtioDevice>, SocketAddr, PacketSocket) {
    device_with(metrics, None)
}

/// The same, with a file at [`SINK`] of which so many bytes are kept.
fn device_with(metrics: &Registry, sink: Option<(File, u64)>) -> (Box<dyn VirtioDevice>, SocketAddr, PacketSocket) {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("basalt-vsock-test-{}-{number}", std::process::id());
    let address = SocketAddr::from_abstract_name(name).unwrap();
    let listener = UnixListener::bind_addr(&address).unwrap();
    let (theirs, ours) = PacketSocket::pair().unwrap();
    let config = VsockConfig {
        cid: 3,
        listener: Some(FdRef(0)),
        acceptor: Some(FdRef(1)),
        sinks: sink
            .iter()
            .map(|(_, keep)| VsockSink {
                port: SINK,
                file: FdRef(2),
                keep: *keep,
            })
            .collect(),
    };
    let mut fds = vec![OwnedFd::from(listener), OwnedFd::from(theirs)];
    fds.extend(sink.map(|(file, _)| file.into()));
    let mut fds = FdTable::new(fds);
    let device = create(&config, &mut fds, metrics).unwrap();
    assert_eq!(fds.left_over(), 0);
    (device, address, ours)
}

pub(crate) fn create(
    config: &VsockConfig,
    fds: &mut FdTable,
    metrics: &Registry,
) -> Result<Box<dyn VirtioDevice>, device::CreateError> {
    let spec = DeviceSpec {
        id: "vsock0".into(),
        kind: "vsock".into(),
        config: serde_json::to_value(config).unwrap(),
    };
    let context = DeviceContext {
        id: "vsock0",
        metrics,
        no_space: &device::SpaceAlarm::new().unwrap(),
    };
    vsock::MODULE.create(&spec, fds, &context)
}

impl Guest {
    pub(crate) fn start() -> Self {
        Self::start_with(u64::MAX)
    }

    /// Starts with only these features.
    pub(crate) fn start_with(features: u64) -> Self {
        Self::start_at(features, None)
    }

    /// Starts with a file at [`SINK`] of which so many bytes are kept.
    pub(crate) fn start_with_sink(file: File, keep: u64) -> Self {
        Self::start_at(u64::MAX, Some((file, keep)))
    }

    fn start_at(features: u64, sink: Option<(File, u64)>) -> Self {
        let metrics = Registry::new();
        let (device, address, acceptor) = device_with(&metrics, sink);
        let mut driver = Driver::new(device).with_queue_size(128);
        driver.start_with(features);
        let mut guest = Self {
            driver,
            streams: HashMap::new(),
            strays: VecDeque::new(),
            refill: true,
            acceptor: Some(acceptor),
            metrics,
            address,
            buffers: HashMap::new(),
            next_port: 5000,
        };
        guest.fill();
        guest
    }

    /// Resets the device and starts anew, as a rebooted kernel.
    pub(crate) fn restart(&mut self) {
        self.driver.start();
        self.buffers.clear();
        self.streams.clear();
        self.strays.clear();
        self.fill();
    }

    /// Goes on with another device, restored from this one, with sockets of its own.
    pub(crate) fn migrate(&mut self) {
        self.metrics = Registry::new();
        let (device, address, acceptor) = device(&self.metrics);
        self.driver.migrate(device).unwrap();
        self.address = address;
        self.acceptor = Some(acceptor);
    }

    /// Fills four bytes, so that zeroes there were written by the device.
    pub(crate) fn poison(&self, address: u64) {
        let memory = self.driver.memory();
        memory.write_slice(&[0xff; 4], GuestAddress(address)).unwrap();
    }

    pub(crate) fn metric(&self, name: &str) -> u64 {
        let samples = self.metrics.samples();
        let values: Vec<u64> = samples.iter().filter(|s| s.name == name).map(|s| s.value).collect();
        assert!(!values.is_empty(), "no metric {name}");
        values.iter().sum()
    }

    /// Gives the device all receive buffers there are.
    pub(crate) fn fill(&mut self) {
        while self.driver.free_descriptors(RX) > 0 {
            let pushed = self.driver.push(RX, &[], &[BUFFER]);
            self.buffers.insert(pushed.head, pushed);
        }
        self.driver.kick_if_wanted(RX);
    }

    /// Gives the device `count` receive buffers of `length` bytes.
    pub(crate) fn offer(&mut self, count: usize, length: usize) {
        for _ in 0..count {
            let pushed = self.driver.push(RX, &[], &[length]);
            self.buffers.insert(pushed.head, pushed);
        }
        self.driver.kick_if_wanted(RX);
    }

    /// Sends raw bytes as one packet, in as many buffers, without waiting.
    pub(crate) fn send_parts(&mut self, parts: &[&[u8]]) {
        while self.driver.free_descriptors(TX) < parts.len() {
            assert!(self.driver.wait_used(TX).is_some(), "the device takes no packets");
        }
        self.driver.push(TX, parts, &[]);
        self.driver.kick_if_wanted(TX);
    }

    pub(crate) fn send(&mut self, packet: &Packet) {
        self.send_parts(&[&packet.bytes()]);
    }

    /// Sends data, header and payload in one buffer as newer drivers do.
    pub(crate) fn send_data(&mut self, ports: Ports, data: &[u8]) {
        let stream = self.streams.get_mut(&ports).unwrap();
        stream.sent = stream.sent.wrapping_add(u32::try_from(data.len()).unwrap());
        let mut packet = self.packet(RW, ports);
        packet.len = u32::try_from(data.len()).unwrap();
        let mut bytes = packet.bytes();
        bytes.extend(data);
        self.send_parts(&[&bytes]);
    }

    /// A packet of an existing stream, with its counters.
    pub(crate) fn packet(&mut self, op: u16, ports: Ports) -> Packet {
        let stream = self.streams.get_mut(&ports).unwrap();
        stream.announced = stream.received;
        Packet {
            buf_alloc: stream.alloc,
            fwd_cnt: stream.received,
            ..Packet::new(op, ports.0, ports.1)
        }
    }

    pub(crate) fn shut(&mut self, ports: Ports, flags: u32) {
        let packet = Packet {
            flags,
            ..self.packet(SHUTDOWN, ports)
        };
        self.send(&packet);
    }

    /// Everything that has arrived.
    pub(crate) fn pump(&mut self) -> usize {
        let mut count = 0;
        while let Some(used) = self.driver.poll_used(RX) {
            count += 1;
            let pushed = self.buffers.remove(&used.head).expect("a buffer of ours");
            let bytes = self.driver.bytes(pushed.writable[0]);
            if used.written > 0 {
                let packet = Packet::parse(&bytes);
                assert_eq!(used.written, 44 + packet.len, "{packet:?}");
                self.take(packet, &bytes[44..used.written as usize]);
            }
        }
        if count > 0 && self.refill {
            self.fill();
        }
        while self.driver.poll_used(TX).is_some() {}
        count
    }

    fn take(&mut self, packet: Packet, payload: &[u8]) {
        assert_eq!(
            (packet.dst_cid, packet.op == RST || packet.kind == 1),
            (CID, true),
            "{packet:?}"
        );
        let ports = (packet.dst_port, packet.src_port);
        let Some(stream) = self.streams.get_mut(&ports) else {
            return self.strays.push_back(packet);
        };
        assert!(!stream.reset || packet.op == RST, "{packet:?} after the end");
        stream.peer_alloc = packet.buf_alloc;
        stream.peer_forwarded = packet.fwd_cnt;
        match packet.op {
            RESPONSE => stream.connected = true,
            RST => stream.reset = true,
            SHUTDOWN => stream.shut = packet.flags,
            CREDIT_UPDATE => (),
            CREDIT_REQUEST => {
                stream.credit_requests += 1;
                let answer = self.packet(CREDIT_UPDATE, ports);
                self.send(&answer);
            }
            RW => {
                assert!(stream.connected && stream.shut & 2 == 0, "data at the wrong time");
                stream.inbox.extend(payload);
                let waiting = u32::try_from(stream.inbox.len()).unwrap();
                if stream.reading {
                    stream.received = stream.received.wrapping_add(packet.len);
                    if stream.received.wrapping_sub(stream.announced) >= stream.alloc / 2 {
                        let update = self.packet(CREDIT_UPDATE, ports);
                        self.send(&update);
                    }
                } else {
                    assert!(waiting <= stream.alloc, "more than the guest has room for");
                }
            }
            _ => panic!("{packet:?}"),
        }
    }

    /// Lets an application read everything that has arrived, and tells the device.
    pub(crate) fn read_all(&mut self, ports: Ports) {
        let stream = self.streams.get_mut(&ports).unwrap();
        stream.reading = true;
        stream.received = u32::try_from(stream.inbox.len()).unwrap();
        let update = self.packet(CREDIT_UPDATE, ports);
        self.send(&update);
    }

    /// Works until `condition` holds.
    #[track_caller]
    pub(crate) fn wait(&mut self, what: &str, mut condition: impl FnMut(&mut Self) -> bool) {
        let began = Instant::now();
        loop {
            let moved = self.pump();
            if condition(self) {
                return;
            }
            assert!(began.elapsed() < LIMIT, "waited in vain: {what}");
            if moved == 0 {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
    }

    /// Works for a moment in which nothing is expected to come.
    pub(crate) fn settle(&mut self) {
        for _ in 0..30 {
            self.pump();
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The next packet for nobody in particular.
    #[track_caller]
    pub(crate) fn stray(&mut self) -> Packet {
        self.wait("a packet", |guest| !guest.strays.is_empty());
        self.strays.pop_front().unwrap()
    }

    fn open_stream(&mut self, ports: Ports, alloc: u32) {
        let stream = Stream {
            alloc,
            reading: true,
            ..Stream::default()
        };
        self.streams.insert(ports, stream);
    }

    /// Asks for a connection to the host's `port`.
    pub(crate) fn request(&mut self, port: u32, alloc: u32) -> Ports {
        self.next_port += 1;
        let ports = (self.next_port, port);
        self.open_stream(ports, alloc);
        let request = self.packet(REQUEST, ports);
        self.send(&request);
        ports
    }

    /// Connects to the host's `port`; the host's end is what the acceptor got.
    #[track_caller]
    pub(crate) fn dial(&mut self, port: u32, alloc: u32) -> (Ports, UnixStream) {
        let ports = self.request(port, alloc);
        self.wait("a response", |guest| guest.streams[&ports].connected);
        (ports, self.accept(port))
    }

    /// What the acceptor got.
    pub(crate) fn accept(&self, port: u32) -> UnixStream {
        let (bytes, mut fds) = self.acceptor.as_ref().unwrap().receive().unwrap();
        assert_eq!(bytes, port.to_le_bytes());
        assert_eq!(fds.len(), 1);
        UnixStream::from(fds.remove(0))
    }

    /// Connects to the listener.
    pub(crate) fn host_connects(&self) -> UnixStream {
        UnixStream::connect_addr(&self.address).unwrap()
    }

    /// Answers the host's next request.
    #[track_caller]
    pub(crate) fn answer(&mut self, port: u32, alloc: u32) -> Ports {
        let request = self.stray();
        assert_eq!((request.op, request.dst_port, request.len), (REQUEST, port, 0));
        let ports = (port, request.src_port);
        self.open_stream(ports, alloc);
        let stream = self.streams.get_mut(&ports).unwrap();
        (stream.connected, stream.peer_alloc, stream.peer_forwarded) = (true, request.buf_alloc, request.fwd_cnt);
        let response = self.packet(RESPONSE, ports);
        self.send(&response);
        ports
    }

    /// Sends all of `data` as credit allows, in packets of at most `most` bytes.
    #[track_caller]
    pub(crate) fn send_all(&mut self, ports: Ports, data: &[u8], most: usize) {
        let mut left = data;
        while !left.is_empty() {
            self.wait("credit", |guest| guest.streams[&ports].credit() > 0);
            let count = left.len().min(most).min(self.streams[&ports].credit() as usize);
            self.send_data(ports, &left[..count]);
            left = &left[count..];
        }
    }
}

/// Reads one line without reading more.
pub(crate) fn line(socket: &mut UnixStream) -> String {
    let mut text = String::new();
    let mut byte = [0];
    while socket.read(&mut byte).unwrap() == 1 {
        text.push(byte[0].into());
        if byte[0] == b'\n' {
            break;
        }
    }
    text
}

/// Bytes that tell where they belong.
pub(crate) fn pattern(length: usize, seed: usize) -> Vec<u8> {
    (0..length)
        .map(|at| ((at / 7).wrapping_mul(31) ^ at ^ seed).to_le_bytes()[0])
        .collect()
}
