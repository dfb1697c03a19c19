//! The way to the daemon: connects to it, and starts it where it does not run. Knows nothing of what it is asked.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use base::ByteSize;
use node_api::{
    Client, ClientError, METRICS_SOCKET, NodeInfo, Promised, Reply, Request, Resource, SOCKET, ZeroedMemory,
};

use rustix::io::Errno;
use wire::packet::PacketError;

use crate::cli::{DaemonArgs, DaemonWhat};
use crate::output::{Output, table};
use crate::places;
use crate::run::environment;

/// How long a daemon may take until it answers: it first puts right what a crash has left.
const START_LIMIT: Duration = Duration::from_secs(60);

/// How long one that was asked to end may take.
const QUIT_LIMIT: Duration = Duration::from_secs(10);

/// How long its metrics may take.
const METRICS_LIMIT: Duration = Duration::from_secs(30);

const PAUSE: Duration = Duration::from_millis(5);

/// Connects to the daemon, started if need be.
pub(crate) fn connect() -> Result<Client> {
    let state = places::state()?;
    let socket = state.join(SOCKET);
    let (mut client, info) = reach(&state, &socket)?;
    if info.replaced && !info.managed {
        // Its program is not the one that lies there now. Its sandboxes run on.
        client.ask(Request::Quit { clean: false })?;
        wait_for_end(&info)?;
        client = start(&state, &socket)?;
    }
    Ok(client)
}

/// The daemon, which has answered. One that ends just now takes connections until its socket is gone, and answers none.
fn reach(state: &Path, socket: &Path) -> Result<(Client, NodeInfo)> {
    let end = Instant::now() + QUIT_LIMIT;
    loop {
        let mut client = match try_connect(socket)? {
            Some(client) => client,
            None => start(state, socket)?,
        };
        match info(&mut client) {
            Err(error) if has_hung_up(&error) && Instant::now() < end => std::thread::sleep(PAUSE),
            answer => return Ok((client, answer?)),
        }
    }
}

fn has_hung_up(error: &anyhow::Error) -> bool {
    use PacketError::{Closed, Io};
    let cause = error.downcast_ref();
    matches!(
        cause,
        Some(ClientError::Packet(Closed | Io(Errno::CONNRESET | Errno::PIPE)))
    )
}

/// Connects to the daemon; one that does not run is started only if `needed` says so of the state directory.
pub(crate) fn connect_if_needed(needed: impl FnOnce(&Path) -> bool) -> Result<Option<Client>> {
    let state = places::state()?;
    if try_connect(&state.join(SOCKET))?.is_none() && !needed(&state) {
        return Ok(None);
    }
    connect().map(Some)
}

/// Asks the same for each, prints those that it was done for, and goes on where one is refused.
pub(crate) fn ask_for_each(names: &[String], output: &Output, request: impl Fn(String) -> Request) -> Result<u8> {
    ask_each_with(connect()?, names, output, request)
}

/// The same by this client.
pub(crate) fn ask_each_with(
    mut client: Client,
    names: &[String],
    output: &Output,
    request: impl Fn(String) -> Request,
) -> Result<u8> {
    let (mut done, mut code) = (Vec::new(), 0);
    for name in names {
        match client.ask(request(name.clone())) {
            Ok(_) => done.push(name),
            Err(ClientError::Refused(error)) => {
                output.error(&error.into());
                code = 1;
            }
            Err(error) => return Err(error.into()),
        }
    }
    output.result(&done, || done.iter().map(|name| format!("{name}\n")).collect())?;
    Ok(code)
}

/// `basalt daemon`.
pub(crate) fn tell(args: &DaemonArgs, output: &Output) -> Result<u8> {
    let mut client = connect()?;
    if let Some(DaemonWhat::Metrics) = args.what {
        return metrics();
    }
    let info = info(&mut client)?;
    if args.stop {
        client.ask(Request::Quit { clean: args.clean })?;
        wait_for_end(&info)?;
    }
    output.result(&info, || {
        let what = if args.stop { "ended" } else { "runs" };
        let first = format!(
            "basaltd {} (process {}) {what}; {} sandboxes run\n",
            info.version, info.pid, info.running
        );
        match args.stop {
            true => first,
            false => first + &promised(&info.promised) + &zeroed(info.zeroed_memory.as_ref()),
        }
    })?;
    Ok(0)
}

/// What sandboxes are promised, as a table.
fn promised(all: &[Promised]) -> String {
    let amount = |one: &Promised, amount: u64| match one.resource {
        Resource::Memory | Resource::Disk => ByteSize(amount).to_string(),
        Resource::Descriptors => amount.to_string(),
    };
    let mut rows = vec![["RESOURCE", "PROMISED", "OF", "OVERCOMMIT"].map(str::to_owned).to_vec()];
    rows.extend(all.iter().map(|one| {
        let overcommit = one.overcommit.clone().unwrap_or_else(|| "-".into());
        let name = one.resource.to_string();
        vec![name, amount(one, one.promised), amount(one, one.total), overcommit]
    }));
    match all {
        [] => String::new(),
        _ => table(&rows),
    }
}

/// Memory that is zeroed ahead, in a line; of a daemon that does so.
fn zeroed(memory: Option<&ZeroedMemory>) -> String {
    memory.map_or_else(String::new, |memory| {
        format!(
            "zeroed memory: {} of {} ready, {} given to sandboxes\n",
            memory.ready, memory.size, memory.handed_out
        )
    })
}

/// What the daemon has of memory that is zeroed ahead, if one runs here that does so. None is started for this.
pub(crate) fn zeroed_memory(state: &Path) -> Option<ZeroedMemory> {
    // Whoever may not ask sees the other findings.
    let mut client = try_connect(&state.join(SOCKET)).ok()??;
    info(&mut client).ok()?.zeroed_memory
}

/// `basalt daemon metrics`: what the daemon's endpoint says, as it says it.
fn metrics() -> Result<u8> {
    let path = places::state()?.join(METRICS_SOCKET);
    let asked = || -> io::Result<String> {
        let directory = node_api::client::directory(&path)?;
        let family = rustix::net::AddressFamily::UNIX;
        let flags = rustix::net::SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(family, rustix::net::SocketType::STREAM, flags, None)?;
        rustix::net::connect(&socket, &node_api::client::address(&path, &directory)?)?;
        let mut stream = UnixStream::from(socket);
        stream.set_read_timeout(Some(METRICS_LIMIT))?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    // As text: an endpoint without room hangs up, which is no closed standard output.
    let answer = asked().map_err(|error| {
        let path = path.display();
        anyhow::anyhow!(
            "the daemon's metrics cannot be read at {path} ({error}): ask again, others may read them just now"
        )
    })?;
    match answer.split_once("\r\n\r\n") {
        Some((head, body)) if head.starts_with("HTTP/1.1 200 ") => {
            io::stdout().write_all(body.as_bytes())?;
            Ok(0)
        }
        _ => bail!("the daemon sent no metrics: others may be reading them at this moment; try again"),
    }
}

/// Connects if a daemon runs.
fn try_connect(socket: &Path) -> Result<Option<Client>> {
    match Client::connect(socket) {
        Ok(client) => Ok(Some(client)),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => Ok(None),
        Err(error) => Err(error).with_context(|| {
            format!(
                "the daemon's socket {} cannot be used: become root or a member of the group basalt, or set BASALT_STATE to a \
                 directory of your own",
                socket.display()
            )
        }),
    }
}

fn info(client: &mut Client) -> Result<NodeInfo> {
    match client.ask(Request::Info)? {
        (Reply::Info(info), _) => Ok(info),
        (other, _) => bail!("the daemon answered {other:?} to `info`: use basalt and basaltd of one build"),
    }
}

fn wait_for_end(info: &NodeInfo) -> Result<()> {
    let end = Instant::now() + QUIT_LIMIT;
    while runs(info.pid) {
        if Instant::now() >= end {
            bail!(
                "the old daemon (process {}) does not end: end it with `kill {0}`",
                info.pid
            );
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

/// A process that has ended and that nobody has reaped yet does not run.
fn runs(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

/// The daemon's program and state directory as the package has them, and its service.
const PACKAGED: (&str, &str) = ("/usr/sbin/basaltd", "/var/lib/basalt");
const SERVICE: &str = "basaltd.service";
const UNITS: [&str; 3] = ["/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"];

/// Whether systemd is to start the daemon: one that is started here would have sandboxes' cgroups where systemd does not
/// expect them.
fn is_service(program: &Path, state: &Path) -> bool {
    let usual = program == Path::new(PACKAGED.0) && state == Path::new(PACKAGED.1);
    // sd_booted(3).
    usual
        && !places::are_chosen()
        && Path::new("/run/systemd/system").is_dir()
        && UNITS
            .iter()
            .any(|directory| Path::new(directory).join(SERVICE).exists())
}

fn start_service(socket: &Path) -> Result<Client> {
    let output = Command::new("systemctl")
        .args(["start", SERVICE])
        .stdin(Stdio::null())
        .output();
    let output = output.context("systemctl cannot be run")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!(
            "`systemctl start {SERVICE}` failed: {}; see `systemctl status {SERVICE}`",
            said.trim()
        );
    }
    try_connect(socket)?.with_context(|| format!("{SERVICE} was started, but does not listen at {}", socket.display()))
}

/// Starts a daemon and waits until it answers. Two may be started at once: then one of them finds the other and ends.
fn start(state: &Path, socket: &Path) -> Result<Client> {
    let program = places::daemon()?;
    if is_service(&program, state) {
        return start_service(socket);
    }
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(state);
    made.with_context(|| {
        format!(
            "{} cannot be made: become root, or set BASALT_STATE to a directory of your own",
            state.display()
        )
    })?;
    let log = state.join("basaltd.log");
    let file = File::options().append(true).create(true).mode(0o600).open(&log);
    let file = file.with_context(|| format!("the daemon's log {} cannot be written", log.display()))?;
    let mut command = Command::new(&program);
    command
        .arg("--state")
        .arg(state)
        .arg("--assets")
        .arg(places::assets())
        .arg("--kvm")
        .arg(places::kvm())
        .args(["--log-level", &log::max_level().as_str().to_ascii_lowercase()])
        .stdin(Stdio::null())
        .stdout(file.try_clone()?)
        .stderr(file)
        .current_dir("/")
        // The terminal's keys are not for it.
        .process_group(0);
    // What this program was passed for a sandbox is not for all that the daemon starts later.
    for (name, _) in std::env::vars_os() {
        if name.as_encoded_bytes().starts_with(environment::PASSED.as_bytes()) {
            command.env_remove(name);
        }
    }
    if let Some(model) = places::cpu_model() {
        command.arg("--cpu-model").arg(model);
    }
    for (flag, value) in places::policies() {
        command.arg(flag).arg(value);
    }
    if !rustix::process::geteuid().is_root() {
        command.arg("--no-users");
    }
    let mut child = command
        .spawn()
        .with_context(|| format!("the daemon {} cannot be started", program.display()))?;
    let end = Instant::now() + START_LIMIT;
    loop {
        if let Some(client) = try_connect(socket)? {
            return Ok(client);
        }
        if ended(&mut child)? && try_connect(socket)?.is_none() {
            bail!("the daemon ended at once: {}", last_line(&log));
        }
        if Instant::now() >= end {
            bail!(
                "the daemon did not answer within {START_LIMIT:?}: see {}",
                log.display()
            );
        }
        std::thread::sleep(PAUSE);
    }
}

fn ended(child: &mut Child) -> Result<bool> {
    Ok(child.try_wait().context("the daemon cannot be waited for")?.is_some())
}

fn last_line(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let line = text.lines().last().unwrap_or("without a word");
    line.strip_prefix("basaltd: ").unwrap_or(line).to_owned()
}
