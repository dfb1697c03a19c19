//! Commands that make a template of a sandbox: each is run through the sandbox's agent and waited for, and the last one may run on until a
//! check is content. What `basalt template build` and the gateway have in common. Does not know how a sandbox comes to be, how a connection
//! to its agent is had, nor where output is shown.
//!
//! ```text
//!  command ─► ... ─► last command ─┬─► waited for ────────────────────┬─► content
//!                                  └─► runs on ─► ready? ─► ready? ───┘
//! ```

mod ready;
mod step;

pub use ready::{PAUSE, wait_until_ready};
pub use step::{Ended, Step, WORDS};

use std::time::Duration;

use agent_api::{ExecFailure, ExitStatus};

/// Why a command did not do what it was to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It ended with another code than 0.
    #[error("`{command}` ended with code {code}")]
    Code {
        /// The command.
        command: String,
        /// The code.
        code: u8,
        /// The end of what it has said.
        words: String,
    },
    /// A signal ended it.
    #[error("`{command}` was ended by signal {number}")]
    Signal {
        /// The command.
        command: String,
        /// The signal's number.
        number: u8,
        /// The end of what it has said.
        words: String,
    },
    /// It could not be started.
    #[error("the sandbox cannot run commands by `sh -c`")]
    Start(#[source] ExecFailure),
    /// The sandbox is gone.
    #[error("the sandbox in which the template was to be built has ended, or does not answer any more")]
    Broken(#[source] agent_api::Error),
    /// What it said could not be shown.
    #[error("what a command says cannot be shown")]
    Shown(#[source] std::io::Error),
    /// No thread could be started for it.
    #[error("starting a thread")]
    Thread(#[source] std::io::Error),
    /// A bug.
    #[error("what reads a command's output has ended; that is a bug")]
    Lost,
    /// The check was not content in time.
    #[error("it was not ready within {limit:?}: `{check}` {said}")]
    NotReady {
        /// The check.
        check: String,
        /// The time.
        limit: Duration,
        /// How the check ended the last time.
        said: String,
    },
}

impl Error {
    /// Checks how a command ended.
    ///
    /// # Errors
    /// Not with 0.
    pub fn unless_succeeded(command: &str, ended: &Ended) -> Result<(), Self> {
        let (command, words) = (command.to_owned(), ended.words.clone());
        match ended.status {
            ExitStatus::Code(0) => Ok(()),
            ExitStatus::Code(code) => Err(Self::Code { command, code, words }),
            ExitStatus::Signal(number) => Err(Self::Signal { command, number, words }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::OnceLock;

    use agent::{Reaper, Server, ServerConfig};
    use agent_api::{ExecRequest, OsText};

    /// A connection to a real agent in this process.
    pub(crate) fn connect() -> UnixStream {
        static SERVER: OnceLock<Server> = OnceLock::new();
        let server = SERVER.get_or_init(|| Server::new(ServerConfig::in_place(), Reaper::start().unwrap()));
        let (mut near, far) = UnixStream::pair().unwrap();
        server.serve_in_thread(far);
        wire::offer(&mut near, agent_api::PROTOCOL, None).unwrap();
        near
    }

    pub(crate) fn script(text: &str) -> ExecRequest {
        ExecRequest {
            argv: ["sh", "-c", text].map(OsText::from).to_vec(),
            ..ExecRequest::default()
        }
    }
}
