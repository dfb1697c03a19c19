//! What errors say that depends on what they carry.

use std::time::Duration;

use vmm_api::ExitReason;

/// What it says, and what its causes say that it does not.
pub(crate) fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |said, cause| match cause.to_string() {
        more if said.contains(&more) => said,
        more => format!("{said}: {more}"),
    })
}

pub(crate) fn cpus_of(template: &node_api::Template) -> String {
    match template.resources.cpus {
        1 => "1 CPU".to_owned(),
        cpus => format!("{cpus} CPUs"),
    }
}

pub(crate) fn fewer_volumes(most: usize) -> String {
    match most {
        0 => {
            "no volumes: leave --volume out, or run another, as those of `basalt template build` have devices for them"
                .to_owned()
        }
        most => format!("{most} volumes: leave some out, or share a directory above several of them"),
    }
}

pub(crate) fn disk_of(template: &node_api::Template) -> String {
    let disk = template.resources.disk;
    disk.map_or_else(|| "no disk".to_owned(), |disk| format!("a disk of {disk}"))
}

pub(crate) fn stopped(reason: &ExitReason, panic: Option<&str>) -> String {
    match panic {
        Some(line) => format!("the guest's kernel panicked ({line})"),
        None => reason.to_string(),
    }
}

/// What to do about a guest that ended: more memory where that was missing, a look at the host where the VMM failed,
/// else a look at what the guest said.
pub(crate) fn after_end(reason: &ExitReason, panic: Option<&str>) -> &'static str {
    match (reason, panic) {
        // "Out of memory ...", "System is deadlocked on memory".
        (_, Some(line)) if line.contains("memory") => "give it more memory with --memory",
        (ExitReason::Halted, None) => "`basalt start` starts it again",
        (ExitReason::Failed(_), None) => "`basalt doctor` checks this host",
        _ => "start basaltd with --log-level debug to keep the next one's whole console",
    }
}

pub(crate) fn within(limit: &Option<Duration>) -> String {
    limit.map_or_else(|| "in time".to_owned(), |limit| format!("within {limit:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Error, Tail};

    #[test]
    fn how_many_volumes_there_can_be_is_said_in_words_that_fit() {
        let told = |most| Error::TemplateVolumes("web".into(), most).to_string();
        assert!(
            told(0).contains("can have no volumes: leave --volume out"),
            "{}",
            told(0)
        );
        assert!(told(2).contains("can have 2 volumes: leave some out"), "{}", told(2));
    }

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
            (step(ExitReason::Halted, None), "basalt start"),
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
