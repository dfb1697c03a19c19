//! `cargo xtask accel-clients --figures`: how long launches and transfers take natively and forwarded, in turn in one run.
//!
//! What is judged is forwarded beside native, of the best and of the median: numbers of one side alone say more of the machine and of
//! what it does besides. PoCL is the driver: oclgrind interprets. Knows how clpeak, `transfer` and `launch` (examples of the client's) print.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context as _, Result, bail};
use serde::Serialize;

use super::results;
use super::side::{Places, Programs, Side};
use crate::runner::{Report, Task};

/// What is measured, by the start of its name and what its program is run with.
struct Figure {
    name: &'static str,
    /// What is asked for, for the table; nothing of what only tells where the time goes.
    wanted: &'static str,
    /// Less of it is better.
    is_time: bool,
}

const FIGURES: &[Figure] = &[
    Figure {
        name: "launch, default device, us",
        wanted: "<= 1.05 x native",
        is_time: true,
    },
    Figure {
        name: "launch until handed on, us",
        wanted: "",
        is_time: true,
    },
    Figure {
        name: "launch handed on until begun, us",
        wanted: "",
        is_time: true,
    },
    Figure {
        name: "launch that is waited for, us",
        wanted: "",
        is_time: true,
    },
    Figure {
        name: "launch, POCL_DEVICES=basic, us",
        wanted: "<= 1.0 us",
        is_time: true,
    },
    Figure {
        name: "write ordinary, GB/s",
        wanted: ">= 0.5 x native",
        is_time: false,
    },
    Figure {
        name: "read ordinary, GB/s",
        wanted: ">= 0.5 x native",
        is_time: false,
    },
    Figure {
        name: "write mapped, GB/s",
        wanted: ">= 0.97 x native",
        is_time: false,
    },
    Figure {
        name: "read mapped, GB/s",
        wanted: ">= 0.97 x native",
        is_time: false,
    },
];

/// Bytes of a transfer of the example's.
const BYTES: f64 = (64 << 20) as f64;
/// Transfers of each kind in a round.
const TRANSFERS: &str = "8";
/// Launches whose stamps are read.
const LAUNCHES: &str = "10000";
/// For a program of a few seconds.
const SECONDS: u64 = 300;

/// Values by figure, natively and forwarded.
type Measured = BTreeMap<String, [Vec<f64>; 2]>;

/// A line of the table.
#[derive(Debug, Serialize)]
struct Row {
    name: String,
    native: [f64; 2],
    forwarded: [f64; 2],
    /// Forwarded by native, of the best and of the medians.
    ratio: [f64; 2],
    wanted: &'static str,
}

/// Measures so many rounds, each on both sides.
pub(super) fn measure(task: &mut Task, places: &Places, programs: &Programs, rounds: usize) -> Result<Report> {
    let (transfer, launch) = (&programs.transfer, &programs.launch);
    let mut measured = Measured::new();
    for round in 1..=rounds {
        for (side, programs) in [None, Some(programs)].into_iter().enumerate() {
            for devices in [None, Some("basic")] {
                let mut places = places.clone();
                places.devices = devices;
                let mut on = Side::new(&places, programs, ("figures", "pocl"), task)?;
                launches(&mut on, devices, side, &mut measured)?;
                if devices.is_none() {
                    transfers(&mut on, &transfer.to_string_lossy(), side, &mut measured)?;
                    stamps(&mut on, &launch.to_string_lossy(), side, &mut measured)?;
                }
            }
        }
        task.say(&format!("round {round} of {rounds}"))?;
    }
    let rows = FIGURES
        .iter()
        .map(|figure| row(figure, &measured))
        .collect::<Result<Vec<_>>>()?;
    fs::write(places.scratch.join(super::RESULT), serde_json::to_string_pretty(&rows)?)?;
    Ok(Report {
        detail: format!("{rounds} rounds on each side"),
        show: table(&rows),
        ..Report::default()
    })
}

/// clpeak's mean of many launches of an empty kernel.
fn launches(on: &mut Side, devices: Option<&str>, side: usize, measured: &mut Measured) -> Result<()> {
    let mut command = on.command("clpeak", SECONDS);
    let ended = on.run(command.arg("--kernel-latency"), SECONDS)?;
    let line = ended
        .out
        .iter()
        .find_map(|line| line.trim().strip_prefix("Kernel launch latency"));
    let value = line.and_then(|line| results::number(line.trim_start_matches([' ', ':'])));
    let value = value.with_context(|| format!("clpeak told no latency, and ended with {}", ended.how))?;
    let name = devices.map_or("default device".into(), |devices| format!("POCL_DEVICES={devices}"));
    push(measured, &format!("launch, {name}, us"), side, value);
    Ok(())
}

fn transfers(on: &mut Side, program: &str, side: usize, measured: &mut Measured) -> Result<()> {
    let mut command = on.command(program, SECONDS);
    let ended = on.run(command.arg(TRANSFERS), SECONDS)?;
    let told: Vec<_> = ended.out.iter().filter_map(|line| line.split_once(" : ")).collect();
    if told.is_empty() {
        bail!("the example `transfer` told nothing, and ended with {}", ended.how);
    }
    for (name, seconds) in told {
        let seconds = results::number(seconds).with_context(|| format!("{seconds:?} are no seconds"))?;
        push(measured, &format!("{name}, GB/s"), side, BYTES / seconds / 1e9);
    }
    Ok(())
}

/// Where the time of a launch goes, by the medians of the driver's own stamps.
fn stamps(on: &mut Side, program: &str, side: usize, measured: &mut Measured) -> Result<()> {
    let mut command = on.command(program, SECONDS);
    let ended = on.run(command.arg(LAUNCHES), SECONDS)?;
    for (told, name) in [
        ("handed on", "launch until handed on, us"),
        ("begun", "launch handed on until begun, us"),
        ("waited for", "launch that is waited for, us"),
    ] {
        let told = ended
            .out
            .iter()
            .find_map(|line| line.strip_prefix(told)?.strip_prefix(" : "));
        let value = told.and_then(results::number);
        let value =
            value.with_context(|| format!("the example `launch` told no {name}, and ended with {}", ended.how))?;
        push(measured, name, side, value / 1000.0);
    }
    Ok(())
}

fn push(measured: &mut Measured, name: &str, side: usize, value: f64) {
    measured.entry(name.to_owned()).or_default()[side].push(value);
}

fn row(figure: &Figure, measured: &Measured) -> Result<Row> {
    let values = measured
        .get(figure.name)
        .with_context(|| format!("{} was not measured", figure.name))?;
    let [native, forwarded] = values.each_ref().map(|values| best_and_median(values, figure.is_time));
    let (native, forwarded) = native
        .zip(forwarded)
        .with_context(|| format!("{} is of one side alone", figure.name))?;
    Ok(Row {
        name: figure.name.to_owned(),
        native,
        forwarded,
        ratio: [forwarded[0] / native[0], forwarded[1] / native[1]],
        wanted: figure.wanted,
    })
}

/// `None` of no values.
fn best_and_median(values: &[f64], is_time: bool) -> Option<[f64; 2]> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let best = if is_time { sorted.first()? } else { sorted.last()? };
    Some([*best, sorted[sorted.len() / 2]])
}

fn table(rows: &[Row]) -> Vec<String> {
    let mut lines = vec![format!(
        "{:<32} {:>16} {:>16} {:>14}  {}",
        "best, median", "native", "forwarded", "ratio", "wanted"
    )];
    let pair = |values: [f64; 2]| format!("{:.2}, {:.2}", values[0], values[1]);
    lines.extend(rows.iter().map(|row| {
        let (native, forwarded, ratio) = (pair(row.native), pair(row.forwarded), pair(row.ratio));
        format!(
            "{:<32} {native:>16} {forwarded:>16} {ratio:>14}  {}",
            row.name, row.wanted
        )
    }));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_of_times_is_the_least_and_of_rates_the_most() {
        let values = [3.0, 1.0, 2.0];
        assert_eq!(best_and_median(&values, true), Some([1.0, 2.0]));
        assert_eq!(best_and_median(&values, false), Some([3.0, 2.0]));
        assert_eq!(best_and_median(&[], true), None);
    }

    #[test]
    fn a_ratio_is_forwarded_by_native() {
        let figure = &FIGURES[0];
        let mut measured = Measured::new();
        push(&mut measured, figure.name, 0, 2.0);
        assert!(row(figure, &measured).is_err());
        push(&mut measured, figure.name, 1, 3.0);
        assert_eq!(row(figure, &measured).unwrap().ratio, [1.5, 1.5]);
    }
}
