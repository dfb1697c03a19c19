//! PID 1 of a guest, from its first instruction to serving its host. Owns the order; the steps are in the other files.
//!
//! ```text
//!  mounts ─► marker ─► reaper ─► listen on vsock ─► dial the host ─► serve both, until Shutdown
//! ```

mod early;
mod mounts;
mod net;
mod root;
mod seed;
mod shares;
mod tmpfs;
mod vsock;

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use agent_api::log::LOG_PORT;
use agent_api::{Prepare, VSOCK_PORT};

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
    let server = boot(started_ns)?;
    let listener = vsock::VsockListener::bind(VSOCK_PORT)?;
    let for_dial = server.clone();
    thread::Builder::new()
        .name("dial".to_owned())
        .stack_size(STACK_SIZE)
        .spawn(move || dial(&for_dial))
        .map_err(Error::system("starting a thread"))?;
    Ok((server, listener))
}

/// Everything before the first connection: the guest's server, ready for whatever stream comes.
pub fn boot(started_ns: u64) -> Result<Server, Error> {
    early::mount_proc()?;
    early::mark(started_ns)?;
    early::mount_rest()?;
    early::raise_limits()?;
    let reaper = Reaper::start()?;
    let config = ServerConfig {
        token: None,
        root: RootMode::Prepared(Box::new(prepare)),
        cgroups: Some(Cgroups::at(Path::new(early::CGROUPS))?),
        power: Some(Power::of_pid1(|| ())?),
        log: Some(Box::new(|| vsock::dial(vsock::HOST, LOG_PORT))),
        started_ns,
    };
    Ok(Server::new(config, reaper))
}

/// Connects to the host and serves that connection in this thread.
fn dial(server: &Server) {
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
    if let Err(error) = server.serve(stream) {
        say(format_args!("{error}"));
    }
}

/// Everything that `Prepare` asks for. What is not the root comes first: it cannot fail half-way.
fn prepare(prepare: &Prepare) -> Result<(), Error> {
    seed::add_entropy(&prepare.entropy)?;
    seed::set_clock(prepare.clock_ns)?;
    let name = prepare.hostname.as_bytes();
    rustix::system::sethostname(name)
        .map_err(Error::system(format!("setting the host name {:?}", prepare.hostname)))?;
    let network = prepare.network.as_ref();
    net::set_up(network)?;
    root::enter(prepare)?;
    root::write_files(Path::new("/"), &prepare.hostname, network)?;
    mounts::mount_all(prepare)
}
