//! Clones: new sandboxes that go on from a snapshot, with everything outside of their own.
//!
//! ```text
//!  register ─► directory ─► VMM ─► disk ─► restored ─► goes on
//! ```
//! What fails on the way takes a clone back (`undo`) as if it had never been asked for.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use agent_api::Identity;
use base::Egress;
use node_api::transfer::Kind;
use node_api::{CloneConfig, NetworkMode, SandboxConfig, VolumeMount};
use observe::span::{self, span};

use crate::Error;
use crate::error::words::fewer_volumes;
use crate::guest::reidentify::{Own, Reidentification, shared_directories};
use crate::node::Node;
use crate::operations::stages::{Started, ToRestore};
use crate::operations::start::parse_ports;
use crate::resources::budget::Start;
use crate::resources::limits;
use crate::sandbox::command;
use crate::saved::snapshots::Record;
use crate::vmm::launch;

/// How long each hook of an image may take when it was cloned or put back.
pub(crate) const HOOKS: Duration = Duration::from_secs(10);

impl Node {
    /// Makes a sandbox that goes on from a snapshot.
    pub(crate) fn clone_of(self: &Arc<Self>, asked: CloneConfig) -> Result<Started, Error> {
        let looking = span("snapshot and image");
        asked.validate()?;
        let (place, record) = self.snapshots.get(&asked.snapshot)?;
        self.refuse_damaged(&place, &record.snapshot)?;
        let name = asked.name.clone();
        let sets_process = !asked.env.is_empty() || asked.workdir.is_some() || asked.user.is_some();
        let own = Own {
            shared_directories: shared_directories(&asked.volumes),
            ..Own::default()
        };
        let config = configured(&record, asked)?;
        limits::check(&config, self.cgroups.as_ref())?;
        launch::check_paging(config.paging)?;
        // What is wrong with them is better said before anything is made.
        parse_ports(&config.ports)?;
        let image = self.images.get(&record.snapshot.digest)?;
        self.require_space(&config.resources, Some(&place))?;
        drop(looking);
        if record.networked {
            let _span = span("network set-up");
            self.network.get()?;
        }
        let Record {
            snapshot,
            mut command,
            networked,
            share_slots,
        } = record;
        if snapshot.config.process.device_env > 0 || sets_process {
            let made = command::command(&image.config, &config.process)?;
            (command.env, command.cwd, command.user) = (made.env, made.cwd, made.user);
        }
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
        let started = self.carry_out(&entry, || {
            self.create(&entry)?;
            let waiting = ToRestore::launch(self, &entry, &place)?;
            self.make_disk(&entry, Some(&place))?;
            let now = Reidentification {
                own,
                ..another(identity)
            };
            let restored = waiting.restore(self, &entry, &place, now)?;
            restored.go_on(self, &entry, &place)?.runs(self, &entry)
        })?;
        self.follow_found(&entry);
        self.verify_later(Kind::Snapshot, &snapshot_name, &place);
        Ok(started)
    }
}

/// What a machine gets that goes on from a snapshot: who it is, if it is another one.
pub(crate) fn another(identity: Option<Identity>) -> Reidentification {
    Reidentification {
        identity,
        hooks: HOOKS,
        restored: true,
        ..Reidentification::default()
    }
}

/// A clone's configuration: the snapshot's, but for what is its own outside.
fn configured(record: &Record, asked: CloneConfig) -> Result<SandboxConfig, Error> {
    let of = record.snapshot.config.clone();
    let mut labels = match asked.only_labels {
        true => BTreeMap::new(),
        false => of.labels,
    };
    labels.extend(asked.labels);
    if !record.networked && !asked.ports.is_empty() {
        return Err(node_api::ConfigError::Ports.into());
    }
    let volumes = match asked.volumes.is_empty() {
        true => of.volumes,
        false => added_volumes(record, asked.volumes)?,
    };
    let mut process = of.process;
    process.set_device_env(Vec::new());
    process.env.extend(asked.env);
    process.workdir = asked.workdir.or(process.workdir);
    process.user = asked.user.or(process.user);
    let config = SandboxConfig {
        process,
        name: asked.name,
        hostname: asked.hostname,
        ports: asked.ports,
        // Without a network it has none of this either.
        egress: match of.network {
            NetworkMode::None => Egress::default(),
            NetworkMode::Auto | NetworkMode::Node => asked.egress.unwrap_or(of.egress),
        },
        paging: asked.paging,
        // They are those of what it is a clone of, which may have them still.
        devices: Vec::new(),
        cdi_devices: Vec::new(),
        device_start: None,
        memory_ready: false,
        remove: asked.remove,
        detach: true,
        labels,
        time_limit: asked.time_limit.or(of.time_limit),
        volumes,
        ..of
    };
    config.validate()?;
    Ok(config)
}

/// Volumes for a clone of what had none.
fn added_volumes(record: &Record, asked: Vec<VolumeMount>) -> Result<Vec<VolumeMount>, Error> {
    let snapshot = &record.snapshot;
    if !snapshot.config.volumes.is_empty() {
        return Err(Error::Invalid(format!(
            "clones of the snapshot `{}` have its volumes, and no others: leave them out",
            snapshot.name
        )));
    }
    match asked.len() <= record.share_slots {
        true => Ok(asked),
        false => Err(Error::Invalid(format!(
            "a clone of the snapshot `{}` can have {}",
            snapshot.name,
            fewer_volumes(record.share_slots)
        ))),
    }
}

#[cfg(test)]
mod tests {
    use node_api::{Programs, Snapshot};

    use super::*;
    use crate::testing::stored;

    #[test]
    fn a_clone_has_outside_what_it_asks_for_and_inside_what_was() {
        let stored = stored("aaaaaaaaaaaa", "web");
        let mut config = stored.sandbox.config;
        (config.network, config.hostname) = (NetworkMode::Auto, Some("web".into()));
        (config.remove, config.ports) = (true, vec!["80:80".into()]);
        config.egress = Egress::nothing();
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
            user: Some("web".into()),
            ..CloneConfig::default()
        };
        let of = &mut record.snapshot.config.process;
        (of.workdir, of.user) = (Some("/srv".into()), Some("root".into()));
        let made = configured(&record, asked.clone()).unwrap();
        assert_eq!(
            (made.name.as_deref(), made.hostname, made.remove),
            (Some("twin"), None, false)
        );
        assert_eq!((made.ports, made.detach), (vec!["81:80".to_owned()], true));
        assert_eq!((made.labels["a"].as_str(), made.labels["b"].as_str()), ("1", "2"));
        assert_eq!(made.resources, record.snapshot.config.resources);
        assert!(made.egress.is_nothing(), "it may send where the snapshot's may not");
        let freed = CloneConfig {
            egress: Some(Egress::default()),
            ..asked.clone()
        };
        assert!(configured(&record, freed).unwrap().egress.is_empty());
        record.snapshot.config.network = NetworkMode::None;
        let without = CloneConfig {
            ports: Vec::new(),
            egress: Some(Egress::nothing()),
            ..asked.clone()
        };
        assert!(configured(&record, without).unwrap().egress.is_empty());
        record.snapshot.config.network = NetworkMode::Auto;
        assert_eq!(
            (made.process.workdir.as_deref(), made.process.user.as_deref()),
            (Some("/srv"), Some("web"))
        );
        record.networked = false;
        assert!(configured(&record, asked.clone()).is_err(), "a port of no network");
        record.networked = true;
        let with_volume = CloneConfig {
            volumes: vec!["cache:/c".parse().unwrap()],
            ..asked
        };
        let refused = configured(&record, with_volume.clone()).unwrap_err();
        assert!(refused.to_string().contains("no volumes"), "{refused}");
        record.share_slots = 2;
        let made = configured(&record, with_volume.clone()).unwrap();
        assert_eq!(made.volumes, with_volume.volumes);
        record.snapshot.config.volumes = vec!["other:/o".parse().unwrap()];
        assert!(configured(&record, with_volume).is_err(), "it has others");
    }
}
