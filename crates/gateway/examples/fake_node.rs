//! A development aid: a node without machines at a socket, so that the gateway can be tried where no sandbox can run.
//!
//! `cargo run -p basalt-gateway --example fake_node -- /tmp/fake/gateway.sock`, and `basalt-gateway --node-socket` with the same path. What it
//! keeps is in memory. Its sandboxes' commands run ON THIS HOST, as whoever has started it, by the agent that a guest would have: give its
//! socket to nobody else.
#![allow(
    missing_docs,
    reason = "what is shared with tests is documented for those who read it, not as an interface"
)]

#[path = "../tests/fake/mod.rs"]
#[allow(dead_code, unreachable_pub, reason = "tests use more of it")]
mod fake;

use std::path::PathBuf;
use std::sync::Arc;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path: PathBuf = std::env::args_os().nth(1).ok_or("give the socket's path")?.into();
    fake::socket::serve(Arc::new(fake::FakeNode::with(fake::agent::Agent::Real)), &path)?;
    loop {
        std::thread::park();
    }
}
