//! The step `cases`: VM cases inside the lab, or right here where there is hardware virtualization.
//!
//! Reads the line that the runner prints for each case, and outlives the emulated host: when that dies or stands still
//! (docs/lab.md, traps), it is started afresh, and the cases go on with the one that ran. What a case tests, and when one
//! is made once more within a host, the runner knows (lab/cases).

use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::sandbox::{self, lab_command};
use super::tests::{CASES_IN_LAB, judge};
use crate::context::Context;
use crate::runner::{Counts, Finished, Report, Step, Task};

/// Each case has a hard limit of its own; this one ends the whole when they together take too long.
const LIMIT: Duration = Duration::from_secs(50 * 60);
/// Bringing programs into the lab, and the lab up.
const SETUP_LIMIT: Duration = Duration::from_secs(5 * 60);
/// Hosts that may be lost in one run; more is no accident of the emulator.
const LOST_AT_MOST: usize = 3;
/// Where the case `package` looks.
const PACKAGES_IN_LAB: &str = "/opt/basalt/bin/basalt-packages";

/// All cases.
pub(crate) fn cases() -> Step {
    Step::new("cases", |context, task| {
        let mut runner = Command::new(context.release().join("basalt-lab-cases"));
        let names = task.run_within(runner.arg("list"), SETUP_LIMIT)?.out;
        let mut sum = Sum::default();
        if context.kvm {
            let mut command = Command::new(context.release().join("basalt-lab-cases"));
            let finished = task.finish_within(command.arg("run").current_dir(&context.root), LIMIT)?;
            sum.add(&finished);
        } else {
            in_lab(context, task, &names, &mut sum)?;
        }
        sum.report(&names)
    })
    .hint("the case's console log is named above; `cargo xtask test --only cases` repeats the cases")
}

fn in_lab(context: &Context, task: &mut Task, names: &[String], sum: &mut Sum) -> Result<()> {
    while let Some(next) = names.get(sum.ended()) {
        task.run_within(&mut lab_command(context, &["sync"]), SETUP_LIMIT)?;
        let packages = super::package::for_tests(context);
        let mut push = lab_command(context, &["push"]);
        task.run_within(push.args(packages).arg(PACKAGES_IN_LAB), SETUP_LIMIT)?;
        let mut command = lab_command(context, &["exec", "--", CASES_IN_LAB, "run", "--from", next]);
        let finished = task.finish_within(&mut command, LIMIT)?;
        sum.add(&finished);
        if !sandbox::host_is_lost(&finished) {
            return Ok(());
        }
        let Some(during) = names.get(sum.ended()) else {
            return Ok(());
        };
        task.say(&format!(
            "the emulated host was lost under the case {during}; the cases go on in another"
        ))?;
        sum.host_lost(during)?;
        sandbox::another_host(context, task)?;
    }
    Ok(())
}

/// What became of the cases so far.
#[derive(Debug, Default)]
struct Sum {
    passed: usize,
    /// Names, and why where the runner told.
    failed: Vec<String>,
    retried: usize,
    /// The cases under which hosts were lost.
    lost: Vec<String>,
    /// How the last runner ended.
    runner_failed: bool,
}

impl Sum {
    /// How many cases have a result. They run in the order of the list.
    fn ended(&self) -> usize {
        self.passed + self.failed.len()
    }

    fn add(&mut self, finished: &Finished) {
        self.runner_failed = !finished.status.success();
        for line in &finished.out {
            match result(line) {
                Some(("ok", _)) => self.passed += 1,
                Some(("FAILED", name)) => self.failed.push(match line.split_once(" s: ") {
                    Some((_, why)) => format!("{name} ({why})"),
                    None => name.to_owned(),
                }),
                Some(("retry", _)) => self.retried += 1,
                _ => {}
            }
        }
    }

    /// The case during which a host is lost is made once more; a second time it has failed.
    fn host_lost(&mut self, during: &str) -> Result<()> {
        if self.lost.iter().any(|name| name == during) {
            self.failed.push(during.to_owned());
        } else {
            self.retried += 1;
        }
        self.lost.push(during.to_owned());
        if self.lost.len() > LOST_AT_MOST {
            bail!(
                "{} emulated hosts were lost, under {}",
                self.lost.len(),
                self.lost.join(", ")
            );
        }
        Ok(())
    }

    fn report(self, names: &[String]) -> Result<Report> {
        let counts = Counts {
            passed: u64::try_from(self.passed)?,
            failed: u64::try_from(self.failed.len())?,
            skipped: 0,
        };
        let missing = names.get(self.ended()).map(String::as_str);
        let mut report = judge(counts, missing.is_none() && !self.runner_failed, self.failed.clone())
            .with_context(|| format!("the cases ended before {}", missing.unwrap_or("their sum")))?;
        // A case that was made once more passed or failed like any other, but whoever reads the sum should know.
        report.detail = format!("{} of {} run, {} retried", self.ended(), names.len(), self.retried);
        for (what, which) in [("hosts lost under", &self.lost), ("failed:", &self.failed)] {
            if !which.is_empty() {
                report.detail = format!("{}, {what} {}", report.detail, which.join(" "));
            }
        }
        Ok(report)
    }
}

/// `ok     NAME 1.2 s`, `FAILED NAME 1.2 s: why`, `retry  NAME (why)`: what, and which case. Other lines are a case's own output,
/// which the runner indents.
fn result(line: &str) -> Option<(&str, &str)> {
    let mut words = line.split_whitespace();
    let (what, name) = (words.next()?, words.next()?);
    (line.starts_with(what) && ["ok", "FAILED", "retry"].contains(&what)).then_some((what, name))
}

#[cfg(test)]
mod self_tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    use super::*;

    fn names() -> Vec<String> {
        ["a", "b", "c"].map(str::to_owned).to_vec()
    }

    fn ran(code: i32, out: &[&str]) -> Finished {
        Finished {
            status: ExitStatus::from_raw(code << 8),
            out: out.iter().map(|line| (*line).to_owned()).collect(),
            err: Vec::new(),
        }
    }

    #[test]
    fn a_lost_host_costs_one_more_try_of_one_case() {
        let mut sum = Sum::default();
        sum.add(&ran(125, &["ok     a 1.0 s", "  | ok b"]));
        assert_eq!(sum.ended(), 1);
        sum.host_lost("b").unwrap();
        sum.add(&ran(0, &["retry  b (no end)", "ok     b 1.0 s", "ok     c 2.0 s"]));
        let report = sum.report(&names()).unwrap();
        assert_eq!((report.counts.passed, report.counts.failed), (3, 0));
        assert_eq!(report.detail, "3 of 3 run, 2 retried, hosts lost under b");
    }

    #[test]
    fn a_case_that_loses_two_hosts_has_failed_and_many_hosts_end_it_all() {
        let mut sum = Sum::default();
        sum.host_lost("a").unwrap();
        sum.host_lost("a").unwrap();
        assert_eq!(sum.failed, ["a"]);
        sum.host_lost("b").unwrap();
        assert!(sum.host_lost("c").unwrap_err().to_string().contains("a, a, b, c"));
    }

    #[test]
    fn cases_that_did_not_run_and_runners_that_fail_are_failures() {
        let mut sum = Sum::default();
        sum.add(&ran(1, &["ok     a 1.0 s", "ok     b 1.0 s"]));
        assert!(format!("{:#}", sum.report(&names()).unwrap_err()).contains("before c"));
        let mut sum = Sum::default();
        sum.add(&ran(1, &["ok     a 1.0 s", "ok     b 1.0 s", "ok     c 1.0 s"]));
        assert!(sum.report(&names()).is_err());
        assert!(Sum::default().report(&[]).is_err());
        let mut sum = Sum::default();
        sum.add(&ran(
            1,
            &["ok     a 1.0 s", "FAILED b 1.0 s: took 2 s: too long", "ok     c 1.0 s"],
        ));
        let report = sum.report(&names()).unwrap();
        assert_eq!(report.counts.failed, 1);
        let end = "failed: b (took 2 s: too long)";
        assert!(report.detail.ends_with(end), "{}", report.detail);
    }
}
