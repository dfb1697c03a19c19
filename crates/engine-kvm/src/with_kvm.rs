//! What the fakes of the other tests are said to be like: KVM itself, where this machine has one, with guests of a few bytes. In the
//! lab the case `kvm-nvme` has all of it with a device.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::EventFd;
use engine::state::{GeneralRegisters, Segment, SystemRegisters};
use engine::{BootState, CpuModel, Engine, Exit, HostRange, MsiMessage, Presence, Vcpu, Vm};
use rustix::fs::MemfdFlags;
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestRegionMmap, MemoryRegionAddress, MmapRegion};

use crate::KvmEngine;

const PINS: u32 = 8;
const PAGE: u64 = 4096;

/// Registers of a local APIC (Intel SDM 3A, 11.4.1): spurious interrupt vector, with the bit that turns it on (11.9), and the first of
/// the interrupt request register's, which come 16 bytes apart with 32 vectors each (11.8.4).
const SPURIOUS: usize = 0xf0;
const ENABLED: u8 = 1;
const REQUESTS: usize = 0x200;

/// `None` on machines without KVM, with a line that says so.
fn kvm() -> Option<KvmEngine> {
    KvmEngine::open()
        .inspect_err(|error| eprintln!("not tested: {error}"))
        .ok()
}

struct Machine {
    vm: Arc<dyn Vm>,
    vcpu: Box<dyn Vcpu>,
    ram: Arc<GuestRegionMmap<()>>,
}

impl Machine {
    /// With 64 KiB of memory at 0, and a vCPU whose local APIC is on.
    fn new(engine: &KvmEngine) -> Self {
        let vm = engine.create_vm(CpuModel::Host).unwrap();
        vm.reserve_ioapic_pins(PINS).unwrap();
        let ram = GuestRegionMmap::new(MmapRegion::new(0x1_0000).unwrap(), GuestAddress(0)).unwrap();
        let ram = Arc::new(ram);
        vm.map_ram(0, Arc::clone(&ram), Presence::AtOnce).unwrap();
        let mut vcpu = vm.create_vcpu(0, 1).unwrap();
        let mut state = vcpu.save().unwrap();
        state.lapic[SPURIOUS + 1] |= ENABLED;
        vcpu.restore(&state).unwrap();
        Self { vm, vcpu, ram }
    }

    /// Whether this vector waits in the local APIC for its guest; within a moment, as KVM has a thread of its own deliver what it finds in an
    /// event.
    fn requested(&mut self, vector: usize) -> bool {
        let limit = Instant::now() + Duration::from_secs(2);
        loop {
            if self.requests_now(vector) {
                return true;
            }
            if Instant::now() > limit {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn requests_now(&mut self, vector: usize) -> bool {
        let lapic = self.vcpu.save().unwrap().lapic;
        lapic[REQUESTS + vector / 32 * 16 + vector % 32 / 8] & 1 << (vector % 8) != 0
    }

    /// Runs `code`, in real mode with DS at 0x1_0000.
    fn start(&mut self, code: &[u8]) {
        const AT: u64 = 0x1000;
        self.ram.write_slice(code, MemoryRegionAddress(AT)).unwrap();
        let segment = |rights, base| Segment {
            base,
            limit: 0xffff,
            rights,
            ..Segment::default()
        };
        let (code, data) = (segment(0x9b, 0), segment(0x93, 0x1_0000));
        let boot = BootState {
            general: GeneralRegisters {
                rip: AT,
                rflags: 2,
                ..GeneralRegisters::default()
            },
            system: SystemRegisters {
                segments: [code, data, data, data, data, data],
                tr: segment(0x8b, 0),
                ldtr: segment(0x82, 0),
                // ET, which is always set.
                cr: [1 << 4, 0, 0, 0, 0],
                ..SystemRegisters::default()
            },
        };
        self.vcpu.set_boot_state(&boot).unwrap();
    }

    /// Where the guest comes out next.
    fn next(&mut self) -> Out {
        loop {
            match self.vcpu.run().unwrap() {
                Exit::Interrupted => (),
                Exit::PortWrite { data, .. } => return Out::Port(data[0]),
                Exit::MmioRead { address, data } => {
                    data.fill(0xee);
                    return Out::Read(address);
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Out {
    Port(u8),
    Read(u64),
}

const fn to(vector: u32) -> MsiMessage {
    MsiMessage {
        address: 0xfee0_0000,
        data: vector,
    }
}

#[test]
fn an_attached_event_interrupts_the_vcpu_and_is_kept_while_nothing_is_routed() {
    let Some(engine) = kvm() else { return };
    let mut machine = Machine::new(&engine);
    let interrupt = machine.vm.create_interrupt();
    let event = EventFd::new().unwrap();
    interrupt.attach(event.try_clone().unwrap()).unwrap();
    event.signal();
    assert!(interrupt.is_pending() && !machine.requests_now(0x41));
    // What came before the irqfd is delivered by it.
    interrupt.route(Some(to(0x41)));
    assert!(machine.requested(0x41) && !interrupt.is_pending());
    // A message that changes under it.
    interrupt.route(Some(to(0x62)));
    assert!(!machine.requests_now(0x62));
    event.signal();
    assert!(machine.requested(0x62));
    assert!(!event.consume(), "KVM takes the signal");
    // Masked: it stays in the event, and nothing of before does.
    interrupt.route(None);
    assert!(!interrupt.is_pending());
    event.signal();
    assert!(interrupt.is_pending() && !machine.requests_now(0x83));
    interrupt.route(Some(to(0x83)));
    assert!(machine.requested(0x83));
    // What the assign found is in the event still, and goes with the deassign.
    interrupt.route(None);
    assert!(!interrupt.is_pending());
    drop(interrupt);
    event.signal();
    assert!(event.consume(), "nobody takes it any more");
}

#[test]
fn many_events_have_their_own_messages_and_one_bad_one_spoils_none() {
    let Some(engine) = kvm() else { return };
    let mut machine = Machine::new(&engine);
    let (mut interrupts, mut events) = (Vec::new(), Vec::new());
    for _ in 0..64 {
        let event = EventFd::new().unwrap();
        let interrupt = machine.vm.create_interrupt();
        interrupt.attach(event.try_clone().unwrap()).unwrap();
        interrupts.push(interrupt);
        events.push(event);
    }
    let message = |index: usize| match index {
        // No APIC's: KVM refuses it in any table.
        7 => MsiMessage {
            address: 0x5_fee0_0000,
            data: 0x30,
        },
        _ => to(u32::try_from(0x40 + index).unwrap()),
    };
    for (index, interrupt) in interrupts.iter().enumerate() {
        interrupt.prepare(message(index));
    }
    for (index, interrupt) in interrupts.iter().enumerate() {
        interrupt.route(Some(message(index)));
    }
    for event in events.iter().step_by(3) {
        event.signal();
    }
    for index in (0..64).step_by(3) {
        assert!(machine.requested(0x40 + index), "{index}");
    }
    assert!(!machine.requests_now(0x41) && !machine.requests_now(0x42));
    events[7].signal();
    assert!(events[7].consume(), "it has nowhere to go, and is kept");
}

/// Signals from another thread while vectors are masked and unmasked: of each group of signals that ends before an unmask at least
/// one is delivered.
#[test]
fn no_signal_is_lost_when_a_vector_is_unmasked_meanwhile() {
    let Some(engine) = kvm() else { return };
    let mut machine = Machine::new(&engine);
    let interrupt = machine.vm.create_interrupt();
    let event = EventFd::new().unwrap();
    interrupt.attach(event.try_clone().unwrap()).unwrap();
    for round in 0..100_u32 {
        let vector = 0x20 + round * 2;
        let signal = event.try_clone().unwrap();
        let driver = std::thread::spawn(move || signal.signal());
        // Before, during or after the signal.
        interrupt.route(Some(to(vector)));
        interrupt.route(None);
        driver.join().unwrap();
        // What was not delivered there is pending, and delivered here.
        interrupt.route(Some(to(vector + 1)));
        let vector = usize::try_from(vector).unwrap();
        let either = machine.requests_now(vector) || machine.requested(vector + 1);
        assert!(either, "round {round}: the signal is nowhere");
        interrupt.route(None);
    }
}

/// Pages of a file, which stand for a device's registers.
struct Pages {
    file: File,
    region: MmapRegion,
}

impl Pages {
    fn new(pages: usize) -> Self {
        let file = File::from(rustix::fs::memfd_create("registers", MemfdFlags::CLOEXEC).unwrap());
        let length = pages << 12;
        file.set_len(length as u64).unwrap();
        let region = MmapRegion::from_file(FileOffset::new(file.try_clone().unwrap(), 0), length).unwrap();
        Self { file, region }
    }

    fn range(&self) -> HostRange {
        HostRange {
            address: self.region.as_ptr() as u64,
            length: self.region.size() as u64,
        }
    }

    /// As VFIO has it when a device is reset, and when it has come back: there is nothing behind the mapping.
    fn reachable(&self, there: bool) {
        let length = if there { self.region.size() as u64 } else { 0 };
        self.file.set_len(length).unwrap();
    }

    fn fill(&self, byte: u8) {
        self.file.write_all_at(&vec![byte; self.region.size()], 0).unwrap();
    }
}

/// `again: mov al, [0]; out 0x10, al; jmp again`: what is at 0x1_0000, over and over.
const READER: [u8; 7] = [0xa0, 0, 0, 0xe6, 0x10, 0xeb, 0xf9];
const AT: u64 = 0x1_0000;

#[test]
fn registers_are_reached_without_an_exit_and_what_is_not_given_exits() {
    let Some(engine) = kvm() else { return };
    let pages = Pages::new(2);
    pages.fill(0x5a);
    let mut machine = Machine::new(&engine);
    // SAFETY: the pages outlive the machine.
    let map = |vm: &dyn Vm, at, give| unsafe { vm.map_registers(at, pages.range(), give) };
    machine.start(&READER);
    assert_eq!([machine.next(), machine.next()], [Out::Read(AT), Out::Port(0xee)]);
    map(machine.vm.as_ref(), AT, true).unwrap();
    assert_eq!([machine.next(), machine.next()], [Out::Port(0x5a), Out::Port(0x5a)]);
    // A guest that moves its BARs: over RAM, over itself, across the end; nothing of that does any harm.
    for refused in [0, 0xf000, AT + PAGE, !(PAGE - 1), 1 << 62] {
        assert!(map(machine.vm.as_ref(), refused, true).is_err(), "{refused:#x}");
    }
    assert_eq!(machine.next(), Out::Port(0x5a));
    map(machine.vm.as_ref(), AT, false).unwrap();
    assert_eq!(machine.next(), Out::Read(AT));
    // RAM's slots are none of theirs: all that a VM can have, and RAM still has its own.
    let (mut given, mut next) = (0_u32, 1 << 32);
    while map(machine.vm.as_ref(), next, true).is_ok() {
        (given, next) = (given + 1, next + 2 * PAGE);
        if given == 300 {
            break;
        }
    }
    assert!(given > 100, "{given} slots");
    let ram = GuestRegionMmap::new(MmapRegion::new(0x1000).unwrap(), GuestAddress(0x10_0000)).unwrap();
    machine.vm.map_ram(1, Arc::new(ram), Presence::AtOnce).unwrap();
    assert!(machine.vm.dirty_log(0).is_err(), "no record is kept unasked");
}

#[test]
fn registers_that_go_from_this_process_exit_and_come_back() {
    let Some(engine) = kvm() else { return };
    let (pages, other) = (Pages::new(1), Pages::new(1));
    pages.fill(0x5a);
    let mut machine = Machine::new(&engine);
    // SAFETY: the pages outlive the machine.
    unsafe { machine.vm.map_registers(AT, pages.range(), true) }.unwrap();
    machine.start(&READER);
    assert_eq!([machine.next(), machine.next()], [Out::Port(0x5a), Out::Port(0x5a)]);
    pages.reachable(false);
    assert_eq!([machine.next(), machine.next()], [Out::Read(AT), Out::Port(0xee)]);
    pages.reachable(true);
    pages.fill(0xa5);
    // A KVM that has no processor's help comes out where it finds nothing, and finds it again by itself. Others fail, and the registers
    // were taken until there are more.
    let next = machine.next();
    assert!([Out::Read(AT), Out::Port(0xa5)].contains(&next), "{next:?}");
    // SAFETY: the pages outlive the machine.
    unsafe { machine.vm.map_registers(AT + PAGE, other.range(), true) }.unwrap();
    assert!(
        (0..2).any(|_| machine.next() == Out::Port(0xa5)),
        "they did not come back"
    );
    assert_eq!(machine.next(), Out::Port(0xa5));
}

#[test]
fn kvm_takes_files_of_vfios_and_no_others() {
    let Some(engine) = kvm() else { return };
    let machine = Machine::new(&engine);
    let file = std::fs::File::open("/dev/null").unwrap();
    let error = machine.vm.add_host_function(file.as_fd()).unwrap_err().to_string();
    assert!(error.contains("file of its IOMMU group"), "{error}");
    // Once more: a VM has one such device, and it is there.
    let again = machine.vm.add_host_function(file.as_fd()).unwrap_err().to_string();
    assert_eq!(again, error);
}
