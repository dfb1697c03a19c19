//! A development aid: a node that has no machines at a socket, so that `basalt-gateway` and the SDKs can be tried on one machine without any
//! virtual machine. The agent of all its sandboxes runs in this process and starts commands right here: whoever has a key of the gateway
//! can do everything that this process can.
//!
//! ```text
//! cargo run -p basalt-gateway --example node -- /tmp/node.sock [USER] &
//! basalt-gateway --node-socket /tmp/node.sock --state /tmp/gateway --domain sb.localhost:3443 &
//! eval "$(basalt-gateway env --state /tmp/gateway)"
//! ```

#[expect(dead_code, reason = "tests use more of it")]
#[path = "../tests/gateway/fake/mod.rs"]
mod fake;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use fake::FakeNode;
use node_api::{Packet, Reply};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use wire::packet::PacketSocket;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Answers one asker until it leaves. Commands are this user's of the host unless they say whose they are.
fn converse(node: &FakeNode, user: Option<&str>, socket: &PacketSocket) -> Result<()> {
    loop {
        let (bytes, _) = socket.receive()?;
        let Packet::Request { request, tenant, .. } = serde_json::from_slice(&bytes)? else {
            return Err("that is no request".into());
        };
        let (items, mut reply, fds) = node.answer(tenant.as_deref(), request);
        if let Ok(Reply::Agent { command, .. }) = &mut reply {
            command.user = user.map(str::to_owned);
        }
        for item in items {
            socket.send(&serde_json::to_vec(&Packet::Item(item))?, &[])?;
        }
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        socket.send(&serde_json::to_vec(&Packet::Reply(reply))?, &fds)?;
    }
}

fn main() -> Result<()> {
    let path = std::env::args().nth(1).ok_or("say where the socket is to be")?;
    let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    rustix::net::bind(&listener, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&listener, 64)?;
    let node = Arc::new(FakeNode::default());
    let user = std::env::args().nth(2);
    loop {
        let socket = PacketSocket::from_fd(rustix::net::accept_with(&listener, SocketFlags::CLOEXEC)?);
        let (node, user) = (Arc::clone(&node), user.clone());
        // An asker that leaves has ended the conversation, too.
        std::thread::spawn(move || drop(converse(&node, user.as_deref(), &socket)));
    }
}
