//! A guest grows and shrinks while it runs: it uses all that it is given, what it gives back is the host's again, and a snapshot that is
//! taken in between goes on in another VMM, grows and shrinks there, with what the guest has in its memory. A part of what it is given came
//! zeroed.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

use agent_api::{Connection, VSOCK_PORT};
use anyhow::{Context, Result, bail, ensure};
use base::ByteSize;
use vmm_api::devices::{MEM_MIN_BLOCK, MemConfig, ZEROED_PIECE};
use vmm_api::{ClientError, ErrorKind, HotplugMemory};

use super::snapshot_files::Files;
use super::vsock::connect;
use crate::vm::{self, Builder, Vm};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "memory-resize",
    limit: Duration::from_secs(400),
    host,
    guest: Some(guest),
};

const BOOT: ByteSize = ByteSize::mib(256);
const REGION: ByteSize = ByteSize::mib(512);

/// What the guest's program holds: more than the guest has booted with, and a part of the region at least.
const HELD: ByteSize = ByteSize::mib(448);

/// What Linux needs to describe the region (16 MiB a GiB), and what else it keeps of it.
const OVERHEAD: ByteSize = ByteSize::mib(32);

/// Kernel memory that cannot be moved may stay in some blocks.
const STAYS: ByteSize = ByteSize::mib(128);

/// How long a guest may take to follow or to answer, in an emulated host.
const PATIENCE: Duration = Duration::from_secs(90);

/// Where the guest's program listens, in the guest.
const HOLDER: &str = "basalt-case-memory-holder";

/// What it is asked.
const VERIFY: &str = "verify";
const RELEASE: &str = "release";

/// And what it tells of the kernel's account.
const TOTAL: &str = "total";

fn host(host: &Host) -> Result<()> {
    let name = format!("basalt-case-memory-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(name)?;
    let listener = UnixListener::bind_addr(&address)?;
    let mut machine = builder(host)?.start_listening(Some(listener.try_clone()?.into()))?;
    let mut agent = machine.agent()?;
    vm::install(&mut agent)?;
    drop(agent);
    let small = total(&address)?;
    ensure!(
        small <= BOOT.bytes(),
        "the guest has {small} bytes before any is plugged"
    );
    ensure!(sizes(&mut machine)? == of(0, 0), "{:?}", sizes(&mut machine)?);
    wrong_sizes(&mut machine)?;
    let zeroed = zeroed_memory(&mut machine)?;

    grow(&mut machine, &address, small)?;
    hold(&address)?;
    let used = resident(&machine)?;
    ensure!(
        used >= HELD.bytes(),
        "the VMM has {used} bytes, the guest's program {HELD}"
    );

    machine.vmm.client.pause()?;
    let mut files = Files::new(host, "grown");
    files.take(&mut machine)?;
    // Two guests of one address: one after the other.
    restored(host, (&listener, &address), &files, small)?;

    machine.vmm.client.resume()?;
    ask(&address, VERIFY)?;
    shrink(&mut machine, &address)?;
    let left = resident(&machine)?;
    let kept = zeroed.iter().try_fold(0, |sum, file| {
        Ok::<_, anyhow::Error>(sum + file.metadata()?.blocks() * 512)
    })?;
    ensure!(
        kept <= STAYS.bytes(),
        "{kept} bytes of files that came zeroed are kept, and the guest has given back what it had plugged"
    );
    ensure!(
        left + HELD.bytes() / 2 < used,
        "of {used} bytes the VMM still has {left}, and the guest has given back what it had plugged"
    );
    machine.vmm.client.stop()?;
    ensure!(machine.vmm.wait(Duration::from_secs(10))?, "the VMM did not end well");
    Ok(())
}

fn builder(host: &Host) -> Result<Builder<'_>> {
    let mut builder = Builder::new(host)?.memory(BOOT);
    let config = MemConfig {
        region_size: REGION,
        max_size: None,
        requested_size: ByteSize(0),
        block_size: MEM_MIN_BLOCK,
        node_id: None,
    };
    builder.device("memory", &config)?;
    Ok(builder)
}

/// A part of the region comes zeroed; the case's own hands on the files.
fn zeroed_memory(machine: &mut Vm) -> Result<[File; 2]> {
    let client = &mut machine.vmm.client;
    ensure!(
        client.functions()?.zeroed_memory == Some(0),
        "{:?}",
        client.functions()?
    );
    let piece = |_| base::memfd::sized("zeroed", ZEROED_PIECE.bytes());
    let files = [piece(0)?, piece(1)?];
    client.add_zeroed_memory(&[files[0].as_fd(), files[1].as_fd()])?;
    let taken = client.functions()?.zeroed_memory;
    ensure!(taken == Some(2 * ZEROED_PIECE.bytes()), "{taken:?} were taken");
    let short = base::memfd::sized("short", 4096)?;
    match client.add_zeroed_memory(&[short.as_fd()]) {
        Err(ClientError::Refused(error)) if error.message.contains("no regular file of 128 MiB") => Ok(files),
        other => bail!("a short file was not refused: {other:?}"),
    }
}

/// The guest of the snapshot: it has what it had, gives it back, and can have it again.
fn restored(host: &Host, (listener, address): (&UnixListener, &SocketAddr), files: &Files, small: u64) -> Result<()> {
    let (state, memory) = files.open()?;
    let mut machine = builder(host)?.restore(listener.try_clone()?.into(), state, memory)?;
    let all = REGION.bytes();
    ensure!(sizes(&mut machine)? == of(all, all), "{:?}", sizes(&mut machine)?);
    machine.vmm.client.resume()?;
    ask(address, VERIFY).context("what was held when the snapshot was taken")?;
    shrink(&mut machine, address)?;
    grow(&mut machine, address, small)?;
    // Blocks that were given back hold the snapshot's pages again: whoever has them now writes first.
    hold(address)?;
    ask(address, VERIFY)?;
    machine.vmm.client.stop()?;
    ensure!(machine.vmm.wait(Duration::from_secs(10))?, "the VMM did not end well");
    Ok(())
}

fn of(requested: u64, plugged: u64) -> HotplugMemory {
    HotplugMemory {
        region: REGION.bytes(),
        block: MEM_MIN_BLOCK.bytes(),
        requested,
        plugged,
        target: requested,
    }
}

fn sizes(machine: &mut Vm) -> Result<HotplugMemory> {
    let info = machine.vmm.client.info()?;
    info.hotplug_memory.context("a VM without hot-pluggable memory")
}

fn wrong_sizes(machine: &mut Vm) -> Result<()> {
    for size in [ByteSize(REGION.bytes() + MEM_MIN_BLOCK.bytes()), ByteSize::mib(1)] {
        match machine.vmm.client.resize_memory(size) {
            Err(ClientError::Refused(error)) => {
                ensure!(error.kind == ErrorKind::Invalid, "{size}: {:?}: {error}", error.kind);
                ensure!(error.message.contains("give a multiple of 2097152"), "{size}: {error}");
            }
            other => bail!("{size} were not refused: {other:?}"),
        }
    }
    Ok(())
}

/// Waits until what the guest has plugged is as it should be.
fn wait(machine: &mut Vm, what: &str, enough: impl Fn(u64) -> bool) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let now = sizes(machine)?;
        if enough(now.plugged) {
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "the guest does not {what}: {now:?}; its console:\n{}",
            machine.console()?
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn grow(machine: &mut Vm, address: &SocketAddr, small: u64) -> Result<()> {
    machine.vmm.client.resize_memory(REGION)?;
    wait(machine, "grow", |plugged| plugged == REGION.bytes())?;
    // The last block is plugged before it is online.
    let deadline = Instant::now() + PATIENCE;
    let least = small + REGION.bytes() - OVERHEAD.bytes();
    loop {
        let now = total(address)?;
        if now >= least {
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "the guest has {now} bytes of {least} at least"
        );
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn shrink(machine: &mut Vm, address: &SocketAddr) -> Result<()> {
    ask(address, RELEASE)?;
    machine.vmm.client.resize_memory(ByteSize(0))?;
    wait(machine, "shrink", |plugged| plugged <= STAYS.bytes())?;
    let now = total(address)?;
    let most = BOOT.bytes() + STAYS.bytes();
    ensure!(now <= most, "the guest has {now} bytes of {most} at most");
    Ok(())
}

/// Memory of the VMM's own, its guest's above all: what came zeroed is a file's.
fn resident(machine: &Vm) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", machine.vmm.pid()))?;
    Ok(kibibytes(&status, "RssAnon:")? + kibibytes(&status, "RssShmem:")?)
}

/// A number of KiB in a file of proc(5), in bytes.
fn kibibytes(text: &str, field: &str) -> Result<u64> {
    let line = text.lines().find(|line| line.starts_with(field));
    let number = line.and_then(|line| line.split_whitespace().nth(1));
    let number: u64 = number.with_context(|| format!("no {field} in {text}"))?.parse()?;
    Ok(number << 10)
}

/// The agent, over a new connection.
fn agent(address: &SocketAddr) -> Result<Connection<UnixStream>> {
    let stream = connect(address, VSOCK_PORT)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(Connection::new(stream, None)?)
}

/// What the guest's kernel says that it has.
fn total(address: &SocketAddr) -> Result<u64> {
    let told = vm::guest_half(&mut agent(address)?, CASE.name, &[TOTAL])?;
    told.trim().parse().with_context(|| format!("the guest said {told:?}"))
}

/// Starts the guest's program, and waits until it has filled its memory.
fn hold(address: &SocketAddr) -> Result<()> {
    vm::detach_guest_half(&mut agent(address)?, CASE.name)?;
    ask(address, VERIFY)
}

/// Asks the guest's program.
fn ask(address: &SocketAddr, what: &str) -> Result<()> {
    vm::guest_half(&mut agent(address)?, CASE.name, &[what]).map(drop)
}

fn guest(arguments: &[String]) -> Result<()> {
    match arguments.first().map(String::as_str) {
        None => hold_memory(),
        Some(TOTAL) => {
            let total = kibibytes(&fs::read_to_string("/proc/meminfo")?, "MemTotal:")?;
            Ok(writeln!(std::io::stdout(), "{total}")?)
        }
        Some(word) => ask_holder(word),
    }
}

/// Fills memory page by page, and says whether it still holds that, until it is released.
fn hold_memory() -> Result<()> {
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(HOLDER)?)?;
    let step = 4096 / size_of::<u64>();
    let mut memory = vec![0_u64; usize::try_from(HELD.bytes())? / size_of::<u64>()];
    for (number, page) in (1..).zip(memory.chunks_mut(step)) {
        page[0] = number;
    }
    loop {
        let (mut stream, _) = listener.accept()?;
        let mut word = String::new();
        stream.read_to_string(&mut word)?;
        let wrong = (1..)
            .zip(memory.chunks(step))
            .filter(|(number, page)| page[0] != *number)
            .count();
        if word == RELEASE {
            drop(memory);
            drop(listener);
            return Ok(write!(stream, "{wrong}")?);
        }
        write!(stream, "{wrong}")?;
    }
}

/// Asks it, when it listens.
fn ask_holder(word: &str) -> Result<()> {
    let address = SocketAddr::from_abstract_name(HOLDER)?;
    let deadline = Instant::now() + PATIENCE;
    let mut stream = loop {
        match UnixStream::connect_addr(&address) {
            Ok(stream) => break stream,
            Err(error) if Instant::now() > deadline => return Err(error).context("the program that holds memory"),
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    };
    stream.write_all(word.as_bytes())?;
    stream.shutdown(std::net::Shutdown::Write)?;
    let mut wrong = String::new();
    stream.read_to_string(&mut wrong)?;
    ensure!(wrong == "0", "{wrong} pages do not hold what was written");
    Ok(())
}
