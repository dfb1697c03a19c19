//! What a cgroup says it uses. Does not judge.

use super::file::{Directory, keyed};
use crate::Error;

/// What the processes of a sandbox use, and have used since it was made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Processor time in microseconds.
    pub cpu_usec: u64,
    /// For how long it was held back by `cpu.max`, in microseconds; `None` without the controller.
    pub cpu_throttled_usec: Option<u64>,
    /// Memory; `None` without the controller.
    pub memory: Option<MemoryUsage>,
    /// Threads; `None` without the controller.
    pub pids: Option<u64>,
    /// Disk traffic of all devices; `None` without the controller.
    pub io: Option<IoUsage>,
}

/// Bytes of memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUsage {
    /// All that is charged to it.
    pub current: u64,
    /// The most it ever was (Linux 5.19).
    pub peak: Option<u64>,
    /// Anonymous memory.
    pub anon: u64,
    /// Page cache.
    pub file: u64,
    /// How many times it was killed for memory.
    pub oom_kills: u64,
}

/// Disk traffic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoUsage {
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
}

pub(super) fn read(directory: &Directory) -> Result<Usage, Error> {
    let cpu = directory.read("cpu.stat")?;
    let cpu_usec = keyed(&cpu, "usage_usec").ok_or_else(|| directory.bad("cpu.stat", &cpu))?;
    Ok(Usage {
        cpu_usec,
        cpu_throttled_usec: keyed(&cpu, "throttled_usec"),
        memory: memory(directory)?,
        pids: number(directory, "pids.current")?,
        io: directory.read_if_there("io.stat")?.map(|text| io(&text)),
    })
}

fn number(directory: &Directory, name: &str) -> Result<Option<u64>, Error> {
    let Some(text) = directory.read_if_there(name)? else {
        return Ok(None);
    };
    text.trim().parse().map(Some).map_err(|_| directory.bad(name, &text))
}

fn memory(directory: &Directory) -> Result<Option<MemoryUsage>, Error> {
    let Some(current) = number(directory, "memory.current")? else {
        return Ok(None);
    };
    let stat = directory.read("memory.stat")?;
    let events = directory.read("memory.events")?;
    let of = |name, text: &str, key| keyed(text, key).ok_or_else(|| directory.bad(name, text));
    Ok(Some(MemoryUsage {
        current,
        peak: number(directory, "memory.peak")?,
        anon: of("memory.stat", &stat, "anon")?,
        file: of("memory.stat", &stat, "file")?,
        oom_kills: of("memory.events", &events, "oom_kill")?,
    }))
}

/// Lines of `MAJOR:MINOR rbytes=1 wbytes=2 ...`, one a device; summed.
fn io(text: &str) -> IoUsage {
    let mut usage = IoUsage::default();
    for (key, value) in text.split_whitespace().filter_map(|word| word.split_once('=')) {
        let Ok(value) = value.parse::<u64>() else { continue };
        match key {
            "rbytes" => usage.read_bytes += value,
            "wbytes" => usage.written_bytes += value,
            "rios" => usage.reads += value,
            "wios" => usage.writes += value,
            _ => (),
        }
    }
    usage
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_devices_of_io_stat_are_added_up() {
        let text = "254:0 rbytes=100 wbytes=20 rios=3 wios=1 dbytes=0 dios=0\n8:0 rbytes=1 wbytes=2 rios=1 wios=1\n";
        let expected = IoUsage {
            read_bytes: 101,
            written_bytes: 22,
            reads: 4,
            writes: 2,
        };
        assert_eq!(io(text), expected);
        assert_eq!(io(""), IoUsage::default());
    }

    #[test]
    fn a_key_is_a_whole_word() {
        let text = "usage_usec_more 7\nusage_usec 5\n";
        assert_eq!(keyed(text, "usage_usec"), Some(5));
        assert_eq!(keyed(text, "usage"), None);
    }
}
