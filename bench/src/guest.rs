//! The guest's half of the disk figures: this program as PID 1 of an initramfs, with nothing else in it.
//!
//! It reads `/dev/vda` past the guest's page cache, a fixed number of times at fixed places, takes the time inside the
//! guest and writes one line a figure. It does not know which VMM it runs under.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use anyhow::{Context, Result};
use rustix::fs::OFlags;
use rustix::mount::{MountFlags, mount};

use crate::machine::now_ns;
use crate::net;

/// What each line of a result begins with.
pub(crate) const RESULT: &str = "basalt-bench: result";
/// The last line, when all went well.
pub(crate) const END: &str = "basalt-bench: end";

const DISK: &str = "/dev/vda";

/// How large the disk is.
pub(crate) const DISK_BYTES: u64 = 256 << 20;

/// A way to read the disk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Workload {
    pub(crate) name: &'static str,
    block: usize,
    /// Reads of each thread.
    reads: u64,
    threads: u64,
    random: bool,
}

/// All of them, in the order in which they are done.
pub(crate) const WORKLOADS: [Workload; 4] = [
    Workload {
        name: "4k-random-qd1",
        block: 4096,
        reads: 1500,
        threads: 1,
        random: true,
    },
    Workload {
        name: "4k-random-qd4",
        block: 4096,
        reads: 600,
        threads: 4,
        random: true,
    },
    Workload {
        name: "1m-sequential-qd1",
        block: 1 << 20,
        reads: 192,
        threads: 1,
        random: false,
    },
    Workload {
        name: "1m-sequential-qd4",
        block: 1 << 20,
        reads: 60,
        threads: 4,
        random: false,
    },
];

/// PID 1: never returns to the kernel, which would panic.
pub(crate) fn run_as_init() -> ! {
    let network = std::env::args().any(|word| word == net::WORD);
    if let Err(error) = if network { net::guest() } else { run() } {
        say(&format!("basalt-bench: failed: {error:#}"));
    }
    power_off()
}

/// The end of a guest.
pub(crate) fn power_off() -> ! {
    // Buffered writes to a console do not exist; the power may go.
    if let Err(error) = rustix::system::reboot(rustix::system::RebootCommand::PowerOff) {
        say(&format!("basalt-bench: cannot power off: {error}"));
    }
    loop {
        std::thread::park();
    }
}

pub(crate) fn say(line: &str) {
    // Whom to tell that the console is gone?
    drop(std::io::stdout().write_all(format!("{line}\n").as_bytes()));
}

fn run() -> Result<()> {
    mount("devtmpfs", "/dev", "devtmpfs", MountFlags::empty(), c"")?;
    let flags = i32::try_from(OFlags::DIRECT.bits())?;
    let disk = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(DISK)
        .with_context(|| format!("cannot open {DISK}"))?;
    // Whatever is slow the first time: rings, the host's threads, the second-stage page tables of the buffers.
    perform(&disk, &WORKLOADS[0], 64)?;
    perform(&disk, &WORKLOADS[2], 8)?;
    for workload in WORKLOADS {
        let elapsed = perform(&disk, &workload, workload.reads)?;
        let reads = workload.reads * workload.threads;
        say(&format!("{RESULT} {} {reads} {elapsed}", workload.name));
    }
    say(END);
    Ok(())
}

/// The nanoseconds that `reads` of each thread took.
fn perform(disk: &File, workload: &Workload, reads: u64) -> Result<u64> {
    let start = now_ns();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..workload.threads)
            .map(|thread| scope.spawn(move || read(disk, workload, thread, reads)))
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| anyhow::anyhow!("a reader panicked"))?)
    })?;
    Ok(now_ns() - start)
}

fn read(disk: &File, workload: &Workload, thread: u64, reads: u64) -> Result<()> {
    let mut memory = vec![0; workload.block + 4096];
    // O_DIRECT wants the buffer where a block begins.
    let skip = memory.as_ptr().align_offset(4096);
    let buffer = memory
        .get_mut(skip..skip + workload.block)
        .context("a buffer cannot be aligned")?;
    let blocks = DISK_BYTES / u64::try_from(workload.block)?;
    let mut random = Random::new(thread);
    for index in 0..reads {
        let block = if workload.random {
            random.next() % blocks
        } else {
            (thread * reads + index) % blocks
        };
        disk.read_exact_at(buffer, block * u64::try_from(workload.block)?)?;
    }
    Ok(())
}

/// Marsaglia's xorshift64: the same places in every run.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        // Zero would stay zero.
        Self((seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Reads and nanoseconds of one workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reading {
    pub(crate) name: String,
    pub(crate) reads: u64,
    pub(crate) nanoseconds: u64,
}

impl Reading {
    /// A line that the guest's half has written.
    pub(crate) fn parse(line: &str) -> Option<Self> {
        let at = line.find(RESULT)?;
        let mut words = line[at + RESULT.len()..].split_whitespace();
        let reading = Self {
            name: words.next()?.to_owned(),
            reads: words.next()?.parse().ok()?,
            nanoseconds: words.next()?.parse().ok()?,
        };
        words.next().is_none().then_some(reading)
    }

    /// Reads a second.
    #[allow(clippy::cast_precision_loss, reason = "counts and times are far below 2^53")]
    pub(crate) fn rate(&self) -> f64 {
        self.reads as f64 * 1e9 / self.nanoseconds.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_read_back() {
        let reading = Reading::parse("[    1.2] basalt-bench: result 4k-random-qd1 2000 500000000").unwrap();
        assert_eq!(
            reading,
            Reading {
                name: "4k-random-qd1".into(),
                reads: 2000,
                nanoseconds: 500_000_000
            }
        );
        assert!((reading.rate() - 4000.0).abs() < 1e-9);
        for bad in [
            "basalt-bench: result x 1",
            "basalt-bench: result x 1 b",
            "x 1 1",
            "basalt-bench: result x 1 1 1",
        ] {
            assert_eq!(Reading::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn places_are_the_same_in_every_run_and_differ_between_threads() {
        let places = |seed| {
            let mut random = Random::new(seed);
            [random.next(), random.next(), random.next()]
        };
        assert_eq!(places(0), places(0));
        assert_ne!(places(0), places(1));
        assert!(places(0).iter().all(|&place| place != 0));
    }

    #[test]
    fn every_workload_reads_blocks_that_the_disk_has() {
        for workload in WORKLOADS {
            assert_eq!(DISK_BYTES % workload.block as u64, 0);
        }
    }

    #[test]
    fn reading_a_file_works_in_every_way() {
        let path = std::env::temp_dir().join(format!("basalt-bench-{}", std::process::id()));
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&path)
            .unwrap();
        file.set_len(DISK_BYTES).unwrap();
        for workload in WORKLOADS {
            perform(&file, &workload, 3).unwrap();
        }
        std::fs::remove_file(&path).unwrap();
    }
}
