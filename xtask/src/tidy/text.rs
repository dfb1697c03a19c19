//! Rules about lines: headers, blanks, marks of unfinished work, host names of registries.
//!
//! Works on text alone; what needs a syntax tree is in `shape`. The host names come from this machine's configuration,
//! so that none is written here either.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::{Finding, Source};

/// Words that mean "not done"; in pieces, because this file is checked too.
const MARKS: &[&str] = &[concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];
/// Code that means it, and tests that do not run.
const CODE_MARKS: &[&str] = &[
    concat!("to", "do!("),
    concat!("unimpl", "emented!("),
    concat!("#[", "ignore"),
    concat!("#[cfg(", "any())]"),
];

/// Checks one file.
pub(super) fn check(source: &Source, hosts: &BTreeSet<String>, findings: &mut Vec<Finding>) {
    header(source, findings);
    blanks(source, findings);
    marks(source, findings);
    examples(source, findings);
    registries(source, hosts, findings);
}

/// A file says what it is in its first lines.
fn header(source: &Source, findings: &mut Vec<Finding>) {
    if source.is_rust() {
        if !source.text.starts_with("//!") {
            let message = "does not open with `//!`; say what the file is, and what it deliberately does not know";
            findings.push(Finding::new(&source.path, 1, message));
        }
    } else if source.is_script() {
        let mut lines = source.text.lines();
        let named = lines.next().is_some_and(|line| line.starts_with("#!"));
        if named && !source.executable {
            findings.push(Finding::new(
                &source.path,
                1,
                "has a `#!` line but is not executable; chmod +x it",
            ));
        }
        let first = if named {
            lines.next()
        } else {
            source.text.lines().next()
        };
        if !first.is_some_and(|line| line.starts_with('#') && line.len() > 2) {
            let message = "does not open with a `#` comment; say what the script is for";
            findings.push(Finding::new(&source.path, 1, message));
        }
    }
}

fn blanks(source: &Source, findings: &mut Vec<Finding>) {
    for (index, line) in source.text.split('\n').enumerate() {
        if line.ends_with([' ', '\t']) {
            findings.push(Finding::new(&source.path, index + 1, "ends with a blank; remove it"));
        }
        if line.ends_with('\r') {
            findings.push(Finding::new(
                &source.path,
                index + 1,
                "ends with a carriage return; use Unix line ends",
            ));
        }
    }
    if !source.text.is_empty() && !source.text.ends_with('\n') {
        findings.push(Finding::new(&source.path, 0, "does not end with a newline; add one"));
    }
}

fn marks(source: &Source, findings: &mut Vec<Finding>) {
    if source.path.ends_with(".md") || source.path.ends_with(".lock") {
        return;
    }
    for (index, line) in source.text.lines().enumerate() {
        let mark = MARKS.iter().find(|mark| has_word(line, mark));
        let code = CODE_MARKS.iter().find(|mark| source.is_rust() && line.contains(**mark));
        if let Some(mark) = mark.or(code) {
            let message = format!("{mark} marks unfinished work; finish it, or file an issue and remove the mark");
            findings.push(Finding::new(&source.path, index + 1, message));
        }
    }
}

/// Code blocks of these languages are no tests for rustdoc.
const NO_TESTS: &[&str] = &["text", "console", "sh", "json"];

/// `make test` runs no tests in documentation, which cargo compiles one by one: what would be one is a test in its place. (The
/// rustdoc book, "Documentation tests".)
fn examples(source: &Source, findings: &mut Vec<Finding>) {
    if !source.is_rust() {
        return;
    }
    let (mut inside, mut blank) = (false, false);
    for (index, line) in source.text.lines().enumerate() {
        let text = line.trim_start();
        let Some(said) = text.strip_prefix("///").or_else(|| text.strip_prefix("//!")) else {
            blank = false;
            continue;
        };
        let fence = ["```", "~~~"]
            .iter()
            .find_map(|fence| said.trim_start().strip_prefix(fence));
        let is_example = match fence {
            Some(language) => !inside && !NO_TESTS.contains(&language.trim()),
            // Indented by four behind an empty line.
            None => !inside && blank && said.starts_with("     "),
        };
        if is_example {
            let message = "an example in documentation, which nothing compiles here; make it a test, or name its language \
                           (```text)";
            findings.push(Finding::new(&source.path, index + 1, message));
        }
        inside ^= fence.is_some();
        blank = said.trim().is_empty();
    }
}

fn has_word(line: &str, word: &str) -> bool {
    let is_part = |char: Option<char>| char.is_some_and(|char| char.is_alphanumeric() || char == '_');
    line.match_indices(word)
        .any(|(at, _)| !is_part(line[..at].chars().next_back()) && !is_part(line[at + word.len()..].chars().next()))
}

/// No registry's host anywhere, and no address of the web in a script: both belong to the machine's configuration.
fn registries(source: &Source, hosts: &BTreeSet<String>, findings: &mut Vec<Finding>) {
    if source.path.ends_with(".lock") {
        return;
    }
    for (index, line) in source.text.lines().enumerate() {
        if let Some(host) = hosts.iter().find(|host| line.contains(host.as_str())) {
            let message = format!("names the registry host {host}; derive it from the machine's configuration instead");
            findings.push(Finding::new(&source.path, index + 1, message));
        } else if source.is_script() && has_web_address(line) {
            let message = "a script with an address of the web; derive it from the machine's configuration instead";
            findings.push(Finding::new(&source.path, index + 1, message));
        }
    }
}

/// In code; a comment may say where a fact comes from.
fn has_web_address(line: &str) -> bool {
    let code = line.trim_start();
    !code.starts_with('#')
        && ["http://", "https://"]
            .iter()
            .flat_map(|scheme| code.match_indices(scheme))
            .any(|(at, scheme)| {
                let host = &code[at + scheme.len()..];
                host.starts_with(|char: char| char.is_ascii_alphanumeric())
                    && !["localhost", "127.", "10.0.2."].iter().any(|own| host.starts_with(own))
            })
}

/// Hosts in the configuration of apt, pip, npm and cargo.
pub(super) fn registry_hosts() -> BTreeSet<String> {
    let home = PathBuf::from(std::env::var_os("HOME").unwrap_or_default());
    let mut files: Vec<PathBuf> = ["/etc/apt/sources.list", "/etc/pip.conf", "/etc/npmrc"]
        .map(PathBuf::from)
        .into();
    let in_home = [
        ".config/pip/pip.conf",
        ".pip/pip.conf",
        ".npmrc",
        ".cargo/config.toml",
        ".cargo/config",
    ];
    files.extend(in_home.map(|name| home.join(name)));
    let listed = fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten().flatten();
    files.extend(listed.map(|entry| entry.path()));
    files.iter().flat_map(|path| hosts_in_file(path)).collect()
}

/// A machine without one of the files has no hosts in it.
fn hosts_in_file(path: &Path) -> Vec<String> {
    hosts_in(&fs::read_to_string(path).unwrap_or_default())
}

fn hosts_in(text: &str) -> Vec<String> {
    ["http://", "https://"]
        .iter()
        .flat_map(|scheme| text.match_indices(scheme).map(|(at, _)| &text[at + scheme.len()..]))
        .map(|rest| {
            rest.split(|char: char| !(char.is_ascii_alphanumeric() || ".-".contains(char)))
                .next()
        })
        .filter_map(|host| host.filter(|host| host.contains('.')).map(str::to_owned))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::source;
    use super::*;

    fn found(source: &Source) -> Vec<String> {
        let hosts = BTreeSet::from(["mirror.example".to_owned()]);
        let mut findings = Vec::new();
        check(source, &hosts, &mut findings);
        findings.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_good_file_has_no_findings() {
        assert!(found(&source("a.rs", "//! What.\n\nfn f() {}\n")).is_empty());
        let mut script = source(
            "a.sh",
            "#!/bin/sh\n# What, see https://docs.example/.\nmktemp /tmp/XXXXXX\n",
        );
        script.executable = true;
        assert!(found(&script).is_empty());
    }

    #[test]
    fn headers_are_wanted() {
        assert!(found(&source("a.rs", "fn f() {}\n"))[0].contains("//!"));
        let script = found(&source("a.sh", "#!/bin/sh\nset -e\n"));
        assert!(script.iter().any(|line| line.contains("executable")), "{script:?}");
        assert!(script.iter().any(|line| line.contains("`#` comment")), "{script:?}");
    }

    #[test]
    fn blanks_at_the_end_are_found() {
        assert_eq!(
            found(&source("a.toml", "a = 1 \nb = 2\n")),
            ["a.toml:1: ends with a blank; remove it"]
        );
        assert!(found(&source("a.toml", "a = 1"))[0].contains("newline"));
        assert!(found(&source("a.toml", "a = 1\r\n"))[0].contains("carriage"));
    }

    #[test]
    fn unfinished_work_is_found() {
        for mark in MARKS {
            assert!(found(&source("a.toml", &format!("# {mark}: later\n")))[0].contains(mark));
            assert!(found(&source("a.toml", &format!("# {mark}S_{mark}Y\n"))).is_empty());
        }
        for mark in CODE_MARKS {
            assert!(found(&source("a.rs", &format!("//! a\nfn f() {{ {mark}\n")))[0].contains("unfinished"));
        }
    }

    #[test]
    fn examples_that_nothing_would_compile_are_found() {
        let text = |language: &str| format!("//! a\n//!\n//! ```{language}\n//! f();\n//! ```\n");
        assert!(found(&source("a.rs", &text("text"))).is_empty());
        for language in ["", "rust", "no_run", "edition2024"] {
            let found = found(&source("a.rs", &text(language)));
            assert_eq!(found.len(), 1, "{found:?}");
            assert!(found[0].starts_with("a.rs:3: an example"), "{found:?}");
        }
        let other = found(&source("a.rs", "//! a\n//!\n//! ~~~\n//! f();\n//! ~~~\n"));
        assert!(other.len() == 1 && other[0].starts_with("a.rs:3"), "{other:?}");
        let indented = found(&source("a.rs", "//! a\n\n/// b\n///\n///     f();\nfn g() {}\n"));
        assert!(indented.len() == 1 && indented[0].starts_with("a.rs:5"), "{indented:?}");
    }

    #[test]
    fn registries_are_found() {
        assert!(found(&source("a.md", "from mirror.example\n"))[0].contains("mirror.example"));
        let script = found(&source(
            "Makefile",
            "# x y\nget https://else.example/x\nget http://127.0.0.1/\n",
        ));
        assert_eq!(script.len(), 1, "{script:?}");
        assert!(script[0].starts_with("Makefile:2"), "{script:?}");
    }

    #[test]
    fn hosts_are_read_from_configuration() {
        let text =
            "deb [x] http://a.example/debian b\nindex-url = https://u:p.example\nURIs: https://c.d-e.example:8/x\n";
        assert_eq!(hosts_in(text), ["a.example", "c.d-e.example"]);
    }
}
