//! How far the mapping of a guest's memory is, and how fast it went. Knows no memory, and not by whom it is mapped.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What has been mapped since there are functions, whatever became of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MapCounts {
    /// Requests that mapped something.
    pub calls: u64,
    /// Bytes that they mapped.
    pub bytes: u64,
    /// How long memory was being filled and mapped for that: the times without a request to map are not in it.
    pub time: Duration,
}

impl std::iter::Sum for MapCounts {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |sum, one| Self {
            calls: sum.calls + one.calls,
            bytes: sum.bytes + one.bytes,
            time: sum.time + one.time,
        })
    }
}

/// What is mapped now, and what has been.
#[derive(Debug, Default)]
pub(super) struct Progress {
    mapped: AtomicU64,
    calls: AtomicU64,
    bytes: AtomicU64,
    busy: Mutex<Busy>,
}

#[derive(Debug, Default)]
struct Busy {
    /// So many are at work, the first of them since then.
    workers: u32,
    since: Option<Instant>,
    /// What was over before.
    before: Duration,
}

/// Somebody fills memory, or maps it, as long as this is there. The times of several at once count once.
pub(super) struct Work(Arc<Progress>);

impl Progress {
    pub(super) fn begin(self: &Arc<Self>) -> Work {
        let mut busy = self.busy();
        busy.workers += 1;
        busy.since.get_or_insert_with(Instant::now);
        Work(Arc::clone(self))
    }

    /// So much was mapped by one request.
    pub(super) fn add(&self, bytes: u64) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.mapped.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Nothing is mapped.
    pub(super) fn forget(&self) {
        self.mapped.store(0, Ordering::Relaxed);
    }

    /// So much is not mapped any more.
    pub(super) fn remove(&self, bytes: u64) {
        self.mapped.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(super) fn mapped(&self) -> u64 {
        self.mapped.load(Ordering::Relaxed)
    }

    pub(super) fn counts(&self) -> MapCounts {
        let busy = self.busy();
        MapCounts {
            calls: self.calls.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            time: busy.before + busy.since.map_or(Duration::ZERO, |since| since.elapsed()),
        }
    }

    fn busy(&self) -> MutexGuard<'_, Busy> {
        // Plain values, each change of them whole.
        self.busy.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        let mut busy = self.0.busy();
        busy.workers -= 1;
        if busy.workers == 0
            && let Some(since) = busy.since.take()
        {
            busy.before += since.elapsed();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSE: Duration = Duration::from_millis(20);

    #[test]
    fn the_time_of_work_counts_once_and_rests_do_not() {
        let progress = Arc::new(Progress::default());
        std::thread::sleep(PAUSE);
        assert_eq!(progress.counts().time, Duration::ZERO);
        let begun = Instant::now();
        let one = progress.begin();
        let other = progress.begin();
        std::thread::sleep(PAUSE);
        assert!(progress.counts().time >= PAUSE, "it is told while that goes on");
        drop(one);
        std::thread::sleep(PAUSE);
        drop(other);
        let (counted, elapsed) = (progress.counts().time, begun.elapsed());
        assert!((PAUSE * 2..=elapsed).contains(&counted), "{counted:?} of {elapsed:?}");
        std::thread::sleep(PAUSE);
        assert_eq!(progress.counts().time, counted, "nobody is at work");
        drop(progress.begin());
        assert!(progress.counts().time < counted + PAUSE);
    }

    #[test]
    fn what_is_unmapped_has_been_mapped() {
        let progress = Progress::default();
        progress.add(5);
        progress.add(7);
        progress.remove(5);
        assert_eq!(progress.mapped(), 7);
        progress.forget();
        let counts = progress.counts();
        assert_eq!((progress.mapped(), counts.calls, counts.bytes), (0, 2, 12));
    }
}
