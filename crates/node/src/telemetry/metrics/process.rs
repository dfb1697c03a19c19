//! What the daemon uses itself, as proc(5) tells it. Knows no sandbox.

use std::fs;

use observe::exposition::{Exposition, Kind};

/// The daemon itself, by the names that Prometheus' client libraries use.
pub(super) fn write(text: &mut Exposition) {
    let read = |name: &str| fs::read_to_string(format!("/proc/self/{name}")).unwrap_or_default();
    let (stat, status) = (read("stat"), read("status"));
    let field = |number: usize| -> Option<u64> {
        // proc(5): field 3 is the first behind the name.
        let (_, rest) = stat.rsplit_once(')')?;
        rest.split_ascii_whitespace().nth(number.checked_sub(3)?)?.parse().ok()
    };
    // USER_HZ is part of Linux' interface (proc(5)), and 100 on x86-64.
    let ticks = 100;
    if let (Some(user), Some(system)) = (field(14), field(15)) {
        text.family(
            "process_cpu_seconds_total",
            Kind::Counter,
            "Processor time of the daemon.",
        )
        .microseconds(&[], (user + system).saturating_mul(1_000_000) / ticks);
    }
    if let Some(start) = field(22) {
        let boot = fs::read_to_string("/proc/stat").unwrap_or_default();
        let boot = boot
            .lines()
            .find_map(|line| line.strip_prefix("btime ")?.trim().parse::<u64>().ok());
        if let Some(boot) = boot {
            text.family(
                "process_start_time_seconds",
                Kind::Gauge,
                "When the daemon was started, since 1970.",
            )
            .number(&[], boot + start / ticks);
        }
    }
    let resident = status.lines().find_map(|line| {
        line.strip_prefix("VmRSS:")?
            .trim()
            .strip_suffix(" kB")?
            .parse::<u64>()
            .ok()
    });
    if let Some(resident) = resident {
        text.family("process_resident_memory_bytes", Kind::Gauge, "Memory of the daemon.")
            .number(&[], resident << 10);
    }
    if let Ok(open) = fs::read_dir("/proc/self/fd") {
        text.family("process_open_fds", Kind::Gauge, "Open files of the daemon.")
            .number(&[], u64::try_from(open.count()).unwrap_or(u64::MAX));
    }
}
