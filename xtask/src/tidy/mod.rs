//! `cargo xtask tidy`: rules of this codebase that the compiler and clippy do not know.
//!
//! Each rule is a function from text to findings in a module of its own, with a test that shows it failing. This file
//! reads the tree and calls them; it knows no rule's content. Exceptions stand with their reasons in layers.toml.

mod config;
mod documents;
mod folders;
mod golden;
mod layers;
mod metrics;
mod shape;
mod text;
mod vendored;

use std::fmt;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde::Serialize;

use crate::tree;
use config::Config;

/// Something to mend: where, what, and how.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(crate) struct Finding {
    /// Path from the root.
    pub(crate) file: String,
    /// Line, counted from one; zero for the whole file.
    pub(crate) line: usize,
    /// What is wrong, and what to do.
    pub(crate) message: String,
}

impl Finding {
    fn new(file: &str, line: usize, message: impl Into<String>) -> Self {
        Self {
            file: file.to_owned(),
            line,
            message: message.into(),
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, line, message } = self;
        if *line == 0 {
            write!(f, "{file}: {message}")
        } else {
            write!(f, "{file}:{line}: {message}")
        }
    }
}

/// A text file of the tree.
#[derive(Debug)]
struct Source {
    path: String,
    text: String,
    executable: bool,
}

impl Source {
    fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// A script for a person or a machine to run, by name or by its first line.
    fn is_script(&self) -> bool {
        self.path.ends_with(".sh") || self.text.starts_with("#!/") || self.path == "Makefile"
    }
}

/// Checks the whole tree.
pub(crate) fn check(root: &Path) -> Result<Vec<Finding>> {
    let config = Config::read(root)?;
    let sources = read_sources(root)?;
    let mut findings = Vec::new();
    let hosts = text::registry_hosts();
    let shapes = shape::Shapes::new(&config);
    for source in &sources {
        if !vendored::check(&config.vendored, source, &mut findings) {
            text::check(source, &hosts, &mut findings);
        }
        if source.is_rust() {
            shapes.check(source, &mut findings);
        }
    }
    shapes.finish(&mut findings);
    vendored::are_there(&config.vendored, &sources, &mut findings);
    generated(root, &mut findings)?;
    let packages = layers::packages(root)?;
    layers::check(&config, &packages, &mut findings);
    layers::check_catalog(&config, &packages, &sources, &mut findings);
    folders::check(&config, &sources, &mut findings);
    documents::check(&packages, &sources, &mut findings);
    metrics::check(&sources, &mut findings);
    let all = tree::files(root, None)?;
    golden::check(root, &all, &mut findings)?;
    golden::have_samples(&sources, &all, &mut findings);
    findings.sort();
    findings.dedup();
    Ok(findings)
}

/// What is generated is what would be made now.
fn generated(root: &Path, findings: &mut Vec<Finding>) -> Result<()> {
    for path in accel_gen::stale(root)? {
        let message = "is not what accel/spec says; `cargo xtask accel` makes it anew";
        findings.push(Finding::new(&path, 0, message));
    }
    Ok(())
}

/// The command: prints what was found.
#[expect(clippy::print_stdout, reason = "the findings are this command's output")]
pub(crate) fn command(root: &Path, json: bool, accept_golden: bool) -> Result<u8> {
    if accept_golden {
        golden::accept(root, &tree::files(root, None)?)?;
    }
    let findings = check(root)?;
    if json {
        println!("{}", serde_json::to_string(&findings)?);
    } else {
        for finding in &findings {
            println!("{finding}");
        }
        println!("tidy: {} to mend", findings.len());
    }
    Ok(u8::from(!findings.is_empty()))
}

fn read_sources(root: &Path) -> Result<Vec<Source>> {
    let mut sources = Vec::new();
    for path in tree::files(root, None)? {
        let full = root.join(&path);
        if full.is_symlink() {
            continue;
        }
        let bytes = fs::read(&full).with_context(|| format!("cannot read {path}"))?;
        // What is not text (an image, a sample for a test) has no lines to check.
        if let Ok(text) = String::from_utf8(bytes) {
            let executable = fs::metadata(&full)?.permissions().mode() & 0o111 != 0;
            sources.push(Source { path, text, executable });
        }
    }
    Ok(sources)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A source file for the rules' tests.
    pub(super) fn source(path: &str, text: &str) -> Source {
        Source {
            path: path.to_owned(),
            text: text.to_owned(),
            executable: false,
        }
    }

    #[test]
    fn a_finding_reads_like_a_compilers() {
        assert_eq!(Finding::new("a.rs", 3, "x").to_string(), "a.rs:3: x");
        assert_eq!(Finding::new("a.rs", 0, "x").to_string(), "a.rs: x");
    }
}
