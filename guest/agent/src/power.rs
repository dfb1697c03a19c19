//! The end of the machine: all processes, then what is unwritten, then the power. Only PID 1 may own a [`Power`].

use std::thread;
use std::time::{Duration, Instant};

use agent_api::{PowerAction, Shutdown};
use rustix::system::{RebootCommand, reboot};

use crate::{Error, say};

/// How often the end of the processes is looked for.
const STEP: Duration = Duration::from_millis(10);

/// How long killed processes may take to go before the power goes anyway.
const KILL_WAIT: Duration = Duration::from_secs(5);

/// The right to end the machine, and what to do just before (unmount disks, for instance).
pub struct Power {
    before: Box<dyn Fn() + Send + Sync>,
    /// Only this process ends.
    instead: bool,
}

impl Power {
    /// For PID 1 only: ending the machine kills every process there is. `before` runs when they are gone.
    pub fn of_pid1(before: impl Fn() + Send + Sync + 'static) -> Result<Self, Error> {
        if std::process::id() != 1 {
            return Err(Error::Refused("only PID 1 may end the machine".to_owned()));
        }
        Ok(Self {
            before: Box::new(before),
            instead: false,
        })
    }

    /// Where a process stands for a machine, as in tests: `end` ends it, and no process is killed.
    pub fn of_process(end: impl Fn() + Send + Sync + 'static) -> Self {
        Self {
            before: Box::new(end),
            instead: true,
        }
    }

    /// Ends the machine; returns only if the kernel refuses.
    pub(crate) fn end<T>(&self, shutdown: Shutdown) -> Result<T, Error> {
        if self.instead {
            (self.before)();
            return Err(Error::Refused(
                "the process that stands for a machine goes on".to_owned(),
            ));
        }
        if shutdown.grace_ms > 0 {
            kill_all(libc::SIGTERM);
            wait_for_all(Duration::from_millis(u64::from(shutdown.grace_ms)));
        }
        kill_all(libc::SIGKILL);
        wait_for_all(KILL_WAIT);
        (self.before)();
        leave(shutdown.how)
    }
}

/// Writes everything back and ends the machine at once; returns only if the kernel refuses.
fn leave<T>(how: PowerAction) -> Result<T, Error> {
    rustix::fs::sync();
    let command = match how {
        PowerAction::PowerOff => RebootCommand::PowerOff,
        PowerAction::Reboot => RebootCommand::Restart,
    };
    let result = reboot(command);
    Err(Error::system("ending the machine")(
        result.err().unwrap_or(rustix::io::Errno::IO),
    ))
}

/// For PID 1 that cannot go on: says why and powers off, or reboots if that fails; a kernel panic would hide the reason.
pub fn fatal(reason: &dyn std::fmt::Display) -> ! {
    say(format_args!("cannot go on, powering off: {reason}"));
    for how in [PowerAction::PowerOff, PowerAction::Reboot] {
        let Err(error) = leave::<std::convert::Infallible>(how);
        say(format_args!("{error}"));
    }
    // Nothing is left but to wait for somebody to look at the console.
    loop {
        thread::park();
    }
}

/// Sends a signal to every process but this one, which is PID 1.
fn kill_all(number: i32) {
    // SAFETY: 1. kill(2) touches no memory. Fails only if there is no other process.
    unsafe { libc::kill(-1, number) };
}

/// Waits until this process has no child: PID 1 is an ancestor of all.
fn wait_for_all(limit: Duration) {
    let end = Instant::now() + limit;
    while has_children() && Instant::now() < end {
        thread::sleep(STEP);
    }
}

fn has_children() -> bool {
    // SAFETY: 1. A null pointer is allowed for the information that is not wanted (waitid(2), Linux).
    let result = unsafe {
        libc::waitid(
            libc::P_ALL,
            0,
            std::ptr::null_mut(),
            libc::WEXITED | libc::WNOWAIT | libc::WNOHANG,
        )
    };
    result == 0
}
