//! What the agent says about itself and its machine.

use std::{fs, thread};

use agent_api::AgentInfo;
use observe::marks;
use rustix::fs::statvfs;
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

/// The figures of `/proc/meminfo` that are told, in KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Memory {
    pub(crate) total_kib: u64,
    pub(crate) free_kib: u64,
    pub(crate) available_kib: u64,
    pub(crate) cached_kib: u64,
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
            cached_kib: value("Cached"),
        }
    }
}

/// The answer to `Hello`.
pub(crate) fn gather(started_ns: u64) -> Result<AgentInfo, Error> {
    let memory = Memory::read()?;
    // A root that cannot be asked has no size.
    let (disk_total_bytes, disk_used_bytes) = statvfs("/").map_or((0, 0), |root| {
        let bytes = |blocks: u64| blocks.saturating_mul(root.f_frsize);
        (bytes(root.f_blocks), bytes(root.f_blocks.saturating_sub(root.f_bfree)))
    });
    Ok(AgentInfo {
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        kernel_release: rustix::system::uname().release().to_string_lossy().into_owned(),
        started_ns,
        now_ns: boottime_ns(),
        mem_total_kib: memory.total_kib,
        mem_free_kib: memory.free_kib,
        mem_available_kib: memory.available_kib,
        mem_cached_kib: memory.cached_kib,
        cpus: thread::available_parallelism().map_or(0, |cpus| u32::try_from(cpus.get()).unwrap_or(u32::MAX)),
        disk_total_bytes,
        disk_used_bytes,
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
        let text = "MemTotal:         110000 kB\nMemFree:           90000 kB\nMemAvailable:      95000 kB\nBuffers: 1 kB\nCached:   7 kB\nX: 1\n";
        let expected = Memory {
            total_kib: 110_000,
            free_kib: 90_000,
            available_kib: 95_000,
            cached_kib: 7,
        };
        assert_eq!(Memory::parse(text), expected);
        assert_eq!(Memory::parse("MemFreeX: 1 kB\nMemFree: much\n"), Memory::default());
    }
}
