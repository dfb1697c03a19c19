//! The time of the host's accelerators, divided by one arbiter between the sandboxes that have one (docs/accel-sharing.md). All servers of
//! OpenCL share: which of the host's devices a program takes is its own affair.
//!
//! ```text
//!   a server is launched, or found running ── admitted: run/ID/arbiter/socket listens ── its machine ends ── dismissed
//! ```
//!
//! Servers look for the socket at the same place again and again, so that one whose daemon has died is divided by the next daemon's
//! arbiter. Knows no server's process.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{PermissionsExt, chown};
use std::sync::{Mutex, MutexGuard, PoisonError};

use accel_arbiter::{Arbiter, DEFAULT_WEIGHT, Priority, Report, Share};
use host::jail::Identity;
use node_api::{Accelerator, AcceleratorApi, AcceleratorPriority};
use rustix::net::SocketType;

use crate::Error;
use crate::store::database::Stored;
use crate::store::paths::SandboxPaths;
use crate::vmm::files;

/// Who divides the time, from the first sandbox on that has a part of it.
#[derive(Debug, Default)]
pub(crate) struct Accelerators(Mutex<Option<Arbiter>>);

impl Accelerators {
    /// Has a sandbox have its part, if its accelerator takes time. Its server finds a socket that it can connect to, also where it is
    /// another user.
    pub(crate) fn admit(&self, stored: &Stored, paths: &SandboxPaths, identity: Option<Identity>) -> Result<(), Error> {
        let Some(share) = stored.sandbox.config.accelerator.and_then(share) else {
            return Ok(());
        };
        let mut arbiter = self.arbiter();
        let arbiter = match &mut *arbiter {
            Some(arbiter) => arbiter,
            none => none.insert(Arbiter::start().map_err(|error| {
                let error = io::Error::other(error);
                Error::host("dividing an accelerator's time")(error)
            })?),
        };
        arbiter.admit_on(&stored.sandbox.id, share, || listen(paths, identity))
    }

    /// It has none any more. It is fine if it had none.
    pub(crate) fn dismiss(&self, sandbox: &str) {
        if let Some(arbiter) = &*self.arbiter() {
            arbiter.dismiss(sandbox);
        }
    }

    /// All that have a part, by their ids: which, and what they have used of the time since they were admitted.
    pub(crate) fn report(&self) -> BTreeMap<String, Report> {
        self.arbiter().as_ref().map(Arbiter::report).unwrap_or_default()
    }

    fn arbiter(&self) -> MutexGuard<'_, Option<Arbiter>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Its part of the time; none of one that takes none.
fn share(accelerator: Accelerator) -> Option<Share> {
    match accelerator.api {
        AcceleratorApi::Null => None,
        AcceleratorApi::Opencl | AcceleratorApi::Reference => Some(Share {
            weight: accelerator.share.unwrap_or(DEFAULT_WEIGHT),
            priority: match accelerator.priority {
                Some(AcceleratorPriority::Low) => Priority::Low,
                Some(AcceleratorPriority::High) | None => Priority::High,
            },
        }),
    }
}

/// A socket in a directory of its own, both for one user alone: its server's.
fn listen(paths: &SandboxPaths, identity: Option<Identity>) -> Result<OwnedFd, Error> {
    let (directory, path) = (paths.arbiter(), paths.arbiter_socket());
    match fs::create_dir(&directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(Error::file("make", &directory)(error));
        }
        _ => (),
    }
    let socket = files::listen(&path, SocketType::SEQPACKET)?;
    rustix::io::ioctl_fionbio(&socket, true).map_err(Error::file("listen at", &path))?;
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o700))
        .map_err(Error::file("change the mode of", &directory))?;
    if let Some(Identity { uid, gid, .. }) = identity {
        for path in [&directory, &path] {
            chown(path, Some(uid), Some(gid)).map_err(Error::file("change the owner of", path))?;
        }
    }
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::time::{Duration, Instant};

    use accel_arbiter::Gate;

    use super::*;
    use crate::store::paths::Paths;

    fn stored(accelerator: &str) -> Stored {
        let mut stored = crate::testing::stored("aaaaaaaaaaaa", "web");
        stored.sandbox.config.accelerator = Some(accelerator.parse().unwrap());
        stored
    }

    fn until(what: &str, holds: impl Fn() -> bool) {
        let begin = Instant::now();
        while !holds() {
            assert!(begin.elapsed() < Duration::from_secs(30), "never {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn paths(directory: &tempfile::TempDir) -> SandboxPaths {
        let paths = Paths::new(directory.path().to_owned()).sandbox("aaaaaaaaaaaa");
        fs::create_dir_all(&paths.run).unwrap();
        paths
    }

    #[test]
    fn a_server_has_the_part_that_was_asked_for_from_each_daemon_that_finds_it() {
        let directory = tempfile::tempdir().unwrap();
        let (paths, stored) = (paths(&directory), stored("opencl:share=300,priority=low"));
        let accelerators = Accelerators::default();
        accelerators.admit(&stored, &paths, None).unwrap();
        let gate = Gate::new(&paths.arbiter_socket()).unwrap();
        let is_connected = |accelerators: &Accelerators| {
            let report = accelerators.report();
            report.values().any(|report| report.is_connected)
        };
        until("connected", || is_connected(&accelerators) && gate.is_linked());
        let report = accelerators.report().remove("aaaaaaaaaaaa").unwrap();
        let expected = Share {
            weight: 300,
            priority: Priority::Low,
        };
        assert_eq!(report.share, expected);
        // Admitted again by the same daemon, it stays connected.
        accelerators.admit(&stored, &paths, None).unwrap();
        assert!(is_connected(&accelerators) && gate.is_linked());
        drop(accelerators);
        until("alone", || !gate.is_linked());
        let next = Accelerators::default();
        next.admit(&stored, &paths, None).unwrap();
        until("connected again", || is_connected(&next) && gate.is_linked());
        next.dismiss("aaaaaaaaaaaa");
        until("let go", || !gate.is_linked());
        assert!(next.report().is_empty());
    }

    #[test]
    fn the_socket_is_for_the_servers_user_alone() {
        let directory = tempfile::tempdir().unwrap();
        let paths = paths(&directory);
        let identity = host::jail::Pool::default().identity(3).unwrap();
        Accelerators::default()
            .admit(&stored("opencl"), &paths, Some(identity))
            .unwrap();
        for (path, mode) in [(paths.arbiter(), 0o700), (paths.arbiter_socket(), 0o600)] {
            let metadata = fs::metadata(&path).unwrap();
            assert_eq!((metadata.uid(), metadata.gid()), (identity.uid, identity.gid));
            assert_eq!(metadata.mode() & 0o7777, mode, "{}", path.display());
        }
        // Nothing else is where a server in a jail can look.
        assert_eq!(fs::read_dir(paths.arbiter()).unwrap().count(), 1);
    }

    #[test]
    fn one_that_takes_no_time_has_no_part_and_one_that_cannot_be_had_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let paths = paths(&directory);
        let accelerators = Accelerators::default();
        accelerators.admit(&stored("null"), &paths, None).unwrap();
        assert!(accelerators.report().is_empty() && !paths.arbiter().exists());
        let default = share("opencl".parse().unwrap()).unwrap();
        assert_eq!(
            (default.weight, default.priority),
            (node_api::accelerator::SHARE, Priority::High)
        );
        fs::remove_dir(&paths.run).unwrap();
        let error = accelerators.admit(&stored("opencl"), &paths, None).unwrap_err();
        assert!(error.to_string().contains("run/aaaaaaaaaaaa/arbiter"), "{error}");
        assert!(accelerators.report().is_empty());
    }
}
