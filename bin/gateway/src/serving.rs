//! What a gateway that serves has written down of where it is reached, in its state directory, for `basalt-gateway env`. Knows no key.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use gateway::Domain;
use serde::{Deserialize, Serialize};

/// The file.
const FILE: &str = "serving.json";

/// How long one that was just started may take to begin to serve for the first time, when somebody is told that it is waited for, and how
/// often it is looked.
const SOON: Duration = Duration::from_secs(10);
const SAY: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(50);

/// Where it is reached, as of its last start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Serving {
    /// By HTTP, on this machine.
    pub(crate) plain: SocketAddr,
    /// By names below it, with the port that they are asked for at unless that is 443.
    pub(crate) domain: Option<Domain>,
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

/// Waits for a gateway that was started a moment ago, such as by the line before in a script, and has not served yet. What is there from
/// before is taken as it is.
pub(crate) fn wait(state: &Path) {
    wait_for(state, SOON, |text| eprintln!("basalt-gateway: {text}"));
}

fn wait_for(state: &Path, soon: Duration, say: impl Fn(&str)) {
    let path = state.join(FILE);
    let began = Instant::now();
    let mut is_said = false;
    // Where it cannot be looked, reading tells why.
    while path.try_exists().is_ok_and(|there| !there) && began.elapsed() < soon {
        if began.elapsed() >= SAY.min(soon) && !is_said {
            is_said = true;
            say(&format!(
                "no gateway serves with {} yet: waiting for it",
                state.display()
            ));
        }
        std::thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn serving() -> Serving {
        Serving {
            plain: "127.0.0.1:3000".parse().unwrap(),
            domain: Some("sb.localhost:3443".parse().unwrap()),
            ca: None,
            dns: None,
        }
    }

    #[test]
    fn a_gateway_that_is_being_started_is_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let state = directory.path().to_owned();
        let starts = std::thread::spawn(move || {
            std::thread::sleep(3 * PAUSE);
            serving().write(&state).unwrap();
        });
        wait_for(directory.path(), Duration::from_secs(60), |_| ());
        assert_eq!(Serving::read(directory.path()).unwrap(), serving());
        starts.join().unwrap();
    }

    #[test]
    fn one_that_does_not_come_is_not_waited_for_for_ever() {
        let directory = tempfile::tempdir().unwrap();
        wait_for(directory.path(), PAUSE, |_| ());
        let told = Serving::read(directory.path()).unwrap_err().to_string();
        assert!(told.contains("no gateway has served"), "{told}");
    }
}
