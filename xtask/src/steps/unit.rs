//! The steps `build-tests`, `unit-tests` and `program-tests`: `cargo test` for the whole workspace, natively, compiled first and
//! then run. What is inside crates and what uses them from outside are two steps, as cargo runs one program after another, and
//! most of them wait: side by side they take little more than the longer one.
//!
//! Reads what cargo prints. A few tests that fail are made once more, each target by itself: a machine that does much else
//! can be too slow for a test that waits. Such a test is named in the sum, for whoever should mend it.

use std::time::Duration;

use anyhow::Result;

use super::build::cargo;
use super::tests::{failed_names, judge};
use crate::context::Context;
use crate::runner::{Counts, Finished, Report, Step, Task};

/// In the background compiling takes as long as what it runs beside.
const LIMIT: Duration = Duration::from_secs(60 * 60);
/// More failed tests than these are no accident, and are not made again.
const AGAIN_AT_MOST: usize = 5;

/// Compiles all tests of the workspace, and the fuzzer.
pub(crate) fn build() -> Step {
    Step::new("build-tests", |context, task| {
        for what in [
            &["test", "--workspace", "--no-run"],
            &["build", "--package", "basalt-fuzz"],
        ] as [&[&str]; 2]
        {
            let mut command = cargo(context, what);
            if context.ci {
                command.arg("--locked");
            }
            task.run_within(&mut command, LIMIT)?;
        }
        Ok(Report::default())
    })
    .hint("the compiler's messages are above; `cargo test --workspace --no-run` repeats them in colour")
}

/// The tests within crates and programs.
pub(crate) fn unit() -> Step {
    tests("unit-tests", &["--workspace", "--lib", "--bins"])
}

/// The tests in `tests/` of crates and programs, many of which start programs. There are no tests in documentation: `tidy` sees to
/// that.
pub(crate) fn programs() -> Step {
    tests("program-tests", &["--workspace", "--test", "*"])
}

fn tests(name: &'static str, targets: &'static [&'static str]) -> Step {
    Step::new(name, |context, task| {
        let mut ran = run(context, task, targets, &[])?;
        if ran.may_be_made_again() {
            let mut again = Vec::new();
            for target in &ran.targets {
                task.say(&format!("once more: {target}: {}", ran.failed.join(", ")))?;
                let target: Vec<_> = target.split(' ').collect();
                again.push(run(context, task, &target, &ran.failed)?);
            }
            ran = ran.made_again(again);
        }
        // Said again at the end: the log's last lines are what a reader of CI's record sees.
        for line in &ran.said {
            task.say(line)?;
        }
        ran.report()
    })
    .hint("`cargo test -p PACKAGE NAME` repeats one of them")
}

/// The targets' tests with these names; all of them without a name.
fn run(context: &Context, task: &mut Task, targets: &[&str], names: &[String]) -> Result<Ran> {
    let mut command = cargo(context, &["test", "--no-fail-fast"]);
    if context.ci {
        command.arg("--locked");
    }
    command.args(targets);
    if !names.is_empty() {
        command.args(["--", "--exact"]).args(names);
    }
    Ok(Ran::of(&task.finish_within(&mut command, LIMIT)?))
}

/// What became of the tests.
#[derive(Debug, Default)]
struct Ran {
    counts: Counts,
    success: bool,
    /// The tests that failed.
    failed: Vec<String>,
    /// The targets they are in, as cargo's arguments: `-p PACKAGE --lib`. One whose program died is among them, too.
    targets: Vec<String>,
    /// How many programs came to a sum with failures.
    sums: usize,
    /// What they printed.
    said: Vec<String>,
    /// The tests that passed only when they were made once more.
    second: Vec<String>,
}

impl Ran {
    fn of(finished: &Finished) -> Self {
        let mut counts = Counts::default();
        for line in &finished.out {
            counts += program_counts(line).unwrap_or_default();
        }
        Self {
            counts,
            success: finished.status.success(),
            failed: failed_names(&finished.out),
            targets: failed_targets(&finished.err),
            sums: finished
                .out
                .iter()
                .filter(|line| line.starts_with("test result: FAILED"))
                .count(),
            said: failures(&finished.out),
            second: Vec::new(),
        }
    }

    /// A few tests failed, and every program told which: none died.
    fn may_be_made_again(&self) -> bool {
        let named = u64::try_from(self.failed.len()) == Ok(self.counts.failed);
        named && (1..=AGAIN_AT_MOST).contains(&self.failed.len()) && self.targets.len() == self.sums
    }

    /// The same tests with a second try of those that failed. What was not made again stays failed.
    fn made_again(mut self, again: Vec<Self>) -> Self {
        let made: u64 = again.iter().map(|ran| ran.counts.passed + ran.counts.failed).sum();
        if made < self.counts.failed {
            return self;
        }
        self.success = again.iter().all(|ran| ran.success);
        let still: Vec<String> = again.into_iter().flat_map(|ran| ran.failed).collect();
        self.second = self.failed;
        self.second.retain(|name| !still.contains(name));
        let mended = u64::try_from(self.second.len()).unwrap_or(0);
        self.counts.passed += mended;
        self.counts.failed -= mended;
        self.failed = still;
        self
    }

    fn report(self) -> Result<Report> {
        let mut report = judge(self.counts, self.success, self.failed)?;
        if !self.second.is_empty() {
            let names = self.second.join(", ");
            report.detail = format!("{}; passed only when made once more: {names}", report.detail);
        }
        Ok(report)
    }
}

/// `test result: ok. 3 passed; 0 failed; 1 ignored; ...` of one test program.
fn program_counts(line: &str) -> Option<Counts> {
    let rest = line.strip_prefix("test result: ")?;
    let number = |word: &str| {
        let part = rest
            .split([';', '.'])
            .map(str::trim)
            .find(|part| part.ends_with(word))?;
        part.split(' ').next()?.parse().ok()
    };
    Some(Counts {
        passed: number("passed")?,
        failed: number("failed")?,
        skipped: number("ignored")?,
    })
}

/// The list behind cargo's last words, `error: 2 targets failed:`.
fn failed_targets(lines: &[String]) -> Vec<String> {
    let target = |line: &str| Some(line.trim().strip_prefix('`')?.strip_suffix('`')?.to_owned());
    let listed = |line: &&String| line.starts_with("error: ") && line.ends_with(" failed:");
    let behind = lines.iter().skip_while(|line| !listed(line)).skip(1);
    behind.map_while(|line| target(line)).collect()
}

/// What the failed tests of each program printed: cargo's block from `failures:` to the program's result.
fn failures(lines: &[String]) -> Vec<String> {
    let mut inside = false;
    let mut said = Vec::new();
    for line in lines {
        let begins = line == "failures:";
        inside = (inside || begins) && !line.starts_with("test result: ");
        if inside && !begins && !line.is_empty() {
            said.push(line.clone());
        }
    }
    said
}

#[cfg(test)]
mod self_tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    use super::*;

    fn lines(text: &[&str]) -> Vec<String> {
        text.iter().map(|line| (*line).to_owned()).collect()
    }

    fn ran(code: i32, out: &[&str], err: &[&str]) -> Ran {
        Ran::of(&Finished {
            status: ExitStatus::from_raw(code << 8),
            out: lines(out),
            err: lines(err),
        })
    }

    const SUM: &str =
        "test result: FAILED. 12 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.1s";
    const ONE: &str = "test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 12 filtered out; finished in 0.1s";

    fn first() -> Ran {
        ran(
            101,
            &["test a ... ok", "test b::c ... FAILED", "failures:", "why", SUM],
            &[
                "error: test failed, to rerun pass `-p x --lib`",
                "error: 1 target failed:",
                "    `-p x --lib`",
            ],
        )
    }

    #[test]
    fn sums_are_read_as_cargo_prints_them() {
        let counts = Counts {
            passed: 12,
            failed: 1,
            skipped: 1,
        };
        assert_eq!(program_counts(SUM), Some(counts));
        assert_eq!(program_counts("test a ... ok"), None);
    }

    #[test]
    fn what_failed_tests_printed_is_found() {
        let out = [
            "test a ... FAILED",
            "failures:",
            "---- a stdout ----",
            "left: 1",
            "",
            "failures:",
            "    a",
            "test result: FAILED. 0 passed; 1 failed; 0 ignored",
            "test b ... ok",
        ];
        assert_eq!(failures(&lines(&out)), ["---- a stdout ----", "left: 1", "    a"]);
    }

    #[test]
    fn a_test_that_passes_at_the_second_try_is_named() {
        assert!(first().may_be_made_again());
        assert_eq!(first().targets, ["-p x --lib"]);
        let again = ran(0, &["test b::c ... ok", ONE], &[]);
        let report = first().made_again(vec![again]).report().unwrap();
        assert_eq!((report.counts.passed, report.counts.failed), (13, 0));
        assert!(report.detail.ends_with("once more: b::c"), "{}", report.detail);
    }

    #[test]
    fn a_test_that_fails_twice_or_is_not_found_again_has_failed() {
        let again = || {
            ran(
                101,
                &[
                    "test b::c ... FAILED",
                    "test result: FAILED. 0 passed; 1 failed; 0 ignored",
                ],
                &[],
            )
        };
        let nothing = || ran(0, &["test result: ok. 0 passed; 0 failed; 0 ignored"], &[]);
        for second in [again(), nothing()] {
            let report = first().made_again(vec![second]).report().unwrap();
            assert_eq!((report.counts.passed, report.counts.failed), (12, 1));
            assert!(report.detail.ends_with("b::c"), "{}", report.detail);
        }
        let died = ran(
            101,
            &["test a ... ok", "test result: ok. 1 passed; 0 failed; 0 ignored"],
            &[],
        );
        assert!(first().made_again(vec![died]).report().is_err());
    }

    #[test]
    fn programs_that_died_and_many_failures_are_not_made_again() {
        let died = ran(
            101,
            &["test a ... ok", ONE],
            &["error: 1 target failed:", "    `-p x --lib`"],
        );
        assert!(!died.may_be_made_again());
        let (sum, both) = (
            "test result: FAILED. 0 passed; 2 failed; 0 ignored",
            ["error: 2 targets failed:", "    `-p x --lib`", "    `-p y --lib`"],
        );
        let one_died = ran(101, &["test a ... FAILED", "test b ... FAILED", sum], &both);
        assert!(!one_died.may_be_made_again());
        let many: Vec<_> = (0..6).map(|n| format!("test t{n} ... FAILED")).collect();
        let mut many: Vec<_> = many.iter().map(String::as_str).collect();
        many.push("test result: FAILED. 0 passed; 6 failed; 0 ignored");
        assert!(!ran(101, &many, &["error: 1 target failed:", "    `-p x --lib`"]).may_be_made_again());
    }
}
