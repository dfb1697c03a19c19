//! The server against a hand that writes messages, good and bad, with a real directory below.

mod known;

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::abi::{ROOT_ID, init, op};
use crate::{MAX_IO, MAX_REPLY, Options, Owners, Reply, Server};

struct Hand {
    server: Server,
    reply: Reply,
    directory: tempfile::TempDir,
}

fn open(path: &Path) -> OwnedFd {
    rustix::fs::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).unwrap()
}

fn hand_with(change: impl FnOnce(&mut Options)) -> Hand {
    let mut options = Options {
        read_only: false,
        owners: match rustix::process::geteuid().is_root() {
            true => Owners::Kept,
            false => Owners::One {
                uid: rustix::process::geteuid().as_raw(),
                gid: rustix::process::getegid().as_raw(),
            },
        },
        max_nodes: 64,
        max_handles: 8,
    };
    change(&mut options);
    let directory = tempfile::tempdir().unwrap();
    let shared = directory.path().join("shared");
    fs::create_dir(&shared).unwrap();
    fs::write(directory.path().join("secret"), "not yours").unwrap();
    let server = Server::new(open(&shared), open(Path::new("/proc/self/fd")), options).unwrap();
    let mut hand = Hand {
        server,
        reply: Reply::default(),
        directory,
    };
    hand.init();
    hand
}

fn hand() -> Hand {
    hand_with(|_| ())
}

fn text(parts: &[&[u8]]) -> Vec<u8> {
    parts.iter().flat_map(|part| part.iter().copied().chain([0])).collect()
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn longs(longs: &[u64]) -> Vec<u8> {
    longs.iter().flat_map(|long| long.to_le_bytes()).collect()
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

impl Hand {
    fn shared(&self, name: &str) -> std::path::PathBuf {
        self.directory.path().join("shared").join(name)
    }

    fn raw(&mut self, request: &[u8], room: usize) -> Vec<u8> {
        self.server.answer(request, room, &mut self.reply);
        self.reply.as_bytes().to_vec()
    }

    fn ask_as(&mut self, (uid, gid): (u32, u32), opcode: u32, node: u64, body: &[u8]) -> Result<Vec<u8>, Errno> {
        let length = u32::try_from(40 + body.len()).unwrap();
        let request = [
            words(&[length, opcode]),
            longs(&[77, node]),
            words(&[uid, gid, 1, 0]),
            body.to_vec(),
        ]
        .concat();
        let reply = self.raw(&request, MAX_REPLY);
        assert_eq!(word(&reply, 0) as usize, reply.len());
        assert_eq!(long(&reply, 8), 77);
        match word(&reply, 4).cast_signed() {
            0 => Ok(reply[16..].to_vec()),
            error => {
                assert_eq!(reply.len(), 16);
                Err(Errno::from_raw_os_error(-error))
            }
        }
    }

    fn ask(&mut self, opcode: u32, node: u64, body: &[u8]) -> Result<Vec<u8>, Errno> {
        self.ask_as((0, 0), opcode, node, body)
    }

    fn init(&mut self) {
        let reply = self.ask(op::INIT, 0, &words(&[7, 36, 1 << 17, u32::MAX])).unwrap();
        assert_eq!(reply.len(), 64);
        assert_eq!(word(&reply, 12) & init::MAX_PAGES, init::MAX_PAGES);
        assert_eq!(word(&reply, 20) as usize, MAX_IO);
    }

    fn look_up(&mut self, node: u64, name: &[u8]) -> Result<u64, Errno> {
        self.ask(op::LOOKUP, node, &text(&[name])).map(|reply| long(&reply, 0))
    }

    /// Node and handle.
    fn create(&mut self, name: &[u8], mode: u32) -> Result<(u64, u64), Errno> {
        let body = [words(&[libc::O_RDWR.cast_unsigned(), mode, 0, 0]), text(&[name])].concat();
        let reply = self.ask(op::CREATE, ROOT_ID, &body)?;
        Ok((long(&reply, 0), long(&reply, 128)))
    }

    fn write(&mut self, handle: u64, offset: u64, data: &[u8]) -> Result<u32, Errno> {
        let size = u32::try_from(data.len()).unwrap();
        let body = [
            longs(&[handle, offset]),
            words(&[size, 0]),
            longs(&[0, 0]),
            data.to_vec(),
        ]
        .concat();
        self.ask(op::WRITE, 0, &body).map(|reply| word(&reply, 0))
    }

    fn read(&mut self, handle: u64, offset: u64, size: u32) -> Result<Vec<u8>, Errno> {
        let body = [longs(&[handle, offset]), words(&[size, 0]), longs(&[0, 0])].concat();
        self.ask(op::READ, 0, &body)
    }

    fn open(&mut self, node: u64, flags: i32) -> Result<u64, Errno> {
        self.ask(op::OPEN, node, &words(&[flags.cast_unsigned(), 0]))
            .map(|reply| long(&reply, 0))
    }
}

#[test]
fn a_file_is_made_written_read_and_removed() {
    let mut hand = hand();
    let (node, handle) = hand.create(b"file", 0o640).unwrap();
    assert_eq!(hand.write(handle, 3, b"hello"), Ok(5));
    assert_eq!(fs::read(hand.shared("file")).unwrap(), b"\0\0\0hello");
    assert_eq!(fs::metadata(hand.shared("file")).unwrap().mode() & 0o7777, 0o640);
    assert_eq!(hand.read(handle, 4, 100), Ok(b"ello".to_vec()));
    hand.ask(op::FSYNC, node, &[longs(&[handle]), words(&[1, 0])].concat())
        .unwrap();
    let attributes = hand.ask(op::GETATTR, node, &[0; 16]).unwrap();
    assert_eq!(long(&attributes, 16 + 8), 8);
    hand.ask(op::UNLINK, ROOT_ID, &text(&[b"file"])).unwrap();
    // Open, it is still there.
    assert_eq!(hand.read(handle, 3, 1), Ok(b"h".to_vec()));
    hand.ask(op::RELEASE, node, &longs(&[handle, 0, 0])).unwrap();
    assert_eq!(hand.read(handle, 3, 1), Err(Errno::BADF));
    assert_eq!(hand.look_up(ROOT_ID, b"file"), Err(Errno::NOENT));
}

#[test]
fn no_name_leads_out() {
    let mut hand = hand();
    symlink("../secret", hand.shared("relative")).unwrap();
    symlink("/etc/passwd", hand.shared("absolute")).unwrap();
    symlink("..", hand.shared("up")).unwrap();
    symlink("/proc/self/fd", hand.shared("magic")).unwrap();
    for name in [&b".."[..], b".", b"", b"../secret", b"/etc/passwd", b"up/secret"] {
        assert_eq!(hand.look_up(ROOT_ID, name), Err(Errno::INVAL), "{name:?}");
        assert_eq!(hand.create(name, 0o600), Err(Errno::INVAL));
        assert_eq!(hand.ask(op::UNLINK, ROOT_ID, &text(&[name])), Err(Errno::INVAL));
        let mkdir = [words(&[0o700, 0]), text(&[name])].concat();
        assert_eq!(hand.ask(op::MKDIR, ROOT_ID, &mkdir), Err(Errno::INVAL));
        let rename = [longs(&[ROOT_ID]), text(&[b"relative", name])].concat();
        assert_eq!(hand.ask(op::RENAME, ROOT_ID, &rename), Err(Errno::INVAL));
        let link = [longs(&[ROOT_ID]), text(&[name])].concat();
        assert_eq!(hand.ask(op::LINK, ROOT_ID, &link), Err(Errno::INVAL));
    }
    for name in [&b"relative"[..], b"absolute", b"up", b"magic"] {
        let node = hand.look_up(ROOT_ID, name).unwrap();
        assert_eq!(hand.open(node, libc::O_RDONLY), Err(Errno::LOOP));
        assert_eq!(hand.ask(op::OPENDIR, node, &[0; 8]), Err(Errno::NOTDIR));
        assert_eq!(hand.look_up(node, b"secret"), Err(Errno::NOTDIR));
        assert_eq!(hand.look_up(node, b"fd"), Err(Errno::NOTDIR));
        let target = hand.ask(op::READLINK, node, &[]).unwrap();
        assert_eq!(
            target,
            fs::read_link(hand.shared(std::str::from_utf8(name).unwrap()))
                .unwrap()
                .as_os_str()
                .as_encoded_bytes()
        );
        // Making a file where a link is does not go through it.
        assert!(hand.create(name, 0o600).is_err());
    }
    assert_eq!(fs::read(hand.directory.path().join("secret")).unwrap(), b"not yours");
}

#[test]
fn what_is_no_file_is_not_opened_and_devices_are_not_made() {
    let mut hand = hand();
    let mknod = |mode: u32, name: &[u8]| [words(&[mode, 0x103, 0, 0]), text(&[name])].concat();
    hand.ask(op::MKNOD, ROOT_ID, &mknod(libc::S_IFIFO | 0o600, b"fifo"))
        .unwrap();
    hand.ask(op::MKNOD, ROOT_ID, &mknod(libc::S_IFSOCK | 0o600, b"socket"))
        .unwrap();
    for kind in [libc::S_IFCHR, libc::S_IFBLK] {
        assert_eq!(
            hand.ask(op::MKNOD, ROOT_ID, &mknod(kind | 0o600, b"device")),
            Err(Errno::PERM)
        );
    }
    for name in [&b"fifo"[..], b"socket"] {
        let node = hand.look_up(ROOT_ID, name).unwrap();
        // Opening the FIFO would wait for ever.
        assert_eq!(hand.open(node, libc::O_RDWR), Err(Errno::NXIO));
        let chmod = [words(&[1, 0]), vec![0; 60], words(&[0o640, 0, 0, 0, 0])].concat();
        hand.ask(op::SETATTR, node, &chmod).unwrap();
    }
    assert_eq!(fs::metadata(hand.shared("fifo")).unwrap().mode() & 0o777, 0o640);
}

#[test]
fn floods_end_at_the_limits_and_forgetting_makes_room() {
    let mut hand = hand();
    for number in 0..80 {
        fs::write(hand.shared(&number.to_string()), "").unwrap();
    }
    let mut found = Vec::new();
    let end = loop {
        match hand.look_up(ROOT_ID, found.len().to_string().as_bytes()) {
            Ok(node) => found.push(node),
            Err(error) => break error,
        }
    };
    assert_eq!((found.len(), end), (63, Errno::NFILE));
    // Twice known, twice to be forgotten.
    assert_eq!(hand.look_up(ROOT_ID, b"0"), Ok(found[0]));
    let mut handles = Vec::new();
    let end = loop {
        match hand.open(found[0], libc::O_RDONLY) {
            Ok(handle) => handles.push(handle),
            Err(error) => break error,
        }
    };
    assert_eq!((handles.len(), end), (8, Errno::NFILE));
    assert_eq!(hand.ask(op::OPENDIR, ROOT_ID, &[0; 8]), Err(Errno::NFILE));
    let forget = |nodes: &[u64]| {
        let length = u32::try_from(40 + 8 + 16 * nodes.len()).unwrap();
        let head = [words(&[length, op::BATCH_FORGET]), longs(&[1, 0]), words(&[0, 0, 0, 0])];
        let list = nodes.iter().flat_map(|&node| longs(&[node, 1])).collect();
        [head.concat(), words(&[9999, 0]), list].concat()
    };
    assert!(hand.raw(&forget(&found), MAX_REPLY).is_empty());
    assert_eq!(
        hand.server.nodes.count(),
        2,
        "the root, and the one that was known twice"
    );
    assert!(hand.raw(&forget(&[found[0], ROOT_ID, 12345]), MAX_REPLY).is_empty());
    assert_eq!(hand.server.nodes.count(), 1);
    assert_eq!(hand.look_up(found[0], b"x"), Err(Errno::STALE));
    assert_eq!(hand.open(found[0], libc::O_RDONLY), Err(Errno::STALE));
    hand.init();
    hand.open(ROOT_ID, libc::O_RDONLY).unwrap_err();
    assert_eq!(
        hand.read(handles[0], 0, 1),
        Err(Errno::BADF),
        "a new mount knows nothing of the old"
    );
}

#[test]
fn a_read_only_directory_stays_as_it_is() {
    let mut hand = hand_with(|options| options.read_only = true);
    fs::write(hand.shared("file"), "as it was").unwrap();
    let node = hand.look_up(ROOT_ID, b"file").unwrap();
    let handle = hand.open(node, libc::O_RDONLY).unwrap();
    for flags in [libc::O_RDWR, libc::O_WRONLY, libc::O_TRUNC] {
        assert_eq!(hand.open(node, flags), Err(Errno::ROFS));
    }
    assert_eq!(hand.create(b"new", 0o600), Err(Errno::ROFS));
    assert_eq!(hand.write(handle, 0, b"x"), Err(Errno::ROFS));
    for opcode in [
        op::SETATTR,
        op::MKDIR,
        op::MKNOD,
        op::SYMLINK,
        op::LINK,
        op::UNLINK,
        op::RMDIR,
        op::RENAME,
        op::RENAME2,
        op::SETXATTR,
        op::REMOVEXATTR,
        op::FALLOCATE,
        op::COPY_FILE_RANGE,
    ] {
        assert_eq!(
            hand.ask(opcode, ROOT_ID, &text(&[b"file"])),
            Err(Errno::ROFS),
            "{opcode}"
        );
    }
    assert_eq!(hand.read(handle, 0, 100), Ok(b"as it was".to_vec()));
}

#[test]
fn links_renames_and_directories() {
    let mut hand = hand();
    let (node, _) = hand.create(b"a", 0o600).unwrap();
    let linked = hand
        .ask(op::LINK, ROOT_ID, &[longs(&[node]), text(&[b"b"])].concat())
        .unwrap();
    assert_eq!(long(&linked, 0), node, "a second name of the same file");
    assert_eq!(fs::metadata(hand.shared("b")).unwrap().nlink(), 2);
    hand.ask(op::SYMLINK, ROOT_ID, &text(&[b"s", b"/anywhere"])).unwrap();
    let symlink = hand.look_up(ROOT_ID, b"s").unwrap();
    // The link itself, not what it names.
    hand.ask(op::LINK, ROOT_ID, &[longs(&[symlink]), text(&[b"t"])].concat())
        .unwrap();
    assert_eq!(fs::read_link(hand.shared("t")).unwrap(), Path::new("/anywhere"));
    let directory = hand
        .ask(op::MKDIR, ROOT_ID, &[words(&[0o755, 0]), text(&[b"d"])].concat())
        .unwrap();
    let directory = long(&directory, 0);
    let rename = |flags: u32| [longs(&[directory]), words(&[flags, 0]), text(&[b"a", b"c"])].concat();
    // RENAME_WHITEOUT would make a device node.
    assert_eq!(hand.ask(op::RENAME2, ROOT_ID, &rename(4)), Err(Errno::INVAL));
    hand.ask(op::RENAME2, ROOT_ID, &rename(1)).unwrap();
    assert!(hand.shared("d/c").exists() && !hand.shared("a").exists());
    assert_eq!(hand.ask(op::RMDIR, ROOT_ID, &text(&[b"d"])), Err(Errno::NOTEMPTY));

    for number in 0..100 {
        fs::write(hand.shared(&format!("d/{number}")), "").unwrap();
    }
    let handle = long(&hand.ask(op::OPENDIR, directory, &[0; 8]).unwrap(), 0);
    let (mut names, mut offset) = (Vec::new(), 0);
    loop {
        let body = [longs(&[handle, offset]), words(&[512, 0]), longs(&[0, 0])].concat();
        let reply = hand.ask(op::READDIR, directory, &body).unwrap();
        assert!(reply.len() <= 512);
        if reply.is_empty() {
            break;
        }
        let mut at = 0;
        while at < reply.len() {
            offset = long(&reply, at + 8);
            let length = word(&reply, at + 16) as usize;
            names.push(String::from_utf8(reply[at + 24..at + 24 + length].to_vec()).unwrap());
            at += (24 + length).next_multiple_of(8);
        }
    }
    names.sort();
    names.dedup();
    assert_eq!(names.len(), 100 + 3, "{names:?}");
}

#[test]
fn users_attributes_are_kept_and_others_hidden() {
    let mut hand = hand();
    let (node, _) = hand.create(b"file", 0o600).unwrap();
    let set = |name: &[u8]| [words(&[3, 0]), text(&[name]), b"abc".to_vec()].concat();
    match hand.ask(op::SETXATTR, node, &set(b"user.x")) {
        // Not every file system of a test machine has them.
        Err(Errno::OPNOTSUPP) => return,
        other => drop(other.unwrap()),
    }
    for name in [
        &b"security.capability"[..],
        b"trusted.x",
        b"system.posix_acl_access",
        b"user.",
    ] {
        assert_eq!(hand.ask(op::SETXATTR, node, &set(name)), Err(Errno::OPNOTSUPP));
    }
    let get = |size: u32, name: &[u8]| [words(&[size, 0]), text(&[name])].concat();
    assert_eq!(word(&hand.ask(op::GETXATTR, node, &get(0, b"user.x")).unwrap(), 0), 3);
    assert_eq!(hand.ask(op::GETXATTR, node, &get(3, b"user.x")), Ok(b"abc".to_vec()));
    assert_eq!(hand.ask(op::GETXATTR, node, &get(2, b"user.x")), Err(Errno::RANGE));
    assert_eq!(
        hand.ask(op::LISTXATTR, node, &words(&[64, 0])),
        Ok(b"user.x\0".to_vec())
    );
    hand.ask(op::REMOVEXATTR, node, &text(&[b"user.x"])).unwrap();
    assert_eq!(hand.ask(op::GETXATTR, node, &get(3, b"user.x")), Err(Errno::NODATA));
}

#[test]
fn owners_are_kept_where_this_process_may() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let mut hand = hand();
    fs::set_permissions(hand.shared(""), fs::Permissions::from_mode(0o777)).unwrap();
    // Beneath a directory that only root may enter, as everything below a descriptor.
    let body = [words(&[0o700, 0]), text(&[b"theirs"])].concat();
    hand.ask_as((1234, 5678), op::MKDIR, ROOT_ID, &body).unwrap();
    let made = fs::metadata(hand.shared("theirs")).unwrap();
    assert_eq!((made.uid(), made.gid()), (1234, 5678));
    hand.ask(op::MKDIR, ROOT_ID, &[words(&[0o700, 0]), text(&[b"ours"])].concat())
        .unwrap();
    assert_eq!(fs::metadata(hand.shared("ours")).unwrap().uid(), 0);
    // Changing the owner takes the bits away, changing the mode sets them.
    let (node, handle) = hand.create(b"suid", 0o755).unwrap();
    let change = [words(&[1 | 2 | 4, 0]), vec![0; 60], words(&[0o6755, 0, 7, 8, 0])].concat();
    let attributes = hand.ask(op::SETATTR, node, &change).unwrap();
    assert_eq!(word(&attributes, 16 + 60) & 0o7777, 0o6755);
    assert_eq!((word(&attributes, 16 + 68), word(&attributes, 16 + 72)), (7, 8));
    // FUSE_WRITE_KILL_SUIDGID: as if somebody without rights had written.
    let body = [longs(&[handle, 0]), words(&[1, 4]), longs(&[0, 0]), vec![b'x']].concat();
    hand.ask(op::WRITE, node, &body).unwrap();
    assert_eq!(fs::metadata(hand.shared("suid")).unwrap().mode() & 0o7777, 0o755);
}

#[test]
fn one_owner_is_root_to_the_guest() {
    let own = rustix::process::geteuid().as_raw();
    let group = rustix::process::getegid().as_raw();
    let mut hand = hand_with(|options| options.owners = Owners::One { uid: own, gid: group });
    let body = [words(&[0o700, 0]), text(&[b"d"])].concat();
    let made = hand.ask_as((1234, 5678), op::MKDIR, ROOT_ID, &body).unwrap();
    assert_eq!(fs::metadata(hand.shared("d")).unwrap().uid(), own);
    assert_eq!((word(&made, 40 + 68), word(&made, 40 + 72)), (0, 0));
    let chown = |uid: u32| [words(&[2, 0]), vec![0; 68], words(&[uid, 0, 0])].concat();
    let node = long(&made, 0);
    hand.ask(op::SETATTR, node, &chown(0)).unwrap();
    assert_eq!(hand.ask(op::SETATTR, node, &chown(1000)), Err(Errno::PERM));
}

#[test]
fn appending_goes_to_the_end_and_pages_to_their_place() {
    let mut hand = hand();
    fs::write(hand.shared("log"), "0123456789").unwrap();
    let node = hand.look_up(ROOT_ID, b"log").unwrap();
    let handle = hand.open(node, libc::O_WRONLY | libc::O_APPEND).unwrap();
    // Another writer came in between: the offset is out of date.
    assert_eq!(hand.write(handle, 3, b"end"), Ok(3));
    let page = [longs(&[handle, 0]), words(&[2, 1]), longs(&[0, 0]), b"AB".to_vec()].concat();
    hand.ask(op::WRITE, node, &page).unwrap();
    assert_eq!(fs::read(hand.shared("log")).unwrap(), b"AB23456789end");
}

#[test]
fn malformed_messages_are_refused_or_ignored() {
    let mut hand = hand();
    for length in 0..40 {
        assert!(hand.raw(&vec![0xff; length], MAX_REPLY).is_empty());
    }
    for opcode in 0..60 {
        for body in [&[][..], &[0xff; 7], &[0xff; 300]] {
            if let op::FORGET | op::INTERRUPT | op::BATCH_FORGET = opcode {
                continue;
            }
            if [op::STATFS, op::DESTROY, op::SYNCFS].contains(&opcode) {
                hand.ask(opcode, ROOT_ID, body).unwrap();
                continue;
            }
            match (opcode, body) {
                // Whoever asks for this says nothing more than about which file.
                (op::OPENDIR, _) => continue,
                // Any answer will do, as long as there is one.
                _ => drop(hand.ask(opcode, ROOT_ID, body)),
            }
        }
    }
    // No room for an answer, and room for its header only.
    let request = [words(&[40, op::STATFS]), longs(&[1, 1]), words(&[0; 4])].concat();
    assert!(hand.raw(&request, 15).is_empty());
    let reply = hand.raw(&request, 16);
    assert_eq!(word(&reply, 4).cast_signed(), -Errno::RANGE.raw_os_error());
    // What does not fit is not counted either.
    fs::write(hand.shared("f"), "").unwrap();
    let request = [
        words(&[42, op::LOOKUP]),
        longs(&[1, 1]),
        words(&[0; 4]),
        b"f\0".to_vec(),
    ]
    .concat();
    hand.raw(&request, 100);
    assert_eq!(hand.server.nodes.count(), 1);
}

#[test]
fn a_directory_is_served_over_a_stream_until_the_stream_ends() {
    use crate::stream::{Answer, Remote, serve};
    use std::os::unix::net::UnixStream;
    let hand = hand();
    fs::write(hand.shared("file"), "far away").unwrap();
    let (near, far) = UnixStream::pair().unwrap();
    let breaker = near.try_clone().unwrap();
    let server = std::thread::spawn(move || {
        let mut far = far;
        serve(&hand.server, &mut far).map(|()| hand)
    });
    let remote = Remote::new(near);
    let mut reply = Reply::default();
    let mut ask = |opcode: u32, node: u64, body: &[u8], room: usize| {
        let length = u32::try_from(40 + body.len()).unwrap();
        let head = [words(&[length, opcode]), longs(&[5, node]), words(&[0; 4])].concat();
        remote.answer(&[head, body.to_vec()].concat(), room, &mut reply);
        reply.as_bytes().to_vec()
    };
    let found = ask(op::LOOKUP, ROOT_ID, b"file\0", 4096);
    let node = long(&found, 16);
    let opened = ask(op::OPEN, node, &words(&[0, 0]), 4096);
    let read = [longs(&[long(&opened, 16), 0]), words(&[100, 0]), longs(&[0, 0])].concat();
    assert_eq!(&ask(op::READ, node, &read, 4096)[16..], b"far away");
    // What wants no reply has none, and the next one has its own.
    assert!(ask(op::FORGET, node, &longs(&[1]), 0).is_empty());
    assert_eq!(word(&ask(op::STATFS, ROOT_ID, &[], 4096), 0), 96);
    breaker.shutdown(std::net::Shutdown::Both).unwrap();
    server.join().unwrap().unwrap();
    for _ in 0..2 {
        let lost = ask(op::STATFS, ROOT_ID, &[], 4096);
        assert_eq!(word(&lost, 4).cast_signed(), -Errno::IO.raw_os_error());
        assert!(ask(op::FORGET, node, &longs(&[1]), 0).is_empty());
    }
}

#[test]
fn a_stream_of_nonsense_is_an_error() {
    let hand = hand();
    let serve = |bytes: &[u8]| {
        let mut stream = std::io::Cursor::new(bytes.to_vec());
        crate::stream::serve(&hand.server, &mut stream)
    };
    assert!(serve(&[]).is_ok());
    assert!(serve(&[1, 2, 3, 4, 5]).is_err(), "it ends within a frame");
    assert!(
        serve(&[0, 0, 0, 0, 255, 255, 255, 255]).is_err(),
        "a request that is too long"
    );
}
