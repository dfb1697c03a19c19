//! What tests of kept commands share: a server that leaves no process behind, and ways to wait.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use agent::Server;
use agent_api::{Collected, Connection, Event, ExecRequest, Kept, KeptCommand, Running, Which};

use super::{connect_to, gone, server, sh, text};

/// More than anything here takes on a machine that does much else.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);

/// A server whose kept commands end with it, and a directory.
pub(crate) struct Machine {
    pub(crate) server: Server,
    dir: PathBuf,
}

impl Machine {
    pub(crate) fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("basalt-kept-{name}-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        Self {
            server: server(None),
            dir,
        }
    }

    pub(crate) fn connect(&self) -> Connection<UnixStream> {
        connect_to(&self.server)
    }

    pub(crate) fn list(&self) -> Vec<KeptCommand> {
        self.connect().list_kept().unwrap()
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.dir.join(name).to_str().unwrap().to_owned()
    }

    /// Sends a signal from a connection of its own.
    pub(crate) fn signal(&self, which: &Which, number: i32) {
        let mut connection = self.connect();
        let running = connection.attach(which, false).unwrap();
        running.input.signal(number).unwrap();
        running.detach().unwrap();
    }

    /// Sends input from a connection of its own.
    pub(crate) fn send(&self, which: &Which, bytes: &[u8]) {
        let mut connection = self.connect();
        let running = connection.attach(which, false).unwrap();
        running.input.write(bytes).unwrap();
        running.detach().unwrap();
    }

    /// Attaches, and collects in a thread. It is attached when this returns.
    pub(crate) fn collector(&self, which: Which) -> JoinHandle<Collected> {
        let mut connection = self.connect();
        let (tell, told) = mpsc::channel();
        let thread = thread::spawn(move || {
            let running = connection.attach(&which, true).unwrap();
            tell.send(()).unwrap();
            running.collect().unwrap()
        });
        told.recv().unwrap();
        thread
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        for command in self.list() {
            let mut connection = self.connect();
            // It may have ended meanwhile.
            if let Ok(running) = connection.attach(&Which::Pid(command.pid), false) {
                drop(running.input.signal(libc::SIGKILL));
                drop(running.detach());
            }
            assert!(gone(command.pid, PATIENCE));
        }
        fs::remove_dir_all(&self.dir).unwrap();
    }
}

pub(crate) fn tag(tag: &str) -> Which {
    Which::Tag(tag.to_owned())
}

/// A script that is kept, with input.
pub(crate) fn kept(tag: &str, script: &str) -> ExecRequest {
    ExecRequest {
        stdin: true,
        kept: Some(Kept {
            tag: Some(tag.to_owned()),
            ..Kept::default()
        }),
        ..sh(script)
    }
}

pub(crate) fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < end, "in vain: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until a number that is not 0 has not changed for a while.
pub(crate) fn stands_still(value: impl Fn() -> u64) -> u64 {
    let (mut before, mut since) = (0, Instant::now());
    let end = since + PATIENCE;
    while before == 0 || since.elapsed() < Duration::from_millis(500) {
        assert!(Instant::now() < end, "it does not stand still: {before}");
        if value() != before {
            (before, since) = (value(), Instant::now());
        }
        thread::sleep(Duration::from_millis(10));
    }
    before
}

/// Reads until standard output is `wanted`.
pub(crate) fn expect(running: &mut Running<'_, UnixStream>, wanted: &str) {
    let mut seen = String::new();
    while seen.len() < wanted.len() {
        match running.output.next().unwrap() {
            Event::Stdout(bytes) => seen.push_str(text(bytes)),
            other => panic!("{other:?} after {seen:?}"),
        }
    }
    assert_eq!(seen, wanted);
}
