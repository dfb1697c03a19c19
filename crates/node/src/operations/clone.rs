//! Clones: new sandboxes that go on from a snapshot, with everything outside of their own.
//!
//! ```text
//!  register ─► directory ─► cgroup, VMM ─► disk, network, sockets ─► VM restored ─► resumed ─► renewed
//! ```
//! What fails on the way takes a clone back as if it had never been asked for.

use std::sync::Arc;
use std::time::Duration;

use agent_api::Identity;
use base::points;
use node_api::portable::Kind;
use node_api::{CloneConfig, Paging, SandboxConfig};
use observe::span::{self, span};
use vmm_api::VmmClient;

use crate::Error;
use crate::guest::reidentify::Renewal;
use crate::node::Node;
use crate::operations::snapshot::of_all_memory;
use crate::operations::start::{Machine, Started, parse_ports};
use crate::resources::budget::Start;
use crate::resources::limits;
use crate::resources::volume_shares;
use crate::resources::volume_shares::Opened;
use crate::sandbox::entry::Entry;
use crate::saved::memory_files;
use crate::saved::prefetch;
use crate::saved::snapshots::{Place, Record};
use crate::vmm::launch;
use crate::vmm::vm::Vm;

/// How long each hook of an image may take when it was cloned or put back.
pub(crate) const HOOKS: Duration = Duration::from_secs(10);

/// A VMM that waits for a VM.
pub(crate) struct Waiting {
    vm: Arc<Vm>,
    pid: u32,
    /// What it will have of the host's directories.
    volumes: Vec<Opened>,
}

impl Node {
    /// Makes a sandbox that goes on from a snapshot.
    pub(crate) fn clone_of(self: &Arc<Self>, asked: CloneConfig) -> Result<Started, Error> {
        let looking = span("snapshot and image");
        asked.validate()?;
        let (place, record) = self.snapshot(&asked.snapshot)?;
        self.refuse_damaged(&place, &record.snapshot)?;
        let name = asked.name.clone();
        let config = configured(&record, asked)?;
        limits::check(&config, self.cgroups.as_ref())?;
        launch::check_paging(config.paging)?;
        // What is wrong with them is better said before anything is made.
        parse_ports(&config.ports)?;
        self.images.get(&record.snapshot.digest)?;
        self.require_space(&config.resources, Some(&place))?;
        drop(looking);
        if record.networked {
            let _span = span("network set-up");
            self.network()?;
        }
        let Record {
            snapshot,
            command,
            networked,
            share_slots,
        } = record;
        let mut stored = crate::operations::start::new_sandbox(config, snapshot.digest, command, networked)?;
        let snapshot_name = snapshot.name;
        stored.sandbox.clone_of = Some(snapshot_name.clone());
        stored.share_slots = share_slots;
        let identity = Some(crate::operations::start::identity(&stored)?);
        let admitted = self.admit(&stored, name.as_deref(), Start::Restore)?;
        let entry = self.register(stored, name.as_deref())?;
        admitted.give(&entry);
        span::attribute("basalt.sandbox", entry.id.as_str());
        let _operation = entry.operate();
        let started = self
            .create(&entry)
            .and_then(|()| self.begin_restore(&entry))
            .and_then(|waiting| self.make_disk(&entry, Some(&place)).map(|()| waiting))
            .and_then(|waiting| self.restore_vm(&entry, waiting, &place, identity));
        if started.is_ok() {
            self.verify_later(Kind::Snapshot, &snapshot_name, &place);
        }
        started.map_err(|error| error.after_undo(self.destroy(&entry)))
    }

    /// Starts the VMM of a sandbox that is to be restored. Whatever else it needs is made afterwards, beside it: a VMM has to confine
    /// itself, which takes as long.
    pub(crate) fn begin_restore(&self, entry: &Entry) -> Result<Waiting, Error> {
        let stored = entry.stored();
        let (volumes, inherited) = {
            let _span = span("volumes and control socket");
            let volumes = self.open_volumes(&stored.sandbox.config.volumes)?;
            let inherited = launch::Inherited::to_restore(&self.config, &stored, &self.sandbox_paths(entry))?;
            (volumes, inherited)
        };
        let (vm, pid) = self.spawn(entry, &stored, &inherited, &volumes)?;
        // With this copy of its control socket open, a VMM that has died already would be waited for.
        drop(inherited);
        Ok(Waiting { vm, pid, volumes })
    }

    /// Everything from a disk that is there and a VMM that waits to a sandbox that runs.
    pub(crate) fn restore_vm(
        &self,
        entry: &Arc<Entry>,
        waiting: Waiting,
        place: &Place,
        identity: Option<Identity>,
    ) -> Result<Started, Error> {
        let renewal = Renewal {
            identity,
            hooks: HOOKS,
            restored: true,
            ..Renewal::default()
        };
        let (vm, _) = self.restored(entry, waiting, place, renewal)?;
        let sandbox = self.runs(entry, &vm)?;
        Ok(Started { sandbox, command: None })
    }

    /// Everything from a disk that is there and a VMM that waits to a machine that goes on, as one of its own.
    pub(crate) fn restored(
        &self,
        entry: &Arc<Entry>,
        waiting: Waiting,
        place: &Place,
        renewal: Renewal,
    ) -> Result<Machine, Error> {
        let Waiting { vm, pid, volumes } = waiting;
        let stored = entry.stored();
        let attachment = {
            let _span = span("network");
            self.attach(&stored)?
        };
        self.points.at(points::START_NETWORK);
        let mut restoring = {
            let _span = span("sockets and files");
            let (paths, image) = (self.sandbox_paths(entry), self.image_of(&stored)?);
            let restoring = launch::prepare_restore(&self.config, &stored, &paths, (&image, attachment), place)?;
            restoring.told_if(renewal.restored)
        };
        self.points.at(points::START_SOCKETS);
        // As where it boots.
        let shared = volume_shares::share(&volumes, pid, launch::identity(&self.config, &stored))
            .map_err(|error| vm.or_died("it was given its volumes", error))?;
        restoring.share(shared, stored.share_slots)?;
        {
            let _span = span("VM restored");
            let limit = match stored.sandbox.config.paging {
                Paging::Mapped | Paging::OnDemand => self.config.limits.boot,
                Paging::Eager => self.config.limits.boot + of_all_memory(&stored),
            };
            vm.restore(restoring, limit)?;
        }
        self.place_vcpus(entry, pid)?;
        self.points.at(points::RESTORE_MADE);
        {
            let _span = span("VM started");
            vm.ask("it was resumed from a snapshot", VmmClient::resume)?;
        }
        self.points.at(points::RESTORE_RESUMED);
        let agent = {
            let _span = span("guest renewed");
            self.renew(&vm, renewal)?
        };
        self.points.at(points::RESTORE_RENEWED);
        prefetch::keep_first(place, &vm, stored.sandbox.config.paging);
        // The next snapshot of it needs to have only what it changes.
        if let Err(error) = memory_files::share(place.directory(), &self.sandbox_paths(entry).directory) {
            log::warn!("the next snapshot of sandbox {} will be a whole one: {error}", entry.id);
        }
        crate::telemetry::trace::vmm(&vm);
        Ok((vm, agent))
    }
}

/// A clone's configuration: the snapshot's, but for what is its own outside.
fn configured(record: &Record, asked: CloneConfig) -> Result<SandboxConfig, Error> {
    let of = record.snapshot.config.clone();
    let mut labels = of.labels;
    labels.extend(asked.labels);
    if !record.networked && !asked.ports.is_empty() {
        return Err(node_api::ConfigError::Ports.into());
    }
    let config = SandboxConfig {
        name: asked.name,
        hostname: asked.hostname,
        ports: asked.ports,
        paging: asked.paging,
        remove: asked.remove,
        detach: true,
        labels,
        ..of
    };
    config.validate()?;
    Ok(config)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use node_api::{NetworkMode, Programs, Snapshot};

    use super::*;
    use crate::testing::stored;

    #[test]
    fn a_clone_has_outside_what_it_asks_for_and_inside_what_was() {
        let stored = stored("aaaaaaaaaaaa", "web");
        let mut config = stored.sandbox.config;
        (config.network, config.hostname) = (NetworkMode::Auto, Some("web".into()));
        (config.remove, config.ports) = (true, vec!["80:80".into()]);
        config.labels = BTreeMap::from([("a".into(), "1".into()), ("b".into(), "1".into())]);
        let mut record = Record {
            snapshot: Snapshot {
                name: "web-1".into(),
                created_ns: 1,
                sandbox: stored.sandbox.id,
                sandbox_name: stored.sandbox.name,
                config,
                digest: stored.sandbox.digest,
                programs: Programs::default(),
                bytes: 0,
                damaged: None,
            },
            command: stored.command,
            networked: true,
            share_slots: 0,
        };
        let asked = CloneConfig {
            snapshot: "web-1".into(),
            name: Some("twin".into()),
            ports: vec!["81:80".into()],
            labels: BTreeMap::from([("b".into(), "2".into())]),
            ..CloneConfig::default()
        };
        let made = configured(&record, asked.clone()).unwrap();
        assert_eq!(
            (made.name.as_deref(), made.hostname, made.remove),
            (Some("twin"), None, false)
        );
        assert_eq!((made.ports, made.detach), (vec!["81:80".to_owned()], true));
        assert_eq!((made.labels["a"].as_str(), made.labels["b"].as_str()), ("1", "2"));
        assert_eq!(made.resources, record.snapshot.config.resources);
        record.networked = false;
        assert!(configured(&record, asked).is_err(), "a port of no network");
    }
}
