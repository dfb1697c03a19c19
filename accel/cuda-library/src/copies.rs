//! Copies out of a client's arena that may not be done: an event behind the last one of each stream.
//!
//! Knows no call. The runtime copies from memory that is not pinned when it is asked, and from memory that is only later; both are waited
//! for alike.
#![allow(unsafe_code, reason = "these are calls of functions of C")]

use std::collections::BTreeMap;

use crate::failure::{Failure, check};
use crate::hand::Runtime;
use crate::table::P;

/// `cudaEventDisableTiming`.
const NO_TIMING: u32 = 2;

/// Events by streams; those of streams without copies are kept for the next one.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    pending: BTreeMap<usize, usize>,
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

    /// All of them are done.
    pub(crate) fn wait(&mut self, runtime: &Runtime) -> Result<(), Failure> {
        let mut result = Ok(());
        while let Some((_, event)) = self.pending.pop_first() {
            let waited = runtime.cudaEventSynchronize().and_then(|function| {
                // SAFETY: 1. the function has this type; 2. the event is of `new`.
                check(unsafe { function(std::ptr::with_exposed_provenance_mut(event)) })
            });
            result = result.and(waited);
            self.spare.push(event);
        }
        result
    }

    /// Events end; the work is done.
    pub(crate) fn end(&mut self, runtime: &Runtime) {
        let pending = std::mem::take(&mut self.pending);
        for event in self.spare.drain(..).chain(pending.into_values()) {
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
