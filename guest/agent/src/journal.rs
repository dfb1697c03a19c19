//! The log of the sandbox's own command, on its way to the host (`agent_api::log` has the format). A host that takes no
//! more loses the log, never the command.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use agent_api::{ExitStatus, OutputStream, log};

use crate::say;

/// How long the host may take to say that it has all of it.
const END_LIMIT: Duration = Duration::from_secs(5);

/// The connection to the log.
pub(crate) struct Log {
    /// `None` once it has failed.
    stream: Option<UnixStream>,
    buffer: Vec<u8>,
}

impl Log {
    /// Writes to `stream`.
    pub(crate) fn new(stream: UnixStream) -> Self {
        Self {
            stream: Some(stream),
            buffer: Vec::new(),
        }
    }

    /// Keeps some output.
    pub(crate) fn output(&mut self, stream: OutputStream, bytes: &[u8]) {
        if self.stream.is_some() {
            log::write_output(&mut self.buffer, now_ns(), stream, bytes);
            self.flush();
        }
    }

    /// Keeps how it ended, and waits until the host has all of it.
    pub(crate) fn end(mut self, status: ExitStatus) {
        log::write_exit(&mut self.buffer, now_ns(), status);
        self.flush();
        if let Some(stream) = &mut self.stream
            && let Err(error) = finish(stream)
        {
            say(format_args!("whether the log is whole is not known: {error}"));
        }
    }

    fn flush(&mut self) {
        if let Some(stream) = &mut self.stream
            && let Err(error) = stream.write_all(&self.buffer)
        {
            say(format_args!("the command's output is not kept from here on: {error}"));
            self.stream = None;
        }
        self.buffer.clear();
    }
}

fn finish(stream: &mut UnixStream) -> io::Result<()> {
    stream.shutdown(Shutdown::Write)?;
    stream.set_read_timeout(Some(END_LIMIT))?;
    // The host never sends anything: this is its end of file.
    stream.read(&mut [0]).map(drop)
}

fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
