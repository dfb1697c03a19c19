//! The licences of the libraries that our programs are linked with, as cargo knows them and as their authors wrote them.
//!
//! Judges nothing: `cargo deny` does (`deny.toml`).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::build::cargo;
use super::deb::captured;
use crate::context::{Context, MUSL};

/// Beginnings of the names of files that hold a licence or a notice.
const NAMES: [&str; 5] = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE"];

/// A list of all libraries of these packages' programs, then each licence's text, with who has it.
pub(super) fn text(context: &Context, packages: &[&str]) -> Result<String> {
    let arguments = [
        "metadata",
        "--format-version",
        "1",
        "--locked",
        "--filter-platform",
        MUSL,
    ];
    let mut command = std::process::Command::new(cargo(context, &[]).get_program());
    let said = captured(command.args(arguments).current_dir(&context.root))?;
    let metadata: Value = serde_json::from_slice(&said).context("cargo metadata")?;
    let linked = linked(&metadata, packages)?;
    let mut list = String::new();
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let id = package["id"].as_str().unwrap_or_default();
        // Our own have no source.
        if package["source"].is_null() || !linked.contains(id) {
            continue;
        }
        let word = |key: &str| package[key].as_str().unwrap_or("not said").to_owned();
        let name = format!("{} {}", word("name"), word("version"));
        writeln!(list, "{name}: {}", word("license"))?;
        let manifest = word("manifest_path");
        for text in files(
            Path::new(&manifest)
                .parent()
                .context("a manifest without a directory")?,
        )? {
            texts.entry(text).or_default().push(name.clone());
        }
    }
    let mut whole = format!("Libraries that the programs are linked with, and their licenses\n\n{list}");
    for (text, names) in texts {
        write!(whole, "\n\n---- {}\n\n{}\n", names.join(", "), text.trim_end())?;
    }
    Ok(whole)
}

/// The ids of everything that these packages need to run; what only builds or tests them is left out.
fn linked(metadata: &Value, packages: &[&str]) -> Result<BTreeSet<String>> {
    let nodes = metadata["resolve"]["nodes"]
        .as_array()
        .context("cargo metadata has no graph")?;
    let all = metadata["packages"]
        .as_array()
        .context("cargo metadata has no packages")?;
    let id_of = |wanted: &&str| {
        let found = all.iter().find(|package| package["name"] == **wanted);
        let id = found.and_then(|package| package["id"].as_str());
        id.map(str::to_owned)
            .with_context(|| format!("there is no package {wanted}"))
    };
    let mut waiting = packages.iter().map(id_of).collect::<Result<Vec<_>>>()?;
    let mut found = BTreeSet::new();
    while let Some(id) = waiting.pop() {
        let node = nodes.iter().find(|node| node["id"] == id.as_str());
        if !found.insert(id) {
            continue;
        }
        let needs = node.and_then(|node| node["deps"].as_array()).into_iter().flatten();
        for need in needs {
            let normal = need["dep_kinds"]
                .as_array()
                .is_some_and(|kinds| kinds.iter().any(|kind| kind["kind"].is_null()));
            waiting.extend(need["pkg"].as_str().filter(|_| normal).map(str::to_owned));
        }
    }
    Ok(found)
}

/// The texts of a library's licence files.
fn files(directory: &Path) -> Result<Vec<String>> {
    let mut paths: Vec<_> = fs::read_dir(directory)?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_>>()?;
    paths.sort();
    let is_licence = |path: &&std::path::PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_uppercase();
        path.is_file() && NAMES.iter().any(|start| name.starts_with(start))
    };
    let read = |path: &std::path::PathBuf| Ok(String::from_utf8_lossy(&fs::read(path)?).into_owned());
    paths.iter().filter(is_licence).map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_runs_is_listed_and_what_builds_is_not() {
        let metadata = serde_json::json!({
            "packages": [{"name": "ours", "id": "o"}, {"name": "a", "id": "a"}, {"name": "b", "id": "b"}, {"name": "c", "id": "c"}],
            "resolve": {"nodes": [
                {"id": "o", "deps": [{"pkg": "a", "dep_kinds": [{"kind": null}]}, {"pkg": "b", "dep_kinds": [{"kind": "build"}]}]},
                {"id": "a", "deps": [{"pkg": "c", "dep_kinds": [{"kind": "dev"}, {"kind": null}]}]},
                {"id": "b", "deps": []}, {"id": "c", "deps": []},
            ]},
        });
        let found = linked(&metadata, &["ours"]).unwrap();
        assert_eq!(found.into_iter().collect::<Vec<_>>(), ["a", "c", "o"]);
        assert!(linked(&metadata, &["theirs"]).is_err());
    }
}
