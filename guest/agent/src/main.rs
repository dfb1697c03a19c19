//! The guest's PID 1 as a program: notes the time and hands over to the library.

use std::io::Write;
use std::process::ExitCode;

fn main() -> ExitCode {
    let started_ns = agent::boottime_ns();
    if std::process::id() == 1 {
        agent::guest::run(started_ns);
    }
    let version = env!("CARGO_PKG_VERSION");
    let (text, code) = match std::env::args().nth(1).as_deref() {
        Some("--version") => (format!("basalt-agent {version}\n"), ExitCode::SUCCESS),
        _ => (
            "basalt-agent: this is PID 1 of a Basalt guest and does nothing elsewhere\n".to_owned(),
            ExitCode::FAILURE,
        ),
    };
    match std::io::stdout().write_all(text.as_bytes()) {
        Ok(()) => code,
        Err(_) => ExitCode::FAILURE,
    }
}
