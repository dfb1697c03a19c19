//! Streams into the lab: this program there, joined to a socket here. For verbs whose files are on this side.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::thread;

use agent_api::{Connection, Event, ExecRequest, ExitStatus, Running};
use anyhow::{Context, Result, bail};

use super::images::send_image;
use super::{DURING, Lab, PROGRAM, bring_up, connect, far_request, ready};
use crate::images::Opened;
use crate::output::Output;

/// The lab, for verbs whose files are on this side.
#[derive(Debug)]
pub(crate) struct Reached(Lab);

impl Reached {
    /// The one that is up. A lab that is down has no sandboxes.
    pub(crate) fn up() -> Result<Self> {
        match ready()? {
            Some(lab) => Ok(Self(lab)),
            None => bail!("the lab is down, so it has no sandboxes: `basalt run` brings it up"),
        }
    }

    /// The same, brought up if it is down.
    pub(crate) fn bring_up(output: &Output) -> Result<Self> {
        bring_up(output).map(Self)
    }

    /// Starts this program there with these words.
    pub(crate) fn start(&self, words: &[&str]) -> Result<Far> {
        let mut connection = connect(&self.0)?;
        connection.set_read_timeout(None)?;
        let words = [PROGRAM].iter().chain(words).map(|word| (*word).to_owned());
        let request = far_request(words.collect());
        let (ours, theirs) = UnixStream::pair().context("making a socket")?;
        let carry = move || carry(&mut connection, &request, theirs);
        let carrier = thread::Builder::new().name("far".into()).spawn(carry);
        Ok(Far {
            stream: ours,
            carrier: carrier.context("starting a thread")?,
        })
    }

    /// Sends it an image that it lacks.
    pub(crate) fn send_image(&self, image: &Opened, output: &Output) -> Result<()> {
        send_image(&mut connect(&self.0)?, image, output)
    }
}

/// This program in the lab; its standard input and output are a stream here.
#[derive(Debug)]
pub(crate) struct Far {
    pub(crate) stream: UnixStream,
    carrier: thread::JoinHandle<Result<ExitStatus>>,
}

impl Far {
    /// Waits for its end, which must be a good one; it has said itself what was wrong.
    pub(crate) fn end(self) -> Result<()> {
        drop(self.stream);
        match self.carrier.join() {
            Ok(Ok(ExitStatus::Code(0))) => Ok(()),
            Ok(Ok(_)) => bail!("basalt in the lab has failed, as it says above"),
            Ok(Err(error)) => Err(error).context(DURING),
            Err(_) => bail!(DURING),
        }
    }
}

/// A connection to the agent of a sandbox in the lab.
pub(super) fn agent(lab: &Lab, sandbox: &str) -> Result<UnixStream> {
    let mut connection = connect(lab)?;
    connection.set_read_timeout(None)?;
    let request = far_request(vec![PROGRAM.into(), "agent-stream".into(), "--".into(), sandbox.into()]);
    let (ours, theirs) = UnixStream::pair().context("making a socket")?;
    let carry = move || {
        if let Err(error) = carry(&mut connection, &request, theirs) {
            log::info!("the stream to the sandbox's agent has ended: {error:#}");
        }
    };
    thread::Builder::new()
        .name("agent".into())
        .spawn(carry)
        .context("starting a thread")?;
    Ok(ours)
}

/// Joins `theirs` to a program in the lab; what it says is said here.
fn carry(connection: &mut Connection<TcpStream>, request: &ExecRequest, theirs: UnixStream) -> Result<ExitStatus> {
    let Running { mut output, input, .. } = connection.exec(&ExecRequest {
        stdin: true,
        ..request.clone()
    })?;
    let (mut from, mut to) = (theirs.try_clone()?, &theirs);
    let mut feed = move || -> Result<()> {
        let mut buffer = vec![0; 64 << 10];
        loop {
            match from.read(&mut buffer)? {
                0 => return Ok(input.close()?),
                got => input.write(buffer.get(..got).unwrap_or_default())?,
            }
        }
    };
    thread::Builder::new().name("agent-input".into()).spawn(move || {
        if let Err(error) = feed() {
            log::info!("nothing more is sent to the sandbox's agent: {error:#}");
        }
    })?;
    loop {
        match output.next()? {
            Event::Stdout(bytes) => to.write_all(bytes)?,
            Event::Stderr(bytes) => io::stderr().lock().write_all(bytes)?,
            Event::Closed(_) => (),
            Event::Exited(status) => {
                theirs.shutdown(std::net::Shutdown::Both)?;
                return Ok(status);
            }
        }
    }
}
