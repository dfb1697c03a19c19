//! Ports of this machine that lead into sandboxes in the lab: reserved here before a sandbox is made, and forwarded by
//! `basalt-lab` for as long as the sandbox has them. What has them is told by this program in the lab ([`crate::published`]).

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use agent_api::{Connection, ExitStatus};
use anyhow::{Context, Result, bail};
use node_api::Sandbox;
use serde::Deserialize;
use serde_json::json;

use super::{DURING, PROGRAM, far_request, program};
use crate::asked;
use observe::span::span;

/// Beyond what whoever reserves waits for the lab.
const PATIENCE: Duration = Duration::from_secs(60);

/// Whoever reserves may end just then, because there was nothing for it to do: then another is started.
const ATTEMPTS: u32 = 3;

/// Ports that are forwarded for as long as this lives. Those that a sandbox has then stay.
#[derive(Debug)]
pub(super) struct Reservation(#[expect(dead_code, reason = "the reservation is the connection")] UnixStream);

#[derive(Debug, Deserialize)]
struct Server {
    socket: PathBuf,
}

#[derive(Debug, Deserialize)]
struct Answer {
    error: Option<String>,
}

impl Reservation {
    /// Forwards all of these ports or none; nothing where there are none. `owner` is the sandbox that has had them before.
    ///
    /// # Errors
    /// One of them is taken, or this machine's programs do not answer.
    pub(super) fn new(owner: Option<&str>, published: &[String]) -> Result<Option<Self>> {
        if published.is_empty() {
            return Ok(None);
        }
        let _span = span("lab: ports reserved");
        let ports = published
            .iter()
            .map(|port| asked::forward(port))
            .collect::<Result<Vec<_>>>()?;
        let request = format!("{}\n", json!({ "owner": owner, "ports": ports }));
        for _ in 0..ATTEMPTS {
            let Some((stream, answer)) = ask(&server()?, &request)? else {
                continue;
            };
            let answer: Answer = serde_json::from_str(&answer)
                .with_context(|| format!("basalt-lab answered {answer:?}: use basalt and basalt-lab of one build"))?;
            return match answer.error {
                None => Ok(Some(Self(stream))),
                Some(error) => bail!(error),
            };
        }
        bail!("basalt-lab does not forward ports: its log is logs/ports.log in the lab's directory")
    }
}

/// The connection and the answer; nothing if whoever was there has gone.
fn ask(server: &Server, request: &str) -> Result<Option<(UnixStream, String)>> {
    let asked = || -> std::io::Result<(UnixStream, String)> {
        let stream = UnixStream::connect(&server.socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        (&stream).write_all(request.as_bytes())?;
        let mut answer = String::new();
        BufReader::new(&stream).read_line(&mut answer)?;
        Ok((stream, answer))
    };
    match asked() {
        Ok((_, answer)) if answer.is_empty() => Ok(None),
        Ok(got) => Ok(Some(got)),
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
            bail!("basalt-lab did not reserve the ports within {PATIENCE:?}: `basalt lab status` tells how the lab is")
        }
        Err(error) => {
            log::info!("the process that reserves ports has ended: {error}");
            Ok(None)
        }
    }
}

fn server() -> Result<Server> {
    let output = Command::new(program()?)
        .args(["forward", "--", PROGRAM, "published"])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("basalt-lab cannot be started")?;
    if !output.status.success() {
        bail!("the ports cannot be published: basalt-lab says why above");
    }
    serde_json::from_slice(&output.stdout).with_context(|| {
        format!(
            "`basalt-lab forward` printed {:?}: use basalt and basalt-lab of one build",
            String::from_utf8_lossy(&output.stdout)
        )
    })
}

/// Reserves the ports of sandboxes that are there, which may go on soon. One that is not known is for the verb to complain of.
pub(super) fn of_sandboxes(connection: &mut Connection<TcpStream>, wanted: &[String]) -> Result<Vec<Reservation>> {
    let words = ["--json", "ps", "--all"];
    let argv = [PROGRAM].iter().chain(&words).map(|word| (*word).to_owned());
    let listed = connection.exec(&far_request(argv.collect())).context(DURING)?;
    let listed = listed.collect().context(DURING)?;
    if listed.status != ExitStatus::Code(0) {
        bail!("{}", String::from_utf8_lossy(&listed.stderr).trim_end());
    }
    let sandboxes: Vec<Sandbox> = serde_json::from_slice(&listed.stdout).context("the lab's list of sandboxes")?;
    let named = |sandbox: &&Sandbox| {
        let is = |word: &String| *word == sandbox.name || (!word.is_empty() && sandbox.id.starts_with(word.as_str()));
        wanted.iter().any(is)
    };
    let mut reserved = Vec::new();
    for sandbox in sandboxes.iter().filter(named) {
        reserved.extend(Reservation::new(Some(&sandbox.name), &sandbox.config.ports)?);
    }
    Ok(reserved)
}
