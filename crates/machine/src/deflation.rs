//! How large the balloon of a guest is to be whose memory is mapped for functions of the host's piece by piece: it is full when the first of
//! them comes, and smaller as more is mapped. Knows neither the device that is the balloon nor any function.
//!
//! ```text
//!  full ── first function ──▶ what is not in it is mapped ──▶ thread: fill, map the next piece ──▶ ask for a smaller one ──▶ ... until it is wanted
//!                                                               └── refused ──▶ wait, and again: the guest goes on with what it has
//! ```

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use device::{BalloonedDma, CreateError, DeflateCounts, DmaSpace, ResizeBalloon};

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

/// Between two attempts at what the host has refused: at first, and at most.
const RETRY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

const STACK: usize = 128 << 10;

pub(crate) struct Deflation {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    ballooned: Ballooned,
    fillers: usize,
    patience: Duration,
    state: Mutex<State>,
    changed: Condvar,
    fell_back: AtomicBool,
}

#[derive(Default)]
struct State {
    /// What the guest is to do without in the end.
    wanted: u64,
    /// A function is to come when the balloon is full.
    awaited: bool,
    /// Functions reach what is not in the balloon.
    ready: bool,
    stopped: bool,
    /// The thread will look at all of this again before it ends.
    running: bool,
    error: Option<String>,
}

/// Waits for a balloon to be full, from whatever thread maps then.
pub(crate) struct Filling(Arc<Shared>);

impl Filling {
    /// Returns when it is, or is not waited for any more.
    pub(crate) fn wait(&self, space: &DmaSpace) {
        let (dma, resize) = (&self.0.ballooned.dma, &self.0.ballooned.resize);
        let target = resize.info().target;
        if !dma.await_inflated(target, space, self.0.patience) {
            self.0.fell_back.store(true, Ordering::Relaxed);
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
        Self {
            shared: Arc::new(Shared {
                ballooned,
                fillers,
                patience,
                state: Mutex::default(),
                changed: Condvar::new(),
                fell_back: AtomicBool::new(false),
            }),
            thread: None,
        }
    }

    pub(crate) fn dma(&self) -> &BalloonedDma {
        &self.shared.ballooned.dma
    }

    /// A function is to come.
    pub(crate) fn filling(&self) -> Filling {
        self.shared.state().awaited = true;
        Filling(Arc::clone(&self.shared))
    }

    pub(crate) fn info(&self) -> DeflationInfo {
        DeflationInfo {
            counts: self.dma().counts(),
            fell_back: self.shared.fell_back.load(Ordering::Relaxed),
            error: self.shared.state().error.clone(),
        }
    }

    /// Has the guest do without so much in the end: at once if that is more, or nothing is mapped for functions; else as it is mapped.
    ///
    /// # Errors
    /// There is no such size; nothing has changed. Or no thread could be had.
    pub(crate) fn request(&mut self, bytes: u64) -> Result<(), CreateError> {
        let ready = {
            // The thread asks for less as long as that is wanted.
            let mut state = self.shared.state();
            let resize = &self.shared.ballooned.resize;
            if !state.ready || bytes >= resize.info().target {
                resize.request(bytes)?;
            }
            state.wanted = bytes;
            state.ready
        };
        if ready { self.go_on() } else { Ok(()) }
    }

    /// Functions reach what is not in the balloon: from now on that becomes more.
    ///
    /// # Errors
    /// No thread could be had.
    pub(crate) fn go_on(&mut self) -> Result<(), CreateError> {
        {
            let mut state = self.shared.state();
            state.ready = true;
            if state.running {
                return Ok(());
            }
            state.running = true;
        }
        self.join();
        let shared = Arc::clone(&self.shared);
        match base::thread::spawn("dma-map", STACK, move || shared.deflate()) {
            Ok(thread) => self.thread = Some(thread),
            Err(source) => {
                self.shared.state().running = false;
                let what = "a thread that maps memory";
                return Err(CreateError::Host { what, source });
            }
        }
        Ok(())
    }

    /// The last function has gone, or none has come after all: the guest may have all of it. Nothing where none was to come: the balloon is
    /// full for the first.
    pub(crate) fn free(&mut self) {
        {
            let state = self.shared.state();
            if !state.ready && !state.awaited {
                return;
            }
        }
        self.stop();
        let wanted = {
            let mut state = self.shared.state();
            (state.awaited, state.ready) = (false, false);
            (state.stopped, state.error) = (false, None);
            state.wanted
        };
        self.shared.ask(wanted);
    }

    fn stop(&mut self) {
        self.shared.state().stopped = true;
        self.shared.changed.notify_all();
        self.join();
    }

    fn join(&mut self) {
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the thread that maps memory ahead panicked");
        }
    }
}

impl Drop for Deflation {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // Plain values, each set at once.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_stopped(&self) -> bool {
        self.state().stopped
    }

    fn deflate(&self) {
        let mut pause = RETRY.0;
        loop {
            let dma = &self.ballooned.dma;
            let ahead = dma.tuning().ahead;
            // Without mapping ahead it is mapped as the guest takes it back.
            let safe = if ahead { dma.safe_size() } else { 0 };
            {
                let mut state = self.state();
                let target = safe.max(state.wanted);
                if target < self.ballooned.resize.info().target {
                    self.ask(target);
                }
                if safe <= state.wanted {
                    // No more is to be mapped.
                    state.error = None;
                }
                if state.stopped || safe <= state.wanted {
                    state.running = false;
                    return;
                }
            }
            match dma.map_ahead(&dma.next_ahead(), self.fillers, &|| self.is_stopped()) {
                Ok(()) => {
                    self.state().error = None;
                    pause = RETRY.0;
                }
                Err(_) if self.is_stopped() => (),
                Err(error) => {
                    log::warn!("no more memory is mapped for functions of the host's for {pause:?}: {error}");
                    self.state().error = Some(error.to_string());
                    let state = self.state();
                    let waited = (self.changed).wait_timeout_while(state, pause, |state| !state.stopped);
                    drop(waited.unwrap_or_else(PoisonError::into_inner));
                    pause = (pause * 2).min(RETRY.1);
                }
            }
        }
    }

    fn ask(&self, bytes: u64) {
        if let Err(error) = self.ballooned.resize.request(bytes) {
            log::error!("a size that was there is refused, a bug: {error}");
        }
    }
}

#[cfg(test)]
mod tests;
