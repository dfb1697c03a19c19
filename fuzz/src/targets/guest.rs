//! What a guest's driver writes: accesses to PCI configuration space and BARs, and rings in its memory.
//!
//! Knows the public types of `pci` and `virtio`, and of devices a network device's control queue.

use std::sync::{Arc, Mutex, PoisonError};

use base::EventFd;
use memory::GuestRam;
use net::untrusted::ControlQueue;
use pci::{Bar, BarKind, ConfigSpace, Identity, MemoryRanges, PciBus, PciFunction, Window, WindowKind, Windows};
use virtio::conformance::driver::Driver;
use virtio::{Activation, ActiveQueue, DeviceError, QueueInterrupt, VirtioDevice};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};

use crate::run::{Target, outcome};

/// Bytes of one access in the input: where, offset, width, value.
const ACCESS: usize = 12;

const PORTS: Window = Window {
    start: 0xc000,
    length: 0x4000,
};

/// Sequences of accesses to a bus with one function.
pub(crate) fn pci_config() -> Target {
    // Configuration mechanism #1: select 00:01.0 register 0x10, write all ones to size the BAR, read it, enable memory.
    let seed = [
        access(1, 0, 4, 0x8000_0810),
        access(1, 4, 4, 0xffff_ffff),
        access(0, 4, 4, 0),
        access(3, 0x8004, 2, 2),
        access(4, 0, 4, 1),
    ];
    Target {
        name: "pci-config",
        seeds: vec![seed.concat()],
        parse: access_all,
    }
}

fn access(place: u8, offset: u32, width: u8, value: u32) -> Vec<u8> {
    let mut bytes = vec![place, width, 0, 0];
    bytes.extend(offset.to_le_bytes());
    bytes.extend(value.to_le_bytes());
    bytes
}

/// A width that a CPU has: the largest power of two in the byte, 8 at most.
fn width(byte: u8) -> usize {
    1 << byte.trailing_zeros().min(3)
}

fn access_all(input: &[u8]) -> u64 {
    let low = Window {
        start: 0xc000_0000,
        length: 0x1000_0000,
    };
    let high = Window {
        start: 1 << 40,
        length: 1 << 30,
    };
    let bus = PciBus::new(Windows {
        low,
        high,
        ports: Some(PORTS),
    });
    if let Err(error) = bus.add(Arc::new(Function::new())) {
        return outcome(error);
    }
    let places = [
        bus.ports(),
        bus.ecam(),
        bus.window(WindowKind::Low),
        bus.window(WindowKind::High),
        bus.window(WindowKind::Ports),
    ];
    let mut ends = Vec::new();
    for step in input.chunks_exact(ACCESS).take(200) {
        let place = &places[usize::from(step[0] >> 1) % places.len()];
        let width = width(step[1]);
        let mut data = [0; 8];
        data[..4].copy_from_slice(&step[8..12]);
        let offset = u64::from(u32::from_le_bytes([step[4], step[5], step[6], step[7]]));
        if step[0] & 1 == 0 {
            place.read(offset, &mut data[..width]);
            ends.push(data[0] % 4);
        } else {
            place.write(offset, &data[..width]);
        }
    }
    ends.dedup();
    ends.truncate(12);
    outcome(ends.iter().map(|end| char::from(b'a' + end)).collect::<String>())
}

/// A function with a BAR of each kind and a memory behind it.
struct Function {
    space: Mutex<ConfigSpace>,
}

impl Function {
    fn new() -> Self {
        let mut space = ConfigSpace::new(&Identity {
            vendor: 0x1af4,
            device: 0x1044,
            ..Identity::default()
        });
        let bars = [
            Bar {
                index: 0,
                kind: BarKind::Memory32,
                size: 0x1000,
            },
            Bar {
                index: 2,
                kind: BarKind::Memory64 { prefetchable: true },
                size: 0x10_0000,
            },
            Bar {
                index: 4,
                kind: BarKind::Ports,
                size: 0x100,
            },
        ];
        for bar in bars {
            space.add_bar(bar).expect("a BAR that is fit for a register");
        }
        Self {
            space: Mutex::new(space),
        }
    }

    fn space(&self) -> std::sync::MutexGuard<'_, ConfigSpace> {
        self.space.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PciFunction for Function {
    fn config_read(&self, offset: usize, data: &mut [u8]) {
        assert!(
            offset + data.len() <= 256,
            "the bus let an access through that leaves configuration space"
        );
        self.space().read(offset, data);
    }

    fn config_write(&self, offset: usize, data: &[u8]) {
        assert!(
            offset + data.len() <= 256,
            "the bus let an access through that leaves configuration space"
        );
        self.space().write(offset, data);
    }

    fn memory_ranges(&self) -> MemoryRanges {
        self.space().memory_ranges()
    }

    fn bar_read(&self, bar: usize, offset: u64, data: &mut [u8]) {
        check_bar(bar, offset, data.len());
        data.fill(0x5a);
    }

    fn bar_write(&self, bar: usize, offset: u64, data: &[u8]) {
        check_bar(bar, offset, data.len());
    }
}

/// What the bus promises to functions.
fn check_bar(bar: usize, offset: u64, length: usize) {
    let size = if bar == 0 { 0x1000 } else { 0x10_0000 };
    assert!(
        (bar == 0 || bar == 2) && offset + length as u64 <= size,
        "the bus let an access through that leaves BAR {bar}"
    );
}

/// Entries of the fuzzed ring.
const ENTRIES: u16 = 16;
/// Where its parts lie: table, available ring, used ring (virtio 1.2, 2.7).
const AVAILABLE: u64 = 0x100;
const USED: u64 = 0x200;
/// All of guest memory.
const MEMORY: usize = 1 << 16;

fn descriptor(address: u64, length: u32, flags: u16, next: u16) -> Vec<u8> {
    let mut bytes = address.to_le_bytes().to_vec();
    bytes.extend(length.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes.extend(next.to_le_bytes());
    bytes
}

/// Rings and descriptor tables.
pub(crate) fn virtqueue() -> Target {
    // Flags (2.7.5): 1 is NEXT, 2 is WRITE, 4 is INDIRECT.
    let mut chain = [
        descriptor(0x1000, 16, 1, 1),
        descriptor(0x2000, 512, 3, 2),
        descriptor(0x3000, 1, 2, 0),
    ]
    .concat();
    chain.resize(0x100, 0);
    chain.extend([0, 0, 1, 0, 0, 0]);
    let mut indirect = descriptor(0x400, 32, 4, 0);
    indirect.resize(0x100, 0);
    indirect.extend([0, 0, 1, 0, 0, 0]);
    indirect.resize(0x400, 0);
    indirect.extend([descriptor(0x1000, 16, 1, 1), descriptor(0x2000, 512, 2, 0)].concat());
    Target {
        name: "virtqueue",
        seeds: vec![chain, indirect],
        parse: walk_ring,
    }
}

/// Guest memory with the input in it, and a queue whose ring is there.
fn ring(input: &[u8]) -> (GuestRam, ActiveQueue) {
    let memory = GuestRam::from_ranges(&[(GuestAddress(0), MEMORY)]).expect("64 KiB");
    let input = &input[..input.len().min(MEMORY)];
    memory.write_slice(input, GuestAddress(0)).expect("what fits");
    let mut queue = Queue::new(ENTRIES).expect("a size that there is");
    queue.set_size(ENTRIES);
    queue.set_desc_table_address(Some(0), Some(0));
    queue.set_avail_ring_address(u32::try_from(AVAILABLE).ok(), Some(0));
    queue.set_used_ring_address(u32::try_from(USED).ok(), Some(0));
    queue.set_event_idx(input.first().is_some_and(|byte| byte & 0x80 != 0));
    queue.set_ready(true);
    let queue = ActiveQueue {
        index: 0,
        queue,
        kick: Arc::new(EventFd::new().expect("an event fd")),
        busy_poll: virtio::BusyPoll::default(),
        held: Vec::new(),
    };
    (memory, queue)
}

fn walk_ring(input: &[u8]) -> u64 {
    let (memory, mut queue) = ring(input);
    let mut ends = String::new();
    // More than the ring has: a driver may announce more than fits.
    for _ in 0..2 * ENTRIES {
        let taken = match queue.take(&memory) {
            Ok(Some(taken)) => taken.check(),
            Ok(None) => break,
            Err(error) => return outcome(format!("{ends}{error}")),
        };
        let head = match taken {
            Ok(chain) => {
                let bytes: usize = chain.readable().iter().map(|slice| slice.len()).sum();
                assert_eq!(bytes, chain.readable_bytes(), "the chain's sum is wrong");
                ends.push('c');
                chain.head()
            }
            Err(bad) => {
                ends.push_str(&bad.fault.to_string());
                bad.head
            }
        };
        if let Err(error) = queue.complete(&memory, head, 1) {
            return outcome(format!("{ends}{error}"));
        }
    }
    outcome(ends)
}

/// The control queue of a network device: its ring, and the commands in it.
pub(crate) fn network_control() -> Target {
    // Class, command and number of pairs (5.1.6.5.5), in one buffer and in two; what is written is a byte.
    let whole = [descriptor(0x400, 4, 1, 1), descriptor(0x410, 1, 2, 0)];
    let parts = [
        descriptor(0x400, 2, 1, 1),
        descriptor(0x402, 2, 1, 2),
        descriptor(0x410, 1, 2, 0),
    ];
    let no_answer = [descriptor(0x400, 4, 0, 0)];
    let seed = |chain: &[Vec<u8>]| {
        let mut bytes = chain.concat();
        bytes.resize(0x100, 0);
        bytes.extend([0, 0, 1, 0, 0, 0]);
        bytes.resize(0x400, 0);
        bytes.extend([4, 0, 1, 0]);
        bytes
    };
    Target {
        name: "network-control",
        seeds: vec![seed(&whole), seed(&parts), seed(&no_answer)],
        parse: control,
    }
}

/// Nobody waits for an interrupt.
struct Nobody;

impl QueueInterrupt for Nobody {
    fn signal_queue(&self, _: u16) {}

    fn signal_config(&self) {}
}

fn control(input: &[u8]) -> u64 {
    let (memory, queue) = ring(input);
    let mut queue = ControlQueue::new(queue).expect("no more descriptors than there are");
    match queue.serve(&memory, &Nobody) {
        Ok((commands, chains)) => {
            let count = |count: u64| "x".repeat(usize::try_from(count).unwrap_or(usize::MAX).min(20));
            outcome(format!("{} {}", count(commands), count(chains)))
        }
        Err(error) => outcome(error),
    }
}

/// Registers of the transport, with rings in memory behind them: what a driver can do to a device before it asks anything
/// of it.
pub(crate) fn transport() -> Target {
    // Acknowledge, driver, queue size and addresses, enable, features ok, driver ok, a kick (4.1.4.3, 4.1.5.2).
    let steps = [
        (0x14, 1, 1),
        (0x14, 1, 3),
        (0x0c, 4, 1),
        (0x14, 1, 0xb),
        (0x18, 2, 16),
        (0x20, 8, 0x1000),
        (0x28, 8, 0x2000),
        (0x30, 8, 0x3000),
        (0x1c, 2, 1),
        (0x14, 1, 0xf),
    ];
    let seed: Vec<u8> = steps
        .iter()
        .flat_map(|&(offset, width, value)| access(1, offset, width, value))
        .collect();
    Target {
        name: "virtio-transport",
        seeds: vec![seed],
        parse: drive,
    }
}

fn drive(input: &[u8]) -> u64 {
    let driver = Driver::new(Box::new(Idle::default()));
    let device = driver.device();
    let mut ends = String::new();
    for step in input.chunks_exact(ACCESS).take(100) {
        let width = width(step[1]);
        let value = u32::from_le_bytes([step[8], step[9], step[10], step[11]]);
        let offset = u32::from_le_bytes([step[4], step[5], step[6], step[7]]);
        let mut data = [0; 8];
        data[..4].copy_from_slice(&value.to_le_bytes());
        match step[0] % 4 {
            0 => device.bar_read(0, u64::from(offset) % (BAR_SIZE - 8), &mut data[..width]),
            1 => device.bar_write(0, u64::from(offset) % (BAR_SIZE - 8), &data[..width]),
            2 => device.config_read(offset as usize % (256 - 8), &mut data[..width]),
            _ => device.config_write(offset as usize % (256 - 8), &data[..width]),
        }
        ends.push(char::from(b'a' + driver.status() % 16));
    }
    outcome(ends)
}

/// The BAR's size, as the guest finds it by writing ones; accesses beyond it never reach a function.
const BAR_SIZE: u64 = 0x8000;

/// A device that takes queues and gives them back.
#[derive(Default)]
struct Idle {
    queues: Vec<ActiveQueue>,
}

impl VirtioDevice for Idle {
    fn device_type(&self) -> u16 {
        4
    }

    fn features(&self) -> u64 {
        0b11
    }

    fn queue_sizes(&self) -> &[u16] {
        &[64, 16]
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        assert!(offset < 4096, "an offset far outside of any device's configuration");
        data.fill(1);
    }

    fn write_config(&mut self, offset: usize, _data: &[u8]) {
        assert!(offset < 4096, "an offset far outside of any device's configuration");
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        assert!(self.queues.is_empty(), "activated twice");
        self.queues = activation.queues;
        Ok(())
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        std::mem::take(&mut self.queues)
    }
}
