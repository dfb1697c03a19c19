//! Processes that do nothing: machines, and servers of accelerators, by whose they are.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use agent_api::accelerator_state::{Asked, asked, tell_bytes, tell_end, tell_prepared};
use host::jail::{Child, Timing};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use wire::{FrameReader, FrameWriter};

use super::faults::Faults;

use crate::vmm::accelerator::Launched;
use crate::vmm::process;

/// What runs in a VMM's place.
pub(crate) const PROGRAM: &str = "/usr/bin/sleep";

/// All servers that were started.
#[derive(Debug, Default)]
pub(crate) struct Accelerators {
    started: Mutex<Vec<(String, OwnedFd)>>,
    /// States that some of them went on from.
    restored: Mutex<Vec<(String, Vec<u8>)>>,
    /// Where they were told that they are known.
    told: Mutex<Vec<UnixStream>>,
}

/// The call by which a server makes again what was saved, while its VMM does the same.
pub(crate) const RESTORE: &str = "restore accelerator";

/// What a server's state is here.
pub(crate) const STATE: &[u8] = b"objects";

/// Tells its state to whoever asks, unless that is to fail.
fn tell_states(socket: &Path, faults: Faults) {
    drop(std::fs::remove_file(socket));
    let listener = UnixListener::bind(socket).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let mut reader = FrameReader::new(stream.try_clone().unwrap());
            let writer = FrameWriter::new(stream);
            // Whoever asks may have gone.
            let asked = asked(&mut reader);
            if let Ok(Some(Asked::Prepare)) = asked {
                drop(match faults.call_host("prepare accelerator") {
                    Ok(()) => tell_prepared(&writer),
                    Err(error) => tell_end(&writer, Some(&error.to_string())),
                });
            }
            if let Ok(Some(Asked::Save(_))) = asked {
                let refused = faults
                    .call_host("save accelerator")
                    .err()
                    .map(|error| error.to_string());
                drop(tell_bytes(&writer, 0, STATE).and_then(|()| tell_end(&writer, refused.as_deref())));
            }
        }
    });
}

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
    pub(crate) fn launch(
        &self,
        (sandbox, socket): (&str, &Path),
        saved: Option<File>,
        (cgroup, faults): (Option<&Path>, Faults),
    ) -> Launched {
        let child = start(cgroup);
        let served = (sandbox.to_owned(), child.pidfd.try_clone().unwrap());
        self.started.lock().unwrap_or_else(PoisonError::into_inner).push(served);
        let restores = saved.map(|mut saved| {
            let mut state = Vec::new();
            saved.read_to_end(&mut state).unwrap();
            let (own, mut theirs) = UnixStream::pair().unwrap();
            match faults.call_host(RESTORE) {
                Ok(()) => {
                    let mut restored = self.restored.lock().unwrap_or_else(PoisonError::into_inner);
                    restored.push((sandbox.to_owned(), state));
                    theirs.write_all(b"restored\n").unwrap();
                }
                Err(error) => theirs.write_all(format!("lost {error}\n").as_bytes()).unwrap(),
            }
            self.told.lock().unwrap_or_else(PoisonError::into_inner).push(theirs);
            own
        });
        tell_states(socket, faults);
        Launched::of(child, restores)
    }

    /// Who went on from which state.
    pub(crate) fn restored(&self) -> Vec<(String, Vec<u8>)> {
        self.restored.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends those that serve a sandbox.
    pub(crate) fn kill(&self, sandbox: &str) {
        let all = self.started.lock().unwrap_or_else(PoisonError::into_inner);
        for (_, pidfd) in all.iter().filter(|(served, _)| served == sandbox) {
            process::kill(pidfd).unwrap();
            assert!(process::readable(pidfd, Duration::from_secs(90)));
        }
    }

    /// Whose accelerators are served.
    pub(crate) fn served(&self) -> Vec<String> {
        let all = self.started.lock().unwrap_or_else(PoisonError::into_inner);
        let alive = all
            .iter()
            .filter(|(_, pidfd)| !process::readable(pidfd, Duration::ZERO));
        alive.map(|(sandbox, _)| sandbox.clone()).collect()
    }
}
