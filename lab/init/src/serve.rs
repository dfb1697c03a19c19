//! Serves the agent protocol on the lab's network, for whoever knows the token. Knows no request; the agent's server does.

use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;

use agent::{Cgroups, Power, Reaper, RootMode, Server, ServerConfig};
use anyhow::{Context, Result};
use wire::Token;

use lab_init::contract::{AGENT_PORT, READY_LINE};

use crate::mounts;

/// Serves until a client asks for the end of the machine. From here on only the reaper may wait for children.
pub(crate) fn serve(token: Token, started_ns: u64) -> Result<()> {
    let reaper = Reaper::start()?;
    let config = ServerConfig {
        token: Some(token),
        root: RootMode::AsIs,
        // A command that loses its client is killed with all it started, virtual machines too.
        cgroups: Some(Cgroups::at(Path::new("/sys/fs/cgroup"))?),
        power: Some(Power::of_pid1(mounts::leave)?),
        log: None,
        clones: None,
        started_ns,
    };
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, AGENT_PORT))
        .with_context(|| format!("cannot listen on port {AGENT_PORT}"))?;
    crate::say(READY_LINE, "");
    Server::new(config, reaper).serve_listener(&listener)
}
