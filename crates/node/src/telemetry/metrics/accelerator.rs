//! What the servers of sandboxes' accelerators tell, as metrics. A server that has not answered is left out for a while, so that it keeps
//! nobody from being asked.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use node_api::AcceleratorStats;
use observe::exposition::{Exposition, Kind};

use super::SILENCE;
use crate::vmm::accelerator_stats::{self, PATIENCE};

/// Servers that did not answer when they were asked last, by their sandboxes, and when that was.
#[derive(Debug, Default)]
pub(super) struct Silent(Mutex<BTreeMap<String, Instant>>);

impl Silent {
    /// Asks a sandbox's server, until `end` at most, unless it was silent of late; nothing if it does not answer.
    pub(super) fn ask(&self, sandbox: &str, path: &Path, end: Instant) -> Option<AcceleratorStats> {
        let limit = PATIENCE.min(end.saturating_duration_since(Instant::now()));
        if limit.is_zero() || self.lock().get(sandbox).is_some_and(|since| !is_over(*since)) {
            return None;
        }
        let asked = accelerator_stats::ask(path, limit);
        let mut silent = self.lock();
        // Of those that are gone nobody asks any more.
        silent.retain(|_, since| !is_over(*since));
        match asked {
            Ok(stats) => Some(stats),
            Err(error) => {
                log::info!("the server of the accelerator of sandbox {sandbox} tells no metrics: {error}");
                silent.insert(sandbox.to_owned(), Instant::now());
                None
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_over(since: Instant) -> bool {
    since.elapsed() >= SILENCE
}

type Number = (&'static str, Kind, &'static str, fn(&AcceleratorStats) -> Option<u64>);

const NUMBERS: [Number; 11] = [
    (
        "basalt_sandbox_accelerator_clients",
        Kind::Gauge,
        "Programs that use its accelerator.",
        |stats| Some(stats.clients),
    ),
    (
        "basalt_sandbox_accelerator_memory_bytes",
        Kind::Gauge,
        "Memory of its accelerator that its programs have.",
        |stats| Some(stats.memory.used),
    ),
    (
        "basalt_sandbox_accelerator_memory_peak_bytes",
        Kind::Gauge,
        "The most of it that they had.",
        |stats| Some(stats.memory.most),
    ),
    (
        "basalt_sandbox_accelerator_memory_limit_bytes",
        Kind::Gauge,
        "The most of it that they may have.",
        |stats| stats.memory.quota,
    ),
    (
        "basalt_sandbox_accelerator_memory_refused_total",
        Kind::Counter,
        "Times that they were refused memory beyond that.",
        |stats| Some(stats.memory.refused),
    ),
    (
        "basalt_sandbox_accelerator_launches_total",
        Kind::Counter,
        "Kernels that are complete.",
        |stats| Some(stats.time?.launches),
    ),
    (
        "basalt_sandbox_accelerator_transfers_total",
        Kind::Counter,
        "Reads, writes, copies and fills that are complete.",
        |stats| Some(stats.time?.transfers),
    ),
    (
        "basalt_sandbox_accelerator_in_flight",
        Kind::Gauge,
        "Commands that are not complete.",
        |stats| Some(stats.time?.in_flight),
    ),
    (
        "basalt_sandbox_accelerator_errors_total",
        Kind::Counter,
        "Calls that failed.",
        |stats| Some(sum(stats.errors.values())),
    ),
    (
        "basalt_sandbox_accelerator_not_served_total",
        Kind::Counter,
        "Calls that nobody carries out.",
        |stats| Some(sum(stats.not_served.values())),
    ),
    (
        "basalt_sandbox_accelerator_restarts_total",
        Kind::Counter,
        "Processes that served and have ended: all other counters begin anew with the next one.",
        |stats| Some(stats.restarts),
    ),
];

/// Times, in nanoseconds.
const TIMES: [Number; 2] = [
    (
        "basalt_sandbox_accelerator_seconds_total",
        Kind::Counter,
        "Time of its accelerator that complete commands took.",
        |stats| Some(stats.time?.used_ns),
    ),
    (
        "basalt_sandbox_accelerator_held_up_seconds_total",
        Kind::Counter,
        "Time that commands waited until it was their sandbox's turn.",
        |stats| Some(stats.time?.held_up_ns),
    ),
];

fn sum<'n>(numbers: impl Iterator<Item = &'n u64>) -> u64 {
    numbers.fold(0, |sum, number| sum.saturating_add(*number))
}

/// All families, with what each sandbox's server has told.
pub(super) fn write(text: &mut Exposition, all: &[(&str, &AcceleratorStats)]) {
    for (name, kind, help, value) in NUMBERS {
        let mut family = text.family(name, kind, help);
        for (sandbox, stats) in all {
            if let Some(value) = value(stats) {
                family.number(&[("sandbox", sandbox)], value);
            }
        }
    }
    for (name, kind, help, value) in TIMES {
        let mut family = text.family(name, kind, help);
        for (sandbox, stats) in all {
            if let Some(value) = value(stats) {
                let microseconds = Duration::from_nanos(value).as_micros();
                family.microseconds(&[("sandbox", sandbox)], u64::try_from(microseconds).unwrap_or(u64::MAX));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use node_api::AcceleratorTime;

    use super::*;

    #[test]
    fn what_servers_tell_has_a_sample_each_and_what_they_do_not_has_none() {
        let timed = AcceleratorStats {
            restarts: 1,
            time: Some(AcceleratorTime {
                used_ns: 1_500_000_000,
                held_up_ns: 250_000,
                launches: 4,
                ..AcceleratorTime::default()
            }),
            errors: BTreeMap::from([(-5, u64::MAX), (-4, 1)]),
            ..AcceleratorStats::default()
        };
        let plain = AcceleratorStats {
            clients: 3,
            ..AcceleratorStats::default()
        };
        let mut text = Exposition::default();
        write(&mut text, &[("aa", &timed), ("bb", &plain)]);
        let text = text.finish();
        for line in [
            "seconds_total{sandbox=\"aa\"} 1.500000\n",
            "held_up_seconds_total{sandbox=\"aa\"} 0.000250\n",
            "launches_total{sandbox=\"aa\"} 4\n",
            "restarts_total{sandbox=\"aa\"} 1\n",
            "clients{sandbox=\"bb\"} 3\n",
            "errors_total{sandbox=\"aa\"} 18446744073709551615\n",
        ] {
            let line = format!("\nbasalt_sandbox_accelerator_{line}");
            assert!(text.contains(&line), "{line}{text}");
        }
        for part in [
            "launches_total{sandbox=\"bb\"",
            "seconds_total{sandbox=\"bb\"",
            "limit_bytes{",
        ] {
            assert!(!text.contains(part), "{part}{text}");
        }
    }

    #[test]
    fn one_that_is_silent_is_not_asked_again_soon() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("accelerator");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let silent = Silent::default();
        let ask = || silent.ask("aa", &path, Instant::now() + Duration::from_millis(20));
        assert_eq!(ask(), None);
        assert!(listener.accept().is_ok());
        assert_eq!(ask(), None);
        assert!(listener.accept().is_err(), "nobody connects");
        // A minute later.
        for since in silent.lock().values_mut() {
            *since = since.checked_sub(SILENCE).unwrap();
        }
        assert_eq!(ask(), None);
        assert!(listener.accept().is_ok());
        assert_eq!(silent.ask("bb", &path, Instant::now()), None);
        assert!(listener.accept().is_err(), "there was no time");
    }
}
