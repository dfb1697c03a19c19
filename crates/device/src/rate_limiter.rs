//! Rate limiters: token buckets for bytes and for operations, shared by the queues of a device. Knows neither what an
//! operation is nor what is done with one that has to wait.
//!
//! An operation is let through while both buckets hold something and may leave a debt, so that one larger than the burst
//! passes too; over time the rate holds.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::CreateError;

/// The limiter of one direction: bytes and operations a second.
#[derive(Debug)]
pub struct RateLimiter(Mutex<[Option<Bucket>; 2]>);

impl RateLimiter {
    /// A limiter with full buckets, or none where neither rate is given; `direction` is for the refusal.
    ///
    /// # Errors
    /// A rate of nothing, which would be a device that does nothing.
    pub fn new(bytes: Option<u64>, operations: Option<u64>, direction: &str) -> Result<Option<Arc<Self>>, CreateError> {
        if bytes == Some(0) || operations == Some(0) {
            let message =
                format!("the {direction} rate limit is 0: leave it out for no limit, or take the device away");
            return Err(CreateError::Value(message));
        }
        if bytes.is_none() && operations.is_none() {
            return Ok(None);
        }
        let now = Instant::now();
        let buckets = [bytes, operations].map(|rate| rate.map(|rate| Bucket::full(rate, now)));
        Ok(Some(Arc::new(Self(Mutex::new(buckets)))))
    }

    /// How long the next operation has to wait; `None` when it need not.
    pub fn wait(&self, now: Instant) -> Option<Duration> {
        let mut buckets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        buckets.iter_mut().flatten().filter_map(|bucket| bucket.wait(now)).max()
    }

    /// An operation of so many bytes has passed.
    pub fn spend(&self, bytes: usize) {
        let mut buckets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let [of_bytes, of_operations] = &mut *buckets;
        if let Some(bucket) = of_bytes {
            bucket.tokens -= i128::try_from(bytes).unwrap_or(i128::MAX) * NANOS;
        }
        if let Some(bucket) = of_operations {
            bucket.tokens -= NANOS;
        }
    }
}

/// Tokens are counted in billionths, so that a nanosecond's share is a whole number.
const NANOS: i128 = 1_000_000_000;

/// How long a burst at full speed may be: a bucket holds what its rate gives in this time.
const BURST: Duration = Duration::from_millis(100);

/// A token bucket.
#[derive(Debug)]
struct Bucket {
    rate: i128,
    tokens: i128,
    most: i128,
    filled: Instant,
}

impl Bucket {
    fn full(rate: u64, now: Instant) -> Self {
        let rate = i128::from(rate);
        // At least one whole token, or nothing would ever pass.
        let most = (rate * nanos(BURST)).max(NANOS);
        Self {
            rate,
            tokens: most,
            most,
            filled: now,
        }
    }

    fn wait(&mut self, now: Instant) -> Option<Duration> {
        let passed = nanos(now.saturating_duration_since(self.filled));
        self.filled = self.filled.max(now);
        self.tokens = (self.tokens + passed * self.rate).min(self.most);
        if self.tokens > 0 {
            return None;
        }
        // One more, so that the wait ends with something in the bucket.
        let nanos = (-self.tokens) / self.rate + 1;
        Some(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)))
    }
}

fn nanos(duration: Duration) -> i128 {
    i128::try_from(duration.as_nanos()).unwrap_or(i128::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(bytes: Option<u64>, packets: Option<u64>) -> Arc<RateLimiter> {
        RateLimiter::new(bytes, packets, "receive").unwrap().unwrap()
    }

    /// Bytes that pass in ten seconds, in packets of `size`.
    fn passed(limiter: &RateLimiter, size: usize) -> usize {
        let begin = Instant::now();
        let (mut now, mut bytes) = (begin, 0);
        while now < begin + Duration::from_secs(10) {
            match limiter.wait(now) {
                Some(wait) => now += wait,
                None => {
                    limiter.spend(size);
                    bytes += size;
                }
            }
        }
        bytes
    }

    #[test]
    fn a_rate_holds_over_time_whatever_the_size() {
        for size in [60, 1500, 65000] {
            let bytes = passed(&of(Some(1_000_000), None), size);
            assert!(
                (10_000_000..10_200_000).contains(&bytes),
                "{bytes} in packets of {size}"
            );
        }
        let packets = passed(&of(None, Some(500)), 1500) / 1500;
        assert!((5000..5060).contains(&packets), "{packets}");
        // The tighter one decides.
        let packets = passed(&of(Some(1 << 40), Some(500)), 1500) / 1500;
        assert!((5000..5060).contains(&packets), "{packets}");
    }

    #[test]
    fn a_rate_of_one_still_lets_something_through() {
        assert_eq!(passed(&of(None, Some(1)), 1), 11);
    }

    #[test]
    fn nothing_is_no_rate() {
        let error = RateLimiter::new(Some(0), None, "transmit").unwrap_err().to_string();
        assert!(error.contains("transmit") && error.contains("leave it out"), "{error}");
        assert!(RateLimiter::new(None, None, "transmit").unwrap().is_none());
    }
}
