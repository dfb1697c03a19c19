//! Files and directories that the other side has opened. Bounded. Knows no message.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::OFlags;
use rustix::io::Errno;

/// One of them.
#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) file: OwnedFd,
    /// For what (`O_ACCMODE`).
    pub(crate) access: OFlags,
    /// What a program writes goes to the end (`O_APPEND`).
    pub(crate) append: bool,
    /// Held while a directory is read, as its position is one for all.
    pub(crate) reading: Mutex<()>,
}

impl Handle {
    fn new(file: OwnedFd, access: OFlags, append: bool) -> Arc<Self> {
        Arc::new(Self {
            file,
            access,
            append,
            reading: Mutex::new(()),
        })
    }
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

    pub(crate) fn add(&self, file: OwnedFd, access: OFlags, append: bool) -> Result<u64, Errno> {
        let mut tables = self.tables();
        if tables.1.len() >= self.most {
            return Err(Errno::NFILE);
        }
        tables.0 += 1;
        let id = tables.0;
        tables.1.insert(id, Handle::new(file, access, append));
        Ok(id)
    }

    /// One that the other side has by this number already.
    pub(crate) fn add_as(&self, id: u64, file: OwnedFd, access: OFlags, append: bool) {
        let mut tables = self.tables();
        tables.0 = tables.0.max(id);
        tables.1.insert(id, Handle::new(file, access, append));
    }

    /// Numbers up to this one have been given out.
    pub(crate) fn go_on_after(&self, last: u64) {
        let mut tables = self.tables();
        tables.0 = tables.0.max(last);
    }

    /// The last number, and all of them by theirs.
    pub(crate) fn all(&self) -> (u64, Vec<(u64, Arc<Handle>)>) {
        let tables = self.tables();
        let all = tables.1.iter().map(|(id, handle)| (*id, Arc::clone(handle)));
        (tables.0, all.collect())
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
