//! The server's flags. Knows nothing of what they do.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use accel_server::TenantLimits;
use accel_transport::tls::Identity;
use accel_transport::{Settings, Transport};
use anyhow::{Context as _, Result, bail};
use base::ByteSize;
use log::LevelFilter;

use crate::carrier::Carrier;
use crate::confine::{self, Jail};

mod fds;

use fds::Fds;
pub(crate) use fds::GuestFds;

const HELP: &str = "\
basalt-accel-server: carries out forwarded calls of an accelerator's API (see docs/accel.md)

Usage: basalt-accel-server --socket PATH --backend opencl|cuda|null|reference [--library PATH]
                           [--arena SIZE] [--threads NUMBER] [--transports LIST] [--busy-poll MICROS]
                           [--coalesce MICROS] [--memory SIZE] [--arbiter PATH] [--inflight NUMBER] [--control PATH]
                           [--log-level LEVEL] [--jail [what it is like]]
       basalt-accel-server --listen ADDRESS:PORT --tls-cert FILE --tls-key FILE [--tls-client-ca FILE] --backend ...
       basalt-accel-server --passive FILE [--passive FILE ...] --backend ... (in a virtual machine that its clients run)
       basalt-accel-server --vsock-fd FD --window-fd FD --driver-fd FD --musl-driver-fd FD --ready-fd FD [--save-fd FD]
                           [--restore-fd FD] [--arbiter-fd FD] [--control-fd FD] --backend ... (the node's daemon does that)

  --socket PATH      where clients connect, for this user alone; a socket that nobody listens on is replaced
  --listen ADDRESS   where clients of other machines connect, such as 0.0.0.0:7070; the port is told on standard error
  --tls-cert FILE    with it: the certificate that it shows them, with those that vouch for it, as PEM
  --tls-key FILE     with it: the key of that, as PEM
  --tls-client-ca FILE  with it: serve only clients whose certificates one of these has signed; else whoever connects
  --without-tls      with it: nothing is encrypted, and whoever reaches the port is served; needed but for loopback
  --passive FILE     a window for one client at a time, which runs this server itself: a file of memory that this virtual machine and
                     the client's have; again for each window (docs/accel-switch.md)
  --vsock-fd FD      the clients are in a virtual machine: the unix socket by which its VMM connects to its vsock
  --window-fd FD     with it: a memfd, sealed against shrinking, that is the machine's virtio-pmem device; it is formatted
  --driver-fd FD     with it: the client's library, which the window's file system is to have
  --musl-driver-fd FD  with it: the same library for images with musl
  --cuda-driver-fd FD  with it: the client's libraries of CUDA, which the window's file system is to have as well
  --ready-fd FD      with it: a socket; \"ready\" and a line feed is said there when the window can be given to the machine, and
                     \"known\" and one is waited for
  --save-fd FD       with it: a unix socket that listens; whoever connects there can have all of its state written
  --restore-fd FD    with it: such a state, which is gone on from: the window gets the bytes of then; \"restored\" and a line feed is
                     said to --ready-fd behind \"known\", or \"lost\", the reason and a line feed
  --arbiter-fd FD    with it, in place of --arbiter: the directory of the arbiter's socket, which is called \"socket\" there; with
                     --jail it is a mount that is nowhere yet
  --control-fd FD    with it, in place of --control: a unix socket that listens; time is measured if there is an arbiter
  --pinned           with it: the machine has the window's pages pinned, so that they are zeroed in place of given back
  --backend NAME     opencl or cuda: libraries of this host carry calls out; reference: calls of CUDA are computed on the
                     CPU; null: nobody does, for measuring and tests
  --library PATH     with opencl: the library, libOpenCL.so.1; the drivers that it finds are those of OCL_ICD_VENDORS;
                     with cuda: directories of its libraries, with colons between them; else the loader finds them
  --arena SIZE       memory that is shared with each client for what is large, at most; it takes what is used of it; 256m
  --threads NUMBER   the most threads of a client that can call at a time; 32
  --transports LIST  how records may travel: spin, bell, same-cpu, stream, synchronous, with commas; what fits this host
  --busy-poll MICROS how long who waits for a record looks for it before it sleeps, at most; spin 50, bell 10, others 0
  --coalesce MICROS  how long records that nobody waits for may be left, so that a server that sleeps is not woken for each; 50,
                     and with the back end null as long as half of a ring is free
  --memory SIZE      memory of the accelerator that all clients together may have; as much as it has
  --arbiter PATH     the socket of an arbiter that divides the accelerator's time; nothing limits it while nobody listens there
  --inflight NUMBER  commands that all clients together may have on the accelerator; 256 with an arbiter, 4096 without
  --control PATH     where whoever connects is told statistics, as a line of JSON, for this user alone
  --log-level LEVEL  off, error, warn (default), info, debug or trace
  --version          print the version
  --help             print this text

Examples:
  basalt-accel-server --socket /run/accel.sock --backend opencl
  OCL_ICD_VENDORS=/etc/OpenCL/vendors/pocl.icd basalt-accel-server --socket accel.sock --backend opencl --arena 1g
  basalt-accel-server --socket accel.sock --backend null --transports spin
  basalt-accel-server --listen 0.0.0.0:7070 --tls-cert server.pem --tls-key server.key --tls-client-ca ca.pem --backend opencl
  unshare --user --map-root-user --pid --fork --mount --net --ipc --uts \
    basalt-accel-server --socket /run/accel.sock --backend opencl --jail
  unshare --user --map-root-user --pid --fork --mount --ipc --uts \
    basalt-accel-server --listen 0.0.0.0:7070 --tls-cert server.pem --tls-key server.key --backend opencl --jail

SIGTERM ends it at once, and SIGKILL in a jail; its clients get errors of the API.
";

/// Records of each ring.
const RECORDS: u32 = 256;

/// How long a client may take to say what it wishes.
const PATIENCE: Duration = Duration::from_secs(10);

/// Where clients are.
#[derive(Debug)]
pub(crate) enum Place {
    /// Processes of this host, which connect to this socket.
    Host(PathBuf),
    /// Processes of other machines, which connect to this address; with TLS, or without.
    Remote(SocketAddr, Option<Certificates>),
    /// In a virtual machine.
    Guest(GuestFds),
    /// In virtual machines that run this one, with these windows.
    Passive(Vec<PathBuf>),
}

/// Where the directory of an inherited arbiter's socket is in a jail, and what the socket is called there.
pub(crate) const ARBITER: &str = "/run/arbiter";
const ARBITER_SOCKET: &str = "socket";

/// Files for TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Certificates {
    pub(crate) own: Identity,
    /// Who signs clients'.
    pub(crate) clients: Option<PathBuf>,
}

/// What is said of clients of other machines.
#[derive(Debug, Default)]
struct Remote {
    listen: Option<SocketAddr>,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
    clients: Option<PathBuf>,
    without_tls: bool,
}

/// What the server is started with.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) place: Place,
    pub(crate) backend: Carrier,
    pub(crate) arena: ByteSize,
    pub(crate) threads: u32,
    pub(crate) transports: Vec<Transport>,
    pub(crate) busy_poll: Option<Duration>,
    pub(crate) coalesce: Option<Duration>,
    /// The machine has the window's pages pinned.
    pub(crate) pinned: bool,
    pub(crate) limits: TenantLimits,
    /// Where statistics are told.
    pub(crate) control: Option<PathBuf>,
    pub(crate) log_level: LevelFilter,
    /// What is left to it; nothing is taken without.
    pub(crate) jail: Option<Jail>,
}

impl Options {
    /// What connections are like.
    pub(crate) fn settings(&self) -> Settings {
        Settings {
            transports: self.transports.clone(),
            pairs: self.threads,
            records: RECORDS,
            arena: self.arena.0,
            patience: PATIENCE,
            busy_poll: self.busy_poll,
        }
    }
}

/// What is to be done.
#[derive(Debug)]
pub(crate) enum Command {
    Serve(Box<Options>),
    Print(String),
}

/// What a server for a guest, and no other, is given.
const TOGETHER: &str = "give --socket alone, or --listen, or --vsock-fd, --window-fd, --driver-fd, --musl-driver-fd and --ready-fd \
    together, which --save-fd, --restore-fd, --arbiter-fd, --control-fd and --cuda-driver-fd need";

/// Reads this process's arguments.
pub(crate) fn parse() -> Result<Command> {
    parse_from(lexopt::Parser::from_env())
}

fn parse_from(mut parser: lexopt::Parser) -> Result<Command> {
    use lexopt::prelude::*;
    let (mut socket, mut backend, mut library) = (None, None, None);
    let mut fds = Fds::default();
    let (mut remote, mut passive) = (Remote::default(), Vec::new());
    let mut arena = ByteSize(256 << 20);
    let mut threads = 32;
    let mut transports = None;
    let (mut busy_poll, mut coalesce, mut pinned) = (None, None, false);
    let (mut limits, mut control) = (TenantLimits::default(), None);
    let mut log_level = LevelFilter::Warn;
    let mut jail = confine::Flags::default();
    while let Some(argument) = parser.next()? {
        if let Long(flag) = &argument
            && let Some(place) = fds::place(flag)
        {
            fds.set(place, parser.value()?.parse()?);
            continue;
        }
        match argument {
            Long("socket") => socket = Some(PathBuf::from(parser.value()?)),
            Long("passive") => passive.push(PathBuf::from(parser.value()?)),
            Long("listen") => remote.listen = Some(address(&parser.value()?.string()?)?),
            Long("tls-cert") => remote.certificate = Some(parser.value()?.into()),
            Long("tls-key") => remote.key = Some(parser.value()?.into()),
            Long("tls-client-ca") => remote.clients = Some(parser.value()?.into()),
            Long("without-tls") => remote.without_tls = true,
            Long("backend") => backend = Some(parser.value()?.string()?),
            Long("library") => library = Some(PathBuf::from(parser.value()?)),
            Long("arena") => arena = parser.value()?.parse()?,
            Long("threads") => threads = parser.value()?.parse()?,
            Long("transports") => transports = Some(list(&parser.value()?.string()?)?),
            Long("pinned") => pinned = true,
            Long("busy-poll") => busy_poll = Some(micros(&mut parser)?),
            Long("coalesce") => coalesce = Some(micros(&mut parser)?),
            Long("memory") => limits.memory = Some(parser.value()?.parse::<ByteSize>()?.0),
            Long("arbiter") => limits.arbiter = Some(PathBuf::from(parser.value()?)),
            Long("inflight") => limits.in_flight = Some(parser.value()?.parse()?),
            Long("control") => control = Some(PathBuf::from(parser.value()?)),
            Long("log-level") => log_level = parser.value()?.parse()?,
            Long("jail") => jail.want(),
            Long("scratch") => jail.scratch(parser.value()?.parse()?)?,
            Long("device") => jail.device(parser.value()?)?,
            Long("read-only") => jail.read_only(parser.value()?)?,
            Long("version") => {
                return Ok(Command::Print(
                    concat!("basalt-accel-server ", env!("CARGO_PKG_VERSION"), "\n").into(),
                ));
            }
            Short('h') | Long("help") => return Ok(Command::Print(format!("{HELP}\n{}", confine::HELP))),
            other => return Err(other.unexpected().into()),
        }
    }
    let backend = Carrier::named(backend.as_deref(), library)?;
    if !(1..=1024).contains(&threads) {
        bail!("--threads {threads}: 1 to 1024");
    }
    if !arena.0.is_multiple_of(4096) || arena.0 == 0 || arena.0 > 1 << 40 {
        bail!("--arena {arena}: whole pages of 4096 bytes, up to 1t");
    }
    check(&limits)?;
    let mut jail = jail.finish()?;
    if let Some(jail) = &mut jail {
        jail.listens = remote.listen.is_some();
        reaches(jail, limits.arbiter.as_deref())?;
        jail.read_only.extend(backend.directories().iter().cloned());
    }
    // Whoever asks wants to know.
    limits.measures_time = control.is_some();
    let place = place((socket, passive), remote, fds, jail.is_some())?;
    if matches!(place, Place::Passive(_))
        && (limits.arbiter.is_some() || limits.in_flight.is_some() || control.is_some())
    {
        bail!("--passive: nothing waits for time there; leave out --arbiter, --inflight and --control");
    }
    if let Place::Guest(fds) = &place {
        inherit(fds, (&mut limits, control.as_deref()), jail.is_some())?;
    }
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(Command::Serve(Box::new(Options {
        place,
        backend,
        arena,
        threads,
        transports: transports.unwrap_or_else(|| Transport::preferred(cpus).to_vec()),
        busy_poll,
        coalesce,
        pinned,
        limits,
        control,
        log_level,
        jail,
    })))
}

/// The jail has what its server connects to.
fn reaches(jail: &mut Jail, arbiter: Option<&Path>) -> Result<()> {
    match arbiter {
        Some(_) if jail.listens => {
            bail!("--arbiter: a jail with --listen connects to nothing; leave --arbiter, --jail or --listen out")
        }
        Some(arbiter) => jail.read_only.push(directory(arbiter)?),
        None => {}
    }
    Ok(())
}

/// Where an arbiter's socket is, which a jail is to have, as another arbiter makes another socket.
fn directory(arbiter: &Path) -> Result<PathBuf> {
    let directory = arbiter
        .parent()
        .filter(|directory| arbiter.is_absolute() && directory.parent().is_some());
    let directory = directory.with_context(|| {
        format!(
            "--arbiter {}: with --jail give a path from / on, in a directory",
            arbiter.display()
        )
    });
    directory.map(Path::to_owned)
}

/// What comes by descriptors in place of paths.
fn inherit(fds: &GuestFds, (limits, control): (&mut TenantLimits, Option<&Path>), jailed: bool) -> Result<()> {
    if fds.control.is_some() && control.is_some() {
        bail!("--control and --control-fd are two places for the same: leave one out");
    }
    let Some(number) = fds.arbiter else { return Ok(()) };
    if limits.arbiter.is_some() {
        bail!("--arbiter and --arbiter-fd are two arbiters: leave one out");
    }
    // A socket is connected to by a path, which this is of a descriptor (proc(5), /proc/PID/fd).
    let directory = match jailed {
        true => ARBITER.into(),
        false => PathBuf::from(format!("/proc/self/fd/{number}")),
    };
    limits.arbiter = Some(directory.join(ARBITER_SOCKET));
    Ok(())
}

fn check(limits: &TenantLimits) -> Result<()> {
    if limits.memory == Some(0) {
        bail!("--memory 0: a client could do nothing; give what it may have, such as 2g");
    }
    match limits.in_flight {
        Some(number) if !(1..=4096).contains(&number) => bail!("--inflight {number}: 1 to 4096"),
        _ => Ok(()),
    }
}

fn address(text: &str) -> Result<SocketAddr> {
    text.parse()
        .with_context(|| format!("--listen {text}: give an address and a port, such as 0.0.0.0:7070 or [::1]:7070"))
}

fn place((socket, passive): (Option<PathBuf>, Vec<PathBuf>), remote: Remote, fds: Fds, jailed: bool) -> Result<Place> {
    if !passive.is_empty() {
        // Its machine keeps it apart from others.
        return match socket.is_none() && remote.listen.is_none() && fds == Fds::default() && !jailed {
            true => Ok(Place::Passive(passive)),
            false => bail!("--passive is for itself: leave out --socket, --listen, --jail and descriptors"),
        };
    }
    let with_tls = remote.certificate.is_some() || remote.key.is_some() || remote.clients.is_some();
    let no_fds = fds == Fds::default();
    match (socket, remote.listen, fds) {
        _ if remote.listen.is_none() && (with_tls || remote.without_tls) => {
            bail!("--tls-cert, --tls-key, --tls-client-ca and --without-tls are for --listen")
        }
        (Some(socket), None, _) if no_fds => Ok(Place::Host(socket)),
        (None, Some(listen), _) if no_fds => Ok(Place::Remote(listen, remote.certificates(listen)?)),
        (None, None, _) if no_fds => {
            bail!("--socket is missing: the path that clients connect to; --help shows examples")
        }
        (None, None, fds) => match fds.whole() {
            Some(fds) => Ok(Place::Guest(fds)),
            None => bail!("{TOGETHER}"),
        },
        _ => bail!("{TOGETHER}"),
    }
}

impl Remote {
    /// Nothing is for who may go without, and says so where others could listen.
    fn certificates(self, listen: SocketAddr) -> Result<Option<Certificates>> {
        match (self.certificate, self.key, self.without_tls) {
            (Some(certificate), Some(key), false) => Ok(Some(Certificates {
                own: Identity { certificate, key },
                clients: self.clients,
            })),
            (None, None, without) if self.clients.is_none() && (without || listen.ip().is_loopback()) => Ok(None),
            (None, None, _) => bail!(
                "--listen {listen}: others could read and change what travels, and be served; give --tls-cert and --tls-key, \
                 or --without-tls in a network where that is right"
            ),
            (_, _, true) => bail!("--without-tls and certificates: leave one of the two out"),
            _ => bail!("give --tls-cert and --tls-key together"),
        }
    }
}

/// A number of microseconds.
fn micros(parser: &mut lexopt::Parser) -> Result<Duration> {
    let micros: u32 = lexopt::ValueExt::parse(&parser.value()?)?;
    Ok(Duration::from_micros(micros.into()))
}

/// Names with commas.
fn list(names: &str) -> Result<Vec<Transport>> {
    let found: Result<Vec<Transport>, _> = names.split(',').map(str::parse).collect();
    found.with_context(|| format!("--transports {names}"))
}

#[cfg(test)]
mod tests;
