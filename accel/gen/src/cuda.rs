//! What is generated of CUDA's libraries beyond the types of calls: the client's functions, their names and versions for the linker, the
//! server's calls of the real libraries, the constants of the annotations, and the page of calls.
//!
//! Knows no function by name; what those by hand do is the client's.

mod document;
mod function;
mod library;
mod symbols;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use accel_spec::cuda::{Body, Cuda, Function, Library, snake};
use sha2::{Digest, Sha256};

use crate::code::HEAD;
use crate::lock::Lock;
use crate::{CUDA, GenError, Numbered, Output, PROTO, formatted};

pub(crate) use library::LIBRARY;

/// Where the client's functions go.
pub(crate) const CLIENT: &str = "accel/client-cuda/src/generated";
const PAGE: &str = "docs/accel-cuda-calls.md";

/// All files.
pub(crate) fn outputs(root: &Path, lock: &mut Lock) -> Result<Vec<Output>, GenError> {
    let cuda = accel_spec::cuda::cuda(root)?;
    let numbered = Numbered::new(&cuda.api, lock, CUDA)?;
    let mut outputs = numbered.proto(root, &cuda.api)?;
    let parts = parts(&cuda, lock)?;
    let path = format!("{PROTO}/cuda/parts.rs");
    let text = formatted(root, &path, &part_numbers(&parts))?;
    outputs.push(Output { path, text });
    let mut rust = vec![("mod".to_owned(), module(&cuda)), ("values".to_owned(), values(&cuda))];
    let mut index = 0;
    for library in &cuda.libraries {
        let text = functions(&cuda, library, &parts, &mut index);
        rust.push((library.name.clone(), text));
    }
    for (name, text) in rust {
        let path = format!("{CLIENT}/{name}.rs");
        let text = formatted(root, &path, &text)?;
        outputs.push(Output { path, text });
    }
    for (name, text) in library::modules(&cuda, &parts) {
        let path = format!("{LIBRARY}/{name}.rs");
        let text = formatted(root, &path, &text)?;
        outputs.push(Output { path, text });
    }
    for (name, text) in [
        ("symbols.s", symbols::assembly(&cuda)),
        ("symbols.map", symbols::versions(&cuda)),
    ] {
        let path = format!("{CLIENT}/{name}");
        outputs.push(Output { path, text });
    }
    let files = format!("{CLIENT}/files.txt");
    outputs.push(Output {
        path: files,
        text: symbols::files(&cuda),
    });
    outputs.push(Output {
        path: PAGE.into(),
        text: document::page(&cuda),
    });
    Ok(outputs)
}

/// Numbers of the functions whose arguments are parts of a descriptor.
fn parts(cuda: &Cuda, lock: &mut Lock) -> Result<BTreeMap<String, u16>, GenError> {
    let mut parts = BTreeMap::new();
    for function in cuda.libraries.iter().flat_map(|library| &library.functions) {
        if !matches!(function.body, Body::CreateDescriptor | Body::SetDescriptor { .. }) {
            continue;
        }
        let mut text = String::new();
        for (name, _, c_text) in function
            .declaration
            .iter()
            .flat_map(|declaration| declaration.params.iter().skip(1))
        {
            let list = function.inputs.iter().find(|(input, _)| input == name);
            _ = write!(
                text,
                "{name}:{c_text}:{};",
                list.map_or("", |(_, length)| length.as_str())
            );
        }
        let sum = hex::encode(&Sha256::digest(text)[..8]);
        parts.insert(function.name.clone(), lock.number(&function.name, &sum, CUDA)?);
    }
    Ok(parts)
}

/// The same for whoever reads descriptors.
fn part_numbers(parts: &BTreeMap<String, u16>) -> String {
    let mut text = format!(
        "{HEAD}//! Numbers of the functions whose arguments are parts of a descriptor. A call carries of each of its descriptors, one part behind\n\
         //! the other: the function's number, how many words, and the words of its arguments behind the descriptor (those of 64 bits are two,\n\
         //! the lower one first; bytes are four to a word).\n\n"
    );
    for (name, number) in parts {
        let constant = snake(name).to_uppercase();
        _ = writeln!(text, "/// `{name}`.\npub const {constant}: i32 = {number:#06x};");
    }
    text
}

/// The module of all, with the names of functions by their numbers.
fn module(cuda: &Cuda) -> String {
    let mut text = format!("{HEAD}//! The functions of CUDA's libraries that programs call.\n\n");
    for library in &cuda.libraries {
        _ = writeln!(text, "mod {};", library.name);
    }
    text.push_str("#[allow(non_upper_case_globals, dead_code, reason = \"constants have their names in C, all of the annotations'\")]\npub(crate) mod values;\n\n");
    text.push_str("/// Names of all functions, by their numbers.\npub(crate) const NAMES: &[&str] = &[\n");
    for function in cuda.libraries.iter().flat_map(|library| &library.functions) {
        _ = writeln!(text, "{:?},", function.name);
    }
    text.push_str("];\n");
    text
}

fn values(cuda: &Cuda) -> String {
    let mut text = format!("{HEAD}//! Constants of the annotations.\n");
    for library in &cuda.libraries {
        for (name, values) in &library.enums {
            _ = write!(text, "\n// {name}\n");
            for (name, value) in values {
                _ = writeln!(text, "pub(crate) const {name}: i32 = {value};");
            }
        }
    }
    text
}

fn functions(cuda: &Cuda, library: &Library, parts: &BTreeMap<String, u16>, index: &mut usize) -> String {
    let mut body = String::new();
    for function in &library.functions {
        let writer = function::Writer {
            cuda,
            library,
            function,
            index: *index,
            part: parts.get(&function.name).copied(),
        };
        writer.write(&mut body);
        *index += 1;
    }
    let mut text = format!(
        "{HEAD}//! Functions of `accel/spec/cuda/{}.toml`.\n#![allow(\n    unsafe_code, clippy::too_many_arguments, clippy::multiple_unsafe_ops_per_block,\n    \
         reason = \"these are functions of a C API with its parameters\"\n)]\n#![allow(non_snake_case, reason = \"names are C's\")]\n#![allow(clippy::cast_sign_loss, clippy::unnecessary_cast, reason = \"sizes that the program gives are taken as they are\")]\n\n",
        library.name
    );
    if body.contains("c_void") {
        text.push_str("use std::ffi::c_void;\n\n");
    }
    let proto = [
        ("Handle", "Handle::"),
        ("List", "List::"),
        ("SvmAddress", "SvmAddress("),
    ];
    let proto: Vec<_> = proto
        .into_iter()
        .filter(|(_, used)| body.contains(used))
        .map(|(name, _)| name)
        .collect();
    if body.contains("calls::Cu") || body.contains("calls::Basalt") {
        let proto = if proto.is_empty() {
            String::new()
        } else {
            format!("{}, ", proto.join(", "))
        };
        _ = writeln!(text, "use accel_proto::{{{proto}cuda as calls}};\n");
    }
    if has_address(&body) {
        text.push_str("use crate::abi::P;\n");
    }
    text.push_str("use crate::stub;\n\n");
    text + &body
}

/// Whether the type of an opaque address is named.
fn has_address(body: &str) -> bool {
    body.split(|char: char| !char.is_alphanumeric() && char != '_')
        .any(|word| word == "P")
}

/// Whether programs find it.
fn is_in(function: &Function, version: &str) -> bool {
    function.only.is_empty() || function.only.iter().any(|only| only == version)
}
