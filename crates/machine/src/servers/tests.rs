//! A machine whose guest says that it waits, and one that is linked, without a processor: what its owner is told and refused, whatever
//! the engine does.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use base::ByteSize;
use engine::{BootState, EngineError, Exit, Kick, VcpuState, Vm};
use memory::Ram;
use observe::Registry;
use virtio::conformance::fakes::FakeVm;

use super::*;
use crate::exits::ExitCounters;
use crate::functions::HostFunctions;
use crate::machine::{Parts, add_platform};
use crate::root::add_devices;
use crate::vcpu::{Shared, VcpuThread};

const BUDGET: Duration = Duration::from_millis(5);

/// What a test knows of a vCPU, and has it do.
#[derive(Default)]
struct Knobs {
    kicked: AtomicBool,
    /// Its guest is to say once that it waits.
    waits: AtomicBool,
    /// How often it was told that it is no server.
    refused: AtomicUsize,
    frozen: AtomicBool,
    cannot_freeze: AtomicBool,
    cannot_link: AtomicBool,
    /// Runs of its guest's that have begun and not ended.
    runs: AtomicUsize,
    links: Mutex<Vec<u32>>,
}

impl Knobs {
    fn wait(&self) {
        self.waits.store(true, Ordering::SeqCst);
    }

    fn links(&self) -> Vec<u32> {
        self.links.lock().unwrap().clone()
    }
}

struct Kicker(Arc<Knobs>);

impl Kick for Kicker {
    fn kick(&self) {
        self.0.kicked.store(true, Ordering::SeqCst);
    }
    fn adopt_current_thread(&self) {}
    fn hold(&self) {
        self.kick();
    }
    fn clear(&self) {
        self.0.kicked.store(false, Ordering::SeqCst);
    }
}

struct FakeVcpu {
    knobs: Arc<Knobs>,
    /// Its last exit was a wait.
    pending: bool,
}

impl Vcpu for FakeVcpu {
    fn run(&mut self) -> engine::Result<Exit<'_>> {
        if std::mem::take(&mut self.pending) {
            self.knobs.refused.fetch_add(1, Ordering::SeqCst);
        }
        self.knobs.runs.fetch_add(1, Ordering::SeqCst);
        let exit = loop {
            if self.knobs.kicked.load(Ordering::SeqCst) {
                break Exit::Interrupted;
            }
            if self.knobs.waits.swap(false, Ordering::SeqCst) {
                self.pending = true;
                break Exit::Waiting;
            }
            thread::sleep(Duration::from_millis(1));
        };
        self.knobs.runs.fetch_sub(1, Ordering::SeqCst);
        Ok(exit)
    }

    fn kicker(&self) -> Arc<dyn Kick> {
        Arc::new(Kicker(Arc::clone(&self.knobs)))
    }

    fn set_boot_state(&mut self, _: &BootState) -> engine::Result<()> {
        unreachable!("it is not booted")
    }

    fn save(&mut self) -> engine::Result<VcpuState> {
        Ok(VcpuState::default())
    }

    fn restore(&mut self, _: &VcpuState) -> engine::Result<()> {
        unreachable!("it is not restored")
    }

    fn freeze(&mut self, budget: Duration) -> engine::Result<OwnedFd> {
        assert_eq!(budget, BUDGET);
        assert!(self.pending, "its guest does not wait");
        if self.knobs.cannot_freeze.load(Ordering::SeqCst) {
            return Err(EngineError::Unusable("it is out of ice".into()));
        }
        self.pending = false;
        self.knobs.frozen.store(true, Ordering::SeqCst);
        Ok(File::open("/dev/null").unwrap().into())
    }

    fn link(&mut self, index: u32, server: Option<OwnedFd>) -> engine::Result<()> {
        assert_eq!(self.knobs.runs.load(Ordering::SeqCst), 0, "its guest runs");
        let mut links = self.knobs.links.lock().unwrap();
        if self.knobs.cannot_link.load(Ordering::SeqCst) || links.contains(&index) == server.is_some() {
            return Err(EngineError::Unusable("it is out of chain".into()));
        }
        match server {
            Some(_) => links.push(index),
            None => links.retain(|link| *link != index),
        }
        Ok(())
    }
}

/// A machine without devices, of as many vCPUs.
fn machine(vcpus: usize) -> (Machine, Vec<Arc<Knobs>>) {
    let ram = Ram::allocate(ByteSize::mib(16)).unwrap();
    let shared = Shared::new().unwrap();
    let vm = Arc::new(FakeVm::default()) as Arc<dyn Vm>;
    let platform = add_platform(vm.as_ref(), &shared, (None, None), None).unwrap();
    let (_, pci) = add_devices(&vm, &ram, &shared, Vec::new(), &Registry::new()).unwrap();
    let knobs: Vec<_> = (0..vcpus).map(|_| Arc::new(Knobs::default())).collect();
    let threads = (0..).zip(&knobs).map(|(id, knobs)| {
        let vcpu = FakeVcpu {
            knobs: Arc::clone(knobs),
            pending: false,
        };
        let counters = ExitCounters::new(&Registry::new(), id);
        VcpuThread::spawn(id, Box::new(vcpu), shared.clone(), counters).unwrap()
    });
    let machine = Machine::assemble(Parts {
        cpu: engine::CpuModel::Host,
        functions: HostFunctions::new(None, 1).unwrap(),
        threads: threads.collect(),
        shared,
        devices: Vec::new(),
        platform,
        pci,
        vm,
        ram,
    });
    (machine, knobs)
}

fn null() -> Option<OwnedFd> {
    Some(File::open("/dev/null").unwrap().into())
}

fn soon(what: &str, mut is_so: impl FnMut() -> bool) {
    let limit = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < limit, "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_guest_that_waits_freezes_its_machine_if_that_was_asked_for() {
    let (mut machine, knobs) = machine(1);
    machine.run().unwrap();
    // Not for the first time that it says so.
    knobs[0].wait();
    soon("it is not told", || knobs[0].refused.load(Ordering::SeqCst) == 1);
    assert!(!machine.is_frozen() && machine.freeze(BUDGET).unwrap().is_none());
    assert!(!machine.frozen_event().consume(), "it has not waited since");
    knobs[0].wait();
    soon("it does not freeze", || machine.is_frozen());
    soon("nobody is told", || machine.frozen_event().consume());
    assert!(knobs[0].frozen.load(Ordering::SeqCst));
    assert_eq!(machine.take_freeze_refusal(), None);
    for _ in 0..2 {
        assert!(
            machine.freeze(BUDGET).unwrap().is_some(),
            "its descriptor is to be had again"
        );
    }
    let other = machine.freeze(BUDGET * 2).unwrap_err().to_string();
    assert!(other.contains("5ms") && other.contains("10ms"), "{other}");
    // What it asks is still answered: its thread runs.
    soon("its thread has ended", || knobs[0].runs.load(Ordering::SeqCst) == 1);
    assert_eq!(knobs[0].refused.load(Ordering::SeqCst), 1);
    let error = machine.link(0, null()).unwrap_err();
    assert!(matches!(error, MachineError::ServerLinks), "{error}");
}

#[test]
fn an_engine_that_refuses_is_told_of_once_and_the_guest_goes_on() {
    let (mut machine, knobs) = machine(1);
    machine.run().unwrap();
    knobs[0].cannot_freeze.store(true, Ordering::SeqCst);
    assert!(machine.freeze(BUDGET).unwrap().is_none());
    knobs[0].wait();
    soon("nobody is told", || machine.frozen_event().consume());
    assert_eq!(machine.take_freeze_refusal().as_deref(), Some("it is out of ice"));
    assert_eq!(machine.take_freeze_refusal(), None);
    soon("it is not told", || knobs[0].refused.load(Ordering::SeqCst) == 1);
    // It serves nobody until it is asked again.
    knobs[0].cannot_freeze.store(false, Ordering::SeqCst);
    knobs[0].wait();
    soon("it is not told", || knobs[0].refused.load(Ordering::SeqCst) == 2);
    assert!(!machine.is_frozen() && machine.freeze(BUDGET).unwrap().is_none());
    knobs[0].wait();
    soon("it does not freeze", || machine.is_frozen());
}

#[test]
fn what_is_frozen_is_not_saved_although_its_thread_stands_still() {
    let (mut machine, knobs) = machine(1);
    machine.run().unwrap();
    assert!(machine.freeze(BUDGET).unwrap().is_none());
    knobs[0].wait();
    soon("it does not freeze", || machine.is_frozen());
    machine.pause();
    let error = machine.quiesced().unwrap().save().unwrap_err();
    assert!(matches!(error, MachineError::Frozen), "{error}");
}

#[test]
fn what_is_frozen_is_not_paused_and_others_are() {
    let (mut machine, knobs) = machine(1);
    machine.run().unwrap();
    assert!(!machine.is_server() && machine.freeze(BUDGET).unwrap().is_none());
    assert!(machine.is_server(), "it is about to be");
    assert!(machine.try_pause().unwrap() && machine.quiesced().is_some());
    machine.run().unwrap();
    knobs[0].wait();
    soon("it does not freeze", || machine.is_frozen());
    assert!(!machine.try_pause().unwrap() && machine.quiesced().is_none());
    soon("its thread stands still", || knobs[0].runs.load(Ordering::SeqCst) == 1);
}

#[test]
fn a_server_has_one_vcpu_and_no_links() {
    let (mut two, _knobs) = machine(2);
    assert!(matches!(two.freeze(BUDGET), Err(MachineError::ServerVcpus(2))));
    let (mut linked, _knobs) = machine(1);
    linked.link(1, null()).unwrap();
    assert!(matches!(linked.freeze(BUDGET), Err(MachineError::Linked)));
    linked.link(1, None).unwrap();
    assert!(linked.freeze(BUDGET).unwrap().is_none());
    assert!(
        matches!(linked.link(1, null()), Err(MachineError::ServerLinks)),
        "it is about to be frozen"
    );
}

#[test]
fn all_vcpus_are_linked_in_any_state_and_go_on() {
    let (mut machine, knobs) = machine(3);
    machine.link(0, null()).unwrap();
    assert!(
        knobs.iter().all(|knobs| knobs.runs.load(Ordering::SeqCst) == 0),
        "it was not to start"
    );
    machine.run().unwrap();
    soon("its vCPUs do not run", || {
        knobs.iter().all(|knobs| knobs.runs.load(Ordering::SeqCst) == 1)
    });
    machine.link(2, null()).unwrap();
    soon("its vCPUs do not go on", || {
        knobs.iter().all(|knobs| knobs.runs.load(Ordering::SeqCst) == 1)
    });
    assert_eq!(machine.links(), [0, 2]);
    machine.pause();
    machine.link(3, null()).unwrap();
    assert!(machine.quiesced().is_some(), "it was to stay paused");
    assert!(knobs.iter().all(|knobs| knobs.links() == [0, 2, 3]));
    assert!(matches!(machine.link(2, null()), Err(MachineError::LinkTaken(2))));
    assert!(matches!(machine.link(1, None), Err(MachineError::NoLink(1))));
    assert!(matches!(machine.link(4, null()), Err(MachineError::NoLink(4))));
    let error = machine.quiesced().unwrap().save().unwrap_err();
    assert!(matches!(error, MachineError::Linked), "{error}");
    for index in [3, 0, 2] {
        machine.link(index, None).unwrap();
    }
    assert!(machine.links().is_empty() && knobs.iter().all(|knobs| knobs.links().is_empty()));
}

#[test]
fn a_link_that_one_vcpu_cannot_have_none_has() {
    let (mut machine, knobs) = machine(3);
    knobs[1].cannot_link.store(true, Ordering::SeqCst);
    machine.run().unwrap();
    let error = machine.link(0, null()).unwrap_err().to_string();
    assert!(error.contains("out of chain"), "{error}");
    assert!(machine.links().is_empty() && knobs.iter().all(|knobs| knobs.links().is_empty()));
    knobs[1].cannot_link.store(false, Ordering::SeqCst);
    machine.link(0, null()).unwrap();
    assert!(knobs.iter().all(|knobs| knobs.links() == [0]));
}
