//! How much of the daemon askers can take: connections at once, and descriptors for each request. Knows requests, and not how they are
//! carried out.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use node_api::{ApiError, ErrorKind, MoveConfig, Packet, Request, RollbackConfig};
use wire::packet::{PacketError, PacketSocket};

use crate::Error;
use crate::node::Node;
use crate::resources::budget::{Lease, TO_ASK, TO_START, Wish};

/// Descriptors for each volume of a machine that is started: the directory, what is mounted of it, the way to who serves it.
const OF_VOLUME: u64 = 3;

/// How many are connected.
#[derive(Clone, Debug, Default)]
pub(super) struct Seats(Arc<AtomicU64>);

/// One of them, until it is dropped.
#[derive(Debug)]
pub(super) struct Seat(Arc<AtomicU64>);

impl Seats {
    /// `None` where `most` are connected already.
    pub(super) fn take(&self, most: u64) -> Option<Seat> {
        let seat = Seat(Arc::clone(&self.0));
        // Dropping the seat takes it back.
        (self.0.fetch_add(1, Ordering::SeqCst) < most).then_some(seat)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Tells somebody for whom there is no room why, and hangs up. Nobody waits for that: a new connection takes one packet.
pub(super) fn turn_away(socket: OwnedFd, connected: u64) -> Result<(), PacketError> {
    let refusal = ApiError {
        kind: ErrorKind::Host,
        message: format!(
            "the daemon has {connected} connections, which is all that it takes at once: ask again when others have ended, or raise its limit of \
             open files (LimitNOFILE= of basaltd.service, `ulimit -n`)"
        ),
        exit_code: 125,
    };
    let bytes = serde_json::to_vec(&Packet::Reply(Err(refusal))).map_err(|_| PacketError::Closed)?;
    PacketSocket::from_fd(socket).send(&bytes, &[])
}

/// Takes the descriptors that a request needs, until it is answered; `None` where it needs none, or may take any time.
pub(super) fn lease(node: &Node, request: &Request) -> Result<Option<Lease>, Error> {
    let descriptors = match needed(node, request) {
        0 => return Ok(None),
        descriptors => descriptors,
    };
    let patience = node.config.limits.answer;
    Ok(Some(node.budget.lease(&Wish::request(), descriptors, patience)?))
}

fn needed(node: &Node, request: &Request) -> u64 {
    match request {
        Request::Run(config) => to_start(config.volumes.len()),
        Request::Clone(config) => to_start(config.volumes.len()),
        Request::Start { sandbox }
        | Request::Restart { sandbox, .. }
        | Request::Resume { sandbox }
        | Request::Rollback(RollbackConfig { sandbox, .. })
        | Request::Move(MoveConfig { sandbox, .. }) => {
            // One that is not there is refused elsewhere.
            let entry = node.find(sandbox);
            to_start(entry.map_or(0, |entry| entry.lock().stored.sandbox.config.volumes.len()))
        }
        Request::MakeSnapshot(_)
        | Request::Suspend { .. }
        | Request::BuildTemplate(_)
        | Request::KeepTemplate
        | Request::OpenFiles { .. } => TO_START,
        Request::Info
        | Request::List(_)
        | Request::Inspect { .. }
        | Request::Wait { .. }
        | Request::Events
        | Request::Quit { .. } => 0,
        _ => TO_ASK,
    }
}

fn to_start(volumes: usize) -> u64 {
    TO_START + OF_VOLUME * u64::try_from(volumes).unwrap_or(u64::from(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_so_many_seats_and_each_comes_back() {
        let seats = Seats::default();
        let taken: Vec<Seat> = (0..3).filter_map(|_| seats.take(2)).collect();
        assert_eq!(taken.len(), 2);
        assert!(seats.take(2).is_none());
        drop(taken);
        assert!(seats.take(1).is_some());
        assert_eq!(seats.0.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn who_is_turned_away_is_told_why() {
        // Whether it has asked by then or not.
        for asks_first in [true, false] {
            let (near, far) = PacketSocket::pair().unwrap();
            let mut client = node_api::Client::new(near);
            if asks_first {
                client.send(Request::Info).unwrap();
            }
            turn_away(far.into(), 7).unwrap();
            let told = match asks_first {
                true => client.receive(&mut |_| ()).map(drop),
                false => client.ask(Request::Info).map(drop),
            };
            let told = told.unwrap_err().to_string();
            assert!(told.contains("7 connections"), "{asks_first}: {told}");
        }
    }
}
