//! `basalt snapshot`, `clone` and `rollback`: each verb asks the daemon and shows what it says.

use anyhow::{Result, bail};
use base::ByteSize;
use node_api::message::Item;
use node_api::transfer::Kind;
use node_api::{
    Client, CloneConfig, MoveConfig, Reply, Request, RollbackConfig, Secrets as _, Snapshot, SnapshotConfig,
};

use crate::asked;
use crate::cli::{CloneArgs, CreateArgs, InspectSnapshotsArgs, MoveArgs, RollbackArgs, SnapshotVerb};
use crate::daemon;
use crate::output::{Output, table};
use crate::sandboxes::ago;
use crate::transfer;
use crate::verify;

/// `basalt snapshot ...`.
pub(crate) fn snapshot(verb: &SnapshotVerb, output: &Output) -> Result<u8> {
    match verb {
        SnapshotVerb::Create(args) => create(args, output),
        SnapshotVerb::Ls => list(output),
        SnapshotVerb::Inspect(args) => inspect(args, output),
        SnapshotVerb::Rm(args) => {
            let remove = |name| Request::RemoveSnapshot { name };
            daemon::ask_for_each(&args.names, output, remove)
        }
        SnapshotVerb::Verify(args) => {
            let mut client = daemon::connect()?;
            let names = match args.all {
                true => all(&mut client)?.into_iter().map(|snapshot| snapshot.name).collect(),
                false => args.names.clone(),
            };
            verify::verify(&mut client, Kind::Snapshot, &names, output)
        }
        SnapshotVerb::Files(verb) => transfer::here(verb.errand(), output),
    }
}

fn create(args: &CreateArgs, output: &Output) -> Result<u8> {
    let request = Request::MakeSnapshot(SnapshotConfig {
        sandbox: args.sandbox.clone(),
        name: args.name.clone(),
        detach_devices: args.detach_devices,
    });
    match daemon::connect()?.ask(request)? {
        (Reply::Snapshot(snapshot), _) => {
            let snapshot = snapshot.redacted();
            output.result(&snapshot, || format!("{}\n", snapshot.name))?;
            Ok(0)
        }
        (other, _) => bail!("the daemon answered {other:?}: use basalt and basaltd of one build"),
    }
}

/// `basalt clone`.
pub(crate) fn clone(args: &CloneArgs, output: &Output) -> Result<u8> {
    let config = CloneConfig {
        snapshot: args.snapshot.clone(),
        name: args.name.clone(),
        hostname: args.hostname.clone(),
        ports: args.publish.clone(),
        egress: args.egress.given()?,
        paging: args.paging,
        remove: args.rm,
        labels: args.label.iter().cloned().collect(),
        ..CloneConfig::default()
    };
    started(Request::Clone(config), output)
}

/// `basalt rollback`.
pub(crate) fn rollback(args: &RollbackArgs, output: &Output) -> Result<u8> {
    let request = Request::Rollback(RollbackConfig {
        sandbox: args.sandbox.clone(),
        snapshot: args.snapshot.clone(),
        detach_devices: args.detach_devices,
    });
    started(request, output)
}

/// `basalt move`.
pub(crate) fn move_to(args: &MoveArgs, output: &Output) -> Result<u8> {
    let request = Request::Move(MoveConfig {
        sandbox: args.sandbox.clone(),
        class: args.class,
        detach_devices: args.detach_devices,
    });
    started(request, output)
}

fn started(request: Request, output: &Output) -> Result<u8> {
    match daemon::connect()?.ask(request)? {
        (Reply::Started { sandbox, .. }, _) => {
            let sandbox = sandbox.redacted();
            output.result(&sandbox, || format!("{}\n", sandbox.id))?;
            Ok(0)
        }
        (other, _) => bail!("the daemon answered {other:?}: use basalt and basaltd of one build"),
    }
}

/// One in the lab is shown as its sandbox was asked for outside.
fn as_asked(mut snapshot: Snapshot) -> Snapshot {
    asked::as_asked(&mut snapshot.config);
    snapshot
}

/// All snapshots that a daemon has.
pub(crate) fn all(client: &mut Client) -> Result<Vec<Snapshot>> {
    let mut snapshots = Vec::new();
    client.ask_each(Request::ListSnapshots, &mut |item| {
        if let Item::Snapshot(snapshot) = item {
            snapshots.push(as_asked(*snapshot));
        }
    })?;
    Ok(snapshots)
}

fn list(output: &Output) -> Result<u8> {
    let snapshots = all(&mut daemon::connect()?)?;
    let snapshots: Vec<Snapshot> = snapshots.into_iter().map(Snapshot::redacted).collect();
    output.result(&snapshots, || {
        let head = ["NAME", "SANDBOX", "IMAGE", "MEMORY", "SIZE", "STATE", "CREATED"];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        rows.extend(snapshots.iter().map(|snapshot| {
            vec![
                snapshot.name.clone(),
                snapshot.sandbox_name.clone(),
                snapshot.config.image.clone(),
                snapshot.config.resources.memory.to_string(),
                ByteSize(snapshot.bytes).to_string(),
                snapshot.damaged.as_ref().map_or("ok", |_| "damaged").to_owned(),
                format!("{} ago", ago(snapshot.created_ns)),
            ]
        }));
        table(&rows)
    })?;
    Ok(0)
}

fn inspect(args: &InspectSnapshotsArgs, output: &Output) -> Result<u8> {
    let mut client = daemon::connect()?;
    let mut snapshots = Vec::new();
    for name in &args.of.names {
        match client.ask(Request::InspectSnapshot { name: name.clone() })? {
            (Reply::Snapshot(snapshot), _) if args.show_secrets => snapshots.push(as_asked(*snapshot)),
            (Reply::Snapshot(snapshot), _) => snapshots.push(as_asked(*snapshot).redacted()),
            (other, _) => bail!("the daemon answered {other:?}: use basalt and basaltd of one build"),
        }
    }
    // What it is, whole, is JSON for people, too.
    let text = serde_json::to_string_pretty(&snapshots)?;
    output.result(&snapshots, || format!("{text}\n"))?;
    Ok(0)
}
