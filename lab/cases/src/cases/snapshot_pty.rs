//! Busy terminals under the case `snapshot`. A program on one writes records in sequence all the time and answers each that is
//! typed; whoever is at the other end types in sequence, too, and both see whether anything is lost, doubled or changed.
//!
//! One terminal is within the guest: both of its ends go through every snapshot and restore. The other is that of a command
//! (`exec -t`), whose client is here and stays where the machine goes on after its snapshot.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{fs::File, thread};

use agent_api::{Connection, Event, ExecRequest, Tty, WinSize};
use anyhow::{Context, Result, bail, ensure};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};

use super::snapshot::CASE;
use crate::vm::GUEST_HALF;

/// The argument with which the guest half is the program on the terminal.
pub(super) const PROGRAM: &str = "typewriter";

/// A record: what it is, nine digits, a line feed.
const RECORD: usize = 11;
/// Written by the program itself; its answer to what was typed; typed; and the last that is typed.
const OWN: u8 = b'o';
const ANSWER: u8 = b'a';
const TYPED: u8 = b't';
const END: u8 = b'e';

/// Between two records of each side. Each is a timer, of which an emulated host bears some hundreds a second.
const PAUSE: Duration = Duration::from_millis(10);

/// Records that have come through the terminal within the guest: the program's own, and answers.
static OWN_SEEN: AtomicU64 = AtomicU64::new(0);
static ANSWERS_SEEN: AtomicU64 = AtomicU64::new(0);

/// Both.
pub(super) fn progress() -> (u64, u64) {
    (OWN_SEEN.load(Ordering::SeqCst), ANSWERS_SEEN.load(Ordering::SeqCst))
}

fn record(kind: u8, number: u64) -> Vec<u8> {
    format!("{}{number:09}\n", char::from(kind)).into_bytes()
}

/// Sees whether records come one after the other.
#[derive(Default)]
struct Checker {
    rest: Vec<u8>,
    own: u64,
    answers: u64,
    ended: bool,
}

impl Checker {
    fn take(&mut self, bytes: &[u8]) -> Result<()> {
        self.rest.extend(bytes);
        while self.rest.len() >= RECORD {
            let whole: Vec<u8> = self.rest.drain(..RECORD).collect();
            let kind = whole[0];
            let count = match kind {
                OWN => &mut self.own,
                ANSWER => &mut self.answers,
                END => {
                    self.ended = true;
                    continue;
                }
                _ => bail!("{:?} is no record", String::from_utf8_lossy(&whole)),
            };
            ensure!(
                whole == record(kind, *count),
                "{:?} came, not number {count}",
                String::from_utf8_lossy(&whole)
            );
            *count += 1;
        }
        Ok(())
    }
}

/// The program on the terminal, until it is told to end.
pub(super) fn program() -> Result<()> {
    let stdin = rustix::stdio::stdin();
    let mut attributes = tcgetattr(stdin)?;
    attributes.make_raw();
    tcsetattr(stdin, OptionalActions::Now, &attributes)?;
    let mut output = File::from(rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), 0)?);
    let mut own = output.try_clone()?;
    thread::spawn(move || {
        // Whole records: no other comes between in one write to a terminal.
        for number in 0.. {
            if own.write_all(&record(OWN, number)).is_err() {
                return;
            }
            thread::sleep(PAUSE);
        }
    });
    let mut input = File::from(rustix::io::fcntl_dupfd_cloexec(stdin, 0)?);
    let mut typed = [0; RECORD];
    for number in 0.. {
        input.read_exact(&mut typed)?;
        if typed[0] == END {
            break;
        }
        ensure!(
            typed[..] == record(TYPED, number)[..],
            "{:?} was read, not number {number}",
            String::from_utf8_lossy(&typed)
        );
        output.write_all(&record(ANSWER, number))?;
    }
    Ok(output.write_all(&record(END, 0))?)
}

/// The terminal within the guest, for ever.
pub(super) fn load() -> Result<()> {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY)?;
    grantpt(&master)?;
    unlockpt(&master)?;
    let name = ptsname(&master, Vec::new())?;
    let other = File::options().read(true).write(true).open(name.to_str()?)?;
    let mut attributes = tcgetattr(&other)?;
    attributes.make_raw();
    tcsetattr(&other, OptionalActions::Now, &attributes)?;
    let mut child = Command::new(GUEST_HALF)
        .args(["guest", CASE.name, PROGRAM])
        .stdin(Stdio::from(other.try_clone()?))
        .stdout(Stdio::from(other))
        .stderr(Stdio::inherit())
        .spawn()?;
    let master: OwnedFd = master;
    let mut keys = File::from(master.try_clone()?);
    let typist = thread::spawn(move || -> Result<()> {
        for number in 0.. {
            keys.write_all(&record(TYPED, number))?;
            thread::sleep(PAUSE);
        }
        Ok(())
    });
    let mut screen = File::from(master);
    let mut checker = Checker::default();
    let mut buffer = [0; 4096];
    loop {
        let length = screen.read(&mut buffer).context("reading the terminal")?;
        if length == 0 || typist.is_finished() {
            bail!("the terminal has ended: its program with {:?}", child.try_wait()?);
        }
        checker.take(buffer.get(..length).unwrap_or_default())?;
        OWN_SEEN.store(checker.own, Ordering::SeqCst);
        ANSWERS_SEEN.store(checker.answers, Ordering::SeqCst);
    }
}

/// A command's terminal, with somebody at it.
pub(super) struct Typist {
    seen: Arc<(AtomicU64, AtomicU64)>,
    done: Arc<AtomicBool>,
    thread: JoinHandle<Result<()>>,
}

impl Typist {
    /// Begins a command on a terminal, over a connection of its own.
    pub(super) fn begin(agent: Connection<UnixStream>) -> Self {
        let (seen, done) = (Arc::default(), Arc::default());
        let (sees, ends) = (Arc::clone(&seen), Arc::clone(&done));
        let thread = thread::spawn(move || sit(agent, &sees, &ends));
        Self { seen, done, thread }
    }

    /// Waits for so many more records each way.
    pub(super) fn goes_on(&self, patience: Duration) -> Result<()> {
        let count = || (self.seen.0.load(Ordering::SeqCst), self.seen.1.load(Ordering::SeqCst));
        let (first, end) = (count(), Instant::now() + patience);
        while count().0 < first.0 + 20 || count().1 < first.1 + 20 {
            ensure!(!self.thread.is_finished(), "the terminal has ended after {:?}", count());
            ensure!(Instant::now() < end, "the terminal stands still at {:?}", count());
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Has the program end, and sees that all that was typed was answered.
    pub(super) fn end(self) -> Result<()> {
        self.done.store(true, Ordering::SeqCst);
        self.thread
            .join()
            .map_err(|_| anyhow::anyhow!("the thread at the terminal panicked"))?
    }
}

fn sit(mut agent: Connection<UnixStream>, seen: &(AtomicU64, AtomicU64), done: &AtomicBool) -> Result<()> {
    let request = ExecRequest {
        argv: [GUEST_HALF, "guest", CASE.name, PROGRAM].map(Into::into).to_vec(),
        tty: Some(Tty {
            size: WinSize { rows: 24, cols: 80 },
            term: None,
        }),
        stdin: true,
        ..ExecRequest::default()
    };
    let running = agent.exec(&request)?;
    let (mut output, input) = (running.output, running.input);
    let mut checker = Checker::default();
    // What is typed before the program has made its terminal raw would be echoed: it is when it has said something.
    while checker.own == 0 {
        match output.next()? {
            Event::Stdout(bytes) => checker.take(bytes)?,
            other => bail!("{other:?} before any output"),
        }
    }
    thread::scope(|scope| {
        let typist = scope.spawn(|| -> Result<u64> {
            let mut number = 0;
            while !done.load(Ordering::SeqCst) {
                input.write(&record(TYPED, number))?;
                number += 1;
                thread::sleep(PAUSE);
            }
            input.write(&record(END, 0))?;
            Ok(number)
        });
        let mut read = || loop {
            match output.next()? {
                Event::Stdout(bytes) | Event::Stderr(bytes) => checker.take(bytes)?,
                Event::Closed(_) => {}
                Event::Exited(status) => return anyhow::Ok(status),
            }
            seen.0.store(checker.own, Ordering::SeqCst);
            seen.1.store(checker.answers, Ordering::SeqCst);
        };
        let status = read();
        // Whatever it was, nobody is to type on.
        done.store(true, Ordering::SeqCst);
        let status = status?;
        let typed = typist.join().map_err(|_| anyhow::anyhow!("the typist panicked"))??;
        ensure!(status.exit_code() == 0, "the program ended with {status:?}");
        ensure!(
            checker.ended && checker.answers == typed,
            "{typed} records were typed, {} answered",
            checker.answers
        );
        Ok(())
    })
}
