//! `cargo xtask accel-clients`, and the step `accel-clients`: unmodified OpenCL programs, each natively on a driver and forwarded to a
//! server that has the same driver, and what they tell of it compared value by value.
//!
//! Puts together what the modules know: `known` the clients, `side` where they run, `results` their words, `expected` what may
//! differ. docs/accel-clients.md is for its users.

mod expected;
mod figures;
mod known;
mod results;
mod side;

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use clap::{Args, ValueEnum};
use serde::Serialize;
use serde_json::Value;

use self::expected::{Difference, Expected};
use self::known::{CLIENTS, Client, Extent};
use self::side::{Places, Programs, Side};
use crate::context::Context;
use crate::recipe::Recipe;
use crate::runner::{Counts, Options, Report, Step, Task, run_steps};

/// Drivers that a server may have.
const BACKENDS: [&str; 2] = ["pocl", "oclgrind"];
/// Plugin and what is expected, from the checkout's root.
const DIRECTORY: &str = "accel/clients";
/// Compiling the server and the library, on a machine that does other work.
const BUILD: Duration = Duration::from_secs(60 * 60);

/// How our programs are compiled, and where cargo puts them.
#[derive(Debug, Clone, Copy)]
struct Profile {
    name: &'static str,
    directory: &'static str,
}

const LIBRARY: Profile = Profile {
    name: "library",
    directory: "library",
};
/// As tests are, which are there already when the step comes.
const TESTS: Profile = Profile {
    name: "dev",
    directory: "debug",
};

/// What was found, in a run's directory.
const RESULT: &str = "result.json";

/// What is unpacked: the clients, and oclgrind.
pub(crate) const RECIPE: Recipe = Recipe {
    name: "unpack-clients",
    dir: "accel/clients/programs",
};

/// What of it is run.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct ClientArgs {
    /// Only this client; may be repeated
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    only: Vec<String>,
    /// Only this driver behind the server; may be repeated
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    backend: Vec<Backend>,
    /// Only what `make test` has of it, with programs that are compiled as tests are
    #[arg(long, conflicts_with_all = ["only", "backend", "figures"])]
    quick: bool,
    /// Measure launches and transfers instead, on both sides in turn
    #[arg(long)]
    figures: bool,
    /// How often each figure is measured on each side
    #[arg(long, value_name = "N", default_value_t = 9)]
    rounds: usize,
    /// Print the clients, and run nothing
    #[arg(long)]
    list: bool,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Backend {
    Pocl,
    Oclgrind,
}

impl Backend {
    fn name(self) -> &'static str {
        match self {
            Self::Pocl => BACKENDS[0],
            Self::Oclgrind => BACKENDS[1],
        }
    }
}

/// A client on one back end, both sides.
#[derive(Debug, Serialize)]
struct Row {
    client: &'static str,
    backend: &'static str,
    native: String,
    forwarded: String,
    seconds: [u64; 2],
    differences: Vec<Difference>,
}

impl Row {
    /// Differences that nobody expects.
    fn unexpected(&self) -> impl Iterator<Item = &Difference> {
        self.differences.iter().filter(|difference| difference.reason.is_none())
    }
}

/// The command.
#[expect(
    clippy::print_stdout,
    reason = "a list, or results for a machine, for whoever asked for it"
)]
pub(crate) fn command(context: &Context, args: ClientArgs) -> Result<u8> {
    if args.list {
        CLIENTS
            .iter()
            .for_each(|client| println!("{:<10} {}", client.name, client.about));
        return Ok(0);
    }
    let name = match (args.quick, args.figures) {
        (true, _) => "quick",
        (_, true) => "figures",
        _ => "all",
    };
    let json = args.json;
    let options = Options {
        only: Vec::new(),
        json,
        keep_going: false,
        counts: false,
        verb: "accel-clients",
        whole: true,
    };
    let file = scratch(context, name).join(RESULT);
    // Of an earlier run, if this one ends before it has found anything.
    if file.exists() {
        fs::remove_file(&file)?;
    }
    let code = run_steps(context, crate::steps::accel_clients(step(args)?), &options)?;
    if json && file.exists() {
        // The runner prints for machines how steps ended; this is what they found.
        println!("{}", serde_json::from_str::<Value>(&fs::read_to_string(file)?)?);
    }
    Ok(code)
}

/// What the command does after the recipe.
fn step(args: ClientArgs) -> Result<Step> {
    for name in &args.only {
        if !CLIENTS.iter().any(|client| client.name == name) {
            let names: Vec<_> = CLIENTS.iter().map(|client| client.name).collect();
            bail!("there is no client {name:?}; there are {}", names.join(", "));
        }
    }
    if args.quick {
        return Ok(quick());
    }
    Ok(Step::new("accel-clients", move |context, task| {
        if args.figures {
            let programs = build(context, task, LIBRARY, true)?;
            let places = Places::new(context, RECIPE.path(context)?, "figures")?;
            return figures::measure(task, &places, &programs, args.rounds);
        }
        let programs = build(context, task, LIBRARY, false)?;
        let chosen = |client: &&Client| args.only.is_empty() || args.only.iter().any(|name| name == client.name);
        let clients: Vec<_> = CLIENTS.iter().filter(chosen).collect();
        let backends: Vec<_> = BACKENDS.into_iter().filter(|name| is_chosen(&args.backend, name)).collect();
        compare(context, task, &programs, &clients, &backends, Extent::All)
    })
    .hint("target/accel-clients has each client's files and its server's log; docs/accel-clients.md says what is compared"))
}

/// A run's directory.
fn scratch(context: &Context, name: &str) -> PathBuf {
    context.target().join("accel-clients").join(name)
}

fn is_chosen(chosen: &[Backend], name: &str) -> bool {
    chosen.is_empty() || chosen.iter().any(|backend| backend.name() == name)
}

/// A part that takes little time, with what the tests' build has made.
pub(crate) fn quick() -> Step {
    Step::new("accel-clients", |context, task| {
        let programs = build(context, task, TESTS, false)?;
        let clients: Vec<_> = CLIENTS.iter().filter(|client| client.quick).collect();
        compare(context, task, &programs, &clients, &BACKENDS, Extent::Quick)
    })
    .hint("`cargo xtask accel-clients --only NAME` runs all of one client; target/accel-clients has its files")
}

/// The server and the library, and the examples if they are asked for, as `profile` says.
fn build(context: &Context, task: &mut Task, profile: Profile, with_examples: bool) -> Result<Programs> {
    let mut what = vec![vec!["-p", "basalt-accel-server-bin", "--bins"]];
    let is_installed = profile.name == LIBRARY.name;
    if !is_installed {
        what.push(vec!["-p", "basalt-accel-client", "--lib"]);
    }
    if with_examples {
        what.push(vec![
            "-p",
            "basalt-accel-client",
            "--example",
            "transfer",
            "--example",
            "launch",
        ]);
    }
    for what in what {
        let mut command = crate::steps::cargo(context, &["build", "--profile", profile.name]);
        if context.ci {
            command.arg("--locked");
        }
        task.run_within(command.args(what), BUILD)?;
    }
    // What is measured and compared is what is installed. The examples have the library compiled, too, so this comes last.
    if is_installed {
        crate::steps::for_glibc(context, task)?;
    }
    let built = context.target().join(profile.directory);
    Ok(Programs {
        server: built.join("basalt-accel-server"),
        library: built.join("libbasalt_opencl.so"),
        transfer: built.join("examples/transfer"),
        launch: built.join("examples/launch"),
    })
}

fn compare(
    context: &Context,
    task: &mut Task,
    programs: &Programs,
    clients: &[&Client],
    backends: &[&'static str],
    extent: Extent,
) -> Result<Report> {
    let mut expected = Expected::read(&context.root.join(DIRECTORY).join("expected.toml"))?;
    let name = if extent == Extent::Quick { "quick" } else { "all" };
    let places = Places::new(context, RECIPE.path(context)?, name)?;
    let mut rows = Vec::new();
    for backend in backends {
        for client in clients {
            if let Some((_, why)) = client.cannot.filter(|(name, _)| name == backend) {
                task.say(&format!("{} is not run on {backend}: {why}", client.name))?;
                continue;
            }
            rows.push(both(task, &places, programs, (client, backend), &mut expected, extent)?);
        }
    }
    fs::write(places.scratch.join(RESULT), serde_json::to_string_pretty(&rows)?)?;
    let runs: Vec<_> = rows.iter().map(|row| (row.client, row.backend)).collect();
    // Of a part of a client not all that is expected can be met.
    let unmet = if extent == Extent::All {
        expected.unmet(&runs)
    } else {
        Vec::new()
    };
    let table = table(&rows);
    table.iter().try_for_each(|line| task.say(line))?;
    let wrong: usize = rows.iter().map(|row| row.unexpected().count()).sum();
    if wrong > 0 {
        let first = rows
            .iter()
            .find_map(|row| row.unexpected().next().map(|it| shown(row, it)));
        bail!(
            "{wrong} differences that nobody expects, the first: {}",
            first.unwrap_or_default()
        );
    }
    if !unmet.is_empty() {
        bail!(
            "expected.toml has what does not differ any more; take it out: {}",
            unmet.join("; ")
        );
    }
    Ok(Report {
        detail: format!("{} clients and back ends", rows.len()),
        counts: Counts {
            passed: rows.len().try_into()?,
            ..Counts::default()
        },
        show: table,
        ..Report::default()
    })
}

/// One client on one back end.
fn both(
    task: &mut Task,
    places: &Places,
    programs: &Programs,
    of: (&Client, &'static str),
    expected: &mut Expected,
    extent: Extent,
) -> Result<Row> {
    let (client, backend) = of;
    let mut sides = Vec::new();
    let mut seconds = [0; 2];
    for (index, programs) in [None, Some(programs)].into_iter().enumerate() {
        let begun = Instant::now();
        let mut side = Side::new(places, programs, (client.name, backend), task)?;
        let mut results = (client.run)(&mut side, extent)
            .with_context(|| format!("{} on {backend} could not be run", client.name))?;
        if let Some(how) = side.server_ended()? {
            results.insert("the server".into(), how);
        }
        seconds[index] = begun.elapsed().as_secs();
        sides.push(results);
    }
    // How it ended is always there.
    if sides[0].len() < 2 {
        bail!(
            "{} has told nothing on {backend} natively; the step's log has its words",
            client.name
        );
    }
    Ok(Row {
        client: client.name,
        backend,
        native: results::sum(&sides[0]),
        forwarded: results::sum(&sides[1]),
        seconds,
        differences: expected.compare(client.name, backend, &sides[0], &sides[1]),
    })
}

/// A line for each client and back end, and one for each difference.
fn table(rows: &[Row]) -> Vec<String> {
    let mut lines = vec![format!(
        "{:<10} {:<9} {:<40} {:<40} {}",
        "client", "back end", "native", "forwarded", "differs"
    )];
    for row in rows {
        let wrong = row.unexpected().count();
        let known = row.differences.len() - wrong;
        let differs = match (wrong, known) {
            (0, 0) => "equal".to_owned(),
            (0, known) => format!("{known}, as expected"),
            (wrong, known) => format!("{wrong}, and {known} as expected"),
        };
        let [native, forwarded] = row.seconds;
        let (left, right) = (
            format!("{} ({native} s)", row.native),
            format!("{} ({forwarded} s)", row.forwarded),
        );
        lines.push(format!(
            "{:<10} {:<9} {left:<40} {right:<40} {differs}",
            row.client, row.backend
        ));
    }
    for row in rows {
        lines.extend(row.unexpected().map(|difference| shown(row, difference)));
    }
    lines
}

fn shown(row: &Row, difference: &Difference) -> String {
    let value = |value: &Option<String>| value.clone().unwrap_or_else(|| "nothing".into());
    let (native, forwarded) = (value(&difference.native), value(&difference.forwarded));
    format!(
        "{} on {}: {}: {native:?} natively, {forwarded:?} forwarded",
        row.client, row.backend, difference.item
    )
}
