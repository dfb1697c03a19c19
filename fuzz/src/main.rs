//! `basalt-fuzz`: feeds mutated input to parsers of untrusted data and saves what makes one panic or hang.
//!
//! Runs on the stable compiler, from a seed that it prints, so that CI can run it for a few seconds and repeat it. It
//! has no view into coverage: an input is kept for further mutation when its target ends in a way not seen before. What
//! the targets parse is in `targets`; this file reads the command line and prints.

#[cfg(test)]
mod listed;
mod mutate;
mod run;
mod targets;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Parser;

use run::{Findings, Target};

/// Fuzz the parsers of untrusted data
#[derive(Debug, Parser)]
#[command(name = "basalt-fuzz")]
struct Cli {
    /// How long each target is fed
    #[arg(long, value_name = "N", default_value_t = 3)]
    seconds: u64,
    /// Only this target; may be repeated
    #[arg(long, value_name = "NAME")]
    target: Vec<String>,
    /// Where the random numbers begin
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Where inputs that fail are saved
    #[arg(long, value_name = "DIR", default_value = "target/fuzz-failures")]
    failures: PathBuf,
    /// Feed this file to its target (named by --target) once, instead of fuzzing
    #[arg(long, value_name = "FILE")]
    replay: Option<PathBuf>,
    /// Print the targets' names
    #[arg(long)]
    list: bool,
}

fn main() -> ExitCode {
    match run_cli(&Cli::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("basalt-fuzz: {error:#}");
            ExitCode::from(2)
        }
    }
}

#[expect(clippy::print_stdout, reason = "what this program is for")]
fn run_cli(cli: &Cli) -> Result<bool> {
    let targets = chosen(&cli.target)?;
    if cli.list {
        targets.iter().for_each(|target| println!("{}", target.name));
        return Ok(true);
    }
    if let Some(file) = &cli.replay {
        let [target] = targets.as_slice() else {
            bail!("--replay needs one --target; --list names them")
        };
        let input = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
        println!("{} ended with outcome {:#x}", target.name, (target.parse)(&input));
        return Ok(true);
    }
    println!("seed {}, {} s a target", cli.seed, cli.seconds);
    let (mut passed, mut failed) = (0, 0);
    for target in targets {
        let Findings {
            executions,
            units,
            outcomes,
            failure,
        } = run::fuzz(&target, cli.seed, Duration::from_secs(cli.seconds));
        match failure {
            // A target that never ran has shown nothing.
            None if executions > 0 => {
                passed += 1;
                let of = if units > 0 {
                    format!(" of {units} records")
                } else {
                    String::new()
                };
                println!(
                    "test {} ... ok ({executions} executions{of}, {outcomes} outcomes)",
                    target.name
                );
            }
            None => {
                failed += 1;
                println!("test {} ... FAILED", target.name);
                println!("  executed nothing");
            }
            Some(failure) => {
                failed += 1;
                let path = run::save(&cli.failures, target.name, &failure.input)?;
                println!("test {} ... FAILED", target.name);
                println!("  {} after {executions} executions", failure.message);
                println!("  basalt-fuzz --target {} --replay {}", target.name, path.display());
            }
        }
    }
    println!("{passed} passed, {failed} failed, 0 skipped");
    Ok(failed == 0 && passed > 0)
}

fn chosen(names: &[String]) -> Result<Vec<Target>> {
    let all = targets::all();
    if let Some(unknown) = names
        .iter()
        .find(|name| !all.iter().any(|target| target.name == **name))
    {
        bail!("there is no target {unknown}; --list names them");
    }
    Ok(all
        .into_iter()
        .filter(|target| names.is_empty() || names.iter().any(|name| name == target.name))
        .collect())
}
