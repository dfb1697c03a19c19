//! The load that the case `snapshot` saves and restores: it checks itself and counts what is wrong.
//!
//! Threads write blocks to a disk past the page cache and read others back, against a table in memory; sleep and count;
//! take entropy; have bytes echoed by TCP; hold connections, and answer who asks. fio and a terminal have files of their own.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, Once};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::net::SocketFlags;

use super::network::WORLD4;
use super::vsock::socket;
use super::{snapshot_fio as fio, snapshot_pty as pty};

/// The disk's serial number and size.
pub(super) const DISK: &str = "data";
pub(super) const DISK_BYTES: u64 = fio::FROM + fio::BYTES;

/// Ports: a report for each connection; an echo that is held; text for the console; what to begin or end.
pub(super) const REPORT: u32 = 5100;
pub(super) const HOLD: u32 = 5101;
pub(super) const PRINT: u32 = 5102;
pub(super) const STREAM: u32 = 5103;

/// Where the world outside echoes, and how the guest gets there.
pub(super) const ECHO: &str = "[::]:7000";
const ECHO_PORT: u16 = 7000;

/// What is asked at [`STREAM`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stream {
    Begin = 1,
    End = 2,
    /// All else that is at work.
    Loads = 3,
}

const BLOCK: usize = 4096;

/// An emulated host may be that slow.
const PATIENCE: Duration = Duration::from_secs(30);
const BLOCKS: usize = 4096;

/// Timers may be late in an emulated host, by this much at most while nothing is saved; a snapshot takes no guest time.
const TICK: Duration = Duration::from_millis(10);

static TICKS: AtomicU64 = AtomicU64::new(0);
static DISK_ROUNDS: AtomicU64 = AtomicU64::new(0);
static ECHOES: AtomicU64 = AtomicU64::new(0);
/// Of the TCP stream that is to be; 0 and all even numbers are none.
static GENERATION: AtomicU64 = AtomicU64::new(0);
static RESETS: AtomicU64 = AtomicU64::new(0);
static ERRORS: AtomicU64 = AtomicU64::new(0);
static WORDS: Mutex<String> = Mutex::new(String::new());

/// What the guest says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Report {
    pub(super) ticks: u64,
    pub(super) disk: u64,
    pub(super) echoes: u64,
    pub(super) resets: u64,
    pub(super) errors: u64,
    /// KiB that fio has written, and has found to be right.
    pub(super) fio: (u64, u64),
    /// Records through a terminal: its program's own, and answers to what was typed.
    pub(super) terminal: (u64, u64),
    pub(super) boot_id: String,
    /// What was wrong.
    pub(super) words: String,
}

impl Report {
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut words = text.splitn(11, ' ');
        let mut number = || words.next()?.parse().ok();
        Some(Self {
            ticks: number()?,
            disk: number()?,
            echoes: number()?,
            resets: number()?,
            errors: number()?,
            fio: (number()?, number()?),
            terminal: (number()?, number()?),
            boot_id: words.next()?.to_owned(),
            words: words.next()?.to_owned(),
        })
    }
}

fn wrong(what: &str) {
    ERRORS.fetch_add(1, Ordering::SeqCst);
    if let Ok(mut words) = WORDS.lock()
        && words.len() < 500
    {
        words.push_str(what);
        words.push_str("; ");
    }
}

/// Runs for ever.
pub(super) fn run(arguments: &[String]) -> Result<()> {
    if arguments.first().is_some_and(|word| word == pty::PROGRAM) {
        return pty::program();
    }
    let report = listen(REPORT)?;
    let hold = listen(HOLD)?;
    let print = listen(PRINT)?;
    let stream = listen(STREAM)?;
    std::thread::spawn(move || {
        serve(&hold, |stream| {
            std::thread::spawn(move || echo(stream));
        })
    });
    std::thread::spawn(move || {
        serve(&print, |mut stream| {
            let mut text = String::new();
            let printed = stream
                .read_to_string(&mut text)
                .and_then(|_| File::create("/dev/console")?.write_all(format!("{text}\n").as_bytes()));
            if let Err(error) = printed {
                wrong(&format!("console: {error}"));
            }
        })
    });
    std::thread::spawn(move || serve(&stream, follow));
    serve(&report, |mut stream| {
        // Who asks may have gone: a restore ends connections.
        drop(stream.write_all(tell().as_bytes()));
    });
    Ok(())
}

/// Begins all loads, one after the other: each is at work before the next one begins, so that the programs that two of them start are
/// not loaded while all others take the processors of a host that is slow.
fn begin_loads() {
    type Load = (fn() -> Result<()>, fn() -> bool);
    let loads: [Load; 5] = [
        (fio_load, || fio::progress().0 > 0),
        (pty::load, || pty::progress().1 > 0),
        (tick_load, || TICKS.load(Ordering::SeqCst) > 0),
        (entropy_load, || true),
        (disk_load, || true),
    ];
    for (work, is_at_work) in loads {
        std::thread::spawn(move || {
            if let Err(error) = work() {
                wrong(&format!("{error:#}"));
            }
        });
        let deadline = Instant::now() + PATIENCE;
        while !is_at_work() && Instant::now() < deadline {
            std::thread::sleep(TICK);
        }
    }
}

fn tell() -> String {
    let number = |counter: &AtomicU64| counter.load(Ordering::SeqCst);
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let words = WORDS.lock().map(|words| words.clone()).unwrap_or_default();
    let (fio, terminal) = (fio::progress(), pty::progress());
    format!(
        "{} {} {} {} {} {} {} {} {} {} {words}",
        number(&TICKS),
        number(&DISK_ROUNDS),
        number(&ECHOES),
        number(&RESETS),
        number(&ERRORS),
        fio.0,
        fio.1,
        terminal.0,
        terminal.1,
        boot_id.trim()
    )
}

fn listen(port: u32) -> Result<OwnedFd> {
    let listener = socket(libc::VMADDR_CID_ANY, port, libc::bind)?;
    rustix::net::listen(&listener, 8)?;
    Ok(listener)
}

/// Programs that loads start inherit no connection: nobody would see its end before theirs.
fn serve(listener: &OwnedFd, mut answer: impl FnMut(UnixStream)) {
    loop {
        match rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(stream) => answer(UnixStream::from(stream)),
            Err(error) => wrong(&format!("accept: {error}")),
        }
    }
}

/// Sends back what comes, and counts its end if that is a reset.
fn echo(mut stream: UnixStream) {
    let mut buffer = [0; 64];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return,
            Ok(count) => drop(stream.write_all(buffer.get(..count).unwrap_or_default())),
            // The second is what who was not reading at that moment gets.
            Err(error) if matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::NotConnected) => {
                RESETS.fetch_add(1, Ordering::SeqCst);
                return;
            }
            Err(error) => return wrong(&format!("a held connection: {error}")),
        }
    }
}

/// Begins or ends a TCP stream, or begins all else, and says that it has.
fn follow(mut asked: UnixStream) {
    static LOADS: Once = Once::new();
    let mut what = [0];
    if asked.read_exact(&mut what).is_err() {
        return;
    }
    if what == [Stream::Loads as u8] {
        LOADS.call_once(|| drop(std::thread::spawn(begin_loads)));
        return drop(asked.write_all(&[0]));
    }
    let begin = what == [Stream::Begin as u8];
    let last = GENERATION.load(Ordering::SeqCst);
    let next = last + if begin == last.is_multiple_of(2) { 1 } else { 2 };
    GENERATION.store(next, Ordering::SeqCst);
    if begin {
        std::thread::spawn(move || {
            // One that was ended may end in any way.
            if let Err(error) = tcp_load(next)
                && GENERATION.load(Ordering::SeqCst) == next
            {
                wrong(&format!("the TCP stream: {error:#}"));
            }
        });
    }
    drop(asked.write_all(&[0]));
}

/// Has the world send back what it is sent, in one connection.
fn tcp_load(generation: u64) -> Result<()> {
    let address = SocketAddr::new(WORLD4.parse()?, ECHO_PORT);
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    // It says first whom it sees.
    while {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        byte != *b"\n"
    } {}
    let (mut sent, mut back) = (vec![0; BLOCK], vec![0; BLOCK]);
    for version in 0.. {
        if GENERATION.load(Ordering::SeqCst) != generation {
            break;
        }
        fill(&mut sent, usize::try_from(generation)?, version);
        stream.write_all(&sent)?;
        stream.read_exact(&mut back)?;
        if sent != back {
            bail!("what came back for {version} differs");
        }
        ECHOES.fetch_add(1, Ordering::SeqCst);
    }
    Ok(())
}

/// Counts at a steady pace, by timers; time never goes back, and does not jump while the VM is saved.
fn tick_load() -> Result<()> {
    let boot_id = fs::read("/proc/sys/kernel/random/boot_id")?;
    let mut last = Instant::now();
    loop {
        std::thread::sleep(TICK);
        let now = Instant::now();
        if now < last {
            wrong("time went back");
        }
        if now.duration_since(last) < TICK {
            wrong("a timer came early");
        }
        last = now;
        TICKS.fetch_add(1, Ordering::SeqCst);
        if fs::read("/proc/sys/kernel/random/boot_id")? != boot_id {
            wrong("the boot id changed");
        }
    }
}

/// Keeps the entropy device busy.
fn entropy_load() -> Result<()> {
    let mut source = File::open("/dev/hwrng").context("/dev/hwrng")?;
    let mut last = [0; 32];
    loop {
        let mut bytes = [0; 32];
        source.read_exact(&mut bytes)?;
        if bytes == last {
            wrong("the entropy device repeats itself");
        }
        last = bytes;
        std::thread::sleep(TICK);
    }
}

/// A block with a place, a version, and bytes that follow from both.
fn fill(buffer: &mut [u8], block: usize, version: u32) {
    let seed = (block as u64) << 32 | u64::from(version);
    for (index, word) in buffer.chunks_exact_mut(8).enumerate() {
        let value = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(index as u64);
        word.copy_from_slice(&value.to_le_bytes());
    }
}

/// Blocks of memory that a direct access takes.
#[repr(align(4096))]
struct Aligned([u8; BLOCK]);

/// Writes a block, reads two others back that were written some time ago, for ever.
fn disk_load() -> Result<()> {
    let path = find(DISK)?;
    let disk = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(path)?;
    let mut versions = vec![0_u32; BLOCKS];
    let mut written = Vec::new();
    let (mut buffer, mut expected) = (Box::new(Aligned([0; BLOCK])), vec![0; BLOCK]);
    for round in 0_usize.. {
        let block = round.wrapping_mul(2_654_435_761) % BLOCKS;
        versions[block] += 1;
        fill(&mut buffer.0, block, versions[block]);
        disk.write_all_at(&buffer.0, (block * BLOCK) as u64)?;
        written.push(block);
        for step in [1, 7] {
            let old = written[written.len().saturating_sub(step * 13) % written.len()];
            disk.read_exact_at(&mut buffer.0, (old * BLOCK) as u64)?;
            fill(&mut expected, old, versions[old]);
            if buffer.0[..] != expected[..] {
                wrong(&format!(
                    "block {old}, version {}, differs in round {round}",
                    versions[old]
                ));
            }
        }
        if round % 16 == 0 {
            disk.sync_data()?;
        }
        DISK_ROUNDS.fetch_add(1, Ordering::SeqCst);
    }
    Ok(())
}

fn fio_load() -> Result<()> {
    fio::load(&find(fio::DISK)?, &find(DISK)?)
}

fn find(wanted: &str) -> Result<PathBuf> {
    for entry in fs::read_dir("/sys/block")? {
        let entry = entry?;
        let serial = fs::read_to_string(entry.path().join("serial")).unwrap_or_default();
        if serial.trim() == wanted {
            return Ok(PathBuf::from("/dev").join(entry.file_name()));
        }
    }
    bail!("no disk has the serial number `{wanted}`")
}
