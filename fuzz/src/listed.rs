//! The table of parsers in docs/threat-model.md against the tree: it lists every target, and every row names what there is.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

const DOCUMENT: &str = include_str!("../../docs/threat-model.md");

/// Where tests, cases and parsers are.
fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// Cells of the table's rows.
fn rows() -> Vec<Vec<&'static str>> {
    let (_, section) = DOCUMENT.split_once("\n## Parsers\n").expect("the section");
    let rows = section.lines().skip_while(|line| !line.starts_with("|---")).skip(1);
    rows.take_while(|line| line.starts_with('|'))
        .map(|row| row.trim_matches('|').split('|').collect())
        .collect()
}

/// What stands in backquotes.
fn names(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

/// Names of tests and of the lab's cases below a directory.
fn add_names(directory: &Path, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(directory).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            if !path.ends_with("target") {
                add_names(&path, found);
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).expect("a source file");
            add_tests(&text, found);
            if path.starts_with(root().join("lab/cases/src/cases")) {
                add_cases(&text, found);
            }
        }
    }
}

fn add_cases(text: &str, found: &mut BTreeSet<String>) {
    for (line, next) in text.lines().zip(text.lines().skip(1)) {
        let name = next
            .trim()
            .strip_prefix("name: \"")
            .and_then(|rest| rest.strip_suffix("\","));
        found.extend(name.filter(|_| line.ends_with(": Case = Case {")).map(str::to_owned));
    }
}

fn add_tests(text: &str, found: &mut BTreeSet<String>) {
    let mut is_test = false;
    for line in text.lines().map(str::trim) {
        let function = line.strip_prefix("async ").unwrap_or(line).strip_prefix("fn ");
        if let Some((name, _)) = function.and_then(|rest| rest.split_once('(')) {
            if std::mem::take(&mut is_test) {
                found.insert(name.to_owned());
            }
        } else {
            // Between the two are other attributes, if anything.
            is_test = line == "#[test]" || line.starts_with("#[tokio::test") || is_test && line.starts_with("#[");
        }
    }
}

#[test]
fn the_threat_model_lists_every_target() {
    let rows = rows();
    let listed: BTreeSet<&str> = rows
        .iter()
        .filter_map(|row| row.last())
        .flat_map(|cell| names(cell))
        .collect();
    for target in crate::targets::all() {
        assert!(listed.contains(target.name), "{} is not listed", target.name);
    }
}

#[test]
fn every_row_of_the_threat_model_names_what_there_is() {
    let mut there: BTreeSet<String> = crate::targets::all()
        .iter()
        .map(|target| target.name.to_owned())
        .collect();
    for directory in ["accel", "bin", "crates", "devices", "guest", "lab"] {
        add_names(&root().join(directory), &mut there);
    }
    let rows = rows();
    assert!(rows.len() > 40, "only {} rows are found", rows.len());
    for row in rows {
        let [parser, place, _, tries] = row[..] else {
            panic!("a row has other than four cells: {row:?}");
        };
        let missing: Vec<_> = names(tries).filter(|name| !there.contains(*name)).collect();
        assert!(
            missing.is_empty(),
            "{parser}: neither target, test nor case: {missing:?}"
        );
        assert!(names(tries).count() > 0, "{parser}: nothing that tries it has a name");
        // Those with a folder; what follows one is within it.
        let gone: Vec<_> = names(place)
            .filter(|name| name.contains('/') && !root().join(name).exists())
            .collect();
        assert!(gone.is_empty(), "{parser}: not there: {gone:?}");
    }
}
