//! How fast this machine's TSC counts, which is the lab's own TSC (`emulator`). Knows no lab.

use std::arch::x86_64::_rdtsc;
use std::thread;
use std::time::{Duration, Instant};

/// Between two looks at both clocks.
const APART: Duration = Duration::from_millis(100);

/// A look at both is good enough if it took less than this part of that, which is less than a hundredth of a percent.
const PART: u32 = 20_000;

/// On a busy machine a look may be interrupted, so that there are some of which the quickest counts, and all of it may be done again.
const LOOKS: usize = 16;
const TRIES: usize = 8;

/// The TSC at a moment that is known as exactly as the look took.
#[derive(Clone, Copy, Debug)]
struct Look {
    ticks: u64,
    when: Instant,
    took: Duration,
}

/// Kilohertz, as Linux counts them; `None` on a machine that is too busy to tell.
pub(crate) fn kilohertz() -> Option<u64> {
    (0..TRIES).find_map(|_| {
        let first = look();
        thread::sleep(APART);
        rate(first, look())
    })
}

/// By two looks; `None` where they were not exact enough.
fn rate(first: Look, second: Look) -> Option<u64> {
    let time = second.when.checked_duration_since(first.when)?;
    if first.took.max(second.took).saturating_mul(PART) > time {
        return None;
    }
    let ticks = u128::from(second.ticks.checked_sub(first.ticks)?);
    let rate = (ticks * 1_000_000).checked_div(time.as_nanos())?;
    u64::try_from(rate).ok().filter(|rate| *rate > 0)
}

/// The quickest of several.
fn look() -> Look {
    let others = (1..LOOKS).map(|_| look_once());
    others.fold(
        look_once(),
        |best, other| if other.took < best.took { other } else { best },
    )
}

fn look_once() -> Look {
    let before = Instant::now();
    let ticks = ticks();
    let took = before.elapsed();
    Look {
        ticks,
        when: before + took / 2,
        took,
    }
}

#[allow(unsafe_code, reason = "the instruction has no safe form")]
fn ticks() -> u64 {
    // SAFETY: 1. every x86-64 processor has the instruction, and Linux lets programs use it (prctl(2), `PR_SET_TSC`, which nobody does here).
    unsafe { _rdtsc() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_ticks_by_time_and_none_of_looks_that_took_long() {
        let when = Instant::now();
        let at = |ticks, ms, took| Look {
            ticks,
            when: when + Duration::from_millis(ms),
            took: Duration::from_nanos(took),
        };
        assert_eq!(rate(at(1000, 0, 50), at(260_001_000, 100, 50)), Some(2_600_000));
        assert_eq!(rate(at(1000, 0, 50), at(260_001_000, 100, 6000)), None, "interrupted");
        assert_eq!(rate(at(1000, 0, 6000), at(260_001_000, 100, 50)), None, "interrupted");
        assert_eq!(rate(at(1000, 0, 50), at(1000, 100, 50)), None, "it stands still");
        assert_eq!(rate(at(1000, 0, 50), at(10, 100, 50)), None, "it goes back");
        assert_eq!(rate(at(0, 100, 50), at(10, 0, 50)), None);
        assert_eq!(rate(at(0, 0, 0), at(10, 0, 0)), None, "no time has passed");
    }

    #[test]
    fn this_machines_tsc_is_told_twice_the_same() {
        let (Some(one), Some(other)) = (kilohertz(), kilohertz()) else {
            // Too busy for that: the kernel of a lab finds it out by itself then, as well as it can.
            return;
        };
        assert!(one.abs_diff(other) * 1000 <= one, "{one} kHz, then {other} kHz");
    }
}
