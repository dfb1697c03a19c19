//! Long work that a signal ends in order. Knows nothing of what the work is.

use std::fmt;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;

use agent_api::Signals;
use anyhow::{Context, Result};
use registry::Cancel;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};

/// The work was ended by a signal, whose number this is.
#[derive(Debug)]
pub(crate) struct Interrupted(i32);

impl Interrupted {
    /// By the signal of this number.
    pub(crate) fn by(number: i32) -> Self {
        Self(number)
    }

    /// The exit code that shells give for the signal.
    pub(crate) fn exit_code(&self) -> u8 {
        u8::try_from(self.0).unwrap_or(0).saturating_add(128)
    }
}

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ended by signal {}", self.0)
    }
}

impl std::error::Error for Interrupted {}

/// Does `work`, which is to end soon after it is cancelled. The first signal cancels it, a second one ends the program as it
/// ends any. Work that fails after a signal has been interrupted, whatever it says.
pub(crate) fn until_signal<T>(work: impl FnOnce(&Cancel) -> Result<T>) -> Result<T> {
    let signals = Signals::install()?;
    let cancel = Cancel::default();
    let caught = AtomicI32::new(0);
    let (over, done) = pipe_with(PipeFlags::CLOEXEC).context("making a pipe")?;
    let outcome = thread::scope(|scope| {
        let watch = || {
            if let Some(number) = signal(&signals, &over) {
                caught.store(number, Ordering::Release);
                cancel.cancel();
                // With it the handlers go.
                drop(signals);
            }
        };
        thread::Builder::new()
            .name("signals".into())
            .spawn_scoped(scope, watch)
            .context("starting a thread")?;
        // Closed also if the work panics, or the thread would be waited for without end.
        let _done = done;
        work(&cancel)
    });
    outcome.map_err(|error| match caught.load(Ordering::Acquire) {
        0 => error,
        number => error.context(Interrupted(number)),
    })
}

/// The signal that comes before `over` is closed.
fn signal(signals: &Signals, over: &impl AsFd) -> Option<i32> {
    loop {
        let (signal, over) = (signals.as_fd(), over.as_fd());
        let mut fds = [PollFd::new(&signal, PollFlags::IN), PollFd::new(&over, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => (),
            Err(error) => {
                log::warn!("signals cannot be waited for: {error}");
                return None;
            }
        }
        let is_over = !fds[1].revents().is_empty();
        while let Some(number) = signals.take() {
            if number != libc::SIGWINCH {
                return Some(number);
            }
        }
        if is_over {
            return None;
        }
    }
}
