//! The steps that run tests and count them: a short fuzz, the audit of filters. Unit tests are in [`super::unit`], cases in
//! [`super::cases`].
//!
//! Reads the sums that the test runners print; a runner that executed nothing has failed.

use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Result, bail};

use super::build::cargo;
use super::sandbox::{self, Lab, lab_command};
use crate::context::Context;
use crate::runner::{Counts, Report, Step};

const AUDIT_LIMIT: Duration = Duration::from_secs(20 * 60);
const FUZZ_LIMIT: Duration = Duration::from_secs(30 * 60);
/// More targets than there are.
const MOST_TARGETS: u64 = 100;

/// The runner of cases, where the lab keeps our programs.
pub(super) const CASES_IN_LAB: &str = "/opt/basalt/bin/basalt-lab-cases";
/// Per fuzz target; long enough to notice a parser that breaks at once.
const FUZZ_SECONDS: u64 = 3;
/// `make test` begins with the same random numbers each time.
const FUZZ_SEED: u64 = 1;

/// What the VMM's system call filters allow and what its threads really call, compared under strace.
pub(crate) fn audit() -> Step {
    Step::new("filters", |context, task| {
        let finished = if context.kvm {
            let mut command = Command::new(context.release().join("basalt-lab-cases"));
            task.finish_within(command.arg("audit").current_dir(&context.root), AUDIT_LIMIT)?
        } else {
            let mut command = lab_command(context, &["exec", "--", CASES_IN_LAB, "audit"]);
            let finished = task.finish_within(&mut command, AUDIT_LIMIT)?;
            if sandbox::host_is_lost(&finished) {
                task.say("the emulated host was lost; the audit is made once more, in another")?;
                sandbox::another_host(context, task, Lab::Default)?;
                task.finish_within(&mut command, AUDIT_LIMIT)?
            } else {
                finished
            }
        };
        let never: Vec<_> = finished
            .out
            .iter()
            .filter_map(|line| line.strip_prefix("never used: "))
            .collect();
        if !finished.status.success() {
            bail!(
                "the audit ended with {}; never used: {}",
                finished.status,
                never.join("; ")
            );
        }
        let sum = finished
            .out
            .iter()
            .rev()
            .find_map(|line| line.strip_prefix("filters: "));
        Ok(Report {
            detail: sum.unwrap_or_default().to_owned(),
            ..Report::default()
        })
    })
    .check()
    .hint("take a rule that nothing uses out of bin/vmm/seccomp, or say there why it stays (`unused`)")
}

/// A few seconds of mutated input for each parser that reads what a guest or a stranger wrote.
pub(crate) fn fuzz() -> Step {
    fuzz_for("fuzz", FUZZ_SECONDS, Some(FUZZ_SEED))
}

/// The same for so many seconds a target; from another seed each time where none is given.
pub(super) fn fuzz_for(name: &'static str, seconds: u64, seed: Option<u64>) -> Step {
    Step::new(name, move |context, task| {
        let limit = FUZZ_LIMIT.max(Duration::from_secs(seconds * MOST_TARGETS));
        let finished = task.finish_within(&mut fuzzer(context, seconds, seed.unwrap_or_else(now)), limit)?;
        let counts = finished
            .out
            .iter()
            .rev()
            .find_map(|line| plain_counts(line))
            .unwrap_or_default();
        judge(counts, finished.status.success(), failed_names(&finished.out))
    })
    .hint("the input that failed is in target/fuzz-failures; the log has the command that repeats it")
}

/// Seconds since 1970: another number for each run.
pub(crate) fn now() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.unwrap_or_default().as_secs()
}

/// The fuzzer, for so long a target.
pub(crate) fn fuzzer(context: &Context, seconds: u64, seed: u64) -> Command {
    let mut command = cargo(context, &["run", "--package", "basalt-fuzz"]);
    command.args(["--", "--seconds", &seconds.to_string(), "--seed", &seed.to_string()]);
    command
}

pub(super) fn judge(counts: Counts, success: bool, failed: Vec<String>) -> Result<Report> {
    if counts.passed + counts.failed == 0 {
        bail!("no test was executed");
    }
    if !success && counts.failed == 0 {
        bail!("{counts}, but the runner failed");
    }
    let detail = if failed.is_empty() {
        counts.to_string()
    } else {
        format!("{counts}: {}", failed.join(", "))
    };
    Ok(Report {
        detail,
        counts,
        ..Report::default()
    })
}

/// `3 passed, 0 failed, 1 skipped` as our own runners print it; more may follow, such as how many were retried.
fn plain_counts(line: &str) -> Option<Counts> {
    let mut counts = Counts::default();
    let mut words = 0;
    for part in line.split(',') {
        let (number, word) = part.trim().split_once(' ')?;
        let number = number.parse().ok()?;
        match word {
            "passed" => counts.passed = number,
            "failed" => counts.failed = number,
            "skipped" => counts.skipped = number,
            _ => continue,
        }
        words += 1;
    }
    (words >= 2).then_some(counts)
}

/// Names in `test NAME ... FAILED` (cargo, fuzz) and in `FAILED NAME 1.2 s` (cases).
pub(super) fn failed_names(lines: &[String]) -> Vec<String> {
    let name = |line: &str| {
        let test = line
            .strip_prefix("test ")
            .and_then(|rest| rest.strip_suffix(" ... FAILED"));
        let case = line.strip_prefix("FAILED ").and_then(|rest| rest.split(' ').next());
        test.or(case).map(str::to_owned)
    };
    lines.iter().filter_map(|line| name(line)).collect()
}

#[cfg(test)]
mod self_tests {
    use super::*;

    #[test]
    fn sums_are_read_as_they_are_printed() {
        assert_eq!(
            plain_counts("30 passed, 1 failed, 2 skipped, 1 retried"),
            Some(Counts {
                passed: 30,
                failed: 1,
                skipped: 2
            })
        );
        assert_eq!(plain_counts("30 passed"), None);
        assert_eq!(plain_counts("hello, world"), None);
    }

    #[test]
    fn nothing_executed_is_a_failure() {
        assert!(judge(Counts::default(), true, Vec::new()).is_err());
        assert!(
            judge(
                Counts {
                    passed: 0,
                    failed: 0,
                    skipped: 9
                },
                true,
                Vec::new()
            )
            .is_err()
        );
    }

    #[test]
    fn a_runner_that_dies_after_good_tests_has_failed() {
        assert!(
            judge(
                Counts {
                    passed: 3,
                    ..Counts::default()
                },
                false,
                Vec::new()
            )
            .is_err()
        );
    }

    #[test]
    fn failed_tests_are_named() {
        let lines = [
            "test a::b ... FAILED",
            "test c ... ok",
            "FAILED boot 1.5 s",
            "ok     exec 1.0 s",
        ];
        assert_eq!(failed_names(&lines.map(str::to_owned)), ["a::b", "boot"]);
    }
}
