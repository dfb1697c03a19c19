//! Whether a guest has halted for good: all its vCPUs stand in HLT with interrupts off, as after `halt -f`, and nothing wakes them. An
//! engine may tell nobody (KVM waits in the kernel, as it does for an interrupt), so a machine whose process has been idle for a while asks
//! its vCPUs. Knows neither why a guest halts nor what becomes of its machine.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use engine::Vcpu;

/// Between two looks; twice as long after each at which the guest was idle and alive.
const SHORTEST: Duration = Duration::from_secs(10);
const LONGEST: Duration = Duration::from_secs(80);

/// Between a look at which all had halted and the one that counts: one of them might have woken another just then.
const AGAIN: Duration = Duration::from_secs(1);

/// A process that has used less than this part of the time is idle. A busy guest is not interrupted.
const IDLE: u32 = 100;

/// How long vCPUs may take to answer.
const PATIENCE: Duration = Duration::from_millis(500);

#[derive(Default)]
struct Answers {
    round: u64,
    answered: usize,
    halted: usize,
}

/// The question to all vCPUs, and their answers.
#[derive(Default)]
pub(crate) struct Halts {
    /// Mirrors that of the answers, for a vCPU's look without the lock.
    round: AtomicU64,
    answers: Mutex<Answers>,
    changed: Condvar,
}

impl Halts {
    /// Asks `count` vCPUs, which `kick` interrupts; whether all have answered that they have halted.
    pub(crate) fn all_have(&self, count: usize, kick: impl FnOnce()) -> bool {
        {
            let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
            *answers = Answers {
                round: answers.round + 1,
                ..Answers::default()
            };
            self.round.store(answers.round, Ordering::SeqCst);
        }
        kick();
        let answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        let waiting = |answers: &mut Answers| answers.answered < count;
        let waited = self.changed.wait_timeout_while(answers, PATIENCE, waiting);
        let (answers, _) = waited.unwrap_or_else(PoisonError::into_inner);
        answers.halted == count
    }

    /// Called by a vCPU's thread that was interrupted: answers if that was asked. `seen` is the thread's own count of questions.
    pub(crate) fn answer(&self, seen: &mut u64, vcpu: &mut dyn Vcpu) {
        let round = self.round.load(Ordering::SeqCst);
        if std::mem::replace(seen, round) == round {
            return;
        }
        let halted = vcpu.has_halted().unwrap_or_else(|error| {
            log::warn!("whether a vCPU has halted is not known: {error}");
            false
        });
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        if answers.round == round {
            answers.answered += 1;
            answers.halted += usize::from(halted);
            self.changed.notify_all();
        }
    }
}

/// When a machine asks.
pub(crate) struct Watch {
    looked: Instant,
    /// What the process had used then.
    used: Duration,
    pause: Duration,
    /// All had halted then.
    halted: bool,
}

impl Watch {
    /// From now on.
    pub(crate) fn new() -> Self {
        Self {
            looked: Instant::now(),
            used: process_time(),
            pause: SHORTEST,
            halted: false,
        }
    }

    /// How long it is until the next look.
    pub(crate) fn due_in(&self, now: Instant) -> Duration {
        (self.looked + self.pause).saturating_duration_since(now)
    }

    /// Looks; `all_have` asks the vCPUs. True at the second time in turn at which they have halted.
    pub(crate) fn look(&mut self, now: Instant, used: Duration, all_have: impl FnOnce() -> bool) -> bool {
        let share = (now - self.looked) / IDLE;
        let idle = self.halted || used.saturating_sub(self.used) < share;
        let halted = idle && all_have();
        let sure = halted && self.halted;
        self.pause = match (halted, idle) {
            (true, _) => AGAIN,
            (false, true) => (self.pause * 2).clamp(SHORTEST, LONGEST),
            (false, false) => SHORTEST,
        };
        (self.looked, self.used, self.halted) = (now, used, halted);
        sure
    }
}

/// The processor time of this process, its guest's included.
pub(crate) fn process_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use engine::{BootState, Exit, Kick, Result, VcpuState};

    use super::*;

    struct Halted(bool);

    impl Vcpu for Halted {
        fn run(&mut self) -> Result<Exit<'_>> {
            unreachable!("it does not run")
        }

        fn kicker(&self) -> Arc<dyn Kick> {
            unreachable!("nobody interrupts it")
        }

        fn set_boot_state(&mut self, _boot: &BootState) -> Result<()> {
            unreachable!("it is not booted")
        }

        fn save(&mut self) -> Result<VcpuState> {
            unreachable!("it is not saved")
        }

        fn restore(&mut self, _state: &VcpuState) -> Result<()> {
            unreachable!("it is not restored")
        }

        fn has_halted(&mut self) -> Result<bool> {
            Ok(self.0)
        }
    }

    #[test]
    fn all_have_to_answer_that_they_have_halted() {
        let halts = Halts::default();
        let mut seen = [0; 2];
        for (states, answer) in [([true, true], true), ([true, false], false), ([false, false], false)] {
            let all = halts.all_have(2, || {
                for (seen, halted) in seen.iter_mut().zip(states) {
                    halts.answer(seen, &mut Halted(halted));
                    // Interrupted once more: it has answered.
                    halts.answer(seen, &mut Halted(true));
                }
            });
            assert_eq!(all, answer, "{states:?}");
        }
        assert!(
            !halts.all_have(2, || halts.answer(&mut seen[0], &mut Halted(true))),
            "one is silent"
        );
    }

    #[test]
    fn a_guest_that_is_busy_is_not_asked_and_one_that_idles_less_and_less() {
        let mut watch = Watch::new();
        let (mut now, mut used) = (watch.looked, watch.used);
        let mut step = |watch: &mut Watch, busy: u32, halted: Option<bool>| {
            now += watch.pause;
            used += watch.pause * busy / 1000;
            let all_have = || halted.expect("a busy guest is asked");
            (watch.look(now, used, all_have), watch.pause.as_secs())
        };
        assert_eq!(step(&mut watch, 500, None), (false, 10));
        for pause in [20, 40, 80, 80] {
            assert_eq!(step(&mut watch, 2, Some(false)), (false, pause));
        }
        assert_eq!(step(&mut watch, 20, None), (false, 10));
        assert_eq!(step(&mut watch, 2, Some(true)), (false, 1));
        // To answer takes time, too.
        assert_eq!(step(&mut watch, 900, Some(false)), (false, 10));
        assert_eq!(step(&mut watch, 2, Some(true)), (false, 1));
        assert_eq!(step(&mut watch, 900, Some(true)), (true, 1));
    }
}
