//! `basalt volume`: each verb asks the daemon and shows what it says.

use anyhow::{Result, bail};
use base::ByteSize;
use node_api::message::Item;
use node_api::tenant_volume::{TenantVolume, TenantVolumeItem, TenantVolumeReply, TenantVolumeRequest};
use node_api::{Client, Reply, Request, Volume};
use serde::Serialize;

use crate::cli::VolumeVerb;
use crate::daemon;
use crate::output::{Output, table};

/// `basalt volume ...`.
pub(crate) fn volume(verb: &VolumeVerb, output: &Output) -> Result<u8> {
    match verb {
        VolumeVerb::Create(args) => {
            let make = |name: String| Request::MakeVolume { name };
            daemon::ask_for_each(&args.names, output, make)
        }
        VolumeVerb::Rm(args) => {
            let is_tenants = args.tenant.is_some();
            let remove = |name: String| match is_tenants {
                true => Request::TenantVolume(TenantVolumeRequest::Remove { name }),
                false => Request::RemoveVolume { name },
            };
            daemon::ask_each_with(connect(args.tenant.as_deref())?, &args.volumes.names, output, remove)
        }
        VolumeVerb::Inspect(args) => match &args.tenant {
            Some(tenant) => inspect_tenants(tenant, &args.volumes.names, output),
            None => inspect(&args.volumes.names, output),
        },
        VolumeVerb::Ls(args) if args.tenants || args.tenant.is_some() => list_tenants(args.tenant.as_deref(), output),
        VolumeVerb::Ls(_) => list(output),
        VolumeVerb::Prune => match daemon::connect()?.ask(Request::PruneVolumes)? {
            (Reply::Pruned(names), _) => {
                output.result(&names, || lines(&names))?;
                Ok(0)
            }
            (other, _) => bail!("the daemon answered {other:?}: use basalt and basaltd of one build"),
        },
    }
}

fn lines(names: &[String]) -> String {
    names.iter().map(|name| format!("{name}\n")).collect()
}

fn list(output: &Output) -> Result<u8> {
    let mut volumes: Vec<Volume> = Vec::new();
    daemon::connect()?.ask_each(Request::ListVolumes, &mut |item| {
        if let Item::Volume(volume) = item {
            volumes.push(volume);
        }
    })?;
    output.result(&volumes, || {
        let mut rows = vec![["NAME", "USED BY", "DIRECTORY"].map(str::to_owned).to_vec()];
        rows.extend(volumes.iter().map(|volume| {
            vec![
                volume.name.clone(),
                volume.used_by.join(","),
                volume.directory.display().to_string(),
            ]
        }));
        table(&rows)
    })?;
    Ok(0)
}

/// To ask the daemon, for a tenant if one is named.
fn connect(tenant: Option<&str>) -> Result<Client> {
    let mut client = daemon::connect()?;
    if let Some(tenant) = tenant {
        client.for_tenant(tenant);
    }
    Ok(client)
}

fn list_tenants(tenant: Option<&str>, output: &Output) -> Result<u8> {
    let mut volumes: Vec<TenantVolume> = Vec::new();
    let request = Request::TenantVolume(TenantVolumeRequest::List);
    connect(tenant)?.ask_each(request, &mut |item| {
        if let Item::TenantVolume(TenantVolumeItem::Volume(volume)) = item {
            volumes.push(volume);
        }
    })?;
    output.result(&volumes, || {
        let mut rows = vec![
            ["TENANT", "NAME", "SIZE", "ON DISK", "USED BY"]
                .map(str::to_owned)
                .to_vec(),
        ];
        rows.extend(volumes.iter().map(|volume| {
            vec![
                volume.tenant.clone(),
                volume.name.clone(),
                volume.size.to_string(),
                ByteSize(volume.bytes).to_string(),
                volume.used_by.join(","),
            ]
        }));
        table(&rows)
    })?;
    Ok(0)
}

fn inspect_tenants(tenant: &str, names: &[String], output: &Output) -> Result<u8> {
    let mut client = connect(Some(tenant))?;
    let mut volumes = Vec::new();
    for name in names {
        let request = Request::TenantVolume(TenantVolumeRequest::Inspect { name: name.clone() });
        match client.ask(request)? {
            (Reply::TenantVolume(TenantVolumeReply::Volume(volume)), _) => volumes.push(volume),
            (other, _) => bail!("the daemon answered {other:?}: use basalt and basaltd of one build"),
        }
    }
    show(&volumes, output)
}

/// What they are, whole, is JSON for people, too.
fn show(volumes: &[impl Serialize], output: &Output) -> Result<u8> {
    let text = serde_json::to_string_pretty(&volumes)?;
    output.result(&volumes, || format!("{text}\n"))?;
    Ok(0)
}

fn inspect(names: &[String], output: &Output) -> Result<u8> {
    let mut client = daemon::connect()?;
    let mut volumes = Vec::new();
    for name in names {
        match client.ask(Request::InspectVolume { name: name.clone() })? {
            (Reply::Volume(volume), _) => volumes.push(volume),
            (other, _) => bail!("the daemon answered {other:?}: use basalt and basaltd of one build"),
        }
    }
    show(&volumes, output)
}
