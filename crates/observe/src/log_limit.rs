//! Limits for log lines. Those that a guest can cause: the first few of each second, then silence until the next. Those that say
//! the same as long as something is wrong: once, and again after a while.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// At most so many a second; cheap enough for hot paths.
#[derive(Debug)]
pub struct LogLimit {
    per_second: u64,
    began: Instant,
    // The second that is being counted (high half) and how many were let through in it (low half).
    window: AtomicU64,
}

impl LogLimit {
    /// Lets `per_second` through.
    pub fn new(per_second: u32) -> Self {
        Self {
            per_second: u64::from(per_second),
            began: Instant::now(),
            window: AtomicU64::new(0),
        }
    }

    /// Whether this one may pass.
    pub fn allow(&self) -> bool {
        self.allow_at(self.began.elapsed().as_secs())
    }

    fn allow_at(&self, second: u64) -> bool {
        let second = second & 0xffff_ffff;
        let mut current = self.window.load(Ordering::Relaxed);
        loop {
            let used = if current >> 32 == second {
                current & 0xffff_ffff
            } else {
                0
            };
            if used >= self.per_second {
                return false;
            }
            let next = (second << 32) | (used + 1);
            match self
                .window
                .compare_exchange_weak(current, next, Ordering::Relaxed, Ordering::Relaxed)
            {
                Ok(_) => return true,
                Err(seen) => current = seen,
            }
        }
    }
}

/// A line that says the same as long as something is wrong: it is written at once, and then at most once an interval.
#[derive(Debug)]
pub struct Repeated {
    interval: Duration,
    /// When it was written last, and how often it was left out since.
    last: Mutex<Option<(Instant, u64)>>,
}

impl Repeated {
    /// Nothing was written yet.
    pub const fn new(interval: Duration) -> Self {
        Self {
            interval,
            last: Mutex::new(None),
        }
    }

    /// Has `line` be written if that is due, with what it is given at its end: how often it was left out since the last time.
    pub fn say(&self, line: impl FnOnce(&str)) {
        match self.due() {
            None => (),
            Some(0) => line(""),
            Some(left_out) => line(&format!(" (and {left_out} times more since this was said last)")),
        }
    }

    /// Whether it is to be written now, and how often it was left out since the last time.
    fn due(&self) -> Option<u64> {
        self.due_at(Instant::now())
    }

    fn due_at(&self, now: Instant) -> Option<u64> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        match last.as_mut() {
            Some((when, left_out)) if now.saturating_duration_since(*when) < self.interval => {
                *left_out += 1;
                None
            }
            before => {
                let left_out = before.map_or(0, |(_, left_out)| *left_out);
                *last = Some((now, 0));
                Some(left_out)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::{LogLimit, Repeated};

    #[test]
    fn what_is_said_again_is_counted_until_it_is_due() {
        let repeated = Repeated::new(Duration::from_secs(10));
        let begun = Instant::now();
        let said: Vec<_> = [0, 1, 9, 10, 11, 40]
            .into_iter()
            .map(|second| repeated.due_at(begun + Duration::from_secs(second)))
            .collect();
        assert_eq!(said, [Some(0), None, None, Some(2), None, Some(1)]);
        assert_eq!(
            repeated.due_at(begun),
            None,
            "a clock that stands behind is no new interval"
        );
    }

    #[test]
    fn a_line_tells_how_often_it_was_left_out() {
        let said = std::cell::RefCell::new(Vec::new());
        let say = |repeated: &Repeated| repeated.say(|more| said.borrow_mut().push(format!("it is full{more}")));
        let repeated = Repeated::new(Duration::from_secs(3600));
        for _ in 0..3 {
            say(&repeated);
        }
        assert_eq!(*said.borrow(), ["it is full"]);
        *repeated.last.lock().unwrap() = Some((Instant::now(), 2));
        let repeated = Repeated {
            interval: Duration::ZERO,
            ..repeated
        };
        say(&repeated);
        assert_eq!(
            said.borrow()[1],
            "it is full (and 2 times more since this was said last)"
        );
    }

    #[test]
    fn each_second_has_its_own_allowance() {
        let limit = LogLimit::new(2);
        let passed: Vec<bool> = [0, 0, 0, 1, 1, 1, 5]
            .into_iter()
            .map(|second| limit.allow_at(second))
            .collect();
        assert_eq!(passed, [true, true, false, true, true, false, true]);
    }
}
