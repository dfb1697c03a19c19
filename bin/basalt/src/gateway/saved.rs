//! `basalt snapshot` and `basalt template` by a gateway.

use anyhow::{Result, bail};
use base::ByteSize;
use gateway_client::{Snapshot, Template, nanoseconds};
use serde::Serialize;

use super::Remote;
use crate::cli::CreateArgs;
use crate::output::table;
use crate::sandboxes::ago;

/// `basalt snapshot create`.
pub(super) fn create(remote: &Remote<'_>, args: &CreateArgs) -> Result<u8> {
    if args.detach_devices {
        bail!("--detach-devices cannot be had over --host: sandboxes there have no devices; leave it out");
    }
    let (sandbox, _) = remote.find(&args.sandbox)?;
    let snapshot = remote.client.snapshot(&sandbox.sandbox_id, args.name.as_deref())?;
    remote
        .output
        .result(&snapshot, || format!("{}\n", name_of(&snapshot)))?;
    Ok(0)
}

/// What it is called, or its id: both are good for `basalt clone`.
fn name_of(snapshot: &Snapshot) -> &str {
    snapshot.names.first().unwrap_or(&snapshot.id)
}

/// `basalt snapshot ls`.
pub(super) fn snapshots(remote: &Remote<'_>) -> Result<u8> {
    let snapshots = remote.client.snapshots()?;
    remote.output.result(&snapshots, || {
        let mut rows = vec![["NAME", "ID"].map(str::to_owned).to_vec()];
        let names = |one: &Snapshot| match one.names.is_empty() {
            true => "-".to_owned(),
            false => one.names.join(","),
        };
        rows.extend(snapshots.iter().map(|one| vec![names(one), one.id.clone()]));
        table(&rows)
    })?;
    Ok(0)
}

/// `basalt snapshot rm`. The API removes templates and snapshots by the same words: only snapshots are meant.
pub(super) fn remove_snapshots(remote: &Remote<'_>, names: &[String]) -> Result<u8> {
    let there = remote.client.snapshots()?;
    remote.for_each(names, |name| {
        let is_it = |one: &&Snapshot| one.id == name || one.names.iter().any(|other| other == name);
        match there.iter().find(is_it) {
            Some(snapshot) => Ok(remote.client.remove_template(&snapshot.id)?),
            None => bail!(
                "there is no snapshot `{name}` at {}: `basalt snapshot ls` lists them",
                remote.client.server()
            ),
        }
    })
}

/// A template, with the names that its fields have here.
#[derive(Serialize)]
struct Shown {
    id: String,
    names: Vec<String>,
    cpus: u64,
    memory: ByteSize,
    disk: Option<ByteSize>,
    created_ns: u64,
    build: Option<String>,
    public: bool,
}

impl From<Template> for Shown {
    fn from(told: Template) -> Self {
        Self {
            id: told.id,
            names: if told.names.is_empty() {
                told.aliases.unwrap_or_default()
            } else {
                told.names
            },
            cpus: told.cpu_count,
            memory: ByteSize::mib(told.memory_mb),
            disk: told.disk_size_mb.filter(|&size| size > 0).map(ByteSize::mib),
            created_ns: nanoseconds(&told.created_at),
            build: told.build_status,
            public: told.public,
        }
    }
}

/// `basalt template ls`.
pub(super) fn templates(remote: &Remote<'_>) -> Result<u8> {
    let templates: Vec<Shown> = remote.client.templates()?.into_iter().map(Shown::from).collect();
    remote.output.result(&templates, || {
        let mut rows = vec![
            ["ID", "NAME", "CPUS", "MEMORY", "DISK", "BUILD", "CREATED"]
                .map(str::to_owned)
                .to_vec(),
        ];
        rows.extend(templates.iter().map(|one| {
            vec![
                one.id.clone(),
                if one.names.is_empty() {
                    "-".to_owned()
                } else {
                    one.names.join(",")
                },
                one.cpus.to_string(),
                one.memory.to_string(),
                one.disk.map_or_else(|| "-".to_owned(), |disk| disk.to_string()),
                one.build.clone().unwrap_or_else(|| "-".to_owned()),
                format!("{} ago", ago(one.created_ns)),
            ]
        }));
        table(&rows)
    })?;
    Ok(0)
}

/// `basalt template rm`. The API removes templates and snapshots by the same words: only templates are meant.
pub(super) fn remove_templates(remote: &Remote<'_>, names: &[String]) -> Result<u8> {
    let there: Vec<Shown> = remote.client.templates()?.into_iter().map(Shown::from).collect();
    remote.for_each(names, |name| {
        match there
            .iter()
            .find(|one| one.id == name || one.names.iter().any(|other| other == name))
        {
            Some(template) => Ok(remote.client.remove_template(&template.id)?),
            None => bail!(
                "there is no template `{name}` at {}: `basalt template ls` lists them",
                remote.client.server()
            ),
        }
    })
}
