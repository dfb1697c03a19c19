//! A machine for one function: an engine without a CPU, memory that an address space without an IOMMU maps, and a function that remembers.

use std::ops::Deref;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

use base::{ByteSize, EventFd};
use device::{DmaMemory, DmaSpace, InterruptPin, Reach};
use engine::{Doorbell, EngineError, HostRange, Interrupt, MsiMessage, Presence, Vcpu, Vm, VmState};
use memory::Ram;
use pci::PciFunction;
use vfio::fake::{FakeDevice, FakeSpace};
use vfio::{AddressSpace, CONFIG_REGION, Device, IntxMask, Irq, IrqInfo, Mapping, Region, VfioError};
use vm_memory::GuestRegionMmap;

use crate::Unplugged;
use crate::registers::Registers;

/// An interrupt whose event is asked when somebody looks.
#[derive(Default)]
pub(super) struct Source {
    event: Mutex<Option<EventFd>>,
    route: Mutex<Option<MsiMessage>>,
    pending: Mutex<bool>,
}

impl Source {
    pub(super) fn routed(&self) -> Option<MsiMessage> {
        *self.route.lock().unwrap()
    }

    fn look(&self) {
        let signalled = self.event.lock().unwrap().as_ref().is_some_and(EventFd::consume);
        *self.pending.lock().unwrap() |= signalled && self.routed().is_none();
    }
}

impl Interrupt for Source {
    fn trigger(&self) {
        *self.pending.lock().unwrap() = true;
    }
    fn route(&self, message: Option<MsiMessage>) {
        self.look();
        *self.route.lock().unwrap() = message;
    }
    fn is_pending(&self) -> bool {
        self.look();
        *self.pending.lock().unwrap()
    }
    fn attach(&self, event: EventFd) -> engine::Result<()> {
        *self.event.lock().unwrap() = Some(event);
        Ok(())
    }
}

/// A pin whose guest is the test.
pub(super) struct Pin {
    asserts: EventFd,
    ended: EventFd,
    is_on: Mutex<bool>,
}

impl Default for Pin {
    fn default() -> Self {
        Self {
            asserts: EventFd::new().unwrap(),
            ended: EventFd::new().unwrap(),
            is_on: Mutex::new(false),
        }
    }
}

impl Pin {
    pub(super) fn is_on(&self) -> bool {
        *self.is_on.lock().unwrap()
    }

    /// Whether it was asserted since the last look.
    pub(super) fn comes(&self) -> bool {
        self.asserts.consume() && self.is_on()
    }

    /// The guest ends the interrupt.
    pub(super) fn end(&self) {
        self.ended.signal();
    }
}

impl InterruptPin for Pin {
    fn asserts(&self) -> &EventFd {
        &self.asserts
    }
    fn ended(&self) -> &EventFd {
        &self.ended
    }
    fn switch(&self, on: bool) {
        *self.is_on.lock().unwrap() = on;
        self.asserts.consume();
    }
}

/// Registers that the guest reaches without us: where, and how many bytes.
type Given = Vec<(u64, u64)>;

#[derive(Default)]
pub(super) struct Engine {
    sources: Mutex<Vec<Arc<Source>>>,
    given: Mutex<Given>,
}

impl Engine {
    pub(super) fn source(&self, index: usize) -> Arc<Source> {
        Arc::clone(&self.sources.lock().unwrap()[index])
    }

    pub(super) fn routed(&self) -> Vec<Option<u32>> {
        let sources = self.sources.lock().unwrap();
        let data = |source: &Arc<Source>| source.routed().map(|message| message.data);
        sources.iter().map(data).collect()
    }

    pub(super) fn given(&self) -> Given {
        let mut given = self.given.lock().unwrap().clone();
        given.sort_unstable();
        given
    }
}

fn refused() -> EngineError {
    EngineError::Unusable("there is no CPU".into())
}

impl Vm for Engine {
    fn create_vcpu(&self, _: u32, _: u32) -> engine::Result<Box<dyn Vcpu>> {
        Err(refused())
    }
    fn map_ram(&self, _: u32, _: Arc<GuestRegionMmap<()>>, _: Presence) -> engine::Result<()> {
        Err(refused())
    }
    unsafe fn map_registers(&self, guest: u64, registers: HostRange, give: bool) -> engine::Result<()> {
        let mut given = self.given.lock().unwrap();
        let one = (guest, registers.length);
        match give {
            true => given.push(one),
            false => given.retain(|other| *other != one),
        }
        Ok(())
    }
    fn set_dirty_tracking(&self, _: u32, _: bool) -> engine::Result<()> {
        Err(refused())
    }
    fn dirty_log(&self, _: u32) -> engine::Result<Vec<u64>> {
        Err(refused())
    }
    fn send_msi(&self, _: MsiMessage) -> engine::Result<()> {
        Err(refused())
    }
    fn create_interrupt(&self) -> Arc<dyn Interrupt> {
        let source = Arc::<Source>::default();
        self.sources.lock().unwrap().push(Arc::clone(&source));
        source
    }
    fn attach_doorbell(&self, _: Doorbell, _: &EventFd) -> engine::Result<()> {
        Err(refused())
    }
    fn detach_doorbell(&self, _: Doorbell, _: &EventFd) -> engine::Result<()> {
        Err(refused())
    }
    fn reserve_ioapic_pins(&self, _: u32) -> engine::Result<()> {
        Err(refused())
    }
    fn save(&self) -> engine::Result<VmState> {
        Err(refused())
    }
    fn restore(&self, _: &VmState) -> engine::Result<()> {
        Err(refused())
    }
}

/// A function that tests look at while the guest has it. When it is closed, its address space must still be there.
pub(super) struct Shared {
    device: Arc<FakeDevice>,
    space: Arc<FakeSpace>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        let mut command = [0; 2];
        let config = self.device.region(CONFIG_REGION).unwrap();
        self.device.read(&config, 4, &mut command).unwrap();
        assert_eq!(command[0] & 4, 0, "it is a bus master when it is closed");
        assert!(
            self.space.mapped_bytes() > 0 || std::thread::panicking(),
            "memory was unmapped before it was closed"
        );
    }
}

impl Device for Shared {
    fn region(&self, index: u32) -> Result<Region, VfioError> {
        self.device.region(index)
    }
    fn read(&self, region: &Region, offset: u64, data: &mut [u8]) -> std::io::Result<()> {
        self.device.read(region, offset, data)
    }
    fn write(&self, region: &Region, offset: u64, data: &[u8]) -> std::io::Result<()> {
        self.device.write(region, offset, data)
    }
    fn map(&self, region: &Region, offset: u64, length: u64) -> std::io::Result<Option<Mapping>> {
        self.device.map(region, offset, length)
    }
    fn irq_info(&self, irq: Irq) -> Result<IrqInfo, VfioError> {
        self.device.irq_info(irq)
    }
    fn set_interrupts(&self, irq: Irq, events: &[BorrowedFd<'_>]) -> Result<(), VfioError> {
        self.device.set_interrupts(irq, events)
    }
    fn mask_intx(&self, mask: IntxMask<'_>) -> Result<(), VfioError> {
        self.device.mask_intx(mask)
    }
    fn can_reset(&self) -> bool {
        self.device.can_reset()
    }
    fn reset(&self) -> Result<(), VfioError> {
        self.device.reset()
    }
}

/// A function in a machine.
pub(super) struct Machine {
    registers: Registers,
    pub(super) device: Arc<FakeDevice>,
    pub(super) space: Arc<FakeSpace>,
    pub(super) engine: Arc<Engine>,
    pub(super) pin: Arc<Pin>,
    _ram: Ram,
}

impl Deref for Machine {
    type Target = Registers;

    fn deref(&self) -> &Registers {
        &self.registers
    }
}

impl Machine {
    pub(super) fn new(device: FakeDevice) -> Self {
        let space = Arc::new(FakeSpace::new());
        let shared = DmaSpace::new(Arc::clone(&space) as Arc<dyn AddressSpace>);
        Self::sharing(device, space, shared)
    }

    /// With the address space of another function.
    pub(super) fn sharing(device: FakeDevice, space: Arc<FakeSpace>, shared: Arc<DmaSpace>) -> Self {
        let (device, engine) = (Arc::new(device), Arc::<Engine>::default());
        let ram = Ram::allocate(ByteSize::mib(256)).unwrap();
        let function = Shared {
            device: Arc::clone(&device),
            space: Arc::clone(&space),
        };
        let unplugged = Unplugged::new(Box::new(function), None, Arc::clone(&shared)).unwrap();
        let vm = Arc::clone(&engine) as Arc<dyn Vm>;
        let pin = Arc::<Pin>::default();
        let line = Arc::clone(&pin) as Arc<dyn InterruptPin>;
        let registers = unplugged
            .registers(&vm, Some(line), Reach::All(shared.map(&DmaMemory::of(&ram)).unwrap()))
            .unwrap();
        device.take_written();
        Self {
            registers,
            device,
            space,
            engine,
            pin,
            _ram: ram,
        }
    }

    pub(super) fn read16(&self, offset: usize) -> u16 {
        let mut data = [0; 2];
        self.config_read(offset, &mut data);
        u16::from_le_bytes(data)
    }

    pub(super) fn read32(&self, offset: usize) -> u32 {
        let mut data = [0; 4];
        self.config_read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    pub(super) fn write16(&self, offset: usize, value: u16) {
        self.config_write(offset, &value.to_le_bytes());
    }

    pub(super) fn write32(&self, offset: usize, value: u32) {
        self.config_write(offset, &value.to_le_bytes());
    }

    /// The ids in the list of capabilities, and where they are.
    pub(super) fn capabilities(&self) -> Vec<(u8, usize)> {
        let mut found = Vec::new();
        let mut at = usize::from(self.read16(0x34) & 0xff);
        while at != 0 {
            let [id, next] = self.read16(at).to_le_bytes();
            found.push((id, at));
            at = next.into();
        }
        found
    }

    /// What has reached the function's configuration space since the last call.
    pub(super) fn seen(&self) -> Vec<(u64, Vec<u8>)> {
        let written = self.device.take_written().into_iter();
        let config = written.filter(|written| written.region == CONFIG_REGION);
        config.map(|written| (written.offset, written.data)).collect()
    }
}

/// Why a function cannot be given away.
pub(super) fn refusal(device: FakeDevice) -> String {
    let space = DmaSpace::new(Arc::new(FakeSpace::new()));
    let refused = Unplugged::new(Box::new(device), None, space);
    refused.err().map(|error| error.to_string()).unwrap_or_default()
}

/// The same of a guest that has no level-triggered interrupts; what it is shown of the pin otherwise.
pub(super) fn without_levels(device: FakeDevice) -> Result<u16, String> {
    let space = DmaSpace::new(Arc::new(FakeSpace::new()));
    let unplugged = Unplugged::new(Box::new(device), None, Arc::clone(&space)).unwrap();
    let vm = Arc::<Engine>::default() as Arc<dyn Vm>;
    let ram = Ram::allocate(ByteSize::mib(256)).unwrap();
    let reach = Reach::All(space.map(&DmaMemory::of(&ram)).unwrap());
    let registers = unplugged
        .registers(&vm, None, reach)
        .map_err(|error| error.to_string())?;
    let mut shown = [0; 2];
    registers.config_read(0x3c, &mut shown);
    Ok(u16::from_le_bytes(shown))
}
