//! `cargo xtask torch`, and the step `torch` of `cargo xtask long`: PyTorch's CUDA wheel, unmodified, on our libraries of CUDA: what it
//! asks of them that is not served, and what training and inference with four small models call, and take, forwarded to a server with the
//! back end `null` and without one.
//!
//! Knows the wheel's recipe and the script that runs models (accel/clients/torch); docs/accel-cuda.md is for its users.

mod figures;
mod imports;

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;

use crate::context::Context;
use crate::recipe::Recipe;
use crate::runner::{Counts, Options, Report, Step, Task, run_steps};

/// Models of the script.
const MODELS: [&str; 4] = ["lenet", "alexnet", "resnet18", "gpt"];

/// What is unpacked.
pub(crate) const RECIPE: Recipe = Recipe {
    name: "torch-client",
    dir: "accel/clients/torch/wheel",
};

/// What of it is run.
#[derive(Debug, Clone, Args)]
pub(crate) struct TorchArgs {
    /// Only this model; may be repeated
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    only: Vec<String>,
    /// How often each side is measured, in turn
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,
    /// Steps of each model in a round
    #[arg(long, value_name = "N", default_value_t = 50)]
    steps: usize,
    /// Write the table of what the wheel asks for and is not served, in place of comparing with it
    #[arg(long)]
    write_imports: bool,
}

impl Default for TorchArgs {
    fn default() -> Self {
        Self {
            only: Vec::new(),
            rounds: 3,
            steps: 50,
            write_imports: false,
        }
    }
}

/// The command.
pub(crate) fn command(context: &Context, args: TorchArgs) -> Result<u8> {
    if let Some(other) = args.only.iter().find(|name| !MODELS.contains(&name.as_str())) {
        bail!("there is no model {other:?}; there are {}", MODELS.join(", "));
    }
    let options = Options {
        only: Vec::new(),
        json: false,
        keep_going: false,
        counts: false,
        verb: "torch",
        whole: true,
    };
    run_steps(context, crate::steps::torch(step(args)), &options)
}

/// What the command does after the recipe.
pub(crate) fn step(args: TorchArgs) -> Step {
    Step::new("torch", move |context, task| run(context, task, &args))
        .hint("the step's log has the words of each program; docs/accel-cuda.md says what is compared")
}

fn run(context: &Context, task: &mut Task, args: &TorchArgs) -> Result<Report> {
    let wheel: PathBuf = RECIPE.path(context)?.join("site");
    let not_served = imports::check(context, &wheel, args.write_imports)?;
    let libraries = crate::steps::cuda_client(context, task)?;
    let server = figures::server(context, task)?;
    let models: Vec<_> = MODELS
        .into_iter()
        .filter(|name| args.only.is_empty() || args.only.iter().any(|only| only == name))
        .collect();
    let places = figures::Places {
        wheel,
        libraries,
        server,
        scratch: context.target().join("torch"),
        script: context.root.join("accel/clients/torch/models.py"),
    };
    let rows = figures::measure(task, &places, &models, args.steps, args.rounds)?;
    let table = figures::table(&rows);
    table.iter().try_for_each(|line| task.say(line))?;
    Ok(Report {
        detail: format!("{} models' steps, {not_served} imports not served", rows.len()),
        counts: Counts {
            passed: rows.len().try_into()?,
            ..Counts::default()
        },
        show: table,
        ..Report::default()
    })
}
