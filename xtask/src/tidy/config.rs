//! layers.toml: layers, crates, budgets and exceptions.
//!
//! Only reads and validates the file; the rules that use it are in `layers` and `shape`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;

/// The whole file.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Config {
    /// Layers by name.
    pub(super) layers: BTreeMap<String, Layer>,
    /// Crates by path.
    pub(super) crates: BTreeMap<String, Crate>,
    /// The file that may name devices.
    pub(super) catalog: Catalog,
    /// Dependencies that the layers alone would not allow.
    #[serde(default)]
    pub(super) allowed: Vec<Allowed>,
    /// Crates that are divided by folders: by the crate's source folder, what each folder in it may know.
    #[serde(default)]
    pub(super) folders: BTreeMap<String, BTreeMap<String, Folder>>,
    /// Files that others wrote and that stay as they are: their SHA-256 by path.
    #[serde(default)]
    pub(super) vendored: BTreeMap<String, String>,
    /// Folders of files that are generated, which may be longer than others: why, by path with its last slash.
    #[serde(default)]
    pub(super) generated: BTreeMap<String, String>,
    /// Limits by what they limit.
    pub(super) budgets: BTreeMap<String, Budget>,
    /// What may exceed them.
    #[serde(default, rename = "exception")]
    pub(super) exceptions: Vec<Exception>,
}

/// A layer.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Layer {
    /// Layers that its crates may depend on.
    pub(super) knows: Vec<String>,
    /// For the reader.
    pub(super) purpose: String,
}

/// A crate's place.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Crate {
    /// Its layer's name.
    pub(super) layer: String,
    /// Crates that it must not know in spite of the layer.
    #[serde(default)]
    pub(super) never: Vec<String>,
}

/// Where device crates may be named.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Catalog {
    /// The file.
    pub(super) file: String,
    /// Which crates are devices.
    pub(super) devices: String,
}

/// A permitted dependency inside a layer, or of tests only.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Allowed {
    /// Crates that may know it.
    pub(super) from: Vec<String>,
    /// What they may know.
    pub(super) to: String,
    /// Only in their tests.
    #[serde(default)]
    pub(super) tests: bool,
    /// Why.
    pub(super) reason: String,
}

/// A folder's place in its crate.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Folder {
    /// Folders of the crate that it may name.
    pub(super) knows: Vec<String>,
    /// Folders that it names although the order would not allow it, with the reason.
    #[serde(default)]
    pub(super) also: BTreeMap<String, String>,
}

/// A style limit.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Budget {
    /// Without an exception.
    pub(super) limit: usize,
    /// With one.
    pub(super) hard: usize,
}

/// Something that may exceed its budget.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Exception {
    /// Which budget.
    pub(super) budget: String,
    /// In which file.
    pub(super) path: String,
    /// Which item; empty for the file itself.
    #[serde(default)]
    pub(super) item: String,
    /// Why.
    pub(super) reason: String,
}

impl Config {
    /// Reads the checkout's file.
    pub(super) fn read(root: &Path) -> Result<Self> {
        let path = root.join("layers.toml");
        Self::parse(&fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?)
    }

    /// Parses and validates.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let config: Self = toml::from_str(text).context("layers.toml is wrong")?;
        let names = config.layers.values().flat_map(|layer| &layer.knows);
        for name in names.chain(config.crates.values().map(|entry| &entry.layer)) {
            if !config.layers.contains_key(name) {
                bail!("layers.toml names the layer {name}, which it does not define");
            }
        }
        if let Some((name, _)) = config.layers.iter().find(|(_, layer)| layer.purpose.trim().is_empty()) {
            bail!("layers.toml: the layer {name} has no purpose");
        }
        if let Some(allowed) = config.allowed.iter().find(|allowed| allowed.reason.trim().is_empty()) {
            bail!("layers.toml: the [[allowed]] entry for {} has no reason", allowed.to);
        }
        for (root, folders) in &config.folders {
            for (folder, place) in folders {
                let unknown = |name: &&String| !folders.contains_key(*name);
                if let Some(name) = place.knows.iter().chain(place.also.keys()).find(unknown) {
                    bail!("layers.toml: {root}/{folder} names {name}, which [folders] does not list");
                }
                if reaches(folders, folder, folder) {
                    bail!(
                        "layers.toml: {root}/{folder} knows itself by way of others; list one of them in `also`, with the reason"
                    );
                }
                if let Some((name, _)) = place.also.iter().find(|(_, reason)| reason.trim().is_empty()) {
                    bail!("layers.toml: {root}/{folder} knows {name} without a reason");
                }
            }
        }
        for exception in &config.exceptions {
            if exception.reason.trim().is_empty() || !config.budgets.contains_key(&exception.budget) {
                bail!(
                    "layers.toml: the [[exception]] for {} needs a reason and a known budget",
                    exception.path
                );
            }
        }
        Ok(config)
    }
}

/// Whether one folder knows another, itself or by way of what it knows.
fn reaches(folders: &BTreeMap<String, Folder>, from: &str, to: &str) -> bool {
    let mut seen = std::collections::BTreeSet::new();
    let mut open = vec![from];
    while let Some(folder) = open.pop() {
        for known in folders.get(folder).into_iter().flat_map(|place| &place.knows) {
            if known == to {
                return true;
            }
            if seen.insert(known.as_str()) {
                open.push(known);
            }
        }
    }
    false
}

/// Whether a crate's path is the pattern, or lies in the folder that the pattern names with `/*`.
pub(super) fn matches(pattern: &str, path: &str) -> bool {
    match pattern.strip_suffix("/*") {
        Some(folder) => path.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/')),
        None => pattern == path,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A small file of the real shape.
    pub(in crate::tidy) const SMALL: &str = r#"
        [layers]
        L0 = { knows = [], purpose = "floor" }
        L1 = { knows = ["L0"], purpose = "above" }
        [crates]
        "crates/a" = { layer = "L0" }
        "crates/b" = { layer = "L0" }
        "crates/c" = { layer = "L1", never = ["crates/b"] }
        [catalog]
        file = "bin/vmm/src/catalog.rs"
        devices = "devices/*"
        [budgets]
        file = { limit = 5, hard = 8 }
        function = { limit = 3, hard = 4 }
        trait = { limit = 2, hard = 3 }
        struct = { limit = 2, hard = 3 }
        parameters = { limit = 2, hard = 3 }
    "#;

    #[test]
    fn unknown_layers_and_missing_reasons_are_refused() {
        assert!(Config::parse(SMALL).is_ok());
        let unknown = SMALL.replace("knows = [\"L0\"]", "knows = [\"L9\"]");
        assert!(format!("{}", Config::parse(&unknown).unwrap_err()).contains("L9"));
        let silent = format!("{SMALL}\n[[allowed]]\nfrom = []\nto = \"x\"\nreason = \" \"\n");
        assert!(Config::parse(&silent).is_err());
        let vague = format!("{SMALL}\n[[exception]]\nbudget = \"file\"\npath = \"x\"\nreason = \"\"\n");
        assert!(Config::parse(&vague).is_err());
        assert!(Config::parse(&format!("{SMALL}\n[surprise]\n")).is_err());
    }

    #[test]
    fn folders_know_each_other_one_way() {
        let folders = |a: &str, b: &str| {
            Config::parse(&format!(
                "{SMALL}\n[folders.\"crates/a/src\"]\na = {{ {a} }}\nb = {{ {b} }}\n"
            ))
        };
        assert!(folders("knows = [\"b\"]", "knows = []").is_ok());
        assert!(folders("knows = [\"b\"]", "knows = [\"a\"]").is_err());
        assert!(folders("knows = [\"b\"]", "knows = [], also = { a = \"until it moves\" }").is_ok());
        assert!(folders("knows = [\"b\"]", "knows = [], also = { a = \"\" }").is_err());
        assert!(folders("knows = [\"c\"]", "knows = []").is_err());
    }

    #[test]
    fn a_folder_pattern_covers_what_is_in_it() {
        assert!(matches("devices/*", "devices/block"));
        assert!(!matches("devices/*", "devices"));
        assert!(!matches("devices/*", "devices2/x"));
        assert!(matches("crates/a", "crates/a"));
    }
}
