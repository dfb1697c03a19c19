//! Has one CPU of the lab's host stand still, as one that has hung does: the emulator's thread of that CPU is stopped by ptrace(2), as a
//! signal would stop all of its threads. Does not know what the host makes of it.
//!
//! The kernel lets the thread go on when this process ends, however it ends (ptrace(2): a tracer's end detaches its tracees).

use std::io::{self, Write as _};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::monitor::Monitor;
use crate::state::State;

/// So often a thread may be stopped at a bad moment, and how long the monitor is waited for to know that it is none.
const TRIES: usize = 5;
const ANSWER: Duration = Duration::from_secs(2);

/// Says `frozen` when it does, for so long from then on. Other CPUs go on, unless the emulator has to have all of them stand still for a
/// moment, for which they wait as well.
pub(crate) fn freeze(state: &State, cpu: u32, time: Duration) -> Result<()> {
    let told = Monitor::open(state)?.human("info cpus")?;
    let thread = thread_of(&told, cpu).with_context(|| format!("the lab's host has no CPU {cpu}: {told}"))?;
    let stopped = alone(state, thread)?;
    writeln!(io::stdout(), "frozen")?;
    std::thread::sleep(time);
    drop(stopped);
    Ok(())
}

/// A thread that holds no lock that others need: the emulator's great lock is a CPU's while it takes an interrupt, and the monitor has it to answer.
fn alone(state: &State, thread: libc::pid_t) -> Result<Stopped> {
    for _ in 0..TRIES {
        let stopped =
            Stopped::stop(thread).with_context(|| format!("the emulator's thread {thread} cannot be stopped"))?;
        if Monitor::open_within(state, ANSWER).is_ok() {
            return Ok(stopped);
        }
        drop(stopped);
        // It has something to answer first.
        Monitor::open(state)?;
    }
    bail!("the emulator's thread {thread} had a lock that others need each time that it was stopped, {TRIES} times")
}

/// In what the monitor says of its CPUs: `* CPU #0: thread_id=4711`.
fn thread_of(told: &str, cpu: u32) -> Option<libc::pid_t> {
    let its = format!("CPU #{cpu}:");
    let line = told.lines().find(|line| line.contains(&its))?;
    line.rsplit_once("thread_id=")?.1.trim().parse().ok()
}

/// A thread of another process that stands still.
struct Stopped(libc::pid_t);

impl Stopped {
    #[allow(unsafe_code, reason = "neither the standard library nor rustix has these calls")]
    fn stop(thread: libc::pid_t) -> io::Result<Self> {
        let nothing = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: 1. neither request has an address or data, so that no memory of this process or of the other one is read or written.
        result(unsafe { libc::ptrace(libc::PTRACE_SEIZE, thread, nothing, nothing) })?;
        let stopped = Self(thread);
        // SAFETY: as above.
        result(unsafe { libc::ptrace(libc::PTRACE_INTERRUPT, thread, nothing, nothing) })?;
        // SAFETY: 1. no status is asked for, so that nothing is written.
        let waited = unsafe { libc::waitpid(thread, std::ptr::null_mut(), libc::__WALL) };
        result(waited.into())?;
        Ok(stopped)
    }
}

impl Drop for Stopped {
    #[allow(unsafe_code, reason = "neither the standard library nor rustix has this call")]
    fn drop(&mut self) {
        let nothing = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: 1. as of the other requests. One that fails has no thread any more, and this process's end does the same.
        let _result = unsafe { libc::ptrace(libc::PTRACE_DETACH, self.0, nothing, nothing) };
    }
}

fn result(returned: libc::c_long) -> io::Result<()> {
    match returned {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::fs;
    use std::process::{Child, Command};

    #[test]
    fn threads_are_found_by_their_cpu() {
        let told = "* CPU #0: thread_id=4711\n  CPU #1: thread_id=4712\n  CPU #10: thread_id=4720\n";
        assert_eq!(thread_of(told, 1), Some(4712));
        assert_eq!(thread_of(told, 10), Some(4720));
        assert_eq!(thread_of(told, 2), None);
    }

    struct Killed(Child);

    impl Drop for Killed {
        fn drop(&mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    /// `T` of a stopped task, `t` of a traced one (proc_pid_stat(5)).
    fn state_of(pid: u32) -> char {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        stat.rsplit_once(')').unwrap().1.trim().chars().next().unwrap()
    }

    #[test]
    fn a_thread_stands_still_and_goes_on() {
        let child = Killed(Command::new("sleep").arg("1000").spawn().unwrap());
        let pid = child.0.id();
        let stopped = Stopped::stop(libc::pid_t::try_from(pid).unwrap()).unwrap();
        assert_eq!(state_of(pid), 't');
        drop(stopped);
        while state_of(pid) == 't' {
            std::thread::yield_now();
        }
    }
}
