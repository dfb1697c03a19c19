//! A guest gives memory back by itself: what it had filled and freed is the host's again within seconds, and is not where nothing is
//! reported. A snapshot and a clone taken after that are right, and the clone gives memory back as well. At last the guest is asked to do
//! without a part.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use agent_api::{Connection, VSOCK_PORT};
use anyhow::{Context, Result, bail, ensure};
use base::ByteSize;
use rustix::mount::{MountFlags, mount};
use vmm_api::devices::BalloonConfig;
use vmm_api::{Balloon, ClientError, ErrorKind};

use super::snapshot_files::Files;
use super::vsock::connect;
use crate::vm::{self, Builder, Vm};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "memory-reporting",
    limit: Duration::from_secs(400),
    host,
    guest: Some(guest),
};

const MEMORY: ByteSize = ByteSize::mib(512);

/// What the guest fills and frees.
const FILLED: ByteSize = ByteSize::mib(256);

/// What it keeps meanwhile.
const KEPT: ByteSize = ByteSize::mib(32);

/// What of it may stay: Linux reports 2 MiB at once, and not where one page of them is in use.
const STAYS: ByteSize = ByteSize::mib(48);

/// What the balloon is to hold.
const INFLATED: ByteSize = ByteSize::mib(128);

/// How long a guest may take to answer or to give memory back, in an emulated host. Linux reports every two seconds, a part of what is
/// free at a time.
const PATIENCE: Duration = Duration::from_secs(90);

/// In which a guest that reports has long begun to.
const IN_VAIN: Duration = Duration::from_secs(8);

/// What the guest half is asked for.
const KEEP: &str = "keep";
const FILL: &str = "fill";
const FREE: &str = "free";
const VERIFY: &str = "verify";

fn host(host: &Host) -> Result<()> {
    let name = format!("basalt-case-reporting-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(name)?;
    let listener = UnixListener::bind_addr(&address)?;
    nothing_is_reported(host, &listener, &address).context("without reporting")?;

    let mut machine = start(host, &listener, true)?;
    fill_and_free(&mut machine, &address)?;
    machine.vmm.client.pause()?;
    let mut files = Files::new(host, "freed");
    files.take(&mut machine)?;
    let blocks = std::os::unix::fs::MetadataExt::blocks(&fs::metadata(&files.memory)?) * 512;
    ensure!(
        blocks < FILLED.bytes(),
        "the snapshot has {blocks} bytes, of a guest that has freed {FILLED}"
    );
    // Guests of one address: one after the other.
    let again = restored(host, (&listener, &address), files)?;
    let mut last = restore(host, &listener, &again)?;
    last.vmm.client.resume()?;
    ask(&address, VERIFY).context("in the clone of a clone")?;
    end(last)?;

    machine.vmm.client.resume()?;
    ask(&address, VERIFY).context("after the snapshot")?;
    inflate(&mut machine, &address)?;
    end(machine)
}

/// The same guest, which the host is told nothing by: what it had filled stays.
fn nothing_is_reported(host: &Host, listener: &UnixListener, address: &SocketAddr) -> Result<()> {
    let mut machine = start(host, listener, false)?;
    ask(address, KEEP)?;
    ask(address, FILL)?;
    let filled = resident(&machine)?;
    ask(address, FREE)?;
    std::thread::sleep(IN_VAIN);
    let left = resident(&machine)?;
    ensure!(
        left + STAYS.bytes() > filled,
        "of {filled} bytes the VMM has {left}, and nobody has reported anything"
    );
    ensure!(
        balloon(&mut machine)? == Balloon::default(),
        "{:?}",
        balloon(&mut machine)?
    );
    end(machine)
}

fn builder(host: &Host, reporting: bool) -> Result<Builder<'_>> {
    let mut builder = Builder::new(host)?.memory(MEMORY);
    let config = BalloonConfig {
        free_page_reporting: reporting,
        ..BalloonConfig::default()
    };
    builder.device("balloon", &config)?;
    Ok(builder)
}

fn start(host: &Host, listener: &UnixListener, reporting: bool) -> Result<Vm> {
    let machine = builder(host, reporting)?.start_listening(Some(listener.try_clone()?.into()))?;
    vm::install(&mut machine.agent()?)?;
    Ok(machine)
}

fn restore(host: &Host, listener: &UnixListener, files: &Files) -> Result<Vm> {
    let (state, memory) = files.open()?;
    builder(host, true)?.restore(listener.try_clone()?.into(), state, memory)
}

fn end(mut machine: Vm) -> Result<()> {
    machine.vmm.client.stop()?;
    ensure!(machine.vmm.wait(Duration::from_secs(10))?, "the VMM did not end well");
    Ok(())
}

/// The guest of the snapshot: it has what it kept, uses again what it had freed, and gives that back. The files of a snapshot of it, of what
/// has changed alone.
fn restored(host: &Host, (listener, address): (&UnixListener, &SocketAddr), files: Files) -> Result<Files> {
    let mut machine = restore(host, listener, &files)?;
    machine.vmm.client.resume()?;
    ask(address, VERIFY).context("what was kept when the snapshot was taken")?;
    fill_and_free(&mut machine, address)?;
    machine.vmm.client.pause()?;
    let mut changes = Files::new(host, "again");
    changes.below = vec![files.memory];
    ensure!(changes.take(&mut machine)?, "all of the memory was written");
    let blocks = std::os::unix::fs::MetadataExt::blocks(&fs::metadata(&changes.memory)?) * 512;
    ensure!(
        blocks < FILLED.bytes() / 2,
        "what has changed is {blocks} bytes, of which {FILLED} were freed"
    );
    end(machine)?;
    Ok(changes)
}

/// Has the guest fill memory and free it; the VMM has as much as before again soon.
fn fill_and_free(machine: &mut Vm, address: &SocketAddr) -> Result<()> {
    ask(address, KEEP)?;
    let (before, told) = (resident(machine)?, balloon(machine)?);
    ask(address, FILL)?;
    let filled = resident(machine)?;
    ensure!(
        filled + STAYS.bytes() >= before + FILLED.bytes(),
        "the VMM has {filled} bytes after {before}, and the guest has filled {FILLED}"
    );
    ask(address, FREE)?;
    let freed = Instant::now();
    let (mut reported, mut discarded) = (0, 0);
    wait(machine, "give back what it has freed", |machine| {
        let now = balloon(machine)?;
        (reported, discarded) = (now.reported - told.reported, now.discarded - told.discarded);
        // What a request reports is counted before all of it is discarded.
        Ok(discarded == reported && resident(machine)? <= before + STAYS.bytes())
    })?;
    let left = resident(machine)?;
    log(&format!(
        "before {before}, filled {filled}, {:.1} s after the end {left}; reported {reported}, discarded {discarded}",
        freed.elapsed().as_secs_f64()
    ))?;
    ensure!(
        reported >= FILLED.bytes() - STAYS.bytes(),
        "{reported} bytes were reported"
    );
    ask(address, VERIFY)
}

/// Has the guest do without a part of its memory, and gives it back.
fn inflate(machine: &mut Vm, address: &SocketAddr) -> Result<()> {
    for size in [MEMORY, ByteSize(4097)] {
        match machine.vmm.client.resize_balloon(size) {
            Err(ClientError::Refused(error)) => {
                ensure!(error.kind == ErrorKind::Invalid, "{size}: {:?}: {error}", error.kind);
                ensure!(error.message.contains("give a multiple of 4096"), "{size}: {error}");
            }
            other => bail!("{size} were not refused: {other:?}"),
        }
    }
    for target in [INFLATED.bytes(), 0] {
        machine.vmm.client.resize_balloon(ByteSize(target))?;
        wait(machine, "follow its balloon's size", |machine| {
            let now = balloon(machine)?;
            Ok(now.inflated == target && now.target == target)
        })?;
        ask(address, VERIFY)?;
    }
    ask(address, FILL)?;
    ask(address, FREE)
}

fn balloon(machine: &mut Vm) -> Result<Balloon> {
    machine.vmm.client.info()?.balloon.context("a VM without a balloon")
}

/// Waits until it is so.
fn wait(machine: &mut Vm, what: &str, mut is_so: impl FnMut(&mut Vm) -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !is_so(machine)? {
        ensure!(
            Instant::now() < deadline,
            "the guest does not {what}: {} bytes, {:?}; its console:\n{}",
            resident(machine)?,
            balloon(machine)?,
            machine.console()?
        );
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

/// Memory of the VMM's own, its guest's above all.
fn resident(machine: &Vm) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", machine.vmm.pid()))?;
    let line = status.lines().find(|line| line.starts_with("RssAnon:"));
    let number = line.and_then(|line| line.split_whitespace().nth(1));
    let number: u64 = number.with_context(|| format!("no RssAnon in {status}"))?.parse()?;
    Ok(number << 10)
}

fn log(line: &str) -> Result<()> {
    Ok(writeln!(std::io::stderr(), "{line}")?)
}

/// Has the guest half do something, over a new connection.
fn ask(address: &SocketAddr, what: &str) -> Result<()> {
    let stream = connect(address, VSOCK_PORT)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut agent: Connection<UnixStream> = Connection::new(stream, None)?;
    vm::guest_half(&mut agent, CASE.name, &[what])
        .map(drop)
        .with_context(|| format!("the guest is to {what}"))
}

fn guest(arguments: &[String]) -> Result<()> {
    let directory = Path::new("/basalt-case-reporting");
    let (kept, filled) = (directory.join("kept"), directory.join("filled"));
    match arguments.first().map(String::as_str) {
        Some(KEEP) if kept.exists() => verify(&kept, KEPT),
        Some(KEEP) => {
            fs::create_dir_all(directory)?;
            let size = c"size=90%";
            mount("tmpfs", directory, "tmpfs", MountFlags::empty(), size)?;
            write(&kept, KEPT)?;
            verify(&kept, KEPT)
        }
        Some(FILL) => {
            write(&filled, FILLED)?;
            verify(&filled, FILLED)
        }
        Some(FREE) => Ok(fs::remove_file(&filled)?),
        Some(VERIFY) => verify(&kept, KEPT),
        other => bail!("{other:?} is nothing that this guest does"),
    }
}

/// A page for each number.
fn page(number: u64) -> Vec<u8> {
    (number | 1 << 63).to_le_bytes().repeat(4096 / size_of::<u64>())
}

fn write(path: &PathBuf, size: ByteSize) -> Result<()> {
    let mut file = File::create(path)?;
    (0..size.bytes() / 4096).try_for_each(|number| Ok(file.write_all(&page(number))?))
}

fn verify(path: &PathBuf, size: ByteSize) -> Result<()> {
    let mut file = File::open(path)?;
    let mut bytes = vec![0; 4096];
    for number in 0..size.bytes() / 4096 {
        file.read_exact(&mut bytes)?;
        ensure!(bytes == page(number), "page {number} of {} is another", path.display());
    }
    Ok(())
}
