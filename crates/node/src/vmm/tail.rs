//! The end of what a guest or its VMM wrote into a file, as an error shows it. Knows not what wrote it.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// What is looked at.
const READ: u64 = 32 << 10;

/// How many lines an error shows.
const SHOWN: usize = 12;

/// The end of a text: printable, a few lines, each with a mark.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tail {
    title: &'static str,
    lines: Vec<String>,
}

impl Tail {
    /// Reads the end of the file at `path`; empty where there is none.
    pub(crate) fn of(title: &'static str, path: &Path) -> Self {
        let lines = match read_end(path) {
            Ok(text) => lines(&text),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => vec![format!("(it cannot be read: {error})")],
        };
        Self { title, lines }
    }

    /// The last line that holds `needle`, of those that were looked at.
    pub(crate) fn find(&self, needle: &str) -> Option<String> {
        self.lines.iter().rev().find(|line| line.contains(needle)).cloned()
    }

    /// The lines that are shown.
    pub fn lines(&self) -> &[String] {
        &self.lines[self.lines.len().saturating_sub(SHOWN)..]
    }
}

impl fmt::Display for Tail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.lines.is_empty() {
            return Ok(());
        }
        write!(f, "\n  the end of {}:", self.title)?;
        self.lines().iter().try_for_each(|line| write!(f, "\n  | {line}"))
    }
}

fn read_end(path: &Path) -> io::Result<Vec<u8>> {
    let file = File::open(path)?;
    let length = file.metadata()?.len();
    let start = length.saturating_sub(READ);
    let mut text = vec![0; usize::try_from(length - start).unwrap_or(0)];
    file.read_exact_at(&mut text, start)?;
    Ok(text)
}

pub(crate) fn lines(text: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(text);
    let lines = text.lines().map(printable);
    lines.filter(|line| !line.trim().is_empty()).collect()
}

/// What a guest writes must not steer the terminal of whoever reads about it.
fn printable(line: &str) -> String {
    line.chars()
        .filter(|c| !c.is_control() || *c == '\t')
        .take(240)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_flood_is_shown_and_printable() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("console");
        let flood: String = (0..50_000).map(|number| format!("line {number}\x1b[31m\n")).collect();
        std::fs::write(&path, flood).unwrap();
        let tail = Tail::of("a test", &path);
        assert_eq!(tail.lines().len(), SHOWN);
        assert_eq!(tail.lines().last().map(String::as_str), Some("line 49999[31m"));
        assert!(tail.to_string().starts_with("\n  the end of a test:\n  | line 4998"));
        assert_eq!(tail.find("line 49900").as_deref(), Some("line 49900[31m"));
        assert_eq!(tail.find("line 1\n"), None);
    }

    #[test]
    fn nothing_written_shows_nothing() {
        assert_eq!(Tail::of("a test", Path::new("/no/such/file")).to_string(), "");
    }
}
