//! How many bytes are held at once for those who ask and for guests: a budget of all, and one tenant's share of it, so that none takes what
//! others need. Counted are messages, lists, events and frames, as far as they are there; what every connection takes is bounded by the
//! number of connections. Knows no request.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::Error;

/// What grows is counted by so many bytes at once.
const STEP: usize = 16 << 10;

/// A tenant has at most this part of the whole, and a list of the longest in any case.
const PART: usize = 4;
const LONGEST: usize = 64 << 20;

/// Bytes that are held, and how many may be.
#[derive(Debug)]
struct Count {
    held: AtomicUsize,
    most: usize,
}

impl Count {
    fn of(most: usize) -> Arc<Self> {
        Arc::new(Self {
            held: AtomicUsize::new(0),
            most,
        })
    }

    fn take(&self, bytes: usize) -> bool {
        let fits = |held: usize| held.checked_add(bytes).filter(|sum| *sum <= self.most);
        let taken = self.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits);
        taken.is_ok()
    }

    fn take_anyway(&self, bytes: usize) {
        self.held.fetch_add(bytes, Ordering::Relaxed);
    }

    fn give_back(&self, bytes: usize) {
        self.held.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn exhausted(&self, whose: &str) -> Error {
        let mib = self.most >> 20;
        Error::Memory(format!(
            "requests {whose} hold as much memory as they may, {mib} MiB: ask again later, for less, or less at once"
        ))
    }
}

/// The budget of all; clones are the same one.
#[derive(Clone, Debug)]
pub struct Memory(Arc<Count>);

impl Memory {
    /// The default.
    pub const DEFAULT: usize = 512 << 20;

    /// One of so many bytes.
    pub fn new(bytes: usize) -> Self {
        Self(Count::of(bytes))
    }

    /// A tenant's share.
    pub fn share(&self) -> Share {
        Share {
            whole: Arc::clone(&self.0),
            own: Count::of((self.0.most / PART).max(LONGEST).min(self.0.most)),
        }
    }
}

impl Default for Memory {
    fn default() -> Self {
        Self::new(Self::DEFAULT)
    }
}

/// One tenant's share of the budget; clones are the same one.
#[derive(Clone, Debug)]
pub struct Share {
    whole: Arc<Count>,
    own: Arc<Count>,
}

impl Share {
    /// Nothing as yet.
    pub(crate) fn nothing(&self) -> Held {
        Held {
            share: self.clone(),
            bytes: 0,
        }
    }

    /// These bytes, which are there already and are sent now: there may be less left than none for others until they are.
    pub(crate) fn hold_anyway(&self, bytes: usize) -> Held {
        self.own.take_anyway(bytes);
        self.whole.take_anyway(bytes);
        Held {
            share: self.clone(),
            bytes,
        }
    }

    /// Whether somebody else has it, too.
    pub fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.own) > 1
    }
}

/// Bytes that are held until this is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    share: Share,
    bytes: usize,
}

impl Held {
    /// Holds so many in all, or somewhat more.
    ///
    /// # Errors
    /// There is not that much left. Nobody waits: who holds something already would do so for others who do.
    pub(crate) fn grow_to(&mut self, bytes: usize) -> Result<(), Error> {
        let missing = bytes.saturating_sub(self.bytes);
        if missing == 0 {
            return Ok(());
        }
        let more = missing.max(STEP);
        if !self.share.own.take(more) {
            return Err(self.share.own.exhausted("of this tenant"));
        }
        if !self.share.whole.take(more) {
            self.share.own.give_back(more);
            return Err(self.share.whole.exhausted("of all tenants"));
        }
        self.bytes += more;
        Ok(())
    }

    /// How many they are.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.share.own.give_back(self.bytes);
        self.share.whole.give_back(self.bytes);
    }
}

/// What tests ask.
#[cfg(test)]
impl Share {
    /// Whether so many bytes are left.
    pub(crate) fn has(&self, bytes: usize) -> bool {
        self.own.held.load(Ordering::Relaxed) + bytes <= self.own.most
    }

    /// Holds so many bytes.
    pub(crate) fn hold(&self, bytes: usize) -> Held {
        let mut held = self.nothing();
        held.grow_to(bytes).unwrap();
        held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_is_given_back() {
        let memory = Memory::new(4 * STEP);
        let share = memory.share();
        let mut held = share.hold(1);
        held.grow_to(STEP).unwrap();
        assert_eq!(held.bytes(), STEP);
        held.grow_to(3 * STEP).unwrap();
        let mut other = share.nothing();
        let error = other.grow_to(STEP + 1).unwrap_err();
        assert_eq!(error.code().name(), "resource_exhausted");
        assert_eq!(error.status().as_u16(), 429);
        other.grow_to(STEP).unwrap();
        // What is there is sent, also where it is more than may be held.
        let sent = share.hold_anyway(10 * STEP);
        drop((held, other));
        assert!(!share.has(1));
        drop(sent);
        assert!(share.has(4 * STEP) && memory.0.held.load(Ordering::Relaxed) == 0);
    }

    #[test]
    fn no_tenant_takes_it_all() {
        let memory = Memory::new(2 * LONGEST);
        let (one, other, third) = (memory.share(), memory.share(), memory.share());
        let mut all = one.hold(LONGEST);
        let text = all.grow_to(LONGEST + 1).unwrap_err().to_string();
        assert!(text.contains("of this tenant hold"), "{text}");
        let _half = other.hold(LONGEST / 2);
        let mut late = third.nothing();
        let text = late.grow_to(LONGEST).unwrap_err().to_string();
        assert!(text.contains("of all tenants hold"), "{text}");
        // What was refused for lack of the whole is not counted as its own.
        late.grow_to(LONGEST / 2).unwrap();
        assert!(!one.clone().has(1) && one.is_in_use());
    }
}
