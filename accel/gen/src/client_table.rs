//! The tables of the client's C functions: in a loader's order, and by name.
//!
//! Knows no function's parameters.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use accel_spec::{Api, Service};

use crate::GenError;
use crate::client_hand::{LOADERS, function, module_by_hand};
use crate::code::HEAD;

/// The tables: in a loader's order, and by name.
pub(crate) fn table(api: &Api, order: &str, generated: &BTreeSet<String>) -> Result<String, GenError> {
    let path = |name: &str| {
        let name = match api
            .commands
            .iter()
            .find(|command| command.name == name)
            .map(|command| &command.service)
        {
            Some(Service::Alias(other)) => other.as_str(),
            _ => name,
        };
        let module = match module_by_hand(name) {
            Some(module) => module,
            None if generated.contains(name) => "stubs",
            None => return None,
        };
        Some(format!("crate::{module}::{}", function(api, name)))
    };
    let entries: Vec<&str> = order
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .collect();
    let mut text = format!(
        "{HEAD}//! The functions of {}, as loaders find them.\n\nuse std::ffi::c_void;\n\nuse crate::dispatch::{{self, Entry}};\n\n\
         /// What an object begins with a pointer to.\npub(crate) type Table = [Entry; {}];\n\n\
         /// In the order of `accel/spec/{}/icd-order.txt`.\npub(crate) static DISPATCH: Table = [\n",
        api.name,
        entries.len(),
        api.name
    );
    for line in entries {
        let (name, errcode) = line
            .split_once(' ')
            .map_or((line, None), |(name, errcode)| (name, Some(errcode.trim())));
        let function = match (path(name), errcode) {
            (Some(function), _) => function,
            (None, Some(errcode)) => format!("dispatch::no_object_{errcode}"),
            (None, None) => "dispatch::not_served".into(),
        };
        _ = writeln!(text, "    // {name}\n    Entry({function} as *const c_void),");
    }
    text.push_str("];\n\n/// By name.\npub(crate) static FUNCTIONS: &[(&str, Entry)] = &[\n");
    for command in &api.commands {
        if LOADERS.contains(&command.name.as_str()) || matches!(command.service, Service::Unsupported { .. }) {
            continue;
        }
        let function = path(&command.name).ok_or_else(|| GenError::NoStub {
            command: command.name.clone(),
            parameter: "none".into(),
        })?;
        _ = writeln!(text, "    ({:?}, Entry({function} as *const c_void)),", command.name);
    }
    text.push_str("];\n");
    Ok(text)
}
