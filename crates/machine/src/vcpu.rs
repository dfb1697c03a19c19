//! The thread of one vCPU.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::thread::JoinHandle;

use base::EventFd;
use bus::Bus;
use engine::state::VcpuState;
use engine::{EngineError, Exit, Kick, SystemEvent, Vcpu};

use crate::error::MachineError;
use crate::exits::ExitCounters;
use crate::halt::Halts;
use crate::machine::host;
use crate::platform::{IoApic, PowerRequest};
use crate::run_control::{Next, RunControl, RunRequest};
use crate::servers::Freezing;

/// What [`observe::marks`] has just before any vCPU enters the guest for the first time.
pub const FIRST_RUN: &str = "first KVM_RUN";

/// Why the guest runs no longer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// It powered off.
    PowerOff,
    /// Its vCPUs have halted with interrupts off.
    Halted,
    /// It asked for a reset, or fell into a triple fault.
    Reset,
    /// The engine cannot go on; why.
    Failed(String),
}

impl From<PowerRequest> for End {
    fn from(request: PowerRequest) -> Self {
        match request {
            PowerRequest::Off => Self::PowerOff,
            PowerRequest::Reset => Self::Reset,
        }
    }
}

/// The first reason for which the guest ended, and the event that tells.
pub(crate) struct Ending {
    reason: OnceLock<End>,
    event: EventFd,
}

impl Ending {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self {
            reason: OnceLock::new(),
            event: EventFd::new()?,
        })
    }

    /// Later reasons are consequences of the first and are dropped.
    pub(crate) fn report(&self, end: End) {
        if self.reason.set(end).is_ok() {
            self.event.signal();
        }
    }

    pub(crate) fn reason(&self) -> Option<&End> {
        self.reason.get()
    }

    pub(crate) fn event(&self) -> &EventFd {
        &self.event
    }
}

/// What all vCPU threads share.
#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) run: Arc<RunControl>,
    pub(crate) ending: Arc<Ending>,
    pub(crate) ports: Arc<Bus>,
    pub(crate) mmio: Arc<Bus>,
    pub(crate) halts: Arc<Halts>,
    pub(crate) freezing: Arc<Freezing>,
    /// Whom ends of level-triggered interrupts are told: the board's own, which a rollback makes anew.
    pub(crate) ioapic: Arc<RwLock<Option<Arc<IoApic>>>>,
}

impl Shared {
    /// Empty buses; vCPUs are to pause.
    pub(crate) fn new() -> Result<Self, MachineError> {
        Ok(Self {
            run: Arc::new(RunControl::new()),
            ending: Arc::new(Ending::new().map_err(host("an event fd"))?),
            ports: Arc::new(Bus::new()),
            mmio: Arc::new(Bus::new()),
            halts: Arc::default(),
            freezing: Arc::new(Freezing::new().map_err(host("an event fd"))?),
            ioapic: Arc::default(),
        })
    }
}

/// What a thread is to do with its vCPU while that stands still.
pub(crate) enum VcpuCommand {
    /// Tell its state.
    Save,
    /// Take over another.
    Restore(Box<VcpuState>),
    /// As [`Vcpu::link`].
    Link {
        /// By which number.
        index: u32,
        /// To whom.
        server: Option<OwnedFd>,
    },
}

/// What came of a command; a state where one was asked for.
pub(crate) type Reply = Result<Option<VcpuState>, EngineError>;

/// Where a thread finds its command and leaves its reply.
#[derive(Default)]
struct Mailbox {
    command: Mutex<Option<VcpuCommand>>,
    reply: Mutex<Option<Reply>>,
}

impl Mailbox {
    fn execute(&self, vcpu: &mut dyn Vcpu) {
        let command = self.command.lock().unwrap_or_else(PoisonError::into_inner).take();
        let reply = command.map(|command| match command {
            VcpuCommand::Save => vcpu.save().map(Some),
            VcpuCommand::Restore(state) => vcpu.restore(&state).map(|()| None),
            VcpuCommand::Link { index, server } => vcpu.link(index, server).map(|()| None),
        });
        *self.reply.lock().unwrap_or_else(PoisonError::into_inner) = reply;
    }
}

/// A vCPU's thread and the means to interrupt it.
pub(crate) struct VcpuThread {
    pub(crate) kicker: Arc<dyn Kick>,
    pub(crate) thread: JoinHandle<Box<dyn Vcpu>>,
    /// Its engine tells when it has halted.
    pub(crate) reports_halts: bool,
    mailbox: Arc<Mailbox>,
}

impl VcpuThread {
    /// Starts the thread; it is parked.
    pub(crate) fn spawn(id: u32, vcpu: Box<dyn Vcpu>, shared: Shared, counters: ExitCounters) -> std::io::Result<Self> {
        let (kicker, reports_halts) = (vcpu.kicker(), vcpu.reports_halts());
        let own = Arc::clone(&kicker);
        let mailbox = Arc::new(Mailbox::default());
        let own_mailbox = Arc::clone(&mailbox);
        let thread = base::thread::spawn(&format!("vcpu{id}"), 128 << 10, move || {
            body(vcpu, own.as_ref(), &shared, &counters, &own_mailbox)
        })?;
        Ok(Self {
            kicker,
            thread,
            reports_halts,
            mailbox,
        })
    }

    /// Leaves a command for the next [`RunControl::execute_all`].
    pub(crate) fn leave(&self, command: VcpuCommand) {
        *self.mailbox.command.lock().unwrap_or_else(PoisonError::into_inner) = Some(command);
    }

    /// What came of it; `None` if the thread has ended before.
    pub(crate) fn take_reply(&self) -> Option<Reply> {
        self.mailbox.reply.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Reports a thread that unwinds: without it, whoever waits for the vCPU to park would wait for ever.
struct Unwinding<'a>(&'a Shared);

impl Drop for Unwinding<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0
                .ending
                .report(End::Failed("a vCPU's thread panicked; this is a bug".into()));
            self.0.run.abandon();
        }
    }
}

fn body(
    mut vcpu: Box<dyn Vcpu>,
    kicker: &dyn Kick,
    shared: &Shared,
    counters: &ExitCounters,
    mailbox: &Mailbox,
) -> Box<dyn Vcpu> {
    let _guard = Unwinding(shared);
    kicker.adopt_current_thread();
    let (mut commands, mut seen) = (0, 0);
    loop {
        match shared.run.wait_next(&mut commands) {
            Next::Run => {
                kicker.clear();
                observe::marks::mark(FIRST_RUN);
                if let Err(end) = run(vcpu.as_mut(), kicker, shared, counters, &mut seen) {
                    shared.ending.report(end);
                    shared.run.request(RunRequest::Pause);
                }
            }
            Next::Execute => {
                mailbox.execute(vcpu.as_mut());
                shared.run.command_done();
            }
            Next::Exit => return vcpu,
        }
    }
}

/// Runs the guest until it must stop, and leaves it between two instructions: an access that the last exit was about is
/// completed, while the devices still stand behind it. `seen` is how often it was asked whether it has halted.
fn run(
    vcpu: &mut dyn Vcpu,
    kicker: &dyn Kick,
    shared: &Shared,
    counters: &ExitCounters,
    seen: &mut u64,
) -> Result<(), End> {
    // A pause that was asked for before the kick was cleared was requested before.
    while shared.run.may_run() {
        if step(vcpu, shared, counters)? {
            kicker.clear();
            shared.halts.answer(seen, vcpu);
        }
    }
    kicker.hold();
    while !step(vcpu, shared, counters)? {}
    Ok(())
}

/// Runs the guest to its next exit and answers that. True when it was none: somebody has interrupted it.
fn step(vcpu: &mut dyn Vcpu, shared: &Shared, counters: &ExitCounters) -> Result<bool, End> {
    let exit = vcpu.run().map_err(|error| End::Failed(error.to_string()))?;
    counters.count(&exit);
    match exit {
        Exit::PortRead { port, width, data } => {
            for data in data.chunks_mut(width) {
                shared.ports.read(u64::from(port), data);
            }
        }
        Exit::PortWrite { port, width, data } => {
            for data in data.chunks(width) {
                shared.ports.write(u64::from(port), data);
            }
        }
        Exit::MmioRead { address, data } => {
            shared.mmio.read(address, data);
        }
        Exit::MmioWrite { address, data } => {
            shared.mmio.write(address, data);
        }
        Exit::Interrupted => return Ok(true),
        Exit::Waiting => shared.freezing.at_wait(vcpu),
        Exit::IoapicEoi(vector) => {
            let ioapic = shared.ioapic.read().unwrap_or_else(PoisonError::into_inner);
            if let Some(ioapic) = ioapic.as_ref() {
                ioapic.end(vector);
            }
        }
        Exit::Halted => {
            return Err(End::Failed(
                "a vCPU halted for good: the engine has no local APIC".into(),
            ));
        }
        Exit::Shutdown => {
            // Nobody asks for it: whoever looks for the reason of a reset should not take it for the guest's wish.
            log::warn!("a vCPU shut down, as after a triple fault");
            return Err(End::Reset);
        }
        Exit::System(SystemEvent::Reset) => return Err(End::Reset),
        Exit::System(SystemEvent::PowerOff) => return Err(End::PowerOff),
        Exit::System(SystemEvent::Crash) => return Err(End::Failed("the guest's kernel reported a crash".into())),
        Exit::Failed(why) => return Err(End::Failed(why)),
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use bus::BusDevice;
    use engine::{BootState, Result};
    use observe::Registry;
    use std::sync::atomic::{AtomicBool, Ordering};

    const PORT: u16 = 0x60;

    /// Answers each access with the next number, and keeps what it is told.
    #[derive(Default)]
    struct Fifo(Mutex<(u8, Vec<Vec<u8>>)>);

    impl BusDevice for Fifo {
        fn read(&self, _offset: u64, data: &mut [u8]) {
            let mut state = self.0.lock().unwrap();
            state.0 += 1;
            data.fill(state.0);
        }

        fn write(&self, _offset: u64, data: &[u8]) {
            self.0.lock().unwrap().1.push(data.to_vec());
        }
    }

    /// Comes out with one exit for four accesses: a read, then a write.
    struct StringIo {
        data: Vec<u8>,
        writes: bool,
    }

    impl Vcpu for StringIo {
        fn run(&mut self) -> Result<Exit<'_>> {
            let (port, width) = (PORT, 2);
            Ok(if std::mem::replace(&mut self.writes, true) {
                let data = &self.data;
                Exit::PortWrite { port, width, data }
            } else {
                let data = &mut self.data;
                Exit::PortRead { port, width, data }
            })
        }

        fn kicker(&self) -> Arc<dyn Kick> {
            unreachable!("nobody interrupts it")
        }

        fn set_boot_state(&mut self, _boot: &BootState) -> Result<()> {
            unreachable!("it is not booted")
        }

        fn save(&mut self) -> Result<VcpuState> {
            unreachable!("it is not saved")
        }

        fn restore(&mut self, _state: &VcpuState) -> Result<()> {
            unreachable!("it is not restored")
        }
    }

    /// Comes out in the middle of an access that takes three exits, and is interrupted only after the last.
    struct Split(u32);

    impl Vcpu for Split {
        fn run(&mut self) -> Result<Exit<'_>> {
            self.0 += 1;
            Ok(if self.0 <= 3 {
                Exit::PortWrite {
                    port: PORT,
                    width: 1,
                    data: &[7],
                }
            } else {
                Exit::Interrupted
            })
        }

        fn kicker(&self) -> Arc<dyn Kick> {
            unreachable!("the test has one of its own")
        }

        fn set_boot_state(&mut self, _boot: &BootState) -> Result<()> {
            unreachable!("it is not booted")
        }

        fn save(&mut self) -> Result<VcpuState> {
            unreachable!("it is not saved")
        }

        fn restore(&mut self, _state: &VcpuState) -> Result<()> {
            unreachable!("it is not restored")
        }
    }

    #[derive(Default)]
    struct Held(AtomicBool);

    impl Kick for Held {
        fn kick(&self) {}
        fn adopt_current_thread(&self) {}
        fn hold(&self) {
            self.0.store(true, Ordering::SeqCst);
        }
        fn clear(&self) {}
    }

    #[test]
    fn an_access_is_completed_before_the_vcpu_waits() {
        let fifo = Arc::new(Fifo::default());
        let ports = Bus::new();
        ports.insert(u64::from(PORT), 4, Arc::<Fifo>::clone(&fifo)).unwrap();
        let shared = Shared {
            ports: Arc::new(ports),
            ..Shared::new().unwrap()
        };
        // It must stop already: what is left of the access is done all the same.
        let (mut vcpu, held) = (Split(1), Held::default());
        run(
            &mut vcpu,
            &held,
            &shared,
            &ExitCounters::new(&Registry::new(), 0),
            &mut 0,
        )
        .unwrap();
        assert!(held.0.load(Ordering::SeqCst));
        assert_eq!(fifo.0.lock().unwrap().1.len(), 2);
        assert_eq!(vcpu.0, 4);
    }

    #[test]
    fn a_string_instruction_is_as_many_accesses_as_it_has_elements() {
        let fifo = Arc::new(Fifo::default());
        let ports = Bus::new();
        ports.insert(u64::from(PORT), 4, Arc::<Fifo>::clone(&fifo)).unwrap();
        let shared = Shared {
            ports: Arc::new(ports),
            ..Shared::new().unwrap()
        };
        let counters = ExitCounters::new(&Registry::new(), 0);
        let mut vcpu = StringIo {
            data: vec![0; 8],
            writes: false,
        };
        step(&mut vcpu, &shared, &counters).unwrap();
        assert_eq!(vcpu.data, [1, 1, 2, 2, 3, 3, 4, 4]);
        step(&mut vcpu, &shared, &counters).unwrap();
        assert_eq!(fifo.0.lock().unwrap().1, [[1, 1], [2, 2], [3, 3], [4, 4]]);
    }
}
