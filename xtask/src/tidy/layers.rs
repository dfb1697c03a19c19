//! The rule that a crate knows only what is below it, compared with what cargo says of its dependencies.
//!
//! Which crate stands where is data (layers.toml); this file knows no crate by name.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;
use syn::visit::Visit;

use super::config::{Config, matches};
use super::{Finding, Source};

/// A member of the workspace.
#[derive(Debug, Clone)]
pub(super) struct Package {
    /// Its folder, from the root.
    pub(super) path: String,
    /// Its package name.
    pub(super) name: String,
    /// The name that code uses; empty for a crate without a library.
    pub(super) library: String,
    /// The members that it depends on, for its code, its tests or its build.
    pub(super) needs: Vec<Need>,
}

/// A dependency on another member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Need {
    /// Its folder.
    pub(super) path: String,
    /// Whether only tests use it.
    pub(super) tests: bool,
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<MetadataPackage>,
}

#[derive(Deserialize)]
struct MetadataPackage {
    name: String,
    manifest_path: String,
    dependencies: Vec<MetadataDependency>,
    targets: Vec<MetadataTarget>,
}

#[derive(Deserialize)]
struct MetadataDependency {
    path: Option<String>,
    kind: Option<String>,
}

#[derive(Deserialize)]
struct MetadataTarget {
    name: String,
    kind: Vec<String>,
}

/// Asks cargo.
pub(super) fn packages(root: &Path) -> Result<Vec<Package>> {
    let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(root)
        .output()
        .context("cannot run cargo")?;
    if !output.status.success() {
        bail!(
            "cargo metadata failed: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    parse(root, &output.stdout)
}

fn parse(root: &Path, json: &[u8]) -> Result<Vec<Package>> {
    let metadata: Metadata = serde_json::from_slice(json)?;
    let folder = |path: &str| {
        Path::new(path)
            .strip_prefix(root)
            .map(|path| path.to_string_lossy().into_owned())
            .unwrap_or_default()
    };
    let need = |needed: &MetadataDependency| {
        let path = folder(needed.path.as_deref()?);
        Some(Need {
            path,
            tests: needed.kind.as_deref() == Some("dev"),
        })
    };
    let packages = metadata.packages.into_iter().map(|package| {
        let manifest = folder(&package.manifest_path);
        let is_library = |target: &&MetadataTarget| target.kind.iter().any(|kind| kind == "lib");
        Package {
            path: manifest.trim_end_matches("Cargo.toml").trim_end_matches('/').to_owned(),
            library: package
                .targets
                .iter()
                .find(is_library)
                .map(|target| target.name.clone())
                .unwrap_or_default(),
            needs: package.dependencies.iter().filter_map(need).collect(),
            name: package.name,
        }
    });
    Ok(packages.collect())
}

/// Every member has a place, and every dependency goes downwards.
pub(super) fn check(config: &Config, packages: &[Package], findings: &mut Vec<Finding>) {
    for package in packages {
        let manifest = format!("{}/Cargo.toml", package.path);
        let Some(place) = config.crates.get(&package.path) else {
            let message = "this crate has no layer; add it to [crates] in layers.toml";
            findings.push(Finding::new(&manifest, 0, message));
            continue;
        };
        for Need { path: needed, tests } in &package.needs {
            let Some(below) = config.crates.get(needed) else {
                continue;
            };
            let refused = place.never.iter().any(|pattern| matches(pattern, needed));
            let listed = config.allowed.iter().any(|allowed| {
                allowed.to == *needed && allowed.from.contains(&package.path) && (*tests || !allowed.tests)
            });
            let allowed = listed || config.layers[&place.layer].knows.contains(&below.layer);
            let (name, from, to) = (&package.path, &place.layer, &below.layer);
            if refused {
                let message = format!("{name} must never know {needed} (layers.toml); move the code that needs it");
                findings.push(Finding::new(&manifest, 0, message));
            } else if !allowed && from == to {
                let message = format!(
                    "{name} depends on {needed} of its own layer {from}; remove it, or add an [[allowed]] entry with the reason"
                );
                findings.push(Finding::new(&manifest, 0, message));
            } else if !allowed {
                let message = format!("{name} ({from}) must not know {needed} ({to}); turn the dependency around");
                findings.push(Finding::new(&manifest, 0, message));
            }
        }
    }
    let there: BTreeMap<_, _> = packages
        .iter()
        .map(|package| (package.path.as_str(), package))
        .collect();
    for path in config.crates.keys().filter(|path| !there.contains_key(path.as_str())) {
        findings.push(Finding::new(
            "layers.toml",
            0,
            format!("{path} is no crate of the workspace; remove its line"),
        ));
    }
}

/// Outside the catalog, no file of its crate names a device crate. Other crates cannot: they have no such dependency.
pub(super) fn check_catalog(config: &Config, packages: &[Package], sources: &[Source], findings: &mut Vec<Finding>) {
    let is_device = |package: &&Package| matches(&config.catalog.devices, &package.path);
    let devices: Vec<_> = packages
        .iter()
        .filter(is_device)
        .map(|package| package.library.as_str())
        .collect();
    let Some((folder, _)) = config.catalog.file.split_once("/src/") else {
        return;
    };
    let folder = format!("{folder}/");
    for source in sources
        .iter()
        .filter(|source| source.path.starts_with(&folder) && source.is_rust())
    {
        if source.path == config.catalog.file {
            continue;
        }
        let Ok(file) = syn::parse_file(&source.text) else {
            continue;
        };
        let mut names = Names {
            devices: &devices,
            found: Vec::new(),
        };
        names.visit_file(&file);
        for (line, name) in names.found {
            let message = format!("names the device crate {name}; only {} may", config.catalog.file);
            findings.push(Finding::new(&source.path, line, message));
        }
    }
}

/// Paths and imports that begin with a device crate's name.
struct Names<'a> {
    devices: &'a [&'a str],
    found: Vec<(usize, String)>,
}

impl Names<'_> {
    fn look(&mut self, ident: &syn::Ident) {
        if self.devices.iter().any(|device| ident == device) {
            self.found.push((ident.span().start().line, ident.to_string()));
        }
    }
}

impl<'ast> Visit<'ast> for Names<'_> {
    fn visit_path(&mut self, path: &'ast syn::Path) {
        // A path of one segment is a local name.
        if path.segments.len() > 1 {
            self.look(&path.segments[0].ident);
        }
        syn::visit::visit_path(self, path);
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        match &item.tree {
            syn::UseTree::Path(path) => self.look(&path.ident),
            syn::UseTree::Name(name) => self.look(&name.ident),
            syn::UseTree::Rename(rename) => self.look(&rename.ident),
            _ => {}
        }
    }

    fn visit_item_extern_crate(&mut self, item: &'ast syn::ItemExternCrate) {
        self.look(&item.ident);
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::tests::SMALL;
    use super::super::tests::source;
    use super::*;

    fn package(path: &str, needs: &[&str]) -> Package {
        let name = path.rsplit('/').next().unwrap().to_owned();
        let needs = needs
            .iter()
            .map(|&needed| Need {
                path: needed.to_owned(),
                tests: false,
            })
            .collect();
        Package {
            path: path.to_owned(),
            library: name.clone(),
            name,
            needs,
        }
    }

    fn found(text: &str, packages: &[Package]) -> Vec<String> {
        let mut findings = Vec::new();
        check(&Config::parse(text).unwrap(), packages, &mut findings);
        findings.iter().map(ToString::to_string).collect()
    }

    fn members(b: &[&str], c: &[&str]) -> Vec<Package> {
        vec![package("crates/a", &[]), package("crates/b", b), package("crates/c", c)]
    }

    #[test]
    fn downwards_is_right() {
        assert!(found(SMALL, &members(&[], &["crates/a"])).is_empty());
    }

    #[test]
    fn upwards_sideways_and_forbidden_are_wrong() {
        assert!(found(SMALL, &members(&["crates/c"], &[]))[0].contains("must not know crates/c (L1)"));
        assert!(found(SMALL, &members(&["crates/a"], &[]))[0].contains("[[allowed]]"));
        assert!(found(SMALL, &members(&[], &["crates/b"]))[0].contains("must never know crates/b"));
    }

    #[test]
    fn sideways_is_right_where_listed() {
        let text = format!("{SMALL}\n[[allowed]]\nfrom = [\"crates/b\"]\nto = \"crates/a\"\nreason = \"r\"\n");
        assert!(found(&text, &members(&["crates/a"], &[])).is_empty());
    }

    #[test]
    fn what_only_tests_may_know_stays_out_of_the_code() {
        let text =
            format!("{SMALL}\n[[allowed]]\nfrom = [\"crates/b\"]\nto = \"crates/c\"\ntests = true\nreason = \"r\"\n");
        let mut packages = members(&["crates/c"], &[]);
        assert_eq!(found(&text, &packages).len(), 1);
        packages[1].needs[0].tests = true;
        assert!(found(&text, &packages).is_empty());
    }

    #[test]
    fn the_list_and_the_workspace_are_the_same() {
        let mut more = members(&[], &[]);
        more.push(package("crates/new", &[]));
        assert!(found(SMALL, &more)[0].contains("has no layer"));
        assert!(found(SMALL, &more[..2])[0].contains("crates/c is no crate"));
    }

    #[test]
    fn a_device_is_named_in_the_catalog_only() {
        let config = Config::parse(SMALL).unwrap();
        let packages = [package("devices/block", &[])];
        let text = "//! x\nuse block::Disk;\nfn f() { block::new(); let block = 1; g(block); }\n";
        let sources = ["bin/vmm/src/main.rs", "bin/vmm/src/catalog.rs"].map(|path| source(path, text));
        let mut findings = Vec::new();
        check_catalog(&config, &packages, &sources, &mut findings);
        let lines: Vec<_> = findings
            .iter()
            .map(|finding| (finding.file.as_str(), finding.line))
            .collect();
        assert_eq!(lines, [("bin/vmm/src/main.rs", 2), ("bin/vmm/src/main.rs", 3)]);
    }

    #[test]
    fn cargos_words_are_understood() {
        let json = br#"{"packages":[{"name":"basalt-b","manifest_path":"/r/crates/b/Cargo.toml",
            "dependencies":[{"path":"/r/crates/a","kind":"dev"},{"path":null}],
            "targets":[{"name":"b","kind":["lib"]},{"name":"t","kind":["test"]}]}]}"#;
        let packages = parse(Path::new("/r"), json).unwrap();
        let Package {
            path,
            name,
            library,
            needs,
        } = &packages[0];
        assert_eq!(
            (path.as_str(), name.as_str(), library.as_str()),
            ("crates/b", "basalt-b", "b")
        );
        assert_eq!(
            needs,
            &[Need {
                path: "crates/a".into(),
                tests: true
            }]
        );
    }
}
