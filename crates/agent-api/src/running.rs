//! A command in progress, seen by the client: [`Output`] for the thread that reads, [`Input`] for those that write.
//! Bounded on both sides: output waits in the stream until it is read, input waits for the agent's window.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use wire::{FrameReader, FrameWriter};

use crate::client::{send_request, timed};
use crate::message::{DATA_CHUNK, ExitStatus, OutputStream, Reply, Request, STDIN_WINDOW, WinSize, kind};
use crate::{Duplex, Error};

/// A command in progress. Dropping it before it has ended closes the connection. The agent then kills the command, unless it is kept
/// ([`ExecRequest::kept`](crate::ExecRequest::kept)): then it runs on, and [`detach`](Self::detach) leaves it without closing anything.
#[derive(Debug)]
pub struct Running<'c, S: Duplex> {
    /// Process id on the agent's side.
    pub pid: u32,
    /// What the command writes, and how it ends.
    pub output: Output<'c, S>,
    /// What the command gets.
    pub input: Input<S>,
}

impl<'c, S: Duplex> Running<'c, S> {
    pub(crate) fn new(pid: u32, reader: &'c mut FrameReader<S>, shared: Arc<Shared<S>>) -> Self {
        Self {
            pid,
            output: Output {
                reader,
                shared: Arc::clone(&shared),
                expects: Expects::Everything,
            },
            input: Input { shared },
        }
    }

    /// One of which nothing comes, not even a word about input: the stream holds back what does not fit.
    pub(crate) fn without_output(pid: u32, reader: &'c mut FrameReader<S>, writer: Arc<FrameWriter<S>>) -> Self {
        let shared = Shared {
            told: false,
            ..Shared::new(writer, true)
        };
        let mut running = Self::new(pid, reader, Arc::new(shared));
        running.output.expects = Expects::Nothing;
        running
    }

    /// Leaves a command that is kept, which runs on; the connection is idle again. All input that was sent is queued for the command
    /// then. What it writes meanwhile is lost to this client. [`Error::Refused`] if it is not kept; then the connection is closed, and it
    /// ends.
    pub fn detach(mut self) -> Result<(), Error> {
        self.output.shared.end();
        send_request(&self.output.shared.writer, &Request::Detach)?;
        loop {
            let frame = self.output.frame()?;
            if frame.kind == kind::CONTROL {
                match serde_json::from_slice(frame.payload).map_err(Error::Malformed)? {
                    Reply::Done => break,
                    Reply::Refused { message } => return Err(Error::Refused(message)),
                    Reply::StdinTaken { .. } | Reply::StdinClosed | Reply::OutputClosed { .. } | Reply::Exited(_) => {}
                    other => return Err(Error::Unexpected(Box::new(other))),
                }
            } else if !matches!(frame.kind, kind::STDOUT | kind::STDERR) {
                return Err(Error::UnexpectedFrame(frame.kind));
            }
        }
        self.output.expects = Expects::End;
        Ok(())
    }

    /// Waits for the end and collects what the command writes, in memory. For short outputs: tests, probes.
    pub fn collect(mut self) -> Result<Collected, Error> {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        loop {
            match self.output.next()? {
                Event::Stdout(bytes) => stdout.extend_from_slice(bytes),
                Event::Stderr(bytes) => stderr.extend_from_slice(bytes),
                Event::Closed(_) => {}
                Event::Exited(status) => return Ok(Collected { status, stdout, stderr }),
            }
        }
    }
}

/// What [`Running::collect`] collected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collected {
    /// How the command ended.
    pub status: ExitStatus,
    /// All of its standard output.
    pub stdout: Vec<u8>,
    /// All of its standard error.
    pub stderr: Vec<u8>,
}

/// Something that the command did.
#[derive(Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// It wrote to standard output, or its terminal.
    Stdout(&'a [u8]),
    /// It wrote to standard error.
    Stderr(&'a [u8]),
    /// It closed a stream.
    Closed(OutputStream),
    /// It ended; nothing follows.
    Exited(ExitStatus),
}

/// The reading half.
#[derive(Debug)]
pub struct Output<'c, S: Duplex> {
    reader: &'c mut FrameReader<S>,
    shared: Arc<Shared<S>>,
    expects: Expects,
}

/// What may still come on the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expects {
    /// Output, and the command's end.
    Everything,
    /// The connection is attached, but to send only.
    Nothing,
    /// The connection is idle.
    End,
}

impl<S: Duplex> Output<'_, S> {
    /// Waits for the next event. Not an iterator: the bytes are borrowed from the connection's buffer.
    #[expect(clippy::should_implement_trait, reason = "an iterator cannot lend its buffer")]
    pub fn next(&mut self) -> Result<Event<'_>, Error> {
        match self.expects {
            Expects::Everything => {}
            Expects::Nothing => return Err(Error::NoOutput),
            Expects::End => return Err(Error::Ended),
        }
        // Notices about standard input are handled here and are no events, hence the loop. What is returned is
        // found again in the buffer by its kind only: the borrow checker cannot see that only the last round lends.
        let payload_kind = loop {
            let frame = self.frame()?;
            match frame.kind {
                kind::STDOUT | kind::STDERR => break frame.kind,
                kind::CONTROL => match serde_json::from_slice(frame.payload).map_err(Error::Malformed)? {
                    Reply::StdinTaken { bytes } => self.shared.taken(bytes),
                    Reply::StdinClosed => self.shared.end(),
                    Reply::OutputClosed { stream } => return Ok(Event::Closed(stream)),
                    Reply::Exited(status) => {
                        self.expects = Expects::End;
                        self.shared.end();
                        return Ok(Event::Exited(status));
                    }
                    other => return Err(Error::Unexpected(Box::new(other))),
                },
                other => return Err(Error::UnexpectedFrame(other)),
            }
        };
        let payload = self.reader.last_payload();
        Ok(if payload_kind == kind::STDOUT {
            Event::Stdout(payload)
        } else {
            Event::Stderr(payload)
        })
    }

    fn frame(&mut self) -> Result<wire::Frame<'_>, Error> {
        let frame = self.reader.read().map_err(timed)?;
        frame.ok_or(Error::Closed("a command was running"))
    }
}

impl<S: Duplex> Drop for Output<'_, S> {
    fn drop(&mut self) {
        self.shared.end();
        if self.expects != Expects::End {
            self.reader.get_ref().close();
        }
    }
}

/// The writing half; clones write to the same command.
#[derive(Debug)]
pub struct Input<S: Duplex> {
    shared: Arc<Shared<S>>,
}

impl<S: Duplex> Clone for Input<S> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
        }
    }
}

impl<S: Duplex> Input<S> {
    /// Sends bytes to standard input; waits while the command does not take them. Somebody must read the output
    /// meanwhile. [`Error::Ended`] if the command has ended or nobody reads its input.
    pub fn write(&self, mut bytes: &[u8]) -> Result<(), Error> {
        while !bytes.is_empty() {
            let room = self.shared.reserve(bytes.len().min(DATA_CHUNK))?;
            let (now, later) = bytes.split_at(room);
            self.shared.writer.send(kind::STDIN, 0, now)?;
            bytes = later;
        }
        Ok(())
    }

    /// Ends standard input (on a terminal: sends an end-of-file character).
    pub fn close(&self) -> Result<(), Error> {
        send_request(&self.shared.writer, &Request::CloseStdin)
    }

    /// Sends a signal by its Linux number.
    pub fn signal(&self, number: i32) -> Result<(), Error> {
        send_request(&self.shared.writer, &Request::Signal { number })
    }

    /// Tells the terminal its new size.
    pub fn resize(&self, size: WinSize) -> Result<(), Error> {
        send_request(&self.shared.writer, &Request::Resize(size))
    }

    /// Ends the connection, and with it the command, unless that is kept.
    pub fn hang_up(&self) {
        self.shared.writer.with(|stream| stream.close());
    }

    /// Says that nobody reads `stream` any more.
    pub fn close_output(&self, stream: OutputStream) -> Result<(), Error> {
        send_request(&self.shared.writer, &Request::CloseOutput { stream })
    }
}

/// What the halves share: the writer and the window for standard input.
#[derive(Debug)]
pub(crate) struct Shared<S: Duplex> {
    writer: Arc<FrameWriter<S>>,
    window: Mutex<Window>,
    /// The agent says what it has taken. If not, the stream alone holds input back.
    told: bool,
    changed: Condvar,
}

#[derive(Debug)]
struct Window {
    room: usize,
    ended: bool,
}

impl<S: Duplex> Shared<S> {
    pub(crate) fn new(writer: Arc<FrameWriter<S>>, stdin: bool) -> Self {
        Self {
            writer,
            window: Mutex::new(Window {
                room: STDIN_WINDOW,
                ended: !stdin,
            }),
            told: true,
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Window> {
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for room and takes at most `want` of it.
    fn reserve(&self, want: usize) -> Result<usize, Error> {
        let mut window = self.lock();
        while window.room == 0 && !window.ended {
            window = self.changed.wait(window).unwrap_or_else(PoisonError::into_inner);
        }
        if window.ended {
            return Err(Error::Ended);
        }
        let room = want.min(window.room);
        if self.told {
            window.room -= room;
        }
        Ok(room)
    }

    fn taken(&self, bytes: u32) {
        let mut window = self.lock();
        let bytes = usize::try_from(bytes).unwrap_or(STDIN_WINDOW);
        window.room = window.room.saturating_add(bytes).min(STDIN_WINDOW);
        self.changed.notify_all();
    }

    fn end(&self) {
        self.lock().ended = true;
        self.changed.notify_all();
    }
}
