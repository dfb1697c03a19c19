//! A command in a gateway's sandbox, joined to this terminal. Knows neither how the sandbox came to be nor what is done with it afterwards.
//!
//! ```text
//!  this thread:    what comes of the command ─► local stdout, stderr        until it has ended
//!  events:         the gateway's stream ─► this thread                      until its end
//!  input:          local stdin ─► the gateway, one request                  until end of file or the end
//!  signals:        caught signals ─► requests; the time limit               until the end
//! ```
//!
//! The threads `events` and `input` may wait for the gateway when the command has ended; they end with this program.

use std::io::{self, IsTerminal, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use agent_api::{RawMode, Signals, local_tty, window_size};
use anyhow::{Context, Result, bail};
use gateway_client::{Access, Client, End, Error, Event, Events, Piece, Signal, Start};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

use crate::interrupt::Interrupted;

/// Between SIGTERM and SIGKILL when a command's time is over, and until it is given up.
const GRACE: Duration = Duration::from_secs(2);

/// Input that is quiet for so long says that it goes on.
const QUIET: Duration = Duration::from_secs(20);

/// Read of standard input at once.
const CHUNK: usize = 64 << 10;

/// How often is looked for a signal while something is being started, and whether a command is given up.
pub(super) const SHORTLY: Duration = Duration::from_millis(20);
const LOOK: Duration = Duration::from_millis(500);

/// How a command came to its end.
#[derive(Debug)]
pub(super) enum Finished {
    /// By itself, or by a signal: this is the exit code.
    Exited(u8),
    /// Its time was over.
    TimedOut,
    /// It never started: the exit code, and why.
    Refused(u8, Error),
    /// The connection broke: the sandbox, or the gateway, may be gone.
    Lost(Error),
}

/// What the other threads tell this one.
enum Notice {
    Came(Result<Event, Error>),
    /// Standard input could not be read.
    InputFailed(Error),
}

/// What the threads share.
#[derive(Clone)]
struct Shared {
    client: Arc<Client>,
    to: Access,
    pid: u32,
    user: Option<String>,
    terminal: bool,
    /// Can be read once the command has ended.
    over: Arc<OwnedFd>,
}

/// The exit code of a command that was not started, as `basalt run` has it elsewhere.
fn code_of(error: &Error) -> u8 {
    let Error::Call { code, message } = error else {
        return 125;
    };
    let says = |word: &str| message.contains(word);
    match code.as_str() {
        "permission_denied" => 126,
        "not_found" => 127,
        _ if says("ermission denied") || says("cannot be executed") => 126,
        _ if says("not found") || says("o such file") => 127,
        _ => 125,
    }
}

/// The terminal that the command is to have.
pub(super) fn terminal() -> (u16, u16) {
    let size = local_tty().size;
    (size.cols, size.rows)
}

/// Runs a command to its end.
pub(super) fn run(
    client: &Arc<Client>,
    to: &Access,
    start: &Start,
    signals: &Signals,
    limit: Option<Duration>,
) -> Result<Finished> {
    let began = Instant::now();
    let (tell, told) = sync_channel(16);
    let (asks, of, what) = (Arc::clone(client), to.clone(), start.clone());
    let from = tell.clone();
    spawn("events", move || match asks.start(&of, &what) {
        Ok(events) => pass_on(events, &from),
        // Nobody waits for it any more.
        Err(error) => drop(from.send(Notice::Came(Err(error)))),
    })?;
    let pid = match started(&told, signals)? {
        Ok(Event::Started(pid)) => pid,
        Ok(other) => bail!(
            "{} told {other:?} of a command before its start: is it a gateway?",
            client.server()
        ),
        Err(error @ Error::Call { .. }) => return Ok(Finished::Refused(code_of(&error), error)),
        Err(error) => return Ok(Finished::Lost(error)),
    };
    let shared = Shared {
        client: Arc::clone(client),
        to: to.clone(),
        pid,
        user: start.user.clone(),
        terminal: start.terminal.is_some(),
        over: Arc::new(eventfd(0, EventfdFlags::CLOEXEC).context("making an eventfd")?),
    };
    let _raw = match shared.terminal && start.stdin {
        true => RawMode::enter(rustix::stdio::stdin())?,
        false => None,
    };
    if start.stdin {
        let shared = shared.clone();
        spawn("input", move || {
            if let Err(error) = feed(&shared) {
                // Nobody waits for it any more where the command has ended.
                drop(tell.send(Notice::InputFailed(error)));
            }
        })?;
    }
    let (timed_out, given_up) = (AtomicBool::new(false), AtomicBool::new(false));
    let deadline = limit.map(|limit| began + limit);
    let finished = thread::scope(|scope| {
        let watch = || forward(signals, &shared, deadline, (&timed_out, &given_up));
        let watcher = thread::Builder::new().name("signals".into()).spawn_scoped(scope, watch);
        watcher.context("starting a thread")?;
        let finished = show(&told, &shared, &given_up);
        rustix::io::write(&*shared.over, &1_u64.to_ne_bytes()).context("ending the threads")?;
        finished
    });
    match finished? {
        _ if timed_out.load(Ordering::Acquire) => Ok(Finished::TimedOut),
        finished => Ok(finished),
    }
}

/// The first that is told; a signal that comes before ends the waiting.
fn started(told: &Receiver<Notice>, signals: &Signals) -> Result<Result<Event, Error>> {
    loop {
        match told.recv_timeout(SHORTLY) {
            Ok(Notice::Came(event)) => return Ok(event),
            Ok(Notice::InputFailed(_)) | Err(_) => {}
        }
        while let Some(number) = signals.take() {
            if number != libc::SIGWINCH {
                bail!(Interrupted::by(number));
            }
        }
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
    let spawned = thread::Builder::new().name(name.into()).spawn(work);
    spawned.map(drop).context("starting a thread")
}

/// Reads the gateway's stream to its end.
fn pass_on(mut events: Events, tell: &SyncSender<Notice>) {
    loop {
        let event = events.wait();
        let is_last = matches!(event, Ok(Event::Ended(_)) | Err(_));
        if tell.send(Notice::Came(event)).is_err() || is_last {
            return;
        }
    }
}

/// Writes what comes, until the command has ended.
fn show(told: &Receiver<Notice>, shared: &Shared, given_up: &AtomicBool) -> Result<Finished> {
    let (mut out, mut err) = (Some(io::stdout()), Some(io::stderr()));
    let mut of_input = None;
    let mut is_first = true;
    let finished = loop {
        let notice = match told.recv_timeout(LOOK) {
            Ok(notice) => notice,
            Err(_) if given_up.load(Ordering::Acquire) => break Finished::TimedOut,
            Err(_) => continue,
        };
        match notice {
            Notice::Came(Ok(Event::Output(bytes))) => {
                write(&mut out, &bytes, shared)?;
                if std::mem::take(&mut is_first) {
                    observe::marks::mark(agent_api::FIRST_OUTPUT);
                }
            }
            Notice::Came(Ok(Event::Error(bytes))) => write(&mut err, &bytes, shared)?,
            Notice::Came(Ok(Event::Ended(End::Code(code)))) => {
                break Finished::Exited(u8::try_from(code & 0xff).unwrap_or(u8::MAX));
            }
            Notice::Came(Ok(Event::Ended(End::Signal(number)))) => break Finished::Exited(number.saturating_add(128)),
            Notice::Came(Ok(Event::Started(_))) => {}
            Notice::Came(Err(error)) => break Finished::Lost(error),
            Notice::InputFailed(error) => of_input = Some(error),
        }
    };
    match of_input {
        Some(error) => Err(error.into()),
        None => Ok(finished),
    }
}

/// A reader that has gone is told to the command as it would be here: by SIGPIPE.
fn write<W: Write>(to: &mut Option<W>, bytes: &[u8], shared: &Shared) -> Result<()> {
    let Some(stream) = to else { return Ok(()) };
    match stream.write_all(bytes).and_then(|()| stream.flush()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            *to = None;
            if let Err(error) = signal(shared, libc::SIGPIPE) {
                log::info!("the command was not told that nobody reads it: {error}");
            }
            Ok(())
        }
        Err(error) => Err(error).context("writing the command's output"),
    }
}

/// Sends standard input, and closes the command's where it ends.
fn feed(shared: &Shared) -> Result<(), Error> {
    let mut ended = false;
    let mut next = || {
        let piece = piece(shared)?;
        ended |= matches!(&piece, Some(bytes) if bytes.is_empty());
        Ok(match piece {
            Some(bytes) if bytes.is_empty() => Piece::End,
            Some(bytes) => Piece::Bytes(bytes),
            None if is_over(shared) => Piece::End,
            None => Piece::Quiet,
        })
    };
    let fed = shared.client.feed(&shared.to, shared.pid, shared.terminal, &mut next);
    if fed.is_ok() && (!ended || shared.terminal) {
        return Ok(());
    }
    // The command must not wait for input that will never come. One that is not there any more, or whose input is closed, has no use for it.
    let closed = match shared.terminal {
        true => Ok(()),
        false => shared.client.close_input(&shared.to, shared.pid),
    };
    match (fed, closed) {
        // What is typed when a command has ended a moment ago.
        (Err(error @ Error::Call { .. }), _) if shared.terminal => {
            log::info!("input went nowhere: {error}");
            Ok(())
        }
        (Err(error @ Error::Local(_)), _) | (Err(error), Ok(())) => Err(error),
        (_, Err(error)) => {
            log::info!("the end of input was not told: {error}");
            Ok(())
        }
        (Ok(()), Ok(())) => Ok(()),
    }
}

fn is_over(shared: &Shared) -> bool {
    let mut fds = [PollFd::new(&*shared.over, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

/// What standard input has, which is empty at its end; `None` after a while, or when the command has ended.
fn piece(shared: &Shared) -> io::Result<Option<Vec<u8>>> {
    let stdin = rustix::stdio::stdin();
    loop {
        let mut fds = [
            PollFd::new(&*shared.over, PollFlags::IN),
            PollFd::new(&stdin, PollFlags::IN),
        ];
        match poll(&mut fds, Some(&timespec(QUIET))) {
            Ok(0) => return Ok(None),
            Ok(_) if !fds[0].revents().is_empty() => return Ok(None),
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(errno.into()),
        }
        let mut buffer = vec![0; CHUNK];
        match rustix::io::read(stdin, &mut buffer) {
            Ok(got) => {
                buffer.truncate(got);
                return Ok(Some(buffer));
            }
            Err(Errno::INTR | Errno::AGAIN) => {}
            // A terminal that hung up.
            Err(Errno::IO) if stdin_is_terminal() => return Ok(Some(Vec::new())),
            Err(errno) => return Err(errno.into()),
        }
    }
}

fn stdin_is_terminal() -> bool {
    io::stdin().is_terminal()
}

fn timespec(time: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: time.subsec_nanos().into(),
    }
}

/// Passes signals on, until the command has ended; ends it when its time is over.
fn forward(
    signals: &Signals,
    shared: &Shared,
    mut deadline: Option<Instant>,
    (timed_out, given_up): (&AtomicBool, &AtomicBool),
) {
    let mut last = [libc::SIGTERM, libc::SIGKILL].into_iter();
    loop {
        let caught = signals.as_fd();
        let mut fds = [
            PollFd::new(&*shared.over, PollFlags::IN),
            PollFd::new(&caught, PollFlags::IN),
        ];
        let left = deadline.map(|deadline| timespec(deadline.saturating_duration_since(Instant::now())));
        match poll(&mut fds, left.as_ref()) {
            Ok(0) => {}
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return,
        }
        if !fds[0].revents().is_empty() {
            return;
        }
        if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            timed_out.store(true, Ordering::Release);
            match last.next() {
                Some(number) => send(shared, number),
                None => return given_up.store(true, Ordering::Release),
            }
            deadline = Some(Instant::now() + GRACE);
        }
        while let Some(number) = signals.take() {
            if number != libc::SIGWINCH {
                send(shared, number);
            } else if shared.terminal
                && let Some(size) = window_size(rustix::stdio::stdin()).or_else(|| window_size(rustix::stdio::stdout()))
                && let Err(error) = shared.client.resize(&shared.to, shared.pid, (size.cols, size.rows))
            {
                log::info!("the terminal's new size was not told: {error}");
            }
        }
    }
}

fn send(shared: &Shared, number: i32) {
    if let Err(error) = signal(shared, number) {
        log::warn!("signal {number} did not reach the command: {error}");
    }
}

/// Sends a signal. The API has words for two; others are sent by a command beside it, which all images with a shell have.
fn signal(shared: &Shared, number: i32) -> Result<(), Error> {
    let of_api = match number {
        libc::SIGTERM => Signal::Term,
        libc::SIGKILL => Signal::Kill,
        _ => {
            let start = Start {
                argv: [
                    "/bin/sh".to_owned(),
                    "-c".to_owned(),
                    format!("kill -{number} {}", shared.pid),
                ]
                .into(),
                user: shared.user.clone(),
                ..Start::default()
            };
            let mut events = shared.client.start(&shared.to, &start)?;
            while !matches!(events.wait()?, Event::Ended(_)) {}
            return Ok(());
        }
    };
    shared.client.signal(&shared.to, shared.pid, of_api)
}
