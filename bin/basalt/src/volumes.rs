//! `basalt volume`: each verb asks the daemon and shows what it says.

use anyhow::{Result, bail};
use node_api::message::Item;
use node_api::{Reply, Request, Volume};

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
            let remove = |name: String| Request::RemoveVolume { name };
            daemon::ask_for_each(&args.names, output, remove)
        }
        VolumeVerb::Inspect(args) => inspect(&args.names, output),
        VolumeVerb::Ls => list(output),
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

fn inspect(names: &[String], output: &Output) -> Result<u8> {
    let mut client = daemon::connect()?;
    let mut volumes = Vec::new();
    for name in names {
        match client.ask(Request::InspectVolume { name: name.clone() })? {
            (Reply::Volume(volume), _) => volumes.push(volume),
            (other, _) => bail!("the daemon answered {other:?}: use basalt and basaltd of one build"),
        }
    }
    // What it is, whole, is JSON for people, too.
    let text = serde_json::to_string_pretty(&volumes)?;
    output.result(&volumes, || format!("{text}\n"))?;
    Ok(0)
}
