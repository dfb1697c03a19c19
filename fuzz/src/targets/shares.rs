//! What a guest asks of a shared directory: FUSE messages, one after the other, against a real directory with a secret beside
//! it, which must stay as it is and never be read; and what comes back where the directory is on another machine.
//!
//! Knows no device and no queue.

use std::fs;
use std::io::{Read, Write};
use std::path::Path;

use fuse::abi::{ROOT_ID, op};
use fuse::stream::Remote;
use fuse::{Answer, MAX_REPLY, Options, Owners, Reply, Server};
use rustix::fs::{Mode, OFlags};

use crate::run::{Target, outcome};

/// What lies beside the directory.
const SECRET: &[u8] = b"a secret of the host's";

/// Messages to one server, one after the other: each begins with its length.
pub(crate) fn messages() -> Target {
    let lookup = message(op::LOOKUP, ROOT_ID, &[b"file\0"]);
    let open = message(op::OPEN, 2, &[&2_u32.to_le_bytes(), &[0; 4]]);
    let write = message(
        op::WRITE,
        2,
        &[&1_u64.to_le_bytes(), &[0; 8], &4_u32.to_le_bytes(), &[0; 20], b"data"],
    );
    let read = message(
        op::READ,
        2,
        &[&1_u64.to_le_bytes(), &[0; 8], &64_u32.to_le_bytes(), &[0; 20]],
    );
    let list = [
        message(op::OPENDIR, ROOT_ID, &[&[0; 8]]),
        message(
            op::READDIR,
            ROOT_ID,
            &[&1_u64.to_le_bytes(), &[0; 8], &4096_u32.to_le_bytes(), &[0; 20]],
        ),
    ];
    let make = [
        message(op::MKDIR, ROOT_ID, &[&[0xed, 1, 0, 0, 0, 0, 0, 0], b"d\0"]),
        message(op::SYMLINK, ROOT_ID, &[b"l\0../secret\0"]),
        message(op::LINK, ROOT_ID, &[&2_u64.to_le_bytes(), b"m\0"]),
        message(op::RENAME2, ROOT_ID, &[&3_u64.to_le_bytes(), &[0; 8], b"m\0n\0"]),
        message(op::UNLINK, 3, &[b"n\0"]),
    ];
    let set = message(op::SETATTR, 2, &[&[1, 0, 0, 0], &[0; 84]]);
    let xattr = message(op::SETXATTR, 2, &[&[3, 0, 0, 0, 0, 0, 0, 0], b"user.x\0abc"]);
    let link = [
        message(op::LOOKUP, ROOT_ID, &[b"link\0"]),
        message(op::READLINK, 2, &[]),
    ];
    Target {
        name: "shared-directory",
        seeds: vec![
            [&lookup[..], &open, &write, &read].concat(),
            [lookup.clone(), make.concat()].concat(),
            [&lookup[..], &set, &xattr].concat(),
            list.concat(),
            link.concat(),
            message(
                op::INIT,
                0,
                &[&[7, 0, 0, 0, 36, 0, 0, 0, 0, 0, 2, 0, 255, 255, 255, 255]],
            ),
        ],
        parse: serve,
    }
}

/// What somebody answers who serves a directory over a stream, which may be anybody who has taken that over: replies, each behind its
/// length.
pub(crate) fn replies() -> Target {
    let reply = |body: &[u8]| {
        let length = u32::try_from(16 + body.len()).unwrap_or(u32::MAX).to_le_bytes();
        [&length, &length[..], &[0; 4], &9_u64.to_le_bytes(), body].concat()
    };
    Target {
        name: "shared-directory-replies",
        seeds: vec![
            [reply(&[7; 128]), reply(&[]), reply(b"content")].concat(),
            // None; as long as there is room; longer than that.
            [&[0; 4][..], &reply(&[1; 48]), &reply(&[1; 49])].concat(),
        ],
        parse: take,
    }
}

/// A stream from which the input comes, and into which anything goes.
struct Stream(std::io::Cursor<Vec<u8>>);

impl Read for Stream {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        self.0.read(bytes)
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn take(input: &[u8]) -> u64 {
    let remote = Remote::new(Stream(std::io::Cursor::new(input.to_vec())));
    let mut reply = Reply::default();
    let mut shape = String::new();
    for (opcode, room) in [
        (op::LOOKUP, MAX_REPLY),
        (op::READ, 64),
        (op::FORGET, 0),
        (op::GETATTR, 64),
        (op::READ, 15),
    ] {
        remote.answer(&message(opcode, ROOT_ID, &[&[0; 16]]), room, &mut reply);
        let length = reply.as_bytes().len();
        assert!(length <= room, "{length} bytes for a room of {room}");
        shape.push(char::from(b'a' + u8::try_from(length % 26).unwrap_or_default()));
    }
    outcome(shape)
}

fn message(opcode: u32, node: u64, body: &[&[u8]]) -> Vec<u8> {
    let body = body.concat();
    let length = u32::try_from(40 + body.len()).unwrap_or(u32::MAX);
    let head = [length.to_le_bytes(), opcode.to_le_bytes()].concat();
    [&head, &9_u64.to_le_bytes()[..], &node.to_le_bytes(), &[0; 16], &body].concat()
}

fn serve(input: &[u8]) -> u64 {
    try_serve(input).unwrap_or_else(|error| panic!("the directory cannot be made: {error}"))
}

fn try_serve(input: &[u8]) -> std::io::Result<u64> {
    let place = tempfile::tempdir()?;
    let (shared, secret) = (place.path().join("shared"), place.path().join("secret"));
    fs::create_dir(&shared)?;
    fs::write(shared.join("file"), "content")?;
    fs::write(&secret, SECRET)?;
    std::os::unix::fs::symlink("../secret", shared.join("link"))?;
    let open = |path: &Path| rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    let options = Options {
        read_only: false,
        owners: Owners::One { uid: 0, gid: 0 },
        max_nodes: 32,
        max_handles: 8,
    };
    let server =
        Server::new(open(&shared)?, open(Path::new("/proc/self/fd"))?, options).map_err(std::io::Error::other)?;
    let mut reply = Reply::default();
    let mut shape = String::new();
    let mut rest = input;
    while let Some(length) = rest.first_chunk() {
        let length = usize::try_from(u32::from_le_bytes(*length)).unwrap_or(usize::MAX);
        let (request, next) = rest.split_at(length.clamp(4, rest.len().max(4)).min(rest.len()));
        rest = next;
        // It would fill the disk of whoever fuzzes.
        let opcode = request.get(4..8).and_then(|bytes| bytes.try_into().ok());
        if opcode.map(u32::from_le_bytes) == Some(op::FALLOCATE) {
            continue;
        }
        server.answer(request, MAX_REPLY, &mut reply);
        let bytes = reply.as_bytes();
        assert!(
            !bytes.windows(SECRET.len()).any(|window| window == SECRET),
            "it told what lies beside the directory"
        );
        let error = bytes.get(4).copied().unwrap_or(1);
        shape.push(char::from(b'a' + error.wrapping_neg() % 26));
    }
    assert_eq!(fs::read(&secret)?, SECRET, "it wrote beside the directory");
    assert_eq!(
        fs::read_dir(place.path())?.count(),
        2,
        "it made something beside the directory"
    );
    Ok(outcome(shape))
}
