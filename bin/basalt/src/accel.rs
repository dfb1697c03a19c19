//! `basalt accel`: which sandboxes have an accelerator, who serves it, and what that one tells.

use std::time::Duration;

use anyhow::Result;
use base::ByteSize;
use node_api::message::Item;
use node_api::{AcceleratorInfo, AcceleratorPriority, AcceleratorTime, Request};

use crate::cli::AccelVerb;
use crate::daemon;
use crate::output::{Output, table};

const COLUMNS: [&str; 13] = [
    "SANDBOX", "STATE", "API", "SHARE", "MEMORY", "USED", "WINDOW", "CLIENTS", "LAUNCHES", "TIME", "HELD UP", "ERRORS",
    "SERVER",
];

/// `basalt accel ...`.
pub(crate) fn accel(verb: &AccelVerb, output: &Output) -> Result<u8> {
    match verb {
        AccelVerb::Ls => list(output),
    }
}

fn list(output: &Output) -> Result<u8> {
    let mut all = Vec::new();
    daemon::connect()?.ask_each(Request::ListAccelerators, &mut |item| {
        if let Item::Accelerator(info) = item {
            all.push(*info);
        }
    })?;
    output.result(&all, || shown(&all))?;
    Ok(0)
}

/// A table, and below it why something is missing there.
fn shown(all: &[AcceleratorInfo]) -> String {
    let mut rows = vec![COLUMNS.map(str::to_owned).to_vec()];
    rows.extend(all.iter().map(row));
    let mut text = table(&rows);
    for info in all {
        if let Some(why) = &info.why {
            text.push_str(&format!("{}: {why}\n", info.sandbox));
        }
    }
    text
}

fn row(info: &AcceleratorInfo) -> Vec<String> {
    let accelerator = &info.accelerator;
    let stats = info.stats.as_ref();
    let time = stats.and_then(|stats| stats.time);
    let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let nanoseconds = |value: fn(AcceleratorTime) -> u64| or_none(time.map(|time| seconds(value(time))));
    let share = info.part.map(|part| match part.priority {
        AcceleratorPriority::High => part.share.to_string(),
        AcceleratorPriority::Low => format!("{} (low)", part.share),
    });
    let state = match stats.map_or(0, |stats| stats.restarts) {
        0 => info.state.to_string(),
        1 => format!("{} (1 restart)", info.state),
        restarts => format!("{} ({restarts} restarts)", info.state),
    };
    vec![
        info.sandbox.clone(),
        state,
        accelerator.api.to_string(),
        or_none(share),
        accelerator.memory.to_string(),
        or_none(stats.map(|stats| ByteSize(stats.memory.used).to_string())),
        accelerator.window.to_string(),
        or_none(stats.map(|stats| stats.clients.to_string())),
        or_none(time.map(|time| time.launches.to_string())),
        nanoseconds(|time| time.used_ns),
        nanoseconds(|time| time.held_up_ns),
        or_none(stats.map(|stats| {
            let all = stats.errors.values();
            all.fold(0_u64, |sum, count| sum.saturating_add(*count)).to_string()
        })),
        or_none(info.server.map(|process| process.pid.to_string())),
    ]
}

fn seconds(nanoseconds: u64) -> String {
    format!("{:.1} s", Duration::from_nanos(nanoseconds).as_secs_f64())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use node_api::sandbox::Process;
    use node_api::{AcceleratorMemory, AcceleratorPart, AcceleratorStats, State};

    use super::*;

    fn info(accelerator: &str) -> AcceleratorInfo {
        AcceleratorInfo {
            sandbox: "web".to_owned(),
            id: "aaaaaaaaaaaa".to_owned(),
            state: State::Running,
            accelerator: accelerator.parse().unwrap(),
            server: Some(Process { pid: 77, start: 1 }),
            part: None,
            stats: None,
            why: None,
        }
    }

    #[test]
    fn a_row_has_what_the_server_tells() {
        let mut one = info("opencl:share=300,priority=low");
        one.part = Some(AcceleratorPart {
            share: 300,
            priority: AcceleratorPriority::Low,
            is_connected: true,
            used_ns: 1,
        });
        one.stats = Some(AcceleratorStats {
            restarts: 2,
            clients: 3,
            memory: AcceleratorMemory {
                used: 64 << 20,
                ..AcceleratorMemory::default()
            },
            time: Some(AcceleratorTime {
                used_ns: 1_500_000_000,
                held_up_ns: 40_000_000,
                launches: 9,
                ..AcceleratorTime::default()
            }),
            errors: BTreeMap::from([(-5, 2), (-4, 1)]),
            ..AcceleratorStats::default()
        });
        let expected = [
            "web",
            "running (2 restarts)",
            "opencl",
            "300 (low)",
            "1 GiB",
            "64 MiB",
            "256 MiB",
            "3",
            "9",
            "1.5 s",
            "0.0 s",
            "3",
            "77",
        ];
        assert_eq!(row(&one), expected);
        assert_eq!(expected.len(), COLUMNS.len());
    }

    #[test]
    fn what_is_not_known_is_a_line_and_its_reason_stands_below() {
        let mut one = info("null");
        one.why = Some("its server tells nothing: timed out".to_owned());
        let text = shown(&[one]);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert!(
            lines[1].split_whitespace().filter(|word| *word == "-").count() == 7,
            "{text}"
        );
        assert_eq!(lines[2], "web: its server tells nothing: timed out");
    }
}
