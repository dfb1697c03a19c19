//! `basalt doctor`: shows what crate `host` found.

use anyhow::Result;
use host::{Check, Report, Status, Verdict};

use crate::output::{Colour, Output, coloured};
use crate::{EXIT_FAILED, places};

/// Makes every check and shows it; fails where no sandbox can run.
pub(crate) fn doctor(output: &Output) -> Result<u8> {
    let report = host::doctor(&places::for_doctor()?);
    output.result(&report, || text(&report))?;
    Ok(if report.can_run() { 0 } else { EXIT_FAILED })
}

fn text(report: &Report) -> String {
    let mut text = String::new();
    let width = report.checks.iter().map(|c| c.name.len()).max().unwrap_or(0);
    for check in &report.checks {
        text.push_str(&line(check, width));
    }
    text.push('\n');
    text.push_str(&verdict(report));
    text
}

fn line(check: &Check, width: usize) -> String {
    let (word, colour) = match check.status {
        Status::Ok => ("ok  ", Colour::Green),
        Status::Warn => ("warn", Colour::Yellow),
        Status::Fail => ("fail", Colour::Red),
    };
    let mut line = format!("{}  {:width$}  {}\n", coloured(colour, word), check.name, check.found);
    if let Some(next) = &check.next {
        line.push_str(&format!("      {:width$}  -> {next}\n", ""));
    }
    line
}

fn verdict(report: &Report) -> String {
    match (&report.verdict, report.can_run()) {
        (Verdict::Kvm, _) => "Sandboxes run on this host's KVM.\n".into(),
        (Verdict::Lab(reason), true) => format!("No usable KVM ({reason}): sandboxes run in the lab.\n"),
        (Verdict::Lab(reason), false) => {
            format!("No usable KVM ({reason}), and no lab either: sandboxes cannot run here yet.\n")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_check_has_a_line_and_each_next_step_one_more() {
        let report = Report {
            verdict: Verdict::Lab("no vmx".into()),
            checks: vec![Check::ok("cpus", "2 CPUs"), Check::fail("lab", "none", "make run")],
        };
        let text = text(&report);
        assert_eq!(
            text,
            "ok    cpus  2 CPUs\nfail  lab   none\n            -> make run\n\n\
             No usable KVM (no vmx), and no lab either: sandboxes cannot run here yet.\n"
        );
    }
}
