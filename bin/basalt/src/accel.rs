//! `basalt accel`: which sandboxes have an accelerator, and who serves it.

use anyhow::Result;
use node_api::message::Item;
use node_api::{Accelerator, Request, State};
use serde::Serialize;

use crate::cli::AccelVerb;
use crate::daemon;
use crate::output::{Output, table};

/// A sandbox that has one.
#[derive(Debug, Serialize)]
struct Row {
    sandbox: String,
    id: String,
    state: State,
    #[serde(flatten)]
    accelerator: Accelerator,
    /// The process that serves it, where the sandbox runs.
    server: Option<i32>,
}

/// `basalt accel ...`.
pub(crate) fn accel(verb: &AccelVerb, output: &Output) -> Result<u8> {
    match verb {
        AccelVerb::Ls => list(output),
    }
}

fn list(output: &Output) -> Result<u8> {
    let mut rows = Vec::new();
    daemon::connect()?.ask_each(Request::List { all: true }, &mut |item| {
        if let Item::Sandbox(sandbox) = item
            && let Some(accelerator) = sandbox.config.accelerator
        {
            let runs = sandbox.state.has_vm();
            rows.push(Row {
                server: sandbox.accelerator.filter(|_| runs).map(|process| process.pid),
                sandbox: sandbox.name,
                id: sandbox.id,
                state: sandbox.state,
                accelerator,
            });
        }
    })?;
    output.result(&rows, || {
        let mut lines = vec![
            ["SANDBOX", "STATE", "API", "MEMORY", "WINDOW", "SERVER"]
                .map(str::to_owned)
                .to_vec(),
        ];
        lines.extend(rows.iter().map(|row| {
            vec![
                row.sandbox.clone(),
                row.state.to_string(),
                row.accelerator.api.to_string(),
                row.accelerator.memory.to_string(),
                row.accelerator.window.to_string(),
                row.server.map_or_else(|| "-".to_owned(), |pid| pid.to_string()),
            ]
        }));
        table(&lines)
    })?;
    Ok(0)
}
