//! `basalt doctor`: shows what crate `host` found, what giving devices away and the class bare need, what the daemon has of memory that is
//! zeroed ahead, what it found in its state directory when it was started last, and which snapshots and templates are known to be damaged.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::Result;
use host::{Check, Report, Status, Verdict};
use node_api::ZeroedMemory;
use node_api::recovery::{DAMAGED_DATABASE, QUARANTINE, REPORT, Recovery};
use vfio::host::Sysfs;

use crate::logs::rfc3339;
use crate::output::{Colour, Output, coloured};
use crate::{EXIT_FAILED, bare, daemon, passthrough, places};

/// The check of the state directory.
const STATE: &str = "state";

/// So many findings are shown; the report has all.
const MOST_SHOWN: usize = 5;

/// Makes every check and shows it; fails where no sandbox can run.
pub(crate) fn doctor(output: &Output) -> Result<u8> {
    let places = places::for_doctor()?;
    let mut report = host::doctor(&places);
    report.checks.extend(passthrough::checks(&Sysfs::of_host()));
    report.checks.extend(bare::checks(Path::new("/")));
    report
        .checks
        .extend(daemon::zeroed_memory(&places.state).as_ref().map(zeroed));
    report.checks.extend(saved(&places.state));
    report.checks.push(state(&places.state));
    output.result(&report, || text(&report))?;
    Ok(if report.can_run() { 0 } else { EXIT_FAILED })
}

/// Memory that the daemon zeroes ahead.
fn zeroed(memory: &ZeroedMemory) -> Check {
    const NAME: &str = "zeroed-memory";
    let found = format!("{} of {} ready", memory.ready, memory.size);
    match &memory.failed {
        None => Check::ok(NAME, found),
        Some(why) => Check::warn(
            NAME,
            format!("{found}, and no more is made: {why}"),
            "it is tried again every minute; sandboxes with devices start as without it (basaltd --zeroed-memory)",
        ),
    }
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

/// What was wrong at the last start at which anything was, and what is set aside still.
fn state(state: &Path) -> Check {
    if fs::read_dir(state).is_err_and(|error| error.kind() == ErrorKind::PermissionDenied) {
        let found = format!("{} cannot be read", state.display());
        return Check::warn(
            STATE,
            found,
            "ask as root whether anything was put right or set aside there",
        );
    }
    let report = state.join(REPORT);
    let recovery = fs::read(&report).ok();
    let recovery = recovery.and_then(|text| serde_json::from_slice::<Recovery>(&text).ok());
    let count = |names: Vec<String>, beginning: &str| names.iter().filter(|name| name.starts_with(beginning)).count();
    let kept = count(names(&state.join(QUARANTINE)), "");
    // Each has a log beside it.
    let databases = names(state)
        .into_iter()
        .filter(|name| !name.ends_with("-wal") && !name.ends_with("-shm"));
    let databases = count(databases.collect(), DAMAGED_DATABASE);
    let mut found = Vec::new();
    if let Some(recovery) = &recovery {
        let shown = recovery.findings.iter().take(MOST_SHOWN).map(ToString::to_string);
        let mut told = shown.collect::<Vec<_>>().join("; ");
        if let more @ 1.. = recovery.findings.len().saturating_sub(MOST_SHOWN) {
            told.push_str(&format!("; and {more} more in {}", report.display()));
        }
        found.push(format!(
            "put right by the daemon at {}: {told}",
            rfc3339(recovery.time_ns)
        ));
    }
    if kept + databases > 0 {
        found.push(format!("set aside: {kept} directories, {databases} damaged databases"));
    }
    match found.is_empty() {
        true => Check::ok(STATE, "nothing was put right or set aside"),
        false => Check::warn(
            STATE,
            found.join(". "),
            "see `basalt ps --all`; `basalt prune --quarantine` lists what was set aside, and with --force deletes it and this notice",
        ),
    }
}

/// What is in a directory that may not be there.
fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
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
    fn memory_that_is_not_zeroed_ahead_is_told_with_the_cause() {
        let mut memory = ZeroedMemory {
            size: base::ByteSize::gib(4),
            ready: base::ByteSize::gib(1),
            handed_out: base::ByteSize(0),
            failed: None,
        };
        assert_eq!(zeroed(&memory), Check::ok("zeroed-memory", "1 GiB of 4 GiB ready"));
        memory.failed = Some("shmem_enabled is `deny`".into());
        let check = zeroed(&memory);
        assert_eq!(check.status, Status::Warn);
        assert!(
            check.found.ends_with("no more is made: shmem_enabled is `deny`"),
            "{check:?}"
        );
    }

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
    fn what_a_daemon_put_right_is_told_with_the_next_step() {
        use node_api::recovery::{Finding, Outcome, Subject};
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(state(directory.path()).status, Status::Ok);
        let finding = |number| Finding {
            subject: Subject::Sandbox,
            name: format!("web{number}"),
            outcome: Outcome::Adopted,
            why: "the database did not know it".into(),
        };
        let recovery = Recovery {
            time_ns: 1_700_000_000_000_000_000,
            findings: (0..7).map(finding).collect(),
        };
        fs::write(directory.path().join(REPORT), serde_json::to_vec(&recovery).unwrap()).unwrap();
        fs::create_dir_all(directory.path().join(QUARANTINE).join("1-sandbox-x")).unwrap();
        for name in ["node.db.damaged-1", "node.db.damaged-1-wal", "node.db"] {
            fs::write(directory.path().join(name), "").unwrap();
        }
        let check = state(directory.path());
        assert_eq!(check.status, Status::Warn);
        for part in [
            "at 2023-11-14T22:13:20",
            "sandbox web0 adopted: the database did not know it; sandbox web1",
            "and 2 more in",
            "1 directories, 1 damaged databases",
        ] {
            assert!(check.found.contains(part), "{part}: {}", check.found);
        }
        assert!(check.next.unwrap().contains("basalt prune --quarantine"));
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
