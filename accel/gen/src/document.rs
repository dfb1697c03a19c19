//! The table of all entry points for people: docs/accel-calls.md.
//!
//! Knows nothing that is not in the specification.

use std::fmt::Write as _;

use accel_spec::{Api, Command, Flow, Service};

/// The page.
pub(crate) fn page(api: &Api) -> String {
    let count = |wanted: fn(&Service) -> bool| api.commands.iter().filter(|command| wanted(&command.service)).count();
    let mut text = format!(
        "# Calls of OpenCL\n\nMade by `cargo xtask accel` from [accel/spec](../accel/spec/README.md); do not edit. What the columns mean is in\n\
         [accel.md](accel.md#what-a-call-is).\n\n{} entry points: {} generated, {} with a body \
         by hand on one side, {} other names, {} not served.\n",
        api.commands.len(),
        count(|service| *service == Service::Generated),
        count(|service| matches!(service, Service::Manual(_))),
        count(|service| matches!(service, Service::Alias(_))),
        count(|service| matches!(service, Service::Unsupported { .. })),
    );
    for (group, commands) in api.groups() {
        _ = write!(
            text,
            "\n## {group}\n\n| call | since | how it travels | state |\n|---|---|---|---|\n"
        );
        for command in commands {
            _ = writeln!(
                text,
                "| `{}` | {} | {} | {} |",
                command.name,
                command.since,
                flow(command),
                state(&command.service)
            );
        }
    }
    text
}

fn flow(command: &Command) -> String {
    if !matches!(command.service, Service::Generated | Service::Manual(_)) {
        return "-".into();
    }
    match &command.flow {
        Flow::Local => "local".into(),
        Flow::Sync => "sync".into(),
        Flow::Cached { until } if until.is_empty() => "cached".into(),
        Flow::Cached { until } => format!("cached until `{}`", until.join("`, `")),
        Flow::Async { queue, sync_if } => {
            let mut text = "async".to_owned();
            if let Some(queue) = queue {
                _ = write!(text, " in `{queue}`");
            }
            if let Some(name) = sync_if {
                _ = write!(text, "; sync if `{name}`");
            }
            text
        }
    }
}

fn state(service: &Service) -> String {
    match service {
        Service::Generated => "generated".into(),
        Service::Manual(reason) => format!("by hand: {reason}"),
        Service::Alias(other) => format!("another name of `{other}`"),
        Service::Unsupported { code, reason, .. } => format!("not served, `{code}`: {reason}"),
    }
}
