//! PID 1 of a guest, from its first instruction to serving its host. Owns the order; the steps are in the other files.
//!
//! ```text
//!  /proc ─► marker ─┬─► dial the host ──────────────────────────────────┬─► serve both, until Shutdown
//!                   └─► mounts ─► reaper ─► server ─► listen on vsock ──┘
//! ```

mod accelerator;
mod boot_id;
mod connections;
mod early;
mod hwrng;
mod mounts;
mod names;
mod net;
mod reidentify;
mod root;
mod seed;
mod shares;
mod shed;
mod tmpfs;
mod vsock;

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use agent_api::log::LOG_PORT;
use agent_api::{Prepare, VSOCK_PORT};
use observe::marks;

use self::reidentify::Reidentification;
use crate::cgroup::Cgroups;
use crate::power::{self, Power};
use crate::reaper::Reaper;
use crate::server::{RootMode, Server, ServerConfig};
use crate::{Error, STACK_SIZE, say};

/// How long the host may take to listen, and the pause between attempts.
const DIAL_LIMIT: Duration = Duration::from_secs(10);
const DIAL_PAUSE: Duration = Duration::from_millis(20);

/// Runs a guest. `started_ns` is `CLOCK_BOOTTIME` at the first instruction. Powers off when it cannot go on: a PID 1 that
/// ends makes the kernel panic.
pub fn run(started_ns: u64) -> ! {
    std::panic::set_hook(Box::new(|info| power::fatal(&info)));
    match start(started_ns) {
        Ok((server, listener)) => server.serve_listener(&listener),
        Err(error) => power::fatal(&error),
    }
}

fn start(started_ns: u64) -> Result<(Server, vsock::VsockListener), Error> {
    first(started_ns)?;
    // The host answers while the rest is made.
    let (ready, server) = mpsc::channel();
    thread::Builder::new()
        .name("dial".to_owned())
        .stack_size(STACK_SIZE)
        .spawn(move || dial(&server))
        .map_err(Error::system("starting a thread"))?;
    let server = rest(started_ns)?;
    // Before the host is answered: it may call at once.
    let listener = vsock::VsockListener::bind(VSOCK_PORT)?;
    // A thread that could not dial is gone.
    let _ = ready.send(server.clone());
    Ok((server, listener))
}

/// Everything before the first connection: the guest's server, ready for whatever stream comes.
pub fn boot(started_ns: u64) -> Result<Server, Error> {
    first(started_ns)?;
    rest(started_ns)
}

fn first(started_ns: u64) -> Result<(), Error> {
    marks::mark("agent's first instruction");
    early::mount_proc()?;
    early::mark(started_ns)
}

fn rest(started_ns: u64) -> Result<Server, Error> {
    early::mount_rest()?;
    early::raise_limits()?;
    early::be_quiet()?;
    let reaper = Reaper::start()?;
    let log = Arc::new(LogAhead::default());
    let ahead = Arc::clone(&log);
    let reidentification = Arc::new(Reidentification::new(Arc::clone(&log))?);
    let prepared = Arc::clone(&reidentification);
    let make_root = move |request: &Prepare| {
        prepared.note(request.network.as_ref());
        let writable = prepare(request, &ahead)?;
        prepared.note_disk(request.writable.is_some().then_some(writable));
        Ok(())
    };
    let config = ServerConfig {
        token: None,
        root: RootMode::Prepared(Box::new(make_root)),
        cgroups: Some(Cgroups::at(Path::new(early::CGROUPS))?),
        power: Some(Power::of_pid1(|| ())?),
        log: Some(Box::new(move || log.take())),
        clones: Some(Reidentification::clones(reidentification)),
        started_ns,
    };
    Ok(Server::new(config, reaper))
}

/// The log's connection, opened before it is asked for: the host answers while the root is made.
#[derive(Default)]
pub(crate) struct LogAhead(Mutex<Option<Ahead>>);

/// A thread that dials as often as it is told to, until nobody can tell it any more. It is the same one in a clone.
struct Ahead {
    tell: mpsc::Sender<()>,
    dialled: mpsc::Receiver<io::Result<UnixStream>>,
}

impl LogAhead {
    fn dial() -> io::Result<UnixStream> {
        vsock::dial(vsock::HOST, LOG_PORT)
    }

    fn begin(&self) {
        let ((tell, told), (give, dialled)) = (mpsc::channel(), mpsc::channel());
        let work = move || {
            while told.recv().is_ok() && give.send(Self::dial()).is_ok() {}
        };
        let thread = thread::Builder::new()
            .name("log".to_owned())
            .stack_size(STACK_SIZE)
            .spawn(work);
        // Without a thread it is opened when it is asked for.
        let ahead = thread.is_ok().then_some(Ahead { tell, dialled });
        let ahead = ahead.filter(|ahead| ahead.tell.send(()).is_ok());
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = ahead;
    }

    /// Opens another, if there is one that nobody has taken: a restore has ended it.
    fn begin_again(&self) {
        let mut ahead = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // The first comes of itself: it was dialled long ago, or fails as its connection was reset.
        if let Some(Ahead { tell, dialled }) = &*ahead
            && (dialled.recv().is_err() || tell.send(()).is_err())
        {
            *ahead = None;
        }
    }

    fn take(&self) -> io::Result<UnixStream> {
        let ahead = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let dialled = ahead.and_then(|ahead| ahead.dialled.recv().ok());
        dialled.unwrap_or_else(Self::dial)
    }
}

/// Connects to the host and serves that connection in this thread, by the server that is ready soon.
fn dial(ready: &mpsc::Receiver<Server>) {
    let end = Instant::now() + DIAL_LIMIT;
    let stream = loop {
        match vsock::dial(vsock::HOST, VSOCK_PORT) {
            Ok(stream) => break stream,
            // Without a device there is nobody to wait for.
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) || Instant::now() >= end => {
                say(format_args!(
                    "no host answers on vsock port {VSOCK_PORT} ({error}); waiting for it to connect here"
                ));
                return;
            }
            Err(_) => thread::sleep(DIAL_PAUSE),
        }
    };
    marks::mark("host dialled");
    // Without a server the boot has failed, and the machine ends.
    let Ok(server) = ready.recv() else { return };
    marks::mark("booted");
    if let Err(error) = server.serve(stream) {
        say(format_args!("{error}"));
    }
}

/// Everything that `Prepare` asks for. What is not the root comes first: it cannot fail half-way. A directory of the writable
/// layer.
fn prepare(prepare: &Prepare, log: &LogAhead) -> Result<File, Error> {
    marks::mark("prepare asked");
    if let Some(id) = &prepare.machine_id {
        names::check_machine_id(id)?;
    }
    seed::add_entropy(&prepare.entropy)?;
    seed::set_clock(prepare.clock_ns)?;
    seed::set_hostname(&prepare.hostname)?;
    let network = prepare.network.as_ref();
    marks::mark("entropy, clock and name set");
    log.begin();
    // Disks are waited for, which leaves time for the network.
    let root = thread::scope(|scope| {
        let network = thread::Builder::new()
            .name("network".to_owned())
            .stack_size(STACK_SIZE)
            .spawn_scoped(scope, || net::set_up(network))
            .map_err(Error::system("starting a thread"))?;
        let root = root::assemble(prepare);
        marks::mark("root assembled");
        network.join().unwrap_or_else(|_| {
            Err(Error::Refused(
                "the thread that sets the network up panicked".to_owned(),
            ))
        })?;
        marks::mark("network set up");
        root
    })?;
    let writable = root.enter()?;
    marks::mark("root entered");
    root::write_files(Path::new("/"), &prepare.hostname, network)?;
    if let Some(id) = &prepare.machine_id {
        names::write_machine_id(Path::new("/"), id)?;
    }
    mounts::mount_all(&prepare.tmpfs, &prepare.shared_directories, &mut BTreeSet::new())?;
    if let Some(accelerator) = &prepare.accelerator {
        accelerator::set_up(accelerator)?;
    }
    marks::mark("prepared");
    Ok(writable)
}
