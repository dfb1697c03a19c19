//! `cargo xtask`: the developer's commands. `make run`, `make check` and `make test` are three of them.
//!
//! Reads the command line; everything else is in the modules: what to do in `steps`, how in `runner`, rules in `tidy`.

mod clients;
mod context;
mod cuda_programs;
mod docs;
mod elf;
mod recipe;
mod runner;
mod steps;
mod strings;
mod tidy;
mod torch;
mod tree;
mod wrap;

use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{Args, Parser, Subcommand};

use context::Context;
use runner::{Options, Report, Step, run_steps};

/// Developer commands of Basalt
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Set everything up and run a first sandbox
    Run(StepArgs),
    /// Run all checks and tests, and what they need
    Test(StepArgs),
    /// Run what needs no virtual machine: format, tidy, lints, unit tests
    Check(StepArgs),
    /// What CI runs: `test` in plain lines
    Ci(StepArgs),
    /// Check the rules that the compiler does not know (layers, budgets, marks, golden files)
    Tidy {
        /// Print the findings as JSON
        #[arg(long)]
        json: bool,
        /// Write the sums of new golden files to golden.lock; existing lines never change
        #[arg(long)]
        accept_golden: bool,
    },
    /// Print every text of the product that a person can be shown: help, errors, log lines
    Strings {
        /// Print them as JSON
        #[arg(long)]
        json: bool,
    },
    /// Make the code and the page that follow from accel/spec, and add numbers of new calls to its lock
    Accel,
    /// Run unmodified OpenCL programs natively and forwarded, and compare what they tell
    AccelClients(clients::ClientArgs),
    /// Build programs of CUDA by nvcc, and run them on our libraries, with the back end that computes
    CudaPrograms,
    /// Run PyTorch's CUDA wheel on our libraries of CUDA, and tell what it calls, what is not served, and what it takes
    Torch(torch::TorchArgs),
    /// Wrap the prose of documents at 120 characters
    Wrap,
    /// Build `basalt-bench`, and make and import the image that its part `exits` has guests run
    BenchImage(StepArgs),
    /// Feed each parser of untrusted data for an hour, or for as long as is asked for
    Fuzz(FuzzArgs),
    /// Test for hours: a minute of each fuzz target, fifty power failures, a kill at every point, many rounds of some cases
    Long(StepArgs),
    /// Run the server that clients enter by VMFUNC, and the attacks on it, in an emulated Intel processor (Bochs)
    Vmfunc(StepArgs),
    /// Run the commands that README and docs show
    Docs,
    /// Measure the gateway alone, with the Python SDK of E2B, and print a report as `basalt-bench --json` does
    E2bFigures,
    /// Write the tables of docs/e2b-compatibility.md by what the last run of the step `e2b` has exercised
    E2bTable,
    /// Make the Debian packages, target/package/basalt_VERSION_amd64.deb and basalt-dkms_VERSION_all.deb
    Package {
        /// Another version than the tree's
        #[arg(long)]
        version: Option<String>,
        #[command(flatten)]
        steps: StepArgs,
    },
}

#[derive(Debug, Default, Args)]
struct StepArgs {
    /// Only this step and what it needs; may be repeated
    #[arg(long, value_name = "STEP", value_delimiter = ',')]
    only: Vec<String>,
    /// Print the steps and what each needs, and run nothing
    #[arg(long)]
    list: bool,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct FuzzArgs {
    /// How long each target is fed; `cargo xtask long` has 60, `make test` a few
    #[arg(long, value_name = "N", default_value_t = 3600)]
    seconds: u64,
    /// Only this target; may be repeated
    #[arg(long, value_name = "NAME")]
    target: Vec<String>,
    /// Where the random numbers begin; another each time if not given
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

fn main() -> ExitCode {
    match dispatch(Cli::parse().verb) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(verb: Verb) -> Result<u8> {
    let mut context = Context::find()?;
    match verb {
        Verb::Run(args) => with_steps(&context, steps::run(), args, "run"),
        Verb::Test(args) => with_steps(&context, steps::test(), args, "test"),
        Verb::Check(args) => with_steps(&context, steps::check(), args, "check"),
        Verb::Ci(args) => {
            context.ci = true;
            with_steps(&context, steps::test(), args, "test")
        }
        Verb::Tidy { json, accept_golden } => tidy::command(&context.root, json, accept_golden),
        Verb::Strings { json } => strings::command(&context.root, json),
        Verb::Accel => accel(&context),
        Verb::CudaPrograms => cuda_programs::command(&context),
        Verb::AccelClients(args) => clients::command(&context, args),
        Verb::Torch(args) => torch::command(&context, args),
        Verb::Wrap => wrap::command(&context.root),
        Verb::Package { version, steps: args } => with_steps(&context, steps::package(version), args, "package"),
        Verb::BenchImage(args) => with_steps(&context, steps::bench_image(), args, "bench-image"),
        Verb::Fuzz(args) => fuzz(&context, &args),
        Verb::Long(args) => with_steps(&context, steps::long(), args, "long"),
        Verb::Vmfunc(args) => with_steps(&context, steps::vmfunc(), args, "vmfunc"),
        Verb::Docs => with_steps(&context, vec![docs_alone()], StepArgs::default(), "docs"),
        Verb::E2bFigures => steps::print_figures(&context),
        Verb::E2bTable => steps::write_table(&context),
    }
}

/// What is generated of accelerator calls.
#[expect(clippy::print_stdout, reason = "what was written is this command's output")]
fn accel(context: &Context) -> Result<u8> {
    let changed = accel_gen::write(&context.root)?;
    changed.iter().for_each(|path| println!("{path}"));
    println!("accel: {} written", changed.len());
    Ok(0)
}

/// The fuzzer as long as it takes, with its own words: it prints the seed, each target, and what repeats a failure.
fn fuzz(context: &Context, args: &FuzzArgs) -> Result<u8> {
    let seed = args.seed.unwrap_or_else(steps::now);
    let mut command = steps::fuzzer(context, args.seconds, seed);
    for target in &args.target {
        command.arg("--target").arg(target);
    }
    let status = command.status().context("cargo cannot be run")?;
    Ok(if status.success() { 0 } else { 1 })
}

/// The documents' commands without the setup before them.
fn docs_alone() -> Step {
    Step::new("docs", |context, task| {
        let found = docs::run(context, task)?;
        let detail = format!("{} blocks and commands, {} wrong", found.checked, found.failures.len());
        if !found.failures.is_empty() {
            anyhow::bail!("{detail}");
        }
        Ok(Report {
            detail,
            ..Report::default()
        })
    })
}

fn with_steps(context: &Context, steps: Vec<Step>, args: StepArgs, verb: &'static str) -> Result<u8> {
    if args.list {
        list(&steps, args.json)?;
        return Ok(0);
    }
    let tests = ["check", "test", "long", "vmfunc"].contains(&verb);
    let options = Options {
        only: args.only,
        json: args.json,
        keep_going: tests,
        counts: tests,
        verb,
        whole: false,
    };
    run_steps(context, steps, &options)
}

#[expect(clippy::print_stdout, reason = "a list for the person who asked for it")]
fn list(steps: &[Step], json: bool) -> Result<()> {
    if json {
        let rows: Vec<_> = steps
            .iter()
            .map(|step| serde_json::json!({"step": step.name, "after": step.after}))
            .collect();
        println!("{}", serde_json::to_string(&rows)?);
        return Ok(());
    }
    for (index, step) in steps.iter().enumerate() {
        println!("{:>3} {:<16} {}", index + 1, step.name, step.after.join(", "));
    }
    Ok(())
}
