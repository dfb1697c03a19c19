//! What a queue's worker waits on: kicks, its stop, and whatever tells that requests are done. Knows no requests.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use base::{Epoll, EventFd, Interest, Ready};

/// Epoll tokens.
const KICK: u64 = 0;
const STOP: u64 = 1;
const DONE: u64 = 2;

/// Made before the worker starts, so that failures are the device's.
#[derive(Debug)]
pub(crate) struct Waiting {
    epoll: Epoll,
    ready: Vec<Ready>,
}

impl Waiting {
    /// Kicks and the stop are told once each, so that nobody has to read the counters back to zero. `done` is told as
    /// long as it is readable.
    pub(crate) fn new(kick: &EventFd, done: impl AsFd) -> io::Result<Self> {
        let epoll = Epoll::new()?;
        epoll.add(kick, KICK, Interest::READ_EDGE)?;
        epoll.add(done, DONE, Interest::READ)?;
        Ok(Self {
            epoll,
            ready: Vec::new(),
        })
    }

    /// The stop exists only with the worker.
    pub(crate) fn watch_stop(&self, stop: &EventFd) -> io::Result<()> {
        self.epoll.add(stop, STOP, Interest::READ_EDGE)
    }

    /// Waits until there is something, as long as `patience` says (`None`: for ever). Tells whether to stop, once.
    pub(crate) fn wait(&mut self, patience: Option<Duration>) -> bool {
        if let Err(error) = self.epoll.wait(&mut self.ready, patience) {
            log::error!("block: it cannot wait: {error}");
            std::thread::sleep(Duration::from_millis(10));
        }
        self.ready.iter().any(|ready| ready.token == STOP)
    }
}
