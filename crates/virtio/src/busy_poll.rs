//! Busy-polling: how long whoever serves a queue goes on looking for requests after the last one, before it asks the driver for kicks.
//! Knows no queue.
//!
//! A driver does not kick while nobody asks it to (2.7.10). Where a kick stops a vCPU for as long as it takes to wake a thread, it pays
//! to look for a while: a driver that waits for an answer often has its next request ready soon after it. Whether it has is learnt
//! from the requests that kicks brought: the window grows while they come soon enough, and shrinks to nothing while they do not.

use std::time::{Duration, Instant};

/// The least window, as a part of the largest.
const LEAST: u32 = 8;

/// The window of one queue; the default is none at all.
#[derive(Debug, Default)]
pub struct BusyPoll {
    most: Duration,
    window: Duration,
    last: Option<Instant>,
    /// Kicks were asked for since the last request.
    asked: bool,
}

impl BusyPoll {
    /// Looks for as long as this at most.
    pub fn up_to(most: Duration) -> Self {
        Self {
            most,
            ..Self::default()
        }
    }

    /// A request was found.
    pub(crate) fn found(&mut self) {
        if !self.most.is_zero() {
            self.found_at(Instant::now());
        }
    }

    fn found_at(&mut self, now: Instant) {
        if std::mem::take(&mut self.asked) {
            let late = |last| now.duration_since(last) >= self.most;
            let least = self.most / LEAST;
            self.window = match self.last.is_none_or(late) {
                true => Some(self.window / 2).filter(|half| *half >= least).unwrap_or_default(),
                false => (self.window * 2).clamp(least, self.most),
            };
        }
        self.last = Some(now);
    }

    /// Whether to look again before kicks are asked for.
    pub(crate) fn goes_on(&mut self) -> bool {
        !self.window.is_zero() && self.goes_on_at(Instant::now())
    }

    fn goes_on_at(&mut self, now: Instant) -> bool {
        self.last.is_some_and(|last| now.duration_since(last) < self.window)
    }

    /// Kicks are asked for.
    pub(crate) fn ask(&mut self) {
        self.asked = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: Duration = Duration::from_micros(80);

    #[test]
    fn it_looks_as_long_as_requests_come_soon() {
        let mut poll = BusyPoll::up_to(MOST);
        let mut now = Instant::now();
        poll.found_at(now);
        assert!(!poll.goes_on_at(now), "nothing is known yet");
        for window in [10, 20, 40, 80, 80] {
            poll.ask();
            now += MOST / 2;
            poll.found_at(now);
            let last = now + Duration::from_micros(window - 1);
            assert!(poll.goes_on_at(last) && !poll.goes_on_at(last + Duration::from_micros(1)));
        }
        // What is found without a kick changes nothing.
        poll.found_at(now);
        assert_eq!(poll.window, MOST);
        for window in [40, 20, 10, 0, 0] {
            poll.ask();
            now += MOST;
            poll.found_at(now);
            assert_eq!(poll.window, Duration::from_micros(window));
        }
        assert!(!poll.goes_on_at(now));
    }

    #[test]
    fn by_default_it_never_looks() {
        let mut poll = BusyPoll::default();
        for _ in 0..4 {
            poll.found();
            assert!(!poll.goes_on());
            poll.ask();
        }
        assert_eq!(poll.last, None, "it has not even looked at a clock");
    }
}
