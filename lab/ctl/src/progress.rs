//! Tells a waiting person what goes on, with seconds; stays silent about what is quick. Knows no step by name.

use std::io::Write;
use std::time::{Duration, Instant};

/// What takes no longer than this needs no words.
const PATIENCE: Duration = Duration::from_secs(2);

/// Steps of something that may take a while, as lines on standard error.
pub(crate) struct Progress {
    started: Instant,
    /// Lines that would have been said by now, were it not for [`PATIENCE`].
    held_back: Vec<String>,
    silent: bool,
}

impl Progress {
    /// Starts the clock. With `silent` nothing is ever said.
    pub(crate) fn new(silent: bool) -> Self {
        Self {
            started: Instant::now(),
            held_back: Vec::new(),
            silent,
        }
    }

    /// Time since the start.
    pub(crate) fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// A step begins or was reached.
    pub(crate) fn step(&mut self, what: &str) {
        self.held_back.push(line(self.elapsed(), what));
        self.tick();
    }

    /// Something that must be said at once, however little time has passed.
    pub(crate) fn warn(&mut self, what: &str) {
        self.held_back.push(line(self.elapsed(), what));
        self.flush();
    }

    /// Time has passed: says what was held back, if it has been long enough. Call this while waiting.
    pub(crate) fn tick(&mut self) {
        if self.elapsed() >= PATIENCE {
            self.flush();
        }
    }

    fn flush(&mut self) {
        for line in self.held_back.drain(..) {
            if !self.silent {
                // A standard error that nobody reads is no reason to stop.
                drop(writeln!(std::io::stderr(), "{line}"));
            }
        }
    }
}

fn line(elapsed: Duration, what: &str) -> String {
    format!("lab: {:5.1} s  {what}", elapsed.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quick_steps_are_held_back_and_warnings_are_not() {
        let mut progress = Progress::new(true);
        // No time passes until then.
        progress.started += Duration::from_secs(3600);
        progress.step("one");
        progress.tick();
        assert_eq!(progress.held_back.len(), 1);
        progress.warn("two");
        assert!(progress.held_back.is_empty());
    }

    #[test]
    fn slow_steps_are_said() {
        let mut progress = Progress::new(true);
        progress.started = Instant::now().checked_sub(PATIENCE).unwrap();
        progress.step("one");
        assert!(progress.held_back.is_empty());
    }

    #[test]
    fn lines_carry_the_seconds() {
        assert_eq!(line(Duration::from_millis(12_340), "booting"), "lab:  12.3 s  booting");
    }
}
