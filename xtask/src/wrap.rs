//! `cargo xtask wrap`: the prose of documents in lines of at most 120 characters, and the rule that it is.
//!
//! Knows paragraphs and list items; code, tables, headings and quotes are left as they are. A code span is never broken, nor
//! does a line begin with what would be a list, a heading or a table there.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};

use crate::tree;

/// The longest line of prose, in characters.
pub(crate) const WIDTH: usize = 120;

/// Wraps every document that is not.
///
/// # Errors
/// A document cannot be read or written.
#[expect(
    clippy::print_stdout,
    reason = "the documents that were changed are this command's output"
)]
pub(crate) fn command(root: &Path) -> Result<u8> {
    for path in tree::files(root, None)?.iter().filter(|path| is_document(path)) {
        let full = root.join(path);
        let text = fs::read_to_string(&full).with_context(|| format!("cannot read {path}"))?;
        let wrapped = wrap(&text);
        if wrapped != text {
            fs::write(&full, wrapped).with_context(|| format!("cannot write {path}"))?;
            println!("{path}");
        }
    }
    Ok(0)
}

/// What is wrapped.
pub(crate) fn is_document(path: &str) -> bool {
    path.ends_with(".md")
}

/// A document with its prose in short lines.
pub(crate) fn wrap(text: &str) -> String {
    let mut out = Vec::new();
    let mut paragraph = Paragraph::default();
    let mut fence: Option<&str> = None;
    for line in text.lines() {
        let bare = line.trim_start();
        if let Some(mark) = fence {
            out.push(line.to_owned());
            if bare.starts_with(mark) {
                fence = None;
            }
        } else if let Some(mark) = ["```", "~~~"].into_iter().find(|mark| bare.starts_with(mark)) {
            paragraph.end(&mut out);
            out.push(line.to_owned());
            fence = Some(mark);
        } else if bare.is_empty() || is_fixed(line, bare) {
            paragraph.end(&mut out);
            out.push(line.to_owned());
        } else if let Some(marker) = marker(bare) {
            paragraph.end(&mut out);
            let indent = line.len() - bare.len();
            paragraph.begin(&line[..indent + marker], indent + marker);
            paragraph.add(&bare[marker..]);
        } else {
            if paragraph.words.is_empty() {
                let indent = line.len() - bare.len();
                paragraph.begin(&line[..indent], indent);
            }
            paragraph.add(bare);
        }
    }
    paragraph.end(&mut out);
    let mut text = out.join("\n");
    text.push('\n');
    text
}

/// Tables, headings, quotes, HTML, and lines that are indented as code are.
fn is_fixed(line: &str, bare: &str) -> bool {
    ["|", "#", ">", "<", "!["].iter().any(|start| bare.starts_with(start)) || line.starts_with("        ")
}

/// How long the marker of a list item is that a line begins with, with the space behind it.
fn marker(line: &str) -> Option<usize> {
    if ["* ", "- ", "+ "].iter().any(|marker| line.starts_with(marker)) {
        return Some(2);
    }
    let digits = line.bytes().take_while(u8::is_ascii_digit).count();
    (digits > 0 && line[digits..].starts_with(". ")).then_some(digits + 2)
}

#[derive(Default)]
struct Paragraph {
    first: String,
    indent: usize,
    words: Vec<String>,
    /// A code span is open at the end of the last word.
    in_code: bool,
}

impl Paragraph {
    fn begin(&mut self, first: &str, indent: usize) {
        self.first = first.to_owned();
        self.indent = indent;
    }

    fn add(&mut self, text: &str) {
        for word in text.split_whitespace() {
            match self.words.last_mut() {
                Some(last) if self.in_code => {
                    last.push(' ');
                    last.push_str(word);
                }
                _ => self.words.push(word.to_owned()),
            }
            self.in_code ^= word.matches('`').count() % 2 == 1;
        }
    }

    fn end(&mut self, out: &mut Vec<String>) {
        let Self {
            first, indent, words, ..
        } = std::mem::take(self);
        if words.is_empty() {
            return;
        }
        let mut line = first;
        let mut is_empty = true;
        for word in words {
            let fits = line.chars().count() + usize::from(!is_empty) + word.chars().count() <= WIDTH;
            if !is_empty && (fits || begins_something(&word)) {
                line.push(' ');
            } else if !is_empty {
                out.push(std::mem::replace(&mut line, " ".repeat(indent)));
            }
            line.push_str(&word);
            is_empty = false;
        }
        out.push(line);
    }
}

/// Whether a line that begins with the word would not go on with a paragraph.
fn begins_something(word: &str) -> bool {
    ["|", "#", ">", "<", "!["].iter().any(|start| word.starts_with(start))
        || ["*", "-", "+", "```", "---", "==="].contains(&word)
        || word
            .strip_suffix('.')
            .is_some_and(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_prose_is_wrapped_and_the_rest_is_left() {
        let long = "word ".repeat(40);
        let text = format!("# {long}\n\n{long}\n\n| {long} |\n\n```sh\n{long}\n```\n\n* {long}\n  more\n1. {long}\n");
        let wrapped = wrap(&text);
        let lines: Vec<_> = wrapped.lines().collect();
        assert_eq!(lines[0], format!("# {long}"));
        assert!(lines[2].chars().count() <= WIDTH && lines[3].starts_with("word"));
        assert!(lines.contains(&format!("| {long} |").as_str()));
        assert!(lines.contains(&long.as_str()), "code is left");
        let item = lines.iter().position(|line| line.starts_with("* word")).unwrap();
        assert!(lines[item + 1].starts_with("  word") && lines[item + 1].ends_with("more"));
        assert_eq!(wrap(&wrapped), wrapped);
    }

    #[test]
    fn code_spans_stay_whole_and_no_line_begins_a_list() {
        let text = format!("{} `a b c d e f` {} - 1. x\n", "x".repeat(115), "y".repeat(105));
        let wrapped = wrap(&text);
        assert!(wrapped.contains("\n`a b c d e f`"), "{wrapped}");
        assert!(!wrapped.contains("\n- ") && !wrapped.contains("\n1. "), "{wrapped}");
    }
}
