//! `basalt doctor`: shows what crate `host` found, and which snapshots and templates are known to be damaged.

use std::fs;
use std::path::Path;

use anyhow::Result;
use host::{Check, Report, Status, Verdict};

use crate::output::{Colour, Output, coloured};
use crate::{EXIT_FAILED, places};

/// Makes every check and shows it; fails where no sandbox can run.
pub(crate) fn doctor(output: &Output) -> Result<u8> {
    let places = places::for_doctor()?;
    let mut report = host::doctor(&places);
    report.checks.extend(saved(&places.state));
    output.result(&report, || text(&report))?;
    Ok(if report.can_run() { 0 } else { EXIT_FAILED })
}

/// What the daemon has found out about the files that sandboxes are cloned of (`node::saved::checksums`); nothing where there are none.
fn saved(state: &Path) -> Option<Check> {
    let mut damaged = Vec::new();
    let mut there = 0;
    for kind in ["snapshot", "template"] {
        let entries = fs::read_dir(state.join(format!("{kind}s")))
            .into_iter()
            .flatten()
            .flatten();
        for entry in entries.filter(|entry| entry.path().join("record.json").exists()) {
            there += 1;
            if entry.path().join("damage.json").exists() {
                let name = entry.file_name().to_string_lossy().into_owned();
                damaged.push((kind, name.chars().take(64).collect::<String>()));
            }
        }
    }
    damaged.sort();
    let (kind, name) = match damaged.first() {
        Some(first) => first,
        None if there == 0 => return None,
        None => {
            return Some(Check::ok(
                "saved",
                format!("{there} snapshots and templates, none known to be damaged"),
            ));
        }
    };
    let names: Vec<&str> = damaged.iter().map(|(_, name)| name.as_str()).collect();
    let next = format!("`basalt {kind} verify {name}` says what is damaged, and what to do");
    Some(Check::warn("saved", format!("damaged: {}", names.join(", ")), next))
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
    fn what_is_damaged_is_named() {
        let state = tempfile::tempdir().unwrap();
        assert!(saved(state.path()).is_none());
        let place = |name: &str| state.path().join(name);
        for name in ["snapshots/a", "snapshots/b", "templates/c"] {
            fs::create_dir_all(place(name)).unwrap();
            fs::write(place(name).join("record.json"), "").unwrap();
        }
        fs::create_dir(place("snapshots/unfinished")).unwrap();
        let check = saved(state.path()).unwrap();
        assert_eq!(check.found, "3 snapshots and templates, none known to be damaged");
        fs::write(place("snapshots/b/damage.json"), "[]").unwrap();
        fs::write(place("templates/c/damage.json"), "[]").unwrap();
        let check = saved(state.path()).unwrap();
        assert_eq!((check.status, check.found.as_str()), (Status::Warn, "damaged: b, c"));
        assert!(check.next.unwrap().starts_with("`basalt snapshot verify b`"));
    }

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
