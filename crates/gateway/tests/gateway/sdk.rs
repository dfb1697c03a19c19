//! The real Python SDK against the gateway over the fake node's socket, whose sandboxes have the real agent. It needs a Python that has the
//! package `e2b`, so that it runs only where somebody says which: `BASALT_E2B_PYTHON=.../bin/python cargo test -p basalt-gateway sdk`.

use std::fs::File;
use std::io::Read;
use std::process::{Command, Stdio};
use std::sync::Arc;

use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::fake::agent::Agent;
use crate::fake::{FakeNode, socket};
use crate::support::{Bed, make_key};

#[tokio::test(flavor = "multi_thread")]
async fn the_python_sdk_finds_what_it_expects() {
    let Some(python) = std::env::var_os("BASALT_E2B_PYTHON") else {
        eprintln!("skipped: BASALT_E2B_PYTHON names no Python that has the package e2b");
        return;
    };
    let bed = Bed::new();
    let path = bed.directory.path().join("gateway.sock");
    socket::serve(Arc::new(FakeNode::with(Agent::Real)), &path).unwrap();
    let gateway = gateway::Gateway::new(gateway::Parts {
        node: Arc::new(gateway::SocketNode::new(&path)),
        envd: Arc::new(gateway::Facade::default()),
        ..bed.parts()
    });
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (_stop, stopped) = watch::channel(false);
    tokio::spawn(gateway::serve(gateway, listener, stopped));
    let key = make_key(bed.store.as_ref(), "one");
    let errors = bed.directory.path().join("errors");
    let run = move || {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/gateway/sdk.py");
        let mut child = Command::new(python)
            .arg(script)
            .env("E2B_API_URL", &url)
            .env("E2B_SANDBOX_URL", &url)
            .env("E2B_API_KEY", key)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(File::create(&errors).unwrap())
            .spawn()
            .unwrap();
        let mut out = String::new();
        child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
        // How it ended is not known: the agent in this process takes all of its children for those of a sandbox. What it said last tells.
        drop(child.wait());
        (out, std::fs::read_to_string(&errors).unwrap())
    };
    let (out, errors) = tokio::task::spawn_blocking(run).await.unwrap();
    assert!(out.ends_with("all is well\n"), "{out}\n{errors}");
}
