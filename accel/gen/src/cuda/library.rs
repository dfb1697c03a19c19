//! The server's function of each call for the back end `cuda`: a call's arguments as the library's function of C takes them, and what it
//! gives as a reply.
//!
//! ```text
//!   AnyCall ── objects, addresses, scalars and lists looked up ──▶ the library's function ── its code ──▶ what it made, and what it wrote
//! ```
//!
//! Knows shapes of parameters; calls that are about memory, modules and launches are by hand (`accel/cuda-library/src/hand`).

mod call;
mod descriptors;

use std::collections::BTreeMap;
use std::fmt::Write as _;

use accel_spec::cuda::{Body, CType, Cuda, Function, Library, TypeKind};
use accel_spec::{Command, Kind, Life};

use crate::code::HEAD;
use crate::names;

/// Where the functions go.
pub(crate) const LIBRARY: &str = "accel/cuda-library/src/generated";

/// Functions of libraries that are called by hand all the same: they are about memory and its quota, or need to know how many bytes.
const BY_HAND: &[&str] = &[
    "__cudaLaunchKernel",
    "cudaMalloc",
    "cudaFree",
    "cudaMemGetInfo",
    "cudaMemset",
    "cudaMemsetAsync",
    "cudaMemset2DAsync",
];

/// Modules by name, without formatting; `parts` are the numbers of functions whose arguments are parts of descriptors.
pub(super) fn modules(cuda: &Cuda, parts: &BTreeMap<String, u16>) -> Vec<(String, String)> {
    let mut modules = vec![("mod".to_owned(), root(cuda))];
    for library in &cuda.libraries {
        if let Some(text) = group(cuda, library) {
            modules.push((library.name.clone(), text));
        }
    }
    modules.push(("descriptors".to_owned(), descriptors::module(cuda, parts)));
    modules
}

/// Whether a call's function is by hand.
fn is_by_hand(command: &Command) -> bool {
    let by_hand = |kind: &Kind| matches!(kind, Kind::SvmOrBulk { .. } | Kind::Bulk { .. });
    command.name.starts_with("basalt")
        || BY_HAND.contains(&command.name.as_str())
        || command.params.iter().any(|param| by_hand(&param.kind))
}

/// Libraries with functions that are called; each has a table of them.
fn served(cuda: &Cuda) -> impl Iterator<Item = &Library> {
    cuda.libraries
        .iter()
        .filter(|library| !called(cuda, library).is_empty())
}

/// Functions of a library that are called by generated code.
fn called<'a>(cuda: &'a Cuda, library: &'a Library) -> Vec<&'a Function> {
    let crosses = |function: &Function| {
        let command = cuda.api.commands.iter().find(|command| command.name == function.name);
        command.is_some_and(|command| !is_by_hand(command))
    };
    let is_part = |function: &Function| {
        matches!(
            function.body,
            Body::CreateDescriptor | Body::DestroyDescriptor | Body::SetDescriptor { .. }
        )
    };
    let functions = library.functions.iter();
    functions
        .filter(|function| crosses(function) || is_part(function))
        .collect()
}

/// A library's table in Rust.
fn table(library: &Library) -> String {
    let name = library.name.split('_').map(|word| {
        let (first, rest) = word.split_at(1);
        first.to_ascii_uppercase() + rest
    });
    name.collect()
}

/// The type that Rust has for a parameter in C.
fn c_type(cuda: &Cuda, of: &CType) -> &'static str {
    match cuda.types.get(&of.name) {
        Some(TypeKind::Number(rust)) if of.pointers == 0 => rust,
        _ => "P",
    }
}

fn root(cuda: &Cuda) -> String {
    let libraries: Vec<_> = served(cuda).collect();
    let mut text = format!(
        "{HEAD}//! Which function carries out which call, tables of the libraries' functions, and how objects end.\n\n"
    );
    for library in &libraries {
        _ = writeln!(text, "mod {};", library.name);
    }
    text.push_str("pub(crate) mod descriptors;\n\nuse std::sync::OnceLock;\n\nuse crate::failure::Failure;\nuse crate::table::{P, calls, functions};\n\n");
    for library in &libraries {
        tables(cuda, library, &mut text);
    }
    text.push_str("/// Tables of libraries, each made when the first of its functions is called.\n#[derive(Debug, Default)]\npub(crate) struct Tables {\n");
    for library in &libraries {
        _ = writeln!(text, "    pub(crate) {}: OnceLock<{}>,", library.name, table(library));
    }
    text.push_str("}\n\nimpl crate::Libraries {\n");
    for library in &libraries {
        _ = write!(
            text,
            "    /// Functions of {name}.\n    pub(crate) fn {name}(&self) -> Result<&{table}, Failure> {{\n        \
             self.table(&self.tables.{name}, &{files:?}, {table}::find)\n    }}\n\n",
            name = library.name,
            table = table(library),
            files = library.files,
        );
    }
    text.push_str("}\n\n");
    let files = |name: &str| cuda.libraries.iter().find(|library| library.name == name);
    for (constant, name) in [("RUNTIME", "cudart"), ("DRIVER", "cuda")] {
        if let Some(library) = files(name) {
            _ = writeln!(
                text,
                "/// Names of the file of `{name}`.\npub(crate) const {constant}: &[&str] = &{:?};",
                library.files
            );
        }
    }
    dispatch(cuda, &mut text);
    ends(cuda, &mut text);
    text
}

/// The table of a library's functions.
fn tables(cuda: &Cuda, library: &Library, text: &mut String) {
    _ = writeln!(
        text,
        "functions! {{\n    /// Functions of {}.\n    {} {{",
        library.name,
        table(library)
    );
    for function in called(cuda, library) {
        let params = function.declaration.iter().flat_map(|declaration| &declaration.params);
        let params: Vec<_> = params.map(|(_, of, _)| c_type(cuda, of)).collect();
        _ = writeln!(text, "        {}({});", function.name, params.join(", "));
    }
    text.push_str("    }\n}\n\n");
}

/// From a call to its function.
fn dispatch(cuda: &Cuda, text: &mut String) {
    text.push_str("calls! {\n");
    for command in &cuda.api.commands {
        let name = names::command(&cuda.api, &command.name);
        let module = if is_by_hand(command) {
            "crate::hand"
        } else {
            command.group.as_str()
        };
        let function = command.name.trim_start_matches('_');
        let group = group_name(&command.group);
        _ = writeln!(text, "    {name} => {group} {module}::{function};");
    }
    text.push_str("}\n\n");
}

/// cublasLt has cuBLAS' codes.
fn group_name(group: &str) -> &'static str {
    match group {
        "cublas" | "cublas_lt" => "Cublas",
        "cudnn" => "Cudnn",
        "curand" => "Curand",
        _ => "Cudart",
    }
}

/// How objects of each type end that a client has left.
fn ends(cuda: &Cuda, text: &mut String) {
    text.push_str(
        "/// The function by which an object of this type in C ends, if one of a library's does.\npub(crate) fn end_of(\n    libraries: &crate::Libraries,\n    c_type: &str,\n) -> Option<unsafe extern \"C\" fn(P) -> i32> {\n    match c_type {\n",
    );
    for command in cuda.api.commands.iter().filter(|command| !is_by_hand(command)) {
        let [param] = command.params.as_slice() else { continue };
        if let Kind::Handle {
            c_type,
            life: Life::Release,
        } = &param.kind
        {
            _ = writeln!(
                text,
                "        {c_type:?} => libraries.{}().ok()?.{}().ok(),",
                command.group, command.name
            );
        }
    }
    text.push_str("        _ => None,\n    }\n}\n");
}

fn group(cuda: &Cuda, library: &Library) -> Option<String> {
    let mut body = String::new();
    for function in called(cuda, library) {
        let command = cuda.api.commands.iter().find(|command| command.name == function.name);
        if let Some(command) = command {
            call::Writer {
                cuda,
                library,
                function,
                command,
            }
            .write(&mut body);
        }
    }
    if body.is_empty() {
        return None;
    }
    let mut text = format!(
        "{HEAD}//! Calls of `accel/spec/cuda/{}.toml` as its functions take them.\n#![allow(unsafe_code, reason = \"these are calls of functions of C\")]\n#![allow(non_snake_case, reason = \"names are C's\")]\n\n",
        library.name
    );
    let replies = if body.contains("AnyReply::") { "AnyReply, " } else { "" };
    let proto = if replies.is_empty() {
        "use accel_proto::cuda as calls;\n"
    } else {
        "use accel_proto::cuda::{self as calls, AnyReply};\n"
    };
    let list = if body.contains("List::new") {
        "use accel_proto::List;\n"
    } else {
        ""
    };
    _ = writeln!(text, "{list}{proto}");
    let number = if body.contains("number(") { ", number" } else { "" };
    let others: Vec<_> = [("Bytes", "Bytes::"), ("Scalar", "Scalar::")]
        .into_iter()
        .filter(|(_, used)| body.contains(used))
        .map(|(name, _)| name)
        .collect();
    if !others.is_empty() {
        _ = writeln!(text, "use crate::bytes::{{{}}};", others.join(", "));
    }
    _ = writeln!(
        text,
        "use crate::failure::{{Failure, check{number}}};\nuse crate::state::Context;"
    );
    if body.contains("P = ") {
        text.push_str("use crate::table::P;\n");
    }
    text.push('\n');
    Some(text + &body)
}
