//! `basalt run` from end to end with everything real but the virtual machine: this very program stands in for
//! `basalt-vmm`, and serves the real agent's protocol server in a process of its own instead of a guest.
//!
//! It has no test harness, because the same file must also be the stand-in: started with `--control-fd`, it is the VMM, and
//! with `--state` the daemon.
//! What is proved here once about streams, terminals, signals and ends holds wherever the agent runs.

#![allow(
    unsafe_code,
    reason = "the stand-in takes over an inherited descriptor, and a terminal must become its child's controlling one"
)]

mod admission;
mod builds;
mod cases;
mod checksums;
mod copies;
mod corruption;
mod daemon;
mod daemons;
mod devices;
mod drive;
mod full;
mod images;
mod limited;
mod observed;
mod outdated;
mod power;
mod private;
mod snapshots;
mod stand_in;
mod templates;
mod tenants;
mod transfer;
mod transfer_registry;
mod transfer_templates;
mod world;

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some(at) = arguments.iter().position(|argument| argument == "--control-fd") {
        stand_in::serve(arguments[at + 1].parse().expect("a descriptor's number"));
        return ExitCode::SUCCESS;
    }
    if arguments.iter().any(|argument| argument == "--state") {
        return daemon::serve(&arguments);
    }
    let exact = arguments.iter().any(|argument| argument == "--exact");
    let filters: Vec<&String> = arguments.iter().filter(|argument| !argument.starts_with('-')).collect();
    let is_asked_for = |name: &str| match exact {
        true => filters.iter().any(|filter| name == *filter),
        false => filters.iter().any(|filter| name.contains(filter.as_str())),
    };
    let (mut passed, mut failed, mut filtered) = (0, Vec::new(), 0);
    for (name, case) in cases::all() {
        if !filters.is_empty() && !is_asked_for(name) {
            filtered += 1;
            continue;
        }
        match catch_unwind(AssertUnwindSafe(case)) {
            Ok(()) => passed += 1,
            Err(_) => failed.push(name),
        }
        say(&format!(
            "test {name} ... {}",
            if failed.last() == Some(&name) { "FAILED" } else { "ok" }
        ));
    }
    let word = if failed.is_empty() { "ok" } else { "FAILED" };
    // As the standard harness says it, so that whoever adds up tests need not know this one.
    say(&format!(
        "\ntest result: {word}. {passed} passed; {} failed; 0 ignored; 0 measured; {filtered} filtered out",
        failed.len()
    ));
    if failed.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

pub(crate) fn say(line: &str) {
    writeln!(std::io::stdout(), "{line}").expect("standard output");
}
