//! Joins a remote command to local file descriptors until it ends: input, output, terminal size, signals. The command
//! line and the lab both use it. Knows neither of them.
//!
//! ```text
//!  this thread:     agent's output ─► local stdout, stderr                 until Exited
//!  input thread:    local stdin ─► agent (waits for its window)            until end of file or the end
//!  signal thread:   caught signals ─► Signal, or Resize for SIGWINCH       until the end
//! ```

use std::os::fd::{AsFd, BorrowedFd};
use std::thread;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;

use crate::message::{DATA_CHUNK, ExitStatus, OutputStream};
use crate::running::{Event, Input, Running};
use crate::signals::Signals;
use crate::terminal::{RawMode, window_size};
use crate::{Duplex, Error};

/// What [`observe::marks`] has when the first of a command's output was written.
pub const FIRST_OUTPUT: &str = "first output";

/// The local ends.
#[derive(Debug)]
pub struct LocalIo<'a> {
    /// Where input comes from; `None` if the command gets none.
    pub stdin: Option<BorrowedFd<'a>>,
    /// Where its output goes.
    pub stdout: BorrowedFd<'a>,
    /// Where its errors go.
    pub stderr: BorrowedFd<'a>,
    /// Whether the command has a terminal: then the local one becomes raw, and its size follows.
    pub tty: bool,
}

impl LocalIo<'_> {
    /// This process's own streams.
    pub fn std(stdin: bool, tty: bool) -> Self {
        Self {
            stdin: stdin.then(rustix::stdio::stdin),
            stdout: rustix::stdio::stdout(),
            stderr: rustix::stdio::stderr(),
            tty,
        }
    }
}

/// Moves everything until the command has ended, and says how it did. The local terminal is as before on every way out.
pub fn pump<S: Duplex>(running: Running<'_, S>, io: &LocalIo<'_>, signals: &Signals) -> Result<ExitStatus, Error> {
    let Running { mut output, input, .. } = running;
    let _raw = match io.stdin.filter(|_| io.tty) {
        Some(stdin) => RawMode::enter(stdin)?,
        None => None,
    };
    let stop = eventfd(0, EventfdFlags::CLOEXEC).map_err(Error::local("making an eventfd"))?;
    thread::scope(|scope| {
        let (for_stdin, for_signals, stop) = (input.clone(), input.clone(), stop.as_fd());
        let feeder = io.stdin.map(|stdin| scope.spawn(move || feed(stdin, &for_stdin, stop)));
        let forwarder = scope.spawn(move || forward(signals, io, &for_signals, stop));
        let result = drain(&mut output, &input, io);
        // Wakes a feeder that waits for the window; also closes the connection if the command still runs.
        drop(output);
        rustix::io::write(stop, &1_u64.to_ne_bytes()).map_err(Error::local("stopping the pump"))?;
        let fed = feeder.map_or(Ok(()), |thread| thread.join().unwrap_or(Err(Error::Ended)));
        let forwarded = forwarder.join().unwrap_or(Err(Error::Ended));
        let status = result?;
        // The command ended as it should: that input then went nowhere is no error, but a local failure is.
        for side in [fed, forwarded] {
            if let Err(error @ Error::Local { .. }) = side {
                return Err(error);
            }
        }
        Ok(status)
    })
}

/// Agent to local output.
fn drain<S: Duplex>(
    output: &mut crate::Output<'_, S>,
    input: &Input<S>,
    io: &LocalIo<'_>,
) -> Result<ExitStatus, Error> {
    let (mut stdout, mut stderr) = (Some(io.stdout), Some(io.stderr));
    let mut told = false;
    loop {
        let (target, bytes, stream) = match output.next()? {
            Event::Stdout(bytes) => (&mut stdout, bytes, OutputStream::Stdout),
            Event::Stderr(bytes) => (&mut stderr, bytes, OutputStream::Stderr),
            Event::Closed(_) => continue,
            Event::Exited(status) => return Ok(status),
        };
        let Some(fd) = *target else { continue };
        match write_all(fd, bytes) {
            Ok(()) if !told => {
                observe::marks::mark(FIRST_OUTPUT);
                told = true;
            }
            Ok(()) => {}
            // The local reader is gone: the remote writer learns it as a local one would, by SIGPIPE.
            Err(Errno::PIPE) => {
                *target = None;
                input.close_output(stream)?;
            }
            Err(errno) => return Err(Error::local("writing the command's output")(errno)),
        }
    }
}

/// Local input to agent.
fn feed<S: Duplex>(stdin: BorrowedFd<'_>, input: &Input<S>, stop: BorrowedFd<'_>) -> Result<(), Error> {
    let mut buffer = vec![0; DATA_CHUNK];
    loop {
        if !wait_readable(stdin, stop)? {
            return Ok(());
        }
        match rustix::io::read(stdin, &mut buffer) {
            Ok(0) => return input.close(),
            Ok(got) => input.write(buffer.get(..got).unwrap_or_default())?,
            Err(Errno::INTR | Errno::AGAIN) => {}
            // A terminal that hung up.
            Err(Errno::IO) => return input.close(),
            Err(errno) => {
                // The command must not wait for input that will never come.
                input.close()?;
                return Err(Error::local("reading standard input")(errno));
            }
        }
    }
}

/// Local signals to agent.
fn forward<S: Duplex>(
    signals: &Signals,
    io: &LocalIo<'_>,
    input: &Input<S>,
    stop: BorrowedFd<'_>,
) -> Result<(), Error> {
    while wait_readable(signals.as_fd(), stop)? {
        while let Some(number) = signals.take() {
            if number != libc::SIGWINCH {
                input.signal(number)?;
            } else if io.tty
                && let Some(size) = io.stdin.and_then(window_size).or_else(|| window_size(io.stdout))
            {
                input.resize(size)?;
            }
        }
    }
    Ok(())
}

/// Waits until `fd` can be read (or has ended); false if `stop` came first.
fn wait_readable(fd: BorrowedFd<'_>, stop: BorrowedFd<'_>) -> Result<bool, Error> {
    loop {
        let mut fds = [PollFd::new(&stop, PollFlags::IN), PollFd::new(&fd, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(Error::local("waiting for input")(errno)),
        }
        if !fds[0].revents().is_empty() {
            return Ok(false);
        }
        if !fds[1].revents().is_empty() {
            return Ok(true);
        }
    }
}

/// Writes everything, also to a descriptor that somebody made non-blocking.
fn write_all(fd: BorrowedFd<'_>, mut bytes: &[u8]) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match rustix::io::write(fd, bytes) {
            Ok(n) => bytes = bytes.get(n..).unwrap_or_default(),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => match poll(&mut [PollFd::new(&fd, PollFlags::OUT)], None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            },
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}
