//! The log of the sandbox's own command, on its way to the host (`agent_api::log` has the format). A connection that breaks,
//! as each does when the machine is restored from a snapshot, is opened once more with the next line. A host that takes no more
//! loses the log, never the command.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use agent_api::{ExitStatus, OutputStream, log};

use crate::say;
use crate::server::OpenLog;

/// How long the host may take to say that it has all of it.
const END_LIMIT: Duration = Duration::from_secs(5);

/// The connection to the log.
pub(crate) struct Log {
    /// `None` once it has failed.
    stream: Option<UnixStream>,
    buffer: Vec<u8>,
    open: Arc<OpenLog>,
}

impl Log {
    /// Opens it.
    pub(crate) fn new(open: Arc<OpenLog>) -> io::Result<Self> {
        Ok(Self {
            stream: Some(open()?),
            buffer: Vec::new(),
            open,
        })
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
            && stream.write_all(&self.buffer).is_err()
            && let Err(error) = self.write_anew()
        {
            say(format_args!("the command's output is not logged from here on: {error}"));
            self.stream = None;
        }
        self.buffer.clear();
    }

    /// On a new connection, whole lines again.
    fn write_anew(&mut self) -> io::Result<()> {
        let stream = self.stream.insert((self.open)()?);
        stream.write_all(&self.buffer)
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
