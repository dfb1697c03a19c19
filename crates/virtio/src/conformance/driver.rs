//! A driver without a guest: it speaks to a device through the registers, rings and doorbells of the transport, and can
//! misbehave. For tests only, hence it panics where a test has gone wrong.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use memory::GuestRam;
use observe::Registry;
use pci::PciFunction;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use vm_memory::{Bytes, GuestAddress};

use super::fakes::FakeVm;
use crate::device::VirtioDevice;
use crate::transport::{TransportError, VirtioPciDevice};

/// Guest memory of a fake driver: one region from 0 on.
pub const MEMORY: u64 = 64 << 20;
const MEMORY_BYTES: usize = 64 << 20;

/// Where the driver puts the device's BAR.
pub const BAR: u64 = 0xc000_0000;

/// How long a test waits for what must come: long enough for a thread and a disk on a machine that does much else.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// Descriptor flags (2.7.5): `VIRTQ_DESC_F_NEXT`, the chain goes on.
pub const NEXT: u16 = 1;
/// `VIRTQ_DESC_F_WRITE`: the device writes to the buffer.
pub const WRITE: u16 = 2;
/// `VIRTQ_DESC_F_INDIRECT`: the buffer is a table of descriptors.
pub const INDIRECT: u16 = 4;

/// Where the first queue's descriptor table is.
pub const RINGS: u64 = 1 << 20;
const RING_STRIDE: u64 = 256 << 10;
const RING_BYTES: usize = 256 << 10;
const BUFFERS: u64 = 24 << 20;

/// A descriptor as it lies in the table (2.7.5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Descriptor {
    /// Guest physical address.
    pub address: u64,
    /// Bytes.
    pub length: u32,
    /// Flags.
    pub flags: u16,
    /// The next one, with [`NEXT`].
    pub next: u16,
}

impl Descriptor {
    fn bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.length.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.flags.to_le_bytes());
        bytes[14..].copy_from_slice(&self.next.to_le_bytes());
        bytes
    }
}

/// A chain that was made available.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pushed {
    /// Its first descriptor.
    pub head: u16,
    /// Where the device reads.
    pub readable: Vec<(u64, usize)>,
    /// Where the device writes.
    pub writable: Vec<(u64, usize)>,
}

/// An element of the used ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// The chain's first descriptor.
    pub head: u16,
    /// How many bytes the device says that it wrote.
    pub written: u32,
}

#[derive(Debug)]
struct Ring {
    size: u16,
    available: u16,
    kicked: u16,
    used: u16,
    free: Vec<u16>,
    chains: Vec<Vec<u16>>,
}

impl Ring {
    fn new(size: u16) -> Self {
        Self {
            size,
            available: 0,
            kicked: 0,
            used: 0,
            free: (0..size).rev().collect(),
            chains: vec![Vec::new(); usize::from(size)],
        }
    }
}

/// A driver and the device it drives.
pub struct Driver {
    memory: Arc<GuestRam>,
    vm: Arc<FakeVm>,
    device: Arc<VirtioPciDevice>,
    registry: Registry,
    rings: Vec<Ring>,
    largest: u16,
    features: u64,
    next_buffer: u64,
    patience: Duration,
}

impl Driver {
    /// Puts `device` into a fake machine. Nothing is negotiated yet.
    pub fn new(device: Box<dyn VirtioDevice>) -> Self {
        let memory = Arc::new(GuestRam::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)]).expect("guest memory"));
        let vm = Arc::new(FakeVm::default());
        let registry = Registry::new();
        let engine = Arc::clone(&vm) as Arc<dyn engine::Vm>;
        let device =
            VirtioPciDevice::new("fake", device, engine, Arc::clone(&memory), &registry).expect("the transport");
        device.config_write(0x10, &u32::try_from(BAR).expect("32 bits").to_le_bytes());
        device.config_write(0x04, &[0b110, 0]);
        let mut driver = Self {
            memory,
            vm,
            device,
            registry,
            rings: Vec::new(),
            largest: 16,
            features: 0,
            next_buffer: BUFFERS,
            patience: PATIENCE,
        };
        driver.set_up_msix();
        driver
    }

    /// Pauses and saves the device, and goes on with `device` in its place, in another machine with the same memory.
    ///
    /// # Errors
    /// The one cannot be saved, or the other does not take its state.
    pub fn migrate(&mut self, device: Box<dyn VirtioDevice>) -> Result<(), TransportError> {
        self.device.pause();
        let state = self.device.save()?;
        let vm = Arc::new(FakeVm::default());
        let engine = Arc::clone(&vm) as Arc<dyn engine::Vm>;
        let registry = Registry::new();
        let device = VirtioPciDevice::new("fake", device, engine, Arc::clone(&self.memory), &registry)?;
        device.restore(&state)?;
        assert_eq!(device.save()?, state, "it is saved otherwise than it was restored");
        device.resume()?;
        (self.vm, self.device, self.registry) = (vm, device, registry);
        Ok(())
    }

    /// Uses queues of at most `size` entries, a power of two, from the next start on; 16 if not called.
    #[must_use]
    pub fn with_queue_size(mut self, size: u16) -> Self {
        self.largest = size;
        self
    }

    /// Waits for so long for what must come; [`PATIENCE`] if not called.
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Guest memory.
    pub fn memory(&self) -> &Arc<GuestRam> {
        &self.memory
    }

    /// The device.
    pub fn device(&self) -> &Arc<VirtioPciDevice> {
        &self.device
    }

    /// The engine.
    pub fn vm(&self) -> &FakeVm {
        &self.vm
    }

    /// A metric of the transport.
    pub fn metric(&self, name: &str) -> u64 {
        let samples = self.registry.samples();
        let found = samples.iter().find(|sample| sample.name == name);
        found.unwrap_or_else(|| panic!("no metric {name}")).value
    }

    /// Reads a little-endian register of the BAR.
    pub fn read(&self, offset: u64, width: usize) -> u64 {
        let mut bytes = [0; 8];
        self.device.bar_read(0, offset, &mut bytes[..width]);
        u64::from_le_bytes(bytes)
    }

    /// Writes a little-endian register of the BAR.
    pub fn write(&self, offset: u64, width: usize, value: u64) {
        self.device.bar_write(0, offset, &value.to_le_bytes()[..width]);
    }

    /// Reads from the device's own configuration.
    pub fn config(&self, offset: u64, width: usize) -> u64 {
        self.read(0x2000 + offset, width)
    }

    /// The device status.
    pub fn status(&self) -> u8 {
        u8::try_from(self.read(0x14, 1)).expect("one byte")
    }

    /// Every feature that is offered.
    pub fn offered(&self) -> u64 {
        self.write(0, 4, 0);
        let low = self.read(4, 4);
        self.write(0, 4, 1);
        low | self.read(4, 4) << 32
    }

    /// The number of queues.
    pub fn queue_count(&self) -> u16 {
        u16::try_from(self.read(0x12, 2)).expect("two bytes")
    }

    /// Resets, accepts everything offered, sets up all queues and starts the device.
    pub fn start(&mut self) {
        self.start_with(u64::MAX);
    }

    /// As [`Driver::start`], accepting only features in `mask`.
    pub fn start_with(&mut self, mask: u64) {
        self.negotiate(mask);
        self.set_up_queues();
        self.go();
        assert_eq!(self.status(), 0xf, "the device does not start");
    }

    /// Resets and negotiates, up to FEATURES_OK.
    pub fn negotiate(&mut self, mask: u64) {
        self.reset();
        self.write(0x14, 1, 1);
        self.write(0x14, 1, 3);
        self.features = self.offered() & (mask | 1 << 32);
        self.write(8, 4, 0);
        self.write(0xc, 4, self.features & 0xffff_ffff);
        self.write(8, 4, 1);
        self.write(0xc, 4, self.features >> 32);
        self.write(0x14, 1, 0xb);
        assert_eq!(self.status(), 0xb, "the device refuses its own features");
    }

    /// Sets up every queue, empty.
    pub fn set_up_queues(&mut self) {
        self.rings.clear();
        self.write(0x10, 2, 0);
        for index in 0..self.queue_count() {
            self.write(0x16, 2, u64::from(index));
            let size = u16::try_from(self.read(0x18, 2)).expect("two bytes").min(self.largest);
            self.write(0x18, 2, u64::from(size));
            self.write(0x1a, 2, u64::from(index) + 1);
            let zeroes = vec![0; RING_BYTES];
            self.memory
                .write_slice(&zeroes, GuestAddress(Self::table(index)))
                .expect("ring memory");
            for (register, address) in [
                (0x20, Self::table(index)),
                (0x28, Self::available(index)),
                (0x30, Self::used_ring(index)),
            ] {
                self.write(register, 8, address);
            }
            self.write(0x1c, 2, 1);
            self.rings.push(Ring::new(size));
        }
    }

    /// Sets DRIVER_OK.
    pub fn go(&self) {
        self.write(0x14, 1, 0xf);
    }

    /// Resets the device.
    pub fn reset(&self) {
        self.write(0x14, 1, 0);
        assert_eq!(self.status(), 0, "the device is not reset");
    }

    /// Memory for a buffer. Wraps around: buffers live for a few requests.
    pub fn allocate(&mut self, length: usize) -> u64 {
        let length = (length as u64).next_multiple_of(64);
        if self.next_buffer + length > MEMORY {
            self.next_buffer = BUFFERS;
        }
        let address = self.next_buffer;
        self.next_buffer += length;
        address
    }

    /// Makes a chain of filled readable buffers and zeroed writable ones available.
    pub fn push(&mut self, queue: u16, readable: &[&[u8]], writable: &[usize]) -> Pushed {
        let mut descriptors = Vec::new();
        let mut pushed = Pushed {
            head: 0,
            readable: Vec::new(),
            writable: Vec::new(),
        };
        for data in readable {
            let address = self.allocate(data.len());
            self.memory.write_slice(data, GuestAddress(address)).expect("buffer");
            descriptors.push((address, data.len(), 0));
            pushed.readable.push((address, data.len()));
        }
        for &length in writable {
            let address = self.allocate(length);
            self.memory
                .write_slice(&vec![0; length], GuestAddress(address))
                .expect("buffer");
            descriptors.push((address, length, WRITE));
            pushed.writable.push((address, length));
        }
        let chain: Vec<Descriptor> = descriptors
            .into_iter()
            .map(|(address, length, flags)| Descriptor {
                address,
                length: u32::try_from(length).expect("a small buffer"),
                flags,
                next: 0,
            })
            .collect();
        pushed.head = self.push_chain(queue, &chain);
        pushed
    }

    /// Makes a chain available, linking its descriptors.
    pub fn push_chain(&mut self, queue: u16, chain: &[Descriptor]) -> u16 {
        let ring = &mut self.rings[usize::from(queue)];
        let split = ring.free.len().checked_sub(chain.len()).expect("the ring is full");
        let indices: Vec<u16> = ring.free.drain(split..).rev().collect();
        for (at, descriptor) in chain.iter().enumerate() {
            let mut descriptor = *descriptor;
            if let Some(&next) = indices.get(at + 1) {
                descriptor.flags |= NEXT;
                descriptor.next = next;
            }
            self.put(queue, indices[at], descriptor);
        }
        let head = indices[0];
        self.rings[usize::from(queue)].chains[usize::from(head)] = indices;
        self.make_available(queue, head);
        head
    }

    /// Makes the same chain available through an indirect table (2.7.5.3).
    pub fn push_indirect(&mut self, queue: u16, chain: &[Descriptor]) -> u16 {
        assert_ne!(self.features & 1 << VIRTIO_RING_F_INDIRECT_DESC, 0, "not negotiated");
        let table = self.allocate(16 * chain.len());
        for (at, descriptor) in (0_u16..).zip(chain) {
            let mut descriptor = *descriptor;
            if usize::from(at) + 1 < chain.len() {
                descriptor.flags |= NEXT;
                descriptor.next = at + 1;
            }
            let address = GuestAddress(table + 16 * u64::from(at));
            self.memory.write_slice(&descriptor.bytes(), address).expect("table");
        }
        let length = u32::try_from(16 * chain.len()).expect("a small table");
        self.push_chain(
            queue,
            &[Descriptor {
                address: table,
                length,
                flags: INDIRECT,
                next: 0,
            }],
        )
    }

    /// Writes one descriptor of the table, unchecked.
    pub fn put(&self, queue: u16, index: u16, descriptor: Descriptor) {
        let address = GuestAddress(Self::table(queue) + 16 * u64::from(index));
        self.memory
            .write_slice(&descriptor.bytes(), address)
            .expect("descriptor");
    }

    /// Writes any head into the available ring and moves its index by one.
    pub fn make_available(&mut self, queue: u16, head: u16) {
        let ring = &mut self.rings[usize::from(queue)];
        let slot = u64::from(ring.available % ring.size);
        ring.available = ring.available.wrapping_add(1);
        let index = ring.available;
        let base = Self::available(queue);
        self.memory
            .write_obj(head, GuestAddress(base + 4 + 2 * slot))
            .expect("ring");
        self.jump(queue, index);
    }

    /// Sets the available index to anything.
    pub fn jump(&self, queue: u16, index: u16) {
        let address = GuestAddress(Self::available(queue) + 2);
        self.memory.store(index, address, Ordering::SeqCst).expect("ring");
    }

    /// Kicks, whether the device wants it or not.
    pub fn kick(&mut self, queue: u16) {
        self.rings[usize::from(queue)].kicked = self.rings[usize::from(queue)].available;
        let address = 0x3000 + 4 * u64::from(queue);
        if !self.vm.ring(BAR + address) {
            self.write(address, 2, u64::from(queue));
        }
    }

    /// Kicks only if the device asked for it (2.7.10); tells whether it did.
    pub fn kick_if_wanted(&mut self, queue: u16) -> bool {
        let ring = &self.rings[usize::from(queue)];
        let base = Self::used_ring(queue);
        let load = |at: u64| {
            self.memory
                .load::<u16>(GuestAddress(base + at), Ordering::SeqCst)
                .expect("ring")
        };
        std::sync::atomic::fence(Ordering::SeqCst);
        let wanted = if self.features & 1 << VIRTIO_RING_F_EVENT_IDX == 0 {
            load(0) & 1 == 0
        } else {
            let event = load(4 + 8 * u64::from(ring.size));
            ring.available.wrapping_sub(event).wrapping_sub(1) < ring.available.wrapping_sub(ring.kicked)
        };
        if wanted {
            self.kick(queue);
        }
        wanted
    }

    /// The next used element, if there is one already.
    pub fn poll_used(&mut self, queue: u16) -> Option<Used> {
        let base = Self::used_ring(queue);
        let index = self
            .memory
            .load::<u16>(GuestAddress(base + 2), Ordering::SeqCst)
            .expect("ring");
        let ring = &mut self.rings[usize::from(queue)];
        if index == ring.used {
            return None;
        }
        let at = base + 4 + 8 * u64::from(ring.used % ring.size);
        ring.used = ring.used.wrapping_add(1);
        let element: u64 = self.memory.read_obj(GuestAddress(at)).expect("ring");
        let head = u16::try_from(element & 0xffff_ffff).expect("a head within the table");
        ring.free.append(&mut ring.chains[usize::from(head)]);
        // Hear of the very next one (2.7.7.1).
        let event = Self::available(queue) + 4 + 2 * u64::from(ring.size);
        let seen = ring.used;
        self.memory
            .store(seen, GuestAddress(event), Ordering::SeqCst)
            .expect("ring");
        Some(Used {
            head,
            written: u32::try_from(element >> 32).expect("32 bits"),
        })
    }

    /// Waits for the next used element; `None` when none came in time.
    pub fn wait_used(&mut self, queue: u16) -> Option<Used> {
        let began = Instant::now();
        loop {
            if let Some(used) = self.poll_used(queue) {
                return Some(used);
            }
            if began.elapsed() > self.patience {
                return None;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Waits until `condition` holds; tells whether it did in time.
    pub fn wait_until(&self, mut condition: impl FnMut(&Self) -> bool) -> bool {
        let began = Instant::now();
        while began.elapsed() < self.patience {
            if condition(self) {
                return true;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        false
    }

    /// How many interrupts of a queue the guest would have got.
    pub fn interrupts(&self, queue: u16) -> u64 {
        let interrupt = self.vm.interrupt(usize::from(queue) + 1);
        interrupt.map_or(0, |interrupt| interrupt.delivered())
    }

    /// What lies in a buffer.
    pub fn bytes(&self, (address, length): (u64, usize)) -> Vec<u8> {
        let mut data = vec![0; length];
        self.memory
            .read_slice(&mut data, GuestAddress(address))
            .expect("buffer");
        data
    }

    /// The size of a ring that was set up.
    pub fn ring_size(&self, queue: u16) -> u16 {
        self.rings[usize::from(queue)].size
    }

    /// How many descriptors are free.
    pub fn free_descriptors(&self, queue: u16) -> usize {
        self.rings[usize::from(queue)].free.len()
    }

    fn set_up_msix(&mut self) {
        for vector in 0..=u64::from(self.queue_count()) {
            self.write(0x4000 + 16 * vector, 8, 0xfee0_0000);
            self.write(0x4008 + 16 * vector, 4, 0x40 + vector);
            self.write(0x400c + 16 * vector, 4, 0);
        }
        // MSI-X is the first capability; its enable bit is the highest of message control.
        self.device.config_write(0x43, &[0x80]);
    }

    fn table(queue: u16) -> u64 {
        RINGS + RING_STRIDE * u64::from(queue)
    }

    fn available(queue: u16) -> u64 {
        Self::table(queue) + (96 << 10)
    }

    fn used_ring(queue: u16) -> u64 {
        Self::table(queue) + (128 << 10)
    }
}
