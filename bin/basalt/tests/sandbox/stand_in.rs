//! The stand-in for `basalt-vmm`: answers on the control socket, and has the agent's server where a VM would be.
//!
//! What it does besides is asked for by the kernel file's contents, the one thing that a test can write and that reaches
//! a VMM: `panic`, `refuse`, `silent`, or nothing.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};

use agent::{Power, Reaper, RootMode, Server, ServerConfig};
use agent_api::VSOCK_PORT;
use vmm_api::devices::{ConsoleConfig, DeviceConfig, VsockConfig};
use vmm_api::{
    ApiError, ErrorKind, Event, ExitReason, FdRef, Info, Mark, MetricSample, Packet, Reply, Request, VmConfig, VmState,
};
use wire::packet::PacketSocket;

pub(crate) fn serve(control: RawFd) {
    // SAFETY: the parent has left this descriptor open for this program, and nothing here has taken it yet.
    let listener = unsafe { OwnedFd::from_raw_fd(control) };
    // A command must not keep the socket open when the VMM has been killed; a real VMM starts no processes at all.
    rustix::io::fcntl_setfd(&listener, rustix::io::FdFlags::CLOEXEC).unwrap();
    let mut machine = None;
    let mut started = false;
    loop {
        let driver = rustix::net::accept_with(&listener, rustix::net::SocketFlags::CLOEXEC).unwrap();
        if !serve_driver(&PacketSocket::from_fd(driver), &mut machine, &mut started) || !started {
            return;
        }
    }
}

type Machine = Option<(VmConfig, Vec<Option<OwnedFd>>)>;

/// Serves one driver until it goes; false when the VM has ended.
fn serve_driver(control: &PacketSocket, machine: &mut Machine, started: &mut bool) -> bool {
    while let Ok((bytes, fds)) = control.receive() {
        let Ok(Packet::Request { id, request, .. }) = serde_json::from_slice(&bytes) else {
            return false;
        };
        let mut result = Ok(Reply::Done);
        let mut event = None;
        match request {
            Request::Create(config) => {
                let fds = fds.into_iter().map(Some).collect();
                *machine = Some((*config, fds));
                if play(machine) == "refuse" {
                    let message = "the kernel is truncated: build it again".to_owned();
                    result = Err(ApiError {
                        kind: ErrorKind::Boot,
                        message,
                    });
                }
            }
            Request::Start => {
                *started = true;
                match play(machine).as_str() {
                    "panic" => {
                        panic_guest(machine);
                        event = Some(ExitReason::Reset);
                    }
                    "silent" => (),
                    _ => start_agent(machine),
                }
            }
            Request::Info => result = Ok(Reply::Info(info(*started))),
            Request::Metrics => result = Ok(Reply::Metrics(metrics())),
            _ => (),
        }
        send(control, &Packet::Reply { id, result });
        if let Some(reason) = event {
            send(control, &Packet::Event(Event::Ended(reason)));
            return false;
        }
    }
    true
}

fn info(started: bool) -> Info {
    Info {
        api_version: vmm_api::VERSION,
        vmm_version: "stand-in".into(),
        pid: std::process::id(),
        engine: "none".into(),
        state: if started { VmState::Running } else { VmState::Created },
        cpus: 1,
        memory: 0,
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

fn play(machine: &mut Machine) -> String {
    let (config, fds) = machine.as_mut().unwrap();
    let kernel = fds[index(config.kernel)].as_ref().unwrap().try_clone().unwrap();
    let mut text = String::new();
    let mut kernel = File::from(kernel);
    std::io::Seek::rewind(&mut kernel).unwrap();
    kernel.read_to_string(&mut text).unwrap();
    text
}

fn panic_guest(machine: &mut Machine) {
    let (config, fds) = machine.as_mut().unwrap();
    let console: ConsoleConfig = device(config);
    let mut console = File::from(fds[index(console.output.unwrap())].take().unwrap());
    writeln!(console, "[    0.1] Kernel panic - not syncing: no init").unwrap();
}

fn start_agent(machine: &mut Machine) {
    let (config, fds) = machine.as_mut().unwrap();
    let vsock: VsockConfig = device(config);
    let mut take = |fd: FdRef| fds[index(fd)].take().unwrap();
    let acceptor = PacketSocket::from_fd(take(vsock.acceptor.unwrap()));
    let listener = UnixListener::from(take(vsock.listener.unwrap()));
    let log = File::from(take(vsock.sinks[0].file));
    let server = Server::new(
        ServerConfig {
            token: None,
            root: RootMode::Prepared(Box::new(|_| Ok(()))),
            cgroups: None,
            power: Some(Power::of_process(end)),
            log: Some(Box::new(move || sink(log.try_clone()?))),
            clones: None,
            started_ns: 0,
        },
        Reaper::start().unwrap(),
    );
    let (ours, theirs) = UnixStream::pair().unwrap();
    acceptor.send(&VSOCK_PORT.to_le_bytes(), &[theirs.as_fd()]).unwrap();
    server.serve_in_thread(ours);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut line = [0; 13];
            stream.read_exact(&mut line).unwrap();
            assert_eq!(&line, b"CONNECT 1024\n");
            stream.write_all(b"OK 1\n").unwrap();
            server.serve_in_thread(stream);
        }
    });
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

fn device<C: DeviceConfig>(config: &VmConfig) -> C {
    let spec = config.devices.iter().find(|device| device.kind == C::KIND).unwrap();
    serde_json::from_value(spec.config.clone()).unwrap()
}
