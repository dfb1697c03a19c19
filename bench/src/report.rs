//! Tables of figures, as Markdown for people and as JSON for machines. Knows nothing of how they were measured.

use std::fmt::Write;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::stats::{Target, median};

/// Everything that one run has found.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Report {
    /// What the figures stand on: host, programs, kernels, command lines.
    pub(crate) facts: Vec<(String, String)>,
    pub(crate) figures: Vec<Figure>,
    /// Runs that failed and were made once more, with the reason.
    pub(crate) retried: Vec<String>,
    /// What could not be measured, or not all of it, with the reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) failed: Vec<String>,
}

/// One figure: samples of each who was measured, and what they are held against.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Figure {
    pub(crate) name: String,
    pub(crate) unit: String,
    /// Who stand beside each other, where a row has one of each: their series are called `ROW, COLUMN`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) columns: Vec<String>,
    pub(crate) series: Vec<Series>,
    pub(crate) verdicts: Vec<Verdict>,
}

/// What one was measured to have.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Series {
    pub(crate) who: String,
    pub(crate) samples: Vec<f64>,
    pub(crate) median: f64,
}

/// A value and its target.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Verdict {
    pub(crate) what: String,
    pub(crate) value: f64,
    pub(crate) target: Target,
    pub(crate) reached: bool,
}

impl Figure {
    pub(crate) fn new(name: &str, unit: &str) -> Self {
        Self {
            name: name.to_owned(),
            unit: unit.to_owned(),
            columns: Vec::new(),
            series: Vec::new(),
            verdicts: Vec::new(),
        }
    }

    /// One with several columns of medians.
    pub(crate) fn beside<'a>(name: &str, unit: &str, columns: impl IntoIterator<Item = &'a str>) -> Self {
        Self {
            columns: columns.into_iter().map(str::to_owned).collect(),
            ..Self::new(name, unit)
        }
    }

    /// One sample more.
    pub(crate) fn put(&mut self, row: &str, column: &str, sample: f64) {
        let who = cell(row, column);
        let found = self.series.iter().position(|series| series.who == who);
        let mut samples = found.map_or_else(Vec::new, |at| self.series.remove(at).samples);
        samples.push(sample);
        let Some(median) = median(&samples) else { return };
        let at = found.unwrap_or(self.series.len());
        self.series.insert(at, Series { who, samples, median });
    }

    /// Adds what `who` has; one that was not measured is left out.
    pub(crate) fn add(&mut self, who: &str, samples: Vec<f64>) {
        if let Some(median) = median(&samples) {
            self.series.push(Series {
                who: who.to_owned(),
                samples,
                median,
            });
        }
    }

    pub(crate) fn median(&self, who: &str) -> Option<f64> {
        self.series.iter().find(|series| series.who == who).map(|s| s.median)
    }

    /// Holds the ratio of two medians against a target.
    pub(crate) fn ratio(&mut self, ours: &str, theirs: &str, target: Target) {
        if let (Some(our), Some(their)) = (self.median(ours), self.median(theirs)) {
            self.judge(&format!("{ours} / {theirs}"), our / their, target);
        }
    }

    /// Holds a median itself against a target.
    pub(crate) fn absolute(&mut self, who: &str, target: Target) {
        if let Some(value) = self.median(who) {
            self.judge(who, value, target);
        }
    }

    pub(crate) fn judge(&mut self, what: &str, value: f64, target: Target) {
        self.verdicts.push(Verdict {
            what: what.to_owned(),
            value,
            target,
            reached: target.reached(value),
        });
    }
}

/// What a series is called that is one of several columns.
pub(crate) fn cell(row: &str, column: &str) -> String {
    format!("{row}, {column}")
}

/// As few digits as say something.
pub(crate) fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 1000.0 => format!("{value:.0}"),
        size if size >= 100.0 => format!("{value:.1}"),
        size if size >= 10.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// How much of a report has been printed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Printed {
    facts: usize,
    figures: usize,
}

impl Report {
    /// What came since the last time, as Markdown that is ready for `docs/benchmarks/history.md`.
    pub(crate) fn news(&self, printed: &mut Printed) -> Result<String> {
        let mut text = String::new();
        for (name, value) in &self.facts[printed.facts..] {
            writeln!(text, "* {name}: `{value}`")?;
        }
        for figure in &self.figures[printed.figures..] {
            figure.markdown(&mut text)?;
        }
        *printed = Printed {
            facts: self.facts.len(),
            figures: self.figures.len(),
        };
        Ok(text)
    }

    /// The last lines.
    pub(crate) fn end(&self) -> Result<String> {
        let mut text = String::new();
        writeln!(text, "\nRuns made once more: {}", self.retried.len())?;
        for why in &self.retried {
            writeln!(text, "* {}", why.replace('\n', " / "))?;
        }
        for why in &self.failed {
            writeln!(text, "\nNot measured whole: {}", why.replace('\n', " / "))?;
        }
        Ok(text)
    }
}

impl Figure {
    fn rows(&self, text: &mut String) -> Result<()> {
        writeln!(text, "| | median, {} | samples |\n|---|---|---|", self.unit)?;
        for series in &self.series {
            let samples: Vec<_> = series.samples.iter().map(|&sample| number(sample)).collect();
            let median = number(series.median);
            writeln!(text, "| {} | {median} | {} |", series.who, samples.join(" "))?;
        }
        Ok(())
    }

    /// Medians, and the least and the most where there are several samples.
    fn crossed(&self, text: &mut String) -> Result<()> {
        writeln!(text, "| median, {} | {} |", self.unit, self.columns.join(" | "))?;
        writeln!(text, "|---|{}", "---|".repeat(self.columns.len()))?;
        let mut rows: Vec<&str> = Vec::new();
        for series in &self.series {
            let row = self.columns.iter().find_map(|column| {
                let row = series.who.strip_suffix(column.as_str())?;
                row.strip_suffix(", ")
            });
            rows.extend(row.filter(|row| !rows.contains(row)));
        }
        for row in rows {
            let cells: Vec<_> = self
                .columns
                .iter()
                .map(|column| self.shown(&cell(row, column)))
                .collect();
            writeln!(text, "| {row} | {} |", cells.join(" | "))?;
        }
        Ok(())
    }

    fn shown(&self, who: &str) -> String {
        let Some(series) = self.series.iter().find(|series| series.who == who) else {
            return String::new();
        };
        let median = number(series.median);
        if series.samples.len() < 2 {
            return median;
        }
        let least = series.samples.iter().copied().fold(f64::INFINITY, f64::min);
        let most = series.samples.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        format!("{median} ({}-{})", number(least), number(most))
    }

    fn markdown(&self, text: &mut String) -> Result<()> {
        writeln!(text, "\n### {}\n", self.name)?;
        if self.columns.is_empty() {
            self.rows(text)?;
        } else {
            self.crossed(text)?;
        }
        if !self.verdicts.is_empty() {
            writeln!(text)?;
        }
        for verdict in &self.verdicts {
            let word = if verdict.reached { "reached" } else { "not reached" };
            let value = number(verdict.value);
            writeln!(
                text,
                "* {}: **{value}**, to reach: {}: **{word}**",
                verdict.what, verdict.target
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure() -> Figure {
        let mut figure = Figure::new("Start", "ms");
        figure.add("ours", vec![10.0, 12.0, 11.0]);
        figure.add("theirs", vec![100.0, 90.0]);
        figure.add("nobody", Vec::new());
        figure
    }

    #[test]
    fn a_ratio_is_one_of_medians() {
        let mut figure = figure();
        figure.ratio("ours", "theirs", Target::AtMost(0.15));
        figure.ratio("ours", "nobody", Target::AtMost(0.15));
        figure.absolute("theirs", Target::Under(95.0));
        assert_eq!(figure.series.len(), 2);
        assert_eq!(figure.verdicts.len(), 2);
        assert!((figure.verdicts[0].value - 11.0 / 95.0).abs() < 1e-9);
        assert!(figure.verdicts[0].reached);
        assert!(!figure.verdicts[1].reached);
    }

    #[test]
    fn the_table_has_medians_samples_and_the_word() {
        let mut figure = figure();
        figure.ratio("ours", "theirs", Target::AtMost(0.1));
        let mut report = Report {
            facts: vec![("kernel".into(), "abc".into())],
            figures: vec![figure],
            retried: vec!["boot, theirs: it died".into()],
            failed: vec!["network: no\nTAP".into()],
        };
        let mut printed = Printed::default();
        let text = report.news(&mut printed).unwrap();
        report.figures.push(Figure::new("Boot", "ms"));
        let more = report.news(&mut printed).unwrap();
        assert!(more.starts_with("\n### Boot\n") && !more.contains("kernel"), "{more}");
        assert_eq!(
            report.end().unwrap(),
            "\nRuns made once more: 1\n* boot, theirs: it died\n\nNot measured whole: network: no / TAP\n"
        );
        assert!(text.contains("* kernel: `abc`\n"), "{text}");
        assert!(text.contains("| ours | 11.00 | 10.00 12.00 11.00 |"), "{text}");
        assert!(
            text.contains("* ours / theirs: **0.116**, to reach: at most 0.1: **not reached**"),
            "{text}"
        );
        assert!(serde_json::to_string(&report).unwrap().contains("\"at-most\":0.1"));
    }

    #[test]
    fn columns_stand_beside_each_other() {
        let mut figure = Figure::beside("Exits", "1/s", ["standard", "bare", "bare, polling"]);
        for (row, column, sample) in [
            ("idle", "standard", 1.0),
            ("idle", "bare", 0.0),
            ("idle", "standard", 3.0),
            ("busy", "bare, polling", 5.0),
        ] {
            figure.put(row, column, sample);
        }
        let mut text = String::new();
        figure.markdown(&mut text).unwrap();
        assert!(
            text.ends_with(
                "| median, 1/s | standard | bare | bare, polling |\n|---|---|---|---|\n\
                 | idle | 2.000 (1.000-3.000) | 0.000 |  |\n| busy |  |  | 5.000 |\n"
            ),
            "{text}"
        );
        assert_eq!(figure.median("idle, standard"), Some(2.0));
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!(number(0.12345), "0.123");
        assert_eq!(number(12.345), "12.35");
        assert_eq!(number(123.45), "123.5");
        assert_eq!(number(1234.5), "1234");
    }
}
