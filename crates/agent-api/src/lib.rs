//! The contract between the agent inside a guest (or the lab host) and its client: messages as plain data, a client over
//! any stream, and the pump that joins a remote command to the local terminal. Does not know how an agent does its work.
#![allow(unsafe_code, reason = "sigaction(2) has no safe wrapper; all of it is in signals.rs")]

pub mod accelerator;
pub mod accelerator_state;
mod client;
mod copy;
mod debug;
mod duplex;
mod error;
mod exec;
mod failure;
mod files;
mod fs;
mod fs_client;
pub mod log;
pub mod message;
mod pci;
mod pump;
mod reidentify;
mod running;
mod signals;
mod terminal;
mod text;
mod vsock;

pub use client::Connection;
pub use copy::{Copied, Packing};
pub use duplex::Duplex;
pub use error::Error;
pub use fs::MAX_ENTRIES;
pub use fs_client::{Reading, Watching};
pub use message::{
    Accelerator, Address, AgentInfo, CudaLibraries, DiskName, Entry, EntryKind, Environment, ExecFailure, ExecRequest,
    ExitStatus, FailureKind, FileInfo, FsRequest, Gateway, GuestNetwork, Identity, Kept, KeptCommand, OutputStream,
    PROTOCOL, PciDevice, PciRequest, PowerAction, Prepare, Reidentify, RequestFailure, RequestFailureKind, RootDisk,
    Share, Shutdown, TmpfsMount, Tty, UnpackTarget, Upload, VSOCK_PORT, WatchEvent, WatchEventKind, Which, WinSize,
};
pub use pump::{FIRST_OUTPUT, LocalIo, pump};
pub use running::{Collected, Event, Input, Output, Running};
pub use signals::Signals;
pub use terminal::{RawMode, local_tty, window_size};
pub use text::OsText;
pub use vsock::ask_for_port;
pub use wire::Token;
