//! How much memory a guest is to have plugged. While it has functions of the host's, that is asked of it piece by piece, as memory is
//! mapped for them ahead of it; otherwise all at once. Knows neither the device that plugs nor any function.
//!
//! ```text
//!  request ──▶ target ──▶ thread: fill, map the next piece ──▶ ask the guest for so much ──▶ ... until all of it is asked for
//!                            └── refused ──▶ wait, and again: the guest goes on with what it has
//! ```

use std::sync::Arc;

use device::{CreateError, PlugCounts, PluggableDma, PluggableSizes, ResizeMemory};

use crate::map_thread::{MapThread, Shared, Task};

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

pub(crate) struct Growth {
    thread: MapThread<Growing>,
}

struct Growing {
    pluggable: Pluggable,
    fillers: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Wants {
    target: u64,
    /// So much is mapped, if that is more, before the guest is asked for it.
    ahead: u64,
    /// There are functions, or will be: nothing is asked of the guest that is not mapped.
    paced: bool,
}

impl Growth {
    /// What is requested of the device is what the guest is to have.
    pub(crate) fn new(pluggable: Pluggable, fillers: usize) -> Self {
        let wants = Wants {
            target: pluggable.resize.sizes().requested,
            ahead: 0,
            paced: false,
        };
        Self {
            thread: MapThread::new(Growing { pluggable, fillers }, wants),
        }
    }

    pub(crate) fn dma(&self) -> &PluggableDma {
        &self.thread.task().pluggable.dma
    }

    fn resize(&self) -> &dyn ResizeMemory {
        self.thread.task().pluggable.resize.as_ref()
    }

    pub(crate) fn info(&self) -> GrowthInfo {
        let state = self.thread.state();
        GrowthInfo {
            sizes: self.resize().sizes(),
            target: state.wants.target,
            wanted: state.wants.all(),
            counts: self.dma().counts(),
            error: state.error.clone(),
        }
    }

    /// Has the guest come to another size: at once, or as fast as memory is mapped.
    ///
    /// # Errors
    /// There is no such size; nothing has changed. Or no thread could be had.
    pub(crate) fn request(&mut self, bytes: u64) -> Result<(), CreateError> {
        self.resize().check(bytes)?;
        // What is mapped and not wanted any more is given back, too, by the thread.
        self.thread.change(|task, state| {
            let resize = &task.pluggable.resize;
            if !state.wants.paced || bytes <= resize.sizes().requested {
                resize.request(bytes)?;
            }
            (state.wants.target, state.wants.ahead) = (bytes, 0);
            Ok(())
        })
    }

    /// Has so much mapped as soon as there are functions, until the next request.
    ///
    /// # Errors
    /// As [`Growth::request`].
    pub(crate) fn map_ahead(&mut self, bytes: u64) -> Result<(), CreateError> {
        self.resize().check(bytes)?;
        self.thread.change(|_, state| {
            state.wants.ahead = bytes;
            Ok(())
        })
    }

    /// Functions are there or about to be: from now on nothing is asked of the guest that is not mapped, but what was asked before.
    pub(crate) fn pace(&mut self) {
        self.thread.state().wants.paced = true;
    }

    /// Functions reach what the guest boots with and what is plugged: from now on what is to be is mapped ahead.
    ///
    /// # Errors
    /// No thread could be had.
    pub(crate) fn go_on(&mut self) -> Result<(), CreateError> {
        self.thread.go_on()
    }

    /// The last function has gone: nothing is mapped ahead any more, and the guest is asked for all that it is to have.
    pub(crate) fn free(&mut self) {
        if !self.thread.state().wants.paced {
            return;
        }
        self.thread.end();
        let target = {
            let mut state = self.thread.state();
            (state.wants.paced, state.wants.ahead) = (false, 0);
            state.wants.target
        };
        if self.resize().sizes().requested != target
            && let Err(error) = self.resize().request(target)
        {
            log::error!("a size that was checked is refused, a bug: {error}");
        }
    }
}

impl Wants {
    /// How much is to be mapped.
    fn all(self) -> u64 {
        self.target.max(self.ahead)
    }
}

impl Task for Growing {
    type Wants = Wants;
    type Step = u64;

    fn next(&self, wants: &Wants) -> Option<u64> {
        let (dma, wanted) = (&self.pluggable.dma, wants.all());
        let asked = self.pluggable.resize.sizes().requested >= wants.target;
        let is_all = asked && dma.unmapped_below(wanted).is_empty() && !dma.has_beyond(wanted);
        (!is_all).then_some(wanted)
    }

    /// Maps all of it, as long as it is wanted, and asks the guest for each piece as soon as that is done.
    fn step(&self, wanted: u64, shared: &Shared<Self>) -> Result<(), String> {
        let dma = &self.pluggable.dma;
        let still_wants = || {
            let state = shared.state();
            !state.stopped && state.wants.all() >= wanted
        };
        dma.trim(wanted);
        let pieces = dma.unmapped_below(wanted);
        let ahead = dma
            .fill_ahead(&pieces, self.fillers)
            .map_err(|error| error.to_string())?;
        let ahead = ahead.ok_or("no function reaches it")?;
        let mut result = Ok(());
        for index in 0..pieces.len() {
            if !ahead.wait_for(index, || !still_wants()) {
                break;
            }
            if let Err(error) = dma.map_next(wanted) {
                result = Err(error.to_string());
                break;
            }
            self.ask(shared);
        }
        self.ask(shared);
        drop(ahead);
        let still = {
            let state = shared.state();
            if state.stopped { 0 } else { state.wants.all() }
        };
        dma.give_back(&pieces, still);
        // Asked for again at once, what the kernel does not unmap would keep a processor busy.
        match dma.has_beyond(wanted) && still_wants() {
            true => result.and(Err("memory that is not wanted any more stays mapped".to_owned())),
            false => result,
        }
    }
}

impl Growing {
    /// Asks the guest for what is mapped, unless it was asked for more before. Under the lock, so that a smaller target stays.
    fn ask(&self, shared: &Shared<Self>) {
        let state = shared.state();
        let mapped = self.pluggable.dma.mapped_from_start();
        let bytes = mapped.min(state.wants.target);
        if bytes > self.pluggable.resize.sizes().requested
            && let Err(error) = self.pluggable.resize.request(bytes)
        {
            log::error!("a size that was checked is refused, a bug: {error}");
        }
    }
}

#[cfg(test)]
mod tests;
