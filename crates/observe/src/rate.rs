//! A limit for log lines that a guest can cause: the first few of each second, then silence until the next.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// At most so many a second; cheap enough for hot paths.
#[derive(Debug)]
pub struct RateLimit {
    per_second: u64,
    began: Instant,
    // The second that is being counted (high half) and how many were let through in it (low half).
    window: AtomicU64,
}

impl RateLimit {
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

#[cfg(test)]
mod tests {
    use super::RateLimit;

    #[test]
    fn each_second_has_its_own_allowance() {
        let limit = RateLimit::new(2);
        let passed: Vec<bool> = [0, 0, 0, 1, 1, 1, 5]
            .into_iter()
            .map(|second| limit.allow_at(second))
            .collect();
        assert_eq!(passed, [true, true, false, true, true, false, true]);
    }
}
