//! A lab that stands still: its emulator runs, and nothing in it answers. Noticed by whoever waits for a command in it,
//! and written down before the emulator is ended. Does not know what runs in the lab, nor what becomes of it.

use std::fs;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::monitor::Monitor;
use crate::remote;
use crate::state::{Lab, State};

/// A lab that answered nobody for so long, in seconds, stands still, unless [`PATIENCE`] says otherwise. A busy machine
/// delays an answer by seconds, not by minutes.
const SECONDS: u64 = 150;

/// The variable that says how many seconds it may be.
const PATIENCE: &str = "BASALT_LAB_PATIENCE";

/// How often a lab is asked within that time.
const QUESTIONS: u32 = 5;

/// Asks a lab for as long as it lives.
pub(crate) struct Watch {
    stands_still: Arc<AtomicBool>,
    _end: Sender<()>,
}

impl Watch {
    /// Begins to ask; a lab that stands still is written down, and `line`, a connection to it, closed.
    pub(crate) fn begin(state: &State, lab: &Lab, line: TcpStream) -> Result<Self> {
        let patience = patience()?;
        let (state, lab) = (state.clone(), lab.clone());
        let stands_still = Arc::new(AtomicBool::new(false));
        let found = Arc::clone(&stands_still);
        let (end, ended) = mpsc::channel::<()>();
        thread::Builder::new().name("watch".into()).spawn(move || {
            let mut answered = Instant::now();
            while ended.recv_timeout(patience / QUESTIONS) == Err(RecvTimeoutError::Timeout) {
                match remote::ask(&lab) {
                    Ok(()) => answered = Instant::now(),
                    Err(_) if answered.elapsed() < patience => {}
                    Err(_) => {
                        found.store(true, Ordering::Release);
                        tell(&state);
                        // A line that is closed already has told its end.
                        drop(line.shutdown(Shutdown::Both));
                        return;
                    }
                }
            }
        })?;
        Ok(Self {
            stands_still,
            _end: end,
        })
    }

    /// Whether the lab was found to stand still.
    pub(crate) fn found(&self) -> bool {
        self.stands_still.load(Ordering::Acquire)
    }
}

fn patience() -> Result<Duration> {
    let seconds = match std::env::var(PATIENCE) {
        Ok(text) => text
            .parse()
            .ok()
            .filter(|seconds| *seconds > 0)
            .with_context(|| format!("{PATIENCE} is {text:?}, and has to be a number of seconds above 0"))?,
        Err(_) => SECONDS,
    };
    Ok(Duration::from_secs(seconds))
}

/// Writes down what the emulated processors do, and says where.
pub(crate) fn tell(state: &State) {
    match record(state) {
        Ok(()) => eprintln!(
            "basalt-lab: what its processors did stands in {}",
            state.standstill().display()
        ),
        Err(error) => eprintln!("basalt-lab: what its processors did is not known: {error:#}"),
    }
}

/// The registers of all processors, twice, a second apart: one that spins and one that waits differ in them.
fn record(state: &State) -> Result<()> {
    let mut monitor = Monitor::open(state)?;
    let mut text = String::new();
    for look in 1..=2 {
        if look == 2 {
            thread::sleep(Duration::from_secs(1));
        }
        for command in ["info status", "info cpus", "info registers -a", "info lapic"] {
            let said = monitor.human(command)?;
            text.push_str(&format!("look {look}: {command}\n{said}\n"));
        }
    }
    let path = state.standstill();
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
}
