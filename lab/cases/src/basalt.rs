//! Runs the `basalt` program as a user would and looks at what comes out.

use std::io::Write;
use std::process::{Command, Output, Stdio};

use anyhow::{Result, bail, ensure};

use crate::Host;

/// A command line of `basalt`, ready to be changed and run.
pub(crate) fn command(host: &Host, arguments: &[&str]) -> Command {
    let mut command = Command::new(host.binaries.join("basalt"));
    // Inside the lab KVM is what there is to test: never look for another lab.
    command.env("BASALT_ENGINE", "kvm");
    let mut words = arguments.iter();
    for word in words.by_ref() {
        command.arg(word);
        // What is run here is of no use to anybody afterwards.
        if *word == "run" {
            command.args((!arguments.contains(&"--detach") && !arguments.contains(&"-d")).then_some("--rm"));
            break;
        }
    }
    command.args(words);
    command
}

/// Runs it to its end with `input` as standard input.
pub(crate) fn run(host: &Host, arguments: &[&str], input: &[u8]) -> Result<Output> {
    finish(&mut command(host, arguments), input)
}

/// The same for a command that was changed.
pub(crate) fn finish(command: &mut Command, input: &[u8]) -> Result<Output> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut stdin = child.stdin.take();
    let input = input.to_vec();
    let writer = std::thread::spawn(move || match &mut stdin {
        // A command that does not read its input closes it early; that is its right.
        Some(stdin) => stdin.write_all(&input).is_ok(),
        None => false,
    });
    let output = child.wait_with_output()?;
    if writer.join().is_err() {
        bail!("the thread that writes standard input panicked");
    }
    Ok(output)
}

/// Runs `basalt run python -- ...` to its end.
pub(crate) fn sandbox(host: &Host, words: &[&str], input: &[u8]) -> Result<Output> {
    let arguments: Vec<_> = ["run", host.digest.as_str(), "--"]
        .iter()
        .chain(words)
        .copied()
        .collect();
    run(host, &arguments, input)
}

/// Fails unless the exit code is `code`, showing everything.
pub(crate) fn expect_code(output: &Output, code: i32) -> Result<()> {
    ensure!(
        output.status.code() == Some(code),
        "ended with {}, not {code}\nstdout: {}\nstderr: {}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// Fails unless the command was refused with `code` and a sentence that contains each of `words`.
pub(crate) fn expect_refusal(output: &Output, code: i32, words: &[&str]) -> Result<()> {
    expect_code(output, code)?;
    let text = String::from_utf8_lossy(&output.stderr);
    for word in words {
        ensure!(text.contains(word), "the message does not say `{word}`: {text}");
    }
    ensure!(!text.contains("panicked at"), "a panic is no message: {text}");
    ensure!(output.stdout.is_empty(), "something went to standard output");
    Ok(())
}
