//! What can be wrong with a specification: which file, which command, which parameter, what, and what to do.
//!
//! Knows no rule; the rules are in `resolve`, `length` and `shape`.

use std::path::PathBuf;

/// A specification that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// A file cannot be read.
    #[error("cannot read {}; the tree has it under accel/spec", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A registry's XML is none, or has not the form that it is read in.
    #[error("{file}: {what}; is it the registry's own file? The README beside it says which one is meant")]
    Shape {
        /// The file.
        file: String,
        /// What is wrong, with its line where there is one.
        what: String,
    },
    /// Annotations are no TOML, or have a key that means nothing.
    #[error("{file}: {what}; accel/spec/README.md lists the words")]
    Syntax {
        /// The file.
        file: String,
        /// What is wrong.
        what: String,
    },
    /// An annotation contradicts the shape, or says too little.
    #[error("{file}: {command}: {}{what}", in_parameter(parameter))]
    Wrong {
        /// The annotations' file.
        file: String,
        /// The command.
        command: String,
        /// The parameter; empty if it is the command's own words.
        parameter: String,
        /// What is wrong, and what to do.
        what: String,
    },
}

fn in_parameter(name: &str) -> String {
    if name.is_empty() {
        String::new()
    } else {
        format!("parameter {name}: ")
    }
}
