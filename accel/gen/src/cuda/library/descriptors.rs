//! Descriptors as a library has them, made again from what travels with a call: numbers of functions and words of their arguments.
//!
//! Knows how words are written (`accel/client-cuda/src/descriptor.rs`), and no function by name.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use accel_spec::cuda::{Body, Cuda, Function, Library, TypeKind, snake};

use super::c_type;
use crate::code::HEAD;

/// The module.
pub(super) fn module(cuda: &Cuda, parts: &BTreeMap<String, u16>) -> String {
    let mut text = format!(
        "{HEAD}//! How descriptors are made, what is put into them, and how they end.\n#![allow(unsafe_code, reason = \"these are calls of functions of C\")]\n#![allow(non_snake_case, reason = \"names are C's\")]\n\n\
         use crate::Libraries;\nuse crate::descriptor::{{Kind, Puts, Words}};\nuse crate::failure::{{Failure, check}};\nuse crate::table::P;\n\n"
    );
    let mut kinds = String::new();
    let mut puts = String::new();
    let all = || {
        cuda.libraries
            .iter()
            .flat_map(|library| library.functions.iter().map(move |function| (library, function)))
    };
    for (library, function) in all() {
        let Some(of) = described(function) else { continue };
        match function.body {
            Body::CreateDescriptor => {
                let end =
                    all().find(|(_, other)| other.body == Body::DestroyDescriptor && described(other) == Some(of));
                let end = end.map_or(String::new(), |(_, end)| end.name.clone());
                let words = function
                    .declaration
                    .as_ref()
                    .is_some_and(|declaration| declaration.params.len() > 1);
                _ = writeln!(
                    kinds,
                    "        {of:?} => Kind {{ number: {:#06x}, has_words: {words}, make: {}, end: {end} }},",
                    parts.get(&function.name).copied().unwrap_or_default(),
                    function.name
                );
                write(cuda, library, function, &mut text);
            }
            Body::SetDescriptor { .. } => {
                _ = writeln!(
                    puts,
                    "        ({of:?}, {:#06x}) => {},",
                    parts.get(&function.name).copied().unwrap_or_default(),
                    function.name
                );
                write(cuda, library, function, &mut text);
            }
            Body::DestroyDescriptor => end(library, function, &mut text),
            _ => {}
        }
    }
    _ = write!(
        text,
        "/// How descriptors of a type of C are made and end.\npub(crate) fn kind(c_type: &str) -> Option<Kind> {{\n    Some(match c_type {{\n{kinds}        _ => return None,\n    }})\n}}\n\n\
         /// The function of that number, if it puts something into descriptors of the type.\npub(crate) fn put(c_type: &str, number: u16) -> Option<Puts> {{\n    Some(match (c_type, number) {{\n{puts}        _ => return None,\n    }})\n}}\n"
    );
    text
}

/// The type of a function's descriptor.
fn described(function: &Function) -> Option<&str> {
    let declaration = function.declaration.as_ref()?;
    declaration.params.first().map(|(_, of, _)| of.name.as_str())
}

fn end(library: &Library, function: &Function, text: &mut String) {
    let name = &function.name;
    _ = write!(
        text,
        "fn {name}(libraries: &Libraries, made: P) -> Result<(), Failure> {{\n    \
         let function = libraries.{}()?.{name}()?;\n    \
         // SAFETY: 1. the function has these types; 2. the descriptor was made by its library, and this is its last use.\n    \
         check(unsafe {{ function(made) }})\n}}\n\n",
        library.name
    );
}

/// Words of each number.
fn width(rust: &str) -> usize {
    if matches!(rust, "usize" | "u64" | "i64" | "f64") {
        2
    } else {
        1
    }
}

/// A function that makes a descriptor, or puts something into one.
fn write(cuda: &Cuda, library: &Library, function: &Function, text: &mut String) {
    let Some(declaration) = &function.declaration else {
        return;
    };
    let name = &function.name;
    let makes = function.body == Body::CreateDescriptor;
    let mut before = String::new();
    let mut arguments = vec![if makes {
        "(&raw mut made).cast()".to_owned()
    } else {
        "made".to_owned()
    }];
    for (place, (c_name, of, _)) in declaration.params.iter().enumerate().skip(1) {
        let param = snake(c_name);
        let input = function.inputs.iter().find(|(input, _)| input == c_name);
        let Some((_, length)) = input else {
            let rust = c_type(cuda, of);
            _ = writeln!(before, "    let {param} = words.{rust}()?;");
            arguments.push(param);
            continue;
        };
        let of_length = declaration.params.iter().position(|(other, _, _)| other == length);
        let is_known = of_length.is_some_and(|of_length| of_length < place);
        let bytes = !matches!(cuda.types.get(&of.name), Some(TypeKind::Number("i32")));
        let behind: usize = declaration.params[place + 1..]
            .iter()
            .map(|(_, of, _)| width(c_type(cuda, of)))
            .sum();
        _ = match (is_known, bytes) {
            (true, false) => writeln!(before, "    let {param} = words.list({})?;", snake(length)),
            // How many bytes is said behind them.
            _ => writeln!(before, "    let {param} = words.bytes({behind})?;"),
        };
        arguments.push(format!("{param}.address()"));
        if !is_known {
            _ = writeln!(before, "    let {}_of = {param}.length();", snake(length));
        }
    }
    let mut checks = String::new();
    for (_, length) in function.inputs.iter().filter(|(input, length)| {
        let place = |name: &String| declaration.params.iter().position(|(other, _, _)| other == name);
        place(length) > place(input)
    }) {
        let length = snake(length);
        _ = writeln!(checks, "    Words::covers({length}, {length}_of)?;");
    }
    let result = if makes { "P" } else { "()" };
    let made = if makes { "" } else { ", made: P" };
    let (first, last) = if makes {
        ("    let mut made: P = std::ptr::null_mut();\n", "    Ok(made)\n")
    } else {
        ("", "    Ok(())\n")
    };
    _ = write!(
        text,
        "fn {name}(libraries: &Libraries{made}, words: &mut Words<'_>) -> Result<{result}, Failure> {{\n    \
         let function = libraries.{library}()?.{name}()?;\n{before}    words.finish()?;\n{checks}{first}    \
         // SAFETY: 1. the function has these types; 2. the descriptor was made by its library; 3. lists are as long as is said.\n    \
         let status = unsafe {{ function({arguments}) }};\n    check(status)?;\n{last}}}\n\n",
        library = library.name,
        arguments = arguments.join(", "),
    );
}
