//! `accel/spec/ops.lock`: which number belongs to which layout of which command, for ever.
//!
//! A line is `NUMBER SUM NAME`. A command whose layout changes gets a new number, and its old line stays; so a number never means
//! anything else than it did when a client was built or a snapshot taken.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::GenError;

/// Where the lock is in the tree.
pub(crate) const PATH: &str = "accel/spec/ops.lock";

const HEAD: &str = "\
# Numbers of calls on the wire: number, sum of the layout, command. Lines are added by `cargo xtask accel` and never changed or removed.
";

/// All lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Lock {
    /// Sum and command by number.
    lines: BTreeMap<u16, (String, String)>,
}

impl Lock {
    /// Reads the file.
    ///
    /// # Errors
    ///
    /// A line that is none, a number that is there twice, a layout that has two.
    pub(crate) fn parse(text: &str) -> Result<Self, GenError> {
        let mut lines: BTreeMap<u16, (String, String)> = BTreeMap::new();
        for line in text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
            let wrong = |what| GenError::Lock {
                line: line.to_owned(),
                what,
            };
            let words: Vec<_> = line.split(' ').collect();
            let [number, sum, name] = words.as_slice() else {
                return Err(wrong("is no line of it"));
            };
            let number = number
                .strip_prefix("0x")
                .and_then(|digits| u16::from_str_radix(digits, 16).ok());
            let number = number.ok_or_else(|| wrong("begins with no number"))?;
            let value = ((*sum).to_owned(), (*name).to_owned());
            if lines.values().any(|known| *known == value) {
                return Err(wrong("has a layout that another line has, too"));
            }
            if lines.insert(number, value).is_some() {
                return Err(wrong("has a number that another line has, too"));
            }
        }
        Ok(Self { lines })
    }

    /// The number of a layout; a new one, behind all of its API, if it has none.
    ///
    /// # Errors
    ///
    /// No number is left below `end`.
    pub(crate) fn number(&mut self, name: &str, sum: &str, numbers: std::ops::Range<u16>) -> Result<u16, GenError> {
        let known = self.lines.iter().find(|(_, (known, by))| known == sum && by == name);
        if let Some((number, _)) = known {
            return Ok(*number);
        }
        let last = self.lines.range(numbers.clone()).next_back().map(|(number, _)| *number);
        let number = last.map_or(numbers.start, |last| last.saturating_add(1));
        if !numbers.contains(&number) {
            return Err(GenError::Numbers(name.to_owned()));
        }
        self.lines.insert(number, (sum.to_owned(), name.to_owned()));
        Ok(number)
    }

    /// The file.
    pub(crate) fn text(&self) -> String {
        let mut text = HEAD.to_owned();
        for (number, (sum, name)) in &self.lines {
            _ = writeln!(text, "{number:#06x} {sum} {name}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_never_used_again() {
        let mut lock = Lock::parse("").unwrap();
        let mut number = |name: &str, sum: &str| lock.number(name, sum, 0x100..0x103).ok();
        assert_eq!(number("clA", "1"), Some(0x100));
        assert_eq!(number("clB", "1"), Some(0x101));
        assert_eq!(number("clA", "1"), Some(0x100), "the same layout keeps its number");
        assert_eq!(number("clA", "2"), Some(0x102), "another one gets one of its own");
        assert_eq!(number("clA", "1"), Some(0x100), "and what was before is still that");
        assert_eq!(number("clB", "3"), None, "numbers of another API are not taken");
        let text = lock.text();
        assert_eq!(Lock::parse(&text).unwrap().text(), text);
        assert_eq!(text.lines().count(), 4);
    }

    #[test]
    fn lines_that_contradict_each_other_are_refused() {
        for (text, part) in [
            ("0x0100 a clA\n0x0100 b clB\n", "a number that another line has"),
            ("0x0100 a clA\n0x0101 a clA\n", "a layout that another line has"),
            ("256 a clA\n", "begins with no number"),
            ("0x0100 clA\n", "is no line of it"),
        ] {
            let error = Lock::parse(text).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
