//! How things are shown: results on standard output, errors on standard error, as text or as JSON; colour on
//! terminals only and never where NO_COLOR is set. Knows nothing of what is shown.

use std::io::{self, IsTerminal, Write};

use anyhow::Result;
use serde::Serialize;

/// How this run shows things.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output {
    json: bool,
}

/// A colour of terminals.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Colour {
    /// Good.
    Green,
    /// Costs something.
    Yellow,
    /// Bad.
    Red,
}

impl Output {
    /// As JSON, or as text.
    pub(crate) fn new(json: bool) -> Self {
        Self { json }
    }

    /// Results are wanted as JSON.
    pub(crate) fn json(&self) -> bool {
        self.json
    }

    /// Shows a result: `value` for machines, `text` for people.
    pub(crate) fn result(&self, value: &impl Serialize, text: impl FnOnce() -> String) -> Result<()> {
        let mut out = io::stdout().lock();
        if self.json {
            serde_json::to_writer_pretty(&mut out, value)?;
            writeln!(out)?;
        } else {
            out.write_all(text().as_bytes())?;
        }
        out.flush()?;
        Ok(())
    }

    /// Shows one of many results, a line each.
    pub(crate) fn line(&self, value: &impl Serialize, text: impl FnOnce() -> String) -> Result<()> {
        let mut out = io::stdout().lock();
        if self.json {
            serde_json::to_writer(&mut out, value)?;
            writeln!(out)?;
        } else {
            writeln!(out, "{}", text())?;
        }
        out.flush()?;
        Ok(())
    }

    /// Shows an error with all its causes, in one line.
    pub(crate) fn error(&self, error: &anyhow::Error) {
        self.trouble("error", "", error);
    }

    /// Shows in the same way what is wrong but has stopped nothing.
    pub(crate) fn warning(&self, error: &anyhow::Error) {
        self.trouble("warning", "warning: ", error);
    }

    /// Shows something that is not the result, on standard error.
    pub(crate) fn aside(&self, value: &impl Serialize, text: impl FnOnce() -> String) {
        let text = match serde_json::to_string(value) {
            Ok(json) if self.json => json,
            Ok(_) => text(),
            Err(error) => format!("basalt: this cannot be shown: {error}"),
        };
        say(text.trim_end());
    }

    fn trouble(&self, key: &str, mark: &str, error: &anyhow::Error) {
        let text = format!("{error:#}");
        say(&if self.json {
            serde_json::json!({ key: text }).to_string()
        } else {
            format!("basalt: {mark}{text}")
        });
    }

    /// Says one line on standard error; silent for machines.
    pub(crate) fn note(&self, line: &str) {
        if !self.json {
            say(&format!("basalt: {line}"));
        }
    }

    /// `basalt version`.
    pub(crate) fn version(&self) -> Result<u8> {
        let version = env!("CARGO_PKG_VERSION");
        let value = serde_json::json!({ "version": version, "vmm_api": vmm_api::VERSION });
        self.result(&value, || format!("basalt {version}\n"))?;
        Ok(0)
    }
}

fn say(line: &str) {
    // Standard error may be closed; there is nobody left to tell.
    writeln!(io::stderr().lock(), "{}", harmless(line, "\n\t")).unwrap_or_default();
}

/// Text in which a guest's, a registry's or a stranger's words may stand, without what a terminal would obey: control
/// characters but those in `kept`, and those of Unicode that turn the order of letters.
fn harmless(text: &str, kept: &str) -> String {
    let obeyed = |letter: char| {
        letter.is_control() && !kept.contains(letter)
            || matches!(letter, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    text.chars()
        .map(|letter| {
            if obeyed(letter) {
                char::REPLACEMENT_CHARACTER
            } else {
                letter
            }
        })
        .collect()
}

/// Colours `text` where standard output is a terminal that wants it.
pub(crate) fn coloured(colour: Colour, text: &str) -> String {
    if !wants_colour(io::stdout().is_terminal()) {
        return text.to_owned();
    }
    let code = match colour {
        Colour::Green => 32,
        Colour::Yellow => 33,
        Colour::Red => 31,
    };
    format!("\x1b[{code}m{text}\x1b[0m")
}

/// no-color.org: set and not empty means no colour.
fn wants_colour(terminal: bool) -> bool {
    let refused = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
    terminal && !refused && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Whoever read our output has seen enough, as `head` does; that is no failure of ours.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let io = cause.downcast_ref::<io::Error>().map(io::Error::kind);
        let json = cause
            .downcast_ref::<serde_json::Error>()
            .and_then(serde_json::Error::io_error_kind);
        io.or(json) == Some(io::ErrorKind::BrokenPipe)
    })
}

/// Lays rows out in columns, two spaces apart; the last one is not padded. A cell is one line, whatever is in it.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
    let rows = rows
        .iter()
        .map(|row| row.iter().map(|cell| harmless(cell, "")).collect::<Vec<_>>());
    let rows: Vec<Vec<String>> = rows.collect();
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter()
            .filter_map(|r| r.get(column))
            .map(|c| c.chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in &rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            line.push_str(cell);
            let pad = width.saturating_sub(cell.chars().count()) + 2;
            line.extend(std::iter::repeat_n(' ', pad));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_lines_end_clean() {
        let row = |cells: &[&str]| cells.iter().map(|c| (*c).to_owned()).collect::<Vec<_>>();
        let text = table(&[row(&["NAME", "SIZE"]), row(&["é", "1"]), row(&["longer", ""])]);
        assert_eq!(text, "NAME    SIZE\né       1\nlonger\n");
        assert_eq!(table(&[]), "");
    }

    #[test]
    fn nothing_that_a_terminal_obeys_is_shown() {
        assert_eq!(harmless("a\x1b[2J\u{9b}b\n", "\n"), "a\u{fffd}[2J\u{fffd}b\n");
        assert_eq!(harmless("x\u{202e}y\tz", "\t"), "x\u{fffd}y\tz");
        let text = table(&[vec!["sh\n\x1b]0;t\x07".to_owned(), "é".to_owned()]]);
        assert_eq!(text, "sh\u{fffd}\u{fffd}]0;t\u{fffd}  é\n");
    }

    #[test]
    fn a_closed_pipe_is_recognised_through_context() {
        let error = anyhow::Error::from(io::Error::from(io::ErrorKind::BrokenPipe)).context("writing");
        assert!(is_broken_pipe(&error));
        assert!(!is_broken_pipe(&anyhow::anyhow!("else")));
    }

    #[test]
    fn colour_needs_a_terminal() {
        assert!(!wants_colour(false));
    }
}
