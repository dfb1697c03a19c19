//! The table of `docs/benchmarks.md`: every figure that is held against a target, of one or several reports. Measures nothing.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::report::{Report, Verdict, number};

/// A line of the table: what reports say of one figure, each of them once.
struct Row<'r> {
    figure: &'r str,
    unit: &'r str,
    verdicts: Vec<&'r Verdict>,
}

/// The table, of reports that `--json` has written.
///
/// # Errors
/// A file cannot be read, or is no such report.
pub(crate) fn page(files: &[PathBuf]) -> Result<String> {
    let reports = files.iter().map(|file| read(file)).collect::<Result<Vec<_>>>()?;
    table(&reports)
}

fn read(file: &Path) -> Result<Report> {
    let text = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    serde_json::from_slice(&text).with_context(|| format!("{} is no report of `basalt-bench --json`", file.display()))
}

fn table(reports: &[Report]) -> Result<String> {
    let mut text = "| figure | of | asked | measured | |\n|---|---|---|---|---|\n".to_owned();
    for row in rows(reports) {
        let Some(first) = row.verdicts.first() else { continue };
        let measured: Vec<_> = row.verdicts.iter().map(|verdict| number(verdict.value)).collect();
        let reached = row.verdicts.iter().filter(|verdict| verdict.reached).count();
        let word = match (reached, row.verdicts.len()) {
            (0, _) => "not reached".to_owned(),
            (some, all) if some == all => "reached".to_owned(),
            (some, all) => format!("reached in {some} of {all}"),
        };
        // A ratio has no unit, and its name has a stroke; a coefficient has none either.
        let unit = if first.what.contains(" / ") || first.what.contains("R²") {
            String::new()
        } else {
            format!(" {}", row.unit)
        };
        writeln!(
            text,
            "| {} | {} | {}{unit} | {} | {word} |",
            row.figure,
            first.what,
            first.target,
            measured.join(", ")
        )?;
    }
    Ok(text)
}

/// In the order in which the first report that has them has them.
fn rows(reports: &[Report]) -> Vec<Row<'_>> {
    let mut rows: Vec<Row<'_>> = Vec::new();
    for figure in reports.iter().flat_map(|report| &report.figures) {
        for verdict in &figure.verdicts {
            let is_same = |row: &&mut Row<'_>| row.figure == figure.name && row.verdicts[0].what == verdict.what;
            match rows.iter_mut().find(is_same) {
                Some(row) => row.verdicts.push(verdict),
                None => rows.push(Row {
                    figure: &figure.name,
                    unit: &figure.unit,
                    verdicts: vec![verdict],
                }),
            }
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Figure;
    use crate::stats::Target;

    const DOCUMENTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs");

    fn report(ours: f64, memory: f64) -> Report {
        let mut start = Figure::new("Start", "ms");
        start.add("ours", vec![ours]);
        start.add("theirs", vec![100.0]);
        start.ratio("ours", "theirs", Target::AtMost(0.15));
        let mut own = Figure::new("Memory", "MiB");
        own.add("ours", vec![memory]);
        own.absolute("ours", Target::Under(3.0));
        Report {
            figures: vec![start, own],
            ..Report::default()
        }
    }

    #[test]
    fn a_figure_has_one_line_with_what_each_report_says() {
        let reports = [report(10.0, 4.0), report(16.0, 5.0)];
        let written = serde_json::to_vec(&reports[1]).unwrap();
        let reports = [report(10.0, 4.0), serde_json::from_slice(&written).unwrap()];
        assert_eq!(
            table(&reports).unwrap(),
            "| figure | of | asked | measured | |\n|---|---|---|---|---|\n\
             | Start | ours / theirs | at most 0.15 | 0.100, 0.160 | reached in 1 of 2 |\n\
             | Memory | ours | under 3 MiB | 4.000, 5.000 | not reached |\n"
        );
    }

    #[test]
    fn the_documents_table_is_what_its_reports_say() {
        let mut files: Vec<PathBuf> = std::fs::read_dir(Path::new(DOCUMENTS).join("benchmarks/data"))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        files.sort();
        let table = page(&files).unwrap();
        assert!(table.lines().count() > 2, "{table}");
        let document = std::fs::read_to_string(Path::new(DOCUMENTS).join("benchmarks.md")).unwrap();
        assert!(
            document.contains(&table),
            "docs/benchmarks.md is to have this table:\n{table}"
        );
    }

    #[test]
    fn what_is_no_report_is_named() {
        let file = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"));
        let error = page(&[file]).unwrap_err().to_string();
        assert!(error.contains("Cargo.toml is no report"), "{error}");
    }
}
