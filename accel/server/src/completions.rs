//! Callbacks of a client that are due: what the back end calls, and where the client's thread hears of it.
//!
//! The back end gets a number as its user's data and never an address, so that a call that comes when the client is gone finds nothing.
//! Knows neither objects nor calls.
#![allow(unsafe_code, reason = "functions that a C API calls back")]

use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use accel_proto::Callback;
use accel_proto::control::Completion;

use crate::api::{Code, P};

/// The most callbacks of a client that can be registered, or due and not asked for.
const MOST: usize = 1 << 16;

/// The longest that a client's thread waits at once, so that it notices soon that its connection is over.
const LONGEST: Duration = Duration::from_millis(500);

/// Callbacks of one client.
#[derive(Debug, Default)]
pub(crate) struct Completions {
    due: Mutex<Due>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Due {
    queue: VecDeque<Completion>,
    /// Registered and not due.
    waiting: usize,
    /// Of these, those of events.
    of_events: usize,
    over: bool,
    /// Whoever asks is not to wait.
    hurries: bool,
}

/// Callbacks of all clients that a back end will call, by the number that it has.
static REGISTERED: Mutex<Registered> = Mutex::new(Registered {
    next: 1,
    by_number: None,
});

#[derive(Debug)]
struct Registered {
    next: usize,
    by_number: Option<HashMap<usize, Entry>>,
}

/// A callback that a back end will call.
#[derive(Debug)]
struct Entry {
    client: Weak<Completions>,
    callback: Callback,
    of: Of,
}

/// What a callback tells of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Of {
    /// The state of an event.
    Event,
    /// The end of another object, or of a build.
    Other,
}

impl Due {
    /// One is registered no more.
    fn forget(&mut self, of: Of) {
        self.waiting -= 1;
        self.of_events -= usize::from(of == Of::Event);
    }

    fn push(&mut self, completion: Completion) {
        if !self.over && self.queue.len() < MOST {
            self.queue.push_back(completion);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Completions {
    /// A number for the back end that stands for a callback of the client's.
    pub(crate) fn register(self: &Arc<Self>, callback: Callback, of: Of) -> Result<Registration, Code> {
        let mut due = lock(&self.due);
        if due.waiting + due.queue.len() >= MOST {
            return Err(Code::OUT_OF_RESOURCES);
        }
        due.waiting += 1;
        due.of_events += usize::from(of == Of::Event);
        drop(due);
        let mut registered = lock(&REGISTERED);
        let number = registered.next;
        registered.next += 1;
        let entry = Entry {
            client: Arc::downgrade(self),
            callback,
            of,
        };
        registered.by_number.get_or_insert_default().insert(number, entry);
        Ok(Registration(Some(number)))
    }

    /// A callback is due that the back end knows nothing of.
    pub(crate) fn push(&self, completion: Completion) {
        lock(&self.due).push(completion);
        self.changed.notify_all();
    }

    /// Whether callbacks of events are registered that the back end has not called.
    pub(crate) fn waits_for_events(&self) -> bool {
        lock(&self.due).of_events > 0
    }

    /// Whoever asks does not wait, or does again.
    pub(crate) fn hurry(&self, hurries: bool) {
        lock(&self.due).hurries = hurries;
        self.changed.notify_all();
    }

    /// All that are due, which stay so.
    pub(crate) fn due(&self) -> Vec<Completion> {
        lock(&self.due).queue.iter().copied().collect()
    }

    /// Those that are due, at most so many; waits for one, but not for long.
    pub(crate) fn wait(&self, most: usize, patience: Duration) -> Vec<Completion> {
        let deadline = Instant::now() + patience.min(LONGEST);
        let mut due = lock(&self.due);
        while due.queue.is_empty() && !due.over && !due.hurries && most > 0 {
            let Some(left) = deadline
                .checked_duration_since(Instant::now())
                .filter(|left| !left.is_zero())
            else {
                break;
            };
            due = self
                .changed
                .wait_timeout(due, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        let taken = due.queue.len().min(most);
        due.queue.drain(..taken).collect()
    }

    /// Nobody asks any more; what the back end still calls finds nothing.
    pub(crate) fn end(self: &Arc<Self>) {
        lock(&self.due).over = true;
        self.changed.notify_all();
        let mut registered = lock(&REGISTERED);
        if let Some(by_number) = &mut registered.by_number {
            by_number.retain(|_, entry| !std::ptr::eq(entry.client.as_ptr(), Arc::as_ptr(self)));
        }
    }
}

/// A callback that the back end is about to be told of. Dropped before it was, it is forgotten.
#[derive(Debug)]
pub(crate) struct Registration(Option<usize>);

impl Registration {
    /// What the back end gets as the user's data.
    pub(crate) fn data(&self) -> P {
        std::ptr::without_provenance_mut(self.0.unwrap_or_default())
    }

    /// The back end has it and will call.
    pub(crate) fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Some((client, entry)) = self.0.and_then(take) {
            lock(&client.due).forget(entry.of);
        }
    }
}

fn take(number: usize) -> Option<(Arc<Completions>, Entry)> {
    let entry = lock(&REGISTERED)
        .by_number
        .as_mut()
        .and_then(|all| all.remove(&number))?;
    Some((entry.client.upgrade()?, entry))
}

fn called(data: P, status: i32) {
    if let Some((client, entry)) = take(data.addr()) {
        let mut due = lock(&client.due);
        // At once: whoever saves the client finds it registered or due.
        due.forget(entry.of);
        due.push(Completion {
            callback: entry.callback,
            status,
        });
        drop(due);
        client.changed.notify_all();
    }
}

/// For clSetEventCallback.
pub(crate) unsafe extern "C" fn event_called(_event: P, status: i32, data: P) {
    called(data, status);
}

/// For destructors: of memory objects, contexts and programs.
pub(crate) unsafe extern "C" fn destructor_called(_object: P, data: P) {
    called(data, 0);
}

/// A function of ours as the table has it.
pub(crate) fn event_function() -> P {
    (event_called as *const ()).cast_mut().cast::<c_void>()
}

/// As [`event_function`].
pub(crate) fn destructor_function() -> P {
    (destructor_called as *const ()).cast_mut().cast::<c_void>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_called_is_due_once_and_in_order() {
        let completions = Arc::new(Completions::default());
        let first = completions.register(Callback(7), Of::Other).unwrap();
        let second = completions.register(Callback(8), Of::Other).unwrap();
        let (one, two) = (first.data(), second.data());
        first.keep();
        second.keep();
        called(two, -1);
        called(one, 0);
        called(one, 0);
        let due = completions.wait(10, Duration::ZERO);
        let due: Vec<_> = due.iter().map(|due| (due.callback.0, due.status)).collect();
        assert_eq!(due, [(8, -1), (7, 0)]);
        assert!(completions.wait(10, Duration::from_millis(1)).is_empty());
    }

    #[test]
    fn who_waits_is_woken_and_who_is_gone_is_not_called() {
        let completions = Arc::new(Completions::default());
        let registration = completions.register(Callback(1), Of::Other).unwrap();
        let data = registration.data().addr();
        registration.keep();
        let waiting = Arc::clone(&completions);
        let waiter = std::thread::spawn(move || waiting.wait(1, Duration::from_secs(20)));
        called(std::ptr::without_provenance_mut(data), 3);
        // The wait is cut after half a second; what came meanwhile is told by the next one.
        let mut due = waiter.join().unwrap();
        due.extend(completions.wait(1, Duration::ZERO));
        assert_eq!(due.len(), 1);
        let late = completions.register(Callback(2), Of::Other).unwrap();
        let data = late.data();
        late.keep();
        completions.end();
        called(data, 0);
        assert!(completions.wait(1, Duration::ZERO).is_empty());
    }

    #[test]
    fn a_client_cannot_register_without_end() {
        let completions = Arc::new(Completions::default());
        for number in 0..MOST {
            completions
                .register(Callback(u32::try_from(number).unwrap()), Of::Event)
                .unwrap()
                .keep();
        }
        assert_eq!(
            completions.register(Callback(0), Of::Other).unwrap_err(),
            Code::OUT_OF_RESOURCES
        );
        completions.end();
    }
}
