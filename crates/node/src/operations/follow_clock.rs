//! The host's clock is set while guests run: by hand, by a time service after a long sleep, or when its host was suspended. Guests' clocks
//! go on by the same oscillator and notice nothing of it, so their agents are told the time. Knows no reason for a step.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use node_api::State;
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use crate::node::Node;
use crate::sandbox::entry::Entry;
use crate::{Error, clock, thread};

/// Between two attempts, where the clock cannot be watched.
const PAUSE: Duration = Duration::from_secs(60);

impl Node {
    /// Tells guests the time, from here on, whenever the host's clock is set.
    pub(crate) fn start_following_clock(self: &Arc<Self>) -> Result<(), Error> {
        let timer = step_timer().map_err(Error::host("making a timer"))?;
        let node = Arc::clone(self);
        thread::spawn("clock", move || {
            loop {
                match wait_for_step(&timer) {
                    Ok(()) => node.tell_time(),
                    Err(error) => {
                        log::error!("whether the host's clock is set is not known: {error}");
                        std::thread::sleep(PAUSE);
                    }
                }
            }
        })
    }

    /// Sets the clocks of all guests that run. A guest that is held has its clock set when it goes on.
    pub(crate) fn tell_time(&self) {
        let entries: Vec<Arc<Entry>> = self.entries().values().cloned().collect();
        let running: Vec<_> = entries.iter().filter(|it| it.state() == State::Running).collect();
        log::info!(
            "the host's clock was set; setting the clocks of {} guests",
            running.len()
        );
        thread::with_each("time", &running, |entry| self.tell_time_to(entry));
    }

    /// Sets the clock of a guest that stood still, maybe while the host's was set; nobody waits for that.
    pub(crate) fn tell_time_in_thread(self: &Arc<Self>, entry: &Arc<Entry>) {
        let (node, entry) = (Arc::clone(self), Arc::clone(entry));
        if let Err(error) = thread::spawn("time", move || node.tell_time_to(&entry)) {
            log::warn!("a guest that goes on has the clock that it had: {error}");
        }
    }

    /// Sets the clock of one guest. It may end just now, or have an agent of before that knows no such request.
    fn tell_time_to(&self, entry: &Entry) {
        let Some(vm) = entry.vm() else { return };
        let told = vm.agent().and_then(|mut agent| {
            let set = agent.set_clock(clock::now_ns());
            set.map_err(|error| vm.diagnose("its clock was set", error))
        });
        if let Err(error) = told {
            log::warn!("the clock of sandbox {} does not follow the host's: {error}", entry.id);
        }
    }
}

/// A timer that never ends, and whose reader is told each time when the clock is set (timerfd_create(2), `TFD_TIMER_CANCEL_ON_SET`).
fn step_timer() -> io::Result<OwnedFd> {
    let timer = timerfd_create(TimerfdClockId::Realtime, TimerfdFlags::CLOEXEC)?;
    let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
    let never = Itimerspec {
        it_interval: zero,
        it_value: Timespec {
            tv_sec: i64::MAX / 4,
            tv_nsec: 0,
        },
    };
    let flags = TimerfdTimerFlags::ABSTIME | TimerfdTimerFlags::CANCEL_ON_SET;
    match timerfd_settime(&timer, flags, &never) {
        // CANCELED: the clock was set just now; the timer is armed.
        Ok(_) | Err(Errno::CANCELED) => Ok(timer),
        Err(error) => Err(error.into()),
    }
}

fn wait_for_step(timer: &OwnedFd) -> io::Result<()> {
    match rustix::io::read(timer, &mut [0_u8; 8]) {
        Err(Errno::CANCELED) => Ok(()),
        Err(error) => Err(error.into()),
        Ok(_) => Err(io::Error::other("a timer without an end has ended")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_nobody_sets_tells_nothing() {
        let timer = step_timer().unwrap();
        assert!(!crate::vmm::process::readable(&timer, Duration::from_millis(50)));
    }
}
