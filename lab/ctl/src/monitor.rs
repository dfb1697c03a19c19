//! The emulator's monitor: QMP (QEMU's "Machine Protocol" specification) over the socket in the lab's directory. Does not
//! know what is asked, nor why.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::state::State;

/// The emulator's own monitor answers at once, or never. It serves one client at a time, and the others wait.
const PATIENCE: Duration = Duration::from_secs(5);

/// A connection to the monitor.
pub(crate) struct Monitor {
    socket: BufReader<UnixStream>,
}

impl Monitor {
    pub(crate) fn open(state: &State) -> Result<Self> {
        Self::open_within(state, PATIENCE)
    }

    /// With another limit for each answer.
    pub(crate) fn open_within(state: &State, patience: Duration) -> Result<Self> {
        let path = state.qmp();
        let socket = UnixStream::connect(&path).with_context(|| format!("cannot connect to {}", path.display()))?;
        socket.set_read_timeout(Some(patience))?;
        let mut monitor = Self {
            socket: BufReader::new(socket),
        };
        monitor.read()?;
        monitor.ask(&json!({ "execute": "qmp_capabilities" }))?;
        Ok(monitor)
    }

    /// What a command for people prints.
    pub(crate) fn human(&mut self, line: &str) -> Result<String> {
        let arguments = json!({ "command-line": line });
        let answer = self.ask(&json!({ "execute": "human-monitor-command", "arguments": arguments }))?;
        Ok(answer["return"].as_str().unwrap_or_default().replace('\r', ""))
    }

    /// The answer to one command; events before it are passed over.
    fn ask(&mut self, command: &Value) -> Result<Value> {
        writeln!(self.socket.get_mut(), "{command}").context("the emulator's monitor does not listen")?;
        loop {
            let answer = self.read()?;
            if answer.get("event").is_none() {
                return Ok(answer);
            }
        }
    }

    fn read(&mut self) -> Result<Value> {
        let mut line = String::new();
        self.socket
            .read_line(&mut line)
            .context("the emulator's monitor does not answer")?;
        serde_json::from_str(&line).context("the emulator's monitor ended")
    }
}
