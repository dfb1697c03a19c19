//! The server beyond commands: TCP with a token, uploads, what is at a path, how many connections there may be.

mod common;

use std::fs;
use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use agent_api::{Connection, Error, ExitStatus, Token, Upload};
use common::{connect, server, sh, text};

/// A directory that goes with the test.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("basalt-agent-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

fn upload(path: &str, mode: u32, size: usize) -> Upload {
    Upload {
        path: path.into(),
        mode,
        size: u64::try_from(size).unwrap(),
    }
}

#[test]
fn over_tcp_only_the_token_opens() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let served = server(Some(Token::new([5; 32])));
    thread::spawn(move || served.serve_listener(&listener));
    let dial =
        |token: Option<[u8; 32]>| Connection::new(TcpStream::connect(address).unwrap(), token.map(Token::new).as_ref());
    for wrong in [None, Some([0; 32]), Some([6; 32])] {
        let error = dial(wrong).unwrap_err();
        assert!(matches!(error, Error::Wire(wire::Error::TokenRefused)), "{error}");
    }
    let mut connection = dial(Some([5; 32])).unwrap();
    let result = connection
        .exec(&sh("head -c 3000000 /dev/zero; exit 7"))
        .unwrap()
        .collect()
        .unwrap();
    assert_eq!((result.status, result.stdout.len()), (ExitStatus::Code(7), 3_000_000));

    // Something else on the port, and another version.
    let mut stranger = TcpStream::connect(address).unwrap();
    std::io::Write::write_all(&mut stranger, &[b'x'; 64]).unwrap();
    let mut rest = Vec::new();
    // The server closes with unread bytes or without: an error is as good as an end.
    drop(stranger.read_to_end(&mut rest));
    assert!(rest.is_empty(), "a stranger got {} bytes", rest.len());
    let mut newer = TcpStream::connect(address).unwrap();
    let protocol = wire::Protocol {
        oldest: agent_api::PROTOCOL.version + 1,
        version: agent_api::PROTOCOL.version + 1,
        ..agent_api::PROTOCOL
    };
    let error = wire::offer(&mut newer, protocol, Some(&Token::new([5; 32]))).unwrap_err();
    assert!(
        matches!(error, wire::Error::WrongVersion { theirs, .. } if theirs == agent_api::PROTOCOL.version),
        "{error}"
    );
}

#[test]
fn a_file_arrives_whole_with_its_mode_in_new_directories() {
    let dir = Dir::new("upload");
    let path = dir.path("a/b/program");
    let data: Vec<u8> = (0..=255_u8).cycle().take(1_000_001).collect();
    let mut connection = connect();
    assert_eq!(connection.stat(path.as_str(), true).unwrap(), None);
    connection
        .upload(&upload(&path, 0o755, data.len()), &mut data.as_slice())
        .unwrap();
    assert!(fs::read(&path).unwrap() == data);
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o755);
    assert_eq!(
        fs::read_dir(dir.0.join("a/b")).unwrap().count(),
        1,
        "nothing but the file"
    );

    let sum = connection
        .exec(&sh(&format!("sha256sum {path}")))
        .unwrap()
        .collect()
        .unwrap();
    let info = connection.stat(path.as_str(), true).unwrap().unwrap();
    assert_eq!(info.size, 1_000_001);
    assert_eq!(info.mode & 0o7777, 0o755);
    assert_eq!(info.sha256.as_deref(), text(&sum.stdout).split(' ').next());

    // Replacing is atomic: another inode, so that a program that runs keeps its old one.
    let inode = fs::metadata(&path).unwrap().ino();
    connection
        .upload(&upload(&path, 0o600, 0), &mut std::io::empty())
        .unwrap();
    assert_ne!(fs::metadata(&path).unwrap().ino(), inode);
    assert_eq!(fs::metadata(&path).unwrap().len(), 0);
    let info = connection.stat(path.as_str(), false).unwrap().unwrap();
    assert_eq!((info.size, info.sha256), (0, None));
}

#[test]
fn uploads_that_fail_leave_nothing_and_keep_the_connection() {
    let dir = Dir::new("failing");
    fs::write(dir.path("file"), "").unwrap();
    fs::create_dir(dir.path("taken")).unwrap();
    let mut connection = connect();
    for path in [
        dir.path("file/below"),
        "relative".to_owned(),
        "/".to_owned(),
        String::new(),
        "/a\0b".to_owned(),
    ] {
        let result = connection.upload(&upload(&path, 0o644, 4), &mut &b"data"[..]);
        assert!(matches!(result, Err(Error::Refused(_))), "{path}: {result:?}");
    }
    // This one fails at the very end: the place is a directory. /dev/full fails in the middle.
    let result = connection.upload(&upload(&dir.path("taken"), 0o644, 4), &mut &b"data"[..]);
    assert!(matches!(result, Err(Error::Refused(_))), "{result:?}");
    connection.ping().unwrap();

    let result = connection.upload(&upload(&dir.path("short"), 0o644, 100), &mut &b"data"[..]);
    assert!(
        matches!(result, Err(Error::ShortFile { got: 4, want: 100 })),
        "{result:?}"
    );
    let end = Instant::now() + Duration::from_secs(90);
    while fs::read_dir(&dir.0).unwrap().count() != 2 {
        assert!(Instant::now() < end, "an unfinished file is left");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn directories_and_missing_paths_are_told_apart() {
    let mut connection = connect();
    let info = connection.stat("/etc", true).unwrap().unwrap();
    assert_eq!((info.mode & libc::S_IFMT, info.sha256), (libc::S_IFDIR, None));
    assert_eq!(connection.stat("/etc/passwd/below", false).unwrap(), None);
    assert_eq!(connection.stat("/no/such/file", false).unwrap(), None);
}

#[test]
fn there_is_a_limit_to_connections_and_it_is_given_back() {
    let server = server(None);
    let open = || {
        let (near, far) = UnixStream::pair().unwrap();
        server.serve_in_thread(far);
        Connection::new(near, None)
    };
    let held: Vec<_> = (0..256).map(|_| open().unwrap()).collect();
    assert!(open().is_err());
    drop(held);
    let end = Instant::now() + Duration::from_secs(90);
    while open().is_err() {
        assert!(Instant::now() < end, "no connection is given back");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn the_reaper_serves_others_too() {
    let reaper = common::reaper();
    let child = reaper
        .spawn(std::process::Command::new("sh").args(["-c", "exit 5"]))
        .unwrap();
    assert_eq!(child.wait(), ExitStatus::Code(5));
    assert_eq!(child.try_wait(), Some(ExitStatus::Code(5)));
    assert!(!child.signal(libc::SIGTERM), "it is gone");
    let child = reaper.spawn(std::process::Command::new("sleep").arg("60")).unwrap();
    assert_eq!(child.try_wait(), None);
    assert!(child.signal(libc::SIGTERM));
    assert_eq!(child.wait(), ExitStatus::Signal(15));
    assert!(
        reaper
            .spawn(&mut std::process::Command::new("/no/such/program"))
            .is_err()
    );
}
