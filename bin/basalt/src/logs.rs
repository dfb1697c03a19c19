//! `basalt logs`: reads the log that the guest's agent writes, which is a file; the daemon only opens it.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use agent_api::OutputStream;
use agent_api::log::{Record, What, read};
use anyhow::{Context, Result, bail};
use node_api::{Client, Reply, Request};
use rustix::fs::{SeekFrom, seek};

use crate::cli::LogsArgs;
use crate::daemon;
use crate::output::Output;

/// Read at once.
const CHUNK: usize = 64 << 10;

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
    let mut files = fds.into_iter().map(File::from);
    let (log, console) = (files.next(), files.next());
    if args.console {
        let mut console = console.context("the sandbox has no console log yet")?;
        io::copy(&mut console, &mut io::stdout().lock())?;
        return Ok(0);
    }
    let log = log.context("the sandbox has no log yet")?;
    let mut printer = Printer {
        timestamps: args.timestamps,
        json: output.json(),
        at_line_start: [true; 2],
    };
    let mut reader = Reader::new(log)?;
    let mut kept = VecDeque::new();
    // What is there already, or its end.
    reader.each(&mut |line| {
        // How the command ended is no line of its output.
        if !matches!(
            read(line),
            Some(Record {
                what: What::Output { .. },
                ..
            })
        ) {
            return Ok(());
        }
        kept.push_back(line.to_vec());
        if args.tail.is_some_and(|tail| kept.len() > tail) {
            kept.pop_front();
        }
        if args.tail.is_none()
            && let Some(line) = kept.pop_front()
        {
            return printer.print(&line);
        }
        Ok(())
    })?;
    kept.iter().try_for_each(|line| printer.print(line))?;
    if !args.follow {
        return Ok(0);
    }
    loop {
        let over = has_ended(&mut client, &id)?;
        reader.each(&mut |line| printer.print(line))?;
        if over {
            return Ok(0);
        }
        std::thread::sleep(PAUSE);
    }
}

fn has_ended(client: &mut Client, id: &str) -> Result<bool> {
    let inspect = Request::Inspect { sandbox: id.to_owned() };
    match client.ask(inspect) {
        Ok((Reply::Sandbox(sandbox), _)) => Ok(!sandbox.state.has_vm()),
        Ok((other, _)) => bail!("the daemon answered {other:?}: use basalt and basaltd of one build"),
        Err(node_api::ClientError::Refused(_)) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

/// Reads whole lines of a file that grows at its end and may be a hole at its beginning.
struct Reader {
    file: File,
    at: u64,
    partial: Vec<u8>,
}

impl Reader {
    fn new(file: File) -> Result<Self> {
        // NXIO: nothing has been written.
        let at = match seek(&file, SeekFrom::Data(0)) {
            Err(rustix::io::Errno::NXIO) => 0,
            found => found?,
        };
        Ok(Self {
            file,
            at,
            partial: Vec::new(),
        })
    }

    /// Gives each line that is there by now.
    fn each(&mut self, line: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let mut chunk = vec![0; CHUNK];
        loop {
            let got = self.file.read_at(&mut chunk, self.at)?;
            if got == 0 {
                return Ok(());
            }
            self.at += u64::try_from(got)?;
            self.partial.extend_from_slice(&chunk[..got]);
            while let Some(end) = self.partial.iter().position(|&byte| byte == b'\n') {
                line(&self.partial[..end])?;
                self.partial.drain(..=end);
            }
        }
    }
}

/// Shows records: output goes where the command sent it.
struct Printer {
    timestamps: bool,
    json: bool,
    /// Of standard output and error.
    at_line_start: [bool; 2],
}

impl Printer {
    fn print(&mut self, line: &[u8]) -> Result<()> {
        // The first line may lack its beginning, and guests may write anything.
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
            return Ok(writeln!(io::stdout().lock(), "{value}")?);
        }
        let which = usize::from(stream == OutputStream::Stderr);
        let mut shown = Vec::new();
        if self.timestamps && self.at_line_start[which] {
            shown.extend(rfc3339(time_ns).as_bytes());
            shown.push(b' ');
        }
        shown.extend(bytes);
        shown.extend(ended.then_some(b'\n'));
        self.at_line_start[which] = ended;
        let mut out: Box<dyn Write> = match stream {
            OutputStream::Stdout => Box::new(io::stdout().lock()),
            OutputStream::Stderr => Box::new(io::stderr().lock()),
        };
        out.write_all(&shown)?;
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

    #[test]
    fn a_growing_file_is_read_line_by_line() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        std::fs::write(&path, "one\ntw").unwrap();
        let mut reader = Reader::new(File::open(&path).unwrap()).unwrap();
        let mut lines = Vec::new();
        let mut take = |line: &[u8]| {
            lines.push(String::from_utf8(line.to_vec())?);
            Ok(())
        };
        reader.each(&mut take).unwrap();
        std::fs::write(&path, "one\ntwo\nthree\n").unwrap();
        reader.each(&mut take).unwrap();
        assert_eq!(lines, ["one", "two", "three"]);
    }
}
