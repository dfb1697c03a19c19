//! A disk whose power can fail: an ext4 on a loop device whose backing file is served by this process (FUSE), which tells what was
//! flushed from what was not.
//!
//! ```text
//!  the state directory ─► ext4 ─► loop device ─► FUSE ─► here: WRITE ─► pending ─ FSYNC ─► durable
//! ```
//! A cut of the power is a copy of both sets at one instant, while everything goes on. The disk that is found afterwards has
//! everything durable, and of what was pending nothing, or any part: a disk writes what it has not been told to flush when it likes.

#![allow(
    clippy::cast_possible_truncation,
    reason = "sizes of files on a host of 64 bits, and small numbers"
)]

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

use fuse::{MAX_REPLY, MAX_REQUEST, Options, Owners, Reply, Server, abi};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

const BLOCK: usize = 4096;

/// Where a write's offset and data are in its request: behind the header (40 bytes) there are its handle, offset, size, and what is
/// of no interest here (`fuse_write_in` of Linux).
const WRITE_OFFSET: usize = 48;
const WRITE_DATA: usize = 80;

type Block = Arc<[u8; BLOCK]>;

/// What a disk has, and what it was given since it was last told to flush.
#[derive(Clone)]
pub(crate) struct Medium {
    durable: Vec<Option<Block>>,
    pending: Vec<(u64, Arc<[u8]>)>,
}

impl Medium {
    fn flush(&mut self) {
        for (offset, data) in std::mem::take(&mut self.pending) {
            self.apply(offset, &data);
        }
    }

    fn apply(&mut self, mut offset: u64, mut data: &[u8]) {
        while !data.is_empty() {
            let (number, within) = (offset as usize / BLOCK, offset as usize % BLOCK);
            let length = data.len().min(BLOCK - within);
            let block = self.durable[number].get_or_insert_with(|| Arc::new([0; BLOCK]));
            Arc::make_mut(block)[within..within + length].copy_from_slice(&data[..length]);
            (offset, data) = (offset + length as u64, &data[length..]);
        }
    }

    /// So many writes are pending.
    pub(crate) fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Writes into a new file what a disk has after its power failed: of what was pending only what `survives` says.
    pub(crate) fn write(mut self, path: &Path, mut survives: impl FnMut() -> bool) {
        for (offset, data) in std::mem::take(&mut self.pending) {
            if survives() {
                self.apply(offset, &data);
            }
        }
        let file = File::create(path).unwrap();
        file.set_len((self.durable.len() * BLOCK) as u64).unwrap();
        for (number, block) in self.durable.iter().enumerate() {
            if let Some(block) = block {
                file.write_all_at(&block[..], (number * BLOCK) as u64).unwrap();
            }
        }
    }
}

/// Such a disk with an ext4, mounted.
pub(crate) struct Drive {
    medium: Arc<Mutex<Medium>>,
    place: PathBuf,
    mounted: Option<Mounted>,
}

/// A file with an ext4 that is mounted.
pub(crate) struct Mounted {
    device: String,
    at: PathBuf,
}

impl Mounted {
    pub(crate) fn new(file: &Path, at: &Path) -> Self {
        let device = run("losetup", &["-f", "--show", text(file)]);
        let mounted = Self {
            device,
            at: at.to_owned(),
        };
        // Its journal is written every second: more states than those that somebody has flushed come to the disk.
        run("mount", &["-t", "ext4", "-o", "commit=1", &mounted.device, text(at)]);
        mounted
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Without the mount there is nothing to be kept.
        rustix::mount::unmount(&self.at, UnmountFlags::DETACH).unwrap_or_default();
        Command::new("losetup")
            .args(["-d", &self.device])
            .status()
            .map(drop)
            .unwrap_or_default();
    }
}

impl Drive {
    /// A disk of so many bytes, served through a directory in `place` and mounted at `at`.
    pub(crate) fn new(place: &Path, bytes: u64, at: &Path) -> Self {
        let (backing, served) = (place.join("backing"), place.join("served"));
        for directory in [&backing, &served, &at.to_owned()] {
            fs::create_dir_all(directory).unwrap();
        }
        let disk = backing.join("disk");
        File::create(&disk).unwrap().set_len(bytes).unwrap();
        run(
            "mkfs.ext4",
            &[
                "-q",
                "-F",
                "-E",
                "nodiscard,lazy_itable_init=0,lazy_journal_init=0",
                text(&disk),
            ],
        );
        let medium = Arc::new(Mutex::new(read(&disk)));
        serve(&backing, &served, Arc::clone(&medium));
        let mounted = Mounted::new(&served.join("disk"), at);
        Self {
            medium,
            place: served,
            mounted: Some(mounted),
        }
    }

    /// What is on the disk, and what is not yet, at this moment.
    pub(crate) fn cut(&self) -> Medium {
        self.medium.lock().unwrap().clone()
    }
}

impl Drop for Drive {
    fn drop(&mut self) {
        drop(self.mounted.take());
        rustix::mount::unmount(&self.place, UnmountFlags::DETACH).unwrap_or_default();
    }
}

fn read(disk: &Path) -> Medium {
    let mut file = File::open(disk).unwrap();
    let count = file.metadata().unwrap().len() as usize / BLOCK;
    let mut block = [0; BLOCK];
    let mut next = || {
        file.read_exact(&mut block).unwrap();
        block.iter().any(|&byte| byte != 0).then(|| Arc::new(block))
    };
    Medium {
        durable: (0..count).map(|_| next()).collect(),
        pending: Vec::new(),
    }
}

/// Serves `backing` at `served` from a thread of its own until that is unmounted.
fn serve(backing: &Path, served: &Path, medium: Arc<Mutex<Medium>>) {
    let options = Options {
        read_only: false,
        owners: Owners::One { uid: 0, gid: 0 },
        max_nodes: 64,
        max_handles: 64,
    };
    let open = |path: &Path| OwnedFd::from(File::open(path).unwrap());
    let server = Server::new(open(backing), open(Path::new("/proc/self/fd")), options).unwrap();
    let mut device = File::options().read(true).write(true).open("/dev/fuse").unwrap();
    let data = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,allow_other",
        device.as_raw_fd()
    );
    let data = std::ffi::CString::new(data).unwrap();
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    rustix::mount::mount("basalt-test", served, "fuse", flags, data.as_c_str()).unwrap();
    std::thread::spawn(move || {
        let mut request = vec![0; MAX_REQUEST + 4096];
        let mut reply = Reply::default();
        loop {
            let length = match device.read(&mut request) {
                Ok(length) => length,
                // A request that was taken back.
                Err(error)
                    if matches!(
                        error.kind(),
                        std::io::ErrorKind::NotFound | std::io::ErrorKind::Interrupted
                    ) =>
                {
                    continue;
                }
                // It is mounted no more.
                Err(_) => return,
            };
            let request = &request[..length];
            let opcode = u32::from_ne_bytes(request[4..8].try_into().unwrap());
            {
                // Held over both, so that a cut sees no half of it.
                let mut medium = medium.lock().unwrap();
                match opcode {
                    abi::op::WRITE => {
                        let offset = u64::from_ne_bytes(request[WRITE_OFFSET..WRITE_OFFSET + 8].try_into().unwrap());
                        medium.pending.push((offset, request[WRITE_DATA..].into()));
                    }
                    abi::op::FSYNC => medium.flush(),
                    _ => (),
                }
            }
            match opcode {
                // A discard: the loop device then does without.
                abi::op::FALLOCATE => reply.refuse(request, MAX_REPLY, Errno::NOSYS),
                _ => server.answer(request, MAX_REPLY, &mut reply),
            }
            if !reply.as_bytes().is_empty() && device.write(reply.as_bytes()).is_err() {
                // Whoever asked is gone.
                continue;
            }
        }
    });
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn run(program: &str, arguments: &[&str]) -> String {
    let mut command = Command::new(program);
    command.args(arguments).env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    let output = command.output().unwrap();
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}
