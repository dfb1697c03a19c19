//! The files that the other side knows: numbers of its own for what was looked up, until it forgets them. Bounded. Knows
//! no message.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{FileType, Stat};
use rustix::io::Errno;

use crate::abi::ROOT_ID;

/// A file of any kind. Its descriptor (`O_PATH`) keeps its number from being used anew.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) file: OwnedFd,
    pub(crate) kind: FileType,
}

impl Node {
    pub(crate) fn of(file: OwnedFd) -> Result<Self, Errno> {
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode);
        Ok(Self { file, kind })
    }
}

/// Device and number.
type Key = (u64, u64);

#[derive(Debug)]
struct Known {
    node: Arc<Node>,
    key: Key,
    /// How often the other side was told of it and has not forgotten.
    lookups: u64,
}

#[derive(Debug, Default)]
struct Tables {
    by_id: HashMap<u64, Known>,
    by_key: HashMap<Key, u64>,
    last: u64,
}

/// All of them.
#[derive(Debug)]
pub(crate) struct Nodes {
    root: Arc<Node>,
    root_key: Key,
    most: usize,
    tables: Mutex<Tables>,
}

fn key(stat: &Stat) -> Key {
    (stat.st_dev, stat.st_ino)
}

impl Nodes {
    /// Only the root, which is never forgotten.
    pub(crate) fn new(root: OwnedFd, stat: &Stat, most: usize) -> Self {
        let nodes = Self {
            root: Arc::new(Node {
                file: root,
                kind: FileType::Directory,
            }),
            root_key: key(stat),
            most,
            tables: Mutex::default(),
        };
        nodes.clear();
        nodes
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets all but the root. Numbers are not used again.
    pub(crate) fn clear(&self) {
        let mut tables = self.tables();
        tables.last = tables.last.max(ROOT_ID);
        tables.by_id.clear();
        tables.by_key.clear();
        let root = Known {
            node: Arc::clone(&self.root),
            key: self.root_key,
            lookups: 1,
        };
        tables.by_id.insert(ROOT_ID, root);
        tables.by_key.insert(self.root_key, ROOT_ID);
    }

    pub(crate) fn root(&self) -> Arc<Node> {
        Arc::clone(&self.root)
    }

    pub(crate) fn get(&self, id: u64) -> Result<Arc<Node>, Errno> {
        let tables = self.tables();
        tables
            .by_id
            .get(&id)
            .map(|known| Arc::clone(&known.node))
            .ok_or(Errno::STALE)
    }

    /// The number of a file that was looked up; the other side is told of it once more.
    pub(crate) fn enter(&self, file: OwnedFd, stat: &Stat) -> Result<u64, Errno> {
        let mut tables = self.tables();
        let key = key(stat);
        if let Some(&id) = tables.by_key.get(&key)
            && let Some(known) = tables.by_id.get_mut(&id)
        {
            known.lookups = known.lookups.saturating_add(1);
            if id != ROOT_ID {
                // It goes by the name by which it was found last: an older one may be gone.
                let kind = known.node.kind;
                known.node = Arc::new(Node { file, kind });
            }
            return Ok(id);
        }
        if tables.by_id.len() >= self.most {
            return Err(Errno::NFILE);
        }
        tables.last += 1;
        let id = tables.last;
        let kind = FileType::from_raw_mode(stat.st_mode);
        let node = Arc::new(Node { file, kind });
        tables.by_id.insert(id, Known { node, key, lookups: 1 });
        tables.by_key.insert(key, id);
        Ok(id)
    }

    /// The other side has forgotten it this often.
    pub(crate) fn forget(&self, id: u64, count: u64) {
        if id == ROOT_ID {
            return;
        }
        let mut tables = self.tables();
        let Some(known) = tables.by_id.get_mut(&id) else {
            return;
        };
        known.lookups = known.lookups.saturating_sub(count);
        if known.lookups == 0
            && let Some(known) = tables.by_id.remove(&id)
        {
            tables.by_key.remove(&known.key);
        }
    }

    /// The last number, and all but the root with their numbers and how often the other side was told of them.
    pub(crate) fn all(&self) -> (u64, Vec<(u64, u64, Arc<Node>)>) {
        let tables = self.tables();
        let told = tables.by_id.iter().filter(|(id, _)| **id != ROOT_ID);
        let all = told.map(|(id, known)| (*id, known.lookups, Arc::clone(&known.node)));
        (tables.last, all.collect())
    }

    /// A file that the other side knows by this number already.
    pub(crate) fn enter_as(&self, id: u64, lookups: u64, file: OwnedFd) -> Result<(), Errno> {
        let stat = rustix::fs::fstat(&file)?;
        let (key, kind) = (key(&stat), FileType::from_raw_mode(stat.st_mode));
        let mut tables = self.tables();
        if tables.by_id.contains_key(&id) || tables.by_key.contains_key(&key) {
            return Err(Errno::EXIST);
        }
        let node = Arc::new(Node { file, kind });
        tables.by_id.insert(id, Known { node, key, lookups });
        tables.by_key.insert(key, id);
        tables.last = tables.last.max(id);
        Ok(())
    }

    /// Numbers up to this one have been given out.
    pub(crate) fn go_on_after(&self, last: u64) {
        let mut tables = self.tables();
        tables.last = tables.last.max(last);
    }

    #[cfg(test)]
    pub(crate) fn count(&self) -> usize {
        self.tables().by_id.len()
    }
}
