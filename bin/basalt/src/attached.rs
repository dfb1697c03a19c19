//! A command in a sandbox, joined to this terminal: its streams come from the guest's agent, past the daemon. Knows neither
//! how the sandbox came to be nor what is done with it afterwards.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use agent_api::{Connection, ExecRequest, ExitStatus, Input, LocalIo, Signals, pump};
use anyhow::{Context, Result};
use observe::span::{now_ns, span};

use crate::trace;

/// Between SIGTERM and SIGKILL when a command's time is over.
const TERM_GRACE: Duration = Duration::from_secs(2);

/// How a command came to its end.
#[derive(Debug)]
pub(crate) enum Finished {
    /// By itself, or by a signal.
    Exited(ExitStatus),
    /// Its time was over.
    TimedOut,
    /// It never started.
    Refused(agent_api::ExecFailure),
    /// The connection broke: the sandbox has probably ended.
    Lost(agent_api::Error),
}

/// Runs `request` on a connection that waits for it, to its end.
pub(crate) fn run(
    stream: UnixStream,
    request: &ExecRequest,
    signals: &Signals,
    limit: Option<Duration>,
) -> Result<Finished> {
    let asking = span("command asked for");
    let mut connection = Connection::resume(stream)?;
    let running = match connection.exec(request) {
        Ok(running) => running,
        Err(agent_api::Error::Exec(failure)) => return Ok(Finished::Refused(failure)),
        Err(error @ agent_api::Error::Local { .. }) => return Err(error.into()),
        Err(error) => return Ok(Finished::Lost(error)),
    };
    drop(asking);
    let started_ns = now_ns();
    let timer = limit
        .map(|limit| Timer::start(limit, running.input.clone()))
        .transpose()?;
    let result = pump(running, &LocalIo::std(request.stdin, request.tty.is_some()), signals);
    trace::output(started_ns);
    if timer.is_some_and(Timer::stop) {
        return Ok(Finished::TimedOut);
    }
    match result {
        Ok(status) => Ok(Finished::Exited(status)),
        Err(error @ agent_api::Error::Local { .. }) => Err(error.into()),
        Err(error) => Ok(Finished::Lost(error)),
    }
}

/// Ends a command whose time is over: SIGTERM, then SIGKILL, then the connection.
struct Timer {
    expired: Arc<AtomicBool>,
    done: mpsc::Sender<()>,
    thread: JoinHandle<()>,
}

impl Timer {
    fn start(limit: Duration, input: Input<UnixStream>) -> Result<Self> {
        let expired = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&expired);
        let (done, wait) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("time-limit".into())
            .spawn(move || enforce(limit, &input, &flag, &wait))
            .context("starting a thread")?;
        Ok(Self { expired, done, thread })
    }

    /// Ends the timer; tells whether the time was over.
    fn stop(self) -> bool {
        drop(self.done);
        if self.thread.join().is_err() {
            log::error!("the thread that keeps the time limit panicked");
        }
        self.expired.load(Ordering::Acquire)
    }
}

fn enforce(limit: Duration, input: &Input<UnixStream>, expired: &AtomicBool, done: &mpsc::Receiver<()>) {
    let over = |limit| done.recv_timeout(limit) == Err(mpsc::RecvTimeoutError::Timeout);
    if !over(limit) {
        return;
    }
    expired.store(true, Ordering::Release);
    for (signal, grace) in [(libc::SIGTERM, TERM_GRACE), (libc::SIGKILL, TERM_GRACE)] {
        if let Err(error) = input.signal(signal) {
            log::info!("signal {signal} did not reach the command: {error}");
        }
        if !over(grace) {
            return;
        }
    }
    // A guest that does not even do that is ended with its connection.
    input.hang_up();
}
