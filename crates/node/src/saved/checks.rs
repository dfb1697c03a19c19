//! What is to be verified or summed in the background: a queue, and who was looked at already. Verifies nothing itself.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use node_api::transfer::Kind;

use crate::saved::snapshots::Place;

/// What is verified and summed in the background.
#[derive(Debug, Default)]
pub(crate) struct Checks {
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
pub(crate) struct Known {
    pub(crate) queue: VecDeque<Job>,
    /// Directories of what was verified since the daemon started, or is about to be.
    pub(crate) seen: BTreeSet<(u64, u64)>,
    /// There is a thread that takes from the queue.
    pub(crate) works: bool,
}

/// One place to be looked at.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) subject: Subject,
    /// It is only to have checksums, as it was just written.
    pub(crate) only_sums: bool,
}

/// A snapshot or a template; its files stay open, whatever comes to its name.
#[derive(Clone, Debug)]
pub(crate) struct Subject {
    pub(crate) kind: Kind,
    /// A snapshot's name, or a template's id.
    pub(crate) name: String,
    pub(crate) place: Place,
    pub(crate) has_disk: bool,
    /// A template that nobody has built.
    pub(crate) by_itself: bool,
}

impl Checks {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next one; without any the thread ends.
    pub(crate) fn next(&self) -> Option<Job> {
        let mut known = self.lock();
        let next = known.queue.pop_front();
        known.works = next.is_some();
        next
    }
}
