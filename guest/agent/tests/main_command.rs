//! The sandbox's own command: its log, its signals, and what becomes of it when nobody waits for it.

mod common;

use std::io::Read;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::time::Duration;

use agent::{Server, ServerConfig};
use agent_api::log::{What, read};
use agent_api::{Connection, ExecRequest, ExitStatus};
use common::{connect_to, reaper, sh, text};

/// A server that keeps logs, and where each of them arrives.
fn server() -> (Server, mpsc::Receiver<UnixStream>) {
    let (give, logs) = mpsc::channel();
    let config = ServerConfig {
        log: Some(Box::new(move || {
            let (near, far) = UnixStream::pair()?;
            give.send(far).unwrap();
            Ok(near)
        })),
        ..ServerConfig::in_place()
    };
    (Server::new(config, reaper()), logs)
}

fn main_command(script: &str) -> ExecRequest {
    ExecRequest {
        main: true,
        ..sh(script)
    }
}

/// Reads a log to its end.
fn whole(mut log: UnixStream) -> String {
    let mut bytes = Vec::new();
    log.set_read_timeout(Some(Duration::from_secs(90))).unwrap();
    log.read_to_end(&mut bytes).unwrap();
    text(&bytes).to_owned()
}

/// The records of a log without their times: output, and how it ended.
fn told(log: &str) -> (String, Option<ExitStatus>) {
    let (mut output, mut exit) = (String::new(), None);
    for line in log.lines() {
        match read(line.as_bytes()).unwrap_or_else(|| panic!("{line:?}")).what {
            What::Output { stream, bytes, ended } => {
                output += &format!("{stream:?}:{}{}", text(bytes), if ended { ";" } else { "~" });
            }
            What::Exited(status) => exit = Some(status),
        }
    }
    (output, exit)
}

#[test]
fn a_detached_one_outlives_its_connection_and_tells_the_log_everything() {
    let (server, logs) = server();
    let mut connection = connect_to(&server);
    let request = main_command("echo one; sleep 0.3; printf two; sleep 0.1; echo oops >&2; exit 3");
    connection.exec_detached(&request).unwrap();
    connection.ping().unwrap();
    drop(connection);
    let log = logs.recv_timeout(Duration::from_secs(90)).unwrap();
    let (output, exit) = told(&whole(log));
    assert_eq!(output, "Stdout:one;Stdout:two~Stderr:oops;");
    assert_eq!(exit, Some(ExitStatus::Code(3)));
}

#[test]
fn an_attached_one_tells_its_client_and_the_log() {
    let (server, logs) = server();
    let log = std::thread::spawn(move || whole(logs.recv().unwrap()));
    let mut connection = connect_to(&server);
    let result = connection
        .exec(&main_command("echo both; kill -9 $$"))
        .unwrap()
        .collect()
        .unwrap();
    assert_eq!((text(&result.stdout), result.status), ("both\n", ExitStatus::Signal(9)));
    let (output, exit) = told(&log.join().unwrap());
    assert_eq!((output.as_str(), exit), ("Stdout:both;", Some(ExitStatus::Signal(9))));
}

#[test]
fn others_signal_it_and_there_is_only_one() {
    let (server, logs) = server();
    let mut connection = connect_to(&server);
    let early = connection.signal_main(15).unwrap_err();
    assert!(early.to_string().contains("has not been started"), "{early}");
    connection
        .exec_detached(&main_command(
            "trap 'echo bye; exit 7' TERM; echo up; while :; do sleep 0.05; done",
        ))
        .unwrap();
    let second = connection.exec_detached(&main_command("true")).unwrap_err();
    assert!(second.to_string().contains("its command already"), "{second}");
    let mut log = logs.recv().unwrap();
    let mut first = [0; 8];
    log.read_exact(&mut first).unwrap();
    let mut other: Connection<UnixStream> = connect_to(&server);
    other.signal_main(15).unwrap();
    let rest = whole(log);
    assert!(rest.contains(" o F bye\n") && rest.ends_with(" x code 7\n"), "{rest}");
}

#[test]
fn one_that_cannot_start_says_why_and_another_may_follow() {
    let (server, logs) = server();
    let mut connection = connect_to(&server);
    let missing = ExecRequest {
        argv: vec!["/no/such/program".into()],
        main: true,
        ..ExecRequest::default()
    };
    let error = connection.exec_detached(&missing).unwrap_err();
    assert!(error.to_string().contains("/no/such/program"), "{error}");
    connection.exec_detached(&main_command("exit 0")).unwrap();
    assert_eq!(told(&whole(logs.recv().unwrap())), (String::new(), None));
    assert_eq!(
        told(&whole(logs.recv().unwrap())),
        (String::new(), Some(ExitStatus::Code(0)))
    );
}

#[test]
fn a_log_whose_connection_breaks_goes_on_in_another() {
    let (server, logs) = server();
    let mut connection = connect_to(&server);
    let marker = std::env::temp_dir().join(format!("basalt-agent-log-{}", std::process::id()));
    let script = format!(
        "echo one; until [ -e {0} ]; do sleep 0.05; done; echo two; rm {0}",
        marker.display()
    );
    connection.exec_detached(&main_command(&script)).unwrap();
    let mut first = logs.recv().unwrap();
    let mut line = [0; 8];
    first.read_exact(&mut line).unwrap();
    // As a restore does; closing alone leaves it open for as long as another test's child has it, between fork and exec.
    first.shutdown(Shutdown::Both).unwrap();
    std::fs::write(&marker, "").unwrap();
    let second = logs.recv_timeout(Duration::from_secs(90)).unwrap();
    assert_eq!(
        told(&whole(second)),
        ("Stdout:two;".to_owned(), Some(ExitStatus::Code(0)))
    );
}
