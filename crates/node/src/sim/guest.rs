//! A guest's agent, by the agent's protocol: it does nothing, and says that it did.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use agent_api::message::{AgentInfo, PROTOCOL, Reply, Request, kind};
use agent_api::{ExitStatus, PciDevice, PciRequest, PowerAction};
use wire::{FrameReader, FrameWriter};

use super::faults::{Act, Faults};
use super::machine::Machine;

/// The guest of one machine.
#[derive(Debug)]
pub(crate) struct Guest {
    pub(crate) machine: Arc<Machine>,
    pub(crate) faults: Faults,
    /// Where its command's end is written to.
    pub(crate) log: File,
}

/// What a guest was told that it is, before it went on.
#[derive(Debug, Default)]
pub(crate) struct Own {
    pub(crate) hostname: Option<String>,
    pub(crate) environment: Option<agent_api::Environment>,
}

impl Guest {
    /// Serves whoever connects to the machine's vsock.
    pub(crate) fn listen(self: &Arc<Self>, listener: UnixListener) {
        let guest = Arc::clone(self);
        std::thread::spawn(move || {
            while let Some(mut stream) = guest.machine.accept(&listener) {
                let guest = Arc::clone(&guest);
                std::thread::spawn(move || {
                    let mut line = [0; 13];
                    if stream.read_exact(&mut line).is_ok() && stream.write_all(b"OK 1\n").is_ok() {
                        guest.serve(stream);
                    }
                });
            }
        });
    }

    /// Serves a connection to its end.
    pub(crate) fn serve(&self, mut stream: UnixStream) {
        let Some(_open) = self.machine.keep(&stream) else {
            return;
        };
        // Whatever fails here is the end of the connection.
        if wire::accept(&mut stream, PROTOCOL, None).is_err() {
            return;
        }
        let Ok(other) = stream.try_clone() else { return };
        let (mut reader, writer) = (FrameReader::new(stream), FrameWriter::new(other));
        while let Ok(Some(frame)) = reader.read() {
            let Ok(request) = serde_json::from_slice::<Request>(frame.payload) else {
                return;
            };
            if !self.machine.waits_to_run() {
                return;
            }
            let Some((reply, ends)) = self.answer(&request) else {
                return;
            };
            let text = serde_json::to_vec(&reply).unwrap();
            if writer.send(kind::CONTROL, 0, &text).is_err() {
                return;
            }
            if ends {
                self.machine.die();
            }
        }
    }

    /// What it says, and whether its machine ends then; nothing if it is gone.
    fn answer(&self, request: &Request) -> Option<(Reply, bool)> {
        let name = serde_json::to_value(request).unwrap();
        let name = name
            .as_str()
            .map(str::to_owned)
            .or_else(|| Some(name.as_object()?.keys().next()?.clone()));
        match self.faults.call(&format!("agent {}", name.unwrap_or_default())) {
            Act::Answer => (),
            Act::Refuse(why) => {
                let message = why.to_owned();
                return Some((Reply::Refused { message }, false));
            }
            Act::Die => {
                self.machine.die();
                return None;
            }
        }
        let mut state = self.machine.lock();
        let reply = match request {
            Request::Hello => Reply::Hello(AgentInfo::default()),
            Request::Exec(_) if state.is_frozen => {
                let message = "commands stand still".to_owned();
                return Some((Reply::Refused { message }, false));
            }
            Request::Exec(exec) => {
                state.has_command |= exec.main;
                if exec.main {
                    state.had_at_command = state.functions.len();
                    state.note("command");
                }
                Reply::Started { pid: 1 }
            }
            Request::SignalMain { .. } if !state.has_command => {
                let message = "no command runs".to_owned();
                return Some((Reply::Refused { message }, false));
            }
            Request::SignalMain { number } if *number == libc::SIGTERM => {
                state.has_command = false;
                let mut text = Vec::new();
                agent_api::log::write_exit(&mut text, 1, ExitStatus::Signal(15));
                // A host without space keeps nothing of it.
                drop((&self.log).write_all(&text));
                return Some((Reply::Done, true));
            }
            Request::Prepare(prepare) => {
                state.clock_ns = prepare.clock_ns;
                Reply::Done
            }
            Request::SetClock(clock_ns) => {
                state.clock_ns = *clock_ns;
                Reply::Done
            }
            Request::Pci(PciRequest::Add { address, .. }) => {
                state.note("shown");
                Reply::Pci(Some(PciDevice {
                    address: address.clone(),
                    class: "0x010802".to_owned(),
                    driver: Some("nvme".to_owned()),
                    names: vec!["nvme0n1".to_owned()],
                }))
            }
            Request::Pci(PciRequest::Remove { .. }) => Reply::Pci(None),
            Request::Freeze => {
                state.is_frozen = true;
                Reply::Done
            }
            Request::Reidentify(reidentify) => {
                (state.is_frozen, state.clock_ns) = (false, reidentify.clock_ns);
                state.own.environment.clone_from(&reidentify.environment);
                state.own.hostname = reidentify
                    .identity
                    .as_ref()
                    .map(|identity| identity.hostname.clone())
                    .or(state.own.hostname.take());
                Reply::Reidentified {
                    boot_id: "a-boot".to_owned(),
                }
            }
            // The answer comes before the grace, which is for its processes.
            Request::Shutdown(shutdown) if shutdown.grace_ms > 0 => {
                let (machine, grace) = (
                    Arc::clone(&self.machine),
                    Duration::from_millis(shutdown.grace_ms.into()),
                );
                std::thread::spawn(move || {
                    std::thread::sleep(grace);
                    // If it was not killed before.
                    if !machine.lock().has_hung_up() {
                        machine.lock().note("powered off");
                        machine.die();
                    }
                });
                Reply::Done
            }
            Request::Shutdown(shutdown) => return Some((Reply::Done, shutdown.how == PowerAction::PowerOff)),
            _ => Reply::Done,
        };
        Some((reply, false))
    }
}

/// A socket pair of which one end goes to whoever waits for the guest's first connection.
pub(crate) fn call(acceptor: &wire::packet::PacketSocket) -> Option<UnixStream> {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let sent = acceptor.send(&agent_api::VSOCK_PORT.to_le_bytes(), &[theirs.as_fd()]);
    sent.is_ok().then_some(ours)
}
