//! What a server tells of itself: one line of JSON, for `basalt accel ls`, metrics, and whoever looks.

use std::collections::BTreeMap;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Instant;
use std::{fs, io};

use accel_proto::{Sort, cuda, opencl};
use rustix::net::SendFlags;
use serde::Serialize;

use crate::api::Backend;
use crate::meter::{Meter, Work};
use crate::tenant::Tenant;

/// What a server tells. Times are in nanoseconds, memory is in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Stats {
    /// The form of all this; what is added later does not change it.
    pub version: u32,
    /// Who carries calls out.
    pub backend: String,
    /// Processes that have served before this one, and have ended; all else here is of this one alone.
    pub restarts: u64,
    /// Processes that are connected.
    pub clients: Vec<ClientStats>,
    /// Objects that there are, by their types in C.
    pub objects: BTreeMap<&'static str, u64>,
    /// Memory on the accelerator.
    pub memory: MemoryStats,
    /// Time of the accelerator, where it is measured.
    pub time: Option<TimeStats>,
    /// Calls that failed, by the API's codes.
    pub errors: BTreeMap<i32, u64>,
    /// Calls that nobody carries out, by their names, or by their numbers where they have none.
    pub not_served: BTreeMap<String, u64>,
}

/// A client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ClientStats {
    /// How its records travel.
    pub transport: String,
    /// How many of its threads can call at a time.
    pub threads: usize,
    /// Bytes of its arena.
    pub arena: u64,
    /// How long it has been connected, in seconds.
    pub seconds: u64,
}

/// Memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MemoryStats {
    /// What all clients have.
    pub used: u64,
    /// The most that they had at a time.
    pub most: u64,
    /// What they may have; none if there is no limit.
    pub quota: Option<u64>,
    /// How often something was refused because of it.
    pub refused: u64,
}

/// Time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TimeStats {
    /// What complete commands have used.
    pub used: u64,
    /// How long commands waited until it was their tenant's turn.
    pub held_up: u64,
    /// Kernels that are complete.
    pub launches: u64,
    /// Reads, writes, copies and fills that are complete.
    pub transfers: u64,
    /// Commands that are not complete.
    pub in_flight: usize,
    /// Whether an arbiter divides the time.
    pub is_shared: bool,
}

/// A client that is connected.
#[derive(Debug)]
pub(crate) struct Connected {
    pub(crate) transport: String,
    pub(crate) threads: usize,
    pub(crate) arena: u64,
    pub(crate) since: Instant,
}

impl Stats {
    pub(crate) fn new<'c>(backend: &Backend, tenant: &Tenant, clients: impl Iterator<Item = &'c Connected>) -> Self {
        let client = |client: &Connected| ClientStats {
            transport: client.transport.clone(),
            threads: client.threads,
            arena: client.arena,
            seconds: client.since.elapsed().as_secs(),
        };
        let quota = &tenant.quota;
        let not_served = tenant.counters.all_not_served().into_iter();
        Self {
            version: 1,
            backend: backend.name().to_owned(),
            restarts: 0,
            clients: clients.map(client).collect(),
            objects: (Sort::ALL.into_iter())
                .map(|sort| (sort.c_type(), backend.census.count(sort)))
                .filter(|(_, count)| *count > 0)
                .collect(),
            memory: MemoryStats {
                used: quota.used(),
                most: quota.most(),
                quota: quota.limit(),
                refused: quota.refused(),
            },
            time: tenant.meter.as_deref().map(time),
            errors: tenant.counters.all_failed(),
            not_served: not_served.map(|(op, count)| (name_of(op), count)).collect(),
        }
    }

    /// As one line.
    ///
    /// # Errors
    /// None: all of it has a form in JSON.
    pub fn line(&self) -> io::Result<String> {
        let mut line = serde_json::to_string(self)?;
        line.push('\n');
        Ok(line)
    }
}

fn time(meter: &Meter) -> TimeStats {
    meter.look_at_first();
    TimeStats {
        used: meter.used(),
        held_up: meter.held_up(),
        launches: meter.done(Work::Launch),
        transfers: meter.done(Work::Transfer),
        in_flight: meter.in_flight(),
        is_shared: meter.is_shared(),
    }
}

/// A command's name, or its number where it has none.
pub(crate) fn name_of(op: u16) -> String {
    let mut all = opencl::table::COMMANDS.iter().chain(cuda::table::COMMANDS);
    let found = all.find(|command| command.op == Some(op));
    found.map_or_else(|| format!("{op:#06x}"), |command| command.name.to_owned())
}

/// A socket for this user alone that tells whoever connects. One that nobody listens on any more is replaced.
pub(crate) fn listen(path: &Path) -> io::Result<UnixListener> {
    let listener = match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => match UnixStream::connect(path) {
            Err(refused) if refused.kind() == io::ErrorKind::ConnectionRefused => {
                fs::remove_file(path)?;
                UnixListener::bind(path)?
            }
            _ => return Err(error),
        },
        bound => bound?,
    };
    fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
    Ok(listener)
}

/// Tells whoever connects, one after the other.
pub(crate) fn tell(listener: &UnixListener, stats: impl Fn() -> Stats) -> io::Result<()> {
    for stream in listener.incoming() {
        let told = stream.and_then(|stream| {
            let line = stats().line()?;
            // A new socket has room for more than there is to tell.
            let sent = rustix::net::send(&stream, line.as_bytes(), SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
            match sent == line.len() {
                true => Ok(()),
                false => Err(io::Error::other("it is longer than a socket has room for")),
            }
        });
        match told {
            // Whoever has asked is gone, or does not read.
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::MFILE.raw_os_error()) => return Err(error),
            Err(error) => log::debug!("statistics were asked for and not read: {error}"),
            Ok(()) => {}
        }
    }
    Ok(())
}
