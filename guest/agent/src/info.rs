//! What the agent says about itself and its machine.

use std::fs;

use agent_api::AgentInfo;
use observe::marks;
use rustix::time::{ClockId, clock_gettime};

use crate::Error;

/// `CLOCK_BOOTTIME` in nanoseconds.
pub fn boottime_ns() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds
        .saturating_mul(1_000_000_000)
        .saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0))
}

/// The three figures of `/proc/meminfo` that are told, in KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Memory {
    pub(crate) total_kib: u64,
    pub(crate) free_kib: u64,
    pub(crate) available_kib: u64,
}

impl Memory {
    pub(crate) fn read() -> Result<Self, Error> {
        let text = fs::read_to_string("/proc/meminfo").map_err(Error::system("reading /proc/meminfo"))?;
        Ok(Self::parse(&text))
    }

    fn parse(text: &str) -> Self {
        let value = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.and_then(|rest| rest.split_whitespace().next()?.parse().ok())
                .unwrap_or(0)
        };
        Self {
            total_kib: value("MemTotal"),
            free_kib: value("MemFree"),
            available_kib: value("MemAvailable"),
        }
    }
}

/// The answer to `Hello`.
pub(crate) fn gather(started_ns: u64) -> Result<AgentInfo, Error> {
    let memory = Memory::read()?;
    Ok(AgentInfo {
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        kernel_release: rustix::system::uname().release().to_string_lossy().into_owned(),
        started_ns,
        now_ns: boottime_ns(),
        mem_total_kib: memory.total_kib,
        mem_free_kib: memory.free_kib,
        mem_available_kib: memory.available_kib,
        marks: marks::all()
            .into_iter()
            .map(|mark| (mark.name.to_owned(), mark.at_ns))
            .collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read_by_name() {
        let text = "MemTotal:         110000 kB\nMemFree:           90000 kB\nMemAvailable:      95000 kB\nX: 1\n";
        let expected = Memory {
            total_kib: 110_000,
            free_kib: 90_000,
            available_kib: 95_000,
        };
        assert_eq!(Memory::parse(text), expected);
        assert_eq!(Memory::parse("MemFreeX: 1 kB\nMemFree: much\n"), Memory::default());
    }
}
