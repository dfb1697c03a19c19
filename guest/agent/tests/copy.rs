//! Trees to the agent and from it, and clients that leave in the midst of one.

mod common;

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use agent_api::{Duplex, Error, UnpackTarget};
use archive::ROOT;
use common::connect;

/// A directory that goes with the test.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("basalt-agent-copy-{name}-{}", std::process::id()));
        fs::create_dir_all(path.join("tree")).unwrap();
        fs::write(path.join("tree/file"), "text").unwrap();
        Self(path)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }

    fn names(&self, name: &str) -> Vec<String> {
        let names = fs::read_dir(self.0.join(name)).unwrap();
        let mut names: Vec<_> = names
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

fn packed(path: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    archive::pack(Path::new(path), ROOT.as_ref(), &mut bytes).unwrap();
    bytes
}

#[test]
fn a_tree_comes_and_goes_and_the_connection_stays_usable() {
    let dir = Dir::new("both");
    let mut connection = connect();
    let mut packing = connection.pack(dir.path("tree").as_str(), ROOT).unwrap();
    assert!(packing.directory && packing.bytes > 0);
    let mut bytes = Vec::new();
    packing.read_to_end(&mut bytes).unwrap();
    packing.finish().unwrap();
    assert_eq!(bytes, packed(&dir.path("tree")));
    let send = |mut sink: &mut dyn Write| -> Result<(), Error> {
        std::io::copy(&mut bytes.as_slice(), &mut sink).unwrap();
        Ok(())
    };
    connection
        .unpack(dir.path("copy").as_str(), UnpackTarget::Root, false, send)
        .unwrap();
    assert_eq!(fs::read_to_string(dir.path("copy/file")).unwrap(), "text");
    connection.ping().unwrap();
}

#[test]
fn refusals_are_sentences_and_the_connection_stays_usable() {
    let dir = Dir::new("refusals");
    let mut connection = connect();
    let refusal = |error: Error| match error {
        Error::Refused(message) => message,
        other => panic!("{other}"),
    };
    for (path, wanted) in [
        ("relative", "absolute"),
        ("/no/such/file", "No such file"),
        ("/dev/null", "device"),
    ] {
        let message = refusal(connection.pack(path, ROOT).map(drop).unwrap_err());
        assert!(message.contains(wanted), "{path}: {message}");
    }
    let bytes = packed(&dir.path("tree"));
    for (path, target, wanted) in [
        ("relative", UnpackTarget::Below, "absolute"),
        ("/no/such/place/x", UnpackTarget::Root, "No such file"),
        ("/dev/null", UnpackTarget::Into, "is no directory"),
    ] {
        let send = |sink: &mut dyn Write| sink.write_all(&bytes).map_err(|_| Error::Ended);
        let message = refusal(connection.unpack(path, target, false, send).unwrap_err());
        assert!(message.contains(wanted), "{path}: {message}");
    }
    connection.ping().unwrap();
}

#[test]
fn a_refusal_in_the_midst_of_a_stream_ends_it() {
    let dir = Dir::new("midst");
    let bytes = packed(&dir.path("tree"));
    let refusal = |path: &str, target, bytes: &[u8]| {
        let mut sent = 0;
        let send = |sink: &mut dyn Write| -> Result<(), Error> {
            sink.write_all(bytes).map_err(|_| Error::Ended)?;
            // Whoever heard nothing would go on for ever.
            while sent < 1 << 30 {
                sink.write_all(&[0; 65536]).map_err(|_| Error::Ended)?;
                sent += 65536;
            }
            Ok(())
        };
        let error = connect().unpack(path, target, false, send).unwrap_err();
        assert!(sent < 1 << 30, "all of it was sent");
        match error {
            Error::Refused(message) => message,
            other => panic!("{other}"),
        }
    };
    let message = refusal(&dir.path("tree/file"), UnpackTarget::Root, &bytes);
    assert!(message.contains("no directory"), "{message}");
    let message = refusal(&dir.path("tree"), UnpackTarget::Below, &[7; 4096]);
    assert!(message.contains("cannot be read"), "{message}");
    assert!(refusal(&dir.path("tree"), UnpackTarget::Below, b"").contains("empty"));
    assert_eq!(dir.names("tree"), ["file"]);
}

#[test]
fn a_client_that_leaves_leaves_whole_files_only() {
    let dir = Dir::new("leaves");
    fs::write(dir.path("tree/large"), vec![1; 300_000]).unwrap();
    let bytes = packed(&dir.path("tree"));
    let mut connection = connect();
    let again = Duplex::try_clone(connection.stream()).unwrap();
    let leave = |sink: &mut dyn Write| -> Result<(), Error> {
        sink.write_all(&bytes[..200_000]).unwrap();
        again.close();
        Err(Error::Ended)
    };
    let error = connection
        .unpack(dir.path("copy").as_str(), UnpackTarget::Root, false, leave)
        .unwrap_err();
    assert!(matches!(error, Error::Ended), "{error}");
    let end = Instant::now() + Duration::from_secs(90);
    while !Path::new(&dir.path("copy/file")).exists() || dir.names("copy").len() > 1 {
        assert!(Instant::now() < end, "{:?}", dir.names("."));
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(dir.names("copy"), ["file"]);
}
