//! How much of its memory a sandbox has: `basalt update`, and what other verbs show of it. The daemon knows it.

use anyhow::Result;
use base::ByteSize;
use node_api::{MemoryState, Reply, Request, Secrets as _, State};

use crate::cli::UpdateArgs;
use crate::daemon;
use crate::output::Output;
use crate::sandboxes::{as_asked, unexpected};

/// `basalt update`.
pub(crate) fn update(args: &UpdateArgs, output: &Output) -> Result<u8> {
    let request = Request::UpdateMemory {
        sandbox: args.sandbox.clone(),
        memory: args.memory,
    };
    match daemon::connect()?.ask(request)? {
        (Reply::Sandbox(sandbox), _) => {
            let sandbox = as_asked(*sandbox).redacted();
            output.result(&sandbox, || {
                let (asked, memory) = (sandbox.config.resources.memory, sandbox.memory_state.as_ref());
                told(&sandbox.name, sandbox.state, asked, memory)
            })?;
            Ok(0)
        }
        (other, _) => Err(unexpected(&other)),
    }
}

/// How far a sandbox has come to another size.
fn told(name: &str, state: State, asked: ByteSize, memory: Option<&MemoryState>) -> String {
    match memory {
        None if state.has_vm() => {
            format!("{name} is to have {asked}: `basalt stats {name}` shows how far it is\n")
        }
        None => format!("{name} has {asked} from its next start on\n"),
        Some(memory) if memory.present == memory.target => format!("{name} has {asked}\n"),
        Some(memory) => {
            let present = ByteSize(memory.present);
            let why = match (&memory.map_error, state) {
                _ if memory.memory_failed.is_some() => {
                    let error = memory.memory_failed.as_deref().unwrap_or_default();
                    format!("it cannot be brought to that now ({error}), which is tried again")
                }
                (Some(error), _) => {
                    format!("no more can be mapped for its devices now ({error}), which is tried again")
                }
                (None, State::Paused) => "the guest stands still, and follows when it goes on".to_owned(),
                (None, _) if memory.present > memory.target => {
                    "the guest gives back what it can spare, which may be less".to_owned()
                }
                (None, _) => "the guest has not taken the rest yet".to_owned(),
            };
            format!("{name}: memory {present} of {asked} asked for: {why}; `basalt stats {name}` shows how far it is\n")
        }
    }
}

/// What of a sandbox is not there yet.
pub(crate) fn lacks(memory: &MemoryState) -> Option<String> {
    if memory.failed.is_some() {
        return Some("lacks devices".to_owned());
    }
    if !memory.coming.is_empty() {
        let (mapped, total) = (ByteSize(memory.dma_mapped), ByteSize(memory.dma_total));
        return Some(format!("devices come, {mapped} of {total} mapped"));
    }
    let (present, target) = (ByteSize(memory.present), ByteSize(memory.target));
    (present != target).then(|| format!("memory {present} of {target}"))
}

/// So much of what is to be; nothing of a sandbox whose memory is what it booted with, and where nothing is to be.
pub(crate) fn of_how_much(memory: Option<&MemoryState>, which: impl Fn(&MemoryState) -> (u64, u64)) -> String {
    match memory.map(which) {
        None | Some((_, 0)) => "-".to_owned(),
        Some((now, then)) => format!("{}/{}", ByteSize(now), ByteSize(then)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(present: u64, target: u64) -> MemoryState {
        MemoryState {
            present: present << 20,
            target: target << 20,
            ..MemoryState::default()
        }
    }

    #[test]
    fn what_is_not_there_is_told_and_nothing_else() {
        assert_eq!(lacks(&of(512, 512)), None);
        assert_eq!(lacks(&of(256, 512)).as_deref(), Some("memory 256 MiB of 512 MiB"));
        let mut coming = of(512, 512);
        coming.coming = vec!["0000:01:00.0".parse().unwrap()];
        (coming.dma_mapped, coming.dma_total) = (128 << 20, 512 << 20);
        assert_eq!(
            lacks(&coming).as_deref(),
            Some("devices come, 128 MiB of 512 MiB mapped")
        );
        coming.coming.clear();
        coming.failed = Some("no memory".into());
        assert_eq!(lacks(&coming).as_deref(), Some("lacks devices"));
        assert_eq!(
            of_how_much(Some(&coming), |memory| (memory.dma_mapped, memory.dma_total)),
            "128 MiB/512 MiB"
        );
        assert_eq!(
            of_how_much(Some(&of(1, 1)), |memory| (memory.dma_mapped, memory.dma_total)),
            "-"
        );
        assert_eq!(of_how_much(None, |memory| (memory.present, memory.target)), "-");
    }

    #[test]
    fn how_far_a_guest_has_come_is_told_with_the_reason() {
        let asked = ByteSize::gib(1);
        let told = |state, memory: Option<MemoryState>| told("web", state, asked, memory.as_ref());
        assert_eq!(told(State::Running, Some(of(1024, 1024))), "web has 1 GiB\n");
        assert_eq!(told(State::Exited, None), "web has 1 GiB from its next start on\n");
        assert!(told(State::Running, None).contains("basalt stats web"));
        let more = told(State::Running, Some(of(768, 1024)));
        assert!(
            more.contains("memory 768 MiB of 1 GiB asked for: the guest has not taken"),
            "{more}"
        );
        let less = told(State::Running, Some(of(2048, 1024)));
        assert!(
            less.contains("memory 2 GiB of 1 GiB asked for: the guest gives back"),
            "{less}"
        );
        assert!(told(State::Paused, Some(of(768, 1024))).contains("when it goes on"));
        let mut short = of(768, 1024);
        short.map_error = Some("no memory is left".into());
        assert!(told(State::Running, Some(short)).contains("no memory is left"));
        let mut failed = of(768, 1024);
        failed.memory_failed = Some("its VMM does not answer".into());
        assert!(told(State::Running, Some(failed)).contains("its VMM does not answer"));
    }
}
