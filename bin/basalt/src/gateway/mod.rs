//! Verbs by a gateway (`--host URL`): another machine's sandboxes, by the REST API that the E2B SDKs speak. Which of the three places
//! sandboxes are in has been decided before ([`crate::site`]); here each verb becomes requests, and what that API does not have is refused
//! with a sentence. Knows no daemon and no lab.

mod attached;
mod copy;
mod flags;
mod names;
mod run;
mod sandboxes;
mod saved;
mod unserved;
mod volumes;

use std::ffi::OsString;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use gateway_client::Client;

use crate::cli::{NetworkVerb, SnapshotVerb, TemplateVerb, Verb, VolumeVerb};
use crate::output::Output;

/// The variable that names the gateway where `--host` does not.
pub(crate) const VARIABLE: &str = "BASALT_HOST";

/// Where the key is, the first that is there. No flag has it: everybody can read a program's arguments.
const KEYS: [&str; 2] = ["BASALT_API_KEY", "E2B_API_KEY"];

/// The metadata that has a sandbox's name, for which the API has no field of its own.
const NAME: &str = "basalt.name";

/// A gateway, and how answers are shown.
struct Remote<'o> {
    client: Arc<Client>,
    output: &'o Output,
}

impl<'o> Remote<'o> {
    fn open(url: &str, output: &'o Output) -> Result<Self> {
        let key = KEYS
            .iter()
            .find_map(|name| std::env::var(name).ok().filter(|key| !key.is_empty()))
            .with_context(|| {
                format!(
                    "{url} wants an API key: set {} to one that `basalt-gateway keys create` has printed on its machine",
                    KEYS[0]
                )
            })?;
        let client = Client::new(url, key.trim(), registry::machine_authorities()?)?;
        Ok(Self {
            client: Arc::new(client),
            output,
        })
    }

    /// Does the same for each, prints those that it was done for, and goes on where one is refused.
    fn for_each(&self, names: &[String], mut act: impl FnMut(&str) -> Result<()>) -> Result<u8> {
        let (mut done, mut code) = (Vec::new(), 0);
        for name in names {
            match act(name) {
                Ok(()) => done.push(name),
                Err(error) => {
                    self.output.error(&error);
                    code = 1;
                }
            }
        }
        self.output
            .result(&done, || done.iter().map(|name| format!("{name}\n")).collect())?;
        Ok(code)
    }
}

/// A verb for sandboxes of the gateway at `url`.
pub(crate) fn verb(verb: &Verb, url: &str, argv: &[OsString], output: &Output) -> Result<u8> {
    if let Some(sentence) = unserved::sentence(verb) {
        bail!("{sentence}");
    }
    flags::check(verb, argv)?;
    let remote = Remote::open(url, output)?;
    match verb {
        Verb::Run(args) => run::run(&remote, args),
        Verb::Exec(args) => run::exec(&remote, args),
        Verb::Clone(args) => run::clone(&remote, args),
        Verb::Cp(args) => copy::copy(&remote, args),
        Verb::Ps(args) => sandboxes::ps(&remote, args),
        Verb::Inspect(args) => sandboxes::inspect(&remote, args),
        Verb::Logs(args) => sandboxes::logs(&remote, args),
        Verb::Stats(args) => sandboxes::stats(&remote, args),
        Verb::Kill(args) => sandboxes::kill(&remote, args),
        Verb::Rm(args) => sandboxes::rm(&remote, args),
        Verb::Suspend(args) => sandboxes::suspend(&remote, args),
        Verb::Unpause(args) => sandboxes::resume(&remote, args),
        Verb::Network(NetworkVerb::Update(args)) => sandboxes::network(&remote, args),
        Verb::Snapshot(SnapshotVerb::Create(args)) => saved::create(&remote, args),
        Verb::Snapshot(SnapshotVerb::Ls) => saved::snapshots(&remote),
        Verb::Snapshot(SnapshotVerb::Rm(args)) => saved::remove_snapshots(&remote, &args.names),
        Verb::Template(TemplateVerb::Ls) => saved::templates(&remote),
        Verb::Template(TemplateVerb::Rm(args)) => saved::remove_templates(&remote, &args.templates),
        Verb::Volume(VolumeVerb::Create(args)) => volumes::create(&remote, &args.names),
        Verb::Volume(VolumeVerb::Ls(_)) => volumes::list(&remote),
        Verb::Volume(VolumeVerb::Rm(args)) => volumes::remove(&remote, &args.volumes.names),
        other => bail!("the verb {other:?} is not handled: this is a bug of basalt, please report it"),
    }
}
