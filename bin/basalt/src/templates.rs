//! `basalt template`: each verb asks the daemon and shows what it says.

use anyhow::{Result, bail};
use base::ByteSize;
use node_api::message::Item;
use node_api::{Client, Reply, Request, Template};

use crate::cli::TemplateVerb;
use crate::daemon;
use crate::images::short_digest;
use crate::output::{Output, table};
use crate::sandboxes::ago;

/// `basalt template ...`.
pub(crate) fn template(verb: &TemplateVerb, output: &Output) -> Result<u8> {
    match verb {
        TemplateVerb::Ls => list(output),
        TemplateVerb::Rm(args) => {
            let remove = |id| Request::RemoveTemplate { id };
            daemon::ask_for_each(&args.ids, output, remove)
        }
        TemplateVerb::Prune(args) => {
            let ids = pruned(&mut daemon::connect()?, args.all)?;
            output.result(&ids, || {
                ids.iter().map(|id| format!("{}\n", short_digest(id))).collect()
            })?;
            Ok(0)
        }
    }
}

/// Images are gone, and their templates go after them; where no daemon runs, when the next one starts.
pub(crate) fn follow_images() -> Result<()> {
    match daemon::connect_if_needed(|_| false)? {
        Some(mut client) => pruned(&mut client, false).map(drop),
        None => Ok(()),
    }
}

fn pruned(client: &mut Client, all: bool) -> Result<Vec<String>> {
    match client.ask(Request::PruneTemplates { all })? {
        (Reply::Pruned(ids), _) => Ok(ids),
        (other, _) => bail!("the daemon answered {other:?}: use basalt and basaltd of one build"),
    }
}

fn list(output: &Output) -> Result<u8> {
    let mut templates: Vec<Template> = Vec::new();
    daemon::connect()?.ask_each(Request::ListTemplates, &mut |item| {
        if let Item::Template(template) = item {
            templates.push(*template);
        }
    })?;
    output.result(&templates, || {
        let head = ["ID", "IMAGE", "CPUS", "MEMORY", "DISK", "NETWORK", "SIZE", "USED"];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        rows.extend(templates.iter().map(|template| {
            let resources = &template.resources;
            vec![
                short_digest(&template.id).to_owned(),
                short_digest(&template.digest).to_owned(),
                resources.cpus.to_string(),
                resources.memory.to_string(),
                resources.disk.map_or_else(|| "-".to_owned(), |disk| disk.to_string()),
                if template.networked { "yes" } else { "no" }.to_owned(),
                ByteSize(template.bytes).to_string(),
                format!("{} ago", ago(template.used_ns)),
            ]
        }));
        table(&rows)
    })?;
    Ok(0)
}
