//! Words that flags take, and what they mean elsewhere. The words say what they are; explained one by one they would make every verb's help long.

use clap::ValueEnum;

/// How much is logged on standard error; `Debug` includes the guest's console.
// The words say what they are; explained one by one they would make every verb's help long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogLevel {
    Off,
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

impl From<LogLevel> for log::LevelFilter {
    fn from(level: LogLevel) -> Self {
        match level {
            LogLevel::Off => Self::Off,
            LogLevel::Error => Self::Error,
            LogLevel::Warn => Self::Warn,
            LogLevel::Info => Self::Info,
            LogLevel::Debug => Self::Debug,
            LogLevel::Trace => Self::Trace,
        }
    }
}

/// How a sandbox reaches the world.
// The words say what they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Network {
    Auto,
    Node,
    None,
}

impl Network {
    /// What the daemon is asked for.
    pub(crate) fn mode(self) -> node_api::NetworkMode {
        match self {
            Self::Auto => node_api::NetworkMode::Auto,
            Self::Node => node_api::NetworkMode::Node,
            Self::None => node_api::NetworkMode::None,
        }
    }

    /// The word for it.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Node => "node",
            Self::None => "none",
        }
    }
}
