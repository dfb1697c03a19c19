//! Where the time of a run went: a file for machines, and the slowest steps and parts for whoever reads the end.
//!
//! Knows names and numbers, not what steps do. The file is written anew by each run of the same verb.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde_json::json;

use super::summary::Row;

/// How many of each are named at the end.
const SLOWEST: usize = 10;
/// What takes no longer is not named, in seconds: a step that was there already.
const SHORT: f64 = 0.05;

/// A part of a step that has a time of its own: a lab case.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Part {
    /// Its name.
    pub(crate) name: String,
    /// How it ended, as its runner says: `ok`, `FAILED`, `flaky`.
    pub(crate) result: String,
    /// How long it took, all attempts together.
    pub(crate) seconds: f64,
}

/// Where the times of the last run of this verb are.
pub(crate) fn path(logs: &Path, verb: &str) -> PathBuf {
    logs.join(format!("timings-{verb}.json"))
}

/// Writes the times of all steps and parts.
pub(crate) fn write(path: &Path, rows: &[Row], seconds: f64) -> Result<()> {
    let steps: Vec<_> = rows.iter().map(step).collect();
    let text = serde_json::to_string_pretty(&json!({"seconds": seconds, "steps": steps}))?;
    let partial = path.with_extension("partial");
    fs::write(&partial, text + "\n").with_context(|| format!("cannot write {}", partial.display()))?;
    Ok(fs::rename(&partial, path)?)
}

fn step(row: &Row) -> serde_json::Value {
    let parts: Vec<_> = row
        .measured
        .parts
        .iter()
        .map(|part| json!({"name": part.name, "result": part.result, "seconds": part.seconds}))
        .collect();
    json!({
        "name": row.name,
        "result": row.outcome.word(),
        "seconds": row.seconds,
        "cpu_seconds": row.measured.cpu,
        "parts": parts,
    })
}

/// The slowest steps, and the slowest cases if there were any.
pub(crate) fn slowest(rows: &[Row]) -> String {
    let steps = rows.iter().map(|row| (row.name, row.seconds));
    let cases = rows
        .iter()
        .flat_map(|row| &row.measured.parts)
        .map(|part| (part.name.as_str(), part.seconds));
    let mut text = list("steps", steps.collect());
    text.push_str(&list("cases", cases.collect()));
    text
}

fn list(what: &str, mut all: Vec<(&str, f64)>) -> String {
    all.retain(|(_, seconds)| *seconds > SHORT);
    all.sort_by(|one, other| other.1.total_cmp(&one.1));
    all.truncate(SLOWEST);
    if all.is_empty() {
        return String::new();
    }
    let mut text = format!("slowest {what}:\n");
    for (name, seconds) in all {
        let _ = writeln!(text, "  {seconds:>7.1} s  {name}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner::Outcome;

    fn row(name: &'static str, seconds: f64, parts: &[(&str, f64)]) -> Row {
        let mut row = Row::new(name, Outcome::Ok);
        row.seconds = seconds;
        row.measured.parts = parts
            .iter()
            .map(|(name, seconds)| Part {
                name: (*name).to_owned(),
                result: "ok".to_owned(),
                seconds: *seconds,
            })
            .collect();
        row
    }

    #[test]
    fn the_ten_slowest_of_each_come_first() {
        let names = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k"];
        let rows: Vec<_> = names
            .into_iter()
            .zip(1..)
            .map(|(name, at)| row(name, at.into(), &[]))
            .collect();
        let text = slowest(&rows);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(
            (lines.len(), lines[0], lines[1]),
            (11, "slowest steps:", "     11.0 s  k")
        );
        assert!(!text.contains("  a") && !text.contains("cases"), "{text}");
        let text = slowest(&[
            row("cases", 3.0, &[("boot", 1.0), ("run", 2.0)]),
            row("cached", 0.0, &[]),
        ]);
        assert!(
            text.ends_with("slowest cases:\n      2.0 s  run\n      1.0 s  boot\n"),
            "{text}"
        );
        assert!(!text.contains("cached"), "{text}");
    }

    #[test]
    fn the_file_has_every_step_and_case() {
        let dir = tempfile::tempdir().unwrap();
        let path = path(dir.path(), "test");
        write(&path, &[row("fmt", 1.0, &[]), row("cases", 2.0, &[("boot", 1.5)])], 3.5).unwrap();
        let read: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(read["seconds"], 3.5);
        assert_eq!(read["steps"][0]["name"], "fmt");
        let case = json!({"name": "boot", "result": "ok", "seconds": 1.5});
        assert_eq!(read["steps"][1]["parts"][0], case);
    }
}
