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

#[path = "../support/harness.rs"]
mod harness;

use std::process::ExitCode;

use harness::say;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some(at) = arguments.iter().position(|argument| argument == "--control-fd") {
        stand_in::serve(arguments[at + 1].parse().expect("a descriptor's number"));
        return ExitCode::SUCCESS;
    }
    if arguments.iter().any(|argument| argument == "--state") {
        return daemon::serve(&arguments);
    }
    harness::run(cases::all(), &arguments)
}
