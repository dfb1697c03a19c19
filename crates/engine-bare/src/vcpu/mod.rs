//! One virtual CPU, on a CPU of its own. What comes out of the guest is answered here or becomes a machine's exit.

pub(crate) mod instruction;
pub(crate) mod paging;
pub(crate) mod power;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use base::Nudge;
use engine::state::Activity;
use engine::{BootState, Doorbell, EngineError, Exit, Kick, Result, Vcpu, VcpuState, failed};

use self::instruction::{Access, LONGEST, Mode, What, decode};
use crate::module::page::Page;
use crate::module::uapi::{self, AboutIo, State, exit};
use crate::state::msr::{self, Effect, Msrs};
use crate::state::saved::{self, Own};
use crate::state::{clock, registers};
use crate::vcpu::power::{Next, Power};
use crate::vm::{Peer, Shared};

/// Of a second-stage fault's code: there is something at the address (AMD64 APM 2, 15.25.6).
const PRESENT: u64 = 1 << 0;
/// The guest has written.
const WRITE: u64 = 1 << 1;
/// EFER and attributes of a code segment: 64-bit mode needs both (AMD64 APM 2, 4.8.1).
const LMA: u64 = 1 << 10;
const LONG: u16 = 1 << 9;
/// Attributes of a code segment: 32 bits.
const BIG: u16 = 1 << 10;
/// What a hypercall answers that nobody knows (Linux, Documentation/virt/kvm/x86/hypercalls.rst).
const NO_HYPERCALL: u64 = (-1000_i64).cast_unsigned();

/// Makes a vCPU's thread look up, from any thread.
pub(crate) struct Kicker {
    page: Arc<Page>,
    power: Arc<Power>,
    thread: Nudge,
}

impl Kicker {
    /// Calls it out of a run that has begun; one that has not does not hear.
    pub(crate) fn nudge(&self) {
        self.thread.nudge();
    }

    /// How often its vCPU has come out, by the number of the reason.
    pub(crate) fn count(&self, reason: usize) -> u64 {
        self.page.count(reason)
    }
}

impl Kick for Kicker {
    fn kick(&self) {
        self.page.set_immediate_exit(true);
        self.power.look();
        self.thread.nudge();
    }

    fn adopt_current_thread(&self) {
        self.thread.adopt_current_thread();
    }

    fn hold(&self) {
        self.page.set_immediate_exit(true);
    }

    fn clear(&self) {
        self.page.set_immediate_exit(false);
    }
}

/// What the next run has to do about the last exit.
enum Pending {
    /// The guest reads a port: so many bytes of `data` are what it gets.
    Port(usize),
    /// It loads from no memory.
    Load(Box<State>, Access),
    /// It has made a call that nobody knows, unless it is frozen for it.
    Wait,
}

/// An exit before it has a buffer.
enum Out {
    PortRead(AboutIo),
    PortWrite(AboutIo),
    Load(u64, usize),
    Store(u64, usize),
    Interrupted,
    Waiting,
    Shutdown,
    Failed(String),
}

/// The vCPU.
pub(crate) struct BareVcpu {
    // Dropped before what all share, which it keeps.
    fd: Arc<OwnedFd>,
    page: Arc<Page>,
    kicker: Arc<Kicker>,
    power: Arc<Power>,
    shared: Arc<Shared>,
    /// Its number, which is its APIC's id.
    id: u32,
    first: bool,
    /// It has been in its guest: what CPUID says stays from then on.
    has_run: bool,
    /// It was restored: its time is that of now from its next run on.
    restored: bool,
    msrs: Msrs,
    after_power_on: State,
    pending: Option<Pending>,
    data: [u8; 8],
}

impl BareVcpu {
    pub(crate) fn new(shared: Arc<Shared>, fd: Arc<OwnedFd>, id: u32) -> Result<(Self, Peer)> {
        let first = id == 0;
        let page = Arc::new(Page::map(&fd).map_err(failed("mmap of a vCPU"))?);
        let power = Arc::new(if first { Power::on() } else { Power::default() });
        let kicker = Arc::new(Kicker {
            page: Arc::clone(&page),
            power: Arc::clone(&power),
            thread: Nudge::new(),
        });
        let peer = Peer {
            apic_id: id,
            fd: Arc::clone(&fd),
            power: Arc::clone(&power),
            kicker: Arc::clone(&kicker),
        };
        let vcpu = Self {
            after_power_on: uapi::get_state(&fd).map_err(failed("BASALT_GET_STATE"))?,
            fd,
            page,
            kicker,
            power,
            shared,
            id,
            first,
            has_run: false,
            restored: false,
            msrs: Msrs::new(first),
            pending: None,
            data: [0; 8],
        };
        Ok((vcpu, peer))
    }

    fn state(&self) -> Result<State> {
        uapi::get_state(&self.fd).map_err(failed("BASALT_GET_STATE"))
    }

    fn set_state(&self, state: &State) -> Result<()> {
        uapi::set_state(&self.fd, state).map_err(failed("BASALT_SET_STATE"))
    }

    /// Does what the last exit left to do.
    fn complete(&mut self) -> Result<()> {
        match self.pending.take() {
            None => Ok(()),
            Some(Pending::Wait) => self.refuse_call(),
            Some(Pending::Port(size)) => {
                let mut value = [0; 4];
                for (to, from) in value.iter_mut().zip(&self.data).take(size) {
                    *to = *from;
                }
                self.page.answer_io(u32::from_le_bytes(value));
                Ok(())
            }
            Some(Pending::Load(mut state, access)) => {
                let What::Load { to, width, signed } = access.what else {
                    return Ok(());
                };
                let mut value = u64::from_le_bytes(self.data);
                if signed {
                    value = instruction::extend(value, access.size);
                }
                registers::set(&mut state.regs, to, width, value);
                skip(&mut state, access.length);
                self.set_state(&state)
            }
        }
    }

    /// Runs the guest to where something is to be done outside of this crate; `None` when that has been done here.
    fn step(&mut self) -> Result<Option<Out>> {
        match self.power.next(|| self.first || self.page.immediate_exit()) {
            Next::Run => (),
            Next::Start(vector) => self.set_state(&registers::start_at(vector, &self.after_power_on))?,
            // INIT to the first one resets the machine.
            Next::Look if self.first => return Ok(Some(Out::Shutdown)),
            Next::Look => return Ok(Some(Out::Interrupted)),
        }
        self.keep_time()?;
        if !std::mem::replace(&mut self.has_run, true) {
            let owner = Arc::downgrade(&self.shared);
            self.shared
                .lazy
                .start_pinning(owner, |shared| &shared.lazy, Shared::map_memory);
        }
        match uapi::run(&self.fd) {
            Ok(()) => (),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(Some(Out::Interrupted)),
            Err(error) => return Err(failed("BASALT_RUN")(error)),
        }
        Ok(match self.page.reason() {
            exit::INTERRUPTED => Some(Out::Interrupted),
            exit::IO => self.port(self.page.io()),
            exit::MEMORY => self.access()?,
            exit::MSR => {
                self.register();
                None
            }
            exit::HYPERCALL if self.state()?.regs.rax == uapi::CALL_WAIT => {
                self.pending = Some(Pending::Wait);
                Some(Out::Waiting)
            }
            exit::HYPERCALL => {
                self.refuse_call()?;
                None
            }
            exit::SHUTDOWN => Some(Out::Shutdown),
            exit::FAILED => {
                let about = self.page.failure();
                Some(Out::Failed(format!(
                    "the processor came out of the guest with {:#x} ({:#x}, {:#x}), which no guest of this machine should cause",
                    about.code, about.info1, about.info2
                )))
            }
            other => Some(Out::Failed(format!(
                "basalt.ko gave the reason {other}, which is unknown"
            ))),
        })
    }

    /// A call that nobody knows.
    fn refuse_call(&self) -> Result<()> {
        let mut state = self.state()?;
        state.regs.rax = NO_HYPERCALL;
        self.set_state(&state)
    }

    /// The first run after a restore: the guest's TSC and clock go on where they were.
    fn keep_time(&mut self) -> Result<()> {
        if !std::mem::take(&mut self.restored) {
            return Ok(());
        }
        let clock = self.shared.clock();
        let mut state = self.state()?;
        state.tsc_offset = clock.tsc_offset();
        self.set_state(&state)?;
        if let Some(value) = self.msrs.read(clock::SYSTEM_TIME) {
            clock.write_system_time(&self.shared.memory, value);
        }
        Ok(())
    }

    fn port(&mut self, about: AboutIo) -> Option<Out> {
        if about.write == 0 {
            self.pending = Some(Pending::Port(usize::from(about.size)));
            return Some(Out::PortRead(about));
        }
        if self.shared.ring(Doorbell::Port(about.port)) {
            return None;
        }
        for (to, from) in self.data.iter_mut().zip(about.value.to_le_bytes()) {
            *to = from;
        }
        Some(Out::PortWrite(about))
    }

    fn access(&mut self) -> Result<Option<Out>> {
        let about = self.page.memory();
        if about.error & PRESENT == 0 && self.give(about.address)? {
            return Ok(None);
        }
        let mut state = self.state()?;
        let linear = match mode(&state) {
            Mode::Bits64 => state.regs.rip,
            _ => state.cs.base.wrapping_add(state.regs.rip),
        };
        let mut bytes = [0; LONGEST];
        let length = paging::read(&self.shared.memory, &state, linear, &mut bytes);
        let bytes = bytes.get(..length).unwrap_or_default();
        let known = decode(bytes, mode(&state)).filter(|access| {
            let stores = !matches!(access.what, What::Load { .. });
            stores == (about.error & WRITE != 0)
        });
        let Some(access) = known else {
            return Ok(Some(Out::Failed(format!(
                "the guest accesses {:#x}, where it has no memory, by an instruction that is not emulated ({bytes:02x?} at {:#x})",
                about.address, state.regs.rip
            ))));
        };
        let value = match access.what {
            What::Load { .. } => {
                self.data = [0; 8];
                self.pending = Some(Pending::Load(Box::new(state), access));
                return Ok(Some(Out::Load(about.address, access.size)));
            }
            What::Store(register) => registers::get(&mut state.regs, register),
            What::StoreValue(value) => value,
        };
        skip(&mut state, access.length);
        self.set_state(&state)?;
        if self.shared.ring(Doorbell::Mmio(about.address)) {
            return Ok(None);
        }
        self.data = value.to_le_bytes();
        Ok(Some(Out::Store(about.address, access.size)))
    }

    /// Gives the guest memory that it has touched; false if there is none.
    fn give(&self, address: u64) -> Result<bool> {
        match self
            .shared
            .lazy
            .map_touched(address, |memory| self.shared.map_memory(memory))
        {
            // A call to this thread: the guest touches it again.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(true),
            Err(error) => Err(EngineError::Unusable(format!(
                "the guest's memory at {address:#x} cannot be had ({error}): free memory on the host, or give the guest less"
            ))),
            Ok(given) => Ok(given),
        }
    }

    /// A model-specific register that the module leaves to us.
    fn register(&mut self) {
        let about = self.page.msr();
        if about.write == 0 {
            let value = self.msrs.read(about.index);
            if value.is_none() {
                self.shared.refuse();
                log::debug!("the guest reads the register {:#x}, which it has not", about.index);
            }
            self.page.answer_msr(value);
            return;
        }
        let effect = self.msrs.write(about.index, about.value);
        match effect {
            None => {
                self.shared.refuse();
                log::debug!(
                    "the guest writes {:#x} to the register {:#x}, which it has not",
                    about.value,
                    about.index
                );
            }
            Some(Effect::None) => (),
            Some(Effect::Command(value)) => self.shared.command(self.id, value),
            Some(Effect::SystemTime(value)) => self.shared.clock().write_system_time(&self.shared.memory, value),
            Some(Effect::WallClock(address)) => self.shared.clock().write_wall_clock(&self.shared.memory, address),
        }
        self.page.answer_msr(effect.map(|_| 0));
    }
}

/// Behind the instruction, whose shadow is over then.
fn skip(state: &mut State, length: usize) {
    let next = state.regs.rip.wrapping_add(length as u64);
    state.regs.rip = match mode(state) {
        Mode::Bits64 => next,
        _ => next & 0xffff_ffff,
    };
    state.interruptibility &= !uapi::SHADOW;
}

fn mode(state: &State) -> Mode {
    match (
        state.efer & LMA != 0 && state.cs.attributes & LONG != 0,
        state.cs.attributes & BIG != 0,
    ) {
        (true, _) => Mode::Bits64,
        (false, true) => Mode::Bits32,
        (false, false) => Mode::Bits16,
    }
}

impl Vcpu for BareVcpu {
    fn run(&mut self) -> Result<Exit<'_>> {
        self.complete()?;
        let out = loop {
            if let Some(out) = self.step()? {
                break out;
            }
        };
        let data = &mut self.data;
        Ok(match out {
            Out::PortRead(about) => {
                let width = usize::from(about.size);
                Exit::PortRead {
                    port: about.port,
                    width,
                    data: data.get_mut(..width).unwrap_or_default(),
                }
            }
            Out::PortWrite(about) => {
                let width = usize::from(about.size);
                Exit::PortWrite {
                    port: about.port,
                    width,
                    data: data.get(..width).unwrap_or_default(),
                }
            }
            Out::Load(address, size) => Exit::MmioRead {
                address,
                data: data.get_mut(..size).unwrap_or_default(),
            },
            Out::Store(address, size) => Exit::MmioWrite {
                address,
                data: data.get(..size).unwrap_or_default(),
            },
            Out::Interrupted => Exit::Interrupted,
            Out::Waiting => Exit::Waiting,
            Out::Shutdown => Exit::Shutdown,
            Out::Failed(why) => Exit::Failed(why),
        })
    }

    fn kicker(&self) -> Arc<dyn Kick> {
        let kicker: Arc<dyn Kick> = Arc::<Kicker>::clone(&self.kicker);
        kicker
    }

    fn set_boot_state(&mut self, boot: &BootState) -> Result<()> {
        // What it was about to do nobody waits for any more.
        self.pending = None;
        self.set_state(&registers::boot(boot, &self.after_power_on))
    }

    fn save(&mut self) -> Result<VcpuState> {
        let context = uapi::get_context(&self.fd).map_err(failed("BASALT_GET_CONTEXT"))?;
        let (on, start) = self.power.state();
        let own = Own {
            id: self.id,
            cpuid: self.shared.cpuid_of(self.id),
            activity: match (on, start) {
                (true, _) => Activity::Runnable,
                (false, Some(_)) => Activity::SipiReceived,
                (false, None) => Activity::InitReceived,
            },
            start: start.unwrap_or(0),
            tsc: self.shared.clock().tsc(),
            tsc_khz: self.shared.tsc_khz,
        };
        Ok(saved::to_engine(&self.state()?, &context, &self.msrs, own))
    }

    fn freeze(&mut self, budget: Duration) -> Result<OwnedFd> {
        let micros = u32::try_from(budget.as_micros()).unwrap_or(u32::MAX);
        let link = uapi::freeze(&self.fd, micros).map_err(failed("BASALT_FREEZE"))?;
        self.pending = None;
        Ok(link)
    }

    fn link(&mut self, index: u32, server: Option<OwnedFd>) -> Result<()> {
        let server = server.as_ref().map(AsFd::as_fd);
        uapi::link(&self.fd, index, server).map_err(failed("BASALT_LINK"))
    }

    fn restore(&mut self, state: &VcpuState) -> Result<()> {
        let here = uapi::get_context(&self.fd).map_err(failed("BASALT_GET_CONTEXT"))?;
        let rates = (here.timer_khz, self.shared.tsc_khz);
        let (registers, mut context) = saved::from_engine(state, &self.after_power_on, rates)?;
        self.msrs = Msrs::of(self.first, &state.msrs)?;
        if !self.has_run {
            self.shared.set_cpuid(state.cpuid.clone())?;
        }
        self.pending = None;
        self.set_state(&registers)?;
        uapi::set_context(&self.fd, &mut context).map_err(failed("BASALT_SET_CONTEXT"))?;
        let start = u8::try_from(state.events.sipi_vector).unwrap_or(0);
        match state.activity {
            Activity::Runnable | Activity::Halted => self.power.become_as(true, None),
            Activity::SipiReceived => self.power.become_as(false, Some(start)),
            Activity::Uninitialized | Activity::InitReceived => self.power.become_as(false, None),
        }
        let tsc = state.msrs.iter().find(|msr| msr.index == msr::TSC);
        tsc.into_iter().for_each(|msr| self.shared.restored_at(msr.value));
        self.restored = true;
        Ok(())
    }
}
