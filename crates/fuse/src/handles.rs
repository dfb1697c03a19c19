//! Files and directories that the other side has opened. Bounded. Knows no message.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

/// One of them.
#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) file: OwnedFd,
    /// What a program writes goes to the end (`O_APPEND`).
    pub(crate) append: bool,
    /// Held while a directory is read, as its position is one for all.
    pub(crate) reading: Mutex<()>,
}

/// All of them.
#[derive(Debug)]
pub(crate) struct Handles {
    most: usize,
    tables: Mutex<(u64, HashMap<u64, Arc<Handle>>)>,
}

impl Handles {
    pub(crate) fn new(most: usize) -> Self {
        Self {
            most,
            tables: Mutex::default(),
        }
    }

    fn tables(&self) -> MutexGuard<'_, (u64, HashMap<u64, Arc<Handle>>)> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether one more may be opened; asked before it is, and again by [`Handles::add`].
    pub(crate) fn room(&self) -> Result<(), Errno> {
        if self.tables().1.len() < self.most {
            Ok(())
        } else {
            Err(Errno::NFILE)
        }
    }

    pub(crate) fn add(&self, file: OwnedFd, append: bool) -> Result<u64, Errno> {
        let mut tables = self.tables();
        if tables.1.len() >= self.most {
            return Err(Errno::NFILE);
        }
        tables.0 += 1;
        let id = tables.0;
        let handle = Handle {
            file,
            append,
            reading: Mutex::new(()),
        };
        tables.1.insert(id, Arc::new(handle));
        Ok(id)
    }

    pub(crate) fn get(&self, id: u64) -> Result<Arc<Handle>, Errno> {
        self.tables().1.get(&id).cloned().ok_or(Errno::BADF)
    }

    pub(crate) fn remove(&self, id: u64) -> Result<(), Errno> {
        self.tables().1.remove(&id).map(drop).ok_or(Errno::BADF)
    }

    pub(crate) fn clear(&self) {
        self.tables().1.clear();
    }
}
