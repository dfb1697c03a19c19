//! How much memory the clients of a server may have on the accelerator, all of them together, and what they have.
//!
//! ```text
//!   asked for ── charged ──▶ the back end makes it ── released, and no command needs it ──▶ the back end tells ── given back
//!       └── over the quota: refused, and the back end has heard of nothing
//! ```
//!
//! A back end keeps memory that was released for as long as a command works with it, so a charge ends when the back end says that the
//! object is gone, and not when the client lets go. Knows no call.
#![allow(unsafe_code, reason = "registers a function that a C API calls when memory is gone")]

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use crate::api::{Backend, Code, P};

/// Memory of all clients of a server.
#[derive(Debug)]
pub(crate) struct Quota {
    limit: u64,
    used: AtomicU64,
    /// The most that was used at a time.
    most: AtomicU64,
    refused: AtomicU64,
}

impl Quota {
    /// No more than so many bytes; without a limit they are counted alone.
    pub(crate) fn new(limit: Option<u64>) -> Arc<Self> {
        Arc::new(Self {
            limit: limit.unwrap_or(u64::MAX),
            used: AtomicU64::new(0),
            most: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        })
    }

    /// The limit, if there is one.
    pub(crate) fn limit(&self) -> Option<u64> {
        (self.limit != u64::MAX).then_some(self.limit)
    }

    /// Bytes that are charged now.
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::SeqCst)
    }

    /// The most that were charged at a time.
    pub(crate) fn most(&self) -> u64 {
        self.most.load(Ordering::SeqCst)
    }

    /// How often there was not enough.
    pub(crate) fn refused(&self) -> u64 {
        self.refused.load(Ordering::SeqCst)
    }

    /// So many bytes more, if they are within the limit.
    pub(crate) fn charge(self: &Arc<Self>, bytes: u64) -> Result<Charge, Code> {
        let mut charge = Charge {
            quota: Arc::clone(self),
            bytes: 0,
        };
        charge.raise(bytes)?;
        Ok(charge)
    }

    /// The lower of what a device says that it has and of the limit.
    pub(crate) fn lower(&self, bytes: u64) -> u64 {
        bytes.min(self.limit)
    }
}

/// Bytes that are charged until this is dropped.
#[derive(Debug)]
pub(crate) struct Charge {
    quota: Arc<Quota>,
    bytes: u64,
}

impl Charge {
    /// Makes it as many bytes as that, if it is fewer. Refused, it is as before.
    pub(crate) fn raise(&mut self, bytes: u64) -> Result<(), Code> {
        let more = bytes.saturating_sub(self.bytes);
        let quota = &self.quota;
        let within = |used: u64| used.checked_add(more).filter(|used| *used <= quota.limit);
        match quota.used.fetch_update(Ordering::SeqCst, Ordering::SeqCst, within) {
            Ok(before) => {
                quota.most.fetch_max(before + more, Ordering::SeqCst);
                self.bytes += more;
                Ok(())
            }
            Err(_) => {
                quota.refused.fetch_add(1, Ordering::SeqCst);
                Err(Code::MEM_OBJECT_ALLOCATION_FAILURE)
            }
        }
    }

    /// What is charged.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// So many bytes less, or none.
    pub(crate) fn lower(&mut self, bytes: u64) {
        let less = bytes.min(self.bytes);
        self.bytes -= less;
        self.quota.used.fetch_sub(less, Ordering::SeqCst);
    }

    /// Gives it back when the back end says that a memory object is gone. A back end that does not say so leaves it to the caller, whose it
    /// is again: to be dropped after the object was released.
    pub(crate) fn until_gone(self, backend: &Backend, object: P) -> Option<Self> {
        let function = backend.api.clSetMemObjectDestructorCallback();
        let Some(function) = function.ok().filter(|_| backend.calls_back) else {
            return Some(self);
        };
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        pending().insert(number, self);
        let data = std::ptr::without_provenance_mut(number);
        let called = (gone as *const ()).cast_mut().cast::<c_void>();
        // SAFETY: 1. the object was made a moment ago and is held by the caller; 2. the function takes what a destructor's callback takes, and
        // the data is a number.
        match unsafe { function(object, called, data) } {
            0 => None,
            _ => pending().remove(&number),
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.quota.used.fetch_sub(self.bytes, Ordering::SeqCst);
    }
}

/// Charges that back ends give back, by the number that a back end has. A call that comes twice, or late, finds nothing.
fn pending() -> MutexGuard<'static, HashMap<usize, Charge>> {
    static PENDING: LazyLock<Mutex<HashMap<usize, Charge>>> = LazyLock::new(Mutex::default);
    PENDING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What back ends call.
unsafe extern "C" fn gone(_object: P, data: P) {
    let charge = pending().remove(&data.addr());
    drop(charge);
}
