//! Memory that a tenant shares with the arbiter, and with nobody else: who may go on, and what was used.
//!
//! | at | written by | |
//! |---|---|---|
//! | 0 | arbiter | 1 if the tenant has no more than its credit |
//! | 4 | arbiter | microseconds that it may have used in all when the credit is over; wraps |
//! | 8 | arbiter | microseconds of commands that it may have on the device at a time |
//! | 12 | arbiter | 1 if nobody looks at what the tenant writes before it sends a byte |
//! | 128 | tenant | microseconds that it has used in all; wraps |
//! | 132 | tenant | 1 if it has work |
//! | 136 | tenant | 1 if it waits for credit |
//!
//! Each is one word that is read once. What a tenant writes is about itself, and what it gains by a lie is bounded (`rounds`).

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::SeqCst;

use base::Mapping;
use rustix::fs::SealFlags;
use wire::ring::{Region, Word};

use crate::Credit;

/// What the packet that brings a page begins with: the version is its last byte.
pub(crate) const HELLO: [u8; 8] = *b"BSLTSHR\x01";

const SIZE: usize = 4096;

/// Microseconds of commands that a tenant may have on the device at a time while others have work: what these wait for is that, or one
/// command that is longer.
const SLICE: u32 = 1_000;

/// The same while nobody else has: what the first command of another tenant waits for.
const ALONE: u32 = 10_000;

/// The most credit at a time, in microseconds: half of what wraps is the difference of two numbers that are far apart.
const MOST: u64 = 1 << 30;

/// A page.
#[derive(Debug, Clone)]
pub(crate) struct Page {
    limited: Word,
    granted: Word,
    slice: Word,
    asleep: Word,
    spent: Word,
    busy: Word,
    waits: Word,
}

impl Page {
    /// A new one, to be sent to a tenant.
    pub(crate) fn create() -> io::Result<(File, Self)> {
        let file = base::memfd::sized("accel-share", SIZE as u64)?;
        let page = Self::map(&file)?;
        page.slice.store(ALONE, SeqCst);
        page.asleep.store(1, SeqCst);
        Ok((file, page))
    }

    /// One that was sent here. It cannot be shrunk beneath the mapping.
    pub(crate) fn map(file: impl AsFd) -> io::Result<Self> {
        let seals = rustix::fs::fcntl_get_seals(&file)?;
        let size = rustix::fs::fstat(&file)?.st_size;
        if !seals.contains(SealFlags::SHRINK) || usize::try_from(size).unwrap_or_default() < SIZE {
            return Err(io::Error::other(
                "the page of an arbiter is no sealed memory of a page's size",
            ));
        }
        let region = Region::new(Mapping::new(&file, SIZE)?);
        let word = |at| region.word(at).map_err(io::Error::other);
        Ok(Self {
            limited: word(0)?,
            granted: word(4)?,
            slice: word(8)?,
            asleep: word(12)?,
            spent: word(128)?,
            busy: word(132)?,
            waits: word(136)?,
        })
    }

    /// For the tenant: how many microseconds of its credit are left, if it is limited.
    pub(crate) fn left(&self) -> Option<i32> {
        let limited = self.limited.load(SeqCst) != 0;
        limited.then(|| {
            self.granted
                .load(SeqCst)
                .wrapping_sub(self.spent.load(SeqCst))
                .cast_signed()
        })
    }

    /// For the tenant: what may be on the device at a time, in microseconds.
    pub(crate) fn slice(&self) -> u32 {
        self.slice.load(SeqCst)
    }

    /// For the tenant: so many microseconds more are used.
    pub(crate) fn spend(&self, more: u32) {
        self.spent.add(more, SeqCst);
    }

    /// For the tenant: whether it has work. True if the arbiter has to be told, once.
    pub(crate) fn set_busy(&self, busy: bool) -> bool {
        self.busy.store(busy.into(), SeqCst);
        let tell = busy && self.asleep.load(SeqCst) != 0;
        if tell {
            self.asleep.store(0, SeqCst);
        }
        tell
    }

    /// For the tenant: whether it waits for credit.
    pub(crate) fn set_waits(&self, waits: bool) {
        self.waits.store(waits.into(), SeqCst);
    }

    /// For the arbiter: all that was used, whether there is work, and whether it waits.
    pub(crate) fn seen(&self) -> (u32, bool, bool) {
        let waits = self.waits.load(SeqCst) != 0;
        (self.spent.load(SeqCst), waits || self.busy.load(SeqCst) != 0, waits)
    }

    /// For the arbiter: the credit, of a tenant that has used so much in all. True if that is news to one that waits.
    pub(crate) fn grant(&self, credit: Credit, spent: u32) -> bool {
        match credit {
            Credit::Unlimited => {
                let before = self.limited.load(SeqCst);
                self.slice.store(ALONE, SeqCst);
                self.limited.store(0, SeqCst);
                before != 0
            }
            Credit::Microseconds(left) => {
                let left = u32::try_from(left.min(MOST)).unwrap_or_default();
                self.granted.store(spent.wrapping_add(left), SeqCst);
                self.slice.store(SLICE, SeqCst);
                self.limited.store(1, SeqCst);
                left > 0
            }
        }
    }

    /// For the arbiter: nobody looks any more. False if there is work after all.
    pub(crate) fn sleep(&self) -> bool {
        self.asleep.store(1, SeqCst);
        let busy = self.busy.load(SeqCst) != 0 || self.waits.load(SeqCst) != 0;
        if busy {
            self.asleep.store(0, SeqCst);
        }
        !busy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credit_is_right_where_numbers_wrap() {
        let (file, arbiter) = Page::create().unwrap();
        let tenant = Page::map(&file).unwrap();
        assert_eq!((tenant.left(), tenant.slice()), (None, ALONE));
        tenant.spend(u32::MAX - 10);
        let (spent, busy, waits) = arbiter.seen();
        assert!(!busy && !waits);
        assert!(arbiter.grant(Credit::Microseconds(100), spent));
        assert_eq!((tenant.left(), tenant.slice()), (Some(100), SLICE));
        tenant.spend(30);
        assert_eq!(tenant.left(), Some(70));
        tenant.spend(100);
        assert_eq!(tenant.left(), Some(-30));
        assert!(!arbiter.grant(Credit::Microseconds(0), arbiter.seen().0));
        assert_eq!(tenant.left(), Some(0));
        assert!(arbiter.grant(Credit::Unlimited, 0) && tenant.left().is_none() && tenant.slice() == ALONE);
    }

    #[test]
    fn whoever_begins_work_tells_it_once() {
        let (_file, page) = Page::create().unwrap();
        assert!(page.set_busy(true) && !page.set_busy(true));
        assert!(!page.sleep(), "it has work");
        assert!(!page.set_busy(false));
        assert!(page.sleep() && page.set_busy(true));
    }

    #[test]
    fn memory_that_could_shrink_is_refused() {
        let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("test", flags).unwrap();
        rustix::fs::ftruncate(&file, SIZE as u64).unwrap();
        assert!(Page::map(&file).is_err());
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        assert!(Page::map(&file).is_ok());
    }
}
