//! Processes of a sandbox, by Connect with JSON (`process.Process`): started, listened to, given input, signals and a terminal's size.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Read};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use ureq::http::Method;
use ureq::{BodyReader, SendBody};

use crate::client::{Own, Server};
use crate::error::plain;
use crate::stream::{self, Envelope};
use crate::{Access, Client, Error};

/// A quiet stream says so often that it is there, and may be silent for so long, as may an answer to what takes no time.
const PING: &str = "20";
const SILENCE: Duration = Duration::from_secs(70);

/// A process that is to be started.
#[derive(Clone, Debug, Default)]
pub struct Start {
    /// The program, and its arguments.
    pub argv: Vec<String>,
    /// Variables over those of the sandbox.
    pub envs: BTreeMap<String, String>,
    /// Where it begins.
    pub cwd: Option<String>,
    /// As whom.
    pub user: Option<String>,
    /// It has a terminal of so many columns and rows.
    pub terminal: Option<(u16, u16)>,
    /// It is given input; otherwise it finds the end of it.
    pub stdin: bool,
}

/// What becomes of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// It runs, under this number.
    Started(u32),
    /// It has written to standard output, or to its terminal.
    Output(Vec<u8>),
    /// It has written to standard error.
    Error(Vec<u8>),
    /// It has ended, and nothing comes any more.
    Ended(End),
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// By itself.
    Code(i32),
    /// By a signal.
    Signal(u8),
}

/// A signal that the API has a word for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Signal {
    /// `SIGTERM`.
    #[serde(rename = "SIGNAL_SIGTERM")]
    Term,
    /// `SIGKILL`.
    #[serde(rename = "SIGNAL_SIGKILL")]
    Kill,
}

/// What there is to send as input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Bytes.
    Bytes(Vec<u8>),
    /// Nothing for a while: the stream goes on.
    Quiet,
    /// No more of this stream.
    End,
}

/// Where input comes from: each call waits for the next piece.
pub type Input<'i> = dyn FnMut() -> io::Result<Piece> + 'i;

#[derive(Deserialize)]
struct Streamed {
    #[serde(default)]
    event: Told,
}

/// One of the four.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Told {
    start: Option<Pid>,
    data: Option<Data>,
    end: Option<Ended>,
}

#[derive(Deserialize)]
struct Pid {
    pid: u32,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Data {
    stdout: Option<String>,
    stderr: Option<String>,
    pty: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Ended {
    exit_code: i32,
    exited: bool,
    status: String,
}

/// The last message of a stream.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Last {
    error: Option<Complaint>,
}

#[derive(Deserialize)]
struct Complaint {
    #[serde(default)]
    code: String,
    #[serde(default)]
    message: String,
}

/// What becomes of a process, as it comes.
pub struct Events {
    server: Server,
    body: BodyReader<'static>,
    pending: VecDeque<Event>,
}

impl std::fmt::Debug for Events {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Events").finish_non_exhaustive()
    }
}

impl Events {
    /// The next event; waits for it.
    ///
    /// # Errors
    /// The stream has broken off, or the call has failed.
    pub fn wait(&mut self) -> Result<Event, Error> {
        loop {
            if let Some(event) = self.pending.pop_front() {
                return Ok(event);
            }
            let envelope = stream::next(&mut self.body).map_err(|error| self.server.broken(&broken(&error)))?;
            let message = match envelope {
                Envelope::Message(message) => message,
                Envelope::End(message) => return Err(self.ended(&message)),
            };
            let told: Streamed = self.parsed(&message)?;
            self.take(told.event)?;
        }
    }

    fn parsed<T: for<'de> Deserialize<'de>>(&self, message: &[u8]) -> Result<T, Error> {
        serde_json::from_slice(message).map_err(|error| self.server.no_gateway(plain(&error.to_string())))
    }

    fn take(&mut self, told: Told) -> Result<(), Error> {
        let bytes = |text: String| {
            STANDARD
                .decode(text)
                .map_err(|_| self.server.no_gateway("output that is no base64"))
        };
        if let Some(Pid { pid }) = told.start {
            self.pending.push_back(Event::Started(pid));
        }
        if let Some(data) = told.data {
            for text in [data.stdout, data.pty].into_iter().flatten() {
                self.pending.push_back(Event::Output(bytes(text)?));
            }
            if let Some(text) = data.stderr {
                self.pending.push_back(Event::Error(bytes(text)?));
            }
        }
        if let Some(end) = told.end {
            self.pending.push_back(Event::Ended(how_ended(&end)));
        }
        Ok(())
    }

    /// The stream's last message has come, and no process's end before it.
    fn ended(&self, message: &[u8]) -> Error {
        let last = self.parsed::<Last>(message);
        match last.map(|last| last.error) {
            Ok(Some(error)) => Error::Call {
                code: plain(&error.code),
                message: plain(&error.message),
            },
            Ok(None) => self.server.no_gateway("a process without an end"),
            Err(error) => error,
        }
    }
}

fn broken(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => "it ended in the midst of a stream".to_owned(),
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => format!("nothing has come for {} s", SILENCE.as_secs()),
        _ => error.to_string(),
    }
}

/// Signals have the names that Go's `syscall.Signal` has, which are all that a server says.
fn how_ended(end: &Ended) -> End {
    let signal = end.status.strip_prefix("signal: ").filter(|_| !end.exited);
    let number = signal.and_then(|name| {
        // A dump of memory is told behind it.
        let name = name.trim_end_matches(" (core dumped)");
        let known = SIGNALS
            .iter()
            .find(|(_, known)| *known == name)
            .map(|(number, _)| *number);
        known.or_else(|| name.strip_prefix("signal ")?.parse().ok())
    });
    match number {
        Some(number) => End::Signal(number),
        None => End::Code(end.exit_code),
    }
}

const SIGNALS: [(u8, &str); 15] = [
    (1, "hangup"),
    (2, "interrupt"),
    (3, "quit"),
    (4, "illegal instruction"),
    (5, "trace/breakpoint trap"),
    (6, "aborted"),
    (7, "bus error"),
    (8, "floating point exception"),
    (9, "killed"),
    (10, "user defined signal 1"),
    (11, "segmentation fault"),
    (12, "user defined signal 2"),
    (13, "broken pipe"),
    (14, "alarm clock"),
    (15, "terminated"),
];

/// Input as the body of a request: one message that says whose, and then its pieces.
struct Fed<'i, 'f> {
    input: &'f mut Input<'i>,
    kind: &'static str,
    ready: io::Cursor<Vec<u8>>,
}

impl Read for Fed<'_, '_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let got = self.ready.read(buffer)?;
            if got > 0 || buffer.is_empty() {
                return Ok(got);
            }
            let message = match (self.input)()? {
                Piece::Bytes(bytes) => json!({ "data": { "input": { self.kind: STANDARD.encode(bytes) } } }),
                Piece::Quiet => json!({ "keepalive": {} }),
                Piece::End => return Ok(0),
            };
            self.ready = io::Cursor::new(stream::wrap(message.to_string().as_bytes()));
        }
    }
}

fn selector(pid: u32) -> Value {
    json!({ "pid": pid })
}

impl Client {
    /// Starts a process. It goes on where its events are not read any more.
    ///
    /// # Errors
    /// It could not be asked for; that it was not started is told by its first event.
    pub fn start(&self, to: &Access, start: &Start) -> Result<Events, Error> {
        let (cmd, args) = start
            .argv
            .split_first()
            .map_or(("", &[][..]), |(cmd, args)| (cmd.as_str(), args));
        let mut message = json!({ "process": { "cmd": cmd, "args": args, "envs": start.envs } });
        if let Some(cwd) = &start.cwd {
            message["process"]["cwd"] = json!(cwd);
        }
        match start.terminal {
            Some((cols, rows)) => message["pty"] = json!({ "size": { "cols": cols, "rows": rows } }),
            None => message["stdin"] = json!(start.stdin),
        }
        let request = self
            .to_sandbox(to, Method::POST, "/process.Process/Start", start.user.as_deref())
            .header("Content-Type", "application/connect+json")
            .header("Connect-Protocol-Version", "1")
            .header("Keepalive-Ping-Interval", PING);
        let body = SendBody::from_owned_reader(io::Cursor::new(stream::wrap(message.to_string().as_bytes())));
        let request = request
            .body(body)
            .map_err(|_| self.server.no_gateway("a token that is none"))?;
        let body = self.send(request, Some(SILENCE))?.into_body();
        Ok(Events {
            server: self.server.clone(),
            body: body.into_with_config().limit(u64::MAX).reader(),
            pending: VecDeque::new(),
        })
    }

    /// Sends input to a process as it comes, until there is no more; `terminal` says whether the process has one.
    ///
    /// # Errors
    /// It could not be read here, or not be sent: the process may have ended.
    pub fn feed(&self, to: &Access, pid: u32, terminal: bool, input: &mut Input<'_>) -> Result<(), Error> {
        let begin = json!({ "start": { "process": selector(pid) } });
        let mut fed = Own(Fed {
            input,
            kind: if terminal { "pty" } else { "stdin" },
            ready: io::Cursor::new(stream::wrap(begin.to_string().as_bytes())),
        });
        let request = self
            .to_sandbox(to, Method::POST, "/process.Process/StreamInput", None)
            .header("Content-Type", "application/connect+json")
            .header("Connect-Protocol-Version", "1");
        let request = request.body(SendBody::from_reader(&mut fed));
        let request = request.map_err(|_| self.server.no_gateway("a token that is none"))?;
        // A process reads when it likes; that the server is gone shows where its events are read.
        let response = self.send(request, None)?;
        let mut body = response.into_body().into_with_config().limit(1 << 20).reader();
        loop {
            let envelope = stream::next(&mut body).map_err(|error| self.server.broken(&broken(&error)))?;
            let Envelope::End(message) = envelope else { continue };
            let last: Last =
                serde_json::from_slice(&message).map_err(|error| self.server.no_gateway(plain(&error.to_string())))?;
            return match last.error {
                None => Ok(()),
                Some(error) => Err(Error::Call {
                    code: plain(&error.code),
                    message: plain(&error.message),
                }),
            };
        }
    }

    /// Closes a process's input.
    ///
    /// # Errors
    /// It is not there any more, or has a terminal.
    pub fn close_input(&self, to: &Access, pid: u32) -> Result<(), Error> {
        self.call(
            to,
            "process.Process/CloseStdin",
            None,
            &json!({ "process": selector(pid) }),
        )
        .map(drop)
    }

    /// Sends a process a signal.
    ///
    /// # Errors
    /// It is not there any more.
    pub fn signal(&self, to: &Access, pid: u32, signal: Signal) -> Result<(), Error> {
        let message = json!({ "process": selector(pid), "signal": signal });
        self.call(to, "process.Process/SendSignal", None, &message).map(drop)
    }

    /// Says how many columns and rows a process's terminal has now.
    ///
    /// # Errors
    /// It is not there any more, or has no terminal.
    pub fn resize(&self, to: &Access, pid: u32, (cols, rows): (u16, u16)) -> Result<(), Error> {
        let message = json!({ "process": selector(pid), "pty": { "size": { "cols": cols, "rows": rows } } });
        self.call(to, "process.Process/Update", None, &message).map(drop)
    }

    /// A call of one message that is answered by one.
    pub(crate) fn call(&self, to: &Access, method: &str, user: Option<&str>, message: &Value) -> Result<Value, Error> {
        let request = self
            .to_sandbox(to, Method::POST, &format!("/{method}"), user)
            .header("Content-Type", "application/json")
            .header("Connect-Protocol-Version", "1");
        let body = SendBody::from_owned_reader(io::Cursor::new(message.to_string().into_bytes()));
        let request = request
            .body(body)
            .map_err(|_| self.server.no_gateway("a token that is none"))?;
        self.read(self.send(request, Some(SILENCE))?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_read_as_they_are_told() {
        let end = |text: &str| how_ended(&serde_json::from_str(text).unwrap());
        assert_eq!(end(r#"{"exited":true,"status":"exit status 0"}"#), End::Code(0));
        assert_eq!(
            end(r#"{"exitCode":3,"exited":true,"status":"exit status 3"}"#),
            End::Code(3)
        );
        assert_eq!(end(r#"{"exitCode":-1,"status":"signal: killed"}"#), End::Signal(9));
        assert_eq!(end(r#"{"exitCode":-1,"status":"signal: signal 34"}"#), End::Signal(34));
        assert_eq!(
            end(r#"{"exitCode":-1,"status":"signal: aborted (core dumped)"}"#),
            End::Signal(6)
        );
        assert_eq!(end(r#"{"exitCode":-1,"status":"signal: unheard of"}"#), End::Code(-1));
    }

    #[test]
    fn input_is_one_message_that_selects_and_then_its_pieces() {
        let mut pieces = VecDeque::from([Piece::Bytes(b"hi".to_vec()), Piece::Quiet, Piece::End]);
        let mut input = || Ok(pieces.pop_front().unwrap());
        let mut fed = Fed {
            input: &mut input,
            kind: "stdin",
            ready: io::Cursor::new(stream::wrap(b"first")),
        };
        let mut sent = Vec::new();
        fed.read_to_end(&mut sent).unwrap();
        let expected = [
            stream::wrap(b"first"),
            stream::wrap(br#"{"data":{"input":{"stdin":"aGk="}}}"#),
            stream::wrap(br#"{"keepalive":{}}"#),
        ];
        assert_eq!(sent, expected.concat());
    }
}
