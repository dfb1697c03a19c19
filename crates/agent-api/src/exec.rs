//! Commands: to be started, found again by others than who started them, and how they end.

use serde::{Deserialize, Serialize};

use crate::OsText;

/// A command to run.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecRequest {
    /// Program and arguments; a program without a slash is looked for in `PATH`.
    pub argv: Vec<OsText>,
    /// The whole environment, `NAME=value`. `PATH`, `HOME`, `USER` and, on a terminal, `TERM` are added if missing.
    pub env: Vec<OsText>,
    /// Working directory; empty is `/`.
    pub cwd: OsText,
    /// `name|uid[:group|gid]`; `None` is root.
    pub user: Option<String>,
    /// Run on a new terminal.
    pub tty: Option<Tty>,
    /// Whether standard input will be sent; if not, it is empty (and a terminal gets no keys).
    pub stdin: bool,
    /// This is the sandbox's own command, of which there is one: its output also goes to the log ([`crate::log`]), and the
    /// machine powers off when it has ended, or rather when its client has then closed the connection.
    #[serde(default)]
    pub main: bool,
    /// Nobody waits for it: it does not end with the connection, which is idle again after [`Reply::Started`].
    #[serde(default)]
    pub detached: bool,
    /// It does not end with the connection, and others can find it and attach to it while it runs. Since version 3.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept: Option<Kept>,
}

/// Commands that are kept at once, at most.
pub const MAX_KEPT: usize = 4096;

/// Bytes of the tags and notes of all that are kept, together.
pub const MAX_KEPT_TEXT: usize = 16 * 1024 * 1024;

/// An environment, `NAME=value`.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Environment(pub Vec<OsText>);

/// What is known of a command that goes on without the connection that started it ([`ExecRequest::kept`]).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// What it can be found by besides its process id; at most 4 KiB. Several may have the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// Whatever its client wants to see again in [`KeptCommand`]; at most 64 KiB.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub note: String,
    /// How long it may run, in milliseconds of the guest's monotonic clock; then it is ended by SIGKILL, whoever is attached to it.
    /// Without it, until it ends itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_ms: Option<u64>,
}

impl Kept {
    /// Bytes of a note.
    pub const MAX_NOTE: usize = 64 * 1024;

    /// Bytes of a tag.
    pub const MAX_TAG: usize = 4 * 1024;

    /// Bytes of tag and note.
    pub fn text_len(&self) -> usize {
        self.note.len() + self.tag.as_ref().map_or(0, String::len)
    }
}

/// Which of the commands that are kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Which {
    /// By its process id.
    Pid(u32),
    /// By its tag; the one that was started last, if there are several.
    Tag(String),
}

/// A command that is kept and runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptCommand {
    /// Its process id.
    pub pid: u32,
    /// What it was started with.
    pub kept: Kept,
}

/// A terminal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tty {
    /// Its size at the start.
    pub size: WinSize,
    /// `TERM`, if known.
    pub term: Option<String>,
}

/// Size of a terminal, in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WinSize {
    /// Lines.
    pub rows: u16,
    /// Columns.
    pub cols: u16,
}

/// Why a command did not start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct ExecFailure {
    /// The kind, which decides the exit code.
    pub kind: FailureKind,
    /// One sentence.
    pub message: String,
}

/// Kinds of failures to start a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// No such program.
    NotFound,
    /// There is a file, but it cannot be executed.
    NotExecutable,
    /// The user or the group does not exist.
    BadUser,
    /// The working directory cannot be entered.
    BadCwd,
    /// Anything else.
    Other,
}

impl FailureKind {
    /// The exit code that a shell, or podman, gives.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::NotFound => 127,
            Self::NotExecutable => 126,
            Self::BadUser | Self::BadCwd | Self::Other => 125,
        }
    }
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitStatus {
    /// It ended by itself with this code.
    Code(u8),
    /// A signal ended it.
    Signal(u8),
}

impl ExitStatus {
    /// The code for the local process to end with: a signal is 128 and its number.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Code(code) => code,
            Self::Signal(number) => number.saturating_add(128),
        }
    }
}
