//! What is sent to a process that runs: input, signals, a terminal's size. Each request attaches to it, and waits until what it sends is
//! on its way. Knows nothing of what a process writes.

use std::time::Duration;

use bytes::Bytes;

use super::kept::{self, Note};
use super::launch;
use super::messages::{CloseStdin, Empty, Input, SendInput, SendSignal, StreamInput, Update, Which};
use crate::agent::{Happening, Sender};
use crate::connect::{Envelopes, json};
use crate::error::Error;
use crate::state::State;

/// How long a stream of input may say nothing; whoever sends it may itself wait for something.
pub(super) const IDLE: Duration = Duration::from_secs(3600);

/// `SIGKILL`.
const KILL: i32 = 9;

/// How long the end of a process that was killed is waited for.
const END_LIMIT: Duration = Duration::from_millis(500);

/// Sends input.
pub(super) async fn send(state: &State, send: SendInput) -> Result<Empty, Error> {
    let (mut command, note) = kept::sender(state, send.process.which()?).await?;
    let bytes = bytes(send.input, &note, command.pid)?;
    command.input(&bytes).await?;
    command.detach().await?;
    Ok(Empty {})
}

/// Sends what comes as a stream: first which process, then its input.
pub(super) async fn stream(state: &State, mut messages: Envelopes) -> Result<Empty, Error> {
    let mut process: Option<(Sender, Note)> = None;
    while let Some(message) = messages.next().await? {
        let message: StreamInput = json::read(&message.bytes)?;
        match (message.start, message.data, message.keepalive, &mut process) {
            (Some(start), None, None, None) => {
                process = Some(kept::sender(state, start.process.which()?).await?);
            }
            (None, Some(data), None, Some((command, note))) => {
                let bytes = bytes(data.input, note, command.pid)?;
                command.input(&bytes).await?;
            }
            (None, None, Some(_), _) => {}
            _ => {
                return Err(Error::Invalid(
                    "a stream of input is one `start` and then messages of `data` or `keepalive`".to_owned(),
                ));
            }
        }
    }
    if let Some((command, _)) = process {
        command.detach().await?;
    }
    Ok(Empty {})
}

/// The bytes, if they are of the kind that the process takes.
fn bytes(input: Input, note: &Note, pid: u32) -> Result<Bytes, Error> {
    let wrong = |text: &str| Err(Error::Precondition(format!("process {pid} {text}")));
    match (input.stdin, input.pty) {
        (Some(_), None) if note.pty => wrong("has a terminal: send `pty` instead of `stdin`"),
        (None, Some(_)) if !note.pty => wrong("has no terminal: send `stdin` instead of `pty`"),
        (Some(_), None) if note.no_stdin => wrong("was started without standard input"),
        (Some(bytes), None) | (None, Some(bytes)) => Ok(bytes.0),
        _ => Err(Error::Invalid("input is `stdin` or `pty`".to_owned())),
    }
}

/// Closes standard input; again is fine.
pub(super) async fn close(state: &State, close: CloseStdin) -> Result<Empty, Error> {
    let (mut command, note) = kept::sender(state, close.process.which()?).await?;
    if note.pty {
        return Err(Error::Precondition(format!(
            "process {} has a terminal, whose input has no end: send Ctrl-D (0x04) as `pty`",
            command.pid
        )));
    }
    command.close_stdin().await?;
    command.detach().await?;
    Ok(Empty {})
}

/// Sends a signal.
pub(super) async fn signal(state: &State, signal: SendSignal) -> Result<Empty, Error> {
    let number = match signal.signal {
        9 => KILL,
        15 => 15,
        other => {
            return Err(Error::Unimplemented(format!(
                "signal {other} cannot be sent; SIGNAL_SIGTERM and SIGNAL_SIGKILL can"
            )));
        }
    };
    if number == KILL {
        return kill(state, signal.process.which()?).await;
    }
    let (mut command, _) = kept::sender(state, signal.process.which()?).await?;
    command.signal(number).await?;
    command.detach().await?;
    Ok(Empty {})
}

/// Kills, and waits for the end for a moment: whoever has killed a process expects that it is not there any more.
async fn kill(state: &State, which: Which) -> Result<Empty, Error> {
    let (mut command, _) = kept::listen(state, which).await?;
    command.signal(KILL).await?;
    let ended = async { while !matches!(command.next().await, Ok(Happening::Exited(_)) | Err(_)) {} };
    // One that others hold up is killed all the same.
    let _ = tokio::time::timeout(END_LIMIT, ended).await;
    Ok(Empty {})
}

/// Says how large the terminal is now.
pub(super) async fn update(state: &State, update: Update) -> Result<Empty, Error> {
    let (mut command, note) = kept::sender(state, update.process.which()?).await?;
    let Some(pty) = &update.pty else { return Ok(Empty {}) };
    if !note.pty {
        return Err(Error::Precondition(format!(
            "process {} has no terminal that could have a size",
            command.pid
        )));
    }
    command.resize(launch::size(pty)?).await?;
    command.detach().await?;
    Ok(Empty {})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn input_is_of_the_kind_that_the_process_has() {
        let ask = |json: &str, pty: bool, no_stdin: bool| {
            let note = Note {
                pty,
                no_stdin,
                ..Note::default()
            };
            bytes(serde_json::from_str(json).unwrap(), &note, 7).map_err(|error| error.code().name())
        };
        let (stdin, pty) = (r#"{"stdin":"aGk="}"#, r#"{"pty":"aGk="}"#);
        assert_eq!(ask(stdin, false, false).unwrap(), "hi");
        assert_eq!(ask(pty, true, false).unwrap(), "hi");
        assert_eq!(ask(stdin, true, false), Err("failed_precondition"));
        assert_eq!(ask(pty, false, false), Err("failed_precondition"));
        assert_eq!(ask(stdin, false, true), Err("failed_precondition"));
        assert_eq!(ask("{}", false, false), Err("invalid_argument"));
        assert_eq!(ask(r#"{"pty":"","stdin":""}"#, false, false), Err("invalid_argument"));
    }
}
