//! Faults that a test asks for: one, at one place, once, or another one after it. Every call that leaves the node comes by here, and every point between two lasting
//! effects, so that a test can go through all of them by number.

use std::collections::VecDeque;
use std::io;
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// A call is refused.
    Refused,
    /// The VMM that is called dies; where none is called, the call is refused.
    Dies,
    /// The daemon dies at a point.
    Crash,
    /// There is no space left from a point on.
    Full,
}

impl Fault {
    /// It happens at points, and not at calls.
    pub(crate) fn is_at_points(self) -> bool {
        matches!(self, Self::Crash | Self::Full)
    }
}

/// What somebody who calls has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    Answer,
    /// With these words.
    Refuse(&'static str),
    Die,
}

/// What the call says that is refused first.
pub(crate) const INJECTED: &str = "an injected fault";

/// What one says that is refused after it.
pub(crate) const INJECTED_AGAIN: &str = "an injected fault after the first";

/// Ends the thread of a daemon that has died.
#[derive(Debug)]
pub(crate) struct Crashed;

/// Where faults are asked for and come about.
#[derive(Clone, Default)]
pub(crate) struct Faults(Arc<Mutex<Inner>>);

#[derive(Default)]
struct Inner {
    /// Each at the place of this number behind the one before.
    armed: VecDeque<(usize, Fault)>,
    /// Calls, or points, since it was armed, or since the last fault.
    passed: usize,
    /// Where something went wrong.
    fired: Vec<String>,
    /// The daemon that is alive; earlier ones have died.
    daemon: u32,
    fill: Option<Hook>,
    dies: Option<Hook>,
    /// Where a daemon dies, whatever other threads come to meanwhile.
    dies_at: Option<&'static str>,
    /// What is done at a point, once.
    at: Option<(&'static str, Hook)>,
}

type Hook = Arc<dyn Fn() + Send + Sync>;

impl std::fmt::Debug for Faults {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Faults")
    }
}

impl Faults {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has each of `faults` come about at the place of its number, counted from zero behind the one before.
    pub(crate) fn arm(&self, faults: &[(usize, Fault)]) {
        let mut inner = self.lock();
        inner.armed = faults.iter().copied().collect();
        inner.fired.clear();
        inner.passed = 0;
    }

    /// From here on nothing goes wrong any more, and nothing is done at a point: where it went wrong.
    pub(crate) fn disarm(&self) -> Vec<String> {
        let mut inner = self.lock();
        inner.armed.clear();
        inner.at = None;
        std::mem::take(&mut inner.fired)
    }

    /// Something went wrong since it was armed.
    pub(crate) fn has_fired(&self) -> bool {
        !self.lock().fired.is_empty()
    }

    /// What `Fault::Full` does.
    pub(crate) fn fill_by(&self, fill: impl Fn() + Send + Sync + 'static) {
        self.lock().fill = Some(Arc::new(fill));
    }

    /// Has something be done when a daemon comes to this point next.
    pub(crate) fn at(&self, point: &'static str, work: impl Fn() + Send + Sync + 'static) {
        self.lock().at = Some((point, Arc::new(work)));
    }

    /// Has a daemon die when it comes to this point next.
    pub(crate) fn die_at(&self, point: &'static str) {
        self.lock().dies_at = Some(point);
    }

    /// What `Fault::Crash` does besides ending its thread.
    pub(crate) fn die_by(&self, dies: impl Fn() + Send + Sync + 'static) {
        self.lock().dies = Some(Arc::new(dies));
    }

    /// Another daemon begins; its number.
    pub(crate) fn next_daemon(&self) -> u32 {
        let mut inner = self.lock();
        inner.daemon += 1;
        inner.daemon
    }

    /// Something outside of the node is called.
    pub(crate) fn call(&self, name: &str) -> Act {
        let mut inner = self.lock();
        match inner.pass(name, false) {
            Some(Fault::Dies) => Act::Die,
            Some(_) if inner.fired.len() == 1 => Act::Refuse(INJECTED),
            Some(_) => Act::Refuse(INJECTED_AGAIN),
            None => Act::Answer,
        }
    }

    /// The same where there is nothing that could die.
    pub(crate) fn call_host(&self, name: &str) -> io::Result<()> {
        match self.call(name) {
            Act::Answer => Ok(()),
            Act::Refuse(why) => Err(io::Error::other(why)),
            Act::Die => Err(io::Error::other(INJECTED)),
        }
    }

    /// A daemon comes to a point.
    pub(crate) fn point(&self, daemon: u32, name: &str) {
        let mut inner = self.lock();
        if inner.daemon != daemon {
            drop(inner);
            resume_unwind(Box::new(Crashed));
        }
        if let Some((_, work)) = inner.at.take_if(|(point, _)| *point == name) {
            drop(inner);
            return work();
        }
        let dies = inner.dies_at.take_if(|point| *point == name).is_some();
        match dies.then_some(Fault::Crash).or_else(|| inner.pass(name, true)) {
            Some(Fault::Crash) => {
                inner.daemon += 1;
                let dies = inner.dies.clone();
                drop(inner);
                dies.unwrap()();
                resume_unwind(Box::new(Crashed));
            }
            Some(_) => {
                let fill = inner.fill.clone();
                drop(inner);
                fill.unwrap()();
            }
            None => (),
        }
    }
}

impl Inner {
    fn pass(&mut self, name: &str, point: bool) -> Option<Fault> {
        let (number, fault) = *self.armed.front().filter(|(_, fault)| fault.is_at_points() == point)?;
        self.passed += 1;
        if self.passed <= number {
            return None;
        }
        self.armed.pop_front();
        self.passed = 0;
        self.fired.push(name.to_owned());
        Some(fault)
    }
}
