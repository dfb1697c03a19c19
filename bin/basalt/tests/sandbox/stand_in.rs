//! The stand-in for `basalt-vmm`: answers on the control socket, and has the agent's server where a VM would be.
//!
//! What it does besides is asked for by the kernel file's contents, the one thing that a test can write and that reaches
//! a VMM: `panic`, `refuse`, `silent`, or nothing.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use agent::{Reaper, RootMode, Server, ServerConfig};
use agent_api::VSOCK_PORT;
use vmm_api::devices::{ConsoleConfig, DeviceConfig, VsockConfig};
use vmm_api::{ApiError, ErrorKind, Event, ExitReason, FdRef, Packet, Reply, Request, VmConfig};
use wire::packet::PacketSocket;

pub(crate) fn serve(control: RawFd) {
    // SAFETY: the parent has left this descriptor open for this program, and nothing here has taken it yet.
    let control = unsafe { OwnedFd::from_raw_fd(control) };
    // A command must not keep the socket open when the VMM has been killed; a real VMM starts no processes at all.
    rustix::io::fcntl_setfd(&control, rustix::io::FdFlags::CLOEXEC).unwrap();
    let control = PacketSocket::from_fd(control);
    let mut machine: Option<(VmConfig, Vec<Option<OwnedFd>>)> = None;
    // When the driver has closed its end there is no reason to be.
    while let Ok((bytes, fds)) = control.receive() {
        let Ok(Packet::Request { id, request, .. }) = serde_json::from_slice(&bytes) else {
            return;
        };
        let mut result = Ok(Reply::Done);
        let mut event = None;
        let mut ends = false;
        match request {
            Request::Create(config) => {
                let fds = fds.into_iter().map(Some).collect();
                machine = Some((*config, fds));
                if play(&mut machine) == "refuse" {
                    let message = "the kernel is truncated: build it again".to_owned();
                    result = Err(ApiError {
                        kind: ErrorKind::Boot,
                        message,
                    });
                }
            }
            Request::Start => match play(&mut machine).as_str() {
                "panic" => {
                    panic_guest(&mut machine);
                    event = Some(ExitReason::Reset);
                }
                "silent" => (),
                _ => start_agent(&mut machine),
            },
            Request::Stop => ends = true,
            _ => (),
        }
        send(&control, &Packet::Reply { id, result });
        if let Some(reason) = event {
            send(&control, &Packet::Event(Event::Ended(reason)));
            ends = true;
        }
        if ends {
            return;
        }
    }
}

fn send(control: &PacketSocket, packet: &Packet) {
    control.send(&serde_json::to_vec(packet).unwrap(), &[]).unwrap();
}

fn play(machine: &mut Option<(VmConfig, Vec<Option<OwnedFd>>)>) -> String {
    let (config, fds) = machine.as_mut().unwrap();
    let kernel = fds[index(config.kernel)].as_ref().unwrap().try_clone().unwrap();
    let mut text = String::new();
    let mut kernel = File::from(kernel);
    std::io::Seek::rewind(&mut kernel).unwrap();
    kernel.read_to_string(&mut text).unwrap();
    text
}

fn panic_guest(machine: &mut Option<(VmConfig, Vec<Option<OwnedFd>>)>) {
    let (config, fds) = machine.as_mut().unwrap();
    let console: ConsoleConfig = device(config);
    let mut console = File::from(fds[index(console.output.unwrap())].take().unwrap());
    writeln!(console, "[    0.1] Kernel panic - not syncing: no init").unwrap();
}

fn start_agent(machine: &mut Option<(VmConfig, Vec<Option<OwnedFd>>)>) {
    let (config, fds) = machine.as_mut().unwrap();
    let vsock: VsockConfig = device(config);
    let acceptor = PacketSocket::from_fd(fds[index(vsock.acceptor.unwrap())].take().unwrap());
    let server = Server::new(
        ServerConfig {
            token: None,
            root: RootMode::Prepared(Box::new(|_| Ok(()))),
            cgroups: None,
            power: None,
            log: None,
            started_ns: 0,
        },
        Reaper::start().unwrap(),
    );
    let (ours, theirs) = UnixStream::pair().unwrap();
    acceptor.send(&VSOCK_PORT.to_le_bytes(), &[theirs.as_fd()]).unwrap();
    server.serve_in_thread(ours);
}

fn index(fd: FdRef) -> usize {
    usize::try_from(fd.0).unwrap()
}

fn device<C: DeviceConfig>(config: &VmConfig) -> C {
    let spec = config.devices.iter().find(|device| device.kind == C::KIND).unwrap();
    serde_json::from_value(spec.config.clone()).unwrap()
}
