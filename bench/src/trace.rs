//! The kernel's own events, by tracefs: an instance of our own, so that nobody else's tracing is touched.
//!
//! Both peers are seen by the same events of the host's kernel; neither is stopped or followed by a debugger. Knows
//! tracefs and the form of its lines, not what is measured.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::world::own_name;

/// Where instances are made.
pub(crate) const INSTANCES: &str = "/sys/kernel/tracing/instances";

/// Tracing under way; it ends when this is dropped.
pub(crate) struct Trace {
    directory: PathBuf,
}

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TraceEvent {
    /// CLOCK_MONOTONIC, to the microsecond.
    pub(crate) time_ns: u64,
    pub(crate) name: String,
    pub(crate) detail: String,
}

impl Trace {
    /// Records `events` (such as `kvm/kvm_entry`) from now on. When a CPU's buffer is full it keeps what came first.
    ///
    /// Only what this program starts, and what that starts: other guests' vCPUs are entered too.
    pub(crate) fn start(events: &[&str], kib_per_cpu: u32) -> Result<Self> {
        Self::start_with(events, kib_per_cpu, |trace| {
            trace.write("options/event-fork", "1")?;
            trace.write("set_event_pid", &std::process::id().to_string())
        })
    }

    /// The same of all processes, as where a daemon that is there already starts what matters.
    pub(crate) fn start_for_all(events: &[&str], kib_per_cpu: u32) -> Result<Self> {
        Self::start_with(events, kib_per_cpu, |_| Ok(()))
    }

    fn start_with(events: &[&str], kib_per_cpu: u32, narrow: impl FnOnce(&Self) -> Result<()>) -> Result<Self> {
        let directory = Path::new(INSTANCES).join(own_name());
        fs::create_dir(&directory).with_context(|| {
            format!(
                "cannot make {}: the benchmarks need root and tracefs on /sys/kernel/tracing",
                directory.display()
            )
        })?;
        let trace = Self { directory };
        trace.write("trace_clock", "mono")?;
        trace.write("options/overwrite", "0")?;
        narrow(&trace)?;
        trace.write("buffer_size_kb", &kib_per_cpu.to_string())?;
        for event in events {
            trace.write(&format!("events/{event}/enable"), "1")?;
        }
        Ok(trace)
    }

    fn write(&self, file: &str, value: &str) -> Result<()> {
        let path = self.directory.join(file);
        fs::write(&path, value).with_context(|| format!("cannot write {value} to {}", path.display()))
    }

    /// Whether `text` has been recorded by now.
    pub(crate) fn has_seen(&self, text: &str) -> Result<bool> {
        let recorded = fs::read(self.directory.join("trace"))?;
        Ok(String::from_utf8_lossy(&recorded).contains(text))
    }

    /// Stops recording and gives what was recorded, in the order of time.
    pub(crate) fn stop(self) -> Result<Vec<TraceEvent>> {
        self.write("tracing_on", "0")?;
        let text = fs::read(self.directory.join("trace"))?;
        let text = String::from_utf8_lossy(&text);
        let mut events: Vec<_> = text.lines().filter_map(parse).collect();
        events.sort_by_key(|event| event.time_ns);
        Ok(events)
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.directory) {
            log::warn!("{} stays behind: {error}", self.directory.display());
        }
    }
}

/// A line such as `  CPU 0/KVM-178  [001] d..1.   123.456789: kvm_entry: vcpu 0, rip 0xfff0`.
fn parse(line: &str) -> Option<TraceEvent> {
    if line.starts_with('#') {
        return None;
    }
    let mut rest = line;
    loop {
        let (word, tail) = rest.trim_start().split_once(' ')?;
        rest = tail;
        if let Some(time_ns) = word.strip_suffix(':').and_then(seconds) {
            let (name, detail) = rest.trim_start().split_once(':')?;
            return Some(TraceEvent {
                time_ns,
                name: name.to_owned(),
                detail: detail.trim().to_owned(),
            });
        }
    }
}

/// `123.456789` as nanoseconds.
fn seconds(text: &str) -> Option<u64> {
    let (seconds, fraction) = text.split_once('.')?;
    let digits = |text: &str| {
        let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        plain.then(|| text.parse::<u64>().ok()).flatten()
    };
    if fraction.len() != 6 {
        return None;
    }
    digits(seconds)?
        .checked_mul(1_000_000)?
        .checked_add(digits(fraction)?)?
        .checked_mul(1000)
}

/// From the exec of `program` to the first time that a vCPU was entered, in milliseconds. One that ends with a slash means any
/// below it.
pub(crate) fn exec_to_run(events: &[TraceEvent], program: &str) -> Result<f64> {
    let is_it = |event: &&TraceEvent| {
        let file = event.detail.strip_prefix("filename=");
        let file = file.and_then(|rest| rest.split(' ').next()).unwrap_or_default();
        event.name == "sched_process_exec" && (file == program || program.ends_with('/') && file.starts_with(program))
    };
    let Some(exec) = events.iter().find(is_it) else {
        bail!("the kernel has traced no exec of {program}");
    };
    let entry = events
        .iter()
        .find(|event| event.name == "kvm_entry" && event.time_ns >= exec.time_ns)
        .with_context(|| format!("no vCPU was entered after {program} had started"))?;
    Ok(milliseconds(entry.time_ns - exec.time_ns))
}

/// How often each reason of `kvm_userspace_exit` came until `end_ns`.
pub(crate) fn exits_by_reason(events: &[TraceEvent], end_ns: u64) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    for event in events
        .iter()
        .filter(|event| event.name == "kvm_userspace_exit" && event.time_ns <= end_ns)
    {
        // `reason KVM_EXIT_IO (2)`, or `reason restart (4)` for a call that a signal ended.
        let reason = event.detail.split_whitespace().nth(1).unwrap_or("unknown");
        *counts.entry(reason.to_owned()).or_default() += 1;
    }
    counts
}

/// Nanoseconds for people.
#[allow(
    clippy::cast_precision_loss,
    reason = "a difference of times is far below 2^53 nanoseconds"
)]
pub(crate) fn milliseconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
# tracer: nop
#           TASK-PID     CPU#  |||||  TIMESTAMP  FUNCTION
       qemu-system-178   [001] .....    99.500000: sched_process_exec: filename=/usr/bin/other pid=177 old_pid=177
    basalt vmm: x-178    [001] d..1.   100.000001: kvm_entry: vcpu 0, rip 0xfff0
           <...>-180     [000] .....   100.000100: sched_process_exec: filename=/opt/vmm pid=180 old_pid=180
       CPU 0/KVM-181     [001] d..1.   100.012350: kvm_entry: vcpu 0, rip 0xfff0
       CPU 0/KVM-181     [001] .....   100.012400: kvm_userspace_exit: reason KVM_EXIT_IO (2)
       CPU 0/KVM-181     [001] .....   100.012500: kvm_userspace_exit: reason KVM_EXIT_MMIO (6)
       CPU 0/KVM-181     [001] .....   100.012600: kvm_userspace_exit: reason KVM_EXIT_IO (2)
       CPU 0/KVM-181     [001] .....   200.000000: kvm_userspace_exit: reason KVM_EXIT_IO (2)
";

    fn events() -> Vec<TraceEvent> {
        TEXT.lines().filter_map(parse).collect()
    }

    #[test]
    fn lines_are_understood_whatever_the_task_is_called() {
        let events = events();
        assert_eq!(events.len(), 8);
        assert_eq!(events[1].time_ns, 100_000_001_000);
        assert_eq!(events[1].name, "kvm_entry");
        assert_eq!(events[1].detail, "vcpu 0, rip 0xfff0");
    }

    #[test]
    fn the_first_entry_after_the_exec_counts() {
        let events = events();
        assert!((exec_to_run(&events, "/opt/vmm").unwrap() - 12.25).abs() < 1e-9);
        assert!((exec_to_run(&events, "/opt/").unwrap() - 12.25).abs() < 1e-9);
        assert!(exec_to_run(&events, "/opt/vm").is_err());
        assert!(exec_to_run(&events[..3], "/opt/vmm").is_err());
    }

    #[test]
    fn exits_are_counted_up_to_the_end() {
        let counts = exits_by_reason(&events(), 150_000_000_000);
        let expected = [("KVM_EXIT_IO".to_owned(), 2), ("KVM_EXIT_MMIO".to_owned(), 1)];
        assert_eq!(counts.into_iter().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn only_times_are_times() {
        for text in ["", "1", "1.5", "a.000000", "1.00000a", "+1.000000", ".000000"] {
            assert_eq!(seconds(text), None, "{text}");
        }
        assert_eq!(seconds("0.000001"), Some(1000));
    }
}
