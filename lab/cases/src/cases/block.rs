//! A disk keeps what is written to it: every engine, several queues, flush, discard, write zeroes, read-only, limits.

use std::fs::{self, File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use vmm_api::devices::{BlockConfig, BlockEngine, BlockLimits};

use crate::vm::{self, Builder};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "block",
    limit: Duration::from_secs(400),
    host,
    guest: Some(guest),
};

const SIZE: u64 = 64 << 20;
const PATTERN_AT: u64 = 8 << 20;
const DISCARDED: (u64, u64) = (16 << 20, 4 << 20);

fn host(host: &Host) -> Result<()> {
    for (name, engine) in [("io-uring", BlockEngine::IoUring), ("threads", BlockEngine::Threads)] {
        let path = host.scratch.join(name);
        let disk = OpenOptions::new().read(true).write(true).create_new(true).open(&path)?;
        disk.set_len(SIZE)?;
        // What will be discarded is there at first.
        disk.write_all_at(&vec![0x55; usize::try_from(DISCARDED.1)?], DISCARDED.0)?;
        let before = disk.metadata()?.blocks();
        let mut builder = Builder::new(host)?.cpus(2);
        let file = builder.fd(disk.try_clone()?);
        let config = BlockConfig {
            file,
            read_only: false,
            queues: 2,
            serial: "data".into(),
            engine,
            limits: BlockLimits::default(),
        };
        builder.device("data", &config)?;
        let file = builder.fd(File::open(&path)?);
        builder.device(
            "again",
            &BlockConfig {
                file,
                read_only: true,
                queues: 1,
                serial: "again".into(),
                engine,
                limits: BlockLimits::default(),
            },
        )?;
        let machine = builder.start()?;
        let mut agent = machine.agent()?;
        vm::install(&mut agent)?;
        vm::guest_half(&mut agent, CASE.name, &[])?;
        drop(machine);
        let mut pattern = vec![0; 1 << 20];
        disk.read_exact_at(&mut pattern, PATTERN_AT)?;
        ensure!(
            pattern.iter().enumerate().all(|(index, &byte)| byte == expected(index)),
            "{name}: the file differs"
        );
        let mut discarded = vec![1; usize::try_from(DISCARDED.1)?];
        disk.read_exact_at(&mut discarded, DISCARDED.0)?;
        ensure!(
            discarded.iter().all(|&byte| byte == 0),
            "{name}: discarded blocks are not zero"
        );
        let after = disk.metadata()?.blocks();
        ensure!(
            after < before,
            "{name}: discard freed nothing: {before} blocks, then {after}"
        );
    }
    Ok(())
}

fn expected(index: usize) -> u8 {
    u8::try_from((index * 7 + index / 4096) % 251).unwrap_or(0)
}

/// The disk with this serial number.
pub(super) fn find(serial: &str) -> Result<PathBuf> {
    for entry in fs::read_dir("/sys/block")? {
        let entry = entry?;
        let found = fs::read_to_string(entry.path().join("serial")).unwrap_or_default();
        if found.trim() == serial {
            return Ok(PathBuf::from("/dev").join(entry.file_name()));
        }
    }
    bail!("no disk has the serial number `{serial}`")
}

fn guest(_: &[String]) -> Result<()> {
    let path = find("data")?;
    let name = path
        .file_name()
        .context("a device without a name")?
        .to_string_lossy()
        .into_owned();
    let queue = PathBuf::from("/sys/block").join(&name);
    ensure!(queue.join("mq").read_dir()?.count() == 2, "the disk has not two queues");
    let mut disk = OpenOptions::new().read(true).write(true).open(&path)?;
    ensure!(disk.seek(SeekFrom::End(0))? == SIZE, "the disk's size is wrong");
    let pattern: Vec<u8> = (0..1 << 20).map(expected).collect();
    disk.seek(SeekFrom::Start(PATTERN_AT))?;
    disk.write_all(&pattern)?;
    disk.sync_all()?;
    blkdiscard(&disk, DISCARDED)?;
    drop_caches()?;
    let mut back = vec![0; pattern.len()];
    disk.read_exact_at(&mut back, PATTERN_AT)?;
    ensure!(back == pattern, "what was read back differs");
    random_writes(&disk)?;

    let again = find("again")?;
    let name = again.file_name().context("a device without a name")?;
    let read_only = fs::read_to_string(PathBuf::from("/sys/block").join(name).join("ro"))?;
    ensure!(read_only.trim() == "1", "a read-only disk says that it is not");
    // Linux 6.1 refuses the write, not the open.
    if let Ok(disk) = OpenOptions::new().write(true).open(&again) {
        ensure!(
            disk.write_all_at(&[1; 512], 0).is_err(),
            "a read-only disk was written to"
        );
    }
    back.fill(0);
    File::open(&again)?.read_exact_at(&mut back, PATTERN_AT)?;
    ensure!(back == pattern, "the second disk over the same file differs");
    Ok(())
}

/// Scattered sectors, each with its own number in it, through both queues at once.
fn random_writes(disk: &File) -> Result<()> {
    const AREA: u64 = 32 << 20;
    const SECTORS: u64 = 400;
    let place = |index: u64| AREA + (index * 7919 % 60_000) * 512;
    std::thread::scope(|scope| -> Result<()> {
        let halves: Vec<_> = [0, 1]
            .map(|half| {
                scope.spawn(move || -> Result<()> {
                    for index in (half..SECTORS).step_by(2) {
                        disk.write_all_at(&[u8::try_from(index % 251)?; 512], place(index))?;
                    }
                    Ok(())
                })
            })
            .into_iter()
            .collect();
        for half in halves {
            half.join().map_err(|_| anyhow::anyhow!("a writer panicked"))??;
        }
        Ok(())
    })?;
    disk.sync_all()?;
    drop_caches()?;
    for index in 0..SECTORS {
        let mut sector = [0; 512];
        disk.read_exact_at(&mut sector, place(index))?;
        ensure!(sector == [u8::try_from(index % 251)?; 512], "sector {index} differs");
    }
    Ok(())
}

fn drop_caches() -> Result<()> {
    Ok(fs::write("/proc/sys/vm/drop_caches", "3")?)
}

#[allow(unsafe_code, reason = "BLKDISCARD has no safe wrapper")]
fn blkdiscard(disk: &File, (start, length): (u64, u64)) -> Result<()> {
    const BLKDISCARD: libc::Ioctl = 0x1277;
    let range = [start, length];
    // SAFETY: BLKDISCARD reads two 64-bit numbers, which `range` is.
    let result = unsafe { libc::ioctl(disk.as_raw_fd(), BLKDISCARD, range.as_ptr()) };
    ensure!(result == 0, "BLKDISCARD: {}", std::io::Error::last_os_error());
    Ok(())
}
