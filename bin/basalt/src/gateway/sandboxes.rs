//! The verbs for a gateway's sandboxes that are there: each asks it and shows what it says, as far as its API tells it.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use base::ByteSize;
use gateway_client::{ListedSandbox, LogEntry, Metric, NetworkRules, State, VolumeMount, nanoseconds};
use serde::Serialize;

use super::Remote;
use super::names::{ALL, labels_of, name_of};
use super::run::TIME;
use crate::cli::{InspectArgs, KillArgs, LogsArgs, ManyArgs, PsArgs, RmArgs, StatsArgs, UpdateNetworkArgs};
use crate::output::table;
use crate::sandboxes::ago;

/// Between two looks of `basalt stats`: gateways count every five seconds.
const STATS_PAUSE: Duration = Duration::from_secs(5);

/// Between two looks at a log that grows.
const LOG_PAUSE: Duration = Duration::from_secs(1);

/// A sandbox, with the names that its fields have in `basalt ps --json` elsewhere.
#[derive(Serialize)]
struct Shown {
    id: String,
    name: String,
    state: &'static str,
    created_ns: u64,
    ends_ns: u64,
    config: Config,
}

#[derive(Serialize)]
struct Config {
    image: String,
    resources: Resources,
    labels: BTreeMap<String, String>,
    volumes: Vec<VolumeMount>,
    #[serde(skip_serializing_if = "Option::is_none")]
    egress: Option<NetworkRules>,
}

#[derive(Serialize)]
struct Resources {
    cpus: u64,
    memory: ByteSize,
    disk: Option<ByteSize>,
}

fn state(state: State) -> &'static str {
    match state {
        State::Running => "running",
        State::Paused => "suspended",
    }
}

impl From<ListedSandbox> for Shown {
    fn from(told: ListedSandbox) -> Self {
        Self {
            name: name_of(&told),
            state: state(told.state),
            created_ns: nanoseconds(&told.started_at),
            ends_ns: nanoseconds(&told.end_at),
            config: Config {
                labels: labels_of(&told),
                image: told.alias.unwrap_or(told.template_id),
                resources: Resources {
                    cpus: told.cpu_count,
                    memory: ByteSize::mib(told.memory_mb),
                    disk: told.disk_size_mb.filter(|&size| size > 0).map(ByteSize::mib),
                },
                volumes: told.volume_mounts.unwrap_or_default(),
                egress: told.network,
            },
            id: told.sandbox_id,
        }
    }
}

/// `basalt ps`.
pub(super) fn ps(remote: &Remote<'_>, args: &PsArgs) -> Result<u8> {
    let mut states = Vec::new();
    for asked in &args.state {
        states.push(match asked {
            node_api::State::Running => "running",
            node_api::State::Suspended => "paused",
            other => bail!("no sandbox is {other} over --host: ask for `running` or `suspended`"),
        });
    }
    let states: &[&str] = if states.is_empty() { &ALL } else { &states };
    let found = remote.client.sandboxes(&args.label, states)?;
    let sandboxes: Vec<Shown> = found.into_iter().map(Shown::from).collect();
    remote.output.result(&sandboxes, || {
        if args.quiet {
            return sandboxes.iter().map(|sandbox| format!("{}\n", sandbox.id)).collect();
        }
        let mut rows = vec![["ID", "NAME", "IMAGE", "STATE", "CREATED"].map(str::to_owned).to_vec()];
        rows.extend(sandboxes.iter().map(|sandbox| {
            vec![
                sandbox.id.clone(),
                sandbox.name.clone(),
                sandbox.config.image.clone(),
                sandbox.state.to_owned(),
                format!("{} ago", ago(sandbox.created_ns)),
            ]
        }));
        table(&rows)
    })?;
    Ok(0)
}

/// `basalt inspect`.
pub(super) fn inspect(remote: &Remote<'_>, args: &InspectArgs) -> Result<u8> {
    let mut sandboxes = Vec::new();
    for name in &args.many.sandboxes {
        sandboxes.push(Shown::from(remote.find(name)?.0));
    }
    // What it is, whole, is JSON for people, too.
    let text = serde_json::to_string_pretty(&sandboxes)?;
    remote.output.result(&sandboxes, || format!("{text}\n"))?;
    Ok(0)
}

/// `basalt kill`.
pub(super) fn kill(remote: &Remote<'_>, args: &KillArgs) -> Result<u8> {
    remote.for_each(&args.many.sandboxes, |name| {
        let (sandbox, _) = remote.find(name)?;
        Ok(remote.client.kill(&sandbox.sandbox_id)?)
    })
}

/// `basalt rm`.
pub(super) fn rm(remote: &Remote<'_>, args: &RmArgs) -> Result<u8> {
    remote.for_each(&args.many.sandboxes, |name| {
        let (sandbox, _) = remote.find(name)?;
        if sandbox.state == State::Running && !args.force {
            bail!("sandbox {name} runs: remove it all the same with --force");
        }
        Ok(remote.client.kill(&sandbox.sandbox_id)?)
    })
}

/// `basalt suspend`.
pub(super) fn suspend(remote: &Remote<'_>, args: &ManyArgs) -> Result<u8> {
    remote.for_each(&args.sandboxes, |name| {
        let (sandbox, _) = remote.find(name)?;
        Ok(remote.client.pause(&sandbox.sandbox_id)?)
    })
}

/// `basalt resume`.
pub(super) fn resume(remote: &Remote<'_>, args: &ManyArgs) -> Result<u8> {
    remote.for_each(&args.sandboxes, |name| {
        let (sandbox, _) = remote.find(name)?;
        Ok(remote.client.resume(&sandbox.sandbox_id, TIME.as_secs())?)
    })
}

/// `basalt network update`.
pub(super) fn network(remote: &Remote<'_>, args: &UpdateNetworkArgs) -> Result<u8> {
    let (sandbox, _) = remote.find(&args.sandbox)?;
    remote
        .client
        .set_network(&sandbox.sandbox_id, &rules(&args.egress.egress()?))?;
    let shown = Shown::from(remote.client.sandbox(&sandbox.sandbox_id)?.0);
    let told = crate::network::told(&shown.name, &args.egress.egress()?);
    remote.output.result(&shown, || told)?;
    Ok(0)
}

/// As the API has them.
pub(super) fn rules(egress: &base::Egress) -> NetworkRules {
    let texts = |ranges: &[base::Cidr]| ranges.iter().map(ToString::to_string).collect();
    NetworkRules {
        allow_out: texts(egress.allow()),
        deny_out: texts(egress.deny()),
    }
}

/// What a sandbox uses, for machines.
#[derive(Serialize)]
struct Used {
    id: String,
    name: String,
    time: u64,
    cpus: u64,
    cpu_percent: f64,
    memory: u64,
    memory_limit: u64,
    disk: u64,
}

impl Used {
    fn new(sandbox: &ListedSandbox, metric: &Metric) -> Self {
        Self {
            id: sandbox.sandbox_id.clone(),
            name: name_of(sandbox),
            time: metric.timestamp_unix,
            cpus: metric.cpu_count,
            cpu_percent: metric.cpu_used_pct,
            memory: metric.mem_used,
            memory_limit: metric.mem_total,
            disk: metric.disk_used,
        }
    }
}

/// `basalt stats`.
pub(super) fn stats(remote: &Remote<'_>, args: &StatsArgs) -> Result<u8> {
    let one = args.sandbox.as_deref().map(|name| remote.find(name)).transpose()?;
    loop {
        let sandboxes = match &one {
            Some((sandbox, _)) => vec![sandbox.clone()],
            None => remote.client.sandboxes(&[], &["running"])?,
        };
        let ids: Vec<&str> = sandboxes.iter().map(|sandbox| sandbox.sandbox_id.as_str()).collect();
        let metrics = remote.client.metrics(&ids)?;
        let used: Vec<Used> = sandboxes
            .iter()
            .filter_map(|sandbox| Some(Used::new(sandbox, metrics.get(&sandbox.sandbox_id)?)))
            .collect();
        remote.output.result(&used, || stats_table(&used))?;
        if args.no_stream {
            return Ok(0);
        }
        std::thread::sleep(STATS_PAUSE);
    }
}

fn stats_table(used: &[Used]) -> String {
    let mut rows = vec![
        ["ID", "NAME", "CPU", "MEMORY", "LIMIT", "DISK"]
            .map(str::to_owned)
            .to_vec(),
    ];
    rows.extend(used.iter().map(|one| {
        vec![
            one.id.clone(),
            one.name.clone(),
            format!("{:.0} % of {}", one.cpu_percent, one.cpus),
            ByteSize(one.memory).to_string(),
            ByteSize(one.memory_limit).to_string(),
            ByteSize(one.disk).to_string(),
        ]
    }));
    table(&rows)
}

/// `basalt logs`.
pub(super) fn logs(remote: &Remote<'_>, args: &LogsArgs) -> Result<u8> {
    let (sandbox, _) = remote.find(&args.one.sandbox)?;
    let id = &sandbox.sandbox_id;
    let mut cursor = Cursor::default();
    let there = cursor.all(remote, id)?;
    let from = args.tail.map_or(0, |tail| there.len().saturating_sub(tail));
    print(remote, args, there.get(from..).unwrap_or_default())?;
    if !args.follow {
        return Ok(0);
    }
    loop {
        std::thread::sleep(LOG_PAUSE);
        match cursor.all(remote, id) {
            Ok(more) => print(remote, args, &more)?,
            // It has ended, and its log with it.
            Err(error) if error.is_not_found() => return Ok(0),
            Err(error) => return Err(error.into()),
        }
    }
}

/// How far a log has been read. It is asked for from a moment on, at which there may be several lines.
#[derive(Default)]
struct Cursor {
    from_ms: u64,
    /// So many of that moment are known.
    known: usize,
}

impl Cursor {
    /// What is there and was not read yet.
    fn all(&mut self, remote: &Remote<'_>, id: &str) -> Result<Vec<LogEntry>, gateway_client::Error> {
        let mut found = Vec::new();
        loop {
            let entries = remote.client.logs(id, self.from_ms)?;
            let new = entries.get(self.known.min(entries.len())..).unwrap_or_default();
            let Some(last) = new.last() else { return Ok(found) };
            let moment = |entry: &LogEntry| nanoseconds(&entry.timestamp) / 1_000_000;
            let last = moment(last);
            self.known = entries.iter().filter(|entry| moment(entry) == last).count();
            self.from_ms = last;
            found.extend_from_slice(new);
        }
    }
}

/// Lines go where the command sent them.
fn print(remote: &Remote<'_>, args: &LogsArgs, entries: &[LogEntry]) -> Result<()> {
    let (mut out, mut err) = (io::stdout().lock(), io::stderr().lock());
    for entry in entries {
        let stream = entry.fields.get("stream").map_or("stdout", String::as_str);
        let text = &entry.message;
        if remote.output.json() {
            let value = serde_json::json!({ "time": entry.timestamp, "stream": stream, "text": text, "whole": true });
            writeln!(out, "{value}")?;
            continue;
        }
        let time = if args.timestamps {
            format!("{} ", entry.timestamp)
        } else {
            String::new()
        };
        match stream {
            "stderr" => writeln!(err, "{time}{text}").context("standard error cannot be written")?,
            _ => writeln!(out, "{time}{text}")?,
        }
    }
    Ok(out.flush()?)
}
