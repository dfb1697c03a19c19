//! How large the balloon of a guest is to be whose memory is mapped for functions of the host's piece by piece: it is full when the first of
//! them comes, and smaller as more is mapped. Knows neither the device that is the balloon nor any function.
//!
//! ```text
//!  full ── first function ──▶ what is not in it is mapped ──▶ thread: fill, map the next piece ──▶ ask for a smaller one ──▶ ... until it is wanted
//!                                                               └── refused ──▶ wait, and again: the guest goes on with what it has
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use device::{BalloonedDma, CreateError, DeflateCounts, DmaSpace, ResizeBalloon};

use crate::map_thread::{MapThread, Shared, Task};

/// What a VM has of a balloon that functions do without.
#[derive(Clone)]
pub struct Ballooned {
    /// Asks the guest.
    pub resize: Arc<dyn ResizeBalloon>,
    /// What is mapped, and what is in it.
    pub dma: BalloonedDma,
}

/// How far that is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeflationInfo {
    /// Requests of the guest's.
    pub counts: DeflateCounts,
    /// The guest did not fill its balloon in time, so that what was not in it was mapped before the first function came.
    pub fell_back: bool,
    /// Why nothing is being mapped for now, if more is to be.
    pub error: Option<String>,
}

/// A guest that puts nothing into its balloon for so long is not waited for any more: it may have no driver. Its boot counts.
const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) struct Deflation {
    thread: MapThread<Deflating>,
}

struct Deflating {
    ballooned: Ballooned,
    fillers: usize,
    patience: Duration,
    fell_back: AtomicBool,
}

#[derive(Clone, Default, PartialEq, Eq)]
struct Wants {
    /// What the guest is to do without in the end.
    size: u64,
    /// A function is to come when the balloon is full.
    awaited: bool,
}

/// Waits for a balloon to be full, from whatever thread maps then.
pub(crate) struct Filling(Arc<Shared<Deflating>>);

impl Filling {
    /// Returns when it is, or is not waited for any more.
    pub(crate) fn wait(&self, space: &DmaSpace) {
        let Deflating {
            ballooned,
            patience,
            fell_back,
            ..
        } = &self.0.task;
        let (dma, target) = (&ballooned.dma, ballooned.resize.info().target);
        if !dma.await_inflated(target, space, *patience) {
            fell_back.store(true, Ordering::Relaxed);
            log::warn!(
                "the guest has put {} MiB of {} into its balloon: the rest is mapped for functions of the host's before they come",
                dma.inflated() >> 20,
                target >> 20
            );
        }
    }
}

impl Deflation {
    pub(crate) fn new(ballooned: Ballooned, fillers: usize) -> Self {
        Self::with_patience(ballooned, fillers, PATIENCE)
    }

    fn with_patience(ballooned: Ballooned, fillers: usize, patience: Duration) -> Self {
        let task = Deflating {
            ballooned,
            fillers,
            patience,
            fell_back: AtomicBool::new(false),
        };
        Self {
            thread: MapThread::new(task, Wants::default()),
        }
    }

    pub(crate) fn dma(&self) -> &BalloonedDma {
        &self.thread.task().ballooned.dma
    }

    /// A function is to come.
    pub(crate) fn filling(&self) -> Filling {
        self.thread.state().wants.awaited = true;
        Filling(Arc::clone(self.thread.shared()))
    }

    pub(crate) fn info(&self) -> DeflationInfo {
        DeflationInfo {
            counts: self.dma().counts(),
            fell_back: self.thread.task().fell_back.load(Ordering::Relaxed),
            error: self.thread.state().error.clone(),
        }
    }

    /// Has the guest do without so much in the end: at once if that is more, or nothing is mapped for functions; else as it is mapped.
    ///
    /// # Errors
    /// There is no such size; nothing has changed. Or no thread could be had.
    pub(crate) fn request(&mut self, bytes: u64) -> Result<(), CreateError> {
        self.thread.change(|task, state| {
            let resize = &task.ballooned.resize;
            if !state.ready || bytes >= resize.info().target {
                resize.request(bytes)?;
            }
            state.wants.size = bytes;
            Ok(())
        })
    }

    /// Functions reach what is not in the balloon: from now on that becomes more.
    ///
    /// # Errors
    /// No thread could be had.
    pub(crate) fn go_on(&mut self) -> Result<(), CreateError> {
        self.thread.go_on()
    }

    /// The last function has gone, or none has come after all: the guest may have all of it. Nothing where none was to come: the balloon is
    /// full for the first.
    pub(crate) fn free(&mut self) {
        {
            let state = self.thread.state();
            if !state.ready && !state.wants.awaited {
                return;
            }
        }
        self.thread.end();
        let wanted = {
            let mut state = self.thread.state();
            state.wants.awaited = false;
            state.wants.size
        };
        self.thread.task().ask(wanted);
    }
}

impl Task for Deflating {
    type Wants = Wants;
    type Step = ();

    /// Asks the guest for what is mapped, as long as that is wanted; whether more is to be mapped.
    fn next(&self, wants: &Wants) -> Option<()> {
        let dma = &self.ballooned.dma;
        // Without mapping ahead it is mapped as the guest takes it back.
        let safe = if dma.tuning().ahead { dma.safe_size() } else { 0 };
        let target = safe.max(wants.size);
        if target < self.ballooned.resize.info().target {
            self.ask(target);
        }
        (safe > wants.size).then_some(())
    }

    fn step(&self, (): (), shared: &Shared<Self>) -> Result<(), String> {
        let dma = &self.ballooned.dma;
        let mapped = dma.map_ahead(&dma.next_ahead(), self.fillers, &|| shared.is_stopped());
        mapped.map_err(|error| error.to_string())
    }
}

impl Deflating {
    fn ask(&self, bytes: u64) {
        if let Err(error) = self.ballooned.resize.request(bytes) {
            log::error!("a size that was there is refused, a bug: {error}");
        }
    }
}

#[cfg(test)]
mod tests;
