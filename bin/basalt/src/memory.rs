//! How much of its memory a sandbox has, and for how long it may run: `basalt update`, and what other verbs show of it. The daemon knows it.

use std::time::Duration;

use anyhow::{Result, bail};
use base::ByteSize;
use node_api::{MemoryState, Reply, Request, Sandbox, Secrets as _, State};

use crate::cli::{TimeLimit, UpdateArgs};
use crate::daemon;
use crate::output::Output;
use crate::sandboxes::{as_asked, millis, unexpected};

/// `basalt update`.
pub(crate) fn update(args: &UpdateArgs, output: &Output) -> Result<u8> {
    if args.on_timeout.is_some() && args.timeout == Some(TimeLimit(None)) {
        bail!("without a limit nothing is done at its end: leave --on-timeout out, or give a --timeout");
    }
    let mut daemon = daemon::connect()?;
    if let Some(TimeLimit(time)) = args.timeout {
        let request = Request::SetTimeLimit {
            sandbox: args.sandbox.clone(),
            ms: time.map(millis),
            then: args.on_timeout,
        };
        match daemon.ask(request)? {
            (Reply::Sandbox(sandbox), _) if args.memory.is_none() => {
                let sandbox = as_asked(*sandbox).redacted();
                output.result(&sandbox, || told_of_time(&sandbox, time))?;
                return Ok(0);
            }
            (Reply::Sandbox(_), _) => (),
            (other, _) => return Err(unexpected(&other)),
        }
    }
    let Some(memory) = args.memory else { return Ok(0) };
    let request = Request::UpdateMemory {
        sandbox: args.sandbox.clone(),
        memory,
    };
    match daemon.ask(request)? {
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

/// For how long a sandbox may run.
fn told_of_time(sandbox: &Sandbox, time: Option<Duration>) -> String {
    let name = &sandbox.name;
    match (time, sandbox.ends_ns) {
        (None, _) => format!("{name} may run as long as it likes\n"),
        (Some(time), Some(_)) => format!("{name} may run for {time:?} from now on\n"),
        (Some(time), None) => format!("{name} may run for {time:?} from its next start on\n"),
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

/// What is to be known of a sandbox's memory and devices at a glance: what is not there yet, and what went wrong.
pub(crate) fn notes(memory: &MemoryState) -> Option<String> {
    let faults = memory.dma.faults.filter(|faults| *faults > 0);
    let faults = faults.map(|faults| format!("DMA faults: {faults}"));
    let notes: Vec<String> = lacks(memory).into_iter().chain(faults).collect();
    (!notes.is_empty()).then(|| notes.join(", "))
}

fn lacks(memory: &MemoryState) -> Option<String> {
    if memory.failed.is_some() {
        return Some("lacks devices".to_owned());
    }
    if !memory.coming.is_empty() {
        let (mapped, total) = (ByteSize(memory.dma.mapped), ByteSize(memory.dma.total));
        let rate = memory.dma.rate().map(|rate| format!(" at {}", a_second(rate)));
        let rate = rate.unwrap_or_default();
        return Some(format!("devices come, {mapped} of {total} mapped{rate}"));
    }
    let (present, target) = (ByteSize(memory.present), ByteSize(memory.target));
    (present != target).then(|| format!("memory {present} of {target}"))
}

fn a_second(rate: u64) -> String {
    format!("{}/s", ByteSize(rate))
}

/// How it was mapped for devices, for an event; nothing where it has none.
pub(crate) fn how_mapped(memory: &MemoryState) -> Option<String> {
    let rate = a_second(memory.dma.rate()?);
    let (mapped, total) = (ByteSize(memory.dma.mapped), ByteSize(memory.dma.total));
    let (hits, misses) = (memory.dma.plug_hits, memory.dma.plug_misses);
    Some(format!(
        "{mapped} of {total} mapped for devices at {rate}; of what was plugged, {hits} pieces were mapped before, {misses} were not"
    ))
}

/// What `stats` shows of devices, where there is a sandbox with some.
pub(crate) const DEVICE_COLUMNS: [&str; 4] = ["MAPPED", "MAP RATE", "HITS/MISSES", "DMA FAULTS"];

/// The same of one sandbox.
pub(crate) fn device_columns(memory: Option<&MemoryState>) -> [String; 4] {
    let Some(memory) = memory.filter(|memory| has_devices(memory)) else {
        return std::array::from_fn(|_| "-".to_owned());
    };
    [
        of_how_much(Some(memory), |memory| (memory.dma.mapped, memory.dma.total)),
        memory.dma.rate().map_or_else(|| "-".to_owned(), a_second),
        format!("{}/{}", memory.dma.plug_hits, memory.dma.plug_misses),
        memory
            .dma
            .faults
            .map_or_else(|| "?".to_owned(), |faults| faults.to_string()),
    ]
}

/// Whether it has some, or memory is mapped for what it gets.
pub(crate) fn has_devices(memory: &MemoryState) -> bool {
    memory.dma.total > 0 || memory.dma.faults.is_some()
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
    use node_api::DmaState;

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
        (coming.dma.mapped, coming.dma.total) = (128 << 20, 512 << 20);
        assert_eq!(
            lacks(&coming).as_deref(),
            Some("devices come, 128 MiB of 512 MiB mapped")
        );
        coming.coming.clear();
        coming.failed = Some("no memory".into());
        assert_eq!(lacks(&coming).as_deref(), Some("lacks devices"));
        assert_eq!(
            of_how_much(Some(&coming), |memory| (memory.dma.mapped, memory.dma.total)),
            "128 MiB/512 MiB"
        );
        assert_eq!(
            of_how_much(Some(&of(1, 1)), |memory| (memory.dma.mapped, memory.dma.total)),
            "-"
        );
        assert_eq!(of_how_much(None, |memory| (memory.present, memory.target)), "-");
    }

    #[test]
    fn how_fast_memory_is_mapped_and_refused_dma_are_told_of_who_has_devices() {
        let without = of(512, 512);
        assert_eq!(device_columns(Some(&without)), ["-"; 4]);
        assert_eq!(device_columns(None), ["-"; 4]);
        assert!(!has_devices(&without) && how_mapped(&without).is_none());
        let mut with = MemoryState {
            dma: DmaState {
                mapped: 256 << 20,
                total: 512 << 20,
                map_bytes: 256 << 20,
                map_usec: 500_000,
                plug_hits: 3,
                plug_misses: 1,
                ..DmaState::default()
            },
            ..without
        };
        assert_eq!(
            device_columns(Some(&with)),
            ["256 MiB/512 MiB", "512 MiB/s", "3/1", "?"]
        );
        assert_eq!(notes(&with), None);
        with.coming = vec!["0000:01:00.0".parse().unwrap()];
        with.dma.faults = Some(7);
        assert_eq!(
            notes(&with).as_deref(),
            Some("devices come, 256 MiB of 512 MiB mapped at 512 MiB/s, DMA faults: 7")
        );
        let event = how_mapped(&with).unwrap();
        assert!(
            event.contains("at 512 MiB/s") && event.contains("3 pieces were mapped before, 1 were not"),
            "{event}"
        );
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
