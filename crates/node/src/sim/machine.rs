//! A VMM: a process that does nothing, for its number, its pidfd and its end, and a thread that speaks the VMM's protocol for it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use host::jail::Child;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{SocketFlags, accept_with};
use state::{Container, Saved};
use vmm_api::config::DeviceSpec;
use vmm_api::devices::{BalloonConfig, DeviceConfig, MemConfig, VsockConfig, ZEROED_PIECE};
use vmm_api::{
    ApiError, Balloon, ErrorKind, FdRef, FunctionState, HotplugMemory, Info, Packet, Reply, Request, VmState, Written,
};
use wire::packet::PacketSocket;

use super::faults::{Act, Faults};
use super::guest::{self, Guest};
use super::processes::{self, Accelerators};
use crate::Error;
use crate::config::Config;
use crate::saved::state_file::tests::naming;
use crate::store::database::Stored;
use crate::store::paths::SandboxPaths;
use crate::vmm::accelerator::{Launched, Window};
use crate::vmm::launch::{Inherited, Launcher};
use crate::vmm::process;

/// What is in its memory.
const MEMORY: &[u8] = b"memory";

/// What is in a machine's state besides what a node reads of it.
const GUEST: &str = "guest";

/// What a machine is, as far as a test wants to know.
#[derive(Debug, Default)]
pub(crate) struct Shown {
    pub(crate) vm: Option<VmState>,
    pub(crate) is_frozen: bool,
    pub(crate) has_command: bool,
    pub(crate) own: super::guest::Own,
    /// What its clock was set to last.
    pub(crate) clock_ns: u64,
    /// The names of the host's functions that it has.
    pub(crate) functions: Vec<String>,
    /// Memory that its guest can plug.
    pub(crate) memory: Option<HotplugMemory>,
    /// What leaves its balloon as it is mapped for its functions.
    pub(crate) balloon: Option<Balloon>,
    /// What it was given of memory that came zeroed; `None` of one that takes none.
    pub(crate) zeroed: Option<Vec<OwnedFd>>,
    /// How often it is asked until its memory is mapped.
    to_map: u32,
    /// What has come about, in this order.
    pub(crate) history: Vec<&'static str>,
    /// How many functions it had when its command was started.
    pub(crate) had_at_command: usize,
    /// Restored without mapping what no file has content for.
    pub(crate) anonymous_holes: bool,
    open: BTreeMap<u64, UnixStream>,
    opened: u64,
    dead: bool,
}

/// As often a VMM may be asked that never has anything mapped, or plugged; of [`BROKEN`] nothing can be mapped.
pub(crate) const NEVER: u32 = u32::MAX;
pub(crate) const BROKEN: u32 = NEVER - 1;

/// What a VMM says of memory that it cannot map.
pub(crate) const NOT_MAPPED: &str = "no memory is left";

/// As a VMM tells it whose guest's memory is mapped after so many questions.
fn functions(shown: &mut Shown) -> vmm_api::Functions {
    let memory = if shown.functions.is_empty() { 0 } else { 128 << 20 };
    let state = |slot| match shown.to_map {
        0 => FunctionState::Present { slot },
        BROKEN => FunctionState::Failed(NOT_MAPPED.to_owned()),
        _ => FunctionState::Mapping,
    };
    let info = |(name, slot): (&String, u8)| vmm_api::FunctionInfo {
        id: name.clone(),
        state: state(slot),
    };
    let told = vmm_api::Functions {
        mapped: if shown.to_map == 0 { memory } else { 0 },
        total: memory,
        map_bytes: memory,
        map_usec: 250_000,
        zeroed_memory: shown
            .zeroed
            .as_ref()
            .map(|files| files.len() as u64 * ZEROED_PIECE.bytes()),
        functions: shown.functions.iter().zip(5..).map(info).collect(),
        ..vmm_api::Functions::default()
    };
    shown.maps_on();
    told
}

impl Shown {
    fn maps_on(&mut self) {
        if (1..BROKEN).contains(&self.to_map) {
            self.to_map -= 1;
        }
        if self.to_map == 0 && !self.functions.is_empty() {
            self.note("mapped");
        }
    }

    /// Its guest plugs a quarter of its region, or gives so much back, if what is mapped for it lets it.
    fn plugs_on(&mut self) {
        let waits = self.to_map > 0;
        let Some(memory) = self.memory.as_mut().filter(|_| !waits) else {
            return;
        };
        memory.requested = memory.target;
        let step = memory.region / 4;
        memory.plugged = match memory.plugged < memory.target {
            true => memory.target.min(memory.plugged + step),
            false => memory.target.max(memory.plugged.saturating_sub(step)),
        };
        if memory.plugged == memory.target && memory.target > 0 {
            self.note("plugged");
        }
    }

    /// Its guest takes some of what was in its balloon back, if that is mapped for a function.
    fn deflates_on(&mut self) {
        const STEP: u64 = 128 << 20;
        let is_mapped = self.to_map == 0 && !self.functions.is_empty();
        if let Some(balloon) = self.balloon.as_mut().filter(|_| is_mapped) {
            balloon.target = 0;
            balloon.inflated = balloon.inflated.saturating_sub(STEP);
        }
    }

    /// It takes so many questions from now on.
    pub(crate) fn map_after(&mut self, questions: u32) {
        self.to_map = questions;
    }

    /// It maps memory for a function, and has not come to its end.
    pub(crate) fn maps(&self) -> bool {
        self.to_map > 0 && !self.functions.is_empty()
    }

    /// It comes about, for the first time.
    pub(crate) fn note(&mut self, what: &'static str) {
        if !self.history.contains(&what) {
            self.history.push(what);
        }
    }

    /// Whoever is connected to it knows that it has died; its process may take a moment longer.
    pub(crate) fn has_hung_up(&self) -> bool {
        self.dead
    }
}

/// A machine, shared by its VMM's thread, its guest's, and the test.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) sandbox: String,
    pub(crate) pid: u32,
    pidfd: OwnedFd,
    shown: Mutex<Shown>,
}

impl Machine {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Shown> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its process is there.
    pub(crate) fn is_alive(&self) -> bool {
        process::identify(i32::try_from(self.pid).unwrap()).is_some()
    }

    /// Ends it, as SIGKILL does.
    pub(crate) fn die(&self) {
        process::kill(&self.pidfd).unwrap();
        self.hang_up();
    }

    /// Its connections end with it.
    fn hang_up(&self) {
        let mut shown = self.lock();
        shown.dead = true;
        for stream in std::mem::take(&mut shown.open).into_values() {
            // The other side may have closed it.
            drop(stream.shutdown(Shutdown::Both));
        }
    }

    /// Waits for as long as its vCPUs stand still; false when it has ended.
    pub(crate) fn waits_to_run(&self) -> bool {
        loop {
            let shown = self.lock();
            if shown.dead || shown.vm != Some(VmState::Paused) {
                return !shown.dead;
            }
            drop(shown);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Has `stream` end with the machine, until what this gives is dropped; `None` when it has ended.
    pub(crate) fn keep(self: &Arc<Self>, stream: &UnixStream) -> Option<Open> {
        let mut shown = self.lock();
        if shown.dead {
            return None;
        }
        shown.opened += 1;
        let number = shown.opened;
        shown.open.insert(number, stream.try_clone().ok()?);
        Some(Open(Arc::clone(self), number))
    }

    /// Something comes to `fd` before the machine's end.
    fn wait(&self, fd: impl AsFd) -> bool {
        loop {
            let mut fds = [PollFd::new(&fd, PollFlags::IN), PollFd::new(&self.pidfd, PollFlags::IN)];
            match poll(&mut fds, None) {
                Ok(_) => return fds[1].revents().is_empty(),
                Err(error) => assert_eq!(error, rustix::io::Errno::INTR),
            }
        }
    }

    /// The next connection, before the machine's end.
    pub(crate) fn accept(&self, listener: &UnixListener) -> Option<UnixStream> {
        self.wait(listener)
            .then(|| listener.accept().ok())
            .flatten()
            .map(|(stream, _)| stream)
    }
}

/// A connection that ends with its machine.
pub(crate) struct Open(Arc<Machine>, u64);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.lock().open.remove(&self.1);
    }
}

/// Starts such VMMs, and knows all that it has started.
#[derive(Debug)]
pub(crate) struct Machines {
    pub(crate) faults: Faults,
    /// How often a VMM is asked until memory is mapped for its functions, or its guest plugs some.
    pub(crate) to_map: Arc<AtomicU32>,
    /// They take memory that comes zeroed.
    pub(crate) take_zeroed: AtomicBool,
    all: Mutex<Vec<Arc<Machine>>>,
    /// Their accelerators' servers.
    pub(crate) accelerators: Accelerators,
}

impl Machines {
    pub(crate) fn new(faults: Faults) -> Self {
        Self {
            faults,
            to_map: Arc::default(),
            take_zeroed: AtomicBool::new(true),
            all: Mutex::default(),
            accelerators: Accelerators::default(),
        }
    }

    pub(crate) fn alive(&self) -> Vec<Arc<Machine>> {
        let all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter(|machine| machine.is_alive()).cloned().collect()
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        for machine in self.alive() {
            machine.die();
            process::reap(&machine.pidfd);
        }
    }
}

impl Launcher for Machines {
    fn launch(
        &self,
        _: &Config,
        stored: &Stored,
        _: &SandboxPaths,
        inherited: &Inherited,
        cgroup: Option<&Path>,
    ) -> Result<Child, Error> {
        self.faults.call_host("launch").map_err(Error::host("starting a VMM"))?;
        let child = processes::start(cgroup);
        let pid = child.pid;
        let machine = Arc::new(Machine {
            sandbox: stored.sandbox.id.clone(),
            pid,
            pidfd: child.pidfd.try_clone().unwrap(),
            shown: Mutex::new(Shown {
                zeroed: self.take_zeroed.load(Ordering::SeqCst).then(Vec::new),
                ..Shown::default()
            }),
        });
        self.all
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(Arc::clone(&machine));
        let vmm = Vmm {
            machine,
            faults: self.faults.clone(),
            to_map: Arc::clone(&self.to_map),
            guest: None,
            acceptor: None,
        };
        let control = inherited.control().try_clone_to_owned().unwrap();
        std::thread::spawn(move || vmm.serve(&control));
        Ok(child)
    }

    fn launch_accelerator(
        &self,
        _: &Config,
        stored: &Stored,
        paths: &SandboxPaths,
        (_, saved): (&Window, Option<File>),
        cgroup: Option<&Path>,
    ) -> Result<Launched, Error> {
        let refused = self.faults.call_host("launch accelerator");
        refused.map_err(Error::host("starting an accelerator's server"))?;
        let whose = (stored.sandbox.id.as_str(), paths.accelerator_save());
        Ok(self
            .accelerators
            .launch((whose.0, &whose.1), saved, (cgroup, self.faults.clone())))
    }
}

struct Vmm {
    machine: Arc<Machine>,
    faults: Faults,
    to_map: Arc<AtomicU32>,
    guest: Option<Arc<Guest>>,
    /// Where the guest's first connection goes.
    acceptor: Option<PacketSocket>,
}

/// Descriptors of a packet, each taken once.
struct Fds(Vec<Option<OwnedFd>>);

impl Fds {
    fn take(&mut self, fd: FdRef) -> OwnedFd {
        self.0[usize::try_from(fd.0).unwrap()].take().unwrap()
    }
}

impl Vmm {
    /// Serves one driver after the other until the process ends.
    fn serve(mut self, listener: &OwnedFd) {
        while self.machine.wait(listener) {
            let Ok(driver) = accept_with(listener, SocketFlags::CLOEXEC) else {
                break;
            };
            let control = PacketSocket::from_fd(driver);
            while self.machine.wait(&control) {
                let Ok((bytes, fds)) = control.receive() else { break };
                let Ok(Packet::Request { id, request, .. }) = serde_json::from_slice(&bytes) else {
                    break;
                };
                let fds = Fds(fds.into_iter().map(Some).collect());
                let Some(result) = self.carry_out(request, fds) else {
                    break;
                };
                if control
                    .send(&serde_json::to_vec(&Packet::Reply { id, result }).unwrap(), &[])
                    .is_err()
                {
                    break;
                }
            }
        }
        self.machine.hang_up();
    }

    /// Its answer; `None` if it has died.
    fn carry_out(&mut self, request: Request, mut fds: Fds) -> Option<Result<Reply, ApiError>> {
        let name = serde_json::to_value(&request).unwrap();
        let name = name["method"].as_str().unwrap();
        match self.faults.call(&format!("VMM {name}")) {
            Act::Answer => (),
            Act::Refuse(why) => return Some(Err(refusal(ErrorKind::Host, why))),
            Act::Die => {
                self.machine.die();
                return None;
            }
        }
        let mut reply = Reply::Done;
        match request {
            Request::Create(config) => {
                self.machine.lock().vm = Some(VmState::Created);
                self.make(&config.devices, &mut fds, true);
            }
            Request::Restore(config) => {
                self.machine.lock().anonymous_holes = config.anonymous_holes;
                let (state, memory) = (fds.take(config.files.state), fds.take(config.files.memory[0]));
                self.goes_on_from(state, memory);
                self.make(&config.devices, &mut fds, false);
            }
            Request::Rollback(config) => {
                let (state, memory) = (fds.take(config.files.state), fds.take(config.files.memory[0]));
                self.goes_on_from(state, memory);
                self.machine.lock().is_mapped_anew();
                let vsock = device::<VsockConfig>(&config.devices);
                let listener = fds.take(vsock.listener.unwrap());
                self.guest.as_ref().unwrap().listen(listener.into());
            }
            Request::Start | Request::Resume => {
                let first = self.machine.lock().vm.replace(VmState::Running) == Some(VmState::Created);
                if first {
                    self.machine.lock().note("started");
                    self.boot();
                }
            }
            Request::Pause => self.machine.lock().vm = Some(VmState::Paused),
            Request::Snapshot(_) => {
                let shown = self.machine.lock();
                assert_eq!((shown.vm, shown.is_frozen), (Some(VmState::Paused), true));
                if let Some(function) = shown.functions.first() {
                    let why = format!("device `{function}` is the host's: it is not saved");
                    return Some(Err(refusal(ErrorKind::Invalid, &why)));
                }
                let guest = (shown.own.hostname.clone().unwrap_or_default(), shown.memory);
                drop(shown);
                let mut files = fds.0.into_iter().flatten().map(File::from);
                let (mut state, mut memory) = (files.next().unwrap(), files.next().unwrap());
                let files = 1 + files.count();
                let written = state
                    .write_all(&saved(&guest, files))
                    .and_then(|()| memory.write_all(MEMORY));
                if let Err(error) = written {
                    return Some(Err(refusal(ErrorKind::Host, &error.to_string())));
                }
                reply = Reply::Written(Written { files });
            }
            Request::PageOrder => reply = Reply::PageOrder(vec![(7, 1)]),
            Request::WriteSet => reply = Reply::WriteSet(vec![(1, 2)]),
            Request::Info => reply = Reply::Info(self.info()),
            Request::Metrics => reply = Reply::Metrics(Vec::new()),
            Request::Functions => reply = Reply::Functions(functions(&mut self.machine.lock())),
            Request::Attach(device) => {
                let mut shown = self.machine.lock();
                shown.to_map = self.to_map.load(Ordering::SeqCst);
                shown.functions.push(device.id.clone());
            }
            Request::AddZeroedMemory(files) => {
                let mut shown = self.machine.lock();
                assert!(shown.functions.is_empty(), "its memory is mapped already");
                shown.note("zeroed");
                let taken = shown.zeroed.as_mut().unwrap();
                taken.extend(files.into_iter().map(|file| fds.take(file)));
            }
            Request::ResizeMemory(size) => self.machine.lock().resize(size.bytes()),
            Request::Detach(id) => {
                let mut shown = self.machine.lock();
                if !shown.functions.contains(&id) {
                    let why = format!("there is no function `{id}`");
                    return Some(Err(refusal(ErrorKind::Invalid, &why)));
                }
                shown.note("detached");
                shown.functions.retain(|function| *function != *id);
            }
            Request::Rebase(_) => self.machine.lock().is_mapped_anew(),
            Request::Freeze(_) | Request::Link(_) => {
                return Some(Err(refusal(ErrorKind::Host, "this engine has no servers")));
            }
            Request::MapAhead(_) | Request::ResizeBalloon(_) | Request::PressPowerButton | Request::Stop => (),
        }
        Some(Ok(reply))
    }

    /// It is what was saved, standing still.
    fn goes_on_from(&self, state: OwnedFd, memory: OwnedFd) {
        let read = |file: OwnedFd| {
            let mut bytes = Vec::new();
            File::from(file).read_to_end(&mut bytes).unwrap();
            bytes
        };
        assert_eq!(read(memory), MEMORY);
        let guest = Container::parse(&read(state)).unwrap().take_saved(GUEST).unwrap();
        let (hostname, memory): SavedGuest = serde_json::from_slice(&guest.payload).unwrap();
        let mut shown = self.machine.lock();
        (shown.own.hostname, shown.memory) = (Some(hostname), memory);
        (shown.vm, shown.is_frozen, shown.has_command) = (Some(VmState::Paused), true, true);
    }

    fn make(&mut self, devices: &[DeviceSpec], fds: &mut Fds, boots: bool) {
        if devices.iter().any(|device| device.kind == MemConfig::KIND) {
            let config = device::<MemConfig>(devices);
            config.check().unwrap();
            let made = HotplugMemory {
                region: config.max_size().bytes(),
                block: config.block_size.bytes(),
                target: config.requested_size.bytes(),
                requested: 0,
                plugged: 0,
            };
            let mut shown = self.machine.lock();
            shown.to_map = self.to_map.load(Ordering::SeqCst);
            // What was saved has what it had, whatever it is to have.
            let memory = shown.memory.get_or_insert(made);
            assert!(memory.plugged <= made.region, "what it had has no room");
            memory.region = made.region;
        }
        if devices.iter().any(|device| device.kind == BalloonConfig::KIND) {
            let bytes = device::<BalloonConfig>(devices).target.bytes();
            self.machine.lock().balloon = Some(Balloon {
                target: bytes,
                inflated: bytes,
                reported: 0,
                discarded: 0,
                messages: 0,
                fell_back: false,
            });
        }
        let vsock = device::<VsockConfig>(devices);
        let guest = Arc::new(Guest {
            machine: Arc::clone(&self.machine),
            faults: self.faults.clone(),
            log: fds.take(vsock.sinks[0].file).into(),
        });
        guest.listen(fds.take(vsock.listener.unwrap()).into());
        if boots {
            self.acceptor = Some(PacketSocket::from_fd(fds.take(vsock.acceptor.unwrap())));
        }
        self.guest = Some(guest);
    }

    /// Its guest's agent calls.
    fn boot(&mut self) {
        let (guest, acceptor) = (Arc::clone(self.guest.as_ref().unwrap()), self.acceptor.take().unwrap());
        std::thread::spawn(move || guest::call(&acceptor).map(|stream| guest.serve(stream)));
    }

    fn info(&self) -> Info {
        let mut shown = self.machine.lock();
        shown.plugs_on();
        shown.deflates_on();
        Info {
            api_version: vmm_api::VERSION,
            vmm_version: "simulated".into(),
            pid: self.machine.pid,
            engine: "none".into(),
            state: shown.vm.unwrap_or(VmState::Empty),
            stopped: None,
            cpus: 1,
            memory: 0,
            hotplug_memory: shown.memory,
            balloon: shown.balloon,
            links: Vec::new(),
            marks: Vec::new(),
        }
    }
}

/// What is saved of a guest: its name, and what memory it has plugged.
type SavedGuest = (String, Option<HotplugMemory>);

/// The state of a machine with so many memory files, whose guest is this.
fn saved(guest: &SavedGuest, files: usize) -> Vec<u8> {
    let mut state = Container::parse(&naming(files)).unwrap();
    let guest = Saved {
        kind: GUEST.to_owned(),
        version: 1,
        payload: serde_json::to_vec(guest).unwrap(),
    };
    state.put_saved(GUEST, guest).unwrap();
    state.to_bytes().unwrap()
}

fn device<C: DeviceConfig>(devices: &[DeviceSpec]) -> C {
    let spec = devices.iter().find(|device| device.kind == C::KIND).unwrap();
    serde_json::from_value(spec.config.clone()).unwrap()
}

fn refusal(kind: ErrorKind, message: &str) -> ApiError {
    ApiError {
        kind,
        message: message.to_owned(),
    }
}
