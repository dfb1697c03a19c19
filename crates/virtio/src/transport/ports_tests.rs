//! A device that is reached by ports, by hand: the conformance kit's driver reaches them by memory.

use std::sync::Arc;

use memory::GuestRam;
use observe::Registry;
use pci::PciFunction;
use vm_memory::{Bytes, GuestAddress};

use super::tests::{Counting, Seen};
use super::{Reach, TransportError, VirtioPciDevice};
use crate::conformance::fakes::FakeVm;

const PORTS: u32 = 0xc100;
const TABLE: u64 = 0x20_0000;

struct Machine {
    vm: Arc<FakeVm>,
    memory: Arc<GuestRam>,
    device: Arc<VirtioPciDevice>,
    seen: Arc<std::sync::Mutex<Seen>>,
}

impl Machine {
    fn new() -> Self {
        let memory = Arc::new(GuestRam::from_ranges(&[(GuestAddress(0), 4 << 20)]).unwrap());
        let vm = Arc::new(FakeVm::default());
        let device = Counting::default();
        let seen = Arc::clone(&device.seen);
        let engine = Arc::clone(&vm) as Arc<dyn engine::Vm>;
        let named: (&str, Box<dyn crate::VirtioDevice>) = ("it", Box::new(device));
        let device =
            VirtioPciDevice::reached_by(Reach::Ports, named, engine, Arc::clone(&memory), &Registry::new()).unwrap();
        Self {
            vm,
            memory,
            device,
            seen,
        }
    }

    fn config(&self, offset: usize) -> u32 {
        let mut data = [0; 4];
        self.device.config_read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    /// The offsets of capabilities with this id.
    fn capabilities(&self, id: u32) -> Vec<usize> {
        let mut at = usize::try_from(self.config(0x34) & 0xff).unwrap();
        let mut found = Vec::new();
        while at != 0 {
            let head = self.config(at);
            if head & 0xff == id {
                found.push(at);
            }
            at = usize::try_from(head >> 8 & 0xff).unwrap();
        }
        found
    }

    fn write(&self, register: u64, width: usize, value: u64) {
        self.device.bar_write(0, register, &value.to_le_bytes()[..width]);
    }

    /// Gives BARs their places and turns everything on.
    fn place(&self) {
        self.device.config_write(0x10, &PORTS.to_le_bytes());
        self.device.config_write(0x18, &TABLE.to_le_bytes());
        self.device.config_write(4, &[0b111, 0]);
        let msix = self.capabilities(0x11)[0];
        self.device.config_write(msix + 2, &[0, 0x80]);
    }

    fn start(&self) {
        for status in [0, 1, 3] {
            self.write(0x14, 1, status);
        }
        self.write(8, 4, 1);
        self.write(0xc, 4, 1);
        self.write(0x14, 1, 0xb);
        for queue in 0..2_u64 {
            self.write(0x16, 2, queue);
            self.write(0x18, 2, 8);
            self.write(0x1a, 2, queue + 1);
            for (register, part) in [(0x20, 0x1000), (0x28, 0x2000), (0x30, 0x3000)] {
                self.write(register, 8, 0x10_0000 + queue * 0x4000 + part);
            }
            self.write(0x1c, 2, 1);
        }
        self.write(0x14, 1, 0xf);
    }
}

#[test]
fn capabilities_lead_into_the_ports() {
    let machine = Machine::new();
    assert_eq!(machine.config(0x10) & 0b11, 0b01, "BAR 0 is ports");
    assert_eq!(machine.config(0x18) & 0xf, 0b1100, "BAR 2 is memory, of 64 bits");
    let places: Vec<_> = machine
        .capabilities(9)
        .into_iter()
        .map(|at| {
            let (kind, bar) = (machine.config(at) >> 24, machine.config(at + 4) & 0xff);
            (kind, bar, machine.config(at + 8), machine.config(at + 12))
        })
        .collect();
    let expected = [(1, 0, 0, 0x38), (3, 0, 0x3c, 1), (2, 0, 0xc0, 8), (4, 0, 0x40, 0x80)];
    assert_eq!(places[..4], expected);
    let msix = machine.capabilities(0x11)[0];
    assert_eq!((machine.config(msix + 4), machine.config(msix + 8)), (2, 0x802));
}

#[test]
fn doorbells_are_ports_and_interrupts_what_memory_says() {
    let machine = Machine::new();
    machine.place();
    machine.start();
    assert_eq!(machine.seen.lock().unwrap().started, 1);
    assert_eq!(machine.vm.bells(), [0xc1c0, 0xc1c4]);
    let entry = TABLE + 2 * 16;
    machine
        .memory
        .write_obj(0x42_fee0_1000_u64, GuestAddress(entry))
        .unwrap();
    machine.memory.write_obj(0x61_u64, GuestAddress(entry + 8)).unwrap();
    let interrupt = machine.seen.lock().unwrap().interrupt.clone().unwrap();
    interrupt.signal_queue(1);
    let sent = machine.vm.interrupt(2).unwrap();
    let route = sent.routed().unwrap();
    assert_eq!((sent.delivered(), route.address, route.data), (1, 0x42_fee0_1000, 0x61));
    // Masked, and then not: the next access sends it.
    machine.memory.write_obj(1_u32, GuestAddress(entry + 12)).unwrap();
    interrupt.signal_queue(1);
    assert_eq!(sent.delivered(), 1);
    machine.memory.write_obj(0_u32, GuestAddress(entry + 12)).unwrap();
    machine.device.bar_read(0, 0x14, &mut [0]);
    assert_eq!(sent.delivered(), 2);
    // Without MSI-X there is none, and with the ports elsewhere the bells are.
    let msix = machine.capabilities(0x11)[0];
    machine.device.config_write(msix + 2, &[0, 0]);
    interrupt.signal_queue(1);
    assert_eq!(sent.delivered(), 2);
    machine.device.config_write(0x10, &0xd000_u32.to_le_bytes());
    assert_eq!(machine.vm.bells(), [0xd0c0, 0xd0c4]);
}

#[test]
fn more_queues_than_ports_have_room_for_are_refused() {
    struct Wide;
    impl crate::VirtioDevice for Wide {
        fn device_type(&self) -> u16 {
            1
        }
        fn features(&self) -> u64 {
            0
        }
        fn queue_sizes(&self) -> &[u16] {
            &[8; 17]
        }
        fn read_config(&self, _: usize, _: &mut [u8]) {}
        fn write_config(&mut self, _: usize, _: &[u8]) {}
        fn activate(&mut self, _: crate::Activation) -> Result<(), crate::DeviceError> {
            Ok(())
        }
        fn deactivate(&mut self) -> Vec<crate::ActiveQueue> {
            Vec::new()
        }
    }
    let machine = Machine::new();
    let made = VirtioPciDevice::reached_by(
        Reach::Ports,
        ("wide", Box::new(Wide)),
        machine.vm,
        machine.memory,
        &Registry::new(),
    );
    assert!(matches!(
        made.err(),
        Some(TransportError::Queues { queues: 17, most: 16 })
    ));
}
