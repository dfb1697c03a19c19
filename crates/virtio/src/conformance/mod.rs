//! The conformance kit: what every virtio device has to hold to, checked against a device behind the real transport,
//! with a fake driver and a fake engine.
//!
//! A device's own tests call [`run`] with a way to make the device. The kit's own tests run it against devices that are
//! broken on purpose, one way each.

pub mod driver;
pub mod fakes;
pub mod process;

mod checks;
mod hostile;
mod observer;

#[cfg(test)]
mod tests;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use crate::device::VirtioDevice;
use driver::{Driver, PATIENCE};
use observer::{Log, Observer};

/// How long one check may take before its device counts as hung.
const LIMIT: Duration = Duration::from_secs(600);

/// A request that the device completes by itself, without anything happening outside.
#[derive(Clone, Debug)]
pub struct Request {
    /// The queue.
    pub queue: u16,
    /// What the device reads.
    pub readable: Vec<u8>,
    /// How many bytes it can write.
    pub writable: usize,
}

/// A device to be checked.
#[derive(Clone)]
pub struct Subject {
    /// Makes a fresh one.
    pub make: Arc<dyn Fn() -> Box<dyn VirtioDevice> + Send + Sync>,
    /// A request it completes, if it has such.
    pub request: Option<Request>,
    /// How long it may take for what it must do.
    pub patience: Duration,
}

impl Subject {
    /// A device that `make` makes.
    pub fn new(
        make: impl Fn() -> Box<dyn VirtioDevice> + Send + Sync + 'static,
        request: impl Into<Option<Request>>,
    ) -> Self {
        Self {
            make: Arc::new(make),
            request: request.into(),
            patience: PATIENCE,
        }
    }

    /// A fresh one behind the transport, and what it does with its queues.
    fn driver(&self) -> (Driver, Log) {
        let (observer, log) = Observer::new((self.make)());
        (Driver::new(Box::new(observer)).with_patience(self.patience), log)
    }
}

/// What a device did wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{check}: {what}")]
pub struct Failure {
    /// The check.
    pub check: String,
    /// What was seen.
    pub what: String,
}

/// The result of one check: what was wrong, in words.
type Outcome = Result<(), String>;

/// Runs every check; returns how many there were.
///
/// # Errors
/// The first that failed.
pub fn run(subject: &Subject) -> Result<usize, Failure> {
    let mut count = 0;
    for (name, check) in checks::ALL {
        run_one(name, subject, *check)?;
        count += 1;
    }
    for case in hostile::ALL {
        let check = move |subject: &Subject| hostile::run(subject, case);
        run_one(&format!("hostile ring, {}", case.name), subject, check)?;
        count += 1;
    }
    Ok(count)
}

/// Runs one check on a thread of its own, so that panics and hangs are failures with a name.
fn run_one(name: &str, subject: &Subject, check: impl Fn(&Subject) -> Outcome + Send + 'static) -> Result<(), Failure> {
    let failure = |what: String| Failure {
        check: name.to_owned(),
        what,
    };
    let (sender, receiver) = channel();
    let subject = subject.clone();
    let thread = std::thread::spawn(move || {
        let outcome = catch_unwind(AssertUnwindSafe(|| check(&subject)));
        // The receiver is gone when the check took too long; then nobody wants to know.
        drop(sender.send(outcome));
    });
    let outcome = match receiver.recv_timeout(LIMIT) {
        Ok(outcome) => outcome,
        Err(RecvTimeoutError::Timeout) => return Err(failure(format!("it hangs for {} s", LIMIT.as_secs()))),
        Err(RecvTimeoutError::Disconnected) => return Err(failure("the check died".to_owned())),
    };
    // It has sent its outcome, so it ends now.
    drop(thread.join());
    match outcome {
        Ok(Ok(())) => Ok(()),
        Ok(Err(what)) => Err(failure(what)),
        Err(panic) => Err(failure(format!("it panics: {}", panic_text(panic.as_ref())))),
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("without words")
}
