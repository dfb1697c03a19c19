//! The rule that a folder of a crate knows only the folders that layers.toml lists for it, as crates know only lower layers.
//!
//! Which folders there are, and what each may know, is data; this file knows none by name. Only paths that begin with
//! `crate::` count: those that begin with `super::` stay inside a folder unless the folder is one file deep.

use std::collections::BTreeSet;

use syn::visit::Visit;

use super::config::Config;
use super::{Finding, Source};

/// Every folder that layers.toml lists names only folders that it may know, and every exception is still needed.
pub(super) fn check(config: &Config, sources: &[Source], findings: &mut Vec<Finding>) {
    for (root, folders) in &config.folders {
        let mut used = BTreeSet::new();
        for source in sources.iter().filter(|source| source.is_rust()) {
            let Some(folder) = folder_of(root, &source.path) else {
                continue;
            };
            let Some(place) = folders.get(folder) else { continue };
            let Ok(file) = syn::parse_file(&source.text) else {
                continue;
            };
            let mut names = Names::default();
            names.visit_file(&file);
            for (line, name) in names.found {
                if name == folder || !folders.contains_key(&name) || place.knows.contains(&name) {
                    continue;
                }
                if place.also.contains_key(&name) {
                    used.insert((folder.to_owned(), name));
                    continue;
                }
                let message = format!(
                    "{root}/{folder} must not know {root}/{name} (layers.toml, [folders]); pass what it needs as an argument, \
                     or move the code"
                );
                findings.push(Finding::new(&source.path, line, message));
            }
        }
        for (folder, place) in folders {
            let unused = place
                .also
                .keys()
                .filter(|name| !used.contains(&(folder.clone(), (*name).clone())));
            for name in unused {
                let message = format!("{root}/{folder} does not use {name} any more; remove it from `also`");
                findings.push(Finding::new("layers.toml", 0, message));
            }
        }
    }
}

/// The folder directly below `root` that a file lies in; a file that lies in `root` itself is a folder of its own name.
fn folder_of<'a>(root: &str, path: &'a str) -> Option<&'a str> {
    let rest = path.strip_prefix(root)?.strip_prefix('/')?;
    Some(match rest.split_once('/') {
        Some((folder, _)) => folder,
        None => rest.strip_suffix(".rs")?,
    })
}

/// The first names behind `crate::`, outside of tests.
#[derive(Default)]
struct Names {
    found: Vec<(usize, String)>,
}

impl Names {
    fn add(&mut self, ident: &syn::Ident) {
        self.found.push((ident.span().start().line, ident.to_string()));
    }

    fn first_of(&mut self, tree: &syn::UseTree) {
        match tree {
            syn::UseTree::Path(path) => self.add(&path.ident),
            syn::UseTree::Name(name) => self.add(&name.ident),
            syn::UseTree::Rename(rename) => self.add(&rename.ident),
            syn::UseTree::Group(group) => group.items.iter().for_each(|item| self.first_of(item)),
            syn::UseTree::Glob(_) => {}
        }
    }
}

impl<'ast> Visit<'ast> for Names {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_for_tests(&item.attrs) {
            syn::visit::visit_item_mod(self, item);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.segments.len() > 1 && path.segments[0].ident == "crate" {
            self.add(&path.segments[1].ident);
        }
        syn::visit::visit_path(self, path);
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if let syn::UseTree::Path(path) = &item.tree
            && path.ident == "crate"
        {
            self.first_of(&path.tree);
        }
    }
}

/// `#[cfg(test)]`.
fn is_for_tests(attributes: &[syn::Attribute]) -> bool {
    let tests = |attribute: &syn::Attribute| {
        attribute.path().is_ident("cfg")
            && attribute
                .parse_args::<syn::Ident>()
                .is_ok_and(|argument| argument == "test")
    };
    attributes.iter().any(tests)
}

#[cfg(test)]
mod tests {
    use super::super::config::tests::SMALL;
    use super::super::tests::source;
    use super::*;

    const FOLDERS: &str = r#"
        [folders."crates/a/src"]
        top = { knows = ["low"] }
        low = { knows = [], also = { side = "until it is passed as a value" } }
        side = { knows = [] }
    "#;

    fn found(path: &str, text: &str) -> Vec<String> {
        let mut findings = Vec::new();
        let config = Config::parse(&format!("{SMALL}{FOLDERS}")).unwrap();
        check(&config, &[source(path, text)], &mut findings);
        findings.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_folder_names_only_what_it_may_know() {
        let allowed = "//! x\nuse crate::low::Thing;\nuse crate::Error;\nfn f() { crate::low::g(); }\n";
        assert_eq!(
            found("crates/a/src/top/x.rs", allowed).len(),
            1,
            "the unused exception alone"
        );
        let wrong = "//! x\nuse crate::{Error, top};\nfn f() { crate::side::g() }\n";
        let lines = found("crates/a/src/low.rs", wrong);
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].starts_with("crates/a/src/low.rs:2: crates/a/src/low must not know crates/a/src/top"));
    }

    #[test]
    fn tests_and_other_crates_may_name_anything() {
        let text = "//! x\n#[cfg(test)]\nmod tests { use crate::top::x; use crate::side::y; }\n";
        let lines = found("crates/a/src/low/x.rs", text);
        assert!(lines.iter().all(|line| line.starts_with("layers.toml")), "{lines:?}");
        assert_eq!(found("crates/b/src/low/x.rs", "//! x\nuse crate::top::x;\n").len(), 1);
    }

    #[test]
    fn an_exception_that_nothing_needs_is_told() {
        let lines = found("crates/a/src/low/x.rs", "//! x\n");
        assert!(lines[0].contains("does not use side any more"), "{lines:?}");
    }
}
