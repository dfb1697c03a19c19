//! The rule that golden files only ever get company: a saved state or a message once published must stay readable, so
//! its sample may never change.
//!
//! golden.lock has the SHA-256 of every file in a folder named `golden`. Knows nothing of the files' contents, but that each kind and
//! version of a saved state (`impl Schema for`) has a sample.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use sha2::{Digest, Sha256};

use super::{Finding, Source};

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

/// Every saved state of a program has a sample of the version that is written now, in its crate.
pub(super) fn have_samples(sources: &[Source], files: &[String], findings: &mut Vec<Finding>) {
    for source in sources
        .iter()
        .filter(|source| source.is_rust() && !source.path.contains("/tests"))
    {
        let Some((own, _)) = source.path.split_once("/src/") else {
            continue;
        };
        for (line, kind, version) in schemas(&source.text) {
            let sample = format!("{own}/golden/{kind}-v{version}.");
            if !files.iter().any(|file| file.starts_with(&sample)) {
                let message =
                    format!("this state has no sample: its test writes {sample}json with BASALT_WRITE_GOLDEN=1");
                findings.push(Finding::new(&source.path, line, message));
            }
        }
    }
}

/// The line, the kind and the version of each schema that is no test's.
fn schemas(text: &str) -> Vec<(usize, &str, &str)> {
    let lines: Vec<_> = text.lines().collect();
    let begins = |line: &&str| line.starts_with("impl Schema for ") || line.starts_with("impl state::Schema for ");
    let starts = lines.iter().enumerate().filter(|(_, line)| begins(line));
    starts
        .filter_map(|(number, _)| {
            let body = lines[number..].iter().take_while(|line| **line != "}");
            let value = |name| {
                let mut found = body
                    .clone()
                    .filter_map(|line| line.trim().strip_prefix(name)?.split_once(" = "));
                found
                    .next()
                    .map(|(_, value)| value.trim_end_matches(';').trim_matches('"'))
            };
            Some((number + 1, value("const KIND:")?, value("const VERSION:")?))
        })
        .collect()
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
    fn a_state_without_a_sample_is_found() {
        let text = "use a;\nimpl Schema for Lamp {\n    const KIND: &'static str = \"lamp\";\n    const VERSION: u32 = 3;\n}\n\
                    mod tests {\n    impl Schema for Other {\n        const KIND: &'static str = \"other\";\n    }\n}\n";
        assert_eq!(schemas(text), [(2, "lamp", "3")]);
        let source = Source {
            path: "a/src/lib.rs".into(),
            text: text.into(),
            executable: false,
        };
        let look = |sample: &str| {
            let mut findings = Vec::new();
            have_samples(std::slice::from_ref(&source), &[sample.to_owned()], &mut findings);
            findings.len()
        };
        assert_eq!(look("a/golden/lamp-v3.json"), 0);
        assert_eq!(look("a/golden/lamp-v2.json"), 1);
        assert_eq!(look("b/golden/lamp-v3.json"), 1);
    }

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
