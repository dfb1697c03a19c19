//! Counts of tests and the table at the end.
//!
//! Knows outcomes, not steps' work. A run in which no test was executed is never a success.

use std::fmt::Write as _;

use super::task::Measured;

/// Tests that a step ran.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Went well.
    pub(crate) passed: u64,
    /// Did not.
    pub(crate) failed: u64,
    /// Were not run.
    pub(crate) skipped: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl std::fmt::Display for Counts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} passed, {} failed, {} skipped",
            self.passed, self.failed, self.skipped
        )
    }
}

/// How a step ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Ran and went well.
    Ok,
    /// Its result was there.
    Cached,
    /// Makes no sense on this machine.
    NotNeeded,
    /// Ran and failed.
    Failed,
    /// Was interrupted.
    Stopped,
    /// A step that it needs failed.
    Blocked,
}

impl Outcome {
    /// Its word on the board.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Cached => "cached",
            Self::NotNeeded => "not needed",
            Self::Failed => "FAILED",
            Self::Stopped => "stopped",
            Self::Blocked => "blocked",
        }
    }

    /// Whether steps after it may run.
    pub(crate) fn satisfies(self) -> bool {
        matches!(self, Self::Ok | Self::Cached | Self::NotNeeded)
    }
}

/// A finished step.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    /// Its name.
    pub(crate) name: &'static str,
    /// How it ended.
    pub(crate) outcome: Outcome,
    /// How long it took.
    pub(crate) seconds: f64,
    /// A few words.
    pub(crate) detail: String,
    /// What it adds to the sum.
    pub(crate) counts: Counts,
    /// If it failed, the end of its log and what to do.
    pub(crate) explained: String,
    /// What is said once more at the end of the run.
    pub(crate) remarks: Vec<String>,
    /// Its processor time and its parts.
    pub(crate) measured: Measured,
}

impl Row {
    /// One that has taken no time and has nothing to say.
    pub(crate) fn new(name: &'static str, outcome: Outcome) -> Self {
        Self {
            name,
            outcome,
            seconds: 0.0,
            detail: String::new(),
            counts: Counts::default(),
            explained: String::new(),
            remarks: Vec::new(),
            measured: Measured::default(),
        }
    }
}

/// What a step adds to the sum: the tests that it ran; if it is a check by itself, one; a failed step that reported no
/// failed test is one failure, and a blocked check is one skipped.
pub(crate) fn contribution(outcome: Outcome, is_check: bool, mut counts: Counts) -> Counts {
    match outcome {
        Outcome::Ok | Outcome::Cached if is_check => counts.passed += 1,
        Outcome::Failed if counts.failed == 0 => counts.failed += 1,
        Outcome::Stopped | Outcome::Blocked | Outcome::NotNeeded if is_check => counts.skipped += 1,
        _ => {}
    }
    counts
}

/// The steps with times, longest names aligned.
pub(crate) fn table(rows: &[Row]) -> String {
    let width = rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0);
    let mut text = format!("\n{:<width$}  {:<10}  {:>9}  {:>9}\n", "step", "result", "time", "CPU");
    for row in rows {
        let line = format!(
            "{:<width$}  {:<10}  {:>7.1} s  {:>7.1} s  {}",
            row.name,
            row.outcome.word(),
            row.seconds,
            row.measured.cpu,
            row.detail.lines().next().unwrap_or_default()
        );
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_counts_once_and_setup_does_not() {
        let none = Counts::default();
        assert_eq!(contribution(Outcome::Ok, true, none).passed, 1);
        assert_eq!(contribution(Outcome::Ok, false, none), none);
        assert_eq!(contribution(Outcome::Blocked, true, none).skipped, 1);
        assert_eq!(contribution(Outcome::Failed, false, none).failed, 1);
    }

    #[test]
    fn failed_tests_are_not_counted_twice() {
        let counts = Counts {
            passed: 5,
            failed: 2,
            skipped: 0,
        };
        assert_eq!(contribution(Outcome::Failed, false, counts), counts);
    }
}
