//! Flags that a gateway's API has nothing for are refused, and not passed over: by what was given on the command line, so that a flag that
//! is added to a verb is refused until somebody makes it work here.

use std::ffi::OsString;

use anyhow::{Result, bail};
use clap::parser::ValueSource;
use clap::{ArgMatches, Command, CommandFactory};

use crate::cli::{Cli, Verb, VolumeVerb};

/// Flags that are about this program.
const GLOBAL: [&str; 3] = ["json", "log_level", "host"];

/// What a verb takes over `--host`; all of them where that is all.
fn taken(verb: &Verb) -> Option<&'static [&'static str]> {
    Some(match verb {
        Verb::Run(_) => &[
            "template",
            "name",
            "detach",
            "no_command",
            "env",
            "env_file",
            "workdir",
            "user",
            "tty",
            "interactive",
            "rm",
            "timeout",
            "on_timeout",
            "label",
            "egress_deny",
            "egress_allow",
            "volume",
            "trace",
            "image",
            "command",
        ],
        Verb::Clone(_) => &["name", "label", "egress_deny", "egress_allow", "snapshot"],
        Verb::Logs(_) => &["follow", "tail", "timestamps", "sandbox"],
        Verb::Kill(_) | Verb::Inspect(_) => &["sandboxes"],
        Verb::Ps(_) => &["all", "label", "state", "quiet"],
        Verb::Volume(VolumeVerb::Ls(_)) => &[],
        Verb::Volume(VolumeVerb::Rm(_)) => &["names"],
        _ => return None,
    })
}

/// Checks the flags of a verb.
pub(super) fn check(verb: &Verb, argv: &[OsString]) -> Result<()> {
    let Some(taken) = taken(verb) else { return Ok(()) };
    let command = Cli::command();
    // They were parsed before: what is wrong with them has been told.
    let Ok(matches) = command.clone().try_get_matches_from(argv) else {
        return Ok(());
    };
    let (mut command, mut matches, mut name) = (&command, &matches, String::new());
    while let Some((word, below)) = matches.subcommand() {
        let Some(found) = command.find_subcommand(word) else {
            return Ok(());
        };
        (command, matches) = (found, below);
        name = format!("{name} {word}");
    }
    match given(command, matches).find(|id| !taken.contains(&id.as_str()) && !GLOBAL.contains(&id.as_str())) {
        None => Ok(()),
        Some(id) => bail!(
            "--{} of `basalt{name}` cannot be had over --host: {}",
            id.replace('_', "-"),
            match id.as_str() {
                "memory" | "cpus" | "disk" | "class" | "network" | "entrypoint" =>
                    "sandboxes there are as their template was built; ask for another template (`basalt template ls`)",
                "publish" => "ports are asked for at the gateway (docs/gateway.md#where-a-request-goes)",
                "signal" =>
                    "sandboxes there have no command of their own that could get it; `basalt exec SANDBOX kill` sends one to a process",
                "tenant" | "tenants" => "volumes there are those of the key's own tenant",
                "show_secrets" => "environment variables are never told there",
                _ => "leave it out, or use `basalt` on the gateway's own machine",
            }
        ),
    }
}

/// The flags that were given by hand.
fn given<'m>(command: &'m Command, matches: &'m ArgMatches) -> impl Iterator<Item = String> + 'm {
    let ids = command.get_arguments().map(|argument| argument.get_id().as_str());
    ids.filter(|id| matches.try_contains_id(id).unwrap_or(false))
        .filter(|id| matches.value_source(id) == Some(ValueSource::CommandLine))
        .map(str::to_owned)
}
