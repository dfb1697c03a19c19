//! What a step of each model calls and takes, without a server, with one, and with one that is waited for by each call, in turn.
//!
//! Knows the script's lines; what they mean for the product is docs/accel-cuda.md's.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{fs, thread};

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;

use crate::context::Context;
use crate::runner::Task;

const LIMIT: Duration = Duration::from_secs(10 * 60);
const BUILD: Duration = Duration::from_secs(60 * 60);
const STARTING: Duration = Duration::from_secs(10);

/// What is run, and where.
pub(super) struct Places {
    pub(super) wheel: PathBuf,
    pub(super) libraries: PathBuf,
    pub(super) server: PathBuf,
    pub(super) scratch: PathBuf,
    pub(super) script: PathBuf,
}

/// A line of the script's.
#[derive(Debug, Clone, Deserialize)]
struct Line {
    model: String,
    what: String,
    calls: f64,
    #[serde(rename = "async")]
    sent: f64,
    sync: f64,
    not_served: f64,
    least_ms: f64,
    median_ms: f64,
}

/// Where calls end, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    /// In the process.
    InProcess,
    /// At a server.
    Forwarded,
    /// The same, each of them by a request and an answer, as GVirtuS has it.
    Synchronous,
}

impl Side {
    const ALL: [Self; 3] = [Self::InProcess, Self::Forwarded, Self::Synchronous];

    /// Steps of it: those that are waited for call by call take a hundred times as long.
    fn steps(self, steps: usize) -> usize {
        match self {
            Self::InProcess | Self::Forwarded => steps,
            Self::Synchronous => steps.div_ceil(10),
        }
    }

    fn environment(self, command: &mut Command, socket: &Path) {
        command
            .env("BASALT_ACCEL_SOCKET", socket)
            .env_remove("BASALT_ACCEL_TRANSPORT")
            .env_remove("BASALT_ACCEL_CUDA");
        match self {
            Self::InProcess => _ = command.env("BASALT_ACCEL_CUDA", "in-process"),
            Self::Forwarded => {}
            Self::Synchronous => {
                command
                    .env("BASALT_ACCEL_CUDA", "synchronous")
                    .env("BASALT_ACCEL_TRANSPORT", "synchronous");
            }
        }
    }
}

/// A model's step: what it calls, and for each side the least and the median of each round.
#[derive(Debug, Clone)]
pub(super) struct Row {
    name: String,
    counts: [f64; 3],
    sides: [Vec<[f64; 2]>; 3],
}

/// A server of ours, which ends with this.
struct Server(Child);

impl Server {
    fn start(places: &Places, socket: &Path) -> Result<Self> {
        let mut command = Command::new(&places.server);
        command
            .arg("--socket")
            .arg(socket)
            .args([
                "--backend",
                "null",
                "--transports",
                "spin,same-cpu,bell,stream,synchronous",
            ])
            .stdin(Stdio::null());
        let mut server = Self(
            command
                .spawn()
                .with_context(|| format!("cannot run {}", places.server.display()))?,
        );
        let begin = Instant::now();
        while !socket.exists() {
            if let Some(status) = server.0.try_wait()? {
                bail!("the server has ended with {status} before it listened");
            }
            if begin.elapsed() > STARTING {
                bail!("the server does not listen after {} s", STARTING.as_secs());
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // One that has ended already cannot be ended, which is as well.
        _ = self.0.kill();
        _ = self.0.wait();
    }
}

/// The program.
pub(super) fn server(context: &Context, task: &mut Task) -> Result<PathBuf> {
    let mut command = crate::steps::cargo(
        context,
        &[
            "build",
            "--profile",
            "library",
            "-p",
            "basalt-accel-server-bin",
            "--bins",
        ],
    );
    if context.ci {
        command.arg("--locked");
    }
    task.run_within(&mut command, BUILD)?;
    Ok(context.target().join("library/basalt-accel-server"))
}

/// Each side in turn, so many rounds.
pub(super) fn measure(
    task: &mut Task,
    places: &Places,
    models: &[&str],
    steps: usize,
    rounds: usize,
) -> Result<Vec<Row>> {
    fs::create_dir_all(&places.scratch)?;
    let socket = places.scratch.join("accel.sock");
    let _server = Server::start(places, &socket)?;
    let mut rows: BTreeMap<usize, Row> = BTreeMap::new();
    for _ in 0..rounds.max(1) {
        for side in Side::ALL {
            let lines = run(task, places, models, steps, (side, &socket))?;
            for (index, line) in lines.into_iter().enumerate() {
                add(&mut rows, index, &line, side)?;
            }
        }
    }
    Ok(rows.into_values().collect())
}

fn run(
    task: &mut Task,
    places: &Places,
    models: &[&str],
    steps: usize,
    (side, socket): (Side, &Path),
) -> Result<Vec<Line>> {
    let mut command = Command::new("python3");
    command
        .arg("-B")
        .arg(&places.script)
        .arg(side.steps(steps).to_string())
        .args(models);
    command
        .env("PYTHONPATH", &places.wheel)
        .env("LD_LIBRARY_PATH", &places.libraries);
    // The path of cuDNN's calls by name; its graph needs an engine that only a device has.
    command
        .env("TORCH_CUDNN_V8_API_DISABLED", "1")
        .env("BASALT_ACCEL_DEBUG", "1");
    side.environment(&mut command, socket);
    let finished = task.run_within(&mut command, LIMIT)?;
    let lines: Vec<Line> = finished
        .out
        .iter()
        .filter(|line| line.starts_with('{'))
        .map(|line| serde_json::from_str(line).with_context(|| format!("{line:?} is no line of the script's")))
        .collect::<Result<_>>()?;
    if lines.len() != 2 * models.len() {
        bail!(
            "the script has told of {} steps, and not of {}",
            lines.len(),
            2 * models.len()
        );
    }
    Ok(lines)
}

/// A side's line. All sides call the same, and nothing that is not served.
fn add(rows: &mut BTreeMap<usize, Row>, index: usize, line: &Line, side: Side) -> Result<()> {
    let name = format!("{}, {}", line.model, line.what);
    let counts = [line.calls, line.sent, line.sync];
    if line.not_served > 0.0 {
        bail!(
            "{name}: {} calls a step are not served; the step's log names them",
            line.not_served
        );
    }
    let row = rows.entry(index).or_insert_with(|| Row {
        name: name.clone(),
        counts,
        sides: Default::default(),
    });
    // What crosses is decided by the program alone.
    if row.name != name
        || row
            .counts
            .iter()
            .zip(counts)
            .any(|(before, now)| (before - now).abs() > 0.5)
    {
        bail!(
            "{name} makes {counts:?} calls, records without and with an answer a step, and made {:?} before",
            row.counts
        );
    }
    row.sides[side as usize].push([line.least_ms, line.median_ms]);
    Ok(())
}

/// The least of all rounds' least, and of their medians.
fn best(rounds: &[[f64; 2]]) -> [f64; 2] {
    rounds.iter().fold([f64::INFINITY; 2], |best, round| {
        [best[0].min(round[0]), best[1].min(round[1])]
    })
}

/// For people. The last two columns are how many times as long a step takes that is forwarded, and one whose calls are waited for, as
/// one without a server and as one that is forwarded.
pub(super) fn table(rows: &[Row]) -> Vec<String> {
    let mut lines = vec![
        "model                calls  local  async  sync   in-process ms   forwarded ms     synchronous ms  forwarded  synchr."
            .to_owned(),
        "                                                 least   median  least   median   least   median  / in-pr.   / forw."
            .to_owned(),
    ];
    for row in rows {
        let [calls, sent, asked] = row.counts;
        let [[one, one_median], [two, two_median], [three, three_median]] =
            row.sides.each_ref().map(|rounds| best(rounds));
        lines.push(format!(
            "{:<18} {calls:>7.0} {:>6.0} {sent:>6.0} {asked:>5.0}   {one:>5.2}   {one_median:>6.2}   {two:>5.2}   {two_median:>6.2}  {three:>6.2}   {three_median:>6.2}  {:>8.2}  {:>8.1}",
            row.name,
            calls - sent - asked,
            two / one,
            three / two
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(calls: f64, not_served: f64, least_ms: f64) -> Line {
        let (model, what) = ("lenet".to_owned(), "train".to_owned());
        Line {
            model,
            what,
            calls,
            sent: 40.0,
            sync: 4.0,
            not_served,
            least_ms,
            median_ms: 2.0 * least_ms,
        }
    }

    #[test]
    fn rounds_are_put_together_by_their_least() {
        let mut rows = BTreeMap::new();
        let [first, second, third] = Side::ALL;
        for (least, side) in [(2.0, first), (3.0, second), (1.0, first), (2.0, second), (30.0, third)] {
            add(&mut rows, 0, &line(900.0, 0.0, least), side).unwrap();
        }
        let table = table(&rows.clone().into_values().collect::<Vec<_>>());
        assert!(
            table[2].starts_with(
                "lenet, train           900    856     40     4    1.00     2.00    2.00     4.00   30.00    60.00      2.00      15.0"
            ),
            "{table:?}"
        );
        let error = add(&mut rows, 0, &line(800.0, 0.0, 1.0), first)
            .unwrap_err()
            .to_string();
        assert!(error.contains("800") && error.contains("900"), "{error}");
        let error = add(&mut rows, 0, &line(900.0, 2.0, 1.0), first)
            .unwrap_err()
            .to_string();
        assert!(error.contains("2 calls a step are not served"), "{error}");
    }
}
