//! Copies out of a client's arena that may not be done: an event behind the last one of each stream.
//!
//! Knows no call. The runtime copies from memory that is not pinned when it is asked, and from memory that is only later; both are waited
//! for alike.
#![allow(unsafe_code, reason = "these are calls of functions of C")]

use std::collections::{BTreeMap, VecDeque};

use crate::failure::{Failure, check};
use crate::hand::Runtime;
use crate::table::P;

/// `cudaEventDisableTiming`.
const NO_TIMING: u32 = 2;

/// Events of streams that have ended; when there are so many, the oldest one is waited for.
const MOST_ORPHANS: usize = 64;

/// Events by streams; those of streams without copies are kept for the next one.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    pending: BTreeMap<usize, usize>,
    /// Of streams that have ended: another one may have the same address.
    orphans: VecDeque<usize>,
    spare: Vec<usize>,
}

impl Copies {
    /// There is a copy in a stream, behind which everything is done that was there before.
    pub(crate) fn behind(&mut self, runtime: &Runtime, stream: P) -> Result<(), Failure> {
        let key = stream.expose_provenance();
        let event = match self.pending.get(&key) {
            Some(event) => *event,
            None => match self.spare.pop() {
                Some(event) => event,
                None => new(runtime)?,
            },
        };
        self.pending.insert(key, event);
        let function = runtime.cudaEventRecord()?;
        // SAFETY: 1. the function has these types; 2. the event is of `new`, and the stream is the client's.
        check(unsafe { function(std::ptr::with_exposed_provenance_mut(event), stream) })
    }

    /// A stream ends; what is in it is done all the same.
    pub(crate) fn left(&mut self, runtime: &Runtime, stream: P) -> Result<(), Failure> {
        let Some(event) = self.pending.remove(&stream.expose_provenance()) else {
            return Ok(());
        };
        self.orphans.push_back(event);
        if self.orphans.len() < MOST_ORPHANS {
            return Ok(());
        }
        let oldest = self.orphans.pop_front();
        oldest.map_or(Ok(()), |event| self.wait_for(runtime, event))
    }

    /// All of them are done.
    pub(crate) fn wait(&mut self, runtime: &Runtime) -> Result<(), Failure> {
        let mut result = Ok(());
        while let Some(event) = self.orphans.pop_front() {
            result = result.and(self.wait_for(runtime, event));
        }
        while let Some((_, event)) = self.pending.pop_first() {
            result = result.and(self.wait_for(runtime, event));
        }
        result
    }

    /// An event is there, and can be another copy's.
    fn wait_for(&mut self, runtime: &Runtime, event: usize) -> Result<(), Failure> {
        self.spare.push(event);
        let function = runtime.cudaEventSynchronize()?;
        // SAFETY: 1. the function has this type; 2. the event is of `new`.
        check(unsafe { function(std::ptr::with_exposed_provenance_mut(event)) })
    }

    /// Events end; the work is done.
    pub(crate) fn end(&mut self, runtime: &Runtime) {
        let pending = std::mem::take(&mut self.pending).into_values();
        let all = self.spare.drain(..).chain(self.orphans.drain(..)).chain(pending);
        for event in all {
            let Ok(function) = runtime.cudaEventDestroy() else {
                return;
            };
            // SAFETY: 1. the function has this type; 2. the event is of `new`, and this is its last use.
            let status = unsafe { function(std::ptr::with_exposed_provenance_mut(event)) };
            if status != 0 {
                log::warn!("an event cannot be given back: {status}");
            }
        }
    }
}

fn new(runtime: &Runtime) -> Result<usize, Failure> {
    let function = runtime.cudaEventCreateWithFlags()?;
    let mut made: P = std::ptr::null_mut();
    // SAFETY: 1. the function has these types; 2. there is a place for the event.
    check(unsafe { function((&raw mut made).cast(), NO_TIMING) })?;
    Ok(made.expose_provenance())
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::ffi::c_void;
    use std::ptr::NonNull;

    use super::*;

    thread_local! {
        /// How many events were made, and which were waited for and given back.
        static EVENTS: RefCell<(usize, Vec<usize>, Vec<usize>)> = RefCell::default();
    }

    unsafe extern "C" fn create(place: P, _: u32) -> i32 {
        let event = EVENTS.with_borrow_mut(|events| {
            events.0 += 1;
            events.0
        });
        // SAFETY: 1. the caller has a place for the event.
        unsafe { place.cast::<usize>().write(event) };
        0
    }

    unsafe extern "C" fn record(_: P, _: P) -> i32 {
        0
    }

    unsafe extern "C" fn synchronize(event: P) -> i32 {
        EVENTS.with_borrow_mut(|events| events.1.push(event.addr()));
        0
    }

    unsafe extern "C" fn destroy(event: P) -> i32 {
        EVENTS.with_borrow_mut(|events| events.2.push(event.addr()));
        0
    }

    fn runtime() -> Runtime {
        let find = |name: &std::ffi::CStr| {
            let function = match name.to_str().unwrap_or_default() {
                "cudaEventCreateWithFlags" => create as unsafe extern "C" fn(P, u32) -> i32 as *mut c_void,
                "cudaEventRecord" => record as unsafe extern "C" fn(P, P) -> i32 as *mut c_void,
                "cudaEventSynchronize" => synchronize as unsafe extern "C" fn(P) -> i32 as *mut c_void,
                "cudaEventDestroy" => destroy as unsafe extern "C" fn(P) -> i32 as *mut c_void,
                _ => return None,
            };
            NonNull::new(function)
        };
        // SAFETY: 1. these have the types of the functions that are called so.
        unsafe { Runtime::find(&find) }.0
    }

    #[test]
    fn a_copy_in_a_stream_that_has_ended_is_waited_for_though_another_has_its_address() {
        let (runtime, mut copies) = (runtime(), Copies::default());
        let stream = std::ptr::without_provenance_mut(0x1000);
        copies.behind(&runtime, stream).unwrap();
        copies.left(&runtime, stream).unwrap();
        copies.behind(&runtime, stream).unwrap();
        copies.wait(&runtime).unwrap();
        assert_eq!(EVENTS.with_borrow(|events| events.1.clone()), [1, 2]);
        copies.behind(&runtime, stream).unwrap();
        copies.left(&runtime, stream).unwrap();
        copies.end(&runtime);
        let mut ended = EVENTS.with_borrow(|events| events.2.clone());
        ended.sort_unstable();
        assert_eq!(ended, [1, 2], "both are given back");
    }

    #[test]
    fn streams_that_end_at_once_leave_few_events() {
        let (runtime, mut copies) = (runtime(), Copies::default());
        let stream = std::ptr::without_provenance_mut(0x1000);
        for _ in 0..1000 {
            copies.behind(&runtime, stream).unwrap();
            copies.left(&runtime, stream).unwrap();
        }
        let made = EVENTS.with_borrow(|events| events.0);
        assert!(made <= MOST_ORPHANS + 1, "{made}");
        copies.end(&runtime);
        assert_eq!(EVENTS.with_borrow(|events| events.2.len()), made);
    }
}
