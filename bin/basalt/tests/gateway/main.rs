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

#[path = "../support/harness.rs"]
mod harness;
#[path = "../support/program.rs"]
mod program;

use std::process::ExitCode;

use harness::say;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some(at) = arguments.iter().position(|argument| argument == "--serve") {
        serving::serve(arguments[at + 1].as_ref());
        return ExitCode::SUCCESS;
    }
    harness::run([cases::CASES, files::CASES, failures::CASES].concat(), &arguments)
}
