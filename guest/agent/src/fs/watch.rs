//! The dialogue of a watch: one thread waits for the directory and for the client. While the client takes nothing, the kernel queues what
//! happens, and says so when that becomes too much.

use std::os::fd::BorrowedFd;
use std::path::Path;

use agent_api::message::{Reply, Request, kind};
use agent_api::{Duplex, WatchEvent};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use wire::{FrameReader, FrameWriter};

use super::tree::Tree;
use super::{MESSAGE_BYTES, fail};
use crate::{Error, send_reply};

/// Tells what happens in a directory until the client has enough. An error is returned only for the connection itself.
pub(super) fn run<S: Duplex>(
    root: &Path,
    recursive: bool,
    reader: &mut FrameReader<S>,
    writer: &FrameWriter<S>,
) -> Result<(), Error> {
    let mut tree = match Tree::open(root, recursive) {
        Ok(tree) => tree,
        Err(failure) => return fail(writer, failure),
    };
    send_reply(writer, &Reply::Done)?;
    let mut batch = Batch {
        writer,
        events: Vec::new(),
        size: 0,
    };
    loop {
        let ready = wait(tree.fd(), reader.get_ref().as_fd(), tree.expects_old())?;
        if ready.events {
            let taken = tree.take(&mut |event| batch.push(event))?;
            batch.send()?;
            if let Err(failure) = taken {
                return fail(writer, failure);
            }
        } else {
            tree.has_caught_up();
        }
        if ready.client && is_over(reader, writer)? {
            return Ok(());
        }
    }
}

/// Whether the client has ended it, or has left.
fn is_over<S: Duplex>(reader: &mut FrameReader<S>, writer: &FrameWriter<S>) -> Result<bool, Error> {
    let Some(frame) = reader.read()? else {
        return Ok(true);
    };
    if frame.kind != kind::CONTROL {
        return Err(Error::UnexpectedFrame {
            kind: frame.kind,
            length: frame.payload.len(),
        });
    }
    match serde_json::from_slice(frame.payload).map_err(Error::Malformed)? {
        Request::Detach => send_reply(writer, &Reply::Done).map(|()| true),
        _ => {
            let message = "a directory is watched on this connection; use another one".to_owned();
            send_reply(writer, &Reply::Refused { message }).map(|()| false)
        }
    }
}

/// Events that are on their way, in as few messages as can be.
struct Batch<'w, S: Duplex> {
    writer: &'w FrameWriter<S>,
    events: Vec<WatchEvent>,
    /// As JSON, at most.
    size: usize,
}

impl<S: Duplex> Batch<'_, S> {
    fn push(&mut self, event: WatchEvent) -> Result<(), Error> {
        self.size += 64 + 6 * event.name.as_bytes().len();
        self.events.push(event);
        if self.size < MESSAGE_BYTES {
            return Ok(());
        }
        self.send()
    }

    fn send(&mut self) -> Result<(), Error> {
        self.size = 0;
        match std::mem::take(&mut self.events) {
            events if events.is_empty() => Ok(()),
            events => send_reply(self.writer, &Reply::Watched(events)),
        }
    }
}

/// What poll(2) found.
struct Ready {
    events: bool,
    client: bool,
}

/// Waits for either; with `at_once` only looks.
fn wait(events: BorrowedFd<'_>, client: BorrowedFd<'_>, at_once: bool) -> Result<Ready, Error> {
    let mut fds = [
        PollFd::from_borrowed_fd(events, PollFlags::IN),
        PollFd::from_borrowed_fd(client, PollFlags::IN),
    ];
    let nothing = Timespec { tv_sec: 0, tv_nsec: 0 };
    match poll(&mut fds, at_once.then_some(&nothing)) {
        Ok(_) => {}
        Err(Errno::INTR) => {
            // Nothing is ready: what was found may still have events.
            return Ok(Ready {
                events: true,
                client: false,
            });
        }
        Err(error) => return Err(Error::system("waiting for what happens in a directory")(error)),
    }
    let [events, client] = fds.map(|fd| !fd.revents().is_empty());
    Ok(Ready { events, client })
}
