//! `basalt --host` from end to end: the program, and the real gateway with its façade over a node that has no machines, where commands are
//! run by the real agent.
//!
//! It has no test harness, because the same file must also be the gateway: the agent waits for all children of its process, and so has to
//! have one of its own. Started with `--serve`, it is that.

#![allow(unsafe_code, reason = "a terminal must become its child's controlling one")]

mod cases;
mod failures;
mod files;
mod serving;
mod world;

#[path = "../support/program.rs"]
mod program;

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some(at) = arguments.iter().position(|argument| argument == "--serve") {
        serving::serve(arguments[at + 1].as_ref());
        return ExitCode::SUCCESS;
    }
    let exact = arguments.iter().any(|argument| argument == "--exact");
    let filters: Vec<&String> = arguments.iter().filter(|argument| !argument.starts_with('-')).collect();
    let is_asked_for = |name: &str| match exact {
        true => filters.iter().any(|filter| name == *filter),
        false => filters.iter().any(|filter| name.contains(filter.as_str())),
    };
    let (mut passed, mut failed, mut filtered) = (0, Vec::new(), 0);
    for (name, case) in [cases::CASES, files::CASES, failures::CASES].concat() {
        if !filters.is_empty() && !is_asked_for(name) {
            filtered += 1;
            continue;
        }
        match catch_unwind(AssertUnwindSafe(case)) {
            Ok(()) => passed += 1,
            Err(_) => failed.push(name),
        }
        let word = if failed.last() == Some(&name) { "FAILED" } else { "ok" };
        say(&format!("test {name} ... {word}"));
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
