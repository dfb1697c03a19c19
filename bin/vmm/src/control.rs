//! The control socket: requests in, replies and events out, one thread; beside it, interrupts that functions of the host's tell by their pins.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use anyhow::{Context, Result};
use base::{Epoll, Interest, Ready};
use machine::Machine;
use rustix::fs::Mode;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use vmm_api::{ApiError, ErrorKind, Event, Packet};
use wire::packet::{PacketError, PacketSocket};

use crate::vm::{Answer, Vm};

/// Epoll tokens.
const SOCKET: u64 = 0;
const ENDED: u64 = 1;
const NO_SPACE: u64 = 2;
const MAPPED: u64 = 3;
const PINS: u64 = 4;
const FROZEN: u64 = 5;

/// Between two attempts to let a driver in.
const ACCEPT_PAUSE: std::time::Duration = std::time::Duration::from_millis(100);

/// How a driver's connection came to its end.
enum Outcome {
    /// The driver closed it.
    Disconnected,
    /// There is no VM any more and never will be.
    Over,
}

/// Serves what was inherited. A connected socket has one driver, whose going is the VM's end; a listening one has one
/// driver after the other. A VM that was never started ends with its driver in either case: whoever was making it is
/// gone, and nobody knows of it.
pub(crate) fn serve_inherited(socket: OwnedFd, mut vm: Vm) -> Result<()> {
    if rustix::net::sockopt::socket_acceptconn(&socket).context("the control descriptor is no socket")? {
        return serve_drivers(&socket, vm, Vm::has_run);
    }
    serve(&PacketSocket::from_fd(socket), &mut vm).map(drop)
}

/// Serves one driver after the other at `path`. The VM goes on between them.
pub(crate) fn listen(path: &Path) -> Result<()> {
    let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    // Whoever may drive it can have it open anything. This process's umask is for what guests make.
    let umask = rustix::process::umask(Mode::from_raw_mode(0o077));
    let bound = rustix::net::bind(&listener, &SocketAddrUnix::new(path)?);
    rustix::process::umask(umask);
    bound.map_err(|error| match error {
        rustix::io::Errno::ADDRINUSE => anyhow::anyhow!("something is there already: remove it if it is stale"),
        other => anyhow::Error::from(other).context("it cannot be bound"),
    })?;
    let _unlink = UnlinkOnDrop(path);
    rustix::net::listen(&listener, 1)?;
    serve_drivers(&listener, Vm::new(), |_| true)
}

/// Serves whoever connects to `listener`, one after the other, while `goes_on` says so of the VM.
fn serve_drivers(listener: &OwnedFd, mut vm: Vm, goes_on: impl Fn(&Vm) -> bool) -> Result<()> {
    loop {
        let Some(driver) = accept(listener, &mut vm)? else {
            return Ok(());
        };
        match serve(&PacketSocket::from_fd(driver), &mut vm)? {
            Outcome::Disconnected if goes_on(&vm) => (),
            Outcome::Disconnected | Outcome::Over => return Ok(()),
        }
    }
}

struct UnlinkOnDrop<'a>(&'a Path);

impl Drop for UnlinkOnDrop<'_> {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(self.0) {
            log::warn!("{} could not be removed: {error}", self.0.display());
        }
    }
}

/// Waits for the next driver; `None` when the guest ended while there was none.
fn accept(listener: &OwnedFd, vm: &mut Vm) -> Result<Option<OwnedFd>> {
    let epoll = Epoll::new()?;
    epoll.add(listener, SOCKET, Interest::READ)?;
    if let Some(ended) = vm.ended() {
        epoll.add(ended, ENDED, Interest::READ)?;
    }
    if let Some(no_space) = vm.no_space() {
        epoll.add(no_space, NO_SPACE, Interest::READ)?;
    }
    if let Some(mapped) = vm.mapped_event() {
        epoll.add(mapped, MAPPED, Interest::READ)?;
    }
    if let Some(frozen) = vm.frozen_event() {
        epoll.add(frozen, FROZEN, Interest::READ)?;
    }
    let mut ready = Vec::new();
    let mut watching_pins = false;
    loop {
        watch_pins(&epoll, vm, &mut watching_pins)?;
        epoll.wait(&mut ready, vm.look_for_halt())?;
        look_at_functions(&ready, vm);
        if ready.iter().any(|ready| ready.token == ENDED) {
            return Ok(None);
        }
        if ready.iter().any(|ready| ready.token == NO_SPACE) {
            // The next driver is told by `info`.
            vm.stop_for_space();
        }
        if ready.iter().any(|ready| ready.token == FROZEN) {
            vm.follow_freezing();
            // What has come of it is left for the next driver, who gets the event.
            if let Some(frozen) = vm.frozen_event() {
                epoll.remove(frozen)?;
            }
        }
        if ready.iter().all(|ready| ready.token != SOCKET) {
            continue;
        }
        match rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(driver) => return Ok(Some(driver)),
            Err(error) => {
                // No descriptor left, or a driver that went away while it waited: neither may end the VM.
                log::warn!("cannot accept a connection: {error}");
                std::thread::sleep(ACCEPT_PAUSE);
            }
        }
    }
}

fn serve(socket: &PacketSocket, vm: &mut Vm) -> Result<Outcome> {
    let epoll = Epoll::new()?;
    epoll.add(socket.as_fd(), SOCKET, Interest::READ)?;
    let (mut watching, mut watching_space, mut watching_mapped) = (false, false, false);
    let (mut watching_pins, mut watching_frozen) = (false, false);
    let mut ready = Vec::new();
    loop {
        if let (Some(frozen), false) = (vm.frozen_event(), watching_frozen) {
            epoll.add(frozen, FROZEN, Interest::READ)?;
            watching_frozen = true;
        }
        if let (Some(ended), false) = (vm.ended(), watching) {
            epoll.add(ended, ENDED, Interest::READ)?;
            watching = true;
        }
        if let (Some(no_space), false) = (vm.no_space(), watching_space) {
            epoll.add(no_space, NO_SPACE, Interest::READ)?;
            watching_space = true;
        }
        if let (Some(mapped), false) = (vm.mapped_event(), watching_mapped) {
            epoll.add(mapped, MAPPED, Interest::READ)?;
            watching_mapped = true;
        }
        watch_pins(&epoll, vm, &mut watching_pins)?;
        epoll.wait(&mut ready, vm.look_for_halt())?;
        look_at_functions(&ready, vm);
        if ready.iter().any(|ready| ready.token == SOCKET) {
            match answer(socket, vm) {
                Ok(()) => (),
                Err(PacketError::Closed) => return Ok(Outcome::Disconnected),
                Err(error) => return Err(error.into()),
            }
        }
        let mut events = Vec::new();
        if ready.iter().any(|ready| ready.token == NO_SPACE) {
            events.extend(vm.stop_for_space().map(Event::Stopped));
        }
        if ready.iter().any(|ready| ready.token == FROZEN) {
            events.extend(vm.look_at_freezing());
        }
        for event in events {
            match send(socket, &Packet::Event(event)) {
                Ok(()) => (),
                Err(PacketError::Closed) => return Ok(Outcome::Disconnected),
                Err(error) => return Err(error.into()),
            }
        }
        if let Some(reason) = vm.exit_reason() {
            return match send(socket, &Packet::Event(Event::Ended(reason))) {
                Ok(()) | Err(PacketError::Closed) => Ok(Outcome::Over),
                Err(error) => Err(error.into()),
            };
        }
        if vm.is_over() {
            return Ok(Outcome::Over);
        }
    }
}

/// Watches the interrupt pins of functions of the host's from when there are some.
fn watch_pins(epoll: &Epoll, vm: &Vm, watching: &mut bool) -> Result<()> {
    if let (Some(pins), false) = (vm.machine().and_then(Machine::pin_events), *watching) {
        epoll.add(pins, PINS, Interest::READ)?;
        *watching = true;
    }
    Ok(())
}

/// What has come of functions of the host's.
fn look_at_functions(ready: &[Ready], vm: &mut Vm) {
    if ready.iter().any(|ready| ready.token == PINS) {
        vm.machine().into_iter().for_each(Machine::look_at_pins);
    }
    if ready.iter().any(|ready| ready.token == MAPPED) {
        vm.plug_mapped();
    }
}

/// Reads one request, carries it out and answers.
fn answer(socket: &PacketSocket, vm: &mut Vm) -> Result<(), PacketError> {
    let (bytes, fds) = match socket.receive() {
        Err(PacketError::Truncated) => {
            // Too large, or no room for its descriptors: this driver's fault or misfortune, not the VM's end.
            log::error!("the driver's packet arrived incomplete");
            return Err(PacketError::Closed);
        }
        other => other?,
    };
    match serde_json::from_slice(&bytes) {
        Ok(Packet::Request { id, version, request }) => {
            let result = vm.handle(version, request, fds);
            reply(socket, id, result)
        }
        Ok(other) => {
            log::error!("the driver sent something that is no request: {other:?}");
            Err(PacketError::Closed)
        }
        Err(error) => {
            // Without an id there is nothing to answer to: a driver of another build. Say so and hang up.
            log::error!("the driver's request is not understood: {error}");
            Err(PacketError::Closed)
        }
    }
}

/// Answers a request. An answer that does not fit becomes a refusal: a question must not end the VM.
fn reply(socket: &PacketSocket, id: u64, result: Result<Answer, ApiError>) -> Result<(), PacketError> {
    let (result, fd) = match result {
        Ok(Answer { reply, fd }) => (Ok(reply), fd),
        Err(refusal) => (Err(refusal), None),
    };
    match send_with(socket, &Packet::Reply { id, result }, fd.as_ref()) {
        Err(error @ PacketError::TooLarge(_)) => {
            let refusal = ApiError {
                kind: ErrorKind::Internal,
                message: format!("the answer cannot be sent: {error}"),
            };
            send(
                socket,
                &Packet::Reply {
                    id,
                    result: Err(refusal),
                },
            )
        }
        other => other,
    }
}

fn send(socket: &PacketSocket, packet: &Packet) -> Result<(), PacketError> {
    send_with(socket, packet, None)
}

fn send_with(socket: &PacketSocket, packet: &Packet, fd: Option<&OwnedFd>) -> Result<(), PacketError> {
    let fds: Vec<_> = fd.into_iter().map(AsFd::as_fd).collect();
    match serde_json::to_vec(packet) {
        Ok(bytes) => socket.send(&bytes, &fds),
        Err(error) => {
            log::error!("a reply has no JSON form: {error}");
            Err(PacketError::Closed)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_api::{MetricSample, Reply};
    use wire::packet::MAX_PACKET;

    #[test]
    fn the_mark_of_a_starts_end_is_called_alike_on_both_sides() {
        assert_eq!(machine::FIRST_RUN, vmm_api::message::FIRST_RUN);
    }

    fn samples(count: usize) -> Vec<MetricSample> {
        let sample = MetricSample {
            name: "virtio_activations_total".into(),
            labels: vec![
                ("device".into(), "root".into()),
                ("kind".into(), "pci-config-port".into()),
            ],
            value: 1 << 40,
        };
        vec![sample; count]
    }

    fn answered(count: usize) -> Result<Reply, ApiError> {
        let (ours, theirs) = PacketSocket::pair().unwrap();
        reply(&ours, 7, Ok(Reply::Metrics(samples(count)).into())).unwrap();
        let (bytes, _) = theirs.receive().unwrap();
        match serde_json::from_slice(&bytes).unwrap() {
            Packet::Reply { id: 7, result } => result,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_descriptor_of_an_answer_goes_with_it() {
        let (ours, theirs) = PacketSocket::pair().unwrap();
        let fd = Some(OwnedFd::from(std::fs::File::open("/dev/null").unwrap()));
        reply(
            &ours,
            7,
            Ok(Answer {
                reply: Reply::Frozen,
                fd,
            }),
        )
        .unwrap();
        reply(&ours, 8, Ok(Reply::Freezing.into())).unwrap();
        assert_eq!(
            [theirs.receive().unwrap().1.len(), theirs.receive().unwrap().1.len()],
            [1, 0]
        );
    }

    #[test]
    fn the_metrics_of_the_largest_vm_fit_and_more_are_refused() {
        // 64 vCPUs with 9 counters, 31 devices with some 16.
        assert!(answered(64 * 9 + 31 * 16).is_ok());
        assert_eq!(answered(10_000).unwrap_err().kind, ErrorKind::Internal);
    }

    /// Asks for `request` over a new connection to `path`.
    fn ask(path: &Path, request: vmm_api::Request) -> Result<Reply, ApiError> {
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        let socket = PacketSocket::from_fd(socket);
        let version = vmm_api::VERSION;
        let packet = Packet::Request {
            id: 1,
            version,
            request,
        };
        send(&socket, &packet).unwrap();
        let (bytes, _) = socket.receive().unwrap();
        match serde_json::from_slice(&bytes).unwrap() {
            Packet::Reply { result, .. } => result,
            other => panic!("{other:?}"),
        }
    }

    fn listener(path: &Path) -> OwnedFd {
        let listener =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::bind(&listener, &SocketAddrUnix::new(path).unwrap()).unwrap();
        rustix::net::listen(&listener, 1).unwrap();
        listener
    }

    #[test]
    fn a_vm_that_was_never_started_ends_with_its_driver() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control");
        let listener = listener(&path);
        let server = std::thread::spawn(move || serve_inherited(listener, Vm::new()));
        assert!(matches!(ask(&path, vmm_api::Request::Info), Ok(Reply::Info(_))));
        server.join().unwrap().unwrap();
    }

    #[test]
    fn there_is_no_memory_to_plug_without_a_vm() {
        let request = vmm_api::Request::ResizeMemory(base::ByteSize::mib(2));
        let refused = Vm::new().handle(vmm_api::VERSION, request, Vec::new());
        let refused = refused.map(|answer| answer.reply).unwrap_err();
        assert_eq!(refused.kind, ErrorKind::WrongState);
        assert!(refused.message.contains("there is no VM"), "{refused}");
    }

    #[test]
    fn its_version_tells_which_states_it_saves() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control");
        let listener = listener(&path);
        let server = std::thread::spawn(move || serve_inherited(listener, Vm::new()));
        let Ok(Reply::Info(info)) = ask(&path, vmm_api::Request::Info) else {
            panic!("no info");
        };
        server.join().unwrap().unwrap();
        let states = crc32fast::hash(include_bytes!("../../../golden.lock"));
        assert_eq!(info.vmm_version, format!("{}+{states:08x}", env!("CARGO_PKG_VERSION")));
    }

    #[test]
    fn a_listener_serves_one_driver_after_the_other() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control");
        let listener = listener(&path);
        let server = std::thread::spawn(move || serve_drivers(&listener, Vm::new(), |_| true));
        for _ in 0..2 {
            assert!(matches!(ask(&path, vmm_api::Request::Info), Ok(Reply::Info(_))));
        }
        ask(&path, vmm_api::Request::Stop).unwrap();
        server.join().unwrap().unwrap();
    }

    #[test]
    fn a_packet_that_is_too_large_ends_the_connection_and_not_the_vm() {
        let (ours, theirs) = PacketSocket::pair().unwrap();
        let packet = vec![b' '; MAX_PACKET + 1];
        rustix::net::send(&theirs, &packet, rustix::net::SendFlags::empty()).unwrap();
        assert!(matches!(serve(&ours, &mut Vm::new()), Ok(Outcome::Disconnected)));
    }
}
