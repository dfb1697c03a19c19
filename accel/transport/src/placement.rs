//! On which CPU a server's thread is that shares its client's. Knows nothing of what they say to each other.

use std::sync::atomic::Ordering;

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};
use wire::ring::Word;

use crate::Error;

/// What one side does about it.
#[derive(Debug)]
pub(crate) enum Placement {
    /// Nothing: the two may be anywhere.
    Anywhere,
    /// A client's thread says where it is, before it wakes the server: the CPU plus one, so that zeroes say nothing.
    Tell { word: Word, told: u32 },
    /// A server's thread goes there, as far as it may.
    Follow {
        word: Word,
        at: u32,
        /// Where it was allowed to be before it moved; none yet.
        allowed: Option<Box<CpuSet>>,
    },
}

impl Placement {
    /// Of a client.
    pub(crate) fn tell(word: Word) -> Self {
        Self::Tell { word, told: 0 }
    }

    /// Of a server.
    pub(crate) fn follow(word: Word) -> Self {
        Self::Follow {
            word,
            at: 0,
            allowed: None,
        }
    }

    /// Before the server is woken.
    pub(crate) fn before_wake(&mut self) {
        if let Self::Tell { word, told } = self {
            let here = u32::try_from(sched_getcpu()).unwrap_or_default().wrapping_add(1);
            if *told != here {
                *told = here;
                word.store(here, Ordering::Release);
            }
        }
    }

    /// After this side has slept, on its thread. True if the thread has moved.
    ///
    /// # Errors
    /// [`Error::Io`]: the CPUs of this thread cannot be asked for. One where it may not be is no error: it stays.
    pub(crate) fn after_sleep(&mut self) -> Result<bool, Error> {
        let Self::Follow { word, at, allowed } = self else {
            return Ok(false);
        };
        let there = word.load(Ordering::Acquire);
        if *at == there || there == 0 {
            return Ok(false);
        }
        // Whatever comes of it, it is tried once.
        *at = there;
        let allowed = match allowed {
            Some(allowed) => allowed,
            None => {
                let own = sched_getaffinity(None).map_err(Error::io("ask for a thread's CPUs"))?;
                allowed.insert(Box::new(own))
            }
        };
        let cpu = there as usize - 1;
        if cpu >= CpuSet::MAX_CPU || !allowed.is_set(cpu) {
            return Ok(false);
        }
        let mut only = CpuSet::new();
        only.set(cpu);
        Ok(sched_setaffinity(None, &only).is_ok())
    }
}
