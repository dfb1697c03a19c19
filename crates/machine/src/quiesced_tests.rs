//! Standing still, in a machine without a processor: what a device that cannot be saved, or cannot go on, does to it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use base::ByteSize;
use engine::Vm;
use memory::Ram;
use observe::Registry;
use state::Saved;
use virtio::conformance::driver::Driver;
use virtio::conformance::fakes::FakeVm;
use virtio::{Activation, ActiveQueue, DeviceError, VirtioDevice};
use vm_memory::{Bytes, GuestAddress};

use crate::Machine;
use crate::functions::HostFunctions;
use crate::machine::{Parts, add_platform};
use crate::platform::Event;
use crate::root::add_devices;
use crate::run_control::RunControl;
use crate::vcpu::Shared;

/// What a test knows of its device.
#[derive(Default)]
struct Knobs {
    /// It holds its queues.
    active: AtomicUsize,
    refuses_to_start: AtomicBool,
    /// Of the machine that it is in, and whether its vCPUs were to run when it got its queues last.
    machine: OnceLock<Arc<RunControl>>,
    found_guest_running: AtomicBool,
}

struct Lamp {
    knobs: Arc<Knobs>,
    queues: Vec<ActiveQueue>,
    has_form: bool,
}

impl VirtioDevice for Lamp {
    fn device_type(&self) -> u16 {
        4
    }
    fn features(&self) -> u64 {
        0
    }
    fn queue_sizes(&self) -> &[u16] {
        &[16]
    }
    fn read_config(&self, _: usize, _: &mut [u8]) {}
    fn write_config(&mut self, _: usize, _: &[u8]) {}
    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        if self.knobs.refuses_to_start.load(Ordering::SeqCst) {
            return Err(DeviceError::MissingQueue(7));
        }
        let runs = self.knobs.machine.get().is_some_and(|machine| machine.may_run());
        self.knobs.found_guest_running.store(runs, Ordering::SeqCst);
        self.queues = activation.queues;
        self.knobs.active.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        if !self.queues.is_empty() {
            self.knobs.active.fetch_sub(1, Ordering::SeqCst);
        }
        std::mem::take(&mut self.queues)
    }
    fn save(&self) -> Result<Saved, DeviceError> {
        if !self.has_form {
            return Err(DeviceError::NotSaved);
        }
        let (kind, version, payload) = ("lamp".to_owned(), 1, Vec::new());
        Ok(Saved { kind, version, payload })
    }
}

/// A machine with two devices at work, the second of which may have no saved form.
struct Rig {
    machine: Machine,
    knobs: [Arc<Knobs>; 2],
    _drivers: Vec<Driver>,
}

const GENERATION: GuestAddress = GuestAddress(boot::GENERATION_ID);

fn rig(second_has_form: bool) -> Rig {
    let ram = Ram::allocate(ByteSize::mib(16)).unwrap();
    let shared = Shared::new().unwrap();
    let vm = Arc::new(FakeVm::default()) as Arc<dyn Vm>;
    let platform = add_platform(vm.as_ref(), &shared, (None, None), None).unwrap();
    let (_, pci) = add_devices(&vm, &ram, &shared, Vec::new(), &Registry::new()).unwrap();
    let knobs = [Arc::new(Knobs::default()), Arc::new(Knobs::default())];
    let mut drivers = Vec::new();
    for (knobs, has_form) in knobs.iter().zip([true, second_has_form]) {
        let device = Lamp {
            knobs: Arc::clone(knobs),
            queues: Vec::new(),
            has_form,
        };
        let mut driver = Driver::new(Box::new(device));
        driver.start();
        drivers.push(driver);
    }
    let run = Arc::clone(&shared.run);
    let machine = Machine::assemble(Parts {
        cpu: engine::CpuModel::Host,
        functions: HostFunctions::new(None, 1).unwrap(),
        threads: Vec::new(),
        shared,
        devices: drivers.iter().map(|driver| Arc::clone(driver.device())).collect(),
        platform,
        pci,
        vm,
        ram,
    });
    for knobs in &knobs {
        assert!(knobs.machine.set(Arc::clone(&run)).is_ok());
    }
    Rig {
        machine,
        knobs,
        _drivers: drivers,
    }
}

impl Rig {
    fn active(&self) -> [usize; 2] {
        self.knobs.each_ref().map(|knobs| knobs.active.load(Ordering::SeqCst))
    }
}

#[test]
fn only_what_stands_still_is_quiesced() {
    let mut rig = rig(true);
    assert!(rig.machine.quiesced().is_none());
    rig.machine.pause();
    assert_eq!(rig.active(), [0, 0]);
    assert!(rig.machine.quiesced().is_some());
    rig.machine.run().unwrap();
    assert_eq!(rig.active(), [1, 1]);
    assert!(rig.machine.quiesced().is_none());
}

#[test]
fn a_device_without_a_saved_form_refuses_and_nothing_is_lost() {
    let mut rig = rig(false);
    rig.machine.pause();
    let error = rig.machine.quiesced().unwrap().save().unwrap_err().to_string();
    assert_eq!(
        error,
        "device `fake`: devices of its kind cannot be part of a snapshot: take the snapshot of a VM without it"
    );
    rig.machine.run().unwrap();
    assert_eq!(rig.active(), [1, 1]);
}

#[test]
fn a_machine_that_could_not_go_on_stands_still() {
    let mut rig = rig(true);
    rig.machine.pause();
    rig.knobs[1].refuses_to_start.store(true, Ordering::SeqCst);
    assert!(rig.machine.run().is_err());
    assert_eq!(rig.active(), [0, 0]);
    assert!(!rig.machine.shared.run.may_run(), "its guest runs without devices");
    assert!(rig.machine.quiesced().is_some());
}

#[test]
fn a_guest_begins_before_its_devices_and_goes_on_after_them() {
    let mut rig = rig(true);
    let found = |rig: &Rig| rig.knobs[1].found_guest_running.load(Ordering::SeqCst);
    rig.machine.pause();
    rig.machine.run().unwrap();
    assert!(found(&rig), "it begins when all devices have");
    rig.machine.pause();
    rig.machine.run().unwrap();
    assert!(!found(&rig), "our answer waits for a guest at work");
}

#[test]
fn a_machine_of_before_has_another_generation_id_and_says_so() {
    let mut rig = rig(true);
    let id = |machine: &Machine| machine.ram.guest().read_obj::<u128>(GENERATION).unwrap();
    let pending = |machine: &Machine| machine.platform.events.save();
    let mut seen = vec![id(&rig.machine)];
    assert_eq!(pending(&rig.machine), 0);
    for _ in 0..2 {
        rig.machine.new_generation().unwrap();
        rig.machine.notify_generation();
        assert!(!seen.contains(&id(&rig.machine)), "{seen:x?} again");
        seen.push(id(&rig.machine));
        assert_eq!(pending(&rig.machine), Event::NewGeneration as u8);
    }
    // Its guest was told of none: its memory is its own.
    rig.machine.platform.events.restore(0);
    rig.machine.platform.generation = None;
    rig.machine.new_generation().unwrap();
    rig.machine.notify_generation();
    assert_eq!((id(&rig.machine), pending(&rig.machine)), (seen[2], 0));
    rig.machine.platform.generation = Some(u64::MAX - 3);
    let error = rig.machine.new_generation().unwrap_err().to_string();
    assert!(
        error.contains("the generation ID") && error.contains("damaged"),
        "{error}"
    );
}
