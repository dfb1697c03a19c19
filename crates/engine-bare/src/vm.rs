//! One virtual machine: its memory, its bells, and who its vCPUs are to each other.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use base::EventFd;
use engine::{
    Counts, CpuModel, CpuidEntry, Deliver, Doorbell, EngineError, FunctionGuard, HostRange, IdentityMemory, Interrupt,
    MsiMessage, Presence, Result, Vcpu, Vm, VmState, failed,
};
use reservation::Reservation;
use vm_memory::{Address, GuestMemoryRegion, GuestRegionMmap};

use crate::interrupts::Source;
use crate::interrupts::{Command, Message};
use crate::memory::GuestMemory;
use crate::memory::lazy::LazyMemory;
use crate::memory::reserved;
use crate::module::uapi;
use crate::state::clock::Clock;
use crate::state::cpuid;
use crate::vcpu::power::Power;
use crate::vcpu::{BareVcpu, Kicker};

/// How long a vCPU may take to stop for an INIT.
const INIT_LIMIT: Duration = Duration::from_secs(1);
/// Between two calls of one that does not hear.
const INIT_STEP: Duration = Duration::from_micros(100);

const NO_LOG: &str = "it is not recorded what a guest writes that owns its CPUs";

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
    /// What of it the module does not know of yet.
    pub(crate) lazy: LazyMemory,
    /// Where its memory is, if nobody translates its guest's addresses.
    place: Option<uapi::Place>,
    bells: RwLock<Vec<(Doorbell, EventFd)>>,
    clock: Mutex<Clock>,
    /// What the TSC said of vCPUs that were restored, until it says so again.
    saved_tsc: Mutex<Option<u64>>,
    /// What CPUID says, but for the ids.
    leaves: Mutex<Vec<CpuidEntry>>,
    pub(crate) tsc_khz: u32,
    /// What was refused here; the module counts what it refuses.
    refused: AtomicU64,
}

impl Shared {
    /// Its guest has tried something that no guest may.
    pub(crate) fn refuse(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// The guest's time.
    pub(crate) fn clock(&self) -> Clock {
        *self.clock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A vCPU was restored whose TSC said so; the largest of several counts, as they were not read at once.
    pub(crate) fn restored_at(&self, tsc: u64) {
        let mut saved = self.saved_tsc.lock().unwrap_or_else(PoisonError::into_inner);
        *saved = Some(saved.map_or(tsc, |other| other.max(tsc)));
    }

    /// What CPUID says to the vCPU of this number.
    pub(crate) fn cpuid_of(&self, id: u32) -> Vec<CpuidEntry> {
        cpuid::as_seen(&self.leaves.lock().unwrap_or_else(PoisonError::into_inner), id)
    }

    /// Tells the module what CPUID says to all vCPUs; before any has run.
    pub(crate) fn set_cpuid(&self, leaves: Vec<CpuidEntry>) -> Result<()> {
        if leaves.len() > uapi::MAX_CPUID {
            return Err(EngineError::State(format!("CPUID has {} leaves", leaves.len())));
        }
        uapi::set_cpuid(&self.fd, &cpuid::to_module(&leaves)).map_err(failed("BASALT_SET_CPUID"))?;
        *self.leaves.lock().unwrap_or_else(PoisonError::into_inner) = leaves;
        Ok(())
    }

    /// Tells the module of memory, all of which is of a region that [`Self::memory`] has.
    pub(crate) fn map_memory(&self, memory: uapi::Memory) -> io::Result<()> {
        // SAFETY: 1. the range lies in a mapping that a region owns; 2. the region is kept for as long as the machine's descriptor,
        // which goes first.
        unsafe { uapi::map_memory(&self.fd, memory) }
    }

    fn peers(&self) -> RwLockReadGuard<'_, Vec<Peer>> {
        self.peers.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first vCPU that a message means.
    pub(crate) fn meant_by(&self, message: Message) -> Option<Arc<OwnedFd>> {
        let peers = self.peers();
        let meant = peers.iter().find(|peer| message.is_for(peer.apic_id))?;
        Some(Arc::clone(&meant.fd))
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
            Command::Other(mode) => log::debug!("an interrupt of the unsupported delivery mode {mode}"),
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
pub(crate) struct Sender(pub(crate) Arc<Shared>);

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
    /// The CPUs, by the numbers of their vCPUs.
    cpus: Vec<u32>,
    shown: Vec<CpuidEntry>,
    busy_poll: Duration,
}

impl BareVm {
    pub(crate) fn new(reservation: &Reservation, model: CpuModel) -> Result<Self> {
        let fd = uapi::create_vm(reservation).map_err(failed("BASALT_CREATE_VM"))?;
        Self::of(reservation, model, fd, None)
    }

    /// One whose guest sees its memory, which is made with it, where the host's bus has it.
    pub(crate) fn identity(reservation: &Reservation, model: CpuModel, size: u64) -> Result<(Self, IdentityMemory)> {
        let fd = reserved::create_vm(reservation, size)?;
        let place = uapi::get_place(&fd).map_err(failed("BASALT_GET_PLACE"))?;
        let placed = reserved::map(&fd, &place)?;
        Ok((Self::of(reservation, model, fd, Some(place))?, placed))
    }

    fn of(reservation: &Reservation, model: CpuModel, fd: OwnedFd, place: Option<uapi::Place>) -> Result<Self> {
        let shown = cpu::present(model, &cpuid::offered()).map_err(|error| EngineError::Unusable(error.to_string()))?;
        let cpus = (0..).map_while(|vcpu| reservation.cpu(vcpu)).collect();
        let shared = Shared {
            peers: RwLock::default(),
            fd,
            memory: GuestMemory::default(),
            lazy: LazyMemory::default(),
            place,
            bells: RwLock::default(),
            clock: Mutex::new(Clock::begin(reservation.tsc_khz())),
            saved_tsc: Mutex::default(),
            leaves: Mutex::default(),
            tsc_khz: reservation.tsc_khz(),
            refused: AtomicU64::default(),
        };
        Ok(Self {
            shared: Arc::new(shared),
            cpus,
            shown,
            busy_poll: Duration::ZERO,
        })
    }

    /// The same, whose devices look for so long before its guest has to ring.
    pub(crate) fn busy_polling(self, busy_poll: Duration) -> Self {
        Self { busy_poll, ..self }
    }
}

impl Vm for BareVm {
    fn create_vcpu(&self, id: u32, count: u32) -> Result<Box<dyn Vcpu>> {
        let index = usize::try_from(id).unwrap_or(usize::MAX);
        let cpu = *self
            .cpus
            .get(index)
            .ok_or_else(|| EngineError::Unusable(format!("vCPU {id} has no CPU: {} were reserved", self.cpus.len())))?;
        if id == 0 {
            self.shared.set_cpuid(cpuid::for_vm(&self.shown, count))?;
        }
        let fd = uapi::create_vcpu(&self.shared.fd, cpu, id).map_err(failed("BASALT_CREATE_VCPU"))?;
        let (vcpu, peer) = BareVcpu::new(Arc::clone(&self.shared), Arc::new(fd), id)?;
        let mut peers = self.shared.peers.write().unwrap_or_else(PoisonError::into_inner);
        peers.push(peer);
        Ok(Box::new(vcpu))
    }

    fn map_ram(&self, slot: u32, region: Arc<GuestRegionMmap<()>>, presence: Presence) -> Result<()> {
        if let Some(place) = &self.shared.place {
            let (start, size) = (region.start_addr().raw_value(), region.len());
            if !reserved::has(place, start, size) {
                return Err(EngineError::Unusable(format!(
                    "a guest whose memory is not translated cannot be given {size:#x} bytes at {start:#x}: it has what is at {:#x} and {:#x}",
                    place.start, place.low_start
                )));
            }
            self.shared.memory.add(slot, region);
            return Ok(());
        }
        self.shared.memory.add(slot, Arc::clone(&region));
        if presence == Presence::WhenTouched {
            self.shared.lazy.add(region);
            return Ok(());
        }
        let request = uapi::Memory {
            guest: region.start_addr().raw_value(),
            size: region.len(),
            address: region.as_ptr() as u64,
            ..uapi::Memory::default()
        };
        self.shared.map_memory(request).map_err(failed("BASALT_MAP_MEMORY"))
    }

    fn add_host_function(&self, _: BorrowedFd<'_>) -> Result<FunctionGuard> {
        // What the module would have to be told it does for all guests, so that there is nothing to be told: their own types of memory
        // stand, as nested paging on AMD's processors combines them with write-back (APM 2, 15.25.8). And IOMMUs of those processors
        // keep DMA coherent with the caches, so that a guest's WBINVD can be nothing.
        Ok(FunctionGuard::nothing())
    }

    unsafe fn map_registers(&self, guest: u64, registers: HostRange, give: bool) -> Result<()> {
        let request = uapi::Memory {
            guest,
            size: registers.length,
            address: registers.address,
            ..uapi::Memory::default()
        };
        let call = if give {
            "BASALT_MAP_DEVICE"
        } else {
            "BASALT_UNMAP_DEVICE"
        };
        uapi::map_device(&self.shared.fd, request, give).map_err(failed(call))
    }

    fn set_dirty_tracking(&self, _: u32, _: bool) -> Result<()> {
        Err(EngineError::State(NO_LOG.into()))
    }

    fn dirty_log(&self, _: u32) -> Result<Vec<u64>> {
        Err(EngineError::State(NO_LOG.into()))
    }

    fn send_msi(&self, message: MsiMessage) -> Result<()> {
        Sender(Arc::clone(&self.shared)).deliver(message);
        Ok(())
    }

    fn create_interrupt(&self) -> Arc<dyn Interrupt> {
        Arc::new(Source::new(&self.shared))
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

    fn busy_poll(&self) -> Duration {
        self.busy_poll
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
        Ok(VmState {
            clock: engine::Clock {
                nanoseconds: self.shared.clock().now(),
            },
        })
    }

    fn restore(&self, state: &VmState) -> Result<()> {
        let shared = &self.shared;
        let tsc = shared.saved_tsc.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut clock = shared.clock.lock().unwrap_or_else(PoisonError::into_inner);
        *clock = clock.from(state.clock.nanoseconds, tsc);
        Ok(())
    }
}
