//! A back end of an API that does nothing: each function succeeds, names what it makes, and answers.
//!
//! Knows what `accel/server` offers to this code by name: `Put`, which is what a function writes.

use std::fmt::Write as _;

use accel_spec::{Api, Command, Direction, Element, Kind, Length, Life, Param};

use crate::code::HEAD;
use crate::names;
use crate::server;

/// The module.
pub(crate) fn module(api: &Api) -> String {
    let mut text = format!(
        "{HEAD}//! Functions of {} that do nothing: they succeed, name what they make, and answer.\n\nuse crate::api::P;\n\
         use crate::null::{{Put, null}};\nuse crate::objects::Sort;\n\nnull! {{\n",
        api.name
    );
    for command in server::in_table(api) {
        let puts: String = command
            .params
            .iter()
            .filter_map(|param| put(api, command, param))
            .collect();
        _ = writeln!(text, "    {} {{ {puts} }}", server::signature(command));
    }
    text.push_str("}\n");
    text
}

/// What a function writes by one of its parameters, if it writes anything.
fn put(api: &Api, command: &Command, param: &Param) -> Option<String> {
    let name = &param.name;
    let is = |other: &str| command.params.iter().any(|param| param.name == other);
    let query = is("param_name") && is("param_value");
    Some(match &param.kind {
        Kind::Handle {
            life: Life::Create | Life::Shadow,
            ..
        } if name != "returned" => format!("Put::Made({name}, 1), "),
        Kind::Handles {
            life: Life::Create,
            length,
            ..
        } => format!("Put::Made({name}, {}), ", number(command, length)?),
        Kind::Handles {
            life: Life::Get,
            length,
            c_type,
        } => {
            format!(
                "Put::Told({name}, {}, Sort::{}), ",
                number(command, length)?,
                names::c_type(api, c_type)
            )
        }
        Kind::Status => format!("Put::Zeroes({name}, 4), "),
        Kind::Bulk {
            direction: Direction::Out,
            ..
        }
        | Kind::Array {
            direction: Direction::Out,
            element: Element::Byte,
            ..
        } if query && name == "param_value" => {
            format!(
                "Put::Answer {{ name: param_name, size: param_value_size, at: {name}, size_at: param_value_size_ret }}, "
            )
        }
        Kind::Array { .. } if query && name == "param_value_size_ret" => return None,
        Kind::Array {
            direction: Direction::Out,
            element,
            length,
        } if length.is_one() && is_count(element, name) => {
            let made = command.params.iter().any(|param| {
                matches!(
                    param.kind,
                    Kind::Handles {
                        life: Life::Get | Life::Create,
                        ..
                    }
                )
            });
            format!("Put::Count({name}, {}), ", u8::from(made))
        }
        Kind::Array {
            direction: Direction::Out,
            element,
            length,
        } => {
            format!(
                "Put::Zeroes({name}, {}), ",
                size(api, element, &number(command, length)?)
            )
        }
        _ => return None,
    })
}

fn is_count(element: &Element, name: &str) -> bool {
    *element == Element::U32 && name.starts_with("num_")
}

fn size(api: &Api, element: &Element, count: &str) -> String {
    let bytes = match element {
        Element::Byte => 1,
        Element::I32 | Element::U32 => 4,
        Element::I64 | Element::U64 | Element::Handle(_) => 8,
        Element::Struct(c_type) => 4 * api.structure(c_type).map_or(0, |found| found.members.len()),
    };
    match count {
        "1" => bytes.to_string(),
        _ => format!("{bytes} * {count}"),
    }
}

/// A product as 64 bits.
fn number(command: &Command, length: &Length) -> Option<String> {
    if length.is_one() {
        return Some("1".into());
    }
    let name = *length.parameters().first()?;
    command.params.iter().find(|param| param.name == name)?;
    Some(format!("u64::from({name})"))
}
