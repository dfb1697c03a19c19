//! How many threads wait for connections: they are counted by their name, so nothing else runs in this program.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use agent_api::Connection;

mod common;

use common::server;

/// Threads of this process that serve connections or wait for them.
fn threads() -> usize {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| fs::read_to_string(task.unwrap().path().join("comm")).ok());
    names.filter(|name| name.trim_end() == "connection").count()
}

#[test]
fn few_connections_make_no_thread_and_many_leave_none() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let served = server(None);
    thread::spawn(move || served.serve_listener(&listener));
    let dial = || {
        let mut connection = Connection::new(TcpStream::connect(address).unwrap(), None).unwrap();
        connection.ping().unwrap();
        connection
    };
    // One after the other they find threads that wait; one of these is the caller's, which has no such name.
    for _ in 0..20 {
        dial().hang_up().unwrap();
        assert!(threads() <= 4, "{} threads", threads());
    }
    let many: Vec<_> = (0..20).map(|_| dial()).collect();
    assert!(threads() >= 19, "{} threads for {} connections", threads(), many.len());
    for connection in many {
        connection.hang_up().unwrap();
    }
    let at_rest = (0..3000).any(|_| {
        thread::sleep(Duration::from_millis(10));
        threads() <= 4
    });
    assert!(at_rest, "{} threads stay", threads());
    dial().hang_up().unwrap();
}
