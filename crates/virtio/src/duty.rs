//! A device with one worker thread: what it owns while it is idle, and the thread that has it while it works. Knows no
//! queue and no device.
//!
//! ```text
//!  Idle(rest) ── begin ──▶ Working(thread) ── end ──▶ Lost ── rest ──▶ Idle(rest)
//!                 └─ no thread could be had ──▶ Lost ◀── the thread panicked
//! ```

use std::fmt;
use std::io;

use base::Worker;
use base::worker::StopSignal;

use crate::device::{ActiveQueue, DeviceError};

/// Where a device's state is: with the device (`Rest`), or with its thread (`Work`).
pub enum Duty<Rest, Work> {
    /// With the device.
    Idle(Rest),
    /// With the thread.
    Working(Worker<Box<Work>>),
    /// Nowhere: the thread could not be started or panicked, and what it owned is gone.
    Lost,
}

impl<Rest, Work: Send + 'static> Duty<Rest, Work> {
    /// Starts the thread `name` with what `prepare` makes of the device's state.
    ///
    /// # Errors
    /// No thread could be had, or there is one, or the last one took the state with it.
    pub fn begin(
        &mut self,
        name: &str,
        prepare: impl FnOnce(Rest) -> Work,
        body: impl FnOnce(Box<Work>, &StopSignal) -> Box<Work> + Send + 'static,
    ) -> Result<(), DeviceError> {
        let Self::Idle(rest) = std::mem::replace(self, Self::Lost) else {
            let lost = "it was activated twice, or has lost its thread";
            return Err(DeviceError::Host(io::Error::other(lost)));
        };
        *self = Self::Working(Worker::spawn(name, Box::new(prepare(rest)), body)?);
        Ok(())
    }

    /// Stops the thread and tells what it had; `None` when there is none or it panicked. The device then gives back
    /// what it keeps, by [`Duty::rest`].
    pub fn end(&mut self, name: &str) -> Option<Box<Work>> {
        let worker = match std::mem::replace(self, Self::Lost) {
            Self::Working(worker) => worker,
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

    /// The device has its state again.
    pub fn rest(&mut self, rest: Rest) {
        *self = Self::Idle(rest);
    }
}

impl<Rest, Work> fmt::Debug for Duty<Rest, Work> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Idle(_) => "Idle",
            Self::Working(_) => "Working",
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
        let mut duty = Duty::Idle("kept");
        assert!(duty.end("test").is_none(), "there is no thread");
        duty.begin("test", |rest| u32::try_from(rest.len()).unwrap(), wait)
            .unwrap();
        assert_eq!(*duty.end("test").unwrap(), 4);
        duty.rest("kept");
        assert!(matches!(duty, Duty::Idle("kept")));
    }

    #[test]
    fn a_second_beginning_and_a_panic_are_the_end() {
        let mut duty = Duty::Idle(());
        duty.begin("test", |()| 1, wait).unwrap();
        assert!(duty.begin("test", |()| 2, wait).is_err());
        let mut duty = Duty::Idle(());
        duty.begin("test", |()| 1, |_, _| panic!("on purpose")).unwrap();
        assert!(duty.end("test").is_none());
        assert!(duty.begin("test", |()| 2, wait).is_err());
    }
}
