//! What became of the lab cases: read from the lines that the runner prints for each, over all hosts and second runs.
//!
//! Decides what passed, what failed and what is flaky: a case that failed and then passed on a fresh host. Starts nothing.

use anyhow::{Context as _, Result, bail};

use super::tests::judge;
use crate::runner::{Counts, Finished, Part, Report, Task};

/// Hosts that may be lost in one run; more is no accident of the emulator.
const LOST_AT_MOST: usize = 3;
/// Flaky cases that a run may have and still pass.
const FLAKY_AT_MOST: usize = 2;
/// With more failed cases than these none is run once more: the run has failed whatever they would do.
pub(super) const AGAIN_AT_MOST: usize = 5;

/// What became of the cases so far.
#[derive(Debug, Default)]
pub(super) struct Sum {
    passed: usize,
    failed: Vec<Failed>,
    flaky: Vec<Flaky>,
    /// Cases that the runner made once more within a host, with the reason: guests that stopped early, time-outs.
    retried: Vec<String>,
    /// The cases under which hosts were lost.
    lost: Vec<String>,
    /// The runner failed and named no case.
    runner_failed: bool,
    times: Vec<Part>,
}

/// A case that failed.
#[derive(Debug, Clone)]
struct Failed {
    name: String,
    /// Why, where the runner told.
    why: String,
}

/// A case that failed, and passed on a fresh host.
#[derive(Debug, Clone)]
struct Flaky {
    name: String,
    why: String,
    /// What the two runs left.
    logs: [String; 2],
}

/// How the second run of a failed case went.
#[derive(Debug)]
pub(super) struct Again {
    name: String,
    passed: bool,
    seconds: f64,
    logs: [String; 2],
}

impl Again {
    /// From what the runner printed. It must have run this case and no other, and said so itself.
    pub(super) fn of(name: &str, finished: &Finished, host_lost: bool, logs: [String; 2]) -> Self {
        let lines: Vec<_> = finished.out.iter().filter_map(|line| Line::of(line)).collect();
        let ended = lines.iter().find(|line| line.name == name && line.what != "retry");
        Self {
            name: name.to_owned(),
            passed: finished.status.success() && !host_lost && ended.is_some_and(|line| line.what == "ok"),
            seconds: ended.map_or(0.0, |line| line.seconds),
            logs,
        }
    }
}

impl Sum {
    /// How many cases have a result. They run in the order of the list.
    pub(super) fn ended(&self) -> usize {
        self.passed + self.failed.len()
    }

    pub(super) fn has_failed(&self) -> bool {
        !self.failed.is_empty()
    }

    pub(super) fn add(&mut self, finished: &Finished) {
        let before = self.failed.len();
        for line in finished.out.iter().filter_map(|line| Line::of(line)) {
            match line.what {
                "ok" => self.passed += 1,
                "FAILED" => self.failed.push(Failed {
                    name: line.name.to_owned(),
                    why: line.why.to_owned(),
                }),
                _ => {
                    self.retried.push(format!("{} {}", line.name, line.why));
                    continue;
                }
            }
            self.times.push(Part {
                name: line.name.to_owned(),
                result: line.what.to_owned(),
                seconds: line.seconds,
            });
        }
        self.runner_failed = !finished.status.success() && self.failed.len() == before;
    }

    /// The case during which a host is lost is made once more; a second time it has failed.
    pub(super) fn host_lost(&mut self, during: &str) -> Result<()> {
        if self.lost.iter().any(|name| name == during) {
            self.failed.push(Failed {
                name: during.to_owned(),
                why: "two emulated hosts were lost under it".to_owned(),
            });
        } else {
            self.retried.push(format!("{during} (its emulated host was lost)"));
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

    /// The cases that get a second run: those that failed, if they are few. One that has lost two hosts has had its own.
    pub(super) fn to_be_run_again(&self) -> Vec<String> {
        if self.failed.len() > AGAIN_AT_MOST {
            return Vec::new();
        }
        let names = self.failed.iter().map(|failed| failed.name.clone());
        names.filter(|name| !self.lost.contains(name)).collect()
    }

    /// A failed case that passed now is flaky; one that failed twice has failed.
    pub(super) fn ran_again(&mut self, again: Again) {
        if let Some(part) = self.times.iter_mut().find(|part| part.name == again.name) {
            part.seconds += again.seconds;
            if again.passed {
                part.result = "flaky".to_owned();
            }
        }
        let Some(place) = self.failed.iter().position(|failed| failed.name == again.name) else {
            return;
        };
        if !again.passed {
            self.failed[place].why.push_str("; failed on a fresh lab too");
            return;
        }
        let Failed { name, why } = self.failed.remove(place);
        self.passed += 1;
        self.flaky.push(Flaky {
            name,
            why,
            logs: again.logs,
        });
    }

    /// Hands the cases' times to the run.
    pub(super) fn tell(&self, task: &mut Task) {
        for part in &self.times {
            task.part(part.clone());
        }
    }

    pub(super) fn report(mut self, names: &[String]) -> Result<Report> {
        let missing = names.get(self.ended()).map(String::as_str);
        let runner_failed = self.runner_failed;
        let ended = self.ended();
        let remarks = self.remarks();
        if self.flaky.len() > FLAKY_AT_MOST {
            let flaky = std::mem::take(&mut self.flaky);
            self.passed -= flaky.len();
            self.failed.extend(flaky.into_iter().map(|case| Failed {
                name: case.name,
                why: format!("flaky, and more than {FLAKY_AT_MOST} fail the run: {}", case.why),
            }));
        }
        let failed: Vec<_> = self.failed.iter().map(|case| case.to_string()).collect();
        let counts = Counts {
            passed: u64::try_from(self.passed)?,
            failed: u64::try_from(failed.len())?,
            skipped: 0,
        };
        let mut report = judge(counts, missing.is_none() && !runner_failed, failed.clone())
            .with_context(|| format!("the cases ended before {}", missing.unwrap_or("their sum")))?;
        // A case that was made once more passed or failed like any other, but whoever reads the sum should know.
        report.detail = format!(
            "{ended} of {} run, {} retried, {} flaky",
            names.len(),
            self.retried.len(),
            remarks.len() - self.retried.len()
        );
        for (what, which) in [("hosts lost under", &self.lost), ("failed:", &failed)] {
            if !which.is_empty() {
                report.detail = format!("{}, {what} {}", report.detail, which.join(" "));
            }
        }
        report.remarks = remarks;
        Ok(report)
    }

    /// A line for each flaky case and for each that was made once more within its host.
    fn remarks(&self) -> Vec<String> {
        let flaky = self.flaky.iter().map(|case| {
            let [first, second] = &case.logs;
            format!("flaky: {}: {}; logs: {first} {second}", case.name, case.why)
        });
        let retried = self.retried.iter().map(|case| format!("retried: {case}"));
        flaky.chain(retried).collect()
    }
}

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.why.is_empty() {
            return f.write_str(&self.name);
        }
        write!(f, "{} ({})", self.name, self.why)
    }
}

/// What the runner prints of a case: `ok     NAME 1.2 s`, `FAILED NAME 1.2 s: why`, `retry  NAME 1.2 s: why`.
#[derive(Debug, PartialEq)]
struct Line<'a> {
    what: &'a str,
    name: &'a str,
    seconds: f64,
    why: &'a str,
}

impl<'a> Line<'a> {
    /// Other lines are a case's own output, which the runner indents, and the runner's sums.
    fn of(line: &'a str) -> Option<Self> {
        let mut words = line.split_whitespace();
        let (what, name, seconds) = (words.next()?, words.next()?, words.next()?);
        let is_result = line.starts_with(what) && ["ok", "FAILED", "retry"].contains(&what);
        Some(Self {
            what,
            name,
            seconds: seconds.parse().ok().filter(|_| is_result)?,
            why: line.split_once(" s: ").map_or("", |(_, why)| why),
        })
    }
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

    fn again(name: &str, code: i32, out: &[&str]) -> Again {
        Again::of(name, &ran(code, out), false, ["one".to_owned(), "two".to_owned()])
    }

    #[test]
    fn a_lost_host_costs_one_more_try_of_one_case() {
        let mut sum = Sum::default();
        sum.add(&ran(125, &["ok     a 1.0 s", "  | ok b 1.0 s"]));
        assert_eq!(sum.ended(), 1);
        sum.host_lost("b").unwrap();
        sum.add(&ran(0, &["retry  b 3.0 s: no end", "ok     b 4.0 s", "ok     c 2.0 s"]));
        let report = sum.report(&names()).unwrap();
        assert_eq!((report.counts.passed, report.counts.failed), (3, 0));
        assert_eq!(report.detail, "3 of 3 run, 2 retried, 0 flaky, hosts lost under b");
        assert_eq!(
            report.remarks,
            ["retried: b (its emulated host was lost)", "retried: b no end"]
        );
    }

    #[test]
    fn a_case_that_loses_two_hosts_has_failed_and_many_hosts_end_it_all() {
        let mut sum = Sum::default();
        sum.host_lost("a").unwrap();
        sum.host_lost("a").unwrap();
        assert_eq!(sum.failed[0].name, "a");
        assert!(sum.to_be_run_again().is_empty(), "it has had its second run");
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

    fn one_failed() -> Sum {
        let mut sum = Sum::default();
        sum.add(&ran(
            1,
            &[
                "ok     a 1.0 s",
                "FAILED b 1.0 s: broke",
                "ok     c 2.5 s",
                "2 passed, 1 failed",
            ],
        ));
        assert_eq!(sum.to_be_run_again(), ["b"]);
        sum
    }

    #[test]
    fn a_case_that_passes_on_a_fresh_lab_is_flaky_and_named_with_both_logs() {
        let mut sum = one_failed();
        sum.ran_again(again("b", 0, &["ok     b 4.0 s"]));
        let parts = sum.times.clone();
        let report = sum.report(&names()).unwrap();
        assert_eq!((report.counts.passed, report.counts.failed), (3, 0));
        assert_eq!(report.detail, "3 of 3 run, 0 retried, 1 flaky");
        assert_eq!(report.remarks, ["flaky: b: broke; logs: one two"]);
        assert_eq!((parts[1].result.as_str(), parts[1].seconds), ("flaky", 5.0));
        assert_eq!((parts[2].result.as_str(), parts[2].seconds), ("ok", 2.5));
    }

    #[test]
    fn only_a_pass_of_that_very_case_makes_it_flaky() {
        let second_runs = [
            again("b", 1, &["FAILED b 1.0 s: broke again"]),
            // The runner must have ended well, with a word on this case, on a host that lived.
            again("b", 1, &["ok     b 1.0 s"]),
            again("b", 0, &["ok     a 1.0 s"]),
            again("b", 0, &["  | ok b 1.0 s", "0 passed, 0 failed"]),
            Again::of("b", &ran(0, &["ok     b 1.0 s"]), true, Default::default()),
        ];
        for second in second_runs {
            let mut sum = one_failed();
            sum.ran_again(second);
            let report = sum.report(&names()).unwrap();
            assert_eq!(
                (report.counts.passed, report.counts.failed),
                (2, 1),
                "{}",
                report.detail
            );
            let end = "failed: b (broke; failed on a fresh lab too)";
            assert!(report.detail.ends_with(end), "{}", report.detail);
            assert!(report.remarks.is_empty());
        }
    }

    /// As many cases as the limit allows, and one more.
    #[test]
    fn more_than_two_flaky_cases_fail_the_run() {
        for (flaky, failed) in [(FLAKY_AT_MOST, 0), (FLAKY_AT_MOST + 1, FLAKY_AT_MOST + 1)] {
            let names: Vec<_> = (0..4).map(|number| format!("case{number}")).collect();
            let lines: Vec<_> = names
                .iter()
                .enumerate()
                .map(|(at, name)| match at < flaky {
                    true => format!("FAILED {name} 1.0 s: broke"),
                    false => format!("ok     {name} 1.0 s"),
                })
                .collect();
            let mut sum = Sum::default();
            sum.add(&ran(1, &lines.iter().map(String::as_str).collect::<Vec<_>>()));
            for name in sum.to_be_run_again() {
                sum.ran_again(again(&name, 0, &[&format!("ok     {name} 1.0 s")]));
            }
            let report = sum.report(&names).unwrap();
            assert_eq!(
                report.counts.failed,
                u64::try_from(failed).unwrap(),
                "{}",
                report.detail
            );
            assert_eq!(report.counts.passed + report.counts.failed, 4);
            assert_eq!(report.remarks.len(), flaky, "each is named with its logs");
            assert_eq!(report.detail.contains("more than 2 fail the run"), failed > 0);
        }
    }

    #[test]
    fn many_failures_are_no_accident() {
        let lines: Vec<_> = (0..=AGAIN_AT_MOST)
            .map(|number| format!("FAILED case{number} 1.0 s: broke"))
            .collect();
        let mut sum = Sum::default();
        sum.add(&ran(1, &lines.iter().map(String::as_str).collect::<Vec<_>>()));
        assert!(sum.has_failed() && sum.to_be_run_again().is_empty());
    }

    #[test]
    fn lines_of_the_runner_are_told_from_a_cases_own() {
        let line = Line::of("FAILED b 1.5 s: took 2 s: too long").unwrap();
        assert_eq!(
            (line.what, line.name, line.seconds, line.why),
            ("FAILED", "b", 1.5, "took 2 s: too long")
        );
        for other in [
            "  | ok b 1.0 s",
            "ok b",
            "ok b c d",
            "3 passed, 0 failed, 0 skipped",
            "cases: 3 run, 0 failed",
        ] {
            assert_eq!(Line::of(other), None, "{other}");
        }
    }
}
