//! A VM that runs, seen from the node: its process, its control socket, the way to its agent. A node that is started anew
//! comes by one through the process and the sockets that it finds.

mod in_time;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use agent_api::{Connection, DiskName, Duplex, GuestNetwork, Prepare, RootDisk, VSOCK_PORT};
use base::ByteSize;
use node_api::PauseReason;
use observe::span::span;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use vmm_api::{ClientError, Event, Info, StopReason, VmState, VmmClient};
use wire::packet::{PacketError, PacketSocket};

use crate::Error;
use crate::config::TimeLimits;
use crate::deadline_stream::Timed;
use crate::error::space::Lacking;
use crate::guest::reidentify::Own;
use crate::resources::space::LEAST;
use crate::store::database::Stored;
use crate::store::paths::SandboxPaths;
use crate::vmm::accelerator;
use crate::vmm::launch::{Prepared, ROOT_SERIAL, Restoring, WRITABLE_SERIAL};
use crate::vmm::line::{Line, accept, set_patience};
use crate::vmm::monitor::{Ear, Monitor};
use crate::vmm::process::{self, readable, timespec};
use crate::vmm::tail::Tail;

/// How long to wait for the VMM's last words when its guest has become silent.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// Bytes of entropy for the guest, twice what its generator needs.
const ENTROPY: usize = 64;

/// A VM and its VMM. Dropping it leaves both alone.
#[derive(Debug)]
pub(crate) struct Vm {
    pidfd: OwnedFd,
    client: Mutex<VmmClient>,
    /// Who listens to what it says without being asked.
    ear: OnceLock<Ear>,
    watched: AtomicBool,
    /// Somebody has listened in vain, as another talked to it.
    unheard: AtomicBool,
    paths: SandboxPaths,
    limits: TimeLimits,
}

impl Vm {
    /// The VMM that `pidfd` is, which waits for a driver at its control socket.
    pub(crate) fn connect(pidfd: OwnedFd, paths: &SandboxPaths, limits: TimeLimits) -> Result<Self, Error> {
        let path = paths.control();
        let connected = || -> io::Result<OwnedFd> {
            let directory = node_api::client::directory(&path)?;
            let kind = SocketType::SEQPACKET;
            let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
            set_patience(&socket, limits.answer)?;
            rustix::net::connect(&socket, &node_api::client::address(&path, &directory)?)?;
            Ok(socket)
        };
        let socket = connected().map_err(Error::file("connect to", &path))?;
        Ok(Self {
            pidfd,
            ear: OnceLock::new(),
            watched: AtomicBool::new(false),
            unheard: AtomicBool::new(false),
            client: Mutex::new(VmmClient::new(PacketSocket::from_fd(socket))),
            paths: paths.clone(),
            limits,
        })
    }

    /// Readable when the VMM has ended.
    pub(crate) fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Kills the VMM; it is fine if it is gone.
    pub(crate) fn kill(&self) -> Result<(), Error> {
        process::kill(&self.pidfd).map_err(Error::host("killing a VMM"))
    }

    /// Waits until the VMM has ended, and reaps it where it is a child.
    pub(crate) fn wait(&self, limit: Duration) -> bool {
        let ended = readable(&self.pidfd, limit);
        if ended {
            process::reap(&self.pidfd);
        }
        ended
    }

    fn client(&self) -> MutexGuard<'_, VmmClient> {
        self.client.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same; `None` while somebody talks to it.
    fn client_now(&self) -> Option<MutexGuard<'_, VmmClient>> {
        match self.client.try_lock() {
            Ok(client) => Some(client),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Has what it says without being asked, and its end, told as `id`'s from here on, unless that is so.
    pub(crate) fn watch(&self, monitor: &Monitor, id: &str) -> io::Result<()> {
        if self.is_watched() {
            return Ok(());
        }
        self.ear.get_or_init(|| monitor.ear(id));
        monitor.watch(id, self.pidfd(), self.client().as_fd())?;
        self.watched.store(true, Ordering::SeqCst);
        Ok(())
    }

    /// Whether its end is waited for.
    pub(crate) fn is_watched(&self) -> bool {
        self.watched.load(Ordering::SeqCst)
    }

    /// Why the VMM has stopped its VM, if it has said so. Waits for nobody: whoever talks to it now tells the
    /// monitor afterwards.
    pub(crate) fn take_stop(&self) -> Result<Option<StopReason>, ClientError> {
        let client = self.client_now().or_else(|| {
            self.unheard.store(true, Ordering::SeqCst);
            // Whoever had it may have let go of it before it could see that.
            self.client_now()
        });
        let Some(mut client) = client else { return Ok(None) };
        self.unheard.store(false, Ordering::SeqCst);
        client.take_stop()
    }

    /// Lets others talk to the VMM; what it has said meanwhile is looked at by whoever listens.
    fn let_go(&self, client: MutexGuard<'_, VmmClient>) {
        let told = client.has_events();
        drop(client);
        if (self.unheard.swap(false, Ordering::SeqCst) || told)
            && let Some(ear) = self.ear.get()
        {
            ear.tell();
        }
    }

    /// Asks the VMM something.
    pub(crate) fn ask<T>(
        &self,
        during: &'static str,
        question: impl FnOnce(&mut VmmClient) -> Result<T, ClientError>,
    ) -> Result<T, Error> {
        let mut client = self.client();
        let answer = question(&mut client);
        self.let_go(client);
        answer.map_err(|error| self.unanswered(during, self.limits.answer, error))
    }

    /// Asks the VMM for a VM.
    fn ask_to_make(
        &self,
        during: &'static str,
        question: impl FnOnce(&mut VmmClient) -> Result<(), ClientError>,
    ) -> Result<(), Error> {
        self.ask(during, question).map_err(as_made)
    }

    /// Asks the VMM something that may take longer than other answers.
    pub(crate) fn ask_within<T>(
        &self,
        limit: Duration,
        during: &'static str,
        question: impl FnOnce(&mut VmmClient) -> Result<T, ClientError>,
    ) -> Result<T, Error> {
        self.ask_by(self.client(), limit, during, question)
    }

    fn ask_by<T>(
        &self,
        mut client: MutexGuard<'_, VmmClient>,
        limit: Duration,
        during: &'static str,
        question: impl FnOnce(&mut VmmClient) -> Result<T, ClientError>,
    ) -> Result<T, Error> {
        let patience = |client: &VmmClient, limit| {
            set_patience(client.as_fd(), limit).map_err(Error::host("setting a socket's time limit"))
        };
        patience(&client, limit)?;
        let answer = question(&mut client);
        patience(&client, self.limits.answer)?;
        self.let_go(client);
        answer.map_err(|error| self.unanswered(during, limit, error))
    }

    fn unanswered(&self, during: &'static str, limit: Duration, error: ClientError) -> Error {
        match error {
            error if error.is_gone() => self.died(during),
            ClientError::Packet(PacketError::Io(error)) if is_timeout(&error) => {
                Error::Deadline { what: during, limit }
            }
            cause => Error::RefusedWhile {
                during,
                cause,
                log: self.vmm_log(),
            },
        }
    }

    /// Makes the VM and lets it run, until its agent has called; `cancel` hangs up when nobody wants it any more.
    pub(crate) fn boot(
        &self,
        prepared: Prepared,
        cancel: Option<BorrowedFd<'_>>,
        reached: &dyn Fn(&str) -> Result<(), Error>,
    ) -> Result<Connection<Timed>, Error> {
        let Prepared {
            config,
            fds,
            acceptor,
            inherited,
        } = prepared;
        // The VMM has its own copy. With ours open, a VMM that has died already would be waited for.
        drop(inherited);
        {
            let _span = span("VM made");
            self.ask_to_make("the VM was made", |client| client.create(config, &fds.borrow()))?;
        }
        // The VMM has its own copies.
        drop(fds);
        reached(base::points::START_CREATED)?;
        let deadline = Instant::now() + self.limits.boot;
        {
            let _span = span("VM started");
            self.ask_to_make("the VM was started", VmmClient::start)?;
        }
        reached(base::points::START_STARTED)?;
        let stream = {
            let _span = span("guest boots");
            self.wait_for_agent(&acceptor, deadline, cancel)?
        };
        reached(base::points::START_AGENT)?;
        let _span = span("agent greeted");
        Connection::new(Timed::new(stream), None).map_err(|error| self.diagnose("the guest booted", error))
    }

    /// Makes the VM as it was in a snapshot; it does not run yet.
    pub(crate) fn restore(&self, restoring: Restoring, limit: Duration) -> Result<(), Error> {
        let Restoring { config, fds } = restoring;
        self.ask_within(limit, "the VM was restored", |client| {
            client.restore(config, &fds.borrow())
        })
        .map_err(as_made)
    }

    /// The agent's first connection.
    fn wait_for_agent(
        &self,
        acceptor: &PacketSocket,
        deadline: Instant,
        cancel: Option<BorrowedFd<'_>>,
    ) -> Result<UnixStream, Error> {
        const DURING: &str = "the guest booted";
        // Others may talk to the VMM meanwhile.
        let voice = self.client().as_fd().try_clone_to_owned();
        let voice = voice.map_err(Error::host("listening to a VMM"))?;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let mut fds = vec![
                PollFd::new(acceptor, PollFlags::IN),
                PollFd::new(&self.pidfd, PollFlags::IN),
                PollFd::new(&voice, PollFlags::IN),
            ];
            fds.extend(cancel.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::RDHUP)));
            match poll(&mut fds, Some(&timespec(left))) {
                Ok(_) | Err(rustix::io::Errno::INTR) => (),
                Err(error) => return Err(Error::host("waiting for the guest")(error)),
            }
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            if ready.first() == Some(&true) {
                match accept(acceptor) {
                    Ok(Some(stream)) => return Ok(stream),
                    Ok(None) => continue,
                    Err(PacketError::Closed) => return Err(self.end(DURING)),
                    Err(error) => return Err(Error::host("receiving the agent's connection")(io::Error::other(error))),
                }
            }
            if ready.get(1) == Some(&true) {
                return Err(self.end(DURING));
            }
            if ready.get(2) == Some(&true)
                && let Ok(Some(StopReason::NoSpace { .. })) = self.take_stop()
            {
                return Err(self.no_space());
            }
            if ready.get(3) == Some(&true) {
                return Err(Error::Cancelled);
            }
            if left.is_zero() {
                return Err(Error::AgentSilent {
                    limit: self.limits.boot,
                    console: self.console(),
                });
            }
        }
    }

    /// Has the agent make the guest's root; what is asked of it next has to be answered within the same time.
    pub(crate) fn prepare(
        &self,
        agent: &mut Connection<Timed>,
        stored: &Stored,
        network: Option<GuestNetwork>,
        own: Own,
    ) -> Result<(), Error> {
        const DURING: &str = "the guest was prepared";
        let disk = |serial: &str, fs: &str| RootDisk {
            disk: DiskName::Serial(serial.to_owned()),
            fs: fs.to_owned(),
        };
        let sandbox = &stored.sandbox;
        let writable = sandbox.config.resources.disk;
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let prepare = Prepare {
            root: disk(ROOT_SERIAL, "erofs"),
            writable: writable.map(|_| disk(WRITABLE_SERIAL, crate::saved::disk::FILE_SYSTEM)),
            overlay_bytes: None,
            hostname: sandbox.host_name().to_owned(),
            // Later it is on the disk, where there is one.
            machine_id: (sandbox.restarts == 0 || writable.is_none())
                .then(crate::ids::machine)
                .transpose()?,
            clock_ns: u64::try_from(since.as_nanos()).unwrap_or(u64::MAX),
            entropy: entropy()?,
            network,
            shared_directories: own.shared_directories,
            tmpfs: own.tmpfs,
            pids_max: own.pids_max,
            accelerator: accelerator::of_guest(stored),
        };
        let prepared = agent
            .set_read_timeout(Some(self.limits.boot))
            .and_then(|()| agent.prepare(&prepare));
        prepared.map_err(|error| self.diagnose(DURING, error))
    }

    /// A new connection to the agent, which has to answer in the usual time.
    pub(crate) fn agent(&self) -> Result<Connection<Timed>, Error> {
        let connection = self.dial().and_then(|stream| {
            let agent = Connection::new(stream, None)?;
            agent.set_read_timeout(Some(self.limits.answer))?;
            Ok(agent)
        });
        connection.map_err(|error| self.diagnose("its agent was called", error))
    }

    /// A socket that its agent can be dialled by later, when no descriptor may be left.
    pub(crate) fn line(&self) -> Result<Line, Error> {
        let path = self.paths.vsock();
        Line::new(&path).map_err(Error::file("make a socket for", &path))
    }

    /// A stream to its agent, on which nobody has spoken yet.
    fn dial(&self) -> Result<Timed, agent_api::Error> {
        let line = Line::new(&self.paths.vsock()).map_err(|source| agent_api::Error::Local {
            what: "making a socket for its agent",
            source,
        })?;
        self.dial_by(line)
    }

    /// The same by a socket that is there already: it opens no other.
    pub(crate) fn dial_by(&self, line: Line) -> Result<Timed, agent_api::Error> {
        let path = self.paths.vsock();
        let greet = || -> io::Result<Timed> {
            let mut stream = line.connect(&path)?;
            stream.set_read_timeout(Some(self.limits.answer))?;
            agent_api::ask_for_port(&mut stream, VSOCK_PORT)?;
            stream.set_read_timeout(None)?;
            Ok(stream)
        };
        greet().map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => agent_api::Error::Silent(self.limits.answer),
            _ => agent_api::Error::Wire(wire::Error::Io(error)),
        })
    }

    /// The agent's connection failed: finds out whether that is because guest or VMM are gone.
    pub(crate) fn diagnose(&self, during: &'static str, error: agent_api::Error) -> Error {
        // Local failures and refusals are no sign of an end; everything else usually comes with one.
        match error {
            agent_api::Error::Exec(failure) => return Error::Exec(failure),
            agent_api::Error::Local { .. } | agent_api::Error::Refused(_) => (),
            _ if readable(&self.pidfd, LAST_WORDS) => return self.end(during),
            // It cannot have answered.
            _ if self.is_stopped_for_space() => return self.no_space(),
            _ => (),
        }
        let console = self.console();
        let limit = match &error {
            agent_api::Error::Silent(limit) => Some(*limit),
            agent_api::Error::TimedOut => None,
            agent_api::Error::Wire(wire::Error::Io(error))
                if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) =>
            {
                None
            }
            _ => {
                return Error::Agent {
                    during,
                    cause: error,
                    console,
                };
            }
        };
        Error::GuestSilent { during, limit, console }
    }

    fn is_stopped_for_space(&self) -> bool {
        let info = self.ask("its agent did not answer", VmmClient::info);
        info.is_ok_and(|info| pause_reason(&info).is_some())
    }

    fn no_space(&self) -> Error {
        let free = base::space::available(&self.paths.directory).unwrap_or(0);
        let lacking = Lacking::Before {
            what: "what the guest writes to its disk",
            needed: LEAST,
            free: ByteSize(free),
            path: self.paths.directory.clone(),
        };
        lacking.into()
    }

    /// The VM has ended or the VMM is gone: says which and why.
    pub(crate) fn end(&self, during: &'static str) -> Error {
        // The VMM says why just before it goes.
        readable(&self.pidfd, LAST_WORDS);
        let mut client = self.client();
        let mut said = client.wait_event();
        while matches!(said, Ok(Event::Stopped(_) | Event::Frozen | Event::NotFrozen(_))) {
            said = client.wait_event();
        }
        match said {
            Ok(Event::Ended(reason)) => {
                let console = self.console();
                Error::GuestEnded {
                    during,
                    reason,
                    panic: console.find("Kernel panic"),
                    console,
                }
            }
            Ok(Event::Stopped(_) | Event::Frozen | Event::NotFrozen(_)) | Err(_) => {
                drop(client);
                self.died(during)
            }
        }
    }

    /// What went wrong beside the VMM; that it has died, if it has.
    pub(crate) fn or_died(&self, during: &'static str, error: Error) -> Error {
        match readable(&self.pidfd, Duration::ZERO) {
            true => self.died(during),
            false => error,
        }
    }

    fn died(&self, during: &'static str) -> Error {
        Error::VmmDied {
            during,
            log: self.vmm_log(),
        }
    }

    fn console(&self) -> Tail {
        Tail::of("the guest's console", &self.paths.console())
    }

    fn vmm_log(&self) -> Tail {
        Tail::of("the VMM's log", &self.paths.vmm_log())
    }
}

/// What a VMM says of a VM that is paused.
pub(crate) fn pause_reason(info: &Info) -> Option<PauseReason> {
    match (info.state, &info.stopped) {
        (VmState::Paused, Some(StopReason::NoSpace { .. })) => Some(PauseReason::NoSpace),
        _ => None,
    }
}

/// A refusal to make a VM.
fn as_made(error: Error) -> Error {
    match error {
        Error::RefusedWhile { cause, log, .. } => Error::Refused { cause, log },
        error => error,
    }
}

fn is_timeout(error: &rustix::io::Errno) -> bool {
    *error == rustix::io::Errno::AGAIN
}

/// Nobody else gets the same.
pub(crate) fn entropy() -> Result<Vec<u8>, Error> {
    let mut entropy = vec![0; ENTROPY];
    let got = rustix::rand::getrandom(&mut entropy, rustix::rand::GetRandomFlags::empty())
        .map_err(Error::host("reading entropy"))?;
    entropy.truncate(got);
    Ok(entropy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::paths::Paths;

    #[test]
    fn a_guest_that_hangs_is_told_of_in_a_sentence_with_a_next_step() {
        let directory = tempfile::tempdir().unwrap();
        let paths = Paths::new(directory.path().to_owned()).sandbox("aaaaaaaaaaaa");
        std::fs::create_dir_all(&paths.run).unwrap();
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let address = rustix::net::SocketAddrUnix::new(paths.control()).unwrap();
        rustix::net::bind(&socket, &address).unwrap();
        rustix::net::listen(&socket, 1).unwrap();
        let own = rustix::process::getpid();
        let pidfd = rustix::process::pidfd_open(own, rustix::process::PidfdFlags::empty()).unwrap();
        let limits = TimeLimits {
            answer: Duration::from_millis(100),
            ..TimeLimits::REAL
        };
        let vm = Vm::connect(pidfd, &paths, limits).unwrap();
        // A VMM that takes connections for a guest that does not.
        let listener = std::os::unix::net::UnixListener::bind(paths.vsock()).unwrap();
        let mut told = vec![vm.agent().unwrap_err()];
        let first = listener.accept().unwrap();
        // A guest whose kernel answers, and whose agent does not.
        let late = agent_api::Error::TimedOut;
        told.push(vm.diagnose("its command was signalled", late));
        let late = agent_api::Error::Wire(wire::Error::Io(rustix::io::Errno::AGAIN.into()));
        told.push(vm.diagnose("its command was signalled", late));
        for error in &told {
            let text = error.to_string();
            assert!(
                text.contains("the guest did not answer ") && text.contains("`basalt kill`"),
                "{text}"
            );
            assert!(!text.contains("os error"), "{text}");
            assert_eq!(error.reason(), "guest-silent");
        }
        assert!(told[0].to_string().contains(" within 100ms while "), "{}", told[0]);
        drop(first);
    }
}
