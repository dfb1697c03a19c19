//! PID 1 of a guest: mounts, reaps, runs commands, powers off. The parts that another PID 1 can use (the lab host's): the
//! reaper and the server of `agent-api`'s protocol. Knows nothing of the host: no image, no VMM.
#![allow(
    unsafe_code,
    reason = "fork, waitid, vsock sockets and a few ioctls have no safe wrapper"
)]

mod cgroup;
mod clones;
mod copy;
mod envs;
mod error;
mod exec;
mod files;
mod freezer;
mod fs;
pub mod guest;
mod hooks;
mod identity;
mod info;
mod journal;
mod kept;
mod libraries;
mod lookup;
mod outlet;
mod pci;
mod ports;
mod power;
mod reaper;
mod server;
mod session;
mod spawn;
mod stdin;
mod stream;

use std::fmt;
use std::io::Write;

use agent_api::Duplex;
use agent_api::message::{Reply, kind};
use wire::FrameWriter;

pub use cgroup::Cgroups;
pub use clones::{Clones, MakeOwn, Reidentified, SetClock, Settle};
pub use error::Error;
pub use info::boottime_ns;
pub use power::{Power, fatal};
pub use reaper::{Child, Reaper, Target};
pub use server::{Listener, MakeRoot, OpenLog, RootMode, Server, ServerConfig};

/// Stack of a thread. None recurses deeply; an agent's memory counts in every guest.
pub(crate) const STACK_SIZE: usize = 128 * 1024;

/// One line on standard error, which is the console of a PID 1.
pub(crate) fn say(line: fmt::Arguments<'_>) {
    // A console that does not work cannot be told so.
    drop(writeln!(std::io::stderr(), "basalt-agent: {line}"));
}

/// Sends a reply.
pub(crate) fn send_reply<S: Duplex>(writer: &FrameWriter<S>, reply: &Reply) -> Result<(), Error> {
    let json = serde_json::to_vec(reply).map_err(Error::Malformed)?;
    Ok(writer.send(kind::CONTROL, 0, &json)?)
}
