//! How much one key may ask for, and how much is done at once. Knows no endpoint.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use governor::clock::{Clock, DefaultClock};
use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::Error;
use crate::places::Places;

/// The most bytes of a request's body, to the API. What goes to a sandbox is bounded there.
pub(crate) const MAX_BODY: usize = 1 << 20;

/// Uploads of a tenant that are under way or wait; a client sends those of a build at once.
const UPLOADS: usize = 64;

/// What may be changed of it.
#[derive(Clone, Copy, Debug)]
pub struct LimitsConfig {
    /// Requests a second of one key.
    pub rate: NonZeroU32,
    /// Requests of one key at once, after a pause.
    pub burst: NonZeroU32,
    /// Requests of one key that are under way.
    pub per_key: usize,
    /// Connections of clients without TLS, and as many by TLS: strangers take none of those that come to the loopback listener.
    pub connections: usize,
    /// Connections by TLS of one address.
    pub per_address: usize,
    /// Requests about one sandbox's processes and files that are under way.
    pub per_sandbox: usize,
    /// Requests to its ports. Both together are fewer than its agent has connections.
    pub per_ports: usize,
}

impl Default for LimitsConfig {
    fn default() -> Self {
        Self {
            rate: NonZeroU32::new(100).unwrap_or(NonZeroU32::MIN),
            burst: NonZeroU32::new(200).unwrap_or(NonZeroU32::MIN),
            per_key: 64,
            connections: 4096,
            per_address: 1024,
            per_sandbox: 160,
            per_ports: 64,
        }
    }
}

/// Keeps to them.
pub(crate) struct Limits {
    config: LimitsConfig,
    rates: DefaultKeyedRateLimiter<Arc<str>>,
    clock: DefaultClock,
    keys: Seats,
    sandboxes: Seats,
    ports: Seats,
    uploads: Seats,
    /// Of connections without TLS.
    pub(crate) plain: Places,
    /// Of those by TLS.
    pub(crate) tls: Places,
    /// Changes that have begun, whether somebody waits for them or not.
    changes: Arc<Semaphore>,
}

/// More changes than can be under way: each has a seat of a key.
const CHANGES: u32 = 1 << 20;

impl Limits {
    pub(crate) fn new(config: LimitsConfig) -> Self {
        Self {
            config,
            rates: RateLimiter::keyed(Quota::per_second(config.rate).allow_burst(config.burst)),
            clock: DefaultClock::default(),
            keys: Seats::default(),
            sandboxes: Seats::default(),
            ports: Seats::default(),
            uploads: Seats::default(),
            plain: Places::new(config.connections, None),
            tls: Places::new(config.connections, Some(config.per_address)),
            changes: Arc::new(Semaphore::new(CHANGES as usize)),
        }
    }

    /// One more request of a key.
    pub(crate) fn request(&self, key: &Arc<str>) -> Result<Seat, Error> {
        if let Err(refused) = self.rates.check_key(key) {
            return Err(Error::TooMany {
                after: seconds(refused.wait_time_from(self.clock.now())),
            });
        }
        let seat = self.keys.take(key, self.config.per_key);
        seat.ok_or(Error::TooMany { after: 1 })
    }

    /// One more change that is carried out to its end.
    pub(crate) fn change(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.changes).try_acquire_owned().ok()
    }

    /// Waits until none is under way.
    pub(crate) async fn no_changes(&self) {
        // Nobody closes it.
        drop(self.changes.acquire_many(CHANGES).await);
    }

    /// One more request about a sandbox's processes and files.
    pub(crate) fn to_sandbox(&self, id: &str) -> Option<Seat> {
        self.sandboxes.take(id, self.config.per_sandbox)
    }

    /// One more upload of a tenant, which needs no key but an address.
    pub(crate) fn to_uploads(&self, tenant: &str) -> Option<Seat> {
        self.uploads.take(tenant, UPLOADS)
    }

    /// One more request to its ports, which strangers may ask for.
    pub(crate) fn to_ports(&self, id: &str) -> Option<Seat> {
        self.ports.take(id, self.config.per_ports)
    }
}

/// What is waited for at least, in whole seconds.
fn seconds(wait: Duration) -> u64 {
    wait.as_secs().saturating_add(u64::from(wait.subsec_nanos() > 0)).max(1)
}

/// So many at once for each name; a name without any is forgotten.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seats(Arc<Mutex<HashMap<String, Arc<Semaphore>>>>);

/// One of them, until it is dropped.
#[derive(Debug)]
pub(crate) struct Seat {
    seats: Seats,
    name: String,
    permit: Option<OwnedSemaphorePermit>,
    most: usize,
}

impl Seats {
    /// One more of this name.
    pub(crate) fn take(&self, name: &str, most: usize) -> Option<Seat> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || Arc::new(Semaphore::new(most));
        let semaphore = all.entry(name.to_owned()).or_insert_with(new);
        let permit = Arc::clone(semaphore).try_acquire_owned().ok()?;
        Some(Seat {
            seats: self.clone(),
            name: name.to_owned(),
            permit: Some(permit),
            most,
        })
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut all = self.seats.0.lock().unwrap_or_else(PoisonError::into_inner);
        self.permit = None;
        if all
            .get(&self.name)
            .is_some_and(|left| left.available_permits() >= self.most)
        {
            all.remove(&self.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(n: u32) -> NonZeroU32 {
        NonZeroU32::new(n).unwrap()
    }

    #[test]
    fn a_key_that_asks_too_often_is_told_when_to_come_again() {
        let limits = Limits::new(LimitsConfig {
            rate: number(1),
            burst: number(2),
            ..LimitsConfig::default()
        });
        let (one, other): (Arc<str>, Arc<str>) = ("one".into(), "other".into());
        assert!(limits.request(&one).is_ok() && limits.request(&one).is_ok());
        let Err(Error::TooMany { after }) = limits.request(&one) else {
            panic!("a third request at once passed")
        };
        assert_eq!(after, 1);
        assert!(limits.request(&other).is_ok());
    }

    #[test]
    fn seats_are_given_back_and_names_forgotten() {
        let limits = Limits::new(LimitsConfig {
            per_sandbox: 2,
            ..LimitsConfig::default()
        });
        let (a, b) = (limits.to_sandbox("s"), limits.to_sandbox("s"));
        assert!(a.is_some() && b.is_some());
        assert!(limits.to_sandbox("s").is_none());
        assert!(limits.to_sandbox("t").is_some());
        drop(a);
        assert!(limits.to_sandbox("s").is_some());
        drop(b);
        assert!(limits.sandboxes.0.lock().unwrap().is_empty());
    }

    #[test]
    fn waits_are_whole_seconds() {
        for (ms, s) in [(0, 1), (1, 1), (1000, 1), (1001, 2)] {
            assert_eq!(seconds(Duration::from_millis(ms)), s);
        }
    }
}
