//! How much memory a guest is to have plugged. While it has functions of the host's, that is asked of it piece by piece, as memory is
//! mapped for them ahead of it; otherwise all at once. Knows neither the device that plugs nor any function.
//!
//! ```text
//!  request ──▶ target ──▶ thread: fill, map the next piece ──▶ ask the guest for so much ──▶ ... until all of it is asked for
//!                            └── refused ──▶ wait, and again: the guest goes on with what it has
//! ```

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use device::{Ahead, CreateError, PlugCounts, PluggableDma, PluggableSizes, ResizeMemory};

/// What a VM has of memory that can be plugged.
#[derive(Clone)]
pub struct Pluggable {
    /// Asks the guest.
    pub resize: Arc<dyn ResizeMemory>,
    /// What is mapped of it.
    pub dma: PluggableDma,
}

/// How much memory a guest has plugged, in bytes, and what is being done about it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GrowthInfo {
    /// As the device has it.
    pub sizes: PluggableSizes,
    /// What the guest is to have in the end.
    pub target: u64,
    /// What is to be mapped for functions: that, or more ahead of it.
    pub wanted: u64,
    /// Requests that were answered while there were functions.
    pub counts: PlugCounts,
    /// Why nothing is being mapped ahead for now, if more is to be.
    pub error: Option<String>,
}

/// Between two attempts at what the host has refused: at first, and at most.
const RETRY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

const STACK: usize = 128 << 10;

pub(crate) struct Growth {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    pluggable: Pluggable,
    fillers: usize,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    target: u64,
    /// So much is mapped, if that is more, before the guest is asked for it.
    ahead: u64,
    /// There are functions, or will be: nothing is asked of the guest that is not mapped.
    paced: bool,
    /// What it boots with is mapped: the rest can be.
    ready: bool,
    stopped: bool,
    /// The thread will look at the target again before it ends.
    running: bool,
    error: Option<String>,
}

impl Growth {
    /// What is requested of the device is what the guest is to have.
    pub(crate) fn new(pluggable: Pluggable, fillers: usize) -> Self {
        let target = pluggable.resize.sizes().requested;
        Self {
            shared: Arc::new(Shared {
                pluggable,
                fillers,
                state: Mutex::new(State {
                    target,
                    ahead: 0,
                    paced: false,
                    ready: false,
                    stopped: false,
                    running: false,
                    error: None,
                }),
                changed: Condvar::new(),
            }),
            thread: None,
        }
    }

    pub(crate) fn dma(&self) -> &PluggableDma {
        &self.shared.pluggable.dma
    }

    pub(crate) fn info(&self) -> GrowthInfo {
        let state = self.shared.state();
        GrowthInfo {
            sizes: self.shared.pluggable.resize.sizes(),
            target: state.target,
            wanted: state.wanted(),
            counts: self.shared.pluggable.dma.counts(),
            error: state.error.clone(),
        }
    }

    /// Has the guest come to another size: at once, or as fast as memory is mapped.
    ///
    /// # Errors
    /// There is no such size; nothing has changed. Or no thread could be had.
    pub(crate) fn request(&mut self, bytes: u64) -> Result<(), CreateError> {
        let resize = &self.shared.pluggable.resize;
        resize.check(bytes)?;
        let (paced, ready) = {
            let mut state = self.shared.state();
            (state.target, state.ahead) = (bytes, 0);
            self.shared.changed.notify_all();
            (state.paced, state.ready)
        };
        if !paced || bytes <= resize.sizes().requested {
            resize.request(bytes)?;
        }
        // What is mapped and not wanted any more is given back there, too.
        if ready { self.go_on() } else { Ok(()) }
    }

    /// Has so much mapped as soon as there are functions, until the next request.
    ///
    /// # Errors
    /// As [`Growth::request`].
    pub(crate) fn map_ahead(&mut self, bytes: u64) -> Result<(), CreateError> {
        self.shared.pluggable.resize.check(bytes)?;
        let ready = {
            let mut state = self.shared.state();
            state.ahead = bytes;
            self.shared.changed.notify_all();
            state.ready
        };
        if ready { self.go_on() } else { Ok(()) }
    }

    /// Functions are there or about to be: from now on nothing is asked of the guest that is not mapped, but what was asked before.
    pub(crate) fn pace(&mut self) {
        self.shared.state().paced = true;
    }

    /// Functions reach what the guest boots with and what is plugged: from now on what is to be is mapped ahead.
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
        match base::thread::spawn("dma-map", STACK, move || shared.map_ahead()) {
            Ok(thread) => self.thread = Some(thread),
            Err(source) => {
                self.shared.state().running = false;
                let what = "a thread that maps memory";
                return Err(CreateError::Host { what, source });
            }
        }
        Ok(())
    }

    /// The last function has gone: nothing is mapped ahead any more, and the guest is asked for all that it is to have.
    pub(crate) fn free(&mut self) {
        if !self.shared.state().paced {
            return;
        }
        self.stop();
        let target = {
            let mut state = self.shared.state();
            (state.paced, state.ready, state.stopped, state.error) = (false, false, false, None);
            state.ahead = 0;
            state.target
        };
        let resize = &self.shared.pluggable.resize;
        if resize.sizes().requested != target
            && let Err(error) = resize.request(target)
        {
            log::error!("a size that was checked is refused, a bug: {error}");
        }
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

impl Drop for Growth {
    fn drop(&mut self) {
        self.stop();
    }
}

impl State {
    /// How much is to be mapped.
    fn wanted(&self) -> u64 {
        self.target.max(self.ahead)
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // Plain values, each set at once.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is to be mapped; `None`, and the thread ends, if that is nothing.
    fn wanted(&self) -> Option<u64> {
        let mut state = self.state();
        let wanted = state.wanted();
        let asked = self.pluggable.resize.sizes().requested >= state.target;
        let dma = &self.pluggable.dma;
        if state.stopped || asked && dma.unmapped_below(wanted).is_empty() && !dma.has_beyond(wanted) {
            state.running = false;
            return None;
        }
        Some(wanted)
    }

    fn map_ahead(&self) {
        let mut pause = RETRY.0;
        while let Some(wanted) = self.wanted() {
            match self.map_below(wanted) {
                Ok(()) => {
                    self.state().error = None;
                    pause = RETRY.0;
                }
                Err(error) => {
                    log::warn!("no more memory is mapped for functions of the host's for {pause:?}: {error}");
                    self.state().error = Some(error);
                    self.rest(pause);
                    pause = (pause * 2).min(RETRY.1);
                }
            }
        }
    }

    /// Maps all of it, as long as it is wanted, and asks the guest for each piece as soon as that is done.
    fn map_below(&self, wanted: u64) -> Result<(), String> {
        let dma = &self.pluggable.dma;
        dma.trim(wanted);
        let pieces = dma.unmapped_below(wanted);
        let region = dma.region().ok_or("no function reaches it")?;
        let ahead = Ahead::begin(&pieces, vec![region], self.fillers).map_err(|error| error.to_string())?;
        let mut result = Ok(());
        for index in 0..pieces.len() {
            if !ahead.wait_for(index, || !self.still_wants(wanted)) {
                break;
            }
            if let Err(error) = dma.map_next(wanted) {
                result = Err(error.to_string());
                break;
            }
            self.ask();
        }
        self.ask();
        drop(ahead);
        dma.give_back(&pieces);
        // Asked for again at once, what the kernel does not unmap would keep a processor busy.
        match dma.has_beyond(wanted) && self.still_wants(wanted) {
            true => result.and(Err("memory that is not wanted any more stays mapped".to_owned())),
            false => result,
        }
    }

    fn still_wants(&self, wanted: u64) -> bool {
        let state = self.state();
        !state.stopped && state.wanted() >= wanted
    }

    /// Asks the guest for what is mapped, unless it was asked for more before. Under the lock, so that a smaller target stays.
    fn ask(&self) {
        let state = self.state();
        let mapped = self.pluggable.dma.mapped_from_start();
        let bytes = mapped.min(state.target);
        if bytes > self.pluggable.resize.sizes().requested
            && let Err(error) = self.pluggable.resize.request(bytes)
        {
            log::error!("a size that was checked is refused, a bug: {error}");
        }
    }

    fn rest(&self, pause: Duration) {
        let state = self.state();
        let wanted = state.wanted();
        let waits = |state: &mut State| !state.stopped && state.wanted() == wanted;
        let waited = self.changed.wait_timeout_while(state, pause, waits);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

#[cfg(test)]
mod tests;
