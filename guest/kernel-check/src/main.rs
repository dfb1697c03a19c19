//! `basalt-kernel-check`: asks the running kernel whether what sandboxes need is really there, by using it.
//!
//! As PID 1 (alone in an initramfs) it mounts what it needs, reports memory and boot time, checks and powers off. As any
//! other root process it only checks. Each check runs in a process of its own, so that one cannot disturb the next.
//! It knows neither the VMM nor the agent; the options behind the checks are in `kernel/config/`.
#![allow(
    clippy::print_stdout,
    reason = "the report on standard output is the program's purpose"
)]

mod files;
mod links;
mod netlink;
mod packets;
mod process;
mod syscall;

use std::fs;
use std::io;
use std::process::{Command, ExitCode};
use std::time::Duration;

/// A check's name and what it does; an error says what is missing.
type Check = (&'static str, fn() -> io::Result<()>);

fn checks() -> impl Iterator<Item = &'static Check> {
    files::CHECKS
        .iter()
        .chain(process::CHECKS)
        .chain(links::CHECKS)
        .chain(packets::CHECKS)
}

fn main() -> ExitCode {
    if std::process::id() == 1 {
        return as_init();
    }
    match std::env::args().nth(1) {
        Some(name) => one(&name),
        None => all(),
    }
}

/// Runs alone: there is nobody to return to, so a failure is in the report and the machine goes off in any case.
fn as_init() -> ExitCode {
    let cycles = syscall::cycles();
    let started = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    if let Err(error) = files::prepare_root() {
        println!("kernel-check: cannot prepare the root file system: {error}");
    } else {
        let since_boot = Duration::new(
            u64::try_from(started.tv_sec).unwrap_or(0),
            u32::try_from(started.tv_nsec).unwrap_or(0),
        );
        println!(
            "kernel-check: init after {} ms, {cycles} cycles since the machine started",
            since_boot.as_millis()
        );
        report_memory();
        // "quick" on the kernel's command line: only the figures above.
        if !fs::read_to_string("/proc/cmdline").is_ok_and(|line| line.split_whitespace().any(|word| word == "quick")) {
            all();
        }
    }
    if let Err(error) = rustix::system::reboot(rustix::system::RebootCommand::PowerOff) {
        println!("kernel-check: cannot power off: {error}");
    }
    ExitCode::FAILURE
}

fn report_memory() {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_else(|error| format!("MemTotal: unknown, {error}"));
    for line in text.lines().filter(|line| {
        ["MemTotal", "MemFree", "MemAvailable"]
            .iter()
            .any(|key| line.starts_with(key))
    }) {
        println!("kernel-check: {line}");
    }
}

fn one(name: &str) -> ExitCode {
    let Some((_, check)) = checks().find(|(known, _)| *known == name) else {
        println!("there is no check named {name}");
        return ExitCode::FAILURE;
    };
    match check() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn all() -> ExitCode {
    let (mut passed, mut failed) = (0, 0);
    for (name, _) in checks() {
        let output = Command::new("/proc/self/exe").arg(name).output();
        match output {
            Ok(output) if output.status.success() => passed += 1,
            Ok(output) => {
                failed += 1;
                println!(
                    "kernel-check: {name}: {}",
                    String::from_utf8_lossy(&output.stdout).trim_end()
                );
            }
            Err(error) => {
                failed += 1;
                println!("kernel-check: {name}: cannot start the check: {error}");
            }
        }
    }
    println!("kernel-check: {passed} passed, {failed} failed");
    if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
