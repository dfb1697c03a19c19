//! `basalt logs`: reads the log that the guest's agent writes, which is a file; the daemon only opens it.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::time::Duration;

use agent_api::OutputStream;
use agent_api::log::{Record, What, read};
use anyhow::{Context, Result, bail};
use node_api::{Client, Reply, Request, State};

use crate::cli::LogsArgs;
use crate::daemon;
use crate::log_reader::Reader;
use crate::output::Output;

/// Shown at once at most.
const SHOWN: usize = 64 << 10;

/// Between two looks at a log that grows.
const PAUSE: Duration = Duration::from_millis(100);

/// `basalt logs`.
pub(crate) fn logs(args: &LogsArgs, output: &Output) -> Result<u8> {
    let mut client = daemon::connect()?;
    let sandbox = args.one.sandbox.clone();
    let (fds, id) = match client.ask(Request::Logs { sandbox })? {
        (Reply::Sandbox(sandbox), fds) => (fds, sandbox.id),
        (other, _) => bail!("the daemon answered {other:?} to `logs`: use basalt and basaltd of one build"),
    };
    let mut files = fds.into_iter().map(|fd| Reader::new(File::from(fd)));
    let (log, console) = (files.next(), files.next());
    if args.console {
        let mut console = console.context("the sandbox has no console log yet")?;
        console.copy_until(console.end()?, &mut io::stdout().lock())?;
        return Ok(0);
    }
    let mut reader = log.context("the sandbox has no log yet")?;
    let mut printer = Printer::new(args.timestamps, output.json());
    // What is there now: a sandbox may write faster than anybody reads.
    let end = reader.end()?;
    if let Some(tail) = args.tail
        && let Some(from) = begin_of_last(tail, &mut reader, end)?
    {
        reader.go_to(from);
    }
    reader.lines_until(end, &mut |_, line| printer.print(line))?;
    printer.flush()?;
    if !args.follow {
        return Ok(0);
    }
    loop {
        let over = has_ended(&mut client, &id)?;
        let end = reader.end()?;
        reader.lines_until(end, &mut |_, line| printer.print(line))?;
        printer.flush()?;
        if over {
            return Ok(0);
        }
        std::thread::sleep(PAUSE);
    }
}

/// Where the last `count` lines of output before `end` begin; how the command ended is no line of its output.
fn begin_of_last(count: usize, reader: &mut Reader, end: u64) -> Result<Option<u64>> {
    let mut begins = VecDeque::new();
    reader.lines_until(end, &mut |at, line| {
        if read(line).is_some_and(|record| matches!(record.what, What::Output { .. })) {
            begins.push_back(at);
            if begins.len() > count {
                begins.pop_front();
            }
        }
        Ok(())
    })?;
    Ok(begins.front().copied())
}

fn has_ended(client: &mut Client, id: &str) -> Result<bool> {
    let inspect = Request::Inspect { sandbox: id.to_owned() };
    match client.ask(inspect) {
        Ok((Reply::Sandbox(sandbox), _)) => Ok(!sandbox.state.has_vm() && sandbox.state != State::Suspended),
        Ok((other, _)) => bail!("the daemon answered {other:?}: use basalt and basaltd of one build"),
        Err(node_api::ClientError::Refused(_)) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

/// Shows records: output goes where the command sent it.
struct Printer {
    timestamps: bool,
    json: bool,
    /// Of standard output and error.
    at_line_start: [bool; 2],
    /// What is to be written to one of the two.
    pending: Vec<u8>,
    pending_for: OutputStream,
}

impl Printer {
    fn new(timestamps: bool, json: bool) -> Self {
        Self {
            timestamps,
            json,
            at_line_start: [true; 2],
            pending: Vec::new(),
            pending_for: OutputStream::Stdout,
        }
    }

    fn print(&mut self, line: &[u8]) -> Result<()> {
        // Guests may write anything.
        let Some(Record { time_ns, what }) = read(line) else {
            return Ok(());
        };
        let What::Output { stream, bytes, ended } = what else {
            return Ok(());
        };
        if self.json {
            let stream = serde_json::to_value(stream)?;
            let text = String::from_utf8_lossy(bytes);
            let value = serde_json::json!({ "time": rfc3339(time_ns), "stream": stream, "text": text, "whole": ended });
            return self.add(OutputStream::Stdout, &[value.to_string().as_bytes(), b"\n"]);
        }
        let line_start = &mut self.at_line_start[usize::from(stream == OutputStream::Stderr)];
        let begins = std::mem::replace(line_start, ended);
        let time = (self.timestamps && begins).then(|| format!("{} ", rfc3339(time_ns)));
        let line_feed: &[u8] = if ended { b"\n" } else { b"" };
        self.add(stream, &[time.unwrap_or_default().as_bytes(), bytes, line_feed])
    }

    /// Keeps the order in which both were written.
    fn add(&mut self, stream: OutputStream, pieces: &[&[u8]]) -> Result<()> {
        if stream != self.pending_for || self.pending.len() >= SHOWN {
            self.flush()?;
            self.pending_for = stream;
        }
        pieces.iter().for_each(|piece| self.pending.extend_from_slice(piece));
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        let mut out: Box<dyn Write> = match self.pending_for {
            OutputStream::Stdout => Box::new(io::stdout().lock()),
            OutputStream::Stderr => Box::new(io::stderr().lock()),
        };
        out.write_all(&self.pending)?;
        self.pending.clear();
        Ok(out.flush()?)
    }
}

/// A time as RFC 3339 writes it, in UTC.
pub(crate) fn rfc3339(time_ns: u64) -> String {
    const DAY: u64 = 86_400;
    let (seconds, nanos) = (time_ns / 1_000_000_000, time_ns % 1_000_000_000);
    let (days, second) = (seconds / DAY, seconds % DAY);
    let (mut year, mut left) = (1970, days);
    let length = |year: u64| 365 + u64::from(is_leap(year));
    while left >= length(year) {
        left -= length(year);
        year += 1;
    }
    let mut month = 1;
    while left >= month_length(year, month) {
        left -= month_length(year, month);
        month += 1;
    }
    format!(
        "{year:04}-{month:02}-{:02}T{:02}:{:02}:{:02}.{nanos:09}Z",
        left + 1,
        second / 3600,
        second / 60 % 60,
        second % 60
    )
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

fn month_length(year: u64, month: u64) -> u64 {
    match month {
        2 => 28 + u64::from(is_leap(year)),
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_right_across_leap_years() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.000000000Z"),
            (951_782_400, "2000-02-29T00:00:00.000000000Z"),
            (1_709_251_199, "2024-02-29T23:59:59.000000000Z"),
            (1_763_710_727, "2025-11-21T07:38:47.000000000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000000000Z"),
        ] {
            assert_eq!(rfc3339(seconds * 1_000_000_000), text);
        }
        assert!(rfc3339(42).ends_with(".000000042Z"));
    }
}
