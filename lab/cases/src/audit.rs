//! Compares the VMM's system call filters with the calls that its threads really make: runs cases with strace beside each
//! VMM, and reports what is allowed, was never used, and has no reason to be there nevertheless (`unused` in the filter).
//!
//! Reads the filters' own files; does not know what any call is good for.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::vmm::TRACES;

/// The filters, by the names that threads have in a trace, without their numbers.
const FILTERS: [(&str, &[&str], &str); 17] = [
    (
        "main",
        &["basalt-vmm", "loader"],
        include_str!("../../../bin/vmm/seccomp/main.toml"),
    ),
    (
        "loader",
        &["loader"],
        include_str!("../../../bin/vmm/seccomp/loader.toml"),
    ),
    (
        "restorer",
        &["restorer"],
        include_str!("../../../bin/vmm/seccomp/restorer.toml"),
    ),
    ("pager", &["pager"], include_str!("../../../bin/vmm/seccomp/pager.toml")),
    (
        "pinner",
        &["pinner"],
        include_str!("../../../bin/vmm/seccomp/pinner.toml"),
    ),
    (
        "dma-map",
        &["dma-map", "dma-unmap"],
        include_str!("../../../bin/vmm/seccomp/dma-map.toml"),
    ),
    (
        "dma-zero",
        &["dma-zero"],
        include_str!("../../../bin/vmm/seccomp/dma-zero.toml"),
    ),
    ("vcpu", &["vcpu"], include_str!("../../../bin/vmm/seccomp/vcpu.toml")),
    (
        "block",
        &["block-q", "block-io"],
        include_str!("../../../bin/vmm/seccomp/block.toml"),
    ),
    (
        "block-io",
        &["block-io"],
        include_str!("../../../bin/vmm/seccomp/block-io.toml"),
    ),
    ("net", &["net-q"], include_str!("../../../bin/vmm/seccomp/net.toml")),
    (
        "console",
        &["console"],
        include_str!("../../../bin/vmm/seccomp/console.toml"),
    ),
    ("pmem", &["pmem"], include_str!("../../../bin/vmm/seccomp/pmem.toml")),
    ("rng", &["rng"], include_str!("../../../bin/vmm/seccomp/rng.toml")),
    ("vsock", &["vsock"], include_str!("../../../bin/vmm/seccomp/vsock.toml")),
    ("fs", &["fs-q"], include_str!("../../../bin/vmm/seccomp/fs.toml")),
    (
        "fs-dormant",
        &["fs-dormant"],
        include_str!("../../../bin/vmm/seccomp/fs-dormant.toml"),
    ),
];

const COMMON: &str = include_str!("../../../bin/vmm/seccomp/common.toml");

/// The cases whose VMs, together, use everything that a VMM can do.
const CASES: [&str; 9] = [
    "devices",
    "processors",
    "block",
    "vsock",
    "network",
    "pause",
    "vmm-api",
    "foreign-kernel",
    "pmem",
];

/// Values that strace writes as their names; others are seen by their call alone.
const DECODED: [&str; 7] = ["KVM_", "TUN", "FIO", "BLK", "F_", "MADV_", "PR_"];

#[derive(Deserialize)]
struct Filter {
    #[serde(rename = "rule")]
    rules: Vec<Rule>,
}

#[derive(Deserialize)]
struct Rule {
    calls: Vec<String>,
    #[serde(default)]
    when: Vec<When>,
    #[serde(default)]
    unused: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct When {
    #[serde(default)]
    is: Vec<String>,
}

/// What threads of one name did: calls, and words among their arguments.
type Used = BTreeMap<String, BTreeSet<String>>;

/// What is not used in one run may be in another: threads are not scheduled alike twice.
const ROUNDS: usize = 2;

/// Runs the cases under strace, then compares; true when nothing is allowed for nothing. What was never used is looked for
/// once more.
pub(crate) fn run(directory: &Path, compare_only: bool) -> Result<bool> {
    if compare_only {
        return report(directory);
    }
    // What an earlier build has used is of no interest.
    if directory.exists() {
        std::fs::remove_dir_all(directory)?;
    }
    std::fs::create_dir_all(directory)?;
    for round in 1..=ROUNDS {
        for case in CASES {
            traced(case, directory)?;
        }
        if report(directory)? {
            return Ok(true);
        }
        log::info!("round {round} of {ROUNDS} has not used every rule");
    }
    Ok(false)
}

/// Runs a case under strace; once more where it fails, as all is slow then.
fn traced(case: &str, directory: &Path) -> Result<()> {
    let logs = directory.join("logs").join(case);
    std::fs::create_dir_all(&logs)?;
    for _ in 0..2 {
        let status = Command::new(std::env::current_exe()?)
            .args(["host", case])
            .env(TRACES, directory)
            .env(crate::LOGS, &logs)
            .stdin(Stdio::null())
            .status()?;
        if status.success() {
            return Ok(());
        }
        writeln!(std::io::stdout(), "retry  {case} ({status})")?;
    }
    bail!("the case {case} failed under strace")
}

/// Compares the traces in a directory with the filters, and says what it found; true when every rule is used or says why not.
fn report(directory: &Path) -> Result<bool> {
    let mut used = Used::new();
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        let is_trace = path
            .file_name()
            .is_some_and(|name| name.as_encoded_bytes().iter().all(u8::is_ascii_digit));
        if is_trace {
            collect(BufReader::new(File::open(&path)?), &mut used)?;
        }
    }
    ensure!(used.contains_key("vcpu"), "strace has seen no vCPU");
    let lines = compare(&used)?;
    let failed = lines.iter().filter(|line| line.starts_with("never used")).count();
    let mut out = std::io::stdout().lock();
    for line in &lines {
        writeln!(out, "{line}")?;
    }
    let rules = lines.len();
    writeln!(
        out,
        "filters: {rules} calls and requests were not seen or not expected, {failed} of them without a reason"
    )?;
    Ok(failed == 0)
}

/// Lines such as `123<vcpu0> ioctl(17, KVM_RUN, 0) = 0`.
fn collect(lines: impl BufRead, used: &mut Used) -> Result<()> {
    for line in lines.lines() {
        let line = line?;
        let Some((thread, rest)) = line.split_once('<').and_then(|(_, rest)| rest.split_once('>')) else {
            continue;
        };
        let Some((call, arguments)) = rest.trim_start().split_once('(') else {
            continue;
        };
        let name = thread.trim_end_matches(|c: char| c.is_ascii_digit());
        let words = used.entry(name.to_owned()).or_default();
        words.insert(call.to_owned());
        let separate = |c: char| !(c.is_ascii_alphanumeric() || c == '_');
        let decoded = |word: &&str| DECODED.iter().any(|start| word.starts_with(start));
        words.extend(arguments.split(separate).filter(decoded).map(str::to_owned));
    }
    Ok(())
}

fn compare(used: &Used) -> Result<Vec<String>> {
    let mut lines = Vec::new();
    let everybody: BTreeSet<&String> = used.values().flatten().collect();
    let common: Filter = toml::from_str(COMMON)?;
    judge(
        "common",
        &common,
        &|word| everybody.iter().any(|seen| *seen == word),
        &mut lines,
    );
    for (name, threads, text) in FILTERS {
        let filter: Filter = toml::from_str(text).with_context(|| format!("{name}.toml"))?;
        let seen = |word: &str| {
            threads
                .iter()
                .any(|thread| used.get(*thread).is_some_and(|words| words.contains(word)))
        };
        judge(name, &filter, &seen, &mut lines);
    }
    Ok(lines)
}

fn judge(name: &str, filter: &Filter, seen: &dyn Fn(&str) -> bool, lines: &mut Vec<String>) {
    for rule in &filter.rules {
        let values = rule.when.iter().flat_map(|when| &when.is);
        let values = values.filter(|value| DECODED.iter().any(|start| value.starts_with(start)));
        for word in rule.calls.iter().chain(values) {
            match (seen(word), rule.unused.get(word)) {
                (true, Some(why)) => lines.push(format!("used after all: {name}: {word} ({why})")),
                (false, None) => lines.push(format!("never used: {name}: {word}")),
                (true, None) => (),
                (false, Some(why)) => lines.push(format!("unused: {name}: {word}: {why}")),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "12<vcpu0> ioctl(17, KVM_RUN, 0) = 0\n12<vcpu0> read(5, \"\", 8) = 8\n13<basalt-vmm> exit_group(0) = ?\n\
                         12<vcpu0> <... ioctl resumed>) = 0\n";

    #[test]
    fn calls_and_requests_are_found_by_thread() {
        let mut used = Used::new();
        collect(TRACE.as_bytes(), &mut used).unwrap();
        let vcpu: Vec<_> = used["vcpu"].iter().map(String::as_str).collect();
        assert_eq!(vcpu, ["KVM_RUN", "ioctl", "read"]);
        assert!(used["basalt-vmm"].contains("exit_group"));
    }

    #[test]
    fn what_is_never_used_is_told_unless_it_says_why() {
        let text = "[[rule]]\ncalls = ['ioctl']\nwhen = [{ arg = 1, is = ['KVM_RUN', 'KVM_SET_REGS'] }]\nwhy = 'x'\n\
                    [[rule]]\ncalls = ['open', 'read']\nwhy = 'x'\nunused = { open = 'later' }\n";
        let filter: Filter = toml::from_str(text).unwrap();
        let mut lines = Vec::new();
        judge(
            "vcpu",
            &filter,
            &|word| ["ioctl", "KVM_RUN", "read"].contains(&word),
            &mut lines,
        );
        assert_eq!(lines, ["never used: vcpu: KVM_SET_REGS", "unused: vcpu: open: later"]);
    }
}
