//! The stand-in for `basalt-vmm`: answers on the control socket, and has the agent's server where a VM would be.
//!
//! What it does besides is asked for by the kernel file's contents, the one thing that a test can write and that reaches
//! a VMM: `panic`, `refuse`, `silent`, or nothing; with `can be kept` and `cannot be kept` its agent can freeze and re-identify, and the
//! VMM can take a snapshot or not; with `holds on and can be kept` the first connection to its agent never ends; with `without
//! descriptors can be kept` the daemon can open nothing more from the moment on at which a snapshot is written; with `no space` whoever
//! asks for its metrics has it stop its VM for want of space.
//!
//! A snapshot's state is what the guest's devices look like, its memory one word; a guest that is restored
//! has no commands, and writes to its console what its agent was told.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;

use agent::{Cgroups, Clones, Power, Reaper, Reidentified, RootMode, Server, ServerConfig};
use agent_api::VSOCK_PORT;
use state::{Container, Fingerprint, Saved};
use vmm_api::config::DeviceSpec;
use vmm_api::devices::{ConsoleConfig, DeviceConfig, NetConfig, VsockConfig};
use vmm_api::{
    ApiError, ErrorKind, Event, ExitReason, FdRef, Info, Mark, MetricSample, Packet, PageRuns, Paging, Reply, Request,
    StopReason, VmState, Written,
};
use wire::packet::PacketSocket;

/// A restore fails on this host, as if it had no memory, where the lowest memory file begins so.
pub(crate) const HOST_IS_FULL: &str = "the host is full";

pub(crate) fn serve(control: RawFd) {
    // SAFETY: the parent has left this descriptor open for this program, and nothing here has taken it yet.
    let listener = unsafe { OwnedFd::from_raw_fd(control) };
    // A command must not keep the socket open when the VMM has been killed; a real VMM starts no processes at all.
    rustix::io::fcntl_setfd(&listener, rustix::io::FdFlags::CLOEXEC).unwrap();
    let mut machine = None;
    loop {
        let driver = rustix::net::accept_with(&listener, rustix::net::SocketFlags::CLOEXEC).unwrap();
        let goes_on = serve_driver(&PacketSocket::from_fd(driver), &mut machine);
        if !goes_on || machine.as_ref().is_none_or(|machine| !machine.has_run) {
            return;
        }
    }
}

/// What stands for the VM.
struct Machine {
    devices: Vec<DeviceSpec>,
    fds: Vec<Option<OwnedFd>>,
    /// Its interfaces' TAPs, which they keep in a rollback.
    taps: Vec<OwnedFd>,
    /// What the kernel file says; a restored one has none.
    play: String,
    restored: bool,
    state: VmState,
    /// Why it has stopped by itself, and that it has yet to be told.
    stopped: Option<StopReason>,
    untold: bool,
    has_run: bool,
    /// Pages that it was to copy before it runs.
    write_set: PageRuns,
    paging: Paging,
    /// Its guest's agent, when it has run.
    agent: Option<Arc<Server>>,
}

impl Machine {
    fn new(devices: Vec<DeviceSpec>, fds: Vec<OwnedFd>, kernel: Option<FdRef>) -> Self {
        let read = |fd: FdRef| {
            let mut text = String::new();
            let mut file = File::from(fds[index(fd)].try_clone().unwrap());
            file.read_to_string(&mut text).unwrap();
            text
        };
        let interfaces = devices.iter().filter(|device| device.kind == NetConfig::KIND);
        let configs = interfaces.map(|spec| serde_json::from_value::<NetConfig>(spec.config.clone()).unwrap());
        let taps = configs.flat_map(|config| config.taps);
        let taps = taps.map(|tap| fds[index(tap)].try_clone().unwrap()).collect();
        Self {
            taps,
            play: kernel.map(read).unwrap_or_default(),
            restored: kernel.is_none(),
            state: if kernel.is_none() {
                VmState::Paused
            } else {
                VmState::Created
            },
            stopped: None,
            untold: false,
            has_run: false,
            write_set: PageRuns::new(),
            paging: Paging::Mapped,
            agent: None,
            devices,
            fds: fds.into_iter().map(Some).collect(),
        }
    }

    fn take(&mut self, fd: FdRef) -> OwnedFd {
        self.fds[index(fd)].take().unwrap()
    }

    fn device<C: DeviceConfig>(&self) -> C {
        let spec = self.devices.iter().find(|device| device.kind == C::KIND).unwrap();
        serde_json::from_value(spec.config.clone()).unwrap()
    }

    /// What a guest can see of its devices.
    fn shape(&self) -> String {
        self.devices
            .iter()
            .map(|device| format!("{} {}\n", device.id, device.kind))
            .collect()
    }

    /// The state is of such devices.
    fn is_of(&self, state: &File) -> bool {
        let mut bytes = Vec::new();
        let read = { state }.read_to_end(&mut bytes);
        read.is_ok() && shape_of(&bytes).is_some_and(|shape| shape == self.shape().as_bytes())
    }

    /// It has no space left for what its guest writes.
    fn stop(&mut self) {
        self.state = VmState::Paused;
        self.stopped = Some(StopReason::NoSpace {
            disks: vec!["writable".to_owned()],
        });
        self.untold = true;
    }

    fn go(&mut self) {
        self.stopped = None;
        self.state = VmState::Running;
        if !std::mem::replace(&mut self.has_run, true) && self.play != "silent" {
            start_agent(self);
        }
    }
}

/// Serves one driver until it goes; false when the VM has ended.
fn serve_driver(control: &PacketSocket, machine: &mut Option<Machine>) -> bool {
    while let Ok((bytes, fds)) = control.receive() {
        let Ok(Packet::Request { id, request, .. }) = serde_json::from_slice(&bytes) else {
            return false;
        };
        let (result, event) = carry_out(request, fds, machine);
        send(control, &Packet::Reply { id, result });
        if let Some(machine) = machine.as_mut().filter(|machine| machine.untold) {
            machine.untold = false;
            send(
                control,
                &Packet::Event(Event::Stopped(machine.stopped.clone().unwrap())),
            );
        }
        if let Some(reason) = event {
            send(control, &Packet::Event(Event::Ended(reason)));
            return false;
        }
    }
    true
}

fn carry_out(
    request: Request,
    fds: Vec<OwnedFd>,
    machine: &mut Option<Machine>,
) -> (Result<Reply, ApiError>, Option<ExitReason>) {
    let mut result = Ok(Reply::Done);
    match request {
        Request::Create(config) => {
            let made = machine.insert(Machine::new(config.devices, fds, Some(config.kernel)));
            if made.play == "refuse" {
                result = refused("the kernel is truncated: build it again");
            }
        }
        Request::Restore(config) => {
            let made = machine.insert(Machine::new(config.devices, fds, None));
            (made.write_set, made.paging) = (config.write_set, config.paging);
            let state = File::from(made.take(config.files.state));
            let mut memory = String::new();
            let lowest = made.take(config.files.memory[0]);
            if !made.is_of(&state) {
                result = refused("these are not the devices of the snapshot");
            } else if File::from(lowest)
                .take(HOST_IS_FULL.len() as u64)
                .read_to_string(&mut memory)
                .is_ok()
                && memory == HOST_IS_FULL
            {
                result = Err(ApiError {
                    kind: ErrorKind::Host,
                    message: "KVM_CREATE_VM failed: Cannot allocate memory".to_owned(),
                });
            }
        }
        Request::Rollback(config) => {
            let other = Machine::new(config.devices, fds, None);
            let now = machine.as_mut().unwrap();
            let file = other.fds[index(config.files.state)].as_ref().unwrap();
            let state = File::from(file.try_clone().unwrap());
            match other.is_of(&state) && other.shape() == now.shape() {
                // The agent stays, and is found at another place.
                true => {
                    *now = Machine {
                        agent: now.agent.take(),
                        taps: std::mem::take(&mut now.taps),
                        ..other
                    }
                }
                false => result = refused("these are not the devices of the snapshot"),
            }
        }
        Request::Start if machine.as_ref().unwrap().play == "panic" => {
            panic_guest(machine.as_mut().unwrap());
            return (result, Some(ExitReason::Reset));
        }
        Request::Start | Request::Resume => machine.as_mut().unwrap().go(),
        Request::Pause => {
            let machine = machine.as_mut().unwrap();
            (machine.state, machine.stopped) = (VmState::Paused, None);
        }
        Request::Snapshot(_) => {
            let machine = machine.as_ref().unwrap();
            let mut files = fds.into_iter().map(File::from);
            match machine.play.as_str() {
                "cannot be kept" => result = refused("the state cannot be written"),
                _ => {
                    assert_eq!(machine.state, VmState::Paused);
                    if machine.play.starts_with("without descriptors") {
                        // No lower: that is how many poll(2) takes then.
                        limit_open_files(rustix::process::getppid(), 4);
                    }
                    let (mut state, mut memory) = (files.next().unwrap(), files.next().unwrap());
                    // What it was restored from lies below.
                    let count = 1 + files.count();
                    state.write_all(&state_of(&machine.shape(), count)).unwrap();
                    memory.write_all(b"memory").unwrap();
                    result = Ok(Reply::Written(Written { files: count }));
                }
            }
        }
        Request::PageOrder => result = Ok(Reply::PageOrder(vec![(7, 1)])),
        Request::WriteSet => result = Ok(Reply::WriteSet(vec![(1, 2)])),
        Request::Info => result = Ok(Reply::Info(info(machine.as_ref()))),
        Request::Metrics => {
            if let Some(machine) = machine.as_mut().filter(|machine| machine.play == "no space") {
                machine.stop();
            }
            result = Ok(Reply::Metrics(metrics()));
        }
        _ => (),
    }
    (result, None)
}

/// How many files a process may have open from now on; those that it has stay.
pub(crate) fn limit_open_files(process: Option<rustix::process::Pid>, most: u64) {
    use rustix::process::{Resource, getrlimit, prlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = Some(most);
    prlimit(process, Resource::Nofile, limit).unwrap();
}

/// A state with the frame that each has, of a machine with these devices, whose memory is in so many files.
pub(crate) fn state_of(shape: &str, memory_files: usize) -> Vec<u8> {
    let mut container = Container::new(Fingerprint::default());
    let mut put = |component: &str, kind: &str, version, payload: Vec<u8>| {
        let kind = kind.to_owned();
        let saved = Saved { kind, version, payload };
        container.put_saved(component, saved).unwrap();
    };
    let files = serde_json::json!({ "files": vec![serde_json::json!({}); memory_files] });
    put("memory", "memory-file", 2, files.to_string().into_bytes());
    put("shape", "shape", 1, shape.as_bytes().to_vec());
    container.to_bytes().unwrap()
}

/// The devices of a state, if it is one.
pub(crate) fn shape_of(state: &[u8]) -> Option<Vec<u8>> {
    let mut container = Container::parse(state).ok()?;
    Some(container.take_saved("shape").ok()?.payload)
}

fn refused(message: &str) -> Result<Reply, ApiError> {
    Err(ApiError {
        kind: ErrorKind::Boot,
        message: message.to_owned(),
    })
}

fn info(machine: Option<&Machine>) -> Info {
    Info {
        api_version: vmm_api::VERSION,
        vmm_version: "stand-in".into(),
        pid: std::process::id(),
        engine: "none".into(),
        state: machine.map_or(VmState::Empty, |machine| machine.state),
        stopped: machine.and_then(|machine| machine.stopped.clone()),
        cpus: 1,
        memory: 0,
        hotplug_memory: None,
        balloon: None,
        links: Vec::new(),
        marks: ["main", vmm_api::message::FIRST_RUN].map(mark).to_vec(),
    }
}

fn mark(name: &str) -> Mark {
    Mark {
        name: name.to_owned(),
        at_ns: observe::span::now_ns(),
    }
}

/// One that is true, and one that no VMM has.
fn metrics() -> Vec<MetricSample> {
    let sample = |name: &str| MetricSample {
        name: name.to_owned(),
        labels: vec![("device".to_owned(), "rng".to_owned())],
        value: 7,
    };
    ["rng_bytes_total", "made_up_total"].map(sample).to_vec()
}

fn send(control: &PacketSocket, packet: &Packet) {
    control.send(&serde_json::to_vec(packet).unwrap(), &[]).unwrap();
}

fn panic_guest(machine: &mut Machine) {
    let console: ConsoleConfig = machine.device();
    let mut console = File::from(machine.take(console.output.unwrap()));
    writeln!(console, "[    0.1] Kernel panic - not syncing: no init").unwrap();
}

fn start_agent(machine: &mut Machine) {
    let (vsock, console): (VsockConfig, ConsoleConfig) = (machine.device(), machine.device());
    if let Some(server) = machine.agent.clone() {
        return listen(machine.take(vsock.listener.unwrap()), server);
    }
    let acceptor = PacketSocket::from_fd(machine.take(vsock.acceptor.unwrap()));
    let listener = machine.take(vsock.listener.unwrap());
    let log = File::from(machine.take(vsock.sinks[0].file));
    let mut console = File::from(machine.take(console.output.unwrap()));
    if !machine.write_set.is_empty() {
        writeln!(console, "writes {:?}", machine.write_set).unwrap();
    }
    match &machine.paging {
        Paging::Mapped => (),
        Paging::Eager => writeln!(console, "eager").unwrap(),
        Paging::OnDemand { userfaultfd, order } => {
            let device = machine.fds[index(*userfaultfd)]
                .as_ref()
                .map(rustix::fs::fstat)
                .unwrap()
                .unwrap();
            assert_eq!(device.st_mode & 0o17_0000, 0o2_0000, "it is no device");
            writeln!(console, "on demand {order:?}").unwrap();
        }
    }
    let server = Server::new(
        ServerConfig {
            token: None,
            root: match machine.restored {
                true => RootMode::AsIs,
                false => RootMode::Prepared(Box::new(|_| Ok(()))),
            },
            cgroups: match machine.restored || machine.play.ends_with("be kept") {
                true => cgroups(),
                false => None,
            },
            power: Some(Power::of_process(end)),
            log: Some(Box::new(move || sink(log.try_clone()?))),
            clones: Some(clones(console)),
            started_ns: 0,
        },
        Reaper::start().unwrap(),
    );
    let server = Arc::new(server);
    machine.agent = Some(Arc::clone(&server));
    if !machine.restored {
        let (ours, theirs) = UnixStream::pair().unwrap();
        acceptor.send(&VSOCK_PORT.to_le_bytes(), &[theirs.as_fd()]).unwrap();
        match machine.play.starts_with("holds on") {
            true => server.serve_in_thread(held_on(ours)),
            false => server.serve_in_thread(ours),
        }
    }
    listen(listener, server);
}

/// A stream that carries everything to the other one and back, but never its end.
fn held_on(outer: UnixStream) -> UnixStream {
    let (inner, agents) = UnixStream::pair().unwrap();
    for (from, to) in [(&outer, &inner), (&inner, &outer)] {
        let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
        std::thread::spawn(move || {
            // Both stay open, whatever becomes of it.
            drop(std::io::copy(&mut from, &mut to));
            std::thread::park();
        });
    }
    agents
}

/// Serves whoever dials.
fn listen(listener: OwnedFd, server: Arc<Server>) {
    std::thread::spawn(move || {
        for stream in UnixListener::from(listener).incoming() {
            let mut stream = stream.unwrap();
            let mut line = [0; 13];
            stream.read_exact(&mut line).unwrap();
            assert_eq!(&line, b"CONNECT 1024\n");
            stream.write_all(b"OK 1\n").unwrap();
            server.serve_in_thread(stream);
        }
    });
}

/// A hierarchy for the agent beside this process's own cgroup, as one below it would be in the daemon's way. `None` where this
/// machine has none.
fn cgroups() -> Option<Cgroups> {
    let mounts = fs::read_to_string("/proc/mounts").ok()?;
    let mount = mounts.lines().find(|line| line.split(' ').nth(2) == Some("cgroup2"))?;
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let path = PathBuf::from(mount.split(' ').nth(1)?).join(own);
    let beside = path.parent()?.join(format!("guest-{}", std::process::id()));
    fs::create_dir(&beside).ok()?;
    Cgroups::at(&beside).ok()
}

/// Tells the console what it is asked.
fn clones(console: File) -> Clones {
    let other = console.try_clone().unwrap();
    let sheds = console.try_clone().unwrap();
    Clones {
        shed: Box::new(move || {
            writeln!(&sheds, "shed").unwrap();
            Ok(())
        }),
        settle: Box::new(move || {
            writeln!(&other, "settled").unwrap();
            Ok(())
        }),
        reidentify: Box::new(move |reidentify| {
            assert!(reidentify.entropy.len() >= 32 && reidentify.clock_ns > 0);
            let identity = reidentify.identity.as_ref();
            let name = identity.map_or("the same", |identity| identity.hostname.as_str());
            let id = identity.map(|identity| identity.machine_id.clone());
            let tmpfs = reidentify.tmpfs.iter().map(|tmpfs| format!(" tmpfs {}", tmpfs.path));
            let shares = reidentify.shared_directories.iter();
            let shares = shares.map(|share| format!(" {} {} ro={}", share.tag, share.path, share.read_only));
            let mounts: String = tmpfs.chain(shares).collect();
            writeln!(
                &console,
                "re-identified as {name} {}{mounts}",
                id.as_deref().unwrap_or("-")
            )
            .unwrap();
            if mounts.contains("/refused") {
                return Err(agent::Error::Refused("nothing can be mounted at /refused".to_owned()));
            }
            Ok(Reidentified {
                boot_id: "a-boot".to_owned(),
                machine_id: id,
            })
        }),
        // The test's own machine is all there is.
        set_clock: Box::new(|_| Ok(())),
        hooks: PathBuf::from("/nonexistent"),
    }
}

/// The guest has powered off.
#[expect(clippy::exit, reason = "the process is the machine")]
fn end() {
    std::process::exit(0);
}

/// A connection that ends in a file.
fn sink(mut file: File) -> std::io::Result<UnixStream> {
    let (ours, mut theirs) = UnixStream::pair()?;
    std::thread::spawn(move || std::io::copy(&mut theirs, &mut file).unwrap());
    Ok(ours)
}

fn index(fd: FdRef) -> usize {
    usize::try_from(fd.0).unwrap()
}
