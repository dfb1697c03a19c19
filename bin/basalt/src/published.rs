//! `basalt published`, in the lab: what sandboxes that run publish, one line of JSON at each change, for whoever forwards
//! ports outside. A number on standard input asks for a line that repeats it. Starts no daemon: where none runs nothing
//! changes.

use std::io::{self, BufRead, Write};
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use node_api::message::Item;
use node_api::{ListConfig, Request, Sandbox};
use serde::Serialize;

use crate::{asked, daemon};

/// Between two looks whether a daemon runs.
const PAUSE: Duration = Duration::from_millis(500);

/// One sandbox's ports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Published {
    owner: String,
    ports: Vec<String>,
}

/// Why there may be something to print.
enum Cause {
    Changed,
    Asked(u64),
    /// Whoever reads it has gone.
    Over,
}

/// Prints until standard input ends.
pub(crate) fn published() -> Result<u8> {
    let (tell, causes) = mpsc::channel();
    let questions = tell.clone();
    let threads = [
        thread::Builder::new()
            .name("questions".into())
            .spawn(move || hear(&questions)),
        thread::Builder::new().name("events".into()).spawn(move || watch(&tell)),
    ];
    for thread in threads {
        // They end with this program.
        drop(thread.context("starting a thread")?);
    }
    let (mut answer, mut last) = (0, None);
    loop {
        let now = list()?.or_else(|| last.clone()).unwrap_or_default();
        // The first time, too: that nothing is published is worth knowing.
        if last.as_ref() != Some(&now) || answer > 0 {
            let mut out = io::stdout().lock();
            writeln!(out, "{}", serde_json::json!({ "answer": answer, "published": now }))?;
            out.flush()?;
        }
        last = Some(now);
        answer = match causes
            .recv()
            .context("request cancelled: standard input and the daemon's events have both ended")?
        {
            Cause::Changed => 0,
            Cause::Asked(number) => number,
            Cause::Over => return Ok(0),
        };
    }
}

/// What is published now; nothing is known where no daemon runs.
fn list() -> Result<Option<Vec<Published>>> {
    let Some(mut client) = daemon::connect_if_needed(|_| false)? else {
        return Ok(None);
    };
    let mut found = Vec::new();
    client.ask_each(Request::List(ListConfig::default()), &mut |item| {
        if let Item::Sandbox(sandbox) = item {
            found.extend(of(*sandbox));
        }
    })?;
    Ok(Some(found))
}

fn of(mut sandbox: Sandbox) -> Option<Published> {
    if !sandbox.state.has_vm() {
        return None;
    }
    asked::as_asked(&mut sandbox.config);
    // One that cannot be forwarded was refused outside, or was made in the lab by hand.
    let ports: Vec<String> = sandbox
        .config
        .ports
        .iter()
        .filter_map(|port| asked::forward(port).ok())
        .collect();
    (!ports.is_empty()).then_some(Published {
        owner: sandbox.name,
        ports,
    })
}

/// Numbers on standard input.
fn hear(tell: &Sender<Cause>) {
    for line in io::stdin().lock().lines() {
        let number = line.ok().and_then(|line| line.trim().parse().ok());
        let Some(number) = number else { break };
        if tell.send(Cause::Asked(number)).is_err() {
            return;
        }
    }
    // This program may have ended already.
    drop(tell.send(Cause::Over));
}

/// What the daemon says happens, whichever runs.
fn watch(tell: &Sender<Cause>) {
    loop {
        if let Err(error) = follow(tell) {
            log::info!("the daemon tells nothing more: {error:#}");
        }
        thread::sleep(PAUSE);
    }
}

fn follow(tell: &Sender<Cause>) -> Result<()> {
    let Some(mut client) = daemon::connect_if_needed(|_| false)? else {
        return Ok(());
    };
    client.ask(Request::Events)?;
    loop {
        // At once as well: something may have happened before.
        tell.send(Cause::Changed)?;
        client.next_item()?;
    }
}
