//! Functions that come and leave, with an address space without an IOMMU: who is on the bus, what is mapped, whatever fails.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use base::{ByteSize, Epoll, Interest};
use bus::BusDevice;
use device::InterruptPin;
use engine::Vm;
use pci::{BAR_COUNT, MemoryRanges, PciFunction, Window, Windows};
use vfio::AddressSpace;
use vfio::fake::{FakeSpace, Op};
use virtio::conformance::fakes::FakeVm;

use super::*;
use crate::platform::IoApic;

/// A function that knows whether it is open, and that it is closed while memory is mapped.
struct Probe {
    space: Arc<FakeSpace>,
    open: Arc<AtomicBool>,
    behind_iommu: bool,
    _reach: Reach,
}

impl PciFunction for Probe {
    fn config_read(&self, _: usize, data: &mut [u8]) {
        data.fill(0);
    }
    fn config_write(&self, _: usize, _: &[u8]) {}
    fn memory_ranges(&self) -> MemoryRanges {
        [None; BAR_COUNT]
    }
    fn bar_read(&self, _: usize, _: u64, _: &mut [u8]) {}
    fn bar_write(&self, _: usize, _: u64, _: &[u8]) {}
}

impl Drop for Probe {
    fn drop(&mut self) {
        let mapped = self.space.mapped_bytes();
        if self.behind_iommu {
            assert!(mapped > 0, "what was mapped went before the function");
        } else {
            assert_eq!(mapped, MEMORY.bytes(), "memory went before the function");
        }
        self.open.store(false, Ordering::SeqCst);
    }
}

struct Unplugged {
    fake: Arc<FakeSpace>,
    space: Arc<DmaSpace>,
    open: Arc<AtomicBool>,
    refuses: bool,
    behind_iommu: bool,
    /// What the last one was given.
    pin: Arc<Mutex<Option<Arc<dyn InterruptPin>>>>,
}

impl HostFunction for Unplugged {
    fn space(&self) -> Arc<DmaSpace> {
        Arc::clone(&self.space)
    }
    fn plug(
        self: Box<Self>,
        _: &Arc<dyn Vm>,
        pin: Option<Arc<dyn InterruptPin>>,
        reach: Reach,
    ) -> Result<Arc<dyn PciFunction>, CreateError> {
        *self.pin.lock().unwrap() = pin;
        if self.refuses {
            return Err(CreateError::Value("it has no interrupts".into()));
        }
        // All that the guest owns is mapped before the function is there, or nothing.
        let mapped = self.fake.mapped_bytes();
        assert_eq!(mapped, if self.behind_iommu { 0 } else { MEMORY.bytes() });
        assert_eq!(matches!(reach, Reach::Mapped(_)), self.behind_iommu);
        self.open.store(true, Ordering::SeqCst);
        Ok(Arc::new(Probe {
            space: Arc::clone(&self.fake),
            open: Arc::clone(&self.open),
            behind_iommu: self.behind_iommu,
            _reach: reach,
        }))
    }
}

const MEMORY: ByteSize = ByteSize::mib(256);

/// What a machine has, without vCPUs.
struct Rig {
    fake: Arc<FakeSpace>,
    space: Arc<DmaSpace>,
    functions: HostFunctions,
    vm: Arc<dyn Vm>,
    bus: Arc<PciBus>,
    ioapic: Arc<IoApic>,
    memory: DmaMemory,
    ram: Ram,
    engine: Arc<FakeVm>,
    pin: Arc<Mutex<Option<Arc<dyn InterruptPin>>>>,
}

impl Rig {
    fn new() -> Self {
        let (fake, ram) = (Arc::new(FakeSpace::new()), Ram::allocate(MEMORY).unwrap());
        let window = |start| Window { start, length: 1 << 20 };
        let vm = Arc::new(FakeVm::default());
        Self {
            space: DmaSpace::new(Arc::clone(&fake) as Arc<dyn AddressSpace>),
            fake,
            functions: HostFunctions::new(None, 2).unwrap(),
            ioapic: IoApic::new(vm.as_ref()),
            vm: Arc::clone(&vm) as Arc<dyn Vm>,
            engine: vm,
            pin: Arc::default(),
            bus: PciBus::new(Windows {
                low: window(3 << 30),
                high: window(256 << 30),
                ports: None,
            }),
            memory: memory(&ram, 2, None, None),
            ram,
        }
    }

    fn function(&self, id: &str, refuses: bool) -> (NamedFunction, Arc<AtomicBool>) {
        let open = Arc::new(AtomicBool::new(false));
        let function = Box::new(Unplugged {
            fake: Arc::clone(&self.fake),
            space: Arc::clone(&self.space),
            open: Arc::clone(&open),
            refuses,
            behind_iommu: self.functions.iommu.is_some(),
            pin: Arc::clone(&self.pin),
        });
        (
            NamedFunction {
                id: id.into(),
                function,
            },
            open,
        )
    }

    fn attach(&mut self, function: NamedFunction) -> Result<(), MachineError> {
        let board = Board {
            vm: &self.vm,
            bus: &self.bus,
            ioapic: &self.ioapic,
            memory: &self.memory,
        };
        self.functions.attach(function, board)
    }

    /// What the machine's owner does when memory is mapped.
    fn finish(&mut self) {
        let epoll = Epoll::new().unwrap();
        epoll.add(self.functions.ended(), 0, Interest::READ).unwrap();
        let mut ready = Vec::new();
        epoll.wait(&mut ready, Some(Duration::from_secs(60))).unwrap();
        assert_eq!(ready.len(), 1, "nobody says that memory is mapped");
        let board = Board {
            vm: &self.vm,
            bus: &self.bus,
            ioapic: &self.ioapic,
            memory: &self.memory,
        };
        self.functions.finish(board);
    }

    fn state(&self, id: &str) -> FunctionState {
        let all = self.functions.states();
        all.into_iter().find(|(name, _)| name == id).unwrap().1
    }

    fn is_unmapped_soon(&self) {
        let begun = Instant::now();
        while self.fake.mapped_bytes() > 0 || self.functions.is_busy() {
            assert!(begun.elapsed() < Duration::from_secs(60), "memory stays mapped");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn functions_come_when_memory_is_mapped_and_it_is_unmapped_with_the_last() {
    let mut rig = Rig::new();
    for round in 0..3 {
        let ((one, one_open), (two, two_open)) = (rig.function("one", false), rig.function("two", false));
        rig.attach(one).unwrap();
        assert_eq!(
            (rig.functions.first(), rig.state("one")),
            (Some("one"), FunctionState::Mapping)
        );
        let again = rig.function("one", false).0;
        assert!(matches!(rig.attach(again), Err(MachineError::FunctionTaken(_))));
        rig.finish();
        assert_eq!(
            (rig.state("one"), rig.functions.mapped()),
            (FunctionState::Present(1), MEMORY.bytes())
        );
        // The next one finds it mapped.
        rig.attach(two).unwrap();
        assert_eq!(rig.state("two"), FunctionState::Present(2));
        assert_eq!(rig.fake.count(Op::Map), 2 * (round + 1), "two pieces of 128 MiB, once");
        assert!(one_open.load(Ordering::SeqCst) && two_open.load(Ordering::SeqCst));
        rig.functions.detach("one", &rig.bus).unwrap();
        assert!(!one_open.load(Ordering::SeqCst) && two_open.load(Ordering::SeqCst));
        assert_eq!(rig.functions.mapped(), MEMORY.bytes());
        assert!(matches!(
            rig.functions.detach("one", &rig.bus),
            Err(MachineError::NoFunction(_))
        ));
        rig.functions.detach("two", &rig.bus).unwrap();
        assert_eq!((rig.functions.first(), two_open.load(Ordering::SeqCst)), (None, false));
        rig.is_unmapped_soon();
        assert!(rig.bus.remove(1).is_none() && rig.bus.remove(2).is_none());
    }
}

#[test]
fn a_function_that_a_vcpu_accesses_is_closed_afterwards_and_by_its_owner() {
    let mut rig = Rig::new();
    let (function, open) = rig.function("disk", false);
    rig.attach(function).unwrap();
    rig.finish();
    // As a vCPU that is in an access to it.
    let accessed = rig.bus.remove(1).unwrap();
    assert_eq!(rig.bus.add(Arc::clone(&accessed)), Ok(1));
    rig.functions.detach("disk", &rig.bus).unwrap();
    rig.functions.detach("disk", &rig.bus).unwrap();
    assert_eq!(
        (rig.state("disk"), rig.functions.first()),
        (FunctionState::Leaving, Some("disk"))
    );
    assert_eq!(
        (open.load(Ordering::SeqCst), rig.fake.mapped_bytes()),
        (true, MEMORY.bytes())
    );
    drop(accessed);
    assert!(open.load(Ordering::SeqCst), "a vCPU has closed it");
    rig.functions.close_left();
    assert!(rig.functions.states().is_empty() && !open.load(Ordering::SeqCst));
    rig.is_unmapped_soon();
}

#[test]
fn what_cannot_be_mapped_leaves_nothing_and_can_be_tried_again() {
    let mut rig = Rig::new();
    let owners = Arc::strong_count(&rig.ram.regions()[0]);
    for nth in [1, 2] {
        rig.fake.fail(Op::Map, nth);
        let (function, open) = rig.function("disk", false);
        rig.attach(function).unwrap();
        rig.finish();
        let FunctionState::Failed(why) = rig.state("disk") else {
            panic!("it is {:?}", rig.state("disk"));
        };
        assert!(why.contains("cannot be mapped for DMA"), "{why}");
        assert_eq!((rig.functions.first(), rig.fake.mapped_bytes()), (None, 0));
        assert!(!open.load(Ordering::SeqCst));
        rig.functions.detach("disk", &rig.bus).unwrap();
    }
    let (function, _open) = rig.function("disk", false);
    rig.attach(function).unwrap();
    rig.finish();
    assert_eq!(rig.state("disk"), FunctionState::Present(1));
    rig.functions.detach("disk", &rig.bus).unwrap();
    rig.is_unmapped_soon();
    assert_eq!(
        Arc::strong_count(&rig.ram.regions()[0]),
        owners,
        "somebody keeps the memory"
    );
}

#[test]
fn a_function_that_cannot_be_plugged_takes_its_memory_along() {
    let mut rig = Rig::new();
    let (function, _) = rig.function("disk", true);
    rig.attach(function).unwrap();
    rig.finish();
    assert_eq!(rig.state("disk"), FunctionState::Failed("it has no interrupts".into()));
    rig.is_unmapped_soon();
    // Beside one that has come it changes nothing.
    rig.functions.detach("disk", &rig.bus).unwrap();
    let (good, _open) = rig.function("good", false);
    rig.attach(good).unwrap();
    rig.finish();
    let (bad, _) = rig.function("bad", true);
    rig.attach(bad).unwrap();
    assert!(matches!(rig.state("bad"), FunctionState::Failed(_)));
    assert_eq!(
        (rig.state("good"), rig.functions.mapped()),
        (FunctionState::Present(1), MEMORY.bytes())
    );
    rig.functions.detach("good", &rig.bus).unwrap();
    rig.is_unmapped_soon();
}

#[test]
fn what_is_detached_while_memory_is_mapped_never_comes() {
    let mut rig = Rig::new();
    let (function, open) = rig.function("disk", false);
    rig.attach(function).unwrap();
    rig.functions.detach("disk", &rig.bus).unwrap();
    assert_eq!(rig.functions.first(), None);
    let (next, _) = rig.function("next", false);
    // The space that was given up maps nothing any more: a VM's next function brings one of its own.
    assert!(matches!(rig.attach(next), Err(MachineError::FunctionsLeave)));
    rig.finish();
    assert!(!open.load(Ordering::SeqCst));
    rig.is_unmapped_soon();
    rig.space = DmaSpace::new(Arc::clone(&rig.fake) as Arc<dyn AddressSpace>);
    let (next, _open) = rig.function("next", false);
    rig.attach(next).unwrap();
    rig.finish();
    assert_eq!(rig.state("next"), FunctionState::Present(1));
    rig.functions.detach("next", &rig.bus).unwrap();
    rig.is_unmapped_soon();
}

#[test]
fn behind_an_iommu_functions_are_there_at_once_and_reach_what_the_guest_maps() {
    let mut rig = Rig::new();
    let endpoints = Endpoints::default();
    rig.functions.set_iommu(Some(endpoints.clone()));
    let (function, open) = rig.function("disk", false);
    rig.attach(function).unwrap();
    assert_eq!(
        (rig.state("disk"), rig.functions.first()),
        (FunctionState::Present(1), Some("disk"))
    );
    assert_eq!((rig.fake.count(Op::Map), rig.functions.mapped()), (0, 0));
    assert!(!rig.functions.is_busy());
    // As the guest's driver does: device 1, function 0.
    let range = |start, length| memory::layout::Range { start, length };
    let endpoint = endpoints.find(8).unwrap();
    endpoint
        .map(0x8000_0000, range(0, 8192), vfio::DmaAccess::ReadWrite)
        .unwrap();
    drop(endpoint);
    assert_eq!((rig.functions.mapped(), rig.functions.map_counts().calls), (8192, 1));
    let (again, _) = rig.function("disk", false);
    assert!(matches!(rig.attach(again), Err(MachineError::FunctionTaken(_))));
    // The guest knows it no more, also while a vCPU is in an access to it; what was mapped goes with it.
    let accessed = rig.bus.remove(1).unwrap();
    assert_eq!(rig.bus.add(Arc::clone(&accessed)), Ok(1));
    rig.functions.detach("disk", &rig.bus).unwrap();
    assert!(endpoints.find(8).is_none());
    assert_eq!((open.load(Ordering::SeqCst), rig.fake.mapped_bytes()), (true, 8192));
    drop(accessed);
    rig.functions.close_left();
    assert!(!open.load(Ordering::SeqCst), "it is closed, before that");
    assert_eq!((rig.fake.mapped_bytes(), rig.functions.mapped()), (0, 0));
    assert!(!rig.ram.pins().is_pinned());
}

#[test]
fn behind_an_iommu_one_that_cannot_be_plugged_is_no_endpoint() {
    let mut rig = Rig::new();
    let endpoints = Endpoints::default();
    rig.functions.set_iommu(Some(endpoints.clone()));
    let (function, _) = rig.function("disk", true);
    rig.attach(function).unwrap();
    assert_eq!(rig.state("disk"), FunctionState::Failed("it has no interrupts".into()));
    assert!(endpoints.find(8).is_none() && rig.functions.first().is_none());
}

#[test]
fn nothing_more_is_mapped_for_a_machine_that_ends() {
    let mut rig = Rig::new();
    let (function, _open) = rig.function("disk", false);
    let board = Board {
        vm: &rig.vm,
        bus: &rig.bus,
        ioapic: &rig.ioapic,
        memory: &rig.memory,
    };
    rig.functions.build(function, board).unwrap();
    rig.functions.give_up();
    let (balloon, begun) = (
        device::BalloonedDma::new(MEMORY.into(), device::MapTuning::default()),
        Instant::now(),
    );
    assert!(!balloon.await_inflated(1, &rig.space, Duration::from_secs(60)));
    assert!(begun.elapsed() < Duration::from_secs(30), "its space goes on");
}

impl Rig {
    /// As a guest's driver does: the pin of slot 1 is a level with vector 0x31.
    fn program_pin(&self) {
        // The first of the pins of slots is that of slot 4.
        let pin = crate::platform::SLOT_PINS[1];
        self.ioapic.write(0, &[0x10 + 2 * u8::try_from(pin).unwrap()]);
        self.ioapic.write(0x10, &0x8031_u32.to_le_bytes());
    }

    fn delivered(&self) -> u64 {
        let pin = usize::try_from(crate::platform::SLOT_PINS[1]).unwrap();
        self.engine.interrupt(pin).unwrap().delivered()
    }

    /// What the machine's owner does, if it is told to.
    fn look(&self) -> bool {
        let epoll = Epoll::new().unwrap();
        let pins = self.functions.interrupt_pins.events().unwrap();
        epoll.add(pins, 0, Interest::READ).unwrap();
        let mut ready = Vec::new();
        epoll.wait(&mut ready, Some(Duration::ZERO)).unwrap();
        self.functions.interrupt_pins.look();
        !ready.is_empty()
    }
}

#[test]
fn a_function_interrupts_by_the_pin_of_its_slot_until_it_has_left() {
    let mut rig = Rig::new();
    assert!(
        rig.functions.interrupt_pins.events().is_none(),
        "no guest pays for what it has not"
    );
    let (function, _open) = rig.function("card", false);
    rig.attach(function).unwrap();
    rig.finish();
    let pin = rig.pin.lock().unwrap().clone().unwrap();
    rig.program_pin();
    assert!(!rig.look());
    pin.asserts().signal();
    assert!(rig.look());
    assert_eq!(rig.delivered(), 0, "it is off");
    pin.switch(true);
    pin.asserts().signal();
    assert!(rig.look() && !rig.look());
    assert_eq!((rig.delivered(), pin.ended().consume()), (1, false));
    pin.asserts().signal();
    assert!(rig.look());
    assert_eq!(rig.delivered(), 1, "the guest is at it");
    rig.ioapic.end(0x31);
    assert!(pin.ended().consume());
    rig.look();
    assert_eq!(rig.delivered(), 1, "it was asked again, and has said nothing");
    pin.asserts().signal();
    assert!(rig.look());
    assert_eq!(rig.delivered(), 2);
    // What is signalled before it is turned off is not seen after that, and nothing is asserted then.
    pin.asserts().signal();
    pin.switch(false);
    assert!(!rig.look());
    rig.ioapic.end(0x31);
    assert!(!pin.ended().consume());
    // A function that has left is heard no more, while a vCPU is in an access to it as well.
    pin.switch(true);
    let accessed = rig.bus.remove(1).unwrap();
    assert_eq!(rig.bus.add(Arc::clone(&accessed)), Ok(1));
    pin.asserts().signal();
    rig.functions.detach("card", &rig.bus).unwrap();
    pin.switch(true);
    pin.asserts().signal();
    assert!(!rig.look());
    // Its line, which was the first, leads nowhere.
    rig.ioapic.assert(0, true);
    assert_eq!(rig.delivered(), 2);
    drop(accessed);
    rig.functions.close_left();
    rig.is_unmapped_soon();
}

#[test]
fn a_function_that_cannot_be_plugged_has_no_line() {
    let mut rig = Rig::new();
    let (function, _) = rig.function("card", true);
    rig.attach(function).unwrap();
    rig.finish();
    let pin = rig.pin.lock().unwrap().clone().unwrap();
    rig.program_pin();
    pin.switch(true);
    pin.asserts().signal();
    assert!(!rig.look());
    assert_eq!(rig.delivered(), 0);
    rig.is_unmapped_soon();
}
