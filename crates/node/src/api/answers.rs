//! Answers that are more than a value: with descriptors, or of several parts. Decides nothing.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use base::{ByteSize, Egress};
use node_api::{
    BriefUsage, Device, DeviceRequest, GuestDevice, MoveConfig, Reply, Request, RollbackConfig, SnapshotConfig,
};
use observe::Span;

use crate::Error;
use crate::api::scope::Caller;
use crate::node::Node;
use crate::operations::detach_for::OnDevices;
use crate::operations::stages::Started;
use crate::sandbox::entry::Entry;

/// How many sandboxes' use one packet has.
const USAGES: usize = 256;

/// It is done, or was refused.
pub(super) fn done(result: Result<(), Error>) -> Result<Reply, Error> {
    result.map(|()| Reply::Done)
}

/// A sandbox that may send elsewhere.
pub(super) fn restricted(node: &Node, entry: &Arc<Entry>, egress: &Egress) -> Result<Reply, Error> {
    Ok(Reply::Sandbox(Box::new(node.update_network(entry, egress)?)))
}

/// A sandbox whose memory is to be of another size, as it is after a moment.
pub(super) fn resized(node: &Arc<Node>, sandbox: &Arc<Entry>, memory: ByteSize) -> Result<Reply, Error> {
    let sandbox = node.update_memory(sandbox, memory)?;
    Ok(Reply::Sandbox(Box::new(sandbox)))
}

/// A snapshot that was taken.
pub(super) fn snapshot(node: &Arc<Node>, sandbox: &Arc<Entry>, asked: &SnapshotConfig) -> Result<Reply, Error> {
    let on = OnDevices::asked(asked.detach_devices);
    let made = node.make_snapshot(sandbox, asked.name.as_deref(), on)?;
    Ok(Reply::Snapshot(Box::new(made)))
}

/// A sandbox that went on from a snapshot.
pub(super) fn rolled_back(node: &Arc<Node>, sandbox: &Arc<Entry>, asked: &RollbackConfig) -> Result<Started, Error> {
    let on = OnDevices::asked(asked.detach_devices);
    node.rollback(sandbox, &asked.snapshot, on)
}

/// A sandbox that went on as another class.
pub(super) fn moved(node: &Arc<Node>, sandbox: &Arc<Entry>, asked: &MoveConfig) -> Result<Started, Error> {
    let on = OnDevices::asked(asked.detach_devices);
    node.move_to(sandbox, asked.class, on)
}

/// What was set aside; deleted, if `delete`.
pub(super) fn quarantine(node: &Node, delete: bool) -> Result<Vec<String>, Error> {
    match delete {
        true => node.store.prune_quarantine(host::tree::remove),
        false => node.store.quarantine(),
    }
}

/// The devices that a request was about, as they are after it.
pub(super) fn devices(node: &Node, asked: DeviceRequest) -> Result<Vec<Device>, Error> {
    let (devices, sandboxes) = (&node.devices, &node.sandboxes);
    let about = match asked {
        DeviceRequest::List => return node.list_devices(),
        DeviceRequest::Bind { address, terms } => {
            devices.bind(address, terms)?;
            vec![address]
        }
        DeviceRequest::Unbind { address } => {
            devices.unbind(address)?;
            // One that was pulled out is nobody's any more.
            let all = devices.list(sandboxes)?;
            return Ok(all.into_iter().filter(|device| device.address == address).collect());
        }
        DeviceRequest::MakeVfs { address, count } => devices.make_vfs(address, count)?,
        DeviceRequest::Attach {
            sandbox,
            mut addresses,
            cdi,
        } => {
            addresses.extend(devices.resolve(&cdi)?.functions);
            let given = node.attach_devices(&node.find(&sandbox)?, &addresses)?;
            let show = |guest: GuestDevice| {
                let device = devices.show(guest.host, sandboxes)?;
                Ok(Device {
                    guest: Some(guest),
                    ..device
                })
            };
            return given.into_iter().map(show).collect();
        }
        DeviceRequest::Detach {
            sandbox,
            mut addresses,
            cdi,
            force,
        } => {
            addresses.extend(devices.resolve(&cdi)?.functions);
            node.detach_devices(&node.find(&sandbox)?, &addresses, force)?;
            // One that was pulled out is nobody's any more.
            let all = devices.list(sandboxes)?;
            let is_asked = |device: &Device| addresses.contains(&device.address);
            return Ok(all.into_iter().filter(is_asked).collect());
        }
    };
    about
        .into_iter()
        .map(|address| devices.show(address, sandboxes))
        .collect()
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

/// A connection to a sandbox's agent.
pub(super) fn exec(node: &Node, entry: &Entry) -> Result<(Reply, Vec<OwnedFd>), Error> {
    // Before the connection: what is newer than that is another machine.
    let restarts = Some(node.inspect(entry).restarts);
    let (stream, version, command) = node.exec(entry)?;
    let agent = Reply::Agent {
        command: Box::new(command),
        restarts,
        version: Some(version),
    };
    Ok((agent, vec![stream]))
}

/// What all sandboxes use that are there for who asks, in pieces.
pub(super) fn usage(node: &Node, caller: &Caller) -> Vec<Vec<BriefUsage>> {
    let entries: Vec<Arc<Entry>> = node.entries().values().cloned().collect();
    let owned = |entry: &&Arc<Entry>| caller.owns(entry.lock().stored.sandbox.config.owner.as_deref());
    let all: Vec<_> = (entries.iter().filter(owned))
        .map(|entry| node.brief_usage(entry))
        .collect();
    all.chunks(USAGES).map(<[_]>::to_vec).collect()
}

/// The sandbox that goes on by a request which does not answer with it.
pub(super) fn goes_on(request: &Request, node: &Node, caller: &Caller) -> Option<Arc<Entry>> {
    match request {
        // One that is not there is refused by whoever carries it out.
        Request::Resume { sandbox } => caller.find(node, sandbox).ok(),
        _ => None,
    }
}

/// Keeps what a start was made of with what was started.
pub(super) fn keep_trace(node: &Node, resumed: Option<&Arc<Entry>>, reply: &Reply, spans: &[Span]) {
    match (reply, resumed) {
        // One that has ended already needs none.
        (Reply::Started { sandbox, .. }, _) => {
            if let Ok(entry) = node.find(&sandbox.id) {
                entry.keep_trace(spans);
            }
        }
        (_, Some(entry)) => entry.keep_trace(spans),
        _ => (),
    }
}

/// A sandbox with the files of its log and its console.
pub(super) fn logs(node: &Node, entry: &Entry) -> Result<(Reply, Vec<OwnedFd>), Error> {
    let paths = node.sandbox_paths(entry);
    let open = |path: &std::path::Path| File::open(path).map(OwnedFd::from).map_err(Error::file("open", path));
    let files = vec![open(&paths.log())?, open(&paths.console())?];
    Ok((Reply::Sandbox(Box::new(entry.stored().sandbox)), files))
}
