//! How long who waits looks for what it waits for before it sleeps. Knows neither what that is nor what wakes it.
//!
//! As KVM does before it halts a vCPU (Linux, Documentation/virt/kvm/halt-polling.rst): the window grows when it was slept for less than
//! looking would have lasted at most, and shrinks when it was slept for longer.

use std::hint::spin_loop;
use std::time::{Duration, Instant};

/// The least window, as a part of the largest.
const LEAST: u32 = 8;

/// Looks between two looks at the clock.
const ROUND: u32 = 32;

/// The window of one side.
#[derive(Debug)]
pub(crate) struct BusyPoll {
    most: Duration,
    window: Duration,
}

impl BusyPoll {
    /// Looks for that long at most, and at first.
    pub(crate) fn up_to(most: Duration) -> Self {
        Self { most, window: most }
    }

    /// Looks until it is there or the window is over. Whether it came is what `look` said last.
    pub(crate) fn until<E>(&self, mut look: impl FnMut() -> Result<bool, E>) -> Result<bool, E> {
        if look()? {
            return Ok(true);
        }
        if self.window.is_zero() {
            return Ok(false);
        }
        let mut begun = None;
        loop {
            for _ in 0..ROUND {
                spin_loop();
                if look()? {
                    return Ok(true);
                }
            }
            // The first rounds are without the clock, which most of what is waited for does not need.
            let begun = begun.get_or_insert_with(Instant::now);
            if begun.elapsed() >= self.window {
                return Ok(false);
            }
        }
    }

    /// It was slept for so long.
    pub(crate) fn slept(&mut self, long: Duration) {
        let least = self.most / LEAST;
        self.window = match long <= self.most {
            true => (self.window * 2).clamp(least, self.most),
            false => Some(self.window / 2).filter(|half| *half >= least).unwrap_or_default(),
        };
    }

    /// Whether it looks at all; else nobody need tell how long was slept.
    pub(crate) fn is_used(&self) -> bool {
        !self.most.is_zero()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: Duration = Duration::from_micros(40);

    #[test]
    fn the_window_follows_how_long_is_slept() {
        let mut poll = BusyPoll::up_to(MOST);
        for window in [20, 10, 5, 0, 0] {
            poll.slept(MOST * 2);
            assert_eq!(poll.window, Duration::from_micros(window));
        }
        for window in [5, 10, 20, 40, 40] {
            poll.slept(MOST / 2);
            assert_eq!(poll.window, Duration::from_micros(window));
        }
    }

    #[test]
    fn it_looks_at_least_once_and_no_longer_than_the_window() {
        let mut looks = 0;
        let never = |looks: &mut u32| -> Result<bool, ()> {
            *looks += 1;
            Ok(false)
        };
        assert_eq!(BusyPoll::up_to(Duration::ZERO).until(|| never(&mut looks)), Ok(false));
        assert_eq!(looks, 1);
        assert_eq!(BusyPoll::up_to(MOST).until(|| never(&mut looks)), Ok(false));
        assert!(looks > ROUND);
        assert_eq!(BusyPoll::up_to(Duration::MAX).until(|| Ok::<_, ()>(true)), Ok(true));
        assert_eq!(BusyPoll::up_to(Duration::MAX).until(|| Err(7)), Err(7));
    }
}
