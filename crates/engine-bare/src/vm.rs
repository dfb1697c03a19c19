//! One virtual machine: its memory, its bells, and who its vCPUs are to each other.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use base::EventFd;
use claim::Claim;
use engine::{
    Counts, CpuModel, CpuidEntry, Deliver, Doorbell, EngineError, Interrupt, MsiMessage, Result, Routed, Vcpu, Vm,
    VmState,
};
use vm_memory::{Address, GuestMemoryRegion, GuestRegionMmap};

use crate::clock::Clock;
use crate::interrupt::{Command, Message};
use crate::memory::GuestMemory;
use crate::power::Power;
use crate::uapi;
use crate::vcpu::{BareVcpu, Kicker};
use crate::{cpuid, failed};

/// How long a vCPU may take to obey an INIT.
const INIT_LIMIT: Duration = Duration::from_secs(1);
/// Between two calls of one that does not hear.
const INIT_STEP: Duration = Duration::from_micros(100);

const NOT_YET: &str = "a guest that owns its CPUs cannot be saved: run it with another class to take snapshots of it";

/// A vCPU as the others and the devices reach it.
pub(crate) struct Peer {
    pub(crate) apic_id: u32,
    pub(crate) fd: Arc<OwnedFd>,
    pub(crate) power: Arc<Power>,
    pub(crate) kicker: Arc<Kicker>,
}

/// What all vCPUs and interrupt sources have in common.
pub(crate) struct Shared {
    // Fields are dropped in this order: the module lets go of the memory with its machine's last descriptor.
    peers: RwLock<Vec<Peer>>,
    pub(crate) fd: OwnedFd,
    pub(crate) memory: GuestMemory,
    bells: RwLock<Vec<(Doorbell, EventFd)>>,
    pub(crate) clock: Clock,
    /// What was refused here; the module counts what it refuses.
    refused: AtomicU64,
}

impl Shared {
    /// Its guest has tried something that no guest may.
    pub(crate) fn refuse(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    fn peers(&self) -> RwLockReadGuard<'_, Vec<Peer>> {
        self.peers.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Rings, if there is a bell.
    pub(crate) fn ring(&self, bell: Doorbell) -> bool {
        let bells = self.bells.read().unwrap_or_else(PoisonError::into_inner);
        let mut found = false;
        for (_, event) in bells.iter().filter(|(at, _)| *at == bell) {
            found = true;
            event.signal();
        }
        found
    }

    /// Carries out what vCPU `own` has commanded.
    pub(crate) fn command(&self, own: u32, value: u64) {
        let peers = self.peers();
        let mut meant = peers
            .iter()
            .filter(|peer| Command::is_for(value, own, peer.apic_id))
            .peekable();
        let command = Command::of(value);
        if meant.peek().is_none() || matches!(command, Command::Other(_)) {
            self.refuse();
        }
        match command {
            Command::Init => meant.for_each(stop),
            Command::Start(vector) => meant.for_each(|peer| peer.power.start(vector)),
            // One that waits for a startup interrupt has no use of any other.
            Command::Nmi => meant.filter(|peer| peer.power.executes()).for_each(|peer| {
                if let Err(error) = uapi::nmi(&peer.fd) {
                    log::debug!("an NMI was not delivered: {error}");
                }
            }),
            Command::Other(mode) => log::debug!("an interrupt of mode {mode} that nobody delivers"),
        }
    }
}

/// Has a vCPU become as after power on. It may be about to enter its guest: then it hears only of the next call.
fn stop(peer: &Peer) {
    if !peer.power.init() {
        return;
    }
    let limit = Instant::now() + INIT_LIMIT;
    while !peer.power.has_stopped() && Instant::now() < limit {
        peer.kicker.nudge();
        std::thread::sleep(INIT_STEP);
    }
}

/// What interrupt sources send by.
struct Sender(Arc<Shared>);

impl Deliver for Sender {
    fn deliver(&self, message: MsiMessage) {
        let Some(message) = Message::of(message) else {
            log::debug!("a message that is no interrupt for a program: {message:x?}");
            return;
        };
        let peers = self.0.peers();
        for peer in peers.iter().filter(|peer| message.is_for(peer.apic_id)) {
            if let Err(error) = uapi::interrupt(&peer.fd, message.vector) {
                log::debug!("an interrupt was not delivered: {error}");
            }
            if message.one {
                break;
            }
        }
    }
}

/// The machine.
pub(crate) struct BareVm {
    shared: Arc<Shared>,
    /// The CPUs, and their APICs' ids.
    cpus: Vec<(u32, u32)>,
    shown: Vec<CpuidEntry>,
    told: Mutex<bool>,
}

impl BareVm {
    pub(crate) fn new(claim: &Claim, model: CpuModel) -> Result<Self> {
        let shown = cpu::present(model, &cpuid::offered()).map_err(|error| EngineError::Unusable(error.to_string()))?;
        let cpus = (0..).map_while(|vcpu| claim.cpu(vcpu)).collect();
        let shared = Shared {
            peers: RwLock::default(),
            fd: uapi::create_vm(claim).map_err(failed("BASALT_CREATE_VM"))?,
            memory: GuestMemory::default(),
            bells: RwLock::default(),
            clock: Clock::begin(claim.tsc_khz()),
            refused: AtomicU64::default(),
        };
        Ok(Self {
            shared: Arc::new(shared),
            cpus,
            shown,
            told: Mutex::default(),
        })
    }

    /// Tells the module what CPUID says, once it is known how many vCPUs there are.
    fn tell_cpuid(&self, count: u32) -> Result<()> {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if !*told {
            let count = usize::try_from(count).unwrap_or(usize::MAX);
            let ids: Vec<_> = self.cpus.iter().take(count).map(|(_, id)| *id).collect();
            let leaves = cpuid::for_vm(&self.shown, &ids);
            uapi::set_cpuid(&self.shared.fd, &cpuid::to_module(&leaves)).map_err(failed("BASALT_SET_CPUID"))?;
            *told = true;
        }
        Ok(())
    }
}

impl Vm for BareVm {
    fn create_vcpu(&self, id: u32, count: u32) -> Result<Box<dyn Vcpu>> {
        let index = usize::try_from(id).unwrap_or(usize::MAX);
        let (cpu, apic_id) = *self
            .cpus
            .get(index)
            .ok_or_else(|| EngineError::Unusable(format!("vCPU {id} has no CPU: {} were claimed", self.cpus.len())))?;
        self.tell_cpuid(count)?;
        let fd = uapi::create_vcpu(&self.shared.fd, cpu).map_err(failed("BASALT_CREATE_VCPU"))?;
        let (vcpu, peer) = BareVcpu::new(Arc::clone(&self.shared), Arc::new(fd), apic_id, id == 0)?;
        let mut peers = self.shared.peers.write().unwrap_or_else(PoisonError::into_inner);
        peers.push(peer);
        Ok(Box::new(vcpu))
    }

    fn map_ram(&self, slot: u32, region: Arc<GuestRegionMmap<()>>) -> Result<()> {
        let request = uapi::Memory {
            guest: region.start_addr().raw_value(),
            size: region.len(),
            address: region.as_ptr() as u64,
            ..uapi::Memory::default()
        };
        // SAFETY: 1. the range is one whole mapping that the region owns; 2. the region is kept for as long as the machine's
        // descriptor, which goes first.
        unsafe { uapi::map_memory(&self.shared.fd, request) }.map_err(failed("BASALT_MAP_MEMORY"))?;
        self.shared.memory.add(slot, region);
        Ok(())
    }

    fn set_dirty_tracking(&self, _: u32, _: bool) -> Result<()> {
        Err(EngineError::State(NOT_YET.into()))
    }

    fn dirty_log(&self, _: u32) -> Result<Vec<u64>> {
        Err(EngineError::State(NOT_YET.into()))
    }

    fn send_msi(&self, message: MsiMessage) -> Result<()> {
        Sender(Arc::clone(&self.shared)).deliver(message);
        Ok(())
    }

    fn create_interrupt(&self) -> Arc<dyn Interrupt> {
        Arc::new(Routed::new(Sender(Arc::clone(&self.shared))))
    }

    fn attach_doorbell(&self, bell: Doorbell, event: &EventFd) -> Result<()> {
        let own = event.try_clone().map_err(failed("dup of an event"))?;
        let mut bells = self.shared.bells.write().unwrap_or_else(PoisonError::into_inner);
        if bells.iter().any(|(at, _)| *at == bell) {
            return Err(EngineError::State(format!("there is a bell at {bell:?} already")));
        }
        bells.push((bell, own));
        Ok(())
    }

    fn detach_doorbell(&self, bell: Doorbell, _: &EventFd) -> Result<()> {
        let mut bells = self.shared.bells.write().unwrap_or_else(PoisonError::into_inner);
        let before = bells.len();
        bells.retain(|(at, _)| *at != bell);
        if bells.len() == before {
            return Err(EngineError::State(format!("there is no bell at {bell:?}")));
        }
        Ok(())
    }

    fn reserve_ioapic_pins(&self, _: u32) -> Result<()> {
        // The I/O APIC is user space's whole, and its messages go the way of all others.
        Ok(())
    }

    fn counts(&self) -> Counts {
        let peers = self.shared.peers();
        let sum = |reason| -> u64 { peers.iter().map(|peer| peer.kicker.count(reason)).sum() };
        let reasons = uapi::COUNTS.iter().enumerate();
        Counts {
            exits: reasons.map(|(reason, name)| (*name, sum(reason))).collect(),
            refused: Some(sum(uapi::REFUSED) + self.shared.refused.load(Ordering::Relaxed)),
        }
    }

    fn save(&self) -> Result<VmState> {
        Err(EngineError::State(NOT_YET.into()))
    }

    fn restore(&self, _: &VmState) -> Result<()> {
        Err(EngineError::State(NOT_YET.into()))
    }
}
