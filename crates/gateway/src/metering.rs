//! How much of its processors a sandbox has used since somebody last asked. Knows no node.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// So many sandboxes are remembered.
const MOST: usize = 16_384;

/// What was seen when somebody last asked.
#[derive(Debug, Default)]
pub(crate) struct Meter(Mutex<HashMap<String, Seen>>);

#[derive(Clone, Copy, Debug)]
struct Seen {
    at_ns: u64,
    cpu_usec: u64,
}

impl Meter {
    /// Per cent of `cpus` processors that a sandbox has used since it was last seen, or since it was started.
    pub(crate) fn percent(&self, id: &str, cpus: u32, started_ns: u64, (at_ns, cpu_usec): (u64, u64)) -> f64 {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= MOST && !all.contains_key(id) {
            all.clear();
        }
        let before = all.insert(id.to_owned(), Seen { at_ns, cpu_usec });
        // What was counted before it was started anew is not counted here.
        let before = before.filter(|seen| seen.at_ns >= started_ns && seen.cpu_usec <= cpu_usec && seen.at_ns < at_ns);
        let from = before.unwrap_or(Seen {
            at_ns: started_ns,
            cpu_usec: 0,
        });
        let passed = seconds(at_ns.saturating_sub(from.at_ns), 1_000_000_000);
        let used = seconds(cpu_usec.saturating_sub(from.cpu_usec), 1_000_000);
        match passed > 0.0 && cpus > 0 {
            true => (100.0 * used / passed / f64::from(cpus)).min(100.0),
            false => 0.0,
        }
    }
}

/// So many parts of a second, as seconds.
fn seconds(count: u64, parts: u64) -> f64 {
    let rest = u32::try_from(count % parts).unwrap_or(0);
    let whole = u32::try_from(count / parts).unwrap_or(u32::MAX);
    let parts = u32::try_from(parts).unwrap_or(u32::MAX);
    f64::from(whole) + f64::from(rest) / f64::from(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn use_is_counted_from_one_look_to_the_next() {
        let meter = Meter::default();
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} {b}");
        close(meter.percent("a", 2, 10 * S, (20 * S, 10_000_000)), 50.0);
        close(meter.percent("a", 2, 10 * S, (30 * S, 11_000_000)), 5.0);
        close(meter.percent("b", 2, 10 * S, (30 * S, 0)), 0.0);
        // It was started again, and its clock is another.
        close(meter.percent("a", 2, 31 * S, (32 * S, 500_000)), 25.0);
        close(meter.percent("a", 1, 31 * S, (33 * S, 100_000_000)), 100.0);
        close(meter.percent("c", 1, 31 * S, (31 * S, 5)), 0.0);
    }
}
