//! Locks by name, such as one for each sandbox: what many ask for at once is done once, or by so many at a time. Knows not what that is.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The map is looked through for locks that nobody holds when it has grown to this, and then to twice what was left.
const LOOK: usize = 256;

/// Locks by name, each of which so many hold at once.
#[derive(Debug)]
pub(crate) struct Locks {
    all: Mutex<Table>,
    at_once: usize,
}

#[derive(Debug, Default)]
struct Table {
    locks: HashMap<String, Weak<Semaphore>>,
    look_at: usize,
}

impl Locks {
    pub(crate) fn new(at_once: usize) -> Self {
        Self {
            all: Mutex::default(),
            at_once,
        }
    }

    /// Waits for the lock of this name. Nothing closes it, so that there always is one in the end.
    pub(crate) async fn lock(&self, name: &str) -> Option<OwnedSemaphorePermit> {
        self.get(name).acquire_owned().await.ok()
    }

    fn get(&self, name: &str) -> Arc<Semaphore> {
        let mut table = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lock) = table.locks.get(name).and_then(Weak::upgrade) {
            return lock;
        }
        if table.locks.len() >= table.look_at.max(LOOK) {
            table.locks.retain(|_, lock| lock.strong_count() > 0);
            table.look_at = 2 * table.locks.len();
        }
        let lock = Arc::new(Semaphore::new(self.at_once));
        table.locks.insert(name.to_owned(), Arc::downgrade(&lock));
        lock
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_name_is_locked_once_and_forgotten() {
        let locks = Locks::new(1);
        let held = locks.lock("a").await;
        assert!(locks.get("a").try_acquire().is_err());
        assert!(locks.get("b").try_acquire().is_ok());
        drop(held);
        assert!(locks.get("a").try_acquire().is_ok());
        for n in 0..10 * LOOK {
            drop(locks.lock(&n.to_string()).await);
        }
        assert!(locks.all.lock().unwrap().locks.len() <= LOOK);
    }
}
