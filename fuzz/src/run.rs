//! The loop: picks an input, changes it, feeds it, and watches for panics and for input that takes far too long.
//!
//! Knows a target as a name, seeds and a function.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::mutate::{Random, mutate};

/// No parser takes this much of a processor for a small input.
const HANG: Duration = Duration::from_secs(10);
/// Nor does it wait for so long, however busy the machine is.
const STUCK: Duration = Duration::from_secs(120);
/// So many inputs that ended in a new way are kept.
const POOL: usize = 2000;

/// A parser under test.
pub(crate) struct Target {
    /// Its name.
    pub(crate) name: &'static str,
    /// Good inputs to begin with.
    pub(crate) seeds: Vec<Vec<u8>>,
    /// Parses; the number stands for how that ended.
    pub(crate) parse: fn(&[u8]) -> u64,
}

/// What a target did.
pub(crate) struct Findings {
    /// How often it ran.
    pub(crate) executions: u64,
    /// How many units of input it was fed, where one execution is of several (see [`count`]); zero where it is of one.
    pub(crate) units: u64,
    /// In how many ways it ended.
    pub(crate) outcomes: usize,
    /// The first failure; it ends the target.
    pub(crate) failure: Option<Failure>,
}

/// Input that a parser cannot stand.
pub(crate) struct Failure {
    /// The bytes.
    pub(crate) input: Vec<u8>,
    /// What happened.
    pub(crate) message: String,
}

thread_local! {
    /// Units of input, as of [`count`]; a target runs on the thread that fuzzes it.
    static UNITS: Cell<u64> = const { Cell::new(0) };
}

/// A target whose input is a sequence says how many of its units it was fed: records of one that carries records out.
pub(crate) fn count(units: u64) {
    UNITS.set(UNITS.get() + units);
}

/// A number for how parsing ended: equal errors are equal outcomes. Numbers in a message do not count, or every length
/// would be an outcome of its own.
pub(crate) fn outcome(text: impl std::fmt::Display) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.to_string()
        .chars()
        .filter(|char| !char.is_ascii_digit())
        .take(200)
        .for_each(|char| char.hash(&mut hasher));
    hasher.finish()
}

/// Feeds one target for a while.
pub(crate) fn fuzz(target: &Target, seed: u64, time: Duration) -> Findings {
    let mut random = Random::new(seed);
    let mut pool = target.seeds.clone();
    let mut seen = BTreeSet::new();
    let mut findings = Findings {
        executions: 0,
        units: 0,
        outcomes: 0,
        failure: None,
    };
    UNITS.set(0);
    let quiet = Quiet::begin();
    let begun = Instant::now();
    let mut fresh = pool.clone();
    // All seeds are run, however short the time is.
    while begun.elapsed() < time || !fresh.is_empty() {
        let input = fresh.pop().unwrap_or_else(|| {
            let empty = Vec::new();
            let first = pool.get(random.below(pool.len())).unwrap_or(&empty).clone();
            let second = pool.get(random.below(pool.len())).unwrap_or(&empty).clone();
            mutate(&mut random, &first, &second)
        });
        let once = Instant::now();
        let ended = panic::catch_unwind(AssertUnwindSafe(|| (target.parse)(&input)));
        findings.executions += 1;
        match ended {
            Ok(_) if is_too_slow(HANG, once.elapsed(), || (target.parse)(&input)) => {
                let message = format!("took {} s", once.elapsed().as_secs());
                findings.failure = Some(Failure { input, message });
                break;
            }
            Ok(outcome) => {
                if seen.insert(outcome) && pool.len() < POOL {
                    pool.push(input);
                }
            }
            Err(_) => {
                findings.failure = Some(Failure {
                    input,
                    message: quiet.last(),
                });
                break;
            }
        }
    }
    findings.outcomes = seen.len();
    findings.units = UNITS.get();
    findings
}

/// Whether it is the input that took so long, and not what else runs here: for that it is fed once more, and what it takes of a processor
/// counts.
fn is_too_slow(most: Duration, waited: Duration, again: impl FnOnce() -> u64) -> bool {
    if waited <= most {
        return false;
    }
    let before = processor_time();
    again();
    waited > STUCK || processor_time().saturating_sub(before) > most
}

/// What this thread has had of a processor.
fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    let seconds = time.tv_sec.try_into().unwrap_or_default();
    Duration::new(seconds, time.tv_nsec.try_into().unwrap_or_default())
}

/// Writes a failing input where the next run does not overwrite it.
pub(crate) fn save(dir: &Path, target: &str, input: &[u8]) -> Result<PathBuf> {
    fs::create_dir_all(dir)?;
    let mut hasher = DefaultHasher::new();
    input.hash(&mut hasher);
    let path = dir.join(format!("{target}-{:016x}", hasher.finish()));
    fs::write(&path, input)?;
    Ok(path)
}

/// While it lives, panics are noted instead of printed.
struct Quiet {
    last: Arc<Mutex<String>>,
}

impl Quiet {
    fn begin() -> Self {
        let last = Arc::new(Mutex::new(String::new()));
        let noted = Arc::clone(&last);
        panic::set_hook(Box::new(move |info| {
            *noted.lock().unwrap_or_else(PoisonError::into_inner) = info.to_string().replace('\n', " ");
        }));
        Self { last }
    }

    fn last(&self) -> String {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        drop(panic::take_hook());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fragile(input: &[u8]) -> u64 {
        assert!(
            !(input.first() == Some(&b'h') && input.len() > 6 && input[4] == 0xff),
            "broken"
        );
        outcome(input.len().is_multiple_of(2))
    }

    /// Also shows that the runner can fail at all. One test, because the panic hook belongs to the whole process.
    #[test]
    fn a_panic_is_found_with_its_input_and_sound_parsers_pass() {
        let target = Target {
            name: "fragile",
            seeds: vec![b"hello there".to_vec()],
            parse: fragile,
        };
        let found = fuzz(&target, 1, Duration::from_secs(90));
        let failure = found.failure.expect("a panic");
        assert!(failure.message.contains("broken"), "{}", failure.message);
        assert_eq!(failure.input[4], 0xff);
        let sound = Target {
            name: "sound",
            seeds: Vec::new(),
            parse: |input| {
                count(3);
                outcome(input.is_empty())
            },
        };
        let found = fuzz(&sound, 1, Duration::from_secs(2));
        assert!(found.failure.is_none() && found.executions > 100 && found.outcomes == 2);
        assert_eq!(found.units, 3 * found.executions);
    }

    #[test]
    fn only_what_an_input_takes_of_the_processor_counts() {
        let (most, more) = (Duration::from_millis(20), Duration::from_millis(21));
        assert!(!is_too_slow(most, most, || unreachable!("it was fast")));
        assert!(!is_too_slow(most, more, || 0));
        assert!(is_too_slow(most, STUCK + more, || 0));
        let works = || {
            let begun = processor_time();
            while processor_time() - begun < more {
                std::hint::spin_loop();
            }
            0
        };
        assert!(is_too_slow(most, more, works));
    }

    #[test]
    fn numbers_do_not_make_outcomes() {
        assert_eq!(outcome("12 bytes"), outcome("3 bytes"));
        assert_ne!(outcome("12 bytes"), outcome("3 bits"));
    }
}
