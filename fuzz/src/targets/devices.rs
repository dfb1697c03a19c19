//! Requests to devices whose parsers are their own: block requests, vsock packets, and what somebody on the host's side says
//! first who wants a connection into the guest. Rings and chains are good here; `guest` has those that are not.
//!
//! A device does its work on a thread: one that has panicked answers nothing more, which is what is looked for.

use std::fs::File;
use std::io::Write;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use device::{DeviceContext, DeviceModule, FdTable};
use observe::Registry;
use rustix::event::{PollFd, PollFlags, Timespec};
use virtio::VirtioDevice;
use virtio::conformance::driver::{Driver, Pushed};
use vmm_api::devices::{BlockConfig, BlockEngine, BlockLimits, DeviceConfig, VsockConfig, VsockSink};
use vmm_api::{DeviceSpec, FdRef};

use crate::run::{Target, outcome};

/// A device that has not answered by now does not.
const PATIENCE: Duration = Duration::from_secs(5);

/// How often is looked whether it has answered.
const PAUSE: Duration = Duration::from_micros(100);

/// Requests of one input; more would hardly find more.
const MOST: usize = 12;

fn made<C: DeviceConfig>(module: &dyn DeviceModule, config: &C, fds: Vec<OwnedFd>) -> Driver {
    let spec = DeviceSpec::new("it", config).expect("a configuration");
    let metrics = Registry::new();
    let context = DeviceContext {
        id: "it",
        metrics: &metrics,
        no_space: &device::SpaceAlarm::new().expect("an event fd"),
    };
    let device: Box<dyn VirtioDevice> = module
        .create(&spec, &mut FdTable::new(fds), &context)
        .expect("a device");
    let mut driver = Driver::new(device).with_patience(PATIENCE);
    driver.start();
    driver
}

fn memory_file() -> File {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    File::from(rustix::fs::memfd_create("fuzz", flags).expect("a file in memory"))
}

/// Waits until everything that was made available was taken and given back.
fn all_come_back(driver: &mut Driver, queue: u16, count: usize) -> Vec<u32> {
    let used = (0..count).map(|_| driver.wait_used(queue).map(|used| used.written));
    used.collect::<Option<_>>().expect("a request that comes back")
}

/// Bytes of a block request in the input: its header (5.2.6), and how much more the driver offers to be read and written.
const REQUEST: usize = 20;

/// Block requests.
pub(crate) fn block() -> Target {
    let request = |kind: u32, sector: u64, readable: u16, writable: u16| {
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend(0_u32.to_le_bytes());
        bytes.extend(sector.to_le_bytes());
        bytes.extend(readable.to_le_bytes());
        bytes.extend(writable.to_le_bytes());
        bytes
    };
    // Read, write, flush, serial number, discard, write zeroes, and one that there is not; one beyond the disk's end.
    let requests = [
        request(0, 0, 0, 513),
        request(1, 1, 512, 1),
        request(4, 0, 0, 1),
        request(8, 0, 0, 21),
        request(11, 0, 16, 1),
        request(13, 0, 16, 1),
        request(99, 0, 0, 1),
        request(0, u64::MAX, 0, 513),
    ];
    Target {
        name: "block-requests",
        seeds: requests.iter().cloned().chain([requests.concat()]).collect(),
        parse: ask_disk,
    }
}

fn ask_disk(input: &[u8]) -> u64 {
    let file = memory_file();
    file.set_len(1 << 20).expect("a disk of 1 MiB");
    let config = BlockConfig {
        file: FdRef(0),
        read_only: input.len() % 2 == 1,
        queues: 1,
        serial: "it".into(),
        engine: BlockEngine::Threads,
        limits: BlockLimits::default(),
    };
    let mut driver = made(&block::MODULE, &config, vec![file.into()]);
    let mut written = Vec::new();
    for request in input.chunks_exact(REQUEST).take(MOST) {
        let (header, lengths) = request.split_at(REQUEST - 4);
        let length = |at: usize| usize::from(u16::from_le_bytes([lengths[at], lengths[at + 1]]) % 8192);
        // A range to discard is itself read from the request.
        let data: Vec<u8> = header.iter().copied().cycle().take(length(0)).collect();
        let readable: Vec<&[u8]> = [header, &data].into_iter().filter(|part| !part.is_empty()).collect();
        let writable: Vec<usize> = Some(length(2)).filter(|length| *length > 0).into_iter().collect();
        driver.push(0, &readable, &writable);
        driver.kick(0);
        written.extend(all_come_back(&mut driver, 0, 1));
    }
    driver.reset();
    outcome(
        written
            .iter()
            .map(|count| char::from(b'a' + (count % 7) as u8))
            .collect::<String>(),
    )
}

/// Bytes of `struct virtio_vsock_hdr` (5.10.6).
const HEADER: usize = 44;

const RECEIVE: u16 = 0;
const TRANSMIT: u16 = 1;

/// The port that ends in a file.
const SINK: u32 = 1025;

/// Packets of a guest, one after the other, each behind a byte that says how much payload follows it.
pub(crate) fn vsock() -> Target {
    let packets: Vec<Vec<u8>> = [
        packet(1, 7, 1024, 0),
        packet(1, 8, SINK, 0),
        packet(5, 8, SINK, 9),
        packet(6, 8, SINK, 0),
        packet(7, 8, SINK, 0),
        packet(4, 8, SINK, 0),
        packet(3, 7, 1024, 0),
    ]
    .into();
    Target {
        name: "vsock-packets",
        seeds: packets.iter().cloned().chain([packets.concat()]).collect(),
        parse: |input| talk(input, b""),
    }
}

/// The first line of somebody on the host's side.
pub(crate) fn greeting() -> Target {
    Target {
        name: "vsock-greeting",
        seeds: vec![
            b"CONNECT 1024\n".to_vec(),
            b"CONNECT 4294967295\r\nmore".to_vec(),
            b"\n".to_vec(),
        ],
        parse: |input| talk(&packet(1, 7, 1024, 0), input),
    }
}

fn packet(op: u16, source: u32, destination: u32, payload: u8) -> Vec<u8> {
    let mut bytes = vec![payload];
    bytes.extend(3_u64.to_le_bytes());
    bytes.extend(2_u64.to_le_bytes());
    bytes.extend(source.to_le_bytes());
    bytes.extend(destination.to_le_bytes());
    bytes.extend(u32::from(payload).to_le_bytes());
    bytes.extend(1_u16.to_le_bytes());
    bytes.extend(op.to_le_bytes());
    bytes.extend(0_u32.to_le_bytes());
    bytes.extend(65536_u32.to_le_bytes());
    bytes.extend(0_u32.to_le_bytes());
    bytes
}

fn talk(input: &[u8], greeting: &[u8]) -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let name = format!(
        "basalt-fuzz-vsock-{}-{}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    );
    let address = SocketAddr::from_abstract_name(name).expect("a short name");
    let listener = UnixListener::bind_addr(&address).expect("a name of this process's own");
    let config = VsockConfig {
        cid: 3,
        listener: Some(FdRef(0)),
        acceptor: None,
        sinks: vec![VsockSink {
            port: SINK,
            file: FdRef(1),
            keep: 4096,
        }],
    };
    let mut driver = made(&vsock::MODULE, &config, vec![listener.into(), memory_file().into()]);
    let buffers: Vec<Pushed> = (0..MOST).map(|_| driver.push(RECEIVE, &[], &[4096])).collect();
    driver.kick(RECEIVE);
    let mut asker = UnixStream::connect_addr(&address).expect("a listener");
    // The device may have hung up already.
    drop(asker.write_all(greeting));
    if !greeting.contains(&b'\n') {
        // It would be waited for.
        drop(asker.shutdown(Shutdown::Write));
    }
    let mut first = None;
    // Either it is told to the guest, or the device hangs up.
    let deadline = Instant::now() + PATIENCE;
    while first.is_none() && !is_readable(&asker) && Instant::now() < deadline {
        first = driver.poll_used(RECEIVE);
        thread::sleep(PAUSE);
    }
    for piece in input.chunks(1 + HEADER).take(MOST).filter(|piece| piece.len() > 1) {
        let payload = vec![7; usize::from(piece[0])];
        let parts: Vec<&[u8]> = [&piece[1..], &payload[..]]
            .into_iter()
            .filter(|part| !part.is_empty())
            .collect();
        driver.push(TRANSMIT, &parts, &[]);
        driver.kick(TRANSMIT);
        all_come_back(&mut driver, TRANSMIT, 1);
    }
    let mut answers = String::new();
    while let Some(used) = first.take().or_else(|| driver.poll_used(RECEIVE)) {
        let buffer = buffers.iter().find(|buffer| buffer.head == used.head);
        let bytes = driver.bytes(buffer.expect("a buffer that was offered").writable[0]);
        // What it is (`op`), and whether it brings anything.
        answers.push(char::from(b'a' + bytes[30] % 26));
        answers.push(if used.written as usize > HEADER { '+' } else { '-' });
    }
    driver.reset();
    outcome(answers)
}

fn is_readable(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::IN)];
    rustix::event::poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seeds_are_understood() {
        // A read gives 512 bytes and a status; what there is not gives a status alone.
        let seeds = block().seeds;
        assert_ne!(ask_disk(&seeds[0]), ask_disk(&seeds[6]));
        // What the device answers after the last look is no part of an outcome.
        let silent = talk(b"", b"");
        assert!((0..20).any(|_| talk(&vsock().seeds[1], b"") != silent));
    }
}
