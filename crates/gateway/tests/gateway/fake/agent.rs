//! The agent of a sandbox that has no machine: the real one, in this process.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;

use agent::{Reaper, Server, ServerConfig};

/// A connection to it that has shaken hands, and the version that is spoken there.
pub(crate) fn connect() -> (OwnedFd, u16) {
    static SERVER: OnceLock<Server> = OnceLock::new();
    let server = SERVER.get_or_init(|| Server::new(ServerConfig::in_place(), Reaper::start().unwrap()));
    let (mut near, far) = UnixStream::pair().unwrap();
    server.serve_in_thread(far);
    let version = wire::offer(&mut near, agent_api::PROTOCOL, None).unwrap();
    (near.into(), version)
}
