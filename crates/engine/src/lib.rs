//! What a virtualization engine must offer a machine: traits, typed exits, whole-vCPU state.
//!
//! The traits are narrow on purpose: their calls can be served by KVM, by a module that owns the CPUs, or from
//! another partition. This crate does not know any back end and no device.

pub mod exit;
mod function;
mod interrupt;
mod saved;
pub mod state;

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use base::EventFd;
use vm_memory::GuestRegionMmap;

pub use cpu::CpuModel;
pub use exit::{Exit, SystemEvent};
pub use function::FunctionGuard;
pub use interrupt::{Deliver, Routed};
pub use saved::{APIC_BYTES, MSRS_OF_HOST, XSAVE_BYTES, same_timer_rate, same_tsc_rate};
pub use state::{BootState, Clock, CpuidEntry, Msr, VcpuState, VmState};

/// Why an engine could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The host cannot run VMs with this engine at all.
    #[error("{0}")]
    Unusable(String),
    /// One call failed.
    #[error("{call} failed: {source}")]
    Call {
        /// What was called, such as `KVM_RUN`.
        call: &'static str,
        /// Why.
        source: std::io::Error,
    },
    /// A saved state does not fit this engine or host.
    #[error("the saved state cannot be used: {0}")]
    State(String),
}

/// Names a failed call.
pub fn failed<E: Into<std::io::Error>>(call: &'static str) -> impl Fn(E) -> EngineError {
    move |error| EngineError::Call {
        call,
        source: error.into(),
    }
}

/// The result of an engine's call.
pub type Result<T> = std::result::Result<T, EngineError>;

/// A message-signalled interrupt as the device writes it (PCI 3.0, 6.8.1; Intel SDM 3A, 11.11).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MsiMessage {
    /// Message address.
    pub address: u64,
    /// Message data.
    pub data: u32,
}

const NO_IDENTITY: &str = "this engine translates its guests' addresses: run the guest with the class `bare`";

const NO_SERVERS: &str =
    "only guests that own their CPUs can be servers of others, or enter one: run both with the class `bare`";

const NO_ENDS: &str =
    "guests of this engine end their interrupts without it (class `bare`), so that none of them can be a level";

const NO_DEVICES: &str =
    "this engine gives its guests no devices of the host: run the guest on KVM, or on CPUs of its own (class `bare`)";

/// Memory of this process, by its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostRange {
    /// Where it begins.
    pub address: u64,
    /// Bytes.
    pub length: u64,
}

/// When memory has to be where its guest finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// Before it runs: it is there anyway.
    AtOnce,
    /// When it is touched, if the engine can; soon afterwards in any case.
    WhenTouched,
}

/// Where a guest's write rings a bell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doorbell {
    /// A write of any value and any width to this guest physical address.
    Mmio(u64),
    /// A write of any value to this port.
    Port(u16),
}

/// What an engine offers guests on this host: the parts of a snapshot's fingerprint that are its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traits {
    /// What CPUID offers, as the first of one vCPU sees it.
    pub cpuid: Vec<CpuidEntry>,
    /// The hash of that as it was in former snapshots, which had some of the host's topology in it.
    pub former_cpuid: u64,
    /// Capabilities that saved state depends on, a bit each in an order of the engine's own.
    pub capabilities: u64,
    /// Those of them, whether or not this host has them, that a saved vCPU can do without: where one cannot, its restore refuses it.
    pub asked_by_vcpus: u64,
}

/// Memory that an engine has reserved for a guest, which sees it where the host's bus has it.
#[derive(Clone, Debug)]
pub struct IdentityMemory {
    /// Below 1 MiB, from where processors start: whole pages, zeroes.
    pub low: Arc<GuestRegionMmap<()>>,
    /// All of the rest: one piece from a multiple of 2 MiB on, which may be above 4 GiB; zeroes.
    pub main: Arc<GuestRegionMmap<()>>,
}

/// A way to make virtual machines.
pub trait Engine: Send + Sync {
    /// Its name, such as `kvm`.
    fn name(&self) -> &'static str;

    /// Makes an empty VM, whose vCPUs show their guest the processor `cpu`.
    ///
    /// # Errors
    /// The host lacks something; the message says what to do.
    fn create_vm(&self, cpu: CpuModel) -> Result<Arc<dyn Vm>>;

    /// Makes an empty VM whose guest runs without a second stage of translation: it sees its memory, of at least `size` bytes besides
    /// what is low, where the host's bus has it, and can reach everything else that is there. No access of its to memory comes out.
    ///
    /// # Errors
    /// The engine has no way to, or no memory is reserved; the message says what to do.
    fn create_identity_vm(&self, cpu: CpuModel, size: u64) -> Result<(Arc<dyn Vm>, IdentityMemory)> {
        let _ = (cpu, size);
        Err(EngineError::Unusable(NO_IDENTITY.into()))
    }

    /// Whether its guests can be servers of others, and enter such: [`Vcpu::freeze`], [`Vcpu::link`].
    fn has_servers(&self) -> bool {
        false
    }

    /// Whether a guest's memory stays for good where it is once it is mapped: whoever maps something else in its place has another
    /// memory than the guest.
    fn pins_memory(&self) -> bool {
        false
    }

    /// What it offers guests: a VM that was saved goes on only where this is the same, or has all that its guest was shown.
    ///
    /// # Errors
    /// The host does not tell.
    fn traits(&self) -> Result<Traits>;
}

/// What an engine counts; nothing where somebody else does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// How often vCPUs have left their guest, by reason, whoever answered it.
    pub exits: Vec<(&'static str, u64)>,
    /// How often the guest has tried what no guest may, or what reaches nobody.
    pub refused: Option<u64>,
}

/// One virtual machine: memory, interrupts, doorbells and what all its vCPUs share.
pub trait Vm: Send + Sync {
    /// Makes vCPU `id` of `count` in all; its local APIC's id is its number.
    ///
    /// # Errors
    /// More than the engine can have, or the id was taken.
    fn create_vcpu(&self, id: u32, count: u32) -> Result<Box<dyn Vcpu>>;

    /// Lets the guest see `region` at its own guest physical address; the engine keeps it mapped. Slots are counted from 0 on.
    ///
    /// # Errors
    /// The slot is taken or the range overlaps another.
    fn map_ram(&self, slot: u32, region: Arc<GuestRegionMmap<()>>, presence: Presence) -> Result<()>;

    /// Has a range of the guest's memory be in the second stage of translation before the guest touches it, as writable as it is in this
    /// process, so that the first access needs no exit. Of pages; nothing of the memory changes. From any thread, after vCPU 0 was
    /// made and while it does not run: it takes that vCPU's time. An engine that cannot does nothing.
    ///
    /// # Errors
    /// The host has not mapped all of it: the rest is mapped when it is touched.
    fn map_ahead(&self, guest: u64, bytes: u64) -> Result<()> {
        let _ = (guest, bytes);
        Ok(())
    }

    /// Lets the engine know of a function of the host's that its guest is about to have, by a file of VFIO's: that of its IOMMU group, or
    /// its own where the host's kernel takes that (Linux 6.6). Before its registers and interrupts, for as long as the guard is kept.
    ///
    /// # Errors
    /// The engine has no functions for its guests, or the host does not take the file.
    fn add_host_function(&self, file: BorrowedFd<'_>) -> Result<FunctionGuard> {
        let _ = file;
        Err(EngineError::Unusable(NO_DEVICES.into()))
    }

    /// Lets the guest reach registers of a device of the host's, which are mapped in this process, at `guest` and without an exit, or takes
    /// them back, where they were given. When they go from this process they go from the guest as well: it exits there, as elsewhere.
    ///
    /// # Errors
    /// The engine has no way to or no room left, or the guest has something there: it exits there then.
    ///
    /// # Safety
    /// Whatever is mapped in that range of this process is the guest's, from when it is given until it was taken back without an error
    /// or the VM is gone.
    #[allow(
        unsafe_code,
        reason = "a declaration: by an address alone no engine can tell whose memory it gives away"
    )]
    unsafe fn map_registers(&self, guest: u64, registers: HostRange, give: bool) -> Result<()> {
        let _ = (guest, registers, give);
        Err(EngineError::Unusable(NO_DEVICES.into()))
    }

    /// Starts or ends the record that [`Vm::dirty_log`] reads.
    ///
    /// # Errors
    /// The slot is not mapped.
    fn set_dirty_tracking(&self, slot: u32, on: bool) -> Result<()>;

    /// Which 4 KiB pages of a slot were written since the last call: one bit a page, least significant first.
    ///
    /// # Errors
    /// The slot is not mapped.
    fn dirty_log(&self, slot: u32) -> Result<Vec<u64>>;

    /// Delivers one message now.
    ///
    /// # Errors
    /// The address names no local APIC.
    fn send_msi(&self, message: MsiMessage) -> Result<()>;

    /// Makes an interrupt source that devices can trigger from any thread. Costs no system call.
    fn create_interrupt(&self) -> Arc<dyn Interrupt>;

    /// Signals `event` on each of the guest's writes to `bell`, without returning to user space.
    ///
    /// # Errors
    /// The bell is in use.
    fn attach_doorbell(&self, bell: Doorbell, event: &EventFd) -> Result<()>;

    /// How long it pays to busy-poll for a guest's next request rather than to have it ring: what a ring costs the guest.
    fn busy_poll(&self) -> Duration {
        Duration::ZERO
    }

    /// Undoes [`Vm::attach_doorbell`].
    ///
    /// # Errors
    /// No such bell.
    fn detach_doorbell(&self, bell: Doorbell, event: &EventFd) -> Result<()>;

    /// Makes the local APICs the engine's and leaves an I/O APIC with so many pins to user space; before any vCPU.
    ///
    /// # Errors
    /// The engine has no such interrupt controller.
    fn reserve_ioapic_pins(&self, pins: u32) -> Result<()>;

    /// What the engine itself counts of its vCPUs, over all of them.
    fn counts(&self) -> Counts {
        Counts::default()
    }

    /// Everything of the VM that is neither memory nor a vCPU's.
    ///
    /// # Errors
    /// A vCPU runs.
    fn save(&self) -> Result<VmState>;

    /// Takes over what [`Vm::save`] gave, while no vCPU runs.
    ///
    /// # Errors
    /// The state does not fit.
    fn restore(&self, state: &VmState) -> Result<()>;
}

/// One virtual CPU; belongs to the thread that runs it.
pub trait Vcpu: Send {
    /// Runs guest code until something is to be done outside.
    ///
    /// # Errors
    /// The engine failed; the vCPU must not be run again.
    fn run(&mut self) -> Result<Exit<'_>>;

    /// A handle by which other threads make [`Vcpu::run`] return [`Exit::Interrupted`].
    fn kicker(&self) -> Arc<dyn Kick>;

    /// Sets the registers that the boot protocol asks for; only vCPU 0 has any.
    ///
    /// # Errors
    /// The engine refused a value.
    fn set_boot_state(&mut self, boot: &BootState) -> Result<()>;

    /// The whole state, as one value. The last exit must have been completed: buffers of reads filled.
    ///
    /// # Errors
    /// The engine cannot read one of its parts.
    fn save(&mut self) -> Result<VcpuState>;

    /// Whether [`Vcpu::has_halted`] can tell.
    fn reports_halts(&self) -> bool {
        false
    }

    /// Whether it waits for what only another vCPU could do: it has halted with interrupts off, or was never started. After
    /// [`Exit::Interrupted`]. An engine that does not tell says no.
    ///
    /// # Errors
    /// The engine cannot read its state.
    fn has_halted(&mut self) -> Result<bool> {
        Ok(false)
    }

    /// Gives up its CPU after [`Exit::Waiting`]: from now on the guest runs in the place of vCPUs that are linked to it
    /// ([`Vcpu::link`]), for at most `budget` (100 us to 10 s) at once, and [`Vcpu::run`] waits until it needs something that is done
    /// outside. What is returned is for a link and nothing else; the server ends with this vCPU, whoever has a copy of it.
    ///
    /// # Errors
    /// The engine has no such servers, or the guest does not wait, or its machine has more than one vCPU.
    fn freeze(&mut self, budget: Duration) -> Result<OwnedFd> {
        let _ = budget;
        Err(EngineError::Unusable(NO_SERVERS.into()))
    }

    /// Lets the guest enter a frozen server by the number `index` (0 to 3), or, with `None`, not any more. While this vCPU does not run.
    ///
    /// # Errors
    /// The engine has no such servers, the number has a link already or none, or the descriptor is of no frozen vCPU of another machine.
    fn link(&mut self, index: u32, server: Option<OwnedFd>) -> Result<()> {
        let _ = (index, server);
        Err(EngineError::Unusable(NO_SERVERS.into()))
    }

    /// Takes over a whole state. One that has run already can go back to an earlier state of its own, and to no other's.
    ///
    /// # Errors
    /// It does not fit this engine or host.
    fn restore(&mut self, state: &VcpuState) -> Result<()>;
}

/// Makes a vCPU leave guest mode, from any thread.
pub trait Kick: Send + Sync {
    /// The next or current [`Vcpu::run`] returns [`Exit::Interrupted`] soon. Kicks do not add up. The vCPU's thread
    /// must have called [`Vcpu::run`] or be about to.
    fn kick(&self);

    /// Called by the vCPU's own thread, once, before its first run.
    fn adopt_current_thread(&self);

    /// Called by the vCPU's own thread: its next [`Vcpu::run`] only completes the last exit, and comes back with another one
    /// or [`Exit::Interrupted`]. So it is after a kick, too.
    fn hold(&self);

    /// Called by the vCPU's own thread after it has seen a kick, so that the next run is not cut short.
    fn clear(&self);
}

/// One interrupt source. While a message is routed to it, triggering it sends that message; a trigger given while
/// nothing is routed is kept, and sent once a message is (the pending bit of PCI 3.0, 6.8.2.10).
pub trait Interrupt: Send + Sync {
    /// Triggers it, from any thread; one system call at most, no lock that a guest could hold up.
    fn trigger(&self);

    /// Tells that [`Interrupt::route`] with `message` is what comes next for this one: an engine for which routing is costly can do it
    /// for all at once that it was told of. Whether it does, and whether the message counts from now on or from then, is the engine's.
    fn prepare(&self, message: MsiMessage) {
        // A hint, and nothing is lost with one who needs none.
        let _ = message;
    }

    /// Routes to `message`, or to nothing. Costs no system call where no event is attached.
    fn route(&self, message: Option<MsiMessage>);

    /// Whether a trigger is kept because nothing is routed.
    fn is_pending(&self) -> bool;

    /// Has each end of the level-triggered interrupt that `message` is come out as [`Exit::IoapicEoi`]: of a source that is the I/O APIC's pin
    /// of this number, before the message is routed. With `None` they need not come out any more.
    ///
    /// # Errors
    /// The engine's guests end interrupts without it, or the host refuses.
    fn report_ends(&self, pin: u32, message: Option<MsiMessage>) -> Result<()> {
        let _ = (pin, message);
        Err(EngineError::Unusable(NO_ENDS.into()))
    }

    /// From now on each signal of `event` triggers it, and nothing else does: for interrupts of a device of the host's, which its
    /// driver tells by events. An engine may have the device interrupt the guest itself, and the event is then not signalled while
    /// a message is routed. Once, before any route.
    ///
    /// # Errors
    /// The engine has no way to.
    fn attach(&self, event: EventFd) -> Result<()> {
        drop(event);
        Err(EngineError::Unusable(NO_DEVICES.into()))
    }
}
