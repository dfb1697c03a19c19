//! The commands in README and docs: blocks marked for it are run, and commands that other blocks name must exist.
//!
//! A block that opens with ```` ```sh test ```` is run by `bash -eu` in the checkout, with `target/release` first on PATH;
//! if the block right after it opens with ```` ```text output ````, its standard output must be that. In other `sh` blocks
//! only names are looked at: `basalt VERB`, `basalt-lab VERB`, `cargo xtask VERB`, `make TARGET`. In the lab, which outlives a run
//! that was killed, what a block names with `--name` is removed first. Knows no document.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::context::Context;
use crate::runner::Task;
use crate::tree;

const LIMIT: Duration = Duration::from_secs(5 * 60);
const HELP_LIMIT: Duration = Duration::from_secs(30);

/// What was looked at, and what was wrong with it.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// Blocks run and commands looked up.
    pub(crate) checked: u64,
    /// `file:line: what`.
    pub(crate) failures: Vec<String>,
}

/// A fenced block.
#[derive(Debug, PartialEq, Eq)]
struct Block {
    line: usize,
    info: String,
    text: String,
}

/// Checks every document of the tree.
pub(crate) fn run(context: &Context, task: &mut Task) -> Result<Found> {
    let mut found = Found::default();
    let mut named = BTreeMap::new();
    for file in tree::files(&context.root, None)?
        .iter()
        .filter(|file| is_document(file))
    {
        let text = fs::read_to_string(context.root.join(file))?;
        let blocks = blocks(&text);
        for (index, block) in blocks.iter().enumerate() {
            let place = format!("{file}:{}", block.line);
            if block.info == "sh test" {
                found.checked += 1;
                if !context.kvm {
                    remove_named(context, task, &block.text)?;
                }
                let next = blocks.get(index + 1).filter(|next| next.info == "text output");
                let wanted = next.map(|next| next.text.as_str());
                found
                    .failures
                    .extend(run_block(context, task, &place, &block.text, wanted)?);
            }
            if block.info.starts_with("sh") {
                for command in commands(&block.text) {
                    named.entry(command).or_insert(place.clone());
                }
            }
        }
    }
    for (command, place) in named {
        found.checked += 1;
        if !exists(context, task, &command)? {
            found.failures.push(format!(
                "{place}: `{}` is no command; mend the document",
                command.join(" ")
            ));
        }
    }
    for failure in &found.failures {
        task.say(failure)?;
    }
    Ok(found)
}

fn is_document(file: &str) -> bool {
    file.ends_with(".md") && (file.starts_with("docs/") || !file.contains('/'))
}

fn run_block(
    context: &Context,
    task: &mut Task,
    place: &str,
    script: &str,
    wanted: Option<&str>,
) -> Result<Option<String>> {
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new("bash");
    command.args(["-euc", script]).current_dir(&context.root);
    command.env("PATH", format!("{}:{path}", context.release().display()));
    let finished = task.finish_within(&mut command, LIMIT)?;
    if !finished.status.success() {
        let said = finished.err.last().map(|line| format!(": {line}")).unwrap_or_default();
        return Ok(Some(format!("{place}: the block ended with {}{said}", finished.status)));
    }
    let printed = finished.out.join("\n");
    Ok(wanted
        .filter(|wanted| wanted.trim() != printed.trim())
        .map(|wanted| format!("{place}: printed {printed:?}, the document says {:?}", wanted.trim())))
}

/// Removes the sandboxes of an earlier run that have the names a block gives. Mostly there are none, which is no failure.
fn remove_named(context: &Context, task: &mut Task, script: &str) -> Result<()> {
    for name in names(script) {
        let mut command = Command::new(context.release().join("basalt"));
        task.finish_within(command.args(["rm", "--force", name]), LIMIT)?;
    }
    Ok(())
}

/// What a script calls its sandboxes.
fn names(script: &str) -> Vec<&str> {
    let mut words = script.split_whitespace();
    let mut found = Vec::new();
    while words.any(|word| word == "--name") {
        found.extend(words.next());
    }
    found
}

/// All fenced blocks with the line of their fence.
fn blocks(text: &str) -> Vec<Block> {
    let mut found = Vec::new();
    let mut open: Option<Block> = None;
    for (index, line) in text.lines().enumerate() {
        match (line.trim_start().strip_prefix("```"), open.as_mut()) {
            (Some(info), None) => {
                open = Some(Block {
                    line: index + 1,
                    info: info.trim().to_owned(),
                    text: String::new(),
                });
            }
            (Some(_), Some(_)) => found.extend(open.take()),
            (None, Some(block)) => {
                block.text.push_str(line);
                block.text.push('\n');
            }
            (None, None) => {}
        }
    }
    found
}

/// The commands of ours that a script names, as program and verb.
fn commands(script: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for line in script.lines() {
        let line = line
            .split(" #")
            .next()
            .unwrap_or_default()
            .trim()
            .trim_start_matches("$ ");
        for part in line.split(['|', ';', '&']) {
            let mut words = part
                .split_whitespace()
                .skip_while(|word| word.contains('=') || *word == "sudo");
            let program = words.next().map(|word| word.rsplit('/').next().unwrap_or(word));
            let words: Vec<_> = words.take(2).collect();
            let verb = |word: Option<&&str>| word.filter(|word| is_verb(word)).map(|word| (*word).to_owned());
            match (program, words.first().copied()) {
                (Some(program @ ("basalt" | "basalt-lab" | "make")), first) => {
                    found.extend(verb(first.as_ref()).map(|verb| vec![program.to_owned(), verb]));
                }
                (Some("cargo"), Some("xtask")) => {
                    found.extend(verb(words.get(1)).map(|verb| vec!["xtask".to_owned(), verb]));
                }
                _ => {}
            }
        }
    }
    found
}

fn is_verb(word: &str) -> bool {
    word.starts_with(|char: char| char.is_ascii_lowercase())
        && word
            .chars()
            .all(|char| char.is_ascii_lowercase() || char.is_ascii_digit() || char == '-')
}

fn exists(context: &Context, task: &mut Task, command: &[String]) -> Result<bool> {
    let [program, verb] = command else { return Ok(false) };
    let mut help = match program.as_str() {
        "make" => {
            let makefile = fs::read_to_string(context.root.join("Makefile"))?;
            return Ok(makefile.lines().any(|line| line.starts_with(&format!("{verb}:"))));
        }
        "xtask" => Command::new(std::env::current_exe().context("cannot find xtask itself")?),
        program => Command::new(context.release().join(Path::new(program))),
    };
    Ok(task
        .finish_within(help.args([verb, "--help"]), HELP_LIMIT)?
        .status
        .success())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str =
        "# x\n```sh test\necho 42\n```\n```text output\n42\n```\ntext\n  ```sh\n  make run # all\n  ```\n";

    #[test]
    fn blocks_carry_their_line_and_mark() {
        let found = blocks(TEXT);
        let marks: Vec<_> = found.iter().map(|block| (block.line, block.info.as_str())).collect();
        assert_eq!(marks, [(2, "sh test"), (5, "text output"), (9, "sh")]);
        assert_eq!(found[0].text, "echo 42\n");
    }

    #[test]
    fn our_commands_are_found_among_others() {
        let script = "make run # first\n$ target/release/basalt run python -- ls | wc -l\nBASALT_STATE=/x basalt-lab up\n\
                      cargo xtask tidy --json\ncargo build\nbasalt --help\nls make\n";
        let found: Vec<_> = commands(script).iter().map(|command| command.join(" ")).collect();
        assert_eq!(found, ["make run", "basalt run", "basalt-lab up", "xtask tidy"]);
    }

    #[test]
    fn names_are_what_sandboxes_are_called() {
        let script = "basalt run -d --name clock python\nbasalt rm clock\nbasalt run --name two --rm python\n";
        assert_eq!(names(script), ["clock", "two"]);
    }

    #[test]
    fn a_block_must_succeed_and_print_what_the_document_says() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().to_owned();
        let context = Context {
            root,
            cache: dir.path().join("cache"),
            kvm: false,
            ci: true,
        };
        let board = crate::runner::board::Board::silent(1);
        let mut task = Task::new(
            0,
            &dir.path().join("log"),
            board,
            crate::runner::interrupt::Stop::default(),
        )
        .unwrap();
        let mut run = |script, wanted| run_block(&context, &mut task, "a.md:1", script, wanted).unwrap();
        assert_eq!(run("echo 42", Some("42\n")), None);
        assert!(run("echo 41", Some("42\n")).unwrap().contains("41"));
        assert!(
            run("echo why >&2; false; true", None)
                .unwrap()
                .ends_with("a.md:1: the block ended with exit status: 1: why")
        );
    }
}
