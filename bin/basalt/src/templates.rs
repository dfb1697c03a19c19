//! `basalt template`: each verb asks the daemon and shows what it says.

use anyhow::{Result, bail};
use base::ByteSize;
use node_api::message::Item;
use node_api::transfer::Kind;
use node_api::{Client, Reply, Request, Secrets as _, Template};
use serde::Serialize;

use crate::cli::{InspectTemplatesArgs, TemplateVerb};
use crate::images::short_digest;
use crate::output::{Output, table};
use crate::sandboxes::ago;
use crate::{daemon, template_build, transfer, verify};

/// `basalt template ...`.
pub(crate) fn template(verb: &TemplateVerb, output: &Output) -> Result<u8> {
    match verb {
        TemplateVerb::Build(args) => template_build::build(args, output),
        TemplateVerb::Ls => list(output),
        TemplateVerb::Inspect(args) => inspect(args, output),
        TemplateVerb::Rm(args) => {
            let remove = |template| Request::RemoveTemplate { template };
            daemon::ask_for_each(&args.templates, output, remove)
        }
        TemplateVerb::Verify(args) => {
            let mut client = daemon::connect()?;
            let ids = match args.all {
                true => all(&mut client)?.into_iter().map(|template| template.id).collect(),
                false => args.templates.clone(),
            };
            verify::verify(&mut client, Kind::Template, &ids, output)
        }
        TemplateVerb::Files(verb) => transfer::here(verb.errand(), output),
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

/// A template with what is not part of it, for machines.
#[derive(Serialize)]
struct Inspected {
    #[serde(flatten)]
    template: Template,
    /// Sandboxes can be cloned of it now.
    usable: bool,
}

fn inspect(args: &InspectTemplatesArgs, output: &Output) -> Result<u8> {
    let mut client = daemon::connect()?;
    let mut found = Vec::new();
    for one in &args.of.templates {
        let template = template_build::inspected(&mut client, one)?;
        let template = match args.show_secrets {
            true => template,
            false => template.redacted(),
        };
        let usable = template.outdated.is_none();
        found.push(Inspected { template, usable });
    }
    // What it is, whole, is JSON for people, too.
    let text = serde_json::to_string_pretty(&found)?;
    output.result(&found, || format!("{text}\n"))?;
    Ok(0)
}

/// All templates that a daemon has.
pub(crate) fn all(client: &mut Client) -> Result<Vec<Template>> {
    let mut templates: Vec<Template> = Vec::new();
    client.ask_each(Request::ListTemplates, &mut |item| {
        if let Item::Template(template) = item {
            templates.push(*template);
        }
    })?;
    Ok(templates)
}

fn list(output: &Output) -> Result<u8> {
    let templates = all(&mut daemon::connect()?)?;
    let templates: Vec<Template> = templates.into_iter().map(Template::redacted).collect();
    output.result(&templates, || {
        let head = [
            "ID", "NAME", "IMAGE", "CPUS", "MEMORY", "DISK", "NETWORK", "SIZE", "USABLE", "USED",
        ];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        rows.extend(templates.iter().map(|template| {
            let resources = &template.resources;
            vec![
                short_digest(&template.id).to_owned(),
                match template.names.is_empty() {
                    true => "-".to_owned(),
                    false => template.names.join(","),
                },
                short_digest(&template.digest).to_owned(),
                resources.cpus.to_string(),
                resources.memory.to_string(),
                resources.disk.map_or_else(|| "-".to_owned(), |disk| disk.to_string()),
                if template.networked { "yes" } else { "no" }.to_owned(),
                ByteSize(template.bytes).to_string(),
                if template.outdated.is_none() { "yes" } else { "no" }.to_owned(),
                format!("{} ago", ago(template.used_ns)),
            ]
        }));
        table(&rows)
    })?;
    Ok(0)
}
