//! A command on a connection: started on it or attached to. What it writes and how it ends comes to whoever listens; input, signals and
//! the like go to it from others, who do not. Knows neither what a command is called nor who asked for it.

use std::time::Duration;

use agent_api::message::{DATA_CHUNK, Reply, Request, kind};
use agent_api::{ExecRequest, ExitStatus, Which, WinSize};
use bytes::Bytes;

use super::channel::{ANSWER_LIMIT, Channel, Frame, failed, unexpected};
use crate::error::Error;

/// How long a command may take no input while some waits for it.
const INPUT_LIMIT: Duration = Duration::from_secs(600);

/// What a command does.
#[derive(Debug)]
pub(crate) enum Happening {
    /// It wrote to standard output, or its terminal.
    Stdout(Bytes),
    /// It wrote to standard error.
    Stderr(Bytes),
    /// It ended; nothing follows.
    Exited(ExitStatus),
}

/// A command that is listened to, and that outlives this.
#[derive(Debug)]
pub(crate) struct Listener {
    channel: Channel,
    /// Its process id.
    pub(crate) pid: u32,
}

impl Listener {
    /// Starts one.
    pub(crate) async fn start(mut channel: Channel, request: ExecRequest) -> Result<Self, Error> {
        let reply = channel.ask(&Request::Exec(request)).await?;
        let pid = started(&reply)?;
        Ok(Self { channel, pid })
    }

    /// Listens to one that runs.
    pub(crate) async fn attach(mut channel: Channel, pid: u32) -> Result<Self, Error> {
        attach(&mut channel, pid, true).await?;
        Ok(Self { channel, pid })
    }

    /// Sends a signal by Linux's number.
    pub(crate) async fn signal(&mut self, number: i32) -> Result<(), Error> {
        self.channel.send(&Request::Signal { number }).await
    }

    /// Waits for what happens next. Nothing is lost if it is not waited for to the end.
    pub(crate) async fn next(&mut self) -> Result<Happening, Error> {
        loop {
            return match self.channel.next().await? {
                Frame::Bytes(kind::STDOUT, bytes) => Ok(Happening::Stdout(bytes)),
                Frame::Bytes(kind::STDERR, bytes) => Ok(Happening::Stderr(bytes)),
                Frame::Bytes(other, _) => Err(Error::Agent(format!(
                    "a frame of kind {other} came from a command that runs"
                ))),
                Frame::Reply(Reply::Exited(status)) => Ok(Happening::Exited(status)),
                // Nothing is sent from here, and streams end with the command.
                Frame::Reply(Reply::StdinTaken { .. } | Reply::StdinClosed | Reply::OutputClosed { .. }) => continue,
                Frame::Reply(other) => Err(unexpected(&failed(other)?)),
            };
        }
    }
}

/// A command that something is sent to. The agent takes input as fast as the command does, and says nothing meanwhile.
#[derive(Debug)]
pub(crate) struct Sender {
    channel: Channel,
    /// Its process id.
    pub(crate) pid: u32,
}

impl Sender {
    /// Attaches to one that runs.
    pub(crate) async fn attach(mut channel: Channel, pid: u32) -> Result<Self, Error> {
        attach(&mut channel, pid, false).await?;
        Ok(Self { channel, pid })
    }

    /// Sends input, and waits while the command takes none.
    pub(crate) async fn input(&mut self, bytes: &[u8]) -> Result<(), Error> {
        for part in bytes.chunks(DATA_CHUNK) {
            self.channel.send_bytes(kind::STDIN, part, INPUT_LIMIT).await?;
        }
        Ok(())
    }

    /// Sends a signal by Linux's number.
    pub(crate) async fn signal(&mut self, number: i32) -> Result<(), Error> {
        self.channel.send(&Request::Signal { number }).await
    }

    /// Says how large the terminal is now.
    pub(crate) async fn resize(&mut self, size: WinSize) -> Result<(), Error> {
        self.channel.send(&Request::Resize(size)).await
    }

    /// Says that there is no more input.
    pub(crate) async fn close_stdin(&mut self) -> Result<(), Error> {
        self.channel.send(&Request::CloseStdin).await
    }

    /// Leaves the command, once all that was sent is on its way to it.
    pub(crate) async fn detach(mut self) -> Result<(), Error> {
        self.channel.send(&Request::Detach).await?;
        match self.channel.frame(ANSWER_LIMIT).await? {
            Frame::Reply(reply) => match failed(reply)? {
                Reply::Done => Ok(()),
                other => Err(unexpected(&other)),
            },
            Frame::Bytes(kind, _) => Err(Error::Agent(format!(
                "a frame of kind {kind} came instead of an answer"
            ))),
        }
    }
}

async fn attach(channel: &mut Channel, pid: u32, output: bool) -> Result<u32, Error> {
    let command = Which::Pid(pid);
    match channel.ask(&Request::Attach { command, output }).await {
        Ok(reply) => started(&reply),
        Err(error) if error.is_missing() => Err(Error::NoProcess(format!("pid {pid}"))),
        Err(error) => Err(error),
    }
}

fn started(reply: &Reply) -> Result<u32, Error> {
    match reply {
        Reply::Started { pid } => Ok(*pid),
        other => Err(unexpected(other)),
    }
}
