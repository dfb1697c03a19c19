//! A session's own thread: one poll loop over the command's streams until it has ended. Output waits in the pipes while
//! the connection does not take it; input waits in the session's queue, which the window bounds.
//!
//! ```text
//!  running ─ exit ─► drain what is in the pipes ─► Exited
//!     ├──── client gone ─► SIGHUP ─ one second ─► SIGKILL ─► exit, nothing is sent
//!     └──── its time is over ─► SIGKILL ─► exit
//! ```

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use agent_api::{ExitStatus, OutputStream};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::Error;
use crate::cgroup::Cgroup;
use crate::journal::Log;
use crate::outlet::{Lost, Outlet};
use crate::reaper::Target;
use crate::session::Ends;
use crate::stdin::Source;

/// Time between `SIGHUP` and `SIGKILL` for a command whose client is gone.
const GRACE: Duration = Duration::from_secs(1);

/// How long killed processes may take to go.
const CLEAR_LIMIT: Duration = Duration::from_secs(2);

/// Bytes read from a pipe at once. Smaller than a pipe: an agent's memory counts in every guest.
const CHUNK: usize = 32 * 1024;

/// Most that is taken from a pipe after the command's end; the largest that a pipe can be made without privilege.
const DRAIN_LIMIT: usize = 1024 * 1024;

/// What end-of-file is on a terminal (`VEOF`, Ctrl-D).
const END_OF_TRANSMISSION: u8 = 4;

/// Moves bytes until the command has ended.
pub(crate) struct Streamer<'a> {
    ends: Ends<'a>,
    outlet: Outlet<'a>,
    log: Option<Log>,
    buffer: Vec<u8>,
    /// When `SIGKILL` is due: the command has run for as long as it may, or its client is gone.
    kill_at: Option<Instant>,
    lost: bool,
    /// That input was closed is known to all.
    end_told: bool,
    eof_sent: bool,
}

impl<'a> Streamer<'a> {
    pub(crate) fn new(ends: Ends<'a>, outlet: Outlet<'a>, log: Option<Log>) -> Self {
        Self {
            ends,
            outlet,
            log,
            buffer: vec![0; CHUNK],
            kill_at: None,
            lost: false,
            end_told: false,
            eof_sent: false,
        }
    }

    /// The command is killed when it has run for so long from now.
    pub(crate) fn with_limit(mut self, limit: Option<Duration>) -> Self {
        // One beyond what the clock can tell is none.
        self.kill_at = limit.and_then(|limit| Instant::now().checked_add(limit));
        self
    }

    /// Runs until the end; errors are those of this machine, not the client's.
    pub(crate) fn run(mut self) -> Result<(), Error> {
        let result = self.run_to_exit();
        if result.is_err() {
            // Nobody would read on. The client is told how it ended.
            self.ends.streams.stdin = None;
            self.close(OutputStream::Stdout);
            self.close(OutputStream::Stderr);
            self.kill_all();
            self.run_to_exit()?;
        }
        result
    }

    fn run_to_exit(&mut self) -> Result<(), Error> {
        let status = loop {
            if let Some(status) = self.take_changes()? {
                break status;
            }
            let ready = self.wait()?;
            if ready.stdin {
                self.feed()?;
            }
            for stream in [OutputStream::Stdout, OutputStream::Stderr] {
                if ready.output(stream) {
                    self.carry(stream)?;
                }
            }
        };
        if self.lost {
            self.kill_all();
            if let Some(cgroup) = &self.ends.cgroup {
                cgroup.clear(CLEAR_LIMIT);
            }
            self.end_log(status);
            self.ends.shared.finish();
            return Ok(());
        }
        for stream in [OutputStream::Stdout, OutputStream::Stderr] {
            self.drain(stream)?;
        }
        if self.lost {
            self.kill_all();
        }
        self.end_log(status);
        // The cgroup goes first, so that a client that asks for the next command finds no trace of this one.
        self.ends.cgroup = None;
        self.ends.shared.finish();
        let told = self.outlet.exited(status);
        self.check(told);
        Ok(())
    }

    /// After this the log is whole, on the host.
    fn end_log(&mut self, status: ExitStatus) {
        if let Some(log) = self.log.take() {
            log.end(status);
        }
    }

    /// What the command left in the pipe. Something that it started may still write: then this ends at the limit.
    fn drain(&mut self, stream: OutputStream) -> Result<(), Error> {
        let mut total = 0;
        while total < DRAIN_LIMIT {
            match self.carry(stream)? {
                0 => break,
                got => total += got,
            }
        }
        Ok(())
    }

    /// Acts on what the connection's thread or the reaper changed; the exit status once there is one.
    fn take_changes(&mut self) -> Result<Option<ExitStatus>, Error> {
        let mut state = self.ends.shared.lock();
        let unwanted = std::mem::take(&mut state.unwanted);
        let newly_lost = state.lost && !self.lost;
        let at_end = state.stdin.is_at_end();
        let newly_closed = state.stdin.is_closed() && !self.end_told;
        let exit = state.exit;
        drop(state);
        for stream in unwanted {
            self.close(stream);
        }
        if newly_lost {
            self.lose();
        }
        if newly_closed {
            self.end_told = true;
            self.outlet.input_closed();
        }
        if at_end && exit.is_none() && self.ends.streams.stdin.is_some() {
            self.end_stdin()?;
        }
        Ok(exit)
    }

    /// The client is gone. Where a restore has taken it the command goes on, and nobody waits for it any more.
    fn lose(&mut self) {
        if self.ends.cgroup.as_ref().is_some_and(Cgroup::spares) {
            self.outlet = Outlet::Nobody;
            self.ends.shared.lock().lost = false;
            if !self.ends.streams.tty {
                self.ends.streams.stdin = None;
            }
            return;
        }
        self.lost = true;
        self.outlet = Outlet::Nobody;
        self.ends.shared.lock().lost = true;
        let grace = Instant::now() + GRACE;
        self.kill_at = Some(self.kill_at.map_or(grace, |at| at.min(grace)));
        if self.ends.reaper.condemn(self.ends.pid) {
            self.ends.reaper.signal(self.ends.pid, Target::Group, libc::SIGHUP);
            // A stopped process would not notice.
            self.ends.reaper.signal(self.ends.pid, Target::Group, libc::SIGCONT);
        }
        self.ends.streams.stdin = None;
        self.close(OutputStream::Stdout);
        self.close(OutputStream::Stderr);
    }

    fn kill_all(&self) {
        // The group, for where there is no cgroup; false if the leader is gone, and then its end has killed the group.
        if self.ends.reaper.condemn(self.ends.pid) {
            self.ends.reaper.signal(self.ends.pid, Target::Group, libc::SIGKILL);
        }
        if let Some(Err(error)) = self.ends.cgroup.as_ref().map(|cgroup| cgroup.kill()) {
            crate::say(format_args!(
                "a command that was killed may have left processes: {error}"
            ));
        }
    }

    /// End of input, after all of it was taken: a pipe is closed, a terminal gets the character for it.
    fn end_stdin(&mut self) -> Result<(), Error> {
        if !self.ends.streams.tty {
            self.ends.streams.stdin = None;
            return Ok(());
        }
        if !self.eof_sent {
            self.eof_sent = true;
            self.ends
                .shared
                .lock()
                .stdin
                .push(Source::AGENT, &[END_OF_TRANSMISSION]);
            self.feed()?;
        }
        Ok(())
    }

    fn wait(&mut self) -> Result<Ready, Error> {
        let streams = &self.ends.streams;
        let queued = !self.ends.shared.lock().stdin.is_empty();
        let mut fds = vec![PollFd::new(&self.ends.shared.wake, PollFlags::IN)];
        // A pipe without readers reports an error without being asked; a terminal is only asked when there is input.
        let stdin = streams.stdin.as_ref().filter(|_| queued || !streams.tty).map(|fd| {
            push(
                &mut fds,
                fd.as_fd(),
                if queued { PollFlags::OUT } else { PollFlags::empty() },
            )
        });
        let stdout = streams
            .stdout
            .as_ref()
            .map(|fd| push(&mut fds, fd.as_fd(), PollFlags::IN));
        let stderr = streams
            .stderr
            .as_ref()
            .map(|fd| push(&mut fds, fd.as_fd(), PollFlags::IN));
        let timeout = self.kill_at.map(|at| at.saturating_duration_since(Instant::now()));
        let timeout = timeout.map(|left| Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(left.subsec_nanos()),
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::system("waiting for a command's output")(errno)),
        }
        let is_ready = |index: Option<usize>| {
            index
                .and_then(|index| fds.get(index))
                .is_some_and(|fd| !fd.revents().is_empty())
        };
        let ready = Ready {
            stdin: is_ready(stdin),
            stdout: is_ready(stdout),
            stderr: is_ready(stderr),
        };
        drop(fds);
        self.ends.shared.wake.consume();
        if self.kill_at.is_some_and(|at| Instant::now() >= at) {
            self.kill_at = None;
            self.kill_all();
        }
        Ok(ready)
    }

    /// Writes queued input to the command.
    fn feed(&mut self) -> Result<(), Error> {
        let Some(fd) = &self.ends.streams.stdin else {
            return Ok(());
        };
        let mut state = self.ends.shared.lock();
        let chunk = state.stdin.front();
        // A pipe that is ready although nothing is queued has lost its readers.
        if chunk.is_empty() && self.ends.streams.tty {
            return Ok(());
        }
        let result = if chunk.is_empty() {
            Err(Errno::PIPE)
        } else {
            rustix::io::write(fd, chunk)
        };
        match result {
            Ok(count) => {
                let taken = state.stdin.took(count);
                drop(state);
                let told = self.outlet.input_taken(&taken);
                self.check(told);
                Ok(())
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Err(Errno::PIPE | Errno::IO) => {
                state.stdin.discard();
                drop(state);
                self.ends.streams.stdin = None;
                let told = self.outlet.input_unread();
                self.check(told);
                Ok(())
            }
            Err(errno) => Err(Error::system("writing a command's input")(errno)),
        }
    }

    /// Moves what one read gives, and says how many bytes that were; the descriptors are non-blocking.
    fn carry(&mut self, stream: OutputStream) -> Result<usize, Error> {
        // Taken out so that it is not borrowed with `self`; it comes back below.
        let mut buffer = std::mem::take(&mut self.buffer);
        let result = match self.output(stream) {
            Some(fd) => rustix::io::retry_on_intr(|| rustix::io::read(fd, &mut buffer)),
            None => Err(Errno::AGAIN),
        };
        let moved = match result {
            Ok(got) if got > 0 => {
                let bytes = buffer.get(..got).unwrap_or_default();
                if let Some(log) = &mut self.log {
                    log.output(stream, bytes);
                }
                let sent = self.outlet.output(stream, bytes);
                self.check(sent);
                Ok(got)
            }
            // EIO: all have closed the terminal.
            Ok(_) | Err(Errno::IO) => {
                self.close(stream);
                let told = self.outlet.output_closed(stream);
                self.check(told);
                Ok(0)
            }
            Err(Errno::AGAIN) => Ok(0),
            Err(errno) => Err(Error::system("reading a command's output")(errno)),
        };
        self.buffer = buffer;
        moved
    }

    fn output(&self, stream: OutputStream) -> Option<BorrowedFd<'_>> {
        let fd: &Option<OwnedFd> = match stream {
            OutputStream::Stdout => &self.ends.streams.stdout,
            OutputStream::Stderr => &self.ends.streams.stderr,
        };
        fd.as_ref().map(AsFd::as_fd)
    }

    fn close(&mut self, stream: OutputStream) {
        match stream {
            OutputStream::Stdout => self.ends.streams.stdout = None,
            OutputStream::Stderr => self.ends.streams.stderr = None,
        }
    }

    /// A client that does not take something is gone.
    fn check(&mut self, result: Result<(), Lost>) {
        if result == Err(Lost) && !self.lost {
            self.lose();
        }
    }
}

/// What poll(2) found.
struct Ready {
    stdin: bool,
    stdout: bool,
    stderr: bool,
}

impl Ready {
    fn output(&self, stream: OutputStream) -> bool {
        match stream {
            OutputStream::Stdout => self.stdout,
            OutputStream::Stderr => self.stderr,
        }
    }
}

/// Adds a descriptor and says at which place.
fn push<'f>(fds: &mut Vec<PollFd<'f>>, fd: BorrowedFd<'f>, flags: PollFlags) -> usize {
    fds.push(PollFd::from_borrowed_fd(fd, flags));
    fds.len() - 1
}
