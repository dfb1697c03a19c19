//! What can go wrong with a sandbox: each error says what happened and, where a person can do something, what.

use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

use agent_api::ExecFailure;
use base::ByteSize;
use vmm_api::{ClientError, ConfigError, ExitReason};

use crate::ring::Tail;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The numbers that were asked for make no VM.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// More memory than there is.
    #[error("{asked} of memory were asked for, but this host has {total} ({available} available): ask for less")]
    MoreMemoryThanHost {
        /// Asked for.
        asked: ByteSize,
        /// `MemTotal`.
        total: ByteSize,
        /// `MemAvailable`.
        available: ByteSize,
    },
    /// Something that a VM needs cannot be opened.
    #[error("{what} {} cannot be opened: {cause}; {next}", .path.display())]
    Open {
        /// What it is.
        what: &'static str,
        /// Where it was looked for.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
        /// What to do.
        next: &'static str,
    },
    /// The VMM cannot be started.
    #[error("the VMM {} cannot be started: {cause}; `basalt doctor` checks the installation", .path.display())]
    Spawn {
        /// The program.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// A pipe, a socket, a thread: the host is out of something.
    #[error("{what} failed: {cause}; see whether the limits of processes and open files are reached (`ulimit -a`)")]
    Host {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        cause: io::Error,
    },
    /// The VMM refused to make or start the VM.
    #[error("the VM cannot be made: {cause}{log}")]
    Refused {
        /// What the VMM said.
        cause: ClientError,
        /// What it wrote.
        log: Tail,
    },
    /// The VMM process ended by itself or was killed.
    #[error("the VMM died while {during} ({}); what ran in the sandbox is lost, run it again{log}", ended(*.status))]
    VmmDied {
        /// What was going on.
        during: &'static str,
        /// How the process ended, where that is known.
        status: Option<ExitStatus>,
        /// What it wrote.
        log: Tail,
    },
    /// The guest stopped before its command had ended.
    #[error(
        "{} while {during}; what ran in the sandbox is lost, {}{console}",
        stopped(.reason, .panic.as_deref()), after_end(.reason, .panic.as_deref())
    )]
    GuestEnded {
        /// What was going on.
        during: &'static str,
        /// Why, as the VMM says.
        reason: ExitReason,
        /// The kernel's own words, where it panicked.
        panic: Option<String>,
        /// The last lines of the console.
        console: Tail,
    },
    /// The guest booted too slowly or not at all.
    #[error(
        "the guest's agent did not answer within {limit:?}; run it again with --log-level debug to see its console{console}"
    )]
    AgentSilent {
        /// How long was waited.
        limit: Duration,
        /// The last lines of the console.
        console: Tail,
    },
    /// The agent could not do what it was asked.
    #[error("the guest's agent failed while {during}: {cause}{console}")]
    Agent {
        /// What was going on.
        during: &'static str,
        /// What the agent said.
        cause: agent_api::Error,
        /// The last lines of the console.
        console: Tail,
    },
    /// The command could not be started.
    #[error(transparent)]
    Exec(#[from] ExecFailure),
    /// A signal came before the command had started.
    #[error("interrupted by signal {0} before the command had started")]
    Interrupted(i32),
}

impl Error {
    /// The exit code of podman's convention: 127 and 126 for commands that cannot be run, 128+n for a signal, else 125.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Exec(failure) => failure.kind.exit_code(),
            Self::Interrupted(signal) => u8::try_from(*signal).unwrap_or(0).saturating_add(128),
            _ => 125,
        }
    }

    pub(crate) fn host<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |cause| Self::Host {
            what,
            cause: cause.into(),
        }
    }
}

fn ended(status: Option<ExitStatus>) -> String {
    status.map_or_else(
        || "it closed its control socket".to_owned(),
        |status| status.to_string(),
    )
}

fn stopped(reason: &ExitReason, panic: Option<&str>) -> String {
    match panic {
        Some(line) => format!("the guest's kernel panicked ({line})"),
        None => reason.to_string(),
    }
}

/// What to do about a guest that ended: more memory where that was missing, a look at the host where the VMM failed,
/// else a look at what the guest said.
fn after_end(reason: &ExitReason, panic: Option<&str>) -> &'static str {
    match (reason, panic) {
        // "Out of memory ...", "System is deadlocked on memory".
        (_, Some(line)) if line.contains("memory") => "give it more memory with --memory",
        (ExitReason::Failed(_), None) => "`basalt doctor` checks this host",
        _ => "run it again with --log-level debug to see its whole console",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guests_end_names_the_next_step() {
        let step = |reason: ExitReason, panic: Option<&str>| {
            Error::GuestEnded {
                during: "the command was running",
                reason,
                panic: panic.map(str::to_owned),
                console: Tail::default(),
            }
            .to_string()
        };
        for (text, next) in [
            (step(ExitReason::PowerOff, None), "--log-level debug"),
            (
                step(ExitReason::Reset, Some("Kernel panic - not syncing: no init")),
                "--log-level debug",
            ),
            (
                step(
                    ExitReason::Reset,
                    Some("Kernel panic - not syncing: Out of memory: compulsory panic_on_oom"),
                ),
                "--memory",
            ),
            (step(ExitReason::Failed("no memory slot".into()), None), "basalt doctor"),
        ] {
            assert!(text.contains("is lost, ") && text.contains(next), "{text}");
        }
    }
}
