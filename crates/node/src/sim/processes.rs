//! Processes that do nothing: machines, and servers of accelerators, by whose they are.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use host::jail::{Child, Timing};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::vmm::accelerator::Launched;
use crate::vmm::process;

/// What runs in a VMM's place.
pub(crate) const PROGRAM: &str = "/usr/bin/sleep";

/// All servers that were started.
#[derive(Debug, Default)]
pub(crate) struct Accelerators(Mutex<Vec<(String, OwnedFd)>>);

/// Starts a process.
pub(crate) fn start(cgroup: Option<&Path>) -> Child {
    let mut command = Command::new(PROGRAM);
    command.arg("600").stdin(Stdio::null()).stdout(Stdio::null());
    let pid = command.spawn().unwrap().id();
    if let Some(cgroup) = cgroup {
        std::fs::write(cgroup.join("cgroup.procs"), pid.to_string()).unwrap();
    }
    let number = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    Child {
        pidfd: pidfd_open(number, PidfdFlags::empty()).unwrap(),
        pid,
        timing: Timing::default(),
    }
}

impl Accelerators {
    pub(crate) fn launch(&self, sandbox: &str, cgroup: Option<&Path>) -> Launched {
        let child = start(cgroup);
        let served = (sandbox.to_owned(), child.pidfd.try_clone().unwrap());
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(served);
        Launched::of(child)
    }

    /// Ends those that serve a sandbox.
    pub(crate) fn kill(&self, sandbox: &str) {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (_, pidfd) in all.iter().filter(|(served, _)| served == sandbox) {
            process::kill(pidfd).unwrap();
            assert!(process::readable(pidfd, Duration::from_secs(90)));
        }
    }

    /// Whose accelerators are served.
    pub(crate) fn served(&self) -> Vec<String> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let alive = all
            .iter()
            .filter(|(_, pidfd)| !process::readable(pidfd, Duration::ZERO));
        alive.map(|(sandbox, _)| sandbox.clone()).collect()
    }
}
