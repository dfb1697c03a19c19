//! A client of the REST API that the E2B SDKs speak ([`Client`]), and of what answers for a sandbox at port 49983: processes ([`Start`],
//! [`Events`], [`Input`]) and files. For `basalt --host`, which speaks to a gateway by it.
//!
//! What answers is not trusted: answers are bounded, nothing is waited for without end, and what is told of errors has no control characters.
//! Knows no command line and no sandbox of this machine; certificates and the key are given to it.

mod client;
mod endpoints;
mod error;
mod files;
mod model;
mod process;
mod resolve;
mod stream;

pub use client::{Access, Client};
pub use error::Error;
pub use files::{Entry, FileKind};
pub use model::{
    ListedSandbox, LogEntry, Metric, NetworkRules, NewSandbox, Snapshot, State, Template, Volume, VolumeMount,
    nanoseconds,
};
pub use process::{End, Event, Events, Input, Piece, Signal, Start};
pub use ureq::tls::Certificate;
