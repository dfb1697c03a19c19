//! Answers that are more than a value: with descriptors, or of several parts. Decides nothing.

use std::fs::File;
use std::os::fd::OwnedFd;

use node_api::Reply;

use crate::Error;
use crate::node::Node;
use crate::operations::stages::Started;

/// What was set aside; deleted, if `delete`.
pub(super) fn quarantine(node: &Node, delete: bool) -> Result<Vec<String>, Error> {
    match delete {
        true => node.store.prune_quarantine(crate::saved::tree::remove),
        false => node.store.quarantine(),
    }
}

/// A sandbox that runs, and the connection to its agent.
pub(super) fn started(started: Started) -> (Reply, Vec<OwnedFd>) {
    let (command, fds) = match started.command {
        Some((stream, command)) => (Some(Box::new(command)), vec![stream.into()]),
        None => (None, Vec::new()),
    };
    let sandbox = Box::new(started.sandbox);
    (Reply::Started { sandbox, command }, fds)
}

/// A sandbox with the files of its log and its console.
pub(super) fn logs(node: &Node, sandbox: &str) -> Result<(Reply, Vec<OwnedFd>), Error> {
    let entry = node.find(sandbox)?;
    let paths = node.sandbox_paths(&entry);
    let open = |path: &std::path::Path| File::open(path).map(OwnedFd::from).map_err(Error::file("open", path));
    let files = vec![open(&paths.log())?, open(&paths.console())?];
    Ok((Reply::Sandbox(Box::new(entry.stored().sandbox)), files))
}
