//! What is known of each command as data: one module of constants for each API.
//!
//! Knows the types of `accel/proto`'s `call.rs` by name.

use std::fmt::Write as _;

use accel_spec::{Api, Command, Effect, Factor, Flow, Kind, Length, Quota, Service};

use crate::code::HEAD;

/// The module; `op` knows the numbers.
pub(crate) fn module(api: &Api, op: impl Fn(&Command) -> Option<u16>) -> String {
    let mut text = format!(
        "{HEAD}//! What is known of each command of {} besides its layout.\n\nuse crate::call::{{Command, Effect, Flow, Quota, Service}};\n\n\
         /// All commands: by version, then in the registry's order.\npub const COMMANDS: &[Command] = &[\n",
        api.name
    );
    for command in &api.commands {
        entry(&mut text, command, op(command));
    }
    text.push_str("];\n");
    text
}

fn entry(text: &mut String, command: &Command, op: Option<u16>) {
    let op = op.map_or("None".into(), |op| format!("Some({op:#06x})"));
    let effects: Vec<_> = command.effects.iter().map(effect).collect();
    let checks = command.checks.iter().map(|check| {
        let arguments: Vec<_> = check.arguments.iter().map(|argument| format!("{argument:?}")).collect();
        format!("({:?}, &[{}])", check.name, arguments.join(", "))
    });
    let checks: Vec<_> = checks.collect();
    let keys = command.params.iter().flat_map(|param| match &param.kind {
        Kind::Properties { keys, .. } => keys.as_slice(),
        _ => &[],
    });
    let objects: Vec<_> = (keys.chain(&command.answers))
        .map(|key| format!("({:#x}, {:?})", key.value, key.c_type))
        .collect();
    let own: Vec<_> = command
        .own_answers
        .iter()
        .map(|(_, value)| format!("{value:#x}"))
        .collect();
    _ = writeln!(
        text,
        "    Command {{ name: {:?}, since: {:?}, op: {op}, flow: {}, service: {}, effects: &[{}], quota: {}, checks: &[{}], \
         objects: &[{}], own_answers: &[{}] }},",
        command.name,
        command.since,
        flow(&command.flow),
        service(&command.service),
        effects.join(", "),
        quota(command.quota.as_ref()),
        checks.join(", "),
        objects.join(", "),
        own.join(", ")
    );
}

fn effect(effect: &Effect) -> String {
    match effect {
        Effect::Creates(name) => format!("(Effect::Creates, {name:?})"),
        Effect::Changes(name) => format!("(Effect::Changes, {name:?})"),
        Effect::Content(name) => format!("(Effect::Content, {name:?})"),
        Effect::Drops(name) => format!("(Effect::Drops, {name:?})"),
        Effect::Uses(name) => format!("(Effect::Uses, {name:?})"),
    }
}

fn flow(flow: &Flow) -> String {
    match flow {
        Flow::Local => "Flow::Local".into(),
        Flow::Sync => "Flow::Sync".into(),
        Flow::Cached { until } => format!("Flow::Cached {{ until: &{until:?} }}"),
        Flow::Async { queue, sync_if } => format!("Flow::Async {{ queue: {queue:?}, sync_if: {sync_if:?} }}"),
    }
}

fn service(service: &Service) -> String {
    match service {
        Service::Generated => "Service::Generated".into(),
        Service::Manual(_) => "Service::ByHand".into(),
        Service::Alias(other) => format!("Service::As({other:?})"),
        Service::Unsupported { value, .. } => format!("Service::No({value})"),
    }
}

fn quota(quota: Option<&Quota>) -> String {
    match quota {
        None => "Quota::Nothing".into(),
        Some(Quota::Backend) => "Quota::Backend".into(),
        Some(Quota::Bytes(length)) => {
            let names: Vec<_> = match length {
                Length::Product(factors) => (factors.iter())
                    .filter_map(|factor| match factor {
                        Factor::Parameter(name) => Some(format!("{name:?}")),
                        Factor::Number(_) => None,
                    })
                    .collect(),
                _ => Vec::new(),
            };
            format!("Quota::Bytes(&[{}])", names.join(", "))
        }
    }
}
