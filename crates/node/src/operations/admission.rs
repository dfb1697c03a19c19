//! What a sandbox is promised of the host, and when: before it is known, before a machine of it is started, and again when a daemon
//! finds it. Knows which operation needs what; the numbers are `resources::budget`'s.

use std::sync::Arc;

use base::ByteSize;
use node_api::{SandboxConfig, State};

use crate::Error;
use crate::node::Node;
use crate::resources::budget::{Changed, Lease, Promise, Start, TO_ASK, Wish};
use crate::sandbox::entry::Entry;
use crate::store::database::Stored;

/// What a sandbox is promised that is not known yet.
#[derive(Debug)]
pub(crate) struct Admitted {
    machine: Promise,
    disk: Option<Promise>,
}

impl Node {
    /// Promises a new sandbox its machine and its disk. `name` is the one that was asked for.
    pub(crate) fn admit(&self, stored: &Stored, name: Option<&str>, start: Start) -> Result<Admitted, Error> {
        let (wish, config) = (Wish::new("run", name), &stored.sandbox.config);
        let machine = self.budget.machine(&wish, config, start)?;
        let path = self.paths.sandbox(&stored.sandbox.id).disk();
        let disk = config.resources.disk.map(|size| self.budget.disk(&wish, size, &path));
        Ok(Admitted {
            machine,
            disk: disk.transpose()?,
        })
    }

    /// Promises a sandbox that has ended a machine; it gets it by `Entry::promise`. One that has a machine keeps what that was promised.
    pub(crate) fn admit_again(&self, verb: &str, entry: &Entry, start: Start) -> Result<Arc<Promise>, Error> {
        if let Some(promise) = entry.promised() {
            return Ok(promise);
        }
        let mut sandbox = entry.stored().sandbox;
        if sandbox.state == State::Exited {
            sandbox.config.resources = sandbox.config.resources.holding(ByteSize(0));
        }
        let wish = Wish::new(verb, Some(&sandbox.name));
        Ok(Arc::new(self.budget.machine(&wish, &sandbox.config, start)?))
    }

    /// A sandbox boots, which needs more than to be cloned.
    pub(crate) fn admit_boot(&self, entry: &Entry, stored: &Stored) -> Result<(), Error> {
        let verb = if stored.sandbox.restarts == 0 { "run" } else { "start" };
        let (name, config) = (&stored.sandbox.name, &stored.sandbox.config);
        match entry.promised() {
            Some(promise) => Ok(promise.change(&Wish::new(verb, Some(name)), config, Start::Boot)?),
            None => {
                entry.promise(self.admit_again(verb, entry, Start::Boot)?);
                Ok(())
            }
        }
    }

    /// Promises a sandbox that its machine has another configuration, if it has one; or that another machine has it, which comes up this way.
    pub(crate) fn admit_other(
        &self,
        verb: &str,
        entry: &Entry,
        config: &SandboxConfig,
        start: Option<Start>,
    ) -> Result<Changed, Error> {
        let stored = entry.stored();
        let promise = self.admit_again(verb, entry, comes_by(&stored))?;
        let wish = Wish::new(verb, Some(&stored.sandbox.name));
        Ok(Changed::new(promise, &wish, config, start)?)
    }

    /// Promises a sandbox that runs, if it does, that it can boot in place of what it is.
    pub(crate) fn admit_restart(&self, entry: &Entry) -> Result<Option<Changed>, Error> {
        let Some(promise) = entry.promised() else {
            return Ok(None);
        };
        let sandbox = entry.stored().sandbox;
        let wish = Wish::new("restart", Some(&sandbox.name));
        Ok(Some(Changed::new(promise, &wish, &sandbox.config, Some(Start::Boot))?))
    }

    /// Promises a sandbox all memory of its machine as its own, if it shares any with others: what a device is to reach is copied for it,
    /// and stays so when the device has gone.
    pub(crate) fn admit_private(&self, entry: &Entry) -> Result<Option<Changed>, Error> {
        let Some(promise) = entry.promised() else {
            return Ok(None);
        };
        let sandbox = entry.stored().sandbox;
        if sandbox.config.resources.guest_iommu {
            // Nothing is copied but what its guest maps for the device.
            return Ok(None);
        }
        let wish = Wish::new("attach a device to", Some(&sandbox.name));
        Ok(Changed::to_private(promise, &wish, &sandbox.config)?)
    }

    /// Descriptors to deal with the end of a sandbox: when many end at once they take turns. What is not had in time is tried without.
    pub(crate) fn lease_to_settle(&self, id: &str) -> Option<Lease> {
        let leased = self.budget.lease(&Wish::request(), TO_ASK, self.config.limits.kill);
        let leased = leased.inspect_err(|error| log::warn!("the end of sandbox {id} waits no longer: {error}"));
        leased.ok()
    }

    /// Counts what a sandbox has that is there already, whatever there is room for.
    pub(crate) fn count(&self, entry: &Entry) {
        let stored = entry.stored();
        let config = &stored.sandbox.config;
        if let Some(size) = config.resources.disk {
            entry.promise_disk(self.budget.count_disk(size, &self.sandbox_paths(entry).disk()));
        }
        if !stored.sandbox.state.is_off() {
            let stored = self.as_noted_now(entry, stored);
            let promise = self.budget.count_machine(&stored.sandbox.config, comes_by(&stored));
            entry.promise(Arc::new(promise));
        }
    }
}

impl Node {
    /// Daemons of before did not note that all memory of one that has devices is its own, which it stays.
    fn as_noted_now(&self, entry: &Entry, stored: Stored) -> Stored {
        let has_devices = !self.devices.of(&entry.id).is_empty();
        if !has_devices || stored.memory_is_private || stored.sandbox.config.resources.guest_iommu {
            return stored;
        }
        if let Err(error) = self.note_change(entry, |stored| stored.memory_is_private = true) {
            log::warn!("the record of sandbox {} is written later: {error}", entry.id);
        }
        entry.stored()
    }
}

impl Admitted {
    /// It is known: it has this until its machine, or all of it, is gone.
    pub(crate) fn give(self, entry: &Entry) {
        entry.promise(Arc::new(self.machine));
        if let Some(disk) = self.disk {
            entry.promise_disk(disk);
        }
    }
}

/// How the machine that a sandbox has came up, as far as its record tells. One that was put back counts as if it had booted, and so does one
/// that shares nothing any more.
pub(crate) fn comes_by(stored: &Stored) -> Start {
    let sandbox = &stored.sandbox;
    let is_restored = sandbox.template.is_some() || sandbox.clone_of.is_some() && sandbox.restarts == 0;
    match is_restored && !stored.memory_is_private {
        true => Start::Restore,
        false => Start::Boot,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::stored;

    #[test]
    fn a_clone_is_one_until_it_boots() {
        let mut stored = stored("aaaaaaaaaaaa", "web");
        assert_eq!(comes_by(&stored), Start::Boot);
        stored.sandbox.clone_of = Some("web-1".into());
        assert_eq!(comes_by(&stored), Start::Restore);
        stored.sandbox.restarts = 1;
        assert_eq!(comes_by(&stored), Start::Boot);
        stored.sandbox.template = Some("built".into());
        assert_eq!(comes_by(&stored), Start::Restore);
        stored.memory_is_private = true;
        assert_eq!(comes_by(&stored), Start::Boot);
    }
}
