//! The rule that the documents know the code: ARCHITECTURE.md mentions every crate, and what must exist exists.
//!
//! Whether what they say is true is for a reader, and for the step `docs`, which runs their commands.

use super::layers::Package;
use super::{Finding, Source};

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
    fn a_missing_document_is_found() {
        let mut findings = Vec::new();
        check(&[], &[source("README.md", "")], &mut findings);
        assert_eq!(findings.len(), EXPECTED.len() - 1);
    }
}
