//! A device with one worker thread: what it owns while it is idle, and the thread that has it while it works. Knows no
//! queue and no device.
//!
//! ```text
//!  Idle(state) ── start ──▶ Running(thread) ── stop ──▶ Lost ── set_idle ──▶ Idle(state)
//!                  └─ no thread could be had ──▶ Lost ◀── the thread panicked
//!  Idle(state) ── work: a thread for a moment ──▶ Idle(state)
//! ```

use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use base::Worker;
use base::worker::StopSignal;

use crate::device::{ActiveQueue, DeviceError};

/// Of a thread that works for a moment.
const STACK: usize = 64 << 10;

/// Where a device's state is: with the device (`State`), or with its thread (`Work`).
pub enum DeviceWorker<State, Work> {
    /// With the device.
    Idle(State),
    /// With the thread.
    Running(Worker<Box<Work>>),
    /// Nowhere: the thread could not be started or panicked, and what it owned is gone.
    Lost,
}

impl<State, Work: Send + 'static> DeviceWorker<State, Work> {
    /// Starts the thread `name` with what `prepare` makes of the device's state.
    ///
    /// # Errors
    /// No thread could be had, or there is one, or the last one took the state with it.
    pub fn start(
        &mut self,
        name: &str,
        prepare: impl FnOnce(State) -> Work,
        body: impl FnOnce(Box<Work>, &StopSignal) -> Box<Work> + Send + 'static,
    ) -> Result<(), DeviceError> {
        let Self::Idle(state) = std::mem::replace(self, Self::Lost) else {
            let lost = "it was activated twice, or has lost its thread";
            return Err(DeviceError::Host(io::Error::other(lost)));
        };
        *self = Self::Running(Worker::spawn(name, Box::new(prepare(state)), body)?);
        Ok(())
    }

    /// Stops the thread and tells what it had; `None` when there is none or it panicked. The device then gives back
    /// what it keeps, by [`DeviceWorker::set_idle`].
    pub fn stop(&mut self, name: &str) -> Option<Box<Work>> {
        let worker = match std::mem::replace(self, Self::Lost) {
            Self::Running(worker) => worker,
            other => {
                *self = other;
                return None;
            }
        };
        let work = worker.stop();
        if work.is_none() {
            log::error!("the thread of {name} panicked; the device stays dead");
        }
        work
    }

    /// Has a thread `name` do something with the device's state while it is idle, and waits for that: whoever resets a device may be a vCPU's
    /// thread, which may neither do what that one may nor make it. Nothing, unless it is idle.
    ///
    /// # Errors
    /// No thread could be had: nothing was done.
    pub fn work(&mut self, name: &str, work: impl FnOnce(&mut State) + Send + 'static) -> io::Result<()>
    where
        State: Send + 'static,
    {
        let state = match std::mem::replace(self, Self::Lost) {
            Self::Idle(state) => state,
            other => {
                *self = other;
                return Ok(());
            }
        };
        let kept = Arc::new(Mutex::new(Some(state)));
        let take = |kept: &Mutex<Option<State>>| kept.lock().unwrap_or_else(PoisonError::into_inner).take();
        let theirs = Arc::clone(&kept);
        let body = move || {
            let mut state = take(&theirs);
            if let Some(state) = &mut state {
                work(state);
            }
            state
        };
        let (state, outcome) = match base::thread::spawn(name, STACK, body) {
            Ok(thread) => (thread.join().ok().flatten(), Ok(())),
            Err(error) => (take(&kept), Err(error)),
        };
        match state {
            Some(state) => *self = Self::Idle(state),
            None => log::error!("the thread of {name} panicked; the device stays dead"),
        }
        outcome
    }

    /// The device has its state again.
    pub fn set_idle(&mut self, state: State) {
        *self = Self::Idle(state);
    }
}

impl<State, Work> fmt::Debug for DeviceWorker<State, Work> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Idle(_) => "Idle",
            Self::Running(_) => "Running",
            Self::Lost => "Lost",
        })
    }
}

/// Takes queue `index` out of those that the driver has enabled.
///
/// # Errors
/// It has not enabled this one.
pub fn take_queue(queues: &mut Vec<ActiveQueue>, index: u16) -> Result<ActiveQueue, DeviceError> {
    let place = queues.iter().position(|queue| queue.index == index);
    place
        .map(|place| queues.remove(place))
        .ok_or(DeviceError::MissingQueue(index))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait(work: Box<u32>, stop: &StopSignal) -> Box<u32> {
        let epoll = base::Epoll::new().unwrap();
        epoll.add(stop.fd(), 0, base::Interest::READ).unwrap();
        epoll.wait(&mut Vec::new(), None).unwrap();
        work
    }

    #[test]
    fn the_state_goes_to_the_thread_and_comes_back() {
        let mut worker = DeviceWorker::Idle("kept");
        assert!(worker.stop("test").is_none(), "there is no thread");
        worker
            .start("test", |state| u32::try_from(state.len()).unwrap(), wait)
            .unwrap();
        assert_eq!(*worker.stop("test").unwrap(), 4);
        worker.set_idle("kept");
        assert!(matches!(worker, DeviceWorker::Idle("kept")));
    }

    #[test]
    fn a_second_start_and_a_panic_are_the_end() {
        let mut worker = DeviceWorker::Idle(());
        worker.start("test", |()| 1, wait).unwrap();
        assert!(worker.start("test", |()| 2, wait).is_err());
        let mut worker = DeviceWorker::Idle(());
        worker.start("test", |()| 1, |_, _| panic!("on purpose")).unwrap();
        assert!(worker.stop("test").is_none());
        assert!(worker.start("test", |()| 2, wait).is_err());
    }
}
