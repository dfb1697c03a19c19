//! The rule that the documents know the code: ARCHITECTURE.md mentions every crate, what must exist exists, prose is wrapped, and
//! pictures are renderings of the sources beside them.
//!
//! Whether what they say is true is for a reader, and for the step `docs`, which runs their commands.

use sha2::{Digest as _, Sha256};

use super::layers::Package;
use super::{Finding, Source};
use crate::wrap;

/// Where pictures are, each as NAME.dot and NAME.svg.
const PICTURES: &str = "docs/pictures/";

/// Documents that a person looks for first.
const EXPECTED: &[&str] = &[
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "README.md",
];

/// Checks the documents.
pub(super) fn check(packages: &[Package], sources: &[Source], findings: &mut Vec<Finding>) {
    pictures(sources, findings);
    wrapped(sources, findings);
    for name in EXPECTED {
        if !sources.iter().any(|source| source.path == *name) {
            findings.push(Finding::new(name, 0, "is missing; write it"));
        }
    }
    let Some(architecture) = sources.iter().find(|source| source.path == "ARCHITECTURE.md") else {
        return;
    };
    for package in packages {
        if !mentions(&architecture.text, package) {
            let message = format!(
                "does not mention the crate {}; add what it is for and what it never knows",
                package.path
            );
            findings.push(Finding::new("ARCHITECTURE.md", 0, message));
        }
    }
}

/// Every picture's last line names the content of the source that it was rendered of (docs/pictures/render.sh).
fn pictures(sources: &[Source], findings: &mut Vec<Finding>) {
    let text_of = |path: &str| {
        sources
            .iter()
            .find(|source| source.path == path)
            .map(|source| &source.text)
    };
    for source in sources.iter().filter(|source| source.path.starts_with(PICTURES)) {
        let Some(name) = source.path.strip_suffix(".dot") else {
            continue;
        };
        let sum = hex::encode(Sha256::digest(source.text.as_bytes()));
        let rendered = text_of(&format!("{name}.svg")).is_some_and(|picture| {
            picture
                .lines()
                .next_back()
                .is_some_and(|line| line.contains(&format!("sha256 {sum} ")))
        });
        if !rendered {
            let message = "its rendering is missing or older; run docs/pictures/render.sh (package graphviz)";
            findings.push(Finding::new(&source.path, 0, message));
        }
    }
}

/// Prose is in lines of at most so many characters.
fn wrapped(sources: &[Source], findings: &mut Vec<Finding>) {
    for source in sources.iter().filter(|source| wrap::is_document(&source.path)) {
        if wrap::wrap(&source.text).trim_end() != source.text.trim_end() {
            let message = format!(
                "has prose in lines of more than {} characters; run `cargo xtask wrap`",
                wrap::WIDTH
            );
            findings.push(Finding::new(&source.path, 0, message));
        }
    }
}

/// By path or by a name in backticks: the package's, the library's or the folder's.
fn mentions(text: &str, package: &Package) -> bool {
    let folder = package.path.rsplit('/').next().unwrap_or_default();
    let in_ticks = |name: &str| !name.is_empty() && text.contains(&format!("`{name}`"));
    text.contains(&package.path) && package.path.contains('/')
        || [&package.name, &package.library, folder].into_iter().any(in_ticks)
        || in_ticks(&format!("{}/", package.path))
}

#[cfg(test)]
mod tests {
    use super::super::tests::source;
    use super::*;

    fn found(architecture: &str) -> Vec<String> {
        let mut sources: Vec<_> = EXPECTED.iter().map(|name| source(name, "")).collect();
        sources[0].text = architecture.to_owned();
        let package = Package {
            path: "crates/bus".into(),
            name: "basalt-bus".into(),
            library: "bus".into(),
            needs: Vec::new(),
        };
        let mut findings = Vec::new();
        check(&[package], &sources, &mut findings);
        findings.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn every_crate_is_mentioned() {
        assert!(found("the `bus` dispatches").is_empty());
        assert!(found("see crates/bus").is_empty());
        assert!(found("a bus, and `busy`")[0].contains("crates/bus"));
    }

    #[test]
    fn a_picture_that_is_older_than_its_source_is_found() {
        let sum = hex::encode(Sha256::digest(b"digraph a {}"));
        let wrong = |dot: &str| {
            let svg = format!("<svg/>\n<!-- rendered of a.dot, sha256 {sum} -->\n");
            let mut findings = Vec::new();
            pictures(
                &[source("docs/pictures/a.dot", dot), source("docs/pictures/a.svg", &svg)],
                &mut findings,
            );
            findings.len()
        };
        assert_eq!(wrong("digraph a {}"), 0);
        assert_eq!(wrong("digraph b {}"), 1);
    }

    #[test]
    fn long_lines_of_prose_are_found() {
        let long = format!("{}\n", "word ".repeat(40).trim_end());
        let mut findings = Vec::new();
        wrapped(
            &[
                source("docs/a.md", &long),
                source("docs/b.md", "short\n"),
                source("c.rs", &long),
            ],
            &mut findings,
        );
        assert_eq!(findings.len(), 1);
    }

    #[test]
    fn a_missing_document_is_found() {
        let mut findings = Vec::new();
        check(&[], &[source("README.md", "")], &mut findings);
        assert_eq!(findings.len(), EXPECTED.len() - 1);
    }
}
