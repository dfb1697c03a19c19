//! A lock for each sandbox, so that what many ask for at once is done once. Knows not what that is.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

/// The map is looked through for locks that nobody holds when it has grown to this, and then to twice what was left.
const LOOK: usize = 256;

/// Locks by name.
#[derive(Debug, Default)]
pub(crate) struct Locks {
    all: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    locks: HashMap<String, Weak<AsyncMutex<()>>>,
    look_at: usize,
}

impl Locks {
    /// Waits for the lock of this name.
    pub(crate) async fn lock(&self, name: &str) -> OwnedMutexGuard<()> {
        self.get(name).lock_owned().await
    }

    fn get(&self, name: &str) -> Arc<AsyncMutex<()>> {
        let mut table = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lock) = table.locks.get(name).and_then(Weak::upgrade) {
            return lock;
        }
        if table.locks.len() >= table.look_at.max(LOOK) {
            table.locks.retain(|_, lock| lock.strong_count() > 0);
            table.look_at = 2 * table.locks.len();
        }
        let lock = Arc::new(AsyncMutex::new(()));
        table.locks.insert(name.to_owned(), Arc::downgrade(&lock));
        lock
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_name_is_locked_once_and_forgotten() {
        let locks = Locks::default();
        let held = locks.lock("a").await;
        assert!(locks.get("a").try_lock().is_err());
        assert!(locks.get("b").try_lock().is_ok());
        drop(held);
        assert!(locks.get("a").try_lock().is_ok());
        for n in 0..10 * LOOK {
            drop(locks.lock(&n.to_string()).await);
        }
        assert!(locks.all.lock().unwrap().locks.len() <= LOOK);
    }
}
