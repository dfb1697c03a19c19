//! The steps of `cargo xtask long`: what `make test` does a little of, for as long as it takes to be worth a night.
//!
//! Knows by which variables tests do more; what they do then is theirs to know.

use std::process::Command;
use std::time::Duration;

use anyhow::bail;

use super::sandbox::lab_command;
use super::tests::{self, CASES_IN_LAB};
use super::unit;
use crate::context::Context;
use crate::runner::{Report, Step};

/// Seconds for each fuzz target.
const FUZZ: u64 = 60;
/// Each part has an end of its own.
const LIMIT: Duration = Duration::from_secs(6 * 60 * 60);

/// Lab cases that do more: the step, which cases, and by what.
const CASES: [(&str, &str, [&str; 2]); 4] = [
    ("every-point", "at-points", ["BASALT_EVERY_POINT", "1"]),
    ("many-cycles", "daemon-cycles", ["BASALT_CYCLES", "200"]),
    ("many-rounds", "snapshot-volumes", ["BASALT_ROUNDS", "50"]),
    ("many-reservations", "reservations", ["BASALT_RESERVATIONS", "200"]),
];

/// A minute of each fuzz target, from another seed each time.
pub(super) fn fuzz() -> Step {
    tests::fuzz_for("long-fuzz", FUZZ, None)
}

/// Fifty power failures at random instants; the seed is printed.
pub(super) fn power_failures() -> Step {
    unit::one(
        "power-failures",
        "sandbox",
        "power_failures",
        ["BASALT_POWER_FAILURES", "50"],
    )
}

/// The cases, one step each.
pub(super) fn cases() -> impl Iterator<Item = Step> {
    CASES.into_iter().map(|(step, cases, variable)| {
        Step::new(step, move |context: &Context, task| {
            let (program, variable) = (context.release().join("basalt-lab-cases"), variable.join("="));
            let program = if context.kvm {
                program.to_string_lossy().into_owned()
            } else {
                CASES_IN_LAB.to_owned()
            };
            // Each case has so many times its usual limit.
            let words = [&variable, &program, "run", "--filter", cases, "--patience", "20"];
            let mut command = if context.kvm {
                Command::new("env")
            } else {
                task.run_within(&mut lab_command(context, &["sync"]), LIMIT)?;
                lab_command(context, &["exec", "--", "env"])
            };
            let finished = task.finish_within(command.args(words), LIMIT)?;
            if !finished.status.success() {
                bail!("{} ended with {}", words.join(" "), finished.status);
            }
            Ok(Report::default())
        })
        .check()
        .hint("the case's log is named above")
    })
}
