//! What the calls of CUDA's libraries are: names, C types and values as their public documentation has them, and what they mean, in
//! annotations of ours, one file for each library (`accel/spec/cuda/*.toml`). No header of the maker's is read: a declaration stands
//! beside its meaning.
//!
//! Knows nothing of what is generated from it, and calls no library.

mod c;
mod notes;
mod params;
mod resolve;
#[cfg(test)]
mod tests;
mod types;

use std::fs;
use std::path::Path;

pub use c::{CType, Declaration};
pub use resolve::snake;
pub use types::{TypeKind, Types};

use crate::error::SpecError;
use crate::model::Api;

/// Where the annotations are.
const DIRECTORY: &str = "accel/spec/cuda";

/// CUDA's libraries.
#[derive(Debug, Clone)]
pub struct Cuda {
    /// The calls that cross, as generators of both sides read them.
    pub api: Api,
    /// The libraries, in the order of their files' names.
    pub libraries: Vec<Library>,
    /// All types that declarations name.
    pub types: Types,
}

/// A library.
#[derive(Debug, Clone)]
pub struct Library {
    /// The annotations' file without its ending, which is the module's name.
    pub name: String,
    /// Names of files that programs look for (`DT_SONAME`).
    pub files: Vec<String>,
    /// Versions of its symbols, the one for programs that name none first; empty if it has none.
    pub versions: Vec<String>,
    /// Names of files of versions that are not served, each of which is its symbols' version, too: programs find them, and are told.
    pub refused: Vec<String>,
    /// What a function answers that nobody serves.
    pub not_served: (String, i64),
    /// Constants by their types.
    pub enums: Vec<(String, Vec<(String, i64)>)>,
    /// All functions, in the order of their names.
    pub functions: Vec<Function>,
}

/// A function of a library.
#[derive(Debug, Clone)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// Its declaration; none if nobody serves it, as nothing is looked at then.
    pub declaration: Option<Declaration>,
    /// What the client's function does.
    pub body: Body,
    /// The versions of the library in which it has this name; empty for all of them.
    pub only: Vec<String>,
    /// How it travels, for people.
    pub flow: String,
    /// Numbers in the program's memory that are one value of a type that the call decides: parameter, and how many bytes they have, or the
    /// parameter from which that follows.
    pub scalars: Vec<(String, String)>,
    /// Of a function by hand: whether it takes the parameters, in their order; the others are not looked at.
    pub taken: Vec<bool>,
    /// Of a function by hand: parameters of one type, behind each other, that it takes as one list.
    pub together: Vec<Vec<String>>,
    /// Of what goes into a descriptor: parameters that are lists, and how many elements (bytes of `void`) each has.
    pub inputs: Vec<(String, String)>,
}

/// What the client's function does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Body {
    /// It answers this and counts.
    NotServed(i64),
    /// A function by hand; with the reason.
    Hand(String),
    /// It puts a record and goes on; `repeats` where the same call with the same arguments for the same object stays here.
    Send {
        /// Whether a repetition stays here.
        repeats: bool,
    },
    /// It waits for the answer; `kept` where the same question is asked once.
    Ask {
        /// Whether the answer is kept.
        kept: bool,
    },
    /// It makes a descriptor, which is a value of the client's: its content travels with the calls that use it.
    CreateDescriptor,
    /// It drops a descriptor.
    DestroyDescriptor,
    /// It puts its arguments into a descriptor, in place of those of the same function before; of the same `key`, if there is one.
    SetDescriptor {
        /// The parameter by which several calls of the function are kept apart.
        key: Option<String>,
    },
}

/// Reads the specification beneath the tree's root.
///
/// # Errors
///
/// What cannot be read, and the first annotation that does not fit.
pub fn cuda(root: &Path) -> Result<Cuda, SpecError> {
    let directory = root.join(DIRECTORY);
    let unreadable = |source| SpecError::Unreadable {
        path: directory.clone(),
        source,
    };
    let mut files = Vec::new();
    for entry in fs::read_dir(&directory).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.ends_with(".toml") {
            let text = fs::read_to_string(&path).map_err(|source| SpecError::Unreadable { path, source })?;
            files.push((format!("{DIRECTORY}/{name}"), text));
        }
    }
    files.sort();
    let files: Vec<_> = files
        .iter()
        .map(|(name, text)| (name.as_str(), text.as_str()))
        .collect();
    resolve::resolve(&files)
}
