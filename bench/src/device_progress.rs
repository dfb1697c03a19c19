//! How far a start with a function of the host's is, as its VMM tells, and the moments at which what was there. Asks nobody.

use anyhow::{Result, bail, ensure};
use vmm_api::{FunctionState, Functions};

use crate::device_start::Way;
use crate::trace::milliseconds;

/// One start, in milliseconds from the exec of the VMM. What is there before the guest's init runs is of use to it from then on.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Start {
    /// `create` has been answered; QEMU's monitor answers.
    pub(crate) created: f64,
    /// The agent's first line.
    pub(crate) init: f64,
    /// The function is on the guest's bus, where the VMM tells.
    pub(crate) device: Option<f64>,
    /// All memory is the guest's, and the function reaches it.
    pub(crate) memory: f64,
    pub(crate) counts: Option<Counts>,
    /// What memory took that was zeroed before, which is no part of any other.
    pub(crate) zeroing: Option<f64>,
}

impl Start {
    /// By moments of CLOCK_MONOTONIC: the VMM's exec, its VM made, the agent's first line, the function and the memory.
    pub(crate) fn of(started_ns: u64, created_ns: u64, init_ns: u64, (device_ns, memory_ns): (u64, u64)) -> Self {
        let since = |moment: u64| milliseconds(moment.saturating_sub(started_ns));
        Self {
            created: since(created_ns),
            init: since(init_ns),
            device: Some(since(device_ns.max(init_ns))),
            memory: since(memory_ns.max(init_ns)),
            counts: None,
            zeroing: None,
        }
    }
}

/// What a VMM has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) map_calls: u64,
    pub(crate) hits: u64,
    pub(crate) misses: u64,
}

/// What is there, as a VMM says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) device: bool,
    pub(crate) memory: bool,
}

/// When each was seen first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Moments {
    device: Option<u64>,
    memory: Option<u64>,
}

impl Moments {
    /// What a way has already when its VM is made: the function where the VMM does not tell, too.
    pub(crate) fn of_made(way: Way, created_ns: u64) -> Self {
        let (device, memory) = match way {
            Way::Plain | Way::Eager | Way::QemuEager => (true, true),
            Way::QemuMem => (true, false),
            _ => (false, false),
        };
        let mut moments = Self::default();
        moments.note(created_ns, Seen { device, memory });
        moments
    }

    pub(crate) fn note(&mut self, now_ns: u64, seen: Seen) {
        for (moment, is_there) in [(&mut self.device, seen.device), (&mut self.memory, seen.memory)] {
            if is_there {
                moment.get_or_insert(now_ns);
            }
        }
    }

    pub(crate) fn both(self) -> Option<(u64, u64)> {
        self.device.zip(self.memory)
    }
}

/// Nothing that a VMM was to map has failed.
pub(crate) fn sound(functions: Functions) -> Result<Functions> {
    if let Some(why) = &functions.error {
        bail!("the VMM cannot map the guest's memory: {why}");
    }
    for function in &functions.functions {
        if let FunctionState::Failed(why) = &function.state {
            bail!("the guest does not get {}: {why}", function.id);
        }
    }
    Ok(functions)
}

pub(crate) fn is_present(functions: &Functions) -> bool {
    let is_there = |function: &vmm_api::FunctionInfo| matches!(function.state, FunctionState::Present { .. });
    !functions.functions.is_empty() && functions.functions.iter().all(is_there)
}

/// Of a guest that gets its function, and so many bytes of its memory, while it runs.
pub(crate) fn seen(later: u64, functions: &Functions, plugged: u64) -> Seen {
    Seen {
        device: is_present(functions),
        memory: match later {
            0 => functions.total > 0 && functions.mapped == functions.total,
            _ => plugged == later,
        },
    }
}

/// What tables are to say of a way that is judged by it has to be there.
pub(crate) fn counts(way: Way, later: u64, functions: &Functions) -> Result<Counts> {
    let counts = Counts {
        map_calls: functions.map_calls,
        hits: functions.plug_hits,
        misses: functions.plug_misses,
    };
    ensure!(
        !matches!(way, Way::Async | Way::AsyncZeroed) || counts.map_calls > 0,
        "the VMM has mapped memory and counts no call for it: it is older than this program"
    );
    ensure!(
        later == 0 || counts.hits + counts.misses > 0,
        "the guest has plugged {later} MiB, and the VMM counts neither hits nor misses: it is older than this program"
    );
    Ok(counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    use vmm_api::FunctionInfo;

    #[test]
    fn the_first_moment_of_each_counts_and_none_before_init() {
        let mut moments = Moments::default();
        for (now_ns, device, memory) in [
            (10, false, false),
            (20, true, false),
            (30, true, true),
            (40, true, true),
        ] {
            assert_eq!(moments.both().is_some(), now_ns > 30);
            moments.note(now_ns, Seen { device, memory });
        }
        assert_eq!(moments.both(), Some((20, 30)));
        assert_eq!(Moments::of_made(Way::Eager, 5).both(), Some((5, 5)));
        for way in [Way::Late, Way::Async, Way::QemuMem] {
            assert_eq!(Moments::of_made(way, 5).both(), None, "{way:?}");
        }
        let ms = |ms: u64| 1_000_000_000 + ms * 1_000_000;
        let start = Start::of(ms(0), ms(2), ms(25), (ms(20), ms(30)));
        assert_eq!((start.created, start.init), (2.0, 25.0));
        assert_eq!((start.device, start.memory), (Some(25.0), 30.0));
    }

    fn functions(state: FunctionState, mapped: u64) -> Functions {
        Functions {
            mapped,
            total: 512,
            functions: vec![FunctionInfo {
                id: "function".into(),
                state,
            }],
            ..Functions::default()
        }
    }

    #[test]
    fn when_all_memory_is_there_is_told_by_what_is_mapped_or_plugged() {
        let (mapping, present) = (FunctionState::Mapping, FunctionState::Present { slot: 3 });
        let half = functions(mapping, 256);
        let all = functions(present, 512);
        let told = |later, functions: &Functions, plugged| {
            let seen = seen(later, functions, plugged);
            (seen.device, seen.memory)
        };
        assert_eq!(told(0, &half, 0), (false, false));
        assert_eq!(told(0, &all, 0), (true, true));
        assert_eq!(told(0, &Functions::default(), 0), (false, false), "nothing of nothing");
        assert_eq!(told(3584, &all, 3582), (true, false));
        assert_eq!(told(3584, &all, 3584), (true, true));
    }

    #[test]
    fn what_a_vmm_cannot_do_or_count_is_told() {
        let failed = sound(functions(FunctionState::Failed("no memory is left".into()), 0));
        assert!(failed.unwrap_err().to_string().contains("function: no memory is left"));
        let mut short = functions(FunctionState::Mapping, 0);
        short.error = Some("locked memory".into());
        assert!(
            sound(short)
                .unwrap_err()
                .to_string()
                .contains("map the guest's memory: locked memory")
        );
        let mut counted = sound(functions(FunctionState::Mapping, 0)).unwrap();
        assert!(
            counts(Way::Async, 0, &counted)
                .unwrap_err()
                .to_string()
                .contains("older")
        );
        assert_eq!(counts(Way::Eager, 0, &counted).unwrap(), Counts::default());
        counted.map_calls = 4;
        assert_eq!(counts(Way::Async, 0, &counted).unwrap().map_calls, 4);
        assert!(
            counts(Way::Async, 512, &counted)
                .unwrap_err()
                .to_string()
                .contains("neither hits nor misses")
        );
        counted.plug_misses = 1;
        assert_eq!(counts(Way::Async, 512, &counted).unwrap().misses, 1);
    }
}
