//! Whether the host's pages of a guest's memory have to stay: as long as somebody reaches them past this process's page tables, who would
//! go on with the old ones. Knows nobody who does.
//!
//! ```text
//!  pin ──▶ waits for what is being discarded ──▶ pinned ── the last pin is dropped ──▶ what the guest gives back is discarded again
//! ```

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Of one VM's memory, shared by all who pin or discard it.
#[derive(Clone, Debug, Default)]
pub struct Pins(Arc<Mutex<Counted>>);

#[derive(Debug, Default)]
struct Counted {
    pins: u64,
    /// One of them is never dropped.
    for_ever: bool,
}

/// As long as there is one nothing of the memory is discarded by [`Pins::unless_pinned`].
#[derive(Debug)]
#[must_use = "memory is pinned as long as this is there"]
pub struct Pin(Pins);

impl Pins {
    /// From now on nothing is discarded: what is being discarded is waited for.
    pub fn pin(&self) -> Pin {
        self.lock().pins += 1;
        Pin(self.clone())
    }

    /// Whether all pages have to stay.
    pub fn is_pinned(&self) -> bool {
        self.lock().pins > 0
    }

    /// Whether they have to as long as the process is there.
    pub fn is_for_ever(&self) -> bool {
        self.lock().for_ever
    }

    /// Discards, unless pages have to stay. Whoever pins waits for it, so it should be short.
    pub fn unless_pinned<T>(&self, discard: impl FnOnce() -> T) -> Option<T> {
        let pinned = self.lock();
        (pinned.pins == 0).then(discard)
    }

    fn lock(&self) -> MutexGuard<'_, Counted> {
        // Each change of it is whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pin {
    /// What it is one of.
    pub fn pins(&self) -> &Pins {
        &self.0
    }

    /// The pages stay as long as the process does.
    pub fn for_ever(self) {
        self.0.lock().for_ever = true;
        std::mem::forget(self);
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.0.lock().pins -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use super::*;

    #[test]
    fn nothing_is_discarded_until_the_last_pin_is_gone() {
        let pins = Pins::default();
        assert_eq!(pins.unless_pinned(|| 5), Some(5));
        let (first, second) = (pins.pin(), pins.clone().pin());
        drop(first);
        assert!(pins.is_pinned());
        assert_eq!(pins.unless_pinned(|| 5), None);
        drop(second);
        assert_eq!((pins.is_pinned(), pins.unless_pinned(|| 5)), (false, Some(5)));
        assert!(!pins.is_for_ever());
        pins.pin().for_ever();
        drop(pins.pin());
        assert!(pins.is_pinned() && pins.is_for_ever());
    }

    #[test]
    fn who_pins_waits_for_what_is_being_discarded() {
        let pins = Pins::default();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (begun, began) = std::sync::mpsc::channel();
            let (pins, done) = (&pins, &done);
            scope.spawn(move || {
                pins.unless_pinned(|| {
                    begun.send(()).unwrap();
                    std::thread::sleep(Duration::from_millis(50));
                    done.store(true, Ordering::SeqCst);
                })
            });
            began.recv().unwrap();
            let pin = pins.pin();
            assert!(done.load(Ordering::SeqCst), "pages go while they are pinned");
            drop(pin);
        });
    }
}
