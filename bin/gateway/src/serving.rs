//! What a gateway that serves has written down of where it is reached, in its state directory, for `basalt-gateway env`. Knows no key.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

/// The file.
const FILE: &str = "serving.json";

/// Where it is reached, as of its last start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Serving {
    /// By HTTP, on this machine.
    pub(crate) plain: SocketAddr,
    /// By names below it, with the port that they are asked for at unless that is 443.
    pub(crate) domain: Option<String>,
    /// Where the certificate of its own authority is, if it has one.
    pub(crate) ca: Option<PathBuf>,
    /// Where it answers as a name server.
    pub(crate) dns: Option<SocketAddr>,
}

impl Serving {
    /// Writes it down.
    pub(crate) fn write(&self, state: &Path) -> Result<()> {
        let path = state.join(FILE);
        gateway::replace_file(&path, &serde_json::to_vec(self)?, 0o600)
            .with_context(|| format!("cannot write {}", path.display()))
    }

    /// What was written there last.
    pub(crate) fn read(state: &Path) -> Result<Self> {
        let path = state.join(FILE);
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => bail!(
                "no gateway has served with the state directory {}: start one, or give its directory by --state",
                state.display()
            ),
            Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
        };
        serde_json::from_slice(&text)
            .with_context(|| format!("{} is of another version: start the gateway again", path.display()))
    }
}
