//! fio under the case `snapshot`: it writes blocks past the page cache, each with a checksum of its own, and reads them back,
//! for ever. No image has it: it is the lab host's own, which comes into the guest on a disk, with the libraries that it
//! needs.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, bail, ensure};

use super::snapshot_stub as stub;

/// The serial number of the disk with the program.
pub(super) const DISK: &str = "fio";

/// The part of the data disk that it works on.
pub(super) const FROM: u64 = 16 << 20;
pub(super) const BYTES: u64 = 8 << 20;

/// Where the disk is mounted in the guest.
const MOUNTED: &str = "/tmp/fio";

/// How many KiB it has written, and how many it has read back and found to be right.
static WRITTEN: AtomicU64 = AtomicU64::new(0);
static VERIFIED: AtomicU64 = AtomicU64::new(0);

/// Both, as of its last line.
pub(super) fn progress() -> (u64, u64) {
    (WRITTEN.load(Ordering::SeqCst), VERIFIED.load(Ordering::SeqCst))
}

/// Libraries of storage clusters and networks, a hundred megabytes with all that they need themselves, and how their functions'
/// names begin. fio needs the names.
const UNUSED: [&str; 8] = [
    "libgfapi.so.0",
    "libibverbs.so.1",
    "libnbd.so.0",
    "libpmem.so.1",
    "libpmemblk.so.1",
    "librados.so.2",
    "librbd.so.1",
    "librdmacm.so.1",
];
const UNUSED_NAMES: [&str; 7] = ["glfs_", "ibv_", "nbd_", "pmem", "rados_", "rbd_", "rdma_"];

/// Those that it does use.
const USED: [&str; 5] = ["libaio.so.1", "libc.so.6", "libm.so.6", "libnuma.so.1", "libz.so.1"];
const LOADER: &str = "ld-linux-x86-64.so.2";

/// What stands for all functions of those that it does not use.
const STUB: &str = "libunused.so";

/// Makes the disk, in the host: the program, what ldd(1) names of what it uses, and stubs.
pub(super) fn make_disk(scratch: &Path) -> Result<PathBuf> {
    let program = Path::new("/usr/bin/fio");
    let output = Command::new("ldd").arg(program).output().context("ldd")?;
    ensure!(output.status.success(), "ldd {}: {}", program.display(), output.status);
    let tree = scratch.join("fio-tree");
    fs::create_dir(&tree)?;
    let listed = String::from_utf8_lossy(&output.stdout).into_owned();
    for name in USED.iter().chain([&LOADER]) {
        let mut paths = listed.split_whitespace().filter(|word| word.starts_with('/'));
        let path = paths
            .find(|path| path.ends_with(&format!("/{name}")))
            .with_context(|| format!("ldd does not name {name}"))?;
        fs::copy(path, tree.join(name)).with_context(|| path.to_owned())?;
    }
    let bytes = fs::read(program)?;
    fs::copy(program, tree.join("fio"))?;
    fs::write(tree.join(STUB), stub::library(&stub::wanted(&bytes, &UNUSED_NAMES)?))?;
    for name in UNUSED {
        fs::write(tree.join(name), stub::library(&[]))?;
    }
    let disk = scratch.join("fio-disk");
    let made = Command::new("mkfs.erofs").args([&disk, &tree]).output()?;
    ensure!(
        made.status.success(),
        "mkfs.erofs: {}",
        String::from_utf8_lossy(&made.stderr)
    );
    fs::remove_dir_all(&tree)?;
    Ok(disk)
}

/// Runs it in the guest until it fails: `own` is its disk, `data` the one that it writes to.
pub(super) fn load(own: &Path, data: &Path) -> Result<()> {
    fs::create_dir_all(MOUNTED)?;
    let flags = rustix::mount::MountFlags::RDONLY;
    rustix::mount::mount(own, MOUNTED, "erofs", flags, None)?;
    let place = Path::new(MOUNTED);
    // Its loader by name: nothing of it is where its program says.
    let mut child = Command::new(place.join(LOADER))
        .arg("--library-path")
        .arg(place)
        .arg("--preload")
        .args([place.join(STUB), place.join("fio")])
        .arg(format!("--filename={}", data.display()))
        .args([format!("--offset={FROM}"), format!("--size={BYTES}")])
        .args([
            "--name=verify",
            "--thread",
            "--ioengine=libaio",
            "--iodepth=4",
            "--direct=1",
        ])
        .args(["--rw=randwrite", "--bs=4k", "--verify=crc32c", "--verify_backlog=64"])
        .args(["--verify_fatal=1", "--time_based", "--runtime=1000000"])
        .args(["--minimal", "--terse-version=3", "--status-interval=1"])
        .env("HOME", "/tmp")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("fio")?;
    let output = child.stdout.take().context("fio without output")?;
    let mut said = String::new();
    for line in BufReader::new(output).lines() {
        said = line?;
        if let Some((error, verified, written)) = parse(&said) {
            ensure!(error == 0, "fio has found an error: {said}");
            VERIFIED.store(verified, Ordering::SeqCst);
            WRITTEN.store(written, Ordering::SeqCst);
        }
    }
    let end = child.wait_with_output()?;
    bail!(
        "fio ended with {}: {said} {}",
        end.status,
        String::from_utf8_lossy(&end.stderr)
    )
}

/// Error, KiB read, KiB written (fio(1), terse output, version 3).
fn parse(line: &str) -> Option<(u64, u64, u64)> {
    let fields: Vec<&str> = line.split(';').collect();
    let number = |index: usize| fields.get(index)?.parse().ok();
    (fields.first() == Some(&"3")).then_some(())?;
    Some((number(4)?, number(5)?, number(46)?))
}
