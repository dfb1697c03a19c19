//! Spans: what a thread was doing, from when to when, as a tree. Times are CLOCK_MONOTONIC, so those of all processes of
//! one host fit together; whoever exports spans turns them into dates.
//!
//! ```text
//!  record(operation, || { ... span("network") ... })  ─►  (result, spans)
//! ```
//! A recording belongs to the thread that began it; without one [`span`] does nothing. Knows neither who exports spans nor
//! what they are about.

use std::cell::RefCell;
use std::marker::PhantomData;

use rustix::rand::{GetRandomFlags, getrandom};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::context::{SpanId, TraceContext, TraceId};

/// The most spans of one recording; what is more is not recorded.
const MAX_SPANS: usize = 512;

/// CLOCK_MONOTONIC in nanoseconds.
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

/// Something that took time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// The trace that it belongs to.
    pub trace: TraceId,
    /// Its own id.
    pub id: SpanId,
    /// What it is a part of.
    pub parent: Option<SpanId>,
    /// What was done.
    pub name: String,
    /// The program that did it.
    pub service: String,
    /// When it began, CLOCK_MONOTONIC.
    pub start_ns: u64,
    /// When it ended.
    pub end_ns: u64,
    /// What else is known, by name.
    pub attributes: Vec<(String, String)>,
    /// Why it failed, if it did.
    pub error: Option<String>,
}

/// What is recorded.
#[derive(Clone, Copy, Debug)]
pub struct Operation {
    /// The program.
    pub service: &'static str,
    /// What it is called.
    pub name: &'static str,
    /// What it is part of; a trace of its own when not given.
    pub parent: Option<TraceContext>,
    /// Somebody will look at it: what costs time to find out is worth it.
    pub detailed: bool,
    /// When it began, if that is past.
    pub began_ns: Option<u64>,
}

/// A part that has not ended.
#[derive(Debug)]
struct Open {
    id: SpanId,
    name: String,
    start_ns: u64,
    attributes: Vec<(String, String)>,
    error: Option<String>,
}

#[derive(Debug)]
struct Recording {
    operation: Operation,
    trace: TraceId,
    sampled: bool,
    random: u64,
    open: Vec<Open>,
    done: Vec<Span>,
}

thread_local! {
    static CURRENT: RefCell<Option<Recording>> = const { RefCell::new(None) };
}

/// Does `work`, and tells what it was doing when: the operation is the last span.
pub fn record<T>(operation: Operation, work: impl FnOnce() -> T) -> (T, Vec<Span>) {
    let outer = CURRENT.replace(Some(Recording::new(operation)));
    let result = work();
    let recording = CURRENT.replace(outer);
    (result, recording.map(Recording::finish).unwrap_or_default())
}

/// Where this thread stands in its recording: the parent for what others do for it.
pub fn context() -> Option<TraceContext> {
    with(|recording| recording.context()).flatten()
}

/// Whether somebody will look at what this thread records.
pub fn is_detailed() -> bool {
    with(|recording| recording.operation.detailed).unwrap_or(false)
}

/// From now on until this is dropped.
pub fn span(name: &'static str) -> Guard {
    let depth = with(|recording| {
        recording.begin(name, now_ns());
        recording.open.len()
    });
    Guard {
        depth,
        _of_this_thread: PhantomData,
    }
}

/// A part of what this thread is doing that others did, or that is over: with whose program, name, beginning and end.
pub fn past(service: &str, name: &str, start_ns: u64, end_ns: u64) {
    with(|recording| recording.past(service, name, (start_ns, end_ns)));
}

/// Finished spans that others have recorded under [`context`].
pub fn adopt(spans: Vec<Span>) {
    with(|recording| {
        let room = MAX_SPANS.saturating_sub(recording.done.len());
        recording.done.extend(spans.into_iter().take(room));
    });
}

/// Says more of what this thread is doing.
pub fn attribute(name: &str, value: impl Into<String>) {
    with(|recording| {
        if let Some(open) = recording.open.last_mut() {
            open.attributes.push((name.to_owned(), value.into()));
        }
    });
}

/// What this thread is doing has failed.
pub fn failed(why: &dyn std::fmt::Display) {
    with(|recording| {
        if let Some(open) = recording.open.last_mut() {
            open.error = Some(why.to_string());
        }
    });
}

fn with<T>(work: impl FnOnce(&mut Recording) -> T) -> Option<T> {
    CURRENT.with_borrow_mut(|current| current.as_mut().map(work))
}

/// Ends its span when dropped, and those that were begun within it.
#[derive(Debug)]
#[must_use = "a span lasts as long as its guard"]
pub struct Guard {
    depth: Option<usize>,
    _of_this_thread: PhantomData<*const ()>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        let Some(depth) = self.depth else { return };
        with(|recording| {
            let end_ns = now_ns();
            while recording.open.len() >= depth {
                recording.end(end_ns);
            }
        });
    }
}

impl Recording {
    fn new(operation: Operation) -> Self {
        let mut random = Random::new();
        let own = TraceId::odd((u128::from(random.next()) << 64) | u128::from(random.next()));
        let mut recording = Self {
            operation,
            trace: operation.parent.map_or(own, |parent| parent.trace),
            sampled: operation.parent.is_none_or(|parent| parent.sampled),
            random: random.0,
            open: Vec::new(),
            done: Vec::new(),
        };
        recording.begin(operation.name, operation.began_ns.unwrap_or_else(now_ns));
        recording
    }

    fn new_id(&mut self) -> SpanId {
        let mut random = Random(self.random);
        loop {
            let id = SpanId::new(random.next());
            self.random = random.0;
            if let Some(id) = id {
                return id;
            }
        }
    }

    fn context(&self) -> Option<TraceContext> {
        let open = self.open.last()?;
        Some(TraceContext {
            trace: self.trace,
            span: open.id,
            sampled: self.sampled,
        })
    }

    fn begin(&mut self, name: &str, start_ns: u64) {
        let id = self.new_id();
        self.open.push(Open {
            id,
            name: name.to_owned(),
            start_ns,
            attributes: Vec::new(),
            error: None,
        });
    }

    fn end(&mut self, end_ns: u64) {
        let Some(open) = self.open.pop() else { return };
        let parent = self.open.last().map(|open| open.id);
        let span = Span {
            trace: self.trace,
            id: open.id,
            parent: parent.or(self.operation.parent.map(|parent| parent.span)),
            name: open.name,
            service: self.operation.service.to_owned(),
            start_ns: open.start_ns,
            end_ns,
            attributes: open.attributes,
            error: open.error,
        };
        // The operation itself is worth more than its parts.
        if self.done.len() < MAX_SPANS || self.open.is_empty() {
            self.done.push(span);
        }
    }

    fn past(&mut self, service: &str, name: &str, (start_ns, end_ns): (u64, u64)) {
        if self.done.len() >= MAX_SPANS {
            return;
        }
        let id = self.new_id();
        self.done.push(Span {
            trace: self.trace,
            id,
            parent: self.open.last().map(|open| open.id),
            name: name.to_owned(),
            service: service.to_owned(),
            start_ns,
            end_ns: end_ns.max(start_ns),
            attributes: Vec::new(),
            error: None,
        });
    }

    fn finish(mut self) -> Vec<Span> {
        let end_ns = now_ns();
        while !self.open.is_empty() {
            self.end(end_ns);
        }
        self.done
    }
}

/// SplitMix64 from a seed of the kernel's: ids must differ, not be secret.
struct Random(u64);

impl Random {
    fn new() -> Self {
        let mut seed = [0; 8];
        // Early in a boot there may be no entropy, which is no reason to wait.
        match getrandom(&mut seed, GetRandomFlags::NONBLOCK) {
            Ok(_) => Self(u64::from_ne_bytes(seed)),
            Err(_) => Self(now_ns() ^ (u64::from(std::process::id()) << 40)),
        }
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operation(parent: Option<TraceContext>) -> Operation {
        Operation {
            service: "test",
            name: "all",
            parent,
            detailed: true,
            began_ns: None,
        }
    }

    fn find<'a>(spans: &'a [Span], name: &str) -> &'a Span {
        spans.iter().find(|span| span.name == name).unwrap()
    }

    #[test]
    fn parts_lie_within_what_they_are_parts_of() {
        let parent: TraceContext = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"
            .parse()
            .unwrap();
        let (result, spans) = record(operation(Some(parent)), || {
            let _outer = span("outer");
            attribute("key", "value");
            {
                let _inner = span("inner");
                past("vmm", "elsewhere", 5, 9);
                assert_eq!(context().unwrap().trace, parent.trace);
                assert!(!context().unwrap().sampled);
            }
            failed(&"on purpose");
            assert!(is_detailed());
            7
        });
        assert_eq!(result, 7);
        assert_eq!(
            spans.iter().map(|span| span.name.as_str()).collect::<Vec<_>>(),
            ["elsewhere", "inner", "outer", "all"]
        );
        let (all, outer, inner) = (find(&spans, "all"), find(&spans, "outer"), find(&spans, "inner"));
        assert_eq!(all.parent, Some(parent.span));
        assert_eq!((outer.parent, inner.parent), (Some(all.id), Some(outer.id)));
        assert_eq!(find(&spans, "elsewhere").parent, Some(inner.id));
        assert!(all.start_ns <= outer.start_ns && outer.start_ns <= inner.start_ns);
        assert!(inner.end_ns <= outer.end_ns && outer.end_ns <= all.end_ns);
        assert_eq!(outer.attributes, [("key".to_owned(), "value".to_owned())]);
        assert_eq!(outer.error.as_deref(), Some("on purpose"));
        assert!(spans.iter().all(|span| span.trace == parent.trace));
        let mut ids: Vec<_> = spans.iter().map(|span| span.id).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), spans.len());
    }

    #[test]
    fn without_a_recording_nothing_happens() {
        let _guard = span("nobody looks");
        assert_eq!(context(), None);
        assert!(!is_detailed());
    }

    #[test]
    fn one_that_never_ends_its_parts_is_whole_nevertheless_and_has_a_trace_of_its_own() {
        let ((), spans) = record(operation(None), || std::mem::forget(span("kept")));
        assert_eq!(spans.len(), 2);
        assert_eq!(spans[1].parent, None);
        let ((), others) = record(operation(None), || ());
        assert_ne!(others[0].trace, spans[0].trace);
    }

    #[test]
    fn a_recording_has_an_end_and_the_operation_is_always_in_it() {
        let ((), spans) = record(operation(None), || (0..MAX_SPANS + 5).for_each(|_| drop(span("part"))));
        assert_eq!(spans.len(), MAX_SPANS + 1);
        assert_eq!(spans.last().unwrap().name, "all");
    }
}
