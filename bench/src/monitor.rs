//! QEMU's monitor (QMP, QEMU's docs/interop/qmp-spec): what is said to it and what it answers. Knows nothing of what is measured by it.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use serde_json::{Value, json};

/// How long QEMU may take for anything.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// QEMU's monitor.
pub(crate) struct Monitor {
    reader: BufReader<UnixStream>,
    path: PathBuf,
}

impl Monitor {
    /// Connects as soon as QEMU listens; its first answer comes when its machine is made. `alive` fails when QEMU has ended.
    pub(crate) fn connect(path: PathBuf, mut alive: impl FnMut() -> Result<()>) -> Result<Self> {
        let deadline = Instant::now() + PATIENCE;
        let stream = loop {
            match UnixStream::connect(&path) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() > deadline => bail!("QEMU's monitor does not answer: {error}"),
                Err(_) => {
                    alive()?;
                    thread::sleep(Duration::from_millis(1));
                }
            }
        };
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut monitor = Self {
            reader: BufReader::new(stream),
            path,
        };
        monitor.say(&json!({ "execute": "qmp_capabilities" }))?;
        Ok(monitor)
    }

    fn line(&mut self) -> Result<Value> {
        let mut line = String::new();
        ensure!(self.reader.read_line(&mut line)? > 0, "QEMU has closed its monitor");
        Ok(serde_json::from_str(&line)?)
    }

    /// Says something; what is returned.
    pub(crate) fn say(&mut self, command: &Value) -> Result<Value> {
        writeln!(self.reader.get_ref(), "{command}")?;
        loop {
            let line = self.line()?;
            ensure!(line.get("error").is_none(), "QEMU refuses {command}: {line}");
            if let Some(result) = line.get("return") {
                return Ok(result.clone());
            }
        }
    }

    /// Waits until the guest runs.
    pub(crate) fn wait_until_it_runs(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if self.say(&json!({ "execute": "query-status" }))?["running"] == true {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "QEMU's guest does not run");
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        drop(std::fs::remove_file(&self.path));
    }
}
