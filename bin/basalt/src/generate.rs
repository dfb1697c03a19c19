//! `basalt completion` and `basalt man`: made from the definition in `cli`.

use std::fs;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use clap::CommandFactory;

use crate::cli::Cli;
use crate::output::Output;

/// Prints the completion script for `shell`.
pub(crate) fn completion(shell: clap_complete::Shell) -> Result<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "basalt", &mut script);
    let mut out = std::io::stdout().lock();
    out.write_all(&script)?;
    out.flush()?;
    Ok(0)
}

/// Writes `basalt.1` and a page for each verb into `directory`.
pub(crate) fn man(directory: &Path, output: &Output) -> Result<u8> {
    let failed = || {
        format!(
            "the man pages cannot be written to {}: give a directory that you may write to",
            directory.display()
        )
    };
    fs::create_dir_all(directory).with_context(failed)?;
    clap_mangen::generate_to(Cli::command(), directory).with_context(failed)?;
    let count = pages(&Cli::command());
    output.result(&serde_json::json!({ "directory": directory, "pages": count }), || {
        format!("{count} man pages written to {}\n", directory.display())
    })?;
    Ok(0)
}

/// One for the command, and those of its verbs. What is hidden from help has none.
fn pages(command: &clap::Command) -> usize {
    let shown = command.get_subcommands().filter(|verb| !verb.is_hide_set());
    1 + shown.map(pages).sum::<usize>()
}
