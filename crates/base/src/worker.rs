//! A thread that owns a state and gives it back when it is stopped.
//!
//! Stopping *is* taking the state back: a device that sleeps has its queues in hand again, and nothing is
//! shared that would have to be locked.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use crate::EventFd;

/// What a worker's body waits on to learn that it should return. Becomes readable once and stays so.
#[derive(Clone, Debug)]
pub struct StopSignal(Arc<EventFd>);

impl StopSignal {
    /// The descriptor to poll for reading.
    pub fn fd(&self) -> &EventFd {
        &self.0
    }
}

/// A running thread that owns a `T`.
#[derive(Debug)]
pub struct Worker<T> {
    stop: StopSignal,
    thread: Option<JoinHandle<T>>,
}

impl<T: Send + 'static> Worker<T> {
    /// Starts `body` on a thread called `name` (at most 15 bytes are visible in the kernel). The body must
    /// return its state soon after the stop signal becomes readable.
    ///
    /// # Errors
    /// No event fd or no thread could be had.
    pub fn spawn(name: &str, state: T, body: impl FnOnce(T, &StopSignal) -> T + Send + 'static) -> io::Result<Self> {
        let stop = StopSignal(Arc::new(EventFd::new()?));
        let signal = stop.clone();
        // Device workers keep nothing large on the stack; a small one keeps the VMM's own memory small.
        let thread = crate::thread::spawn(name, 128 << 10, move || body(state, &signal))?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }

    /// Asks the body to return and waits for its state. `None` when the body panicked.
    pub fn stop(mut self) -> Option<T> {
        self.finish()
    }

    fn finish(&mut self) -> Option<T> {
        let thread = self.thread.take()?;
        self.stop.0.signal();
        thread.join().ok()
    }
}

impl<T> Drop for Worker<T> {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.stop.0.signal();
            if thread.join().is_err() {
                log::error!("a worker thread panicked");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Epoll, Interest};

    #[test]
    fn the_state_comes_back() {
        let worker = Worker::spawn("count", 41, |n, stop| {
            let epoll = Epoll::new().unwrap();
            epoll.add(stop.fd(), 0, Interest::READ).unwrap();
            epoll.wait(&mut Vec::new(), None).unwrap();
            n + 1
        })
        .unwrap();
        assert_eq!(worker.stop(), Some(42));
    }
}
