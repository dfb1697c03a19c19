//! The table of CUDA's functions for people: docs/accel-cuda-calls.md.
//!
//! Knows nothing that is not in the specification.

use std::fmt::Write as _;

use accel_spec::cuda::{Body, Cuda, Library};

/// The page.
pub(crate) fn page(cuda: &Cuda) -> String {
    let all = || cuda.libraries.iter().flat_map(|library| &library.functions);
    let not_served = all()
        .filter(|function| matches!(function.body, Body::NotServed(_)))
        .count();
    let by_hand = all().filter(|function| matches!(function.body, Body::Hand(_))).count();
    let mut text = format!(
        "# Functions of CUDA's libraries\n\nMade by `cargo xtask accel` from [accel/spec](../accel/spec/README.md); do not edit. [accel-cuda.md](accel-cuda.md) says\nwhat the columns mean.\n\n{} functions: {} generated, {by_hand} by hand, {not_served} not \
         served.\n",
        all().count(),
        all().count() - not_served - by_hand
    );
    for library in &cuda.libraries {
        section(&mut text, library);
    }
    text
}

fn section(text: &mut String, library: &Library) {
    _ = write!(text, "\n## {}\n\n", library.name);
    let files: Vec<_> = library.files.iter().map(|file| format!("`{file}`")).collect();
    let (served, rest): (Vec<_>, Vec<_>) = library
        .functions
        .iter()
        .partition(|function| !matches!(function.body, Body::NotServed(_)));
    _ = writeln!(
        text,
        "{}.\n\nWhat is not served answers `{}`.",
        files.join(", "),
        library.not_served.0
    );
    if !served.is_empty() {
        text.push_str("\n| function | how it travels | body |\n|---|---|---|\n");
        for function in served {
            let body = match &function.body {
                Body::Hand(reason) => format!("by hand: {reason}"),
                Body::NotServed(_) => String::new(),
                Body::Send { repeats: true } => "generated; a repetition stays in the client".into(),
                Body::Send { .. } | Body::Ask { .. } => "generated".into(),
                Body::CreateDescriptor | Body::DestroyDescriptor | Body::SetDescriptor { .. } => {
                    "generated: a descriptor's".into()
                }
            };
            _ = writeln!(text, "| `{}` | {} | {body} |", function.name, function.flow);
        }
    }
    if !rest.is_empty() {
        _ = writeln!(text, "\n{} more are not served.", rest.len());
    }
}
