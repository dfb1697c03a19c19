//! What the calls of accelerator APIs are. Shape, which is names, types and versions, comes from the maker's registry
//! (`opencl/cl.xml`); meaning, which is directions, lengths, lives of objects and how a call travels, from annotations of
//! ours (`opencl/*.toml`, whose words are in README.md). [`opencl`] puts them together and refuses what does not fit. CUDA has no registry:
//! [`cuda::cuda`] reads declarations and meaning from one file for each library.
//!
//! Knows nothing of what is generated from it, of records or of rings, and calls no accelerator.

pub mod cuda;
mod error;
mod length;
mod model;
mod notes;
mod params;
mod resolve;
mod shape;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

pub use error::SpecError;
pub use length::{Factor, Length};
pub use model::{
    Api, Check, Command, Direction, Effect, Element, Flow, HandleKind, Key, Kind, Life, Param, Quota, Service, Struct,
};

use notes::CommandNote;
use resolve::{Defaults, Notes};
use shape::Shape;

/// The file of annotations that is about parameters of all commands.
const DEFAULTS: &str = "defaults.toml";

/// Reads OpenCL's specification beneath the tree's root.
///
/// # Errors
///
/// What cannot be read, and the first annotation that does not fit.
pub fn opencl(root: &Path) -> Result<Api, SpecError> {
    let dir = "accel/spec/opencl";
    let shape = Shape::parse("accel/spec/opencl/cl.xml", &read(&root.join(dir).join("cl.xml"))?)?;
    let mut files = Vec::new();
    for entry in fs::read_dir(root.join(dir)).map_err(|source| unreadable(&root.join(dir), source))? {
        let path = entry.map_err(|source| unreadable(&root.join(dir), source))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.ends_with(".toml") {
            files.push((format!("{dir}/{name}"), read(&path)?));
        }
    }
    files.sort();
    let files: Vec<_> = (files.iter())
        .map(|(name, text)| (name.as_str(), text.as_str()))
        .collect();
    together("opencl", "cl", &shape, &files)
}

fn read(path: &Path) -> Result<String, SpecError> {
    fs::read_to_string(path).map_err(|source| unreadable(path, source))
}

fn unreadable(path: &Path, source: std::io::Error) -> SpecError {
    let path = path.to_owned();
    SpecError::Unreadable { path, source }
}

/// Parses files of annotations, by path and text, and puts them together with a shape.
fn together(name: &str, prefix: &str, shape: &Shape, files: &[(&str, &str)]) -> Result<Api, SpecError> {
    let mut defaults = Defaults {
        file: String::new(),
        params: BTreeMap::new(),
    };
    let mut notes = Vec::new();
    for (file, text) in files {
        let syntax = |error: toml::de::Error| SpecError::Syntax {
            file: (*file).to_owned(),
            what: error.to_string().trim().to_owned(),
        };
        let last = file.rsplit('/').next().unwrap_or(file);
        if last == DEFAULTS {
            let params = toml::from_str(text).map_err(syntax)?;
            defaults = Defaults {
                file: (*file).to_owned(),
                params,
            };
            continue;
        }
        let commands: BTreeMap<String, CommandNote> = toml::from_str(text).map_err(syntax)?;
        notes.push(Notes {
            file: (*file).to_owned(),
            group: last.trim_end_matches(".toml").to_owned(),
            commands,
        });
    }
    resolve::resolve(name, prefix, shape, &defaults, &notes)
}

#[cfg(test)]
mod tests;
