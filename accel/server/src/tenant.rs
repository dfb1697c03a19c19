//! What all clients of a server have together: one tenant's part of an accelerator, and what it did with it.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use accel_arbiter::Gate;

use crate::api::Code;
use crate::meter::Meter;
use crate::quota::Quota;

/// Different codes and calls that are counted; what comes when there are more is counted together.
const MOST: usize = 256;

/// How much of an accelerator the clients of a server may have, all of them together.
#[derive(Debug, Clone, Default)]
pub struct TenantLimits {
    /// Bytes of memory on the accelerator; `None` is as much as it has.
    pub memory: Option<u64>,
    /// Where an arbiter listens for this tenant that divides the accelerator's time; `None` if nobody does.
    pub arbiter: Option<PathBuf>,
    /// Commands that may be in flight; `None` is as many as the server can.
    pub in_flight: Option<usize>,
    /// Whether it is measured how long commands take. It is, too, if one of the two above is said.
    pub measures_time: bool,
}

/// A tenant.
#[derive(Debug)]
pub(crate) struct Tenant {
    pub(crate) quota: Arc<Quota>,
    pub(crate) meter: Option<Arc<Meter>>,
    pub(crate) counters: Counters,
}

impl Tenant {
    /// Without limits.
    pub(crate) fn unlimited() -> Arc<Self> {
        Arc::new(Self {
            quota: Quota::new(None),
            meter: None,
            counters: Counters::default(),
        })
    }

    pub(crate) fn new(limits: &TenantLimits) -> io::Result<Arc<Self>> {
        let gate = limits.arbiter.as_deref().map(Gate::new).transpose()?;
        let measures = gate.is_some() || limits.in_flight.is_some() || limits.measures_time;
        let meter = measures.then(|| Meter::new(gate, limits.in_flight)).transpose()?;
        Ok(Arc::new(Self {
            quota: Quota::new(limits.memory),
            meter,
            counters: Counters::default(),
        }))
    }
}

/// What went wrong, and how often.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// By the API's codes.
    failed: Mutex<BTreeMap<i32, u64>>,
    /// By the numbers of calls.
    not_served: Mutex<BTreeMap<u16, u64>>,
}

impl Counters {
    /// A call failed.
    pub(crate) fn failed(&self, code: Code) {
        count(&self.failed, code.0, i32::MIN);
    }

    /// A call came that nobody carries out.
    pub(crate) fn not_served(&self, op: u16) {
        count(&self.not_served, op, u16::MAX);
    }

    /// Failed calls, by their codes.
    pub(crate) fn all_failed(&self) -> BTreeMap<i32, u64> {
        lock(&self.failed).clone()
    }

    /// Calls that nobody carries out, by their numbers.
    pub(crate) fn all_not_served(&self) -> BTreeMap<u16, u64> {
        lock(&self.not_served).clone()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One more of these, or of the rest where there are too many: a client chooses numbers.
fn count<K: Ord + Copy>(counts: &Mutex<BTreeMap<K, u64>>, key: K, rest: K) {
    let mut counts = lock(counts);
    let key = if counts.len() < MOST || counts.contains_key(&key) {
        key
    } else {
        rest
    };
    *counts.entry(key).or_default() += 1;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_chooses_numbers_fills_no_memory() {
        let counters = Counters::default();
        for op in 0..2000 {
            counters.not_served(op);
        }
        let counts = counters.all_not_served();
        assert_eq!((counts.len(), counts.values().sum::<u64>()), (MOST + 1, 2000));
        assert_eq!(counts[&u16::MAX], 2000 - MOST as u64);
    }
}
