//! CPUs that are sandboxes' as soon as they are asked for.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use host::cgroup::Cgroup;
use node_api::Class;
use reservation::ReservationError;

use super::faults::Faults;
use crate::resources::cpus::{Error, OwnedCpus};
use crate::store::database::Stored;

/// Which sandboxes have some.
#[derive(Debug)]
pub(crate) struct Cpus {
    faults: Faults,
    owners: Mutex<Owners>,
}

#[derive(Debug, Default)]
struct Owners {
    alive: BTreeSet<String>,
    /// Sandboxes that have ended, and whose CPUs could not be put back.
    ended: BTreeSet<String>,
}

impl Cpus {
    pub(crate) fn new(faults: Faults) -> Self {
        Self {
            faults,
            owners: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Owners> {
        self.owners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn owners(&self) -> BTreeSet<String> {
        self.lock().alive.clone()
    }

    /// Whoever has CPUs still without being there.
    pub(crate) fn ended_owners(&self) -> BTreeSet<String> {
        self.lock().ended.clone()
    }

    fn take(&self, stored: &Stored) -> Result<(), Error> {
        self.faults.call_host("CPUs").map_err(ReservationError::Call)?;
        let mut owners = self.lock();
        owners.ended.clear();
        owners.alive.insert(stored.sandbox.id.clone());
        Ok(())
    }
}

impl OwnedCpus for Cpus {
    fn cgroup_of_vmm(&self, stored: &Stored, cgroup: &Cgroup) -> Result<PathBuf, Error> {
        if stored.sandbox.config.resources.class == Class::Dedicated {
            self.take(stored)?;
        }
        Ok(cgroup.path().to_owned())
    }

    fn reserve(&self, stored: &Stored) -> Result<OwnedFd, Error> {
        self.take(stored)?;
        Ok(File::open("/dev/null").unwrap().into())
    }

    fn place_vcpus(&self, stored: &Stored, _: &Cgroup, _: u32, _: Duration) -> Result<(), Error> {
        self.faults.call_host("CPUs of vCPUs").map_err(ReservationError::Call)?;
        assert!(self.lock().alive.contains(&stored.sandbox.id), "it owns no CPUs");
        Ok(())
    }

    fn release(&self, sandbox: &str) {
        let refused = self.faults.call_host("CPUs release").is_err();
        let mut owners = self.lock();
        owners.ended.clear();
        if owners.alive.remove(sandbox) && refused {
            owners.ended.insert(sandbox.to_owned());
        }
    }

    fn sweep(&self) {
        self.lock().ended.clear();
    }
}
