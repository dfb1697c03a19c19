//! One running sandbox, from launch to end.
//!
//! ```text
//!   launch ─► VMM spawned ─► created ─► started ─► agent connected ─► prepared ─► commands ─► powered off
//!      any step may fail or find the VMM or the guest gone: dropping kills and reaps, and the error says which it was
//! ```

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use agent_api::{
    Connection, DiskName, ExecRequest, ExitStatus, LocalIo, PowerAction, Prepare, RootDisk, Shutdown, Signals,
    VSOCK_PORT, pump,
};
use rustix::event::{PollFd, PollFlags, poll};
use vmm_api::{ClientError, Event, VmmClient};
use wire::packet::{PacketError, PacketSocket};

use crate::launch::{Prepared, ROOT_SERIAL, prepare};
use crate::ring::Ring;
use crate::spec::{check_cpus, check_memory};
use crate::vmm::{VmmProcess, readable, timespec};
use crate::watch::{Timer, Watch};
use crate::{Error, SandboxSpec};

/// How long to wait for the VMM's last words when its guest has become silent.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// Bytes of entropy for the guest, twice what its generator needs.
const ENTROPY: usize = 64;

/// How a command came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finished {
    /// By itself, or by a signal.
    Exited(ExitStatus),
    /// Its time was over.
    TimedOut,
}

/// A sandbox that is ready for commands. Dropping it leaves no process, socket or file.
#[derive(Debug)]
pub struct Sandbox {
    agent: Connection<UnixStream>,
    machine: Machine,
}

/// The VM and its VMM, with or without an agent.
#[derive(Debug)]
struct Machine {
    client: VmmClient,
    console: Ring,
    process: VmmProcess,
}

impl Sandbox {
    /// Boots a sandbox and waits until its agent is ready. A signal that comes meanwhile ends it.
    ///
    /// # Errors
    /// See [`Error`]; nothing is left behind.
    pub fn launch(spec: SandboxSpec, signals: Option<&Signals>) -> Result<Self, Error> {
        check_cpus(spec.cpus)?;
        check_memory(spec.memory)?;
        let program = spec.vmm.clone();
        let boot = Boot {
            limit: spec.boot_limit,
            hostname: spec.hostname.clone(),
            signals,
        };
        let prepared = prepare(spec)?;
        let (control, theirs) =
            PacketSocket::pair().map_err(|e| Error::host("making a socket")(io::Error::other(e)))?;
        let process = VmmProcess::spawn(&program, theirs.into())?;
        Self::boot(process, VmmClient::new(control), prepared, &boot)
    }

    /// Everything after the VMM's start; `client` talks to `process`.
    pub(crate) fn boot(
        process: VmmProcess,
        client: VmmClient,
        prepared: Prepared,
        boot: &Boot<'_>,
    ) -> Result<Self, Error> {
        let deadline = Instant::now() + boot.limit;
        let Prepared {
            config,
            fds,
            acceptor,
            console,
        } = prepared;
        let mut machine = Machine {
            client,
            console,
            process,
        };
        let created = machine.client.create(config, &fds.borrow());
        machine.checked("the VM was made", created)?;
        // The VMM has its own copies; ours would keep pipes open that it closes.
        drop(fds);
        let started = machine.client.start();
        machine.checked("the VM was started", started)?;
        let stream = machine.wait_for_agent(&acceptor, deadline, boot)?;
        let mut agent = Connection::new(stream, None).map_err(|error| machine.diagnose("the guest booted", error))?;
        let prepared = prepare_guest(&mut agent, &boot.hostname, deadline);
        prepared.map_err(|error| machine.diagnose("the guest was prepared", error))?;
        Ok(Self { agent, machine })
    }

    /// Runs a command to its end, joined to local descriptors; `limit` is how long it may take.
    ///
    /// # Errors
    /// The command cannot be started, or the guest, the VMM or the agent ended before it.
    pub fn run(
        &mut self,
        request: &ExecRequest,
        io: &LocalIo<'_>,
        signals: &Signals,
        limit: Option<Duration>,
    ) -> Result<Finished, Error> {
        const DURING: &str = "the command was running";
        let machine = &mut self.machine;
        let stream = self.agent.stream().try_clone();
        let running = match self.agent.exec(request) {
            Ok(running) => running,
            Err(agent_api::Error::Exec(failure)) => return Err(failure.into()),
            Err(error) => return Err(machine.diagnose("the command was started", error)),
        };
        let watch = Watch::start([machine.client.as_fd(), machine.process.as_fd()], stream)?;
        let timer = match limit {
            Some(limit) => Some(Timer::start(limit, running.input.clone(), machine.process.killer())?),
            None => None,
        };
        let result = pump(running, io, signals);
        watch.stop();
        if timer.is_some_and(Timer::stop) {
            return Ok(Finished::TimedOut);
        }
        result
            .map(Finished::Exited)
            .map_err(|error| machine.diagnose(DURING, error))
    }

    /// The connection to the agent, for whatever [`Sandbox::run`] is too much or too little.
    pub fn agent(&mut self) -> &mut Connection<UnixStream> {
        &mut self.agent
    }

    /// The VMM's client, for metrics and states.
    pub fn vmm(&mut self) -> &mut VmmClient {
        &mut self.machine.client
    }

    /// Powers the guest off, and stops the VM where that takes longer than `limit`.
    ///
    /// # Errors
    /// The VMM failed while doing so; it is gone nevertheless.
    pub fn power_off(mut self, limit: Duration) -> Result<(), Error> {
        let asked = self.agent.set_read_timeout(Some(limit)).and_then(|()| {
            self.agent.shutdown(Shutdown {
                how: PowerAction::PowerOff,
                grace_ms: 0,
            })
        });
        if let Err(error) = asked {
            log::info!("the agent did not take the order to power off: {error}");
        } else if self.machine.ended_within(limit) {
            return Ok(());
        } else {
            log::info!("the guest did not power off within {limit:?}");
        }
        self.stop()
    }

    /// Ends the VM at once, without asking the guest.
    ///
    /// # Errors
    /// The VMM failed while doing so; it is gone nevertheless.
    pub fn stop(mut self) -> Result<(), Error> {
        let stopped = self.machine.client.stop();
        match stopped {
            Err(error) if !error.is_gone() => self.machine.checked("the VM was stopped", Err(error))?,
            _ => (),
        }
        if self.machine.process.wait(LAST_WORDS).is_none() {
            log::info!("the VMM did not end by itself and is killed");
        }
        Ok(())
    }
}

/// What booting needs to know besides the configuration.
#[derive(Debug)]
pub(crate) struct Boot<'a> {
    pub(crate) limit: Duration,
    pub(crate) hostname: String,
    pub(crate) signals: Option<&'a Signals>,
}

impl Machine {
    /// Turns what the VMM's client says into what happened.
    fn checked(&mut self, during: &'static str, result: Result<(), ClientError>) -> Result<(), Error> {
        match result {
            Ok(()) => Ok(()),
            Err(error) if error.is_gone() => Err(self.died(during)),
            Err(cause) => Err(Error::Refused {
                cause,
                log: self.process.log_tail(),
            }),
        }
    }

    /// The agent's first connection.
    fn wait_for_agent(
        &mut self,
        acceptor: &PacketSocket,
        deadline: Instant,
        boot: &Boot<'_>,
    ) -> Result<UnixStream, Error> {
        const DURING: &str = "the guest booted";
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let ready = Ready::wait(self, acceptor, boot.signals, left)?;
            if let Some(signal) = boot.signals.and_then(ending_signal) {
                return Err(Error::Interrupted(signal));
            }
            if ready.acceptor {
                match accept(acceptor) {
                    Ok(Some(stream)) => return Ok(stream),
                    Ok(None) => continue,
                    Err(PacketError::Closed) => return Err(self.end(DURING)),
                    Err(error) => return Err(Error::host("receiving the agent's connection")(io::Error::other(error))),
                }
            }
            if ready.machine {
                return Err(self.end(DURING));
            }
            if left.is_zero() {
                return Err(Error::AgentSilent {
                    limit: boot.limit,
                    console: self.console.tail(),
                });
            }
        }
    }

    /// The agent's connection failed: finds out whether that is because guest or VMM are gone.
    fn diagnose(&mut self, during: &'static str, error: agent_api::Error) -> Error {
        // Local failures and refusals are no sign of an end; everything else usually comes with one.
        let local = matches!(error, agent_api::Error::Local { .. } | agent_api::Error::Refused(_));
        if !local && self.gone_within(LAST_WORDS) {
            return self.end(during);
        }
        Error::Agent {
            during,
            cause: error,
            console: self.console.tail(),
        }
    }

    /// The VM has ended or the VMM is gone: says which and why.
    fn end(&mut self, during: &'static str) -> Error {
        // The event comes before the end of the process; where there is none, nothing will come any more.
        if !(self.gone_within(LAST_WORDS) && readable(self.client.as_fd(), Duration::ZERO)) {
            return self.died(during);
        }
        match self.client.wait_event() {
            Ok(Event::Ended(reason)) => {
                // The ring is complete when the process, which holds its other end, is gone.
                self.process.wait(LAST_WORDS);
                // The tail waits for the ring's reader, so it comes first.
                let console = self.console.tail();
                let panic = self.console.find("Kernel panic");
                Error::GuestEnded {
                    during,
                    reason,
                    panic,
                    console,
                }
            }
            Err(_) => self.died(during),
        }
    }

    fn died(&mut self, during: &'static str) -> Error {
        let status = self.process.wait(LAST_WORDS);
        Error::VmmDied {
            during,
            status,
            log: self.process.log_tail(),
        }
    }

    /// The VM has ended, or the VMM is gone, or either happens within `limit`.
    fn gone_within(&self, limit: Duration) -> bool {
        let (client, process) = (self.client.as_fd(), self.process.as_fd());
        let mut fds = [
            PollFd::new(&client, PollFlags::IN),
            PollFd::new(&process, PollFlags::IN),
        ];
        // A signal that cuts this short costs an explanation, not the outcome.
        poll(&mut fds, Some(&timespec(limit))).is_ok_and(|ready| ready > 0)
    }

    /// Waits for the VM's orderly end and the process's.
    fn ended_within(&mut self, limit: Duration) -> bool {
        readable(self.client.as_fd(), limit)
            && matches!(self.client.wait_event(), Ok(Event::Ended(_)))
            && self.process.wait(LAST_WORDS).is_some()
    }
}

/// What a wait for the agent was ended by.
#[derive(Clone, Copy, Debug)]
struct Ready {
    acceptor: bool,
    machine: bool,
}

impl Ready {
    fn wait(
        machine: &Machine,
        acceptor: &PacketSocket,
        signals: Option<&Signals>,
        limit: Duration,
    ) -> Result<Self, Error> {
        let (client, process) = (machine.client.as_fd(), machine.process.as_fd());
        let mut fds = vec![
            PollFd::new(acceptor, PollFlags::IN),
            PollFd::new(&client, PollFlags::IN),
            PollFd::new(&process, PollFlags::IN),
        ];
        fds.extend(signals.map(|signals| PollFd::new(signals, PollFlags::IN)));
        match poll(&mut fds, Some(&timespec(limit))) {
            Ok(_) | Err(rustix::io::Errno::INTR) => (),
            Err(error) => return Err(Error::host("poll")(error)),
        }
        let is_ready = |position: usize| fds.get(position).is_some_and(|fd| !fd.revents().is_empty());
        Ok(Self {
            acceptor: is_ready(0),
            machine: is_ready(1) || is_ready(2),
        })
    }
}

/// The first caught signal that asks for an end.
fn ending_signal(signals: &Signals) -> Option<i32> {
    std::iter::from_fn(|| signals.take()).find(|number| *number != libc::SIGWINCH)
}

/// One connection that the guest opened, if it is to the agent's port.
fn accept(acceptor: &PacketSocket) -> Result<Option<UnixStream>, PacketError> {
    let (bytes, fds) = acceptor.receive()?;
    let port = <[u8; 4]>::try_from(bytes.as_slice()).ok().map(u32::from_le_bytes);
    match (port, fds.into_iter().next()) {
        (Some(VSOCK_PORT), Some(fd)) => Ok(Some(UnixStream::from(fd))),
        // Whatever else the guest dials, nobody is there.
        (port, _) => {
            log::info!("the guest dialled port {port:?}, where nobody listens");
            Ok(None)
        }
    }
}

fn prepare_guest(
    agent: &mut Connection<UnixStream>,
    hostname: &str,
    deadline: Instant,
) -> Result<(), agent_api::Error> {
    let left = deadline
        .saturating_duration_since(Instant::now())
        .max(Duration::from_secs(1));
    agent.set_read_timeout(Some(left))?;
    let mut entropy = vec![0; ENTROPY];
    let local = |what| move |source: io::Error| agent_api::Error::Local { what, source };
    // Requests of up to 256 bytes are never cut short (getrandom(2)).
    rustix::rand::getrandom(&mut entropy, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| local("getting entropy")(e.into()))?;
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    agent.prepare(&Prepare {
        root: RootDisk {
            disk: DiskName::Serial(ROOT_SERIAL.into()),
            fs: "erofs".into(),
        },
        overlay_bytes: None,
        hostname: hostname.to_owned(),
        clock_ns: u64::try_from(since.as_nanos()).unwrap_or(u64::MAX),
        entropy,
        network: None,
    })?;
    agent.set_read_timeout(None)
}
