//! The steps `build-tests`, `unit-tests` and `program-tests`: the tests of the whole workspace, natively, compiled by cargo and
//! then run. What is inside crates and what is in their `tests/` are two steps: most tests wait, so that both side by side take
//! little more than the longer one.
//!
//! The programs with the tests are started from here, as cargo does it: `cargo test --lib` alone would compile everything again,
//! with the features of what is left. A few tests that fail are made once more: a machine that does much else can be too slow for a
//! test that waits. Such a test is flaky, and named at the run's end, for whoever should mend it.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use super::build::cargo;
use super::tests::{failed_names, judge};
use crate::context::Context;
use crate::runner::{Counts, Finished, Report, Step, Task};

/// In the background compiling takes as long as what it runs beside.
const LIMIT: Duration = Duration::from_secs(60 * 60);
/// The longest of the programs takes three minutes by itself, and more beside cases.
const PROGRAM_LIMIT: Duration = Duration::from_secs(30 * 60);
/// More failed tests than these are no accident, and are not made again.
const AGAIN_AT_MOST: usize = 5;
/// All tests that there are. Documentation has none: `tidy` sees to that.
const ALL: [&str; 3] = ["test", "--workspace", "--no-run"];

/// Compiles all tests of the workspace, and the fuzzer.
pub(crate) fn build() -> Step {
    Step::new("build-tests", |context, task| {
        for what in [&ALL, &["build", "--package", "basalt-fuzz"]] as [&[&str]; 2] {
            task.run_within(&mut locked(context, what), LIMIT)?;
        }
        Ok(Report::default())
    })
    .hint("the compiler's messages are above; `cargo test --workspace --no-run` repeats them in colour")
}

/// The tests within crates and programs.
pub(crate) fn unit() -> Step {
    tests("unit-tests", |program| !program.is_outside)
}

/// The tests in `tests/` of crates and programs, many of which start programs.
pub(crate) fn programs() -> Step {
    tests("program-tests", |program| program.is_outside)
}

/// The tests of one program in some `tests/`, `named` so, which do more by a variable; as long as they take.
pub(super) fn one(step: &'static str, program: &'static str, named: &'static str, variable: [&'static str; 2]) -> Step {
    Step::new(step, move |context, task| {
        let all = built(context, task)?;
        let found = all.into_iter().find(|it| it.is_outside && it.name == program);
        let program = found.with_context(|| format!("there is no program {program} with tests"))?;
        let mut command = program.command(&[]);
        let finished = task.finish_within(command.arg(named).env(variable[0], variable[1]), LIMIT)?;
        report(vec![(program, Ran::of(&finished))])
    })
    .hint("the log has the seed that repeats it")
}

fn tests(name: &'static str, are_here: fn(&Program) -> bool) -> Step {
    Step::new(name, move |context, task| {
        let programs = built(context, task)?.into_iter().filter(are_here);
        let mut all = Vec::new();
        for program in programs {
            task.say(&format!("     Running {}", program.shown()))?;
            let ran = Ran::of(&task.finish_within(&mut program.command(&[]), PROGRAM_LIMIT)?);
            all.push((program, ran));
        }
        if may_be_made_again(&all) {
            for (program, ran) in all.iter_mut().filter(|(_, ran)| !ran.success) {
                task.say(&format!("once more: {}: {}", program.shown(), ran.failed.join(", ")))?;
                let again = task.finish_within(&mut program.command(&ran.failed), PROGRAM_LIMIT)?;
                ran.make_again(Ran::of(&again));
            }
        }
        // Said again at the end: the log's last lines are what a reader of CI's record sees.
        for line in all.iter().flat_map(|(_, ran)| &ran.said) {
            task.say(line)?;
        }
        report(all)
    })
    .hint("`cargo test -p PACKAGE NAME` repeats one of them")
}

fn locked(context: &Context, what: &[&str]) -> Command {
    let mut command = cargo(context, what);
    if context.ci {
        command.arg("--locked");
    }
    command
}

/// A program with tests.
#[derive(Debug, PartialEq, Eq)]
struct Program {
    /// Its crate's directory, in which cargo starts it.
    directory: PathBuf,
    executable: PathBuf,
    /// The target's, as cargo calls it.
    name: String,
    /// It is a file of `tests/`.
    is_outside: bool,
}

impl Program {
    fn command(&self, names: &[String]) -> Command {
        let mut command = Command::new(&self.executable);
        command
            .current_dir(&self.directory)
            .env("CARGO_MANIFEST_DIR", &self.directory);
        if !names.is_empty() {
            command.arg("--exact").args(names);
        }
        command
    }

    fn shown(&self) -> String {
        let name = self.executable.file_name().unwrap_or_default().to_string_lossy();
        let of = self.directory.file_name().unwrap_or_default().to_string_lossy();
        format!("{name} of {of}")
    }
}

/// The programs that cargo has compiled; it looks whether anything has changed since.
fn built(context: &Context, task: &mut Task) -> Result<Vec<Program>> {
    let mut command = locked(context, &ALL);
    let listed = task.run_within(command.arg("--message-format=json-render-diagnostics"), LIMIT)?;
    let found = listed
        .out
        .iter()
        .map(|line| program(line))
        .collect::<Result<Vec<_>>>()?;
    Ok(found.into_iter().flatten().collect())
}

/// The program that a message of cargo is about; `None` if it is about something else (the cargo book, "External tools", "JSON
/// messages").
fn program(line: &str) -> Result<Option<Program>> {
    let message: Value = serde_json::from_str(line).with_context(|| format!("cargo said {line:?}"))?;
    let (Some(executable), Some(true)) = (message["executable"].as_str(), message["profile"]["test"].as_bool()) else {
        return Ok(None);
    };
    let manifest = PathBuf::from(message["manifest_path"].as_str().context("no manifest_path")?);
    let kinds = message["target"]["kind"].as_array().context("no kind")?;
    Ok(Some(Program {
        directory: manifest.parent().context("a manifest without a directory")?.to_owned(),
        executable: executable.into(),
        name: message["target"]["name"].as_str().context("no name")?.to_owned(),
        is_outside: kinds.iter().any(|kind| kind == "test"),
    }))
}

/// What became of one program's tests.
#[derive(Debug, Default)]
struct Ran {
    counts: Counts,
    success: bool,
    /// The tests that failed.
    failed: Vec<String>,
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
            said: failures(&finished.out),
            second: Vec::new(),
        }
    }

    /// It told which tests failed, if any: it did not die.
    fn told_all(&self) -> bool {
        u64::try_from(self.failed.len()) == Ok(self.counts.failed) && self.success == self.failed.is_empty()
    }

    /// Counts a second try of the tests that failed. What was not made again stays failed.
    fn make_again(&mut self, again: Self) {
        if again.counts.passed + again.counts.failed < self.counts.failed {
            return;
        }
        self.success = again.success;
        self.second = std::mem::take(&mut self.failed);
        self.second.retain(|name| !again.failed.contains(name));
        let mended = u64::try_from(self.second.len()).unwrap_or(0);
        self.counts.passed += mended;
        self.counts.failed -= mended;
        self.failed = again.failed;
    }
}

/// A few tests failed, and every program told which.
fn may_be_made_again(all: &[(Program, Ran)]) -> bool {
    let failed: usize = all.iter().map(|(_, ran)| ran.failed.len()).sum();
    (1..=AGAIN_AT_MOST).contains(&failed) && all.iter().all(|(_, ran)| ran.told_all())
}

fn report(all: Vec<(Program, Ran)>) -> Result<Report> {
    let mut sum = Ran {
        success: true,
        ..Ran::default()
    };
    let mut died = Vec::new();
    for (program, ran) in all {
        if !ran.told_all() {
            died.push(program.shown());
        }
        sum.counts += ran.counts;
        sum.success &= ran.success;
        sum.failed.extend(ran.failed);
        sum.second.extend(ran.second);
    }
    if !died.is_empty() {
        let (counts, failed) = (sum.counts, sum.failed.join(", "));
        bail!(
            "{counts} ({failed}); programs that ended without a sum: {}",
            died.join(", ")
        );
    }
    let mut report = judge(sum.counts, sum.success, sum.failed)?;
    let flaky =
        |name: &String| format!("flaky: {name}: passed when it was made once more; the first try is in the step's log");
    report.remarks = sum.second.iter().map(flaky).collect();
    if !sum.second.is_empty() {
        report.detail = format!("{}, {} flaky", report.detail, sum.second.len());
    }
    Ok(report)
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

/// What the failed tests of a program printed: its block from `failures:` to the program's result.
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

    fn ran(code: i32, out: &[&str]) -> Ran {
        Ran::of(&Finished {
            status: ExitStatus::from_raw(code << 8),
            out: lines(out),
            err: Vec::new(),
        })
    }

    fn of(ran: Ran) -> (Program, Ran) {
        let program = Program {
            directory: "/x".into(),
            executable: "/x-1".into(),
            name: "x".into(),
            is_outside: false,
        };
        (program, ran)
    }

    const SUM: &str =
        "test result: FAILED. 12 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.1s";
    const ONE: &str = "test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 12 filtered out; finished in 0.1s";

    fn first() -> Ran {
        ran(101, &["test a ... ok", "test b::c ... FAILED", "failures:", "why", SUM])
    }

    #[test]
    fn programs_with_tests_are_found_among_cargos_messages() {
        let message = |kind: &str, test: bool, executable: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/x/Cargo.toml","target":{{"name":"x","kind":["{kind}"]}},"profile":{{"test":{test}}},"executable":{executable}}}"#
            )
        };
        let found = |line: &str| program(line).unwrap();
        let inside = found(&message("lib", true, r#""/t/x-1""#)).unwrap();
        assert_eq!((inside.is_outside, inside.shown()), (false, "x-1 of x".to_owned()));
        assert!(found(&message("test", true, r#""/t/y-1""#)).unwrap().is_outside);
        assert_eq!(found(&message("bin", false, r#""/t/z""#)), None);
        assert_eq!(found(&message("lib", true, "null")), None);
        assert_eq!(found(r#"{"reason":"build-finished","success":true}"#), None);
        assert!(program("warning: x").is_err());
    }

    #[test]
    fn sums_are_read_as_they_are_printed() {
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
        assert!(may_be_made_again(&[of(first()), of(ran(0, &[ONE]))]));
        let mut again = first();
        again.make_again(ran(0, &["test b::c ... ok", ONE]));
        let report = report(vec![of(again)]).unwrap();
        assert_eq!((report.counts.passed, report.counts.failed), (13, 0));
        assert_eq!(report.detail, "13 passed, 0 failed, 1 skipped, 1 flaky");
        assert_eq!(report.remarks.len(), 1);
        assert!(report.remarks[0].starts_with("flaky: b::c: "), "{:?}", report.remarks);
    }

    #[test]
    fn a_test_that_fails_twice_or_is_not_found_again_has_failed() {
        let twice = || {
            ran(
                101,
                &[
                    "test b::c ... FAILED",
                    "test result: FAILED. 0 passed; 1 failed; 0 ignored",
                ],
            )
        };
        let nothing = || ran(0, &["test result: ok. 0 passed; 0 failed; 0 ignored"]);
        for second in [twice(), nothing()] {
            let mut again = first();
            again.make_again(second);
            let report = report(vec![of(again)]).unwrap();
            assert_eq!((report.counts.passed, report.counts.failed), (12, 1));
            assert!(report.detail.ends_with("b::c"), "{}", report.detail);
        }
    }

    #[test]
    fn programs_that_died_and_many_failures_are_not_made_again() {
        let died = || ran(101, &["test a ... ok", ONE]);
        assert!(!may_be_made_again(&[of(first()), of(died())]));
        let error = report(vec![of(first()), of(died())]).unwrap_err().to_string();
        assert_eq!(
            error,
            "13 passed, 1 failed, 1 skipped (b::c); programs that ended without a sum: x-1 of x"
        );
        let one_more_died = ran(
            101,
            &[
                "test a ... FAILED",
                "test result: FAILED. 0 passed; 2 failed; 0 ignored",
            ],
        );
        assert!(!may_be_made_again(&[of(one_more_died)]));
        let sum = "test result: FAILED. 0 passed; 6 failed; 0 ignored";
        let many: Vec<_> = (0..6).map(|n| format!("test t{n} ... FAILED")).collect();
        let mut many: Vec<_> = many.iter().map(String::as_str).collect();
        many.push(sum);
        assert!(!may_be_made_again(&[of(ran(101, &many))]));
    }
}
