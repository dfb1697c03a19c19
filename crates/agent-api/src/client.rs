//! The client: one connection to an agent. Requests wait for their answers; a command in progress has an output half and
//! an input half, for two threads. Knows no terminal and no local file descriptor (`pump` does).

use std::io::{ErrorKind, Read};
use std::sync::Arc;
use std::time::Duration;

use wire::{FrameReader, FrameWriter, Token};

use crate::message::{
    AgentInfo, DATA_CHUNK, Environment, ExecRequest, FileInfo, KeptCommand, MAX_KEPT, MAX_KEPT_TEXT, PROTOCOL, Prepare,
    Reidentify, Reply, Request, Shutdown, Upload, Which, kind,
};
use crate::running::{Running, Shared};
use crate::{Duplex, Error, OsText, PciDevice, PciRequest};

/// How long the handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(20);

/// The version since which agents know kept commands, files and ports.
pub(crate) const WITH_FILES: u16 = 3;

/// A connection to an agent, after the handshake. One request at a time; one exec at a time.
#[derive(Debug)]
pub struct Connection<S: Duplex> {
    pub(crate) reader: FrameReader<S>,
    pub(crate) writer: Arc<FrameWriter<S>>,
    /// Where it is known.
    version: Option<u16>,
}

impl<S: Duplex> Connection<S> {
    /// Shakes hands over a connected stream. `token` is what the server was started with, if it was.
    pub fn new(mut stream: S, token: Option<&Token>) -> Result<Self, Error> {
        stream
            .set_read_timeout(Some(HANDSHAKE_TIMEOUT))
            .map_err(wire::Error::Io)?;
        let version = wire::offer(&mut stream, PROTOCOL, token).map_err(|error| match error {
            wire::Error::Io(error) if is_timeout(error.kind()) => Error::Silent(HANDSHAKE_TIMEOUT),
            error => Error::Wire(error),
        })?;
        stream.set_read_timeout(None).map_err(wire::Error::Io)?;
        let second = stream.try_clone().map_err(wire::Error::Io)?;
        Ok(Self {
            reader: FrameReader::new(stream),
            writer: Arc::new(FrameWriter::new(second)),
            version: Some(version),
        })
    }

    /// The version of the protocol that both sides speak; the oldest where that is not known.
    pub fn version(&self) -> u16 {
        self.version.unwrap_or(PROTOCOL.oldest)
    }

    /// Refuses what an older agent would not understand, and hang up at.
    pub(crate) fn require(&self, version: u16) -> Result<(), Error> {
        match self.version {
            Some(spoken) if spoken < version => Err(Error::TooOld { spoken, version }),
            _ => Ok(()),
        }
    }

    /// Bounds how long an answer may take (`None`: for ever). It also bounds the silence of a running command.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> Result<(), Error> {
        Ok(self
            .reader
            .get_ref()
            .set_read_timeout(timeout)
            .map_err(wire::Error::Io)?)
    }

    /// The underlying stream, for instance to close it from another thread.
    pub fn stream(&self) -> &S {
        self.reader.get_ref()
    }

    /// Asks who the agent is.
    pub fn hello(&mut self) -> Result<AgentInfo, Error> {
        match self.ask(&Request::Hello)? {
            Reply::Hello(info) => Ok(info),
            other => Err(unexpected(other)),
        }
    }

    /// Asks for a sign of life.
    pub fn ping(&mut self) -> Result<(), Error> {
        self.ask(&Request::Ping).and_then(done)
    }

    /// Makes the container's root.
    pub fn prepare(&mut self, prepare: &Prepare) -> Result<(), Error> {
        self.ask(&Request::Prepare(Box::new(prepare.clone()))).and_then(done)
    }

    /// What is at `path`, if anything.
    pub fn stat(&mut self, path: impl Into<OsText>, digest: bool) -> Result<Option<FileInfo>, Error> {
        match self.ask(&Request::Stat {
            path: path.into(),
            digest,
        })? {
            Reply::File(info) => Ok(info),
            other => Err(unexpected(other)),
        }
    }

    /// Stores `upload.size` bytes of `source` at `upload.path`.
    pub fn upload(&mut self, upload: &Upload, source: &mut impl Read) -> Result<(), Error> {
        self.ask(&Request::Upload(upload.clone())).and_then(done)?;
        let mut buffer = vec![0; DATA_CHUNK];
        let mut left = upload.size;
        while left > 0 {
            let want = usize::try_from(left).unwrap_or(DATA_CHUNK).min(DATA_CHUNK);
            let space = buffer.get_mut(..want).unwrap_or_default();
            let got = match source.read(space) {
                Ok(0) => {
                    // The agent waits for the rest: this connection cannot be used any more.
                    self.reader.get_ref().close();
                    return Err(Error::ShortFile {
                        got: upload.size - left,
                        want: upload.size,
                    });
                }
                Ok(got) => got,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(source) => {
                    self.reader.get_ref().close();
                    return Err(Error::Local {
                        what: "reading the file to upload",
                        source,
                    });
                }
            };
            self.writer.send(kind::FILE, 0, buffer.get(..got).unwrap_or_default())?;
            left -= u64::try_from(got).unwrap_or(left);
        }
        self.answer().and_then(done)
    }

    /// Starts a command. The connection is taken until it has ended, or until it is detached from one that is kept.
    pub fn exec(&mut self, request: &ExecRequest) -> Result<Running<'_, S>, Error> {
        if request.kept.is_some() {
            self.require(WITH_FILES)?;
        }
        match self.ask(&Request::Exec(request.clone()))? {
            Reply::Started { pid } => Ok(Running::new(
                pid,
                &mut self.reader,
                Arc::new(Shared::new(Arc::clone(&self.writer), request.stdin)),
            )),
            Reply::Failed(failure) => Err(failure.into()),
            other => Err(unexpected(other)),
        }
    }

    /// Starts a command that nobody waits for; its process id.
    pub fn exec_detached(&mut self, request: &ExecRequest) -> Result<u32, Error> {
        let request = ExecRequest {
            detached: true,
            ..request.clone()
        };
        match self.ask(&Request::Exec(request))? {
            Reply::Started { pid } => Ok(pid),
            Reply::Failed(failure) => Err(failure.into()),
            other => Err(unexpected(other)),
        }
    }

    /// The commands that are kept and run, in the order of their starts. Agents know of them since version 3 of the protocol.
    pub fn list_kept(&mut self) -> Result<Vec<KeptCommand>, Error> {
        self.require(WITH_FILES)?;
        let (mut all, mut text) = (Vec::new(), 0);
        let mut reply = self.ask(&Request::ListKept)?;
        loop {
            match reply {
                // What comes from a guest is not trusted to end.
                Reply::Kept { commands, more } if !(more && commands.is_empty()) => {
                    text += commands.iter().map(|command| command.kept.text_len()).sum::<usize>();
                    all.extend(commands);
                    if all.len() > MAX_KEPT || text > MAX_KEPT_TEXT {
                        return Err(Error::TooManyKept { count: all.len(), text });
                    }
                    if !more {
                        return Ok(all);
                    }
                }
                other => return Err(unexpected(other)),
            }
            reply = self.answer()?;
        }
    }

    /// Attaches to a command that is kept. With `output` it is as if it had been started here: what it writes comes from now on.
    /// Without, it only gets what is sent, and nothing comes. [`Error::RequestFailed`] with [`RequestFailureKind::NotFound`] if it does not
    /// run.
    ///
    /// [`RequestFailureKind::NotFound`]: crate::RequestFailureKind::NotFound
    pub fn attach(&mut self, command: &Which, output: bool) -> Result<Running<'_, S>, Error> {
        self.require(WITH_FILES)?;
        let request = Request::Attach {
            command: command.clone(),
            output,
        };
        match self.ask(&request)? {
            Reply::Started { pid } if output => Ok(Running::new(
                pid,
                &mut self.reader,
                Arc::new(Shared::new(Arc::clone(&self.writer), true)),
            )),
            Reply::Started { pid } => Ok(Running::without_output(pid, &mut self.reader, Arc::clone(&self.writer))),
            other => Err(unexpected(other)),
        }
    }

    /// Has programs in the machine told this environment, if its agent knows how (version 3).
    pub fn tell_environment(&mut self, environment: &[OsText]) -> Result<(), Error> {
        if self.require(WITH_FILES).is_err() {
            return Ok(());
        }
        self.ask(&Request::Environment(Environment(environment.to_vec())))
            .and_then(done)
    }

    /// Sends a signal, by its Linux number, to the sandbox's own command.
    pub fn signal_main(&mut self, number: i32) -> Result<(), Error> {
        self.ask(&Request::SignalMain { number }).and_then(done)
    }

    /// Has caches dropped and free memory cleared, for a snapshot that is to be small. Commands run meanwhile.
    pub fn settle(&mut self) -> Result<(), Error> {
        self.ask(&Request::Settle).and_then(done)
    }

    /// Has all commands stand still and the disks written, for a snapshot. Asking again changes nothing.
    pub fn freeze(&mut self) -> Result<(), Error> {
        self.ask(&Request::Freeze).and_then(done)
    }

    /// Makes a restored guest a machine of its own and, if asked to, lets its commands go on; its boot id from now on.
    /// What is refused was not done from there on, and the commands stand still as they did: it can be asked again.
    pub fn reidentify(&mut self, reidentify: &Reidentify) -> Result<String, Error> {
        match self.ask(&Request::Reidentify(Box::new(reidentify.clone())))? {
            Reply::Reidentified { boot_id } => Ok(boot_id),
            other => Err(unexpected(other)),
        }
    }

    /// The same over a stream that nobody has spoken on yet; the connection, too. The request goes with the offer of the handshake: a
    /// guest that has just been restored takes long for each time that it is waited for.
    pub fn reidentified(mut stream: S, reidentify: &Reidentify, limit: Duration) -> Result<(Self, String), Error> {
        stream.set_read_timeout(Some(limit)).map_err(wire::Error::Io)?;
        wire::send_offer(&mut stream, PROTOCOL, None)?;
        let mut connection = Self::resume(stream)?;
        send_request(&connection.writer, &Request::Reidentify(Box::new(reidentify.clone())))?;
        connection.version = Some(wire::await_answer(connection.reader.get_mut(), PROTOCOL).map_err(timed)?);
        match connection.answer()? {
            Reply::Reidentified { boot_id } => Ok((connection, boot_id)),
            other => Err(unexpected(other)),
        }
    }

    /// Sets the guest's time of day, in nanoseconds since 1970.
    pub fn set_clock(&mut self, clock_ns: u64) -> Result<(), Error> {
        self.ask(&Request::SetClock(clock_ns)).and_then(done)
    }

    /// Has the guest look for a function that has come to its PCI bus, or let go of one that is to leave; the function, where it is
    /// there afterwards. It takes as long as the guest's driver does.
    pub fn pci(&mut self, request: &PciRequest) -> Result<Option<PciDevice>, Error> {
        match self.ask(&Request::Pci(request.clone()))? {
            Reply::Pci(device) => Ok(device),
            other => Err(unexpected(other)),
        }
    }

    /// Leaves, and waits until the agent has left, too: nothing of this connection is under way in its machine then.
    ///
    /// # Errors
    /// It does not leave in the time that an answer may take, or says something instead.
    pub fn hang_up(mut self) -> Result<(), Error> {
        self.reader.get_ref().close_writing();
        match self.reader.read() {
            Ok(None) => Ok(()),
            Ok(Some(frame)) => Err(Error::UnexpectedFrame(frame.kind)),
            Err(error) => Err(error.into()),
        }
    }

    /// The stream itself, for somebody else who goes on where this connection stands.
    pub fn into_stream(self) -> S {
        self.reader.into_inner()
    }

    /// Goes on with a connection that has shaken hands and is idle. Nothing is known of its version but that it is spoken here.
    pub fn resume(stream: S) -> Result<Self, Error> {
        let second = stream.try_clone().map_err(wire::Error::Io)?;
        Ok(Self {
            reader: FrameReader::new(stream),
            writer: Arc::new(FrameWriter::new(second)),
            version: None,
        })
    }

    /// Ends the agent's machine; returns when the agent has begun. The machine may be gone before its answer is: then
    /// the connection's end is the answer.
    pub fn shutdown(&mut self, shutdown: Shutdown) -> Result<(), Error> {
        send_request(&self.writer, &Request::Shutdown(shutdown))?;
        match self.answer() {
            Err(Error::Closed(_) | Error::Wire(wire::Error::Io(_) | wire::Error::Truncated { .. })) => Ok(()),
            answer => answer.and_then(done),
        }
    }

    pub(crate) fn ask(&mut self, request: &Request) -> Result<Reply, Error> {
        send_request(&self.writer, request)?;
        self.answer()
    }

    pub(crate) fn answer(&mut self) -> Result<Reply, Error> {
        let frame = self
            .reader
            .read()
            .map_err(timed)?
            .ok_or(Error::Closed("a request was not answered yet"))?;
        match frame.kind {
            kind::CONTROL => match serde_json::from_slice(frame.payload).map_err(Error::Malformed)? {
                Reply::Refused { message } => Err(Error::Refused(message)),
                Reply::RequestFailed(failure) => Err(Error::RequestFailed(failure)),
                reply => Ok(reply),
            },
            other => Err(Error::UnexpectedFrame(other)),
        }
    }
}

pub(crate) fn send_request<S: Duplex>(writer: &FrameWriter<S>, request: &Request) -> Result<(), Error> {
    let json = serde_json::to_vec(request).map_err(Error::Malformed)?;
    Ok(writer.send(kind::CONTROL, 0, &json)?)
}

/// A read timeout that the caller set has passed.
pub(crate) fn timed(error: wire::Error) -> Error {
    match error {
        wire::Error::Io(error) if is_timeout(error.kind()) => Error::TimedOut,
        error => Error::Wire(error),
    }
}

fn is_timeout(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

pub(crate) fn done(reply: Reply) -> Result<(), Error> {
    match reply {
        Reply::Done => Ok(()),
        other => Err(unexpected(other)),
    }
}

pub(crate) fn unexpected(reply: Reply) -> Error {
    Error::Unexpected(Box::new(reply))
}
