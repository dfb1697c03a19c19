//! The verbs for sandboxes that are there: each asks the daemon and shows what it says.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};
use base::ByteSize;
use node_api::message::Item;
use node_api::{
    Client, Ended, ListConfig, MemoryState, NodeEvent, Reply, Request, Sample, Sandbox, Secrets as _, State,
};

use crate::asked;
use crate::cli::{InspectArgs, KillArgs, ManyArgs, PsArgs, QuarantineArgs, RmArgs, StatsArgs, StopArgs};
use crate::output::{Output, table};
use crate::{daemon, memory};

/// Between two looks of `basalt stats`.
const STATS_PAUSE: Duration = Duration::from_secs(1);

/// `basalt ps`.
pub(crate) fn ps(args: &PsArgs, output: &Output) -> Result<u8> {
    let mut sandboxes = Vec::new();
    let wanted = ListConfig {
        all: args.all,
        states: args.state.clone(),
        labels: args.label.iter().cloned().collect(),
        ..ListConfig::default()
    };
    daemon::connect()?.ask_each(Request::List(wanted), &mut |item| {
        if let Item::Sandbox(sandbox) = item {
            sandboxes.push(as_asked(*sandbox).redacted());
        }
    })?;
    output.result(&sandboxes, || {
        if args.quiet {
            return sandboxes.iter().map(|sandbox| format!("{}\n", sandbox.id)).collect();
        }
        let mut rows = vec![
            ["ID", "NAME", "IMAGE", "STATE", "CREATED", "PORTS", "COMMAND"]
                .map(str::to_owned)
                .to_vec(),
        ];
        rows.extend(sandboxes.iter().map(row));
        table(&rows)
    })?;
    Ok(0)
}

/// One in the lab is shown as it was asked for outside.
pub(crate) fn as_asked(mut sandbox: Sandbox) -> Sandbox {
    asked::as_asked(&mut sandbox.config);
    sandbox
}

fn row(sandbox: &Sandbox) -> Vec<String> {
    let process = &sandbox.config.process;
    let words = process.entrypoint.iter().flatten().chain(&process.command);
    let command: Vec<&str> = words.map(String::as_str).collect();
    let ports: Vec<String> = sandbox.config.ports.iter().map(|port| asked::shown(port)).collect();
    vec![
        sandbox.id.clone(),
        sandbox.name.clone(),
        sandbox.config.image.clone(),
        state(sandbox),
        format!("{} ago", ago(sandbox.created_ns)),
        ports.join(", "),
        command.join(" ").chars().take(40).collect(),
    ]
}

fn state(sandbox: &Sandbox) -> String {
    match (sandbox.state, &sandbox.ended) {
        (State::Exited, Some(Ended::Failed(_))) => "failed".into(),
        (State::Exited, Some(ended)) => format!("exited ({})", ended.exit_code()),
        (state, _) => match sandbox.pause_reason {
            Some(reason) => format!("{state} ({reason})"),
            None if sandbox.accelerator_ended.is_some() => format!("{state} (accelerator ended)"),
            None => match sandbox.memory_state.as_ref().and_then(memory::notes) {
                Some(notes) => format!("{state} ({notes})"),
                None => state.to_string(),
            },
        },
    }
}

/// How long ago a moment was, roughly.
pub(crate) fn ago(time_ns: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = now.saturating_sub(Duration::from_nanos(time_ns)).as_secs();
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

/// For the daemon.
pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// `basalt start`.
pub(crate) fn start(args: &ManyArgs, output: &Output) -> Result<u8> {
    daemon::ask_for_each(&args.sandboxes, output, |sandbox| Request::Start { sandbox })
}

/// `basalt stop`.
pub(crate) fn stop(args: &StopArgs, output: &Output) -> Result<u8> {
    let grace_ms = millis(args.time);
    daemon::ask_for_each(&args.many.sandboxes, output, |sandbox| Request::Stop {
        sandbox,
        grace_ms,
    })
}

/// `basalt restart`.
pub(crate) fn restart(args: &StopArgs, output: &Output) -> Result<u8> {
    let grace_ms = millis(args.time);
    daemon::ask_for_each(&args.many.sandboxes, output, |sandbox| Request::Restart {
        sandbox,
        grace_ms,
    })
}

/// `basalt kill`.
pub(crate) fn kill(args: &KillArgs, output: &Output) -> Result<u8> {
    let signal = args.signal;
    daemon::ask_for_each(&args.many.sandboxes, output, |sandbox| Request::Kill {
        sandbox,
        signal,
    })
}

/// `basalt pause`.
pub(crate) fn pause(args: &ManyArgs, output: &Output) -> Result<u8> {
    daemon::ask_for_each(&args.sandboxes, output, |sandbox| Request::Pause { sandbox })
}

/// `basalt suspend`.
pub(crate) fn suspend(args: &ManyArgs, output: &Output) -> Result<u8> {
    daemon::ask_for_each(&args.sandboxes, output, |sandbox| Request::Suspend { sandbox })
}

/// `basalt unpause`, and `basalt resume`.
pub(crate) fn unpause(args: &ManyArgs, output: &Output) -> Result<u8> {
    daemon::ask_for_each(&args.sandboxes, output, |sandbox| Request::Resume { sandbox })
}

/// `basalt rm`.
pub(crate) fn rm(args: &RmArgs, output: &Output) -> Result<u8> {
    let force = args.force;
    daemon::ask_for_each(&args.many.sandboxes, output, |sandbox| Request::Remove {
        sandbox,
        force,
    })
}

/// `basalt wait`.
pub(crate) fn wait(args: &ManyArgs, output: &Output) -> Result<u8> {
    let mut client = daemon::connect()?;
    let mut codes = Vec::new();
    for sandbox in &args.sandboxes {
        match client.ask(Request::Wait {
            sandbox: sandbox.clone(),
        })? {
            (Reply::Ended(ended), _) => codes.push(ended.exit_code()),
            (other, _) => return Err(unexpected(&other)),
        }
    }
    output.result(&codes, || codes.iter().map(|code| format!("{code}\n")).collect())?;
    Ok(0)
}

/// `basalt prune`.
pub(crate) fn prune(args: &QuarantineArgs, output: &Output) -> Result<u8> {
    if args.quarantine {
        return prune_quarantine(args.force, output);
    }
    match daemon::connect()?.ask(Request::Prune)? {
        (Reply::Pruned(ids), _) => {
            output.result(&ids, || ids.iter().map(|id| format!("{id}\n")).collect())?;
            Ok(0)
        }
        (other, _) => Err(unexpected(&other)),
    }
}

/// What the daemon has set aside cannot be made again: it is only shown unless that is asked for with a word more.
fn prune_quarantine(force: bool, output: &Output) -> Result<u8> {
    let names = match daemon::connect()?.ask(Request::Quarantine { delete: force })? {
        (Reply::Pruned(names), _) => names,
        (other, _) => return Err(unexpected(&other)),
    };
    output.result(&names, || names.iter().map(|name| format!("{name}\n")).collect())?;
    if force || names.is_empty() {
        return Ok(0);
    }
    bail!(
        "nothing was deleted: {} were set aside as nobody could tell whose they are; look at why.txt in each, and delete all of them \
         for good with `basalt prune --quarantine --force`",
        names.len()
    )
}

/// `basalt inspect`.
pub(crate) fn inspect(args: &InspectArgs, output: &Output) -> Result<u8> {
    let mut client = daemon::connect()?;
    let mut sandboxes = Vec::new();
    for sandbox in &args.many.sandboxes {
        match client.ask(Request::Inspect {
            sandbox: sandbox.clone(),
        })? {
            (Reply::Sandbox(sandbox), _) if args.show_secrets => sandboxes.push(as_asked(*sandbox)),
            (Reply::Sandbox(sandbox), _) => sandboxes.push(as_asked(*sandbox).redacted()),
            (other, _) => return Err(unexpected(&other)),
        }
    }
    // What it is, whole, is JSON for people, too.
    let text = serde_json::to_string_pretty(&sandboxes)?;
    output.result(&sandboxes, || format!("{text}\n"))?;
    Ok(0)
}

/// `basalt events`.
pub(crate) fn events(output: &Output) -> Result<u8> {
    let mut client = daemon::connect()?;
    client.ask(Request::Events)?;
    loop {
        if let Item::Event(event) = client.next_item()? {
            output.line(&event, || describe(&event))?;
        }
    }
}

fn describe(event: &NodeEvent) -> String {
    let kind = serde_json::to_value(event.kind).unwrap_or_default();
    let ended = event.ended.as_ref().map(|ended| format!(" ({})", ended.exit_code()));
    let how_mapped = || event.memory.as_deref().and_then(memory::how_mapped);
    let why = event.why.clone().or_else(how_mapped).map(|why| format!(": {why}"));
    format!(
        "{} {} {} {}{}{}",
        crate::logs::rfc3339(event.time_ns),
        kind.as_str().unwrap_or_default(),
        event.id,
        event.name,
        ended.unwrap_or_default(),
        why.unwrap_or_default()
    )
}

/// `basalt stats`.
pub(crate) fn stats(args: &StatsArgs, output: &Output) -> Result<u8> {
    let mut client = daemon::connect()?;
    let mut before: Vec<Sample> = Vec::new();
    loop {
        let now = samples(&mut client, args.sandbox.as_ref())?;
        if args.no_stream || !before.is_empty() {
            output.result(&now, || stats_table(&before, &now))?;
        }
        if args.no_stream {
            return Ok(0);
        }
        before = now;
        std::thread::sleep(STATS_PAUSE);
    }
}

fn samples(client: &mut Client, sandbox: Option<&String>) -> Result<Vec<Sample>> {
    let mut samples = Vec::new();
    let request = Request::Stats {
        sandbox: sandbox.cloned(),
    };
    client.ask_each(request, &mut |item| {
        if let Item::Sample(sample) = item {
            samples.push(sample);
        }
    })?;
    Ok(samples)
}

fn memory_of(sample: &Sample) -> Option<&MemoryState> {
    sample.usage.memory_state.as_deref()
}

fn stats_table(before: &[Sample], now: &[Sample]) -> String {
    let mut rows = vec![
        [
            "ID",
            "NAME",
            "CPU",
            "CPU TIME",
            "MEMORY",
            "LIMIT",
            "DISK",
            "READ",
            "WRITTEN",
            "RECEIVED",
            "SENT",
            "THREADS",
            "PLUGGED",
            "GIVEN BACK",
        ]
        .map(str::to_owned)
        .to_vec(),
    ];
    let with_devices = now.iter().filter_map(memory_of).any(memory::has_devices);
    if with_devices {
        rows[0].extend(memory::DEVICE_COLUMNS.map(str::to_owned));
    }
    for sample in now {
        let usage = &sample.usage;
        let earlier = before.iter().find(|earlier| earlier.id == sample.id);
        // A second of CPU time in a second is 100 %.
        let share = earlier.map(|earlier| usage.cpu_usec.saturating_sub(earlier.usage.cpu_usec) / 10_000);
        let of_vmm = |bytes| match usage.vmm_busy {
            true => "-".to_owned(),
            false => ByteSize(bytes).to_string(),
        };
        let mut row = vec![
            sample.id.clone(),
            sample.name.clone(),
            share.map_or_else(|| "-".to_owned(), |share| format!("{share} %")),
            format!("{:.1} s", Duration::from_micros(usage.cpu_usec).as_secs_f64()),
            ByteSize(usage.memory).to_string(),
            usage
                .memory_limit
                .map_or_else(|| "-".to_owned(), |limit| ByteSize(limit).to_string()),
            ByteSize(usage.disk).to_string(),
            of_vmm(usage.block.bytes_in),
            of_vmm(usage.block.bytes_out),
            of_vmm(usage.network.bytes_in),
            of_vmm(usage.network.bytes_out),
            usage.pids.to_string(),
            memory::of_how_much(memory_of(sample), |memory| (memory.present, memory.target)),
            memory::of_how_much(memory_of(sample), |memory| (memory.discarded, memory.reported)),
        ];
        if with_devices {
            row.extend(memory::device_columns(memory_of(sample)));
        }
        rows.push(row);
    }
    table(&rows)
}

pub(crate) fn unexpected(reply: &Reply) -> anyhow::Error {
    anyhow::anyhow!("the daemon answered {reply:?}: use basalt and basaltd of one build")
}
