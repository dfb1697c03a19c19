//! Events. What is before an event in its stream is done when the event is recorded, so that it is complete; how much time is between two is
//! the time of the host.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use accel_cuda_null::Failure;
use accel_proto::cuda::AnyCall;

use crate::Error;

/// `cudaEventDisableTiming`.
const DISABLE_TIMING: u32 = 2;

#[derive(Debug, Clone, Copy)]
struct Event {
    recorded: Option<Instant>,
    has_time: bool,
}

/// A client's events, by their names.
#[derive(Debug, Default)]
pub(crate) struct Events(HashMap<u32, Event>);

impl Events {
    /// Does what a call does to them. That an event is there, objects have seen.
    pub(crate) fn apply(&mut self, call: &AnyCall<'_>) {
        let (event, flags) = match call {
            AnyCall::CudaEventCreate(call) => (call.event, 0),
            AnyCall::CudaEventCreateWithFlags(call) => (call.event, call.flags),
            AnyCall::CudaEventDestroy(call) => {
                self.0.remove(&call.event.raw());
                return;
            }
            AnyCall::CudaEventRecord(call) => return self.record(call.event.raw()),
            AnyCall::CudaEventRecordWithFlags(call) => return self.record(call.event.raw()),
            _ => return,
        };
        let event_of = Event {
            recorded: None,
            has_time: flags & DISABLE_TIMING == 0,
        };
        self.0.insert(event.raw(), event_of);
    }

    fn record(&mut self, name: u32) {
        if let Some(event) = self.0.get_mut(&name) {
            event.recorded = Some(Instant::now());
        }
    }

    /// Names, how long ago each was recorded, and whether it has a time.
    pub(crate) fn all(&self) -> impl Iterator<Item = (u32, Option<Duration>, bool)> {
        let now = Instant::now();
        let age = move |recorded: Instant| now.saturating_duration_since(recorded);
        self.0
            .iter()
            .map(move |(name, event)| (*name, event.recorded.map(age), event.has_time))
    }

    /// One that was recorded so long before `now`, as far back as this host counts.
    pub(crate) fn add(&mut self, name: u32, (now, age): (Instant, Option<Duration>), has_time: bool) {
        let recorded = age.map(|age| now.checked_sub(age).unwrap_or(now));
        self.0.insert(name, Event { recorded, has_time });
    }

    /// Milliseconds from one to another.
    pub(crate) fn elapsed(&self, from: u32, to: u32) -> Result<f32, Error> {
        let time = |name| {
            let event: &Event = self.0.get(&name)?;
            event.recorded.filter(|_| event.has_time)
        };
        let (Some(from), Some(to)) = (time(from), time(to)) else {
            // One that was not recorded, or has no time (CUDA Runtime API, cudaEventElapsedTime).
            return Err(Error::Failure(Failure::InvalidHandle));
        };
        let milliseconds = match to.checked_duration_since(from) {
            Some(time) => time.as_secs_f32() * 1e3,
            None => -from.duration_since(to).as_secs_f32() * 1e3,
        };
        Ok(milliseconds)
    }
}
