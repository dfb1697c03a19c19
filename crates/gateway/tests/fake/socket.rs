//! The fake node at a socket, as `basaltd` has one: packets with descriptors.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::thread;

use node_api::Packet;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use wire::packet::PacketSocket;

use super::FakeNode;

/// Serves at this path for as long as the process lives; there must be nothing there yet.
pub fn serve(node: Arc<FakeNode>, path: &Path) -> io::Result<()> {
    let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let directory = node_api::client::directory(path)?;
    rustix::net::bind(&listener, &node_api::client::address(path, &directory)?)?;
    rustix::net::listen(&listener, 64)?;
    thread::spawn(move || accept(&node, &listener));
    Ok(())
}

fn accept(node: &Arc<FakeNode>, listener: &OwnedFd) {
    while let Ok(client) = rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
        let node = Arc::clone(node);
        thread::spawn(move || answer(&node, &PacketSocket::from_fd(client)));
    }
}

fn answer(node: &FakeNode, socket: &PacketSocket) {
    while let Ok((bytes, _)) = socket.receive() {
        let Ok(Packet::Request { request, tenant, .. }) = serde_json::from_slice(&bytes) else {
            return;
        };
        let (items, reply, fds) = node.answer(tenant.as_deref(), request);
        for item in items {
            if send(socket, &Packet::Item(item), &[]).is_err() {
                return;
            }
        }
        if send(socket, &Packet::Reply(reply), &fds).is_err() {
            return;
        }
    }
}

fn send(socket: &PacketSocket, packet: &Packet, fds: &[OwnedFd]) -> Result<(), wire::packet::PacketError> {
    let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    socket.send(&serde_json::to_vec(packet).unwrap(), &borrowed)
}
