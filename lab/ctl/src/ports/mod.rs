//! Ports of this machine that lead into the lab, for as long as something in the lab publishes them. A process of ours
//! sees to it, which ends when nothing is published any more, and with the lab.
//!
//! ```text
//!  a program in the lab ── what is published, a line at each change ──▶ serve-ports ── hostfwd_add, _remove ──▶ emulator
//!  whoever makes a sandbox ── reserves ports, by forward.sock ────────────▲
//! ```
//! The program in the lab is named by whoever asks first; this one knows what it prints, and not what it is.
//! What is forwarded is kept by the emulator alone: a `serve-ports` that was killed leaves its ports open, and the next one
//! goes on with them.

mod forward;
mod table;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use agent_api::{Event, ExecRequest, Input};
use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};

use crate::remote;
use crate::state::{Lab, State};
use forward::{Emulator, Forward};
use table::Table;

/// How long the program in the lab may take to say what is published, on a lab that is busy.
const LIST_PATIENCE: Duration = Duration::from_secs(15);

/// How long a client may take to say what it wants.
const REQUEST_PATIENCE: Duration = Duration::from_secs(10);

/// Before the program in the lab is started again that has ended.
const PAUSE: Duration = Duration::from_secs(1);

/// How often it is looked whether there is anything left to do.
const IDLE: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// The longest line that is taken from anybody.
const MOST_LINE: u64 = 1 << 20;

/// How the server is reached.
#[derive(Debug, Serialize)]
pub(crate) struct Server {
    /// A socket that takes one [`Request`] a connection, as a line of JSON.
    pub(crate) socket: std::path::PathBuf,
}

/// What a client wants: these ports, until it hangs up.
#[derive(Debug, Deserialize)]
struct Request {
    /// Who has them already, maybe.
    owner: Option<String>,
    ports: Vec<String>,
}

/// What the program in the lab prints, a line each.
#[derive(Debug, Deserialize)]
struct List {
    /// The number that was last asked with.
    answer: u64,
    published: Vec<Published>,
}

#[derive(Debug, Deserialize)]
struct Published {
    owner: String,
    ports: Vec<String>,
}

/// Sees to it that ports can be reserved; says where.
pub(crate) fn ensure_served(state: &State, program: &[OsString]) -> Result<Server> {
    let socket = state.forward_socket();
    let _lock = state.lock(Duration::from_secs(60), || ())?;
    if UnixStream::connect(&socket).is_ok() {
        return Ok(Server { socket });
    }
    let log = state.ports_log();
    let file = File::options().append(true).create(true).mode(0o600).open(&log)?;
    let mut child = Command::new(std::env::current_exe()?)
        .arg("serve-ports")
        .arg("--")
        .args(program)
        .env("BASALT_LAB_STATE", state.directory())
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(file)
        .spawn()
        .context("basalt-lab cannot be started")?;
    let mut line = String::new();
    let output = child.stdout.take().context("it has no output")?;
    BufReader::new(output).read_line(&mut line)?;
    if line.is_empty() {
        let status = child.wait()?;
        bail!("ports cannot be forwarded ({status}); {} says why", log.display());
    }
    Ok(Server { socket })
}

/// Forwards ports until there are none, or no lab. Prints a line once they can be reserved.
pub(crate) fn serve(state: &State, lab: &Lab, program: &[OsString]) -> Result<()> {
    // Whoever started it goes on; Ctrl-C is for him.
    rustix::process::setsid()?;
    let pid = i32::try_from(lab.pid).ok().and_then(Pid::from_raw);
    let emulator = pidfd_open(pid.context("the lab has no process")?, PidfdFlags::empty())?;
    let agent = lab.address.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
    let rules = Emulator::new(state, agent.context("the lab's address has no port")?);
    let socket = state.forward_socket();
    match std::fs::remove_file(&socket) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    let listener = UnixListener::bind(&socket)?;
    let served = Arc::new(Served::new(Table::new(rules)?));
    let listening = {
        let (served, lab, program) = (Arc::clone(&served), lab.clone(), program.to_vec());
        move || served.listen(&lab, &program)
    };
    thread::Builder::new().name("published".into()).spawn(listening)?;
    crate::print("ready")?;
    loop {
        let mut fds = [
            PollFd::new(&listener, PollFlags::IN),
            PollFd::new(&emulator, PollFlags::IN),
        ];
        match poll(&mut fds, Some(&IDLE)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => (),
            Err(error) => return Err(error.into()),
        }
        let (comes, over) = (!fds[0].revents().is_empty(), !fds[1].revents().is_empty());
        if over {
            return Ok(());
        }
        if comes {
            let (stream, _) = listener.accept()?;
            served.clients.fetch_add(1, Ordering::AcqRel);
            let served = Arc::clone(&served);
            thread::Builder::new().name("client".into()).spawn(move || {
                if let Err(error) = served.client(stream) {
                    eprintln!("basalt-lab: a client that reserves ports: {error:#}");
                }
                served.clients.fetch_sub(1, Ordering::AcqRel);
            })?;
        } else if served.is_idle() {
            // Who connects from here on finds nobody, and starts another.
            std::fs::remove_file(&socket)?;
            return Ok(());
        }
    }
}

/// What the threads share.
struct Served {
    known: Mutex<Known>,
    changed: Condvar,
    clients: AtomicUsize,
    reservations: AtomicU64,
}

struct Known {
    table: Table<Emulator>,
    /// The input of the program in the lab, while it runs.
    program: Option<Input<TcpStream>>,
    /// The last number that it was asked with.
    asked: u64,
    /// The last number that it has answered.
    answered: Option<u64>,
}

impl Served {
    fn new(table: Table<Emulator>) -> Self {
        let known = Known {
            table,
            program: None,
            asked: 0,
            answered: None,
        };
        Self {
            known: Mutex::new(known),
            changed: Condvar::new(),
            clients: AtomicUsize::new(0),
            reservations: AtomicU64::new(0),
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_idle(&self) -> bool {
        let known = self.known();
        // Before the first list what is forwarded may be wanted.
        known.answered.is_some() && known.table.is_empty() && self.clients.load(Ordering::Acquire) == 0
    }

    /// Hears the program in the lab, which is started again whenever it ends. Ends with the process.
    fn listen(&self, lab: &Lab, program: &[OsString]) {
        loop {
            if let Err(error) = self.hear(lab, program) {
                eprintln!("basalt-lab: lost the list of published ports, asking again: {error:#}");
            }
            self.known().program = None;
            thread::sleep(PAUSE);
        }
    }

    fn hear(&self, lab: &Lab, program: &[OsString]) -> Result<()> {
        let mut remote = remote::connect(lab)?;
        let request = ExecRequest {
            argv: program.iter().map(|word| word.as_os_str().into()).collect(),
            env: vec![remote::PATH.into(), "HOME=/root".into()],
            cwd: "/".into(),
            stdin: true,
            ..ExecRequest::default()
        };
        let mut running = remote.exec(&request)?;
        self.known().program = Some(running.input.clone());
        let mut waiting = Vec::new();
        loop {
            match running.output.next()? {
                Event::Stdout(bytes) => waiting.extend_from_slice(bytes),
                Event::Stderr(bytes) => std::io::stderr().write_all(bytes)?,
                Event::Closed(_) => {}
                Event::Exited(status) => bail!("the program in the lab has ended ({status:?})"),
            }
            while let Some(end) = waiting.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = waiting.drain(..=end).collect();
                self.heard(&line)?;
            }
            ensure!(waiting.len() < usize::try_from(MOST_LINE)?, "its line does not end");
        }
    }

    fn heard(&self, line: &[u8]) -> Result<()> {
        let list: List = serde_json::from_slice(line).context("the program in the lab prints something else")?;
        let published = published(&list.published);
        let mut known = self.known();
        known.table.publish(published);
        // A change that is told by itself has the number 0.
        known.answered = known.answered.max(Some(list.answer));
        drop(known);
        self.changed.notify_all();
        Ok(())
    }

    /// Asks the program in the lab what is published now, and waits for its answer.
    fn refresh(&self) {
        let end = Instant::now() + LIST_PATIENCE;
        let mut known = self.known();
        let mut wanted = None;
        loop {
            if wanted.is_none()
                && let Some(program) = known.program.clone()
            {
                known.asked += 1;
                wanted = Some(known.asked);
                if let Err(error) = program.write(format!("{}\n", known.asked).as_bytes()) {
                    eprintln!("basalt-lab: the program in the lab is not to be asked: {error}");
                }
            }
            if wanted.is_some() && known.answered >= wanted {
                return;
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                eprintln!("basalt-lab: the program in the lab has not said within {LIST_PATIENCE:?} what is published");
                return;
            }
            let pause = left.min(Duration::from_millis(100));
            (known, _) = self
                .changed
                .wait_timeout(known, pause)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Reserves ports for a client until it hangs up.
    fn client(&self, stream: UnixStream) -> Result<()> {
        stream.set_read_timeout(Some(REQUEST_PATIENCE))?;
        let mut line = String::new();
        BufReader::new((&stream).take(MOST_LINE)).read_line(&mut line)?;
        if line.is_empty() {
            // Who only looks whether somebody is there.
            return Ok(());
        }
        let number = self.reservations.fetch_add(1, Ordering::AcqRel);
        let reserved = self.reserve(number, &line);
        let answer = match &reserved {
            Ok(()) => serde_json::json!({ "reserved": true }),
            Err(error) => serde_json::json!({ "error": format!("{error:#}") }),
        };
        let told = writeln!(&stream, "{answer}");
        if reserved.is_err() {
            return Ok(told?);
        }
        let waited = told.and_then(|()| {
            stream.set_read_timeout(None)?;
            // Nothing comes but its end.
            (&stream).read(&mut [0])
        });
        // What has become of it is published by now, or never will be.
        self.refresh();
        self.known().table.release(number);
        waited.map(drop).context("waiting for its end")
    }

    fn reserve(&self, number: u64, line: &str) -> Result<()> {
        let request: Request = serde_json::from_str(line).context("the packet is not a request")?;
        let ports: Vec<Forward> = request.ports.iter().map(|port| port.parse()).collect::<Result<_>>()?;
        let owner = request.owner.as_deref();
        // The sandbox that has one may just have ended.
        let is_taken = self.known().table.is_taken(owner, &ports);
        if is_taken {
            self.refresh();
        }
        self.known().table.reserve(number, owner, &ports)
    }
}

/// What is published, by port. A port that cannot be forwarded is told and left out.
fn published(list: &[Published]) -> BTreeMap<Forward, String> {
    let mut ports = BTreeMap::new();
    for one in list {
        for port in &one.ports {
            match port.parse() {
                Ok(port) => drop(ports.insert(port, one.owner.clone())),
                Err(error) => eprintln!("basalt-lab: {}: {error:#}", one.owner),
            }
        }
    }
    ports
}
