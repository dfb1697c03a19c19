//! How many bytes are held for those who ask, and for guests, at once: a budget of all sandboxes, and one sandbox's part of it, so that none
//! takes what others need. Counted are messages, lists and frames, which may be large; what every connection takes is bounded by the number
//! of connections. Knows no request.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::Error;

/// Bytes are counted by so many.
const UNIT: usize = 1024;

/// A sandbox has at most this part of the whole: a list of the longest, and as much again.
const PART: usize = 128 << 20;

/// The budget of all sandboxes; clones are the same one.
#[derive(Clone, Debug)]
pub struct Memory {
    bytes: usize,
    left: Arc<Semaphore>,
}

impl Memory {
    /// The default.
    pub const DEFAULT: usize = 512 << 20;

    /// One of so many bytes.
    pub fn new(bytes: usize) -> Self {
        Self {
            bytes,
            left: Arc::new(Semaphore::new(units(bytes))),
        }
    }

    /// One sandbox's part.
    pub(crate) fn part(&self) -> Part {
        let bytes = PART.min(self.bytes);
        Part {
            whole: self.clone(),
            own: Self::new(bytes),
        }
    }

    fn take(&self, units: u32, whose: &str) -> Result<OwnedSemaphorePermit, Error> {
        Arc::clone(&self.left).try_acquire_many_owned(units).map_err(|_| {
            let mib = self.bytes >> 20;
            Error::Memory(format!(
                "requests {whose} hold as much memory as they may, {mib} MiB: ask again later, for less, or less at once"
            ))
        })
    }
}

impl Default for Memory {
    fn default() -> Self {
        Self::new(Self::DEFAULT)
    }
}

/// One sandbox's part of the budget; clones are the same one.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    whole: Memory,
    own: Memory,
}

impl Part {
    /// Holds so many bytes.
    ///
    /// # Errors
    /// There is not that much left. Nobody waits: who holds something already would do so for others who do.
    pub(crate) fn hold(&self, bytes: usize) -> Result<Held, Error> {
        let units = u32::try_from(units(bytes)).unwrap_or(u32::MAX);
        let own = self.own.take(units, "to this sandbox")?;
        let whole = self.whole.take(units, "to all sandboxes")?;
        Ok(Held { own, whole })
    }
}

/// Bytes that are held until this is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    own: OwnedSemaphorePermit,
    whole: OwnedSemaphorePermit,
}

impl Held {
    /// Holds these besides.
    pub(crate) fn join(&mut self, other: Self) {
        self.own.merge(other.own);
        self.whole.merge(other.whole);
    }
}

fn units(bytes: usize) -> usize {
    bytes.div_ceil(UNIT).min(Semaphore::MAX_PERMITS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_is_given_back() {
        let memory = Memory::new(4 * UNIT);
        let part = memory.part();
        let mut held = part.hold(1).unwrap();
        held.join(part.hold(2 * UNIT).unwrap());
        let error = part.hold(UNIT + 1).unwrap_err();
        assert_eq!(error.code().name(), "resource_exhausted");
        assert_eq!(error.status().as_u16(), 429);
        part.hold(UNIT).unwrap();
        drop(held);
        part.hold(4 * UNIT).unwrap();
        assert_eq!(memory.left.available_permits(), 4);
        assert_eq!(part.own.left.available_permits(), 4);
    }

    #[test]
    fn no_sandbox_takes_it_all() {
        let memory = Memory::new(2 * PART);
        let (one, other) = (memory.part(), memory.part());
        let _all = one.hold(PART).unwrap();
        let text = one.hold(1).unwrap_err().to_string();
        assert!(text.contains("to this sandbox hold"), "{text}");
        let _half = other.hold(PART / 2).unwrap();
        let third = memory.part();
        let text = third.hold(PART).unwrap_err().to_string();
        assert!(text.contains("to all sandboxes hold"), "{text}");
        // What was refused for lack of the whole is not counted as its own.
        third.hold(PART / 2).unwrap();
    }
}
