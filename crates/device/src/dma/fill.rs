//! How a guest's memory is filled before it is mapped: how fast. Knows neither what is filled nor by which threads.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vmm_api::devices::{MIN_FILL_RATE, MemoryFill};

use crate::{CreateError, RateLimiter};

/// What holds for all threads that fill memory for one address space.
#[derive(Clone, Debug, Default)]
pub(crate) struct FillPolicy {
    /// Bytes a second, of all of them together; no limit if missing.
    rate: Option<Arc<RateLimiter>>,
}

impl FillPolicy {
    /// As a function's configuration says it.
    ///
    /// # Errors
    /// A rate at which nobody waits until all is filled.
    pub(super) fn of(config: MemoryFill) -> Result<Self, CreateError> {
        if let Some(rate) = config.rate.filter(|rate| *rate < MIN_FILL_RATE) {
            return Err(CreateError::Value(format!(
                "memory was to be filled with {rate} a second: give {MIN_FILL_RATE} at least, or no limit"
            )));
        }
        Self::with_rate(config.rate.map(|rate| rate.bytes()))
    }

    pub(super) fn with_rate(bytes: Option<u64>) -> Result<Self, CreateError> {
        Ok(Self {
            rate: RateLimiter::new(bytes, None, "memory fill")?,
        })
    }

    /// How long the next step has to wait; `None` when it need not.
    pub(super) fn wait(&self) -> Option<Duration> {
        self.rate.as_ref()?.wait(Instant::now())
    }

    /// So much is being filled.
    pub(super) fn spend(&self, bytes: u64) {
        if let Some(rate) = &self.rate {
            rate.spend(usize::try_from(bytes).unwrap_or(usize::MAX));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::ByteSize;

    #[test]
    fn a_rate_that_keeps_everybody_waiting_is_refused() {
        for rate in [ByteSize(0), ByteSize(MIN_FILL_RATE.bytes() - 1)] {
            let refused = FillPolicy::of(MemoryFill { rate: Some(rate) });
            let told = refused.err().unwrap().to_string();
            assert!(told.contains("a second: give 64 MiB at least"), "{told}");
        }
        let rate = Some(MIN_FILL_RATE);
        let policy = FillPolicy::of(MemoryFill { rate }).unwrap();
        assert_eq!(policy.wait(), None);
        policy.spend(MIN_FILL_RATE.bytes());
        assert!(policy.wait().is_some());
        let unlimited = FillPolicy::of(MemoryFill::default()).unwrap();
        unlimited.spend(u64::MAX);
        assert_eq!(unlimited.wait(), None);
    }
}
