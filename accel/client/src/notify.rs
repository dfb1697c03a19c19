//! Functions of the application's that are called when something has happened: to an event, by a thread of this library's, which is
//! started for the first of them; and at the end of an object, by whoever ends it.
//!
//! ```text
//!   nobody waits ──when──▶ asks for each event's state, 50 us to 2 ms apart ──all have been called──▶ sleeps until the next
//! ```
//!
//! The thread takes no signal, as those are the application's. What a function does, and whether it returns, this does not know.
#![allow(
    unsafe_code,
    reason = "signals of one thread are kept away by pthread_sigmask(3) alone"
)]

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use crate::arguments::{Opaque, Ref};
use crate::codes::Code;
use crate::object::Object;
use crate::process::process;
use crate::svm::Freed;
use crate::{event, lock, pending};

/// An address of the application's, which goes back to it as it came.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Passed(pub(crate) Opaque);

/// What is called.
#[derive(Debug)]
pub(crate) enum Notice {
    /// `pfn_notify` of clSetEventCallback: the event, its state or error, and the application's data.
    Event(extern "C" fn(Ref, i32, Opaque), Passed),
    /// `pfn_free_func` of clEnqueueSVMFree, unless its command has failed.
    Free(Freed),
}

/// How often events are asked for: at first, and at last.
const SOON: Duration = Duration::from_micros(50);
const LATER: Duration = Duration::from_millis(2);

/// A function to be called at the end of an object.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Destructor {
    pub(crate) function: extern "C" fn(Ref, Opaque),
    pub(crate) user_data: Opaque,
}

// SAFETY: the address is the application's, and goes back to it as it came; nothing here looks at what is there. The API says that such
// functions can be called on any thread.
unsafe impl Send for Destructor {}
// SAFETY: as for Send.
unsafe impl Sync for Destructor {}

impl Destructor {
    pub(crate) fn call(self, object: Ref) {
        (self.function)(object, self.user_data);
    }
}

/// Somebody waits for an event.
#[derive(Debug)]
struct Waits {
    event: Arc<Object>,
    /// The state that it waits for, or what comes after that.
    state: i32,
    notice: Notice,
}

// SAFETY: as for `Destructor`: addresses are the application's.
unsafe impl Send for Waits {}

/// Who waits for events, in one process.
#[derive(Debug, Default)]
pub(crate) struct Notifier {
    waits: Mutex<Waiting>,
    more: Condvar,
}

#[derive(Debug, Default)]
struct Waiting {
    new: Vec<Waits>,
    has_thread: bool,
}

/// Calls a function when an event has come to a state.
pub(crate) fn when(event: &Object, state: i32, notice: Notice) -> Result<(), Code> {
    let notifier = &process().notifier;
    let mut waits = lock(&notifier.waits);
    if !waits.has_thread {
        let spawned = without_signals(|| {
            std::thread::Builder::new()
                .name("basalt-opencl".to_owned())
                .spawn(|| run(notifier))
        });
        spawned.map_err(|_| Code::OUT_OF_HOST_MEMORY)?;
        waits.has_thread = true;
    }
    waits.new.push(Waits {
        event: event.share(),
        state,
        notice,
    });
    notifier.more.notify_one();
    Ok(())
}

/// Threads inherit what is kept away.
fn without_signals<T>(spawn: impl FnOnce() -> T) -> T {
    // SAFETY: a set of signals is plain data, of which zeroes are a value.
    let mut all: libc::sigset_t = unsafe { std::mem::zeroed() };
    let mut before = all;
    // SAFETY: 1. the pointer is to a set of this function's.
    unsafe { libc::sigfillset(&raw mut all) };
    // SAFETY: 1. both pointers are to sets of this function's. A failure leaves signals as they were.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before) };
    let spawned = spawn();
    // SAFETY: as above; what was before is set again.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut()) };
    spawned
}

fn run(notifier: &'static Notifier) {
    let mut waiting: Vec<Waits> = Vec::new();
    let mut pause = SOON;
    loop {
        let mut waits = lock(&notifier.waits);
        while waiting.is_empty() && waits.new.is_empty() {
            waits = notifier
                .more
                .wait(waits)
                .unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        if !waits.new.is_empty() {
            pause = SOON;
        }
        waiting.append(&mut waits.new);
        drop(waits);
        let mut left = Vec::new();
        let before = waiting.len();
        for wait in waiting {
            match event::state(&wait.event) {
                Ok(state) if state > wait.state => left.push(wait),
                Ok(state) => call(wait, state),
                // The server is gone: the command has ended, by an error.
                Err(code) => call(wait, code.0),
            }
        }
        waiting = left;
        if waiting.len() < before {
            pause = SOON;
        } else {
            std::thread::sleep(pause);
            pause = (pause * 2).min(LATER);
        }
    }
}

fn call(wait: Waits, mut state: i32) {
    if state <= 0
        && let Ok(connection) = wait.event.connection()
        && let Err(lost) = pending::settle(connection, None)
    {
        state = lost.0;
    }
    // Of what was asked for, or of the error.
    let told = if state < 0 { state } else { wait.state };
    match wait.notice {
        Notice::Event(function, Passed(user_data)) => function(wait.event.as_ref().as_ref(), told, user_data),
        Notice::Free(freed) if state >= 0 => freed.call(),
        Notice::Free(_) => {}
    }
}
