//! The rule that golden files only ever get company: a saved state or a message once published must stay readable, so
//! its sample may never change.
//!
//! golden.lock has the SHA-256 of every file in a folder named `golden`. Knows nothing of the files' contents.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use sha2::{Digest, Sha256};

use super::Finding;

/// The list, from the root.
const LOCK: &str = "golden.lock";

/// Compares files and list.
pub(super) fn check(root: &Path, files: &[String], findings: &mut Vec<Finding>) -> Result<()> {
    let locked = read(root)?;
    let found = sums(root, files)?;
    for (path, sum) in &found {
        match locked.get(path) {
            Some(old) if old == sum => {}
            Some(_) => findings.push(Finding::new(
                path,
                0,
                "a golden file was changed; restore it and add a file for the new version beside it",
            )),
            None => findings.push(Finding::new(
                path,
                0,
                "a golden file that golden.lock does not list; `cargo xtask tidy --accept-golden` adds it",
            )),
        }
    }
    for path in locked.keys().filter(|path| !found.contains_key(*path)) {
        findings.push(Finding::new(
            path,
            0,
            "a golden file was removed; restore it: old versions must still load",
        ));
    }
    Ok(())
}

/// Adds lines for new files; leaves all others as they are.
pub(super) fn accept(root: &Path, files: &[String]) -> Result<()> {
    let mut locked = read(root)?;
    for (path, sum) in sums(root, files)? {
        locked.entry(path).or_insert(sum);
    }
    if locked.is_empty() {
        return Ok(());
    }
    let mut text = String::new();
    for (path, sum) in &locked {
        writeln!(text, "{sum}  {path}")?;
    }
    fs::write(root.join(LOCK), text).context("cannot write golden.lock")
}

fn read(root: &Path) -> Result<BTreeMap<String, String>> {
    let path = root.join(LOCK);
    if !path.exists() {
        return Ok(BTreeMap::new());
    }
    let text = fs::read_to_string(&path)?;
    text.lines()
        .map(|line| {
            let (sum, path) = line
                .split_once("  ")
                .with_context(|| format!("golden.lock: {line:?} is no line of it"))?;
            Ok((path.to_owned(), sum.to_owned()))
        })
        .collect()
}

fn sums(root: &Path, files: &[String]) -> Result<BTreeMap<String, String>> {
    let golden = files
        .iter()
        .filter(|file| file.split('/').rev().skip(1).any(|part| part == "golden"));
    golden
        .map(|file| Ok((file.clone(), hex::encode(Sha256::digest(fs::read(root.join(file))?)))))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_files_are_added_but_never_changed_or_removed() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let files = ["a/golden/v1".to_owned(), "a/other".to_owned()];
        fs::create_dir_all(root.join("a/golden")).unwrap();
        let write = |text: &str| fs::write(root.join("a/golden/v1"), text).unwrap();
        let look = |files: &[String]| {
            let mut findings = Vec::new();
            check(root, files, &mut findings).unwrap();
            findings.into_iter().map(|finding| finding.message).collect::<Vec<_>>()
        };
        write("one");
        assert!(look(&files)[0].contains("does not list"));
        accept(root, &files).unwrap();
        assert!(look(&files).is_empty());
        write("two");
        accept(root, &files).unwrap();
        assert!(look(&files)[0].contains("was changed"));
        assert!(look(&files[1..])[0].contains("was removed"));
    }
}
