//! A guest under load goes on in another VMM: a counter in its memory, its boot id, what it has written to its disk, its
//! clocks and timers, a TCP stream over a card with two pairs of queues, what fio writes and verifies, busy terminals; several rounds in
//! a row, on two vCPUs, each with what has changed since the one before. `BASALT_ROUNDS` says how many. What does not fit is refused.
//! `bare-moves` does the same with a guest that owns its CPUs in every other VMM, and shares the host's in the others.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use agent_api::{Collected, Connection, ExecRequest, VSOCK_PORT};
use anyhow::{Context, Result, anyhow, ensure};
use network::Attachment;
use reservation::Device;
use state::Container;
use vmm_api::CpuModel;
use vmm_api::devices::{BlockConfig, BlockEngine, BlockLimits, MacAddress, NetConfig, NetLimits};

use super::bare::{self, Module};
use super::network::{Opened, Server, World};
use super::snapshot_files::Files;
use super::snapshot_fio;
use super::snapshot_guest::{self, Report};
use super::snapshot_pty::Typist;
use super::vsock::connect;
use crate::vm::{self, Builder, Vm};
use crate::{Case, Host, stall};

pub(crate) const CASE: Case = Case {
    name: "snapshot",
    limit: Duration::from_secs(900),
    host,
    guest: Some(snapshot_guest::run),
};

pub(crate) const MOVES: Case = Case {
    name: "bare-moves",
    host: moves,
    ..CASE
};

/// Odd rounds let the original go on for a while after it was saved, from the files that it was saved to. Of three, the first is saved
/// whole, the others with changes of one that was restored, and of one that went on beside what was kept of it.
const ROUNDS: usize = 3;

/// vCPUs, queues of the disk, and pairs of queues of the network card.
const CPUS: u32 = 2;

/// Files of one memory: the next snapshot is a whole one.
const MAX_FILES: usize = 8;

/// How long a guest may take to answer, in an emulated host.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long one attempt to be heard may take: an answer that is lost is not to cost all of [`PATIENCE`].
const ATTEMPT: Duration = Duration::from_secs(10);

/// An interface in the node's network, and a server behind it.
struct Wire {
    // In the order in which they go.
    _server: Server,
    attachment: Attachment,
    network: Opened,
    _world: World,
}

impl Wire {
    fn new(cpus: u32) -> Result<Self> {
        let world = World::new()?;
        let network = Opened::new()?;
        Ok(Self {
            _server: world.serve(&[snapshot_guest::ECHO])?,
            attachment: network.get()?.attach(0, cpus.try_into()?)?,
            network,
            _world: world,
        })
    }

    fn add_to(&self, builder: &mut Builder<'_>) -> Result<()> {
        let taps = self.attachment.taps.iter();
        // One VMM has it after the other.
        let taps = taps
            .map(|tap| Ok(builder.fd(tap.try_clone()?)))
            .collect::<Result<_>>()?;
        let config = NetConfig {
            taps,
            mac: MacAddress(self.attachment.mac),
            mtu: self.attachment.mtu,
            limits: NetLimits::default(),
        };
        builder.device("net", &config)
    }

    fn remove(self) -> Result<()> {
        drop(self.attachment);
        self.network.get()?.detach(0)?;
        self.network.teardown()
    }
}

/// What the VMs of this case share: where the host's side of vsock listens, and which disk is the current one.
struct Stage<'a> {
    host: &'a Host,
    wire: &'a Wire,
    listener: UnixListener,
    address: SocketAddr,
    disk: PathBuf,
    /// The disk with fio.
    fio: PathBuf,
    cpus: u32,
    /// Who takes CPUs from Linux for every other VM, if the guest moves.
    owned: Option<Device>,
}

impl Stage<'_> {
    /// The configuration, whose descriptors are new each time.
    fn builder(&self) -> Result<Builder<'_>> {
        let model = match self.owned {
            Some(_) => CpuModel::Common,
            None => CpuModel::Host,
        };
        let mut builder = Builder::new(self.host)?.cpus(self.cpus).cpu(model);
        let disk = OpenOptions::new().read(true).write(true).open(&self.disk)?;
        let file = builder.fd(disk);
        let data = BlockConfig {
            file,
            read_only: false,
            queues: u16::try_from(self.cpus)?,
            serial: snapshot_guest::DISK.into(),
            engine: BlockEngine::Auto,
            limits: BlockLimits::default(),
        };
        builder.device("data", &data)?;
        self.wire.add_to(&mut builder)?;
        let file = builder.fd(File::open(&self.fio)?);
        let fio = BlockConfig {
            file,
            read_only: true,
            queues: 1,
            serial: snapshot_fio::DISK.into(),
            engine: BlockEngine::Auto,
            limits: BlockLimits::default(),
        };
        builder.device("fio", &fio)?;
        Ok(builder)
    }

    /// The first VM shares the host's CPUs, as do those of the odd rounds.
    fn restore(&self, files: &Files, round: usize) -> Result<Vm> {
        if self.owned.is_none() {
            let mut machine = self.restore_after(files, files)?;
            let marks = machine.vmm.client.info()?.marks;
            ensure!(
                marks.iter().any(|mark| mark.name == "snapshot read ahead"),
                "nothing was read ahead: {marks:?}"
            );
            return Ok(machine);
        }
        let (state, memory) = files.open()?;
        let mut builder = self.builder()?;
        if let Some(device) = self.owned.as_ref().filter(|_| round.is_multiple_of(2)) {
            let reservation = device.reserve(&(bare::CPU..bare::CPU + self.cpus).collect::<Vec<_>>())?;
            builder = builder.reservation(reservation.into())?;
        }
        builder.restore(self.listener.try_clone()?.into(), state, memory)
    }

    /// By a VMM that was given the files `ahead` to read before.
    fn restore_after(&self, files: &Files, ahead: &Files) -> Result<Vm> {
        let (state, memory) = files.open()?;
        let (ahead, below) = ahead.open()?;
        let ahead: Vec<File> = std::iter::once(ahead).chain(below).collect();
        self.builder()?
            .restore_ahead(self.listener.try_clone()?.into(), state, memory, &ahead)
    }

    /// The agent, over a new connection.
    fn agent(&self) -> Result<Connection<UnixStream>> {
        let stream = connect(&self.address, VSOCK_PORT)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Connection::new(stream, None)?)
    }

    /// Has the guest begin a new TCP stream, or end the one that it has, or begin all else.
    fn stream(&self, what: snapshot_guest::Stream) -> Result<()> {
        let mut stream = connect(&self.address, snapshot_guest::STREAM)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(&[what as u8])?;
        let answer = stream.read_exact(&mut [0]);
        answer.with_context(|| format!("no answer of the guest's to {what:?} within {PATIENCE:?}"))
    }

    /// Whether everything that is at work in the guest has made progress.
    fn has_gone_on(&self, now: &Report, since: &Report) -> bool {
        let steps = [
            (now.disk, since.disk),
            (now.ticks, since.ticks),
            (now.echoes, since.echoes),
        ];
        let terminals = [(now.terminal.0, since.terminal.0), (now.terminal.1, since.terminal.1)];
        let far = |(now, since): &(u64, u64)| *now > since + 20;
        let fio = now.fio.0 > since.fio.0 && now.fio.1 > since.fio.1;
        steps.iter().chain(&terminals).all(far) && fio
    }

    /// What the guest says of itself over a new connection.
    fn report_within(&self, patience: Duration) -> Result<Report> {
        let mut text = String::new();
        let mut stream = connect(&self.address, snapshot_guest::REPORT)?;
        stream.set_read_timeout(Some(patience))?;
        let read = stream.read_to_string(&mut text);
        read.with_context(|| format!("no report of the guest's within {patience:?}; so far {text:?}"))?;
        Report::parse(&text).with_context(|| format!("the guest reported {text:?}"))
    }

    /// Waits until the guest has done something that `enough` sees.
    fn wait(&self, what: &str, enough: impl Fn(&Report) -> bool) -> Result<Report> {
        self.wait_within(PATIENCE, what, enough)
    }

    fn wait_within(&self, patience: Duration, what: &str, enough: impl Fn(&Report) -> bool) -> Result<Report> {
        let deadline = Instant::now() + patience;
        loop {
            let report = self.report_within(PATIENCE)?;
            ensure!(report.errors == 0, "the guest has found errors: {report:?}");
            if enough(&report) {
                return Ok(report);
            }
            ensure!(Instant::now() < deadline, "{what} did not come: {report:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// How many there are to be.
fn rounds_wanted() -> Result<usize> {
    let wanted = std::env::var("BASALT_ROUNDS").ok();
    wanted.map_or(Ok(ROUNDS), |text| text.parse().context("BASALT_ROUNDS"))
}

fn host(host: &Host) -> Result<()> {
    let wire = Wire::new(CPUS)?;
    rounds(host, &wire, (CPUS, None))?;
    wire.remove()
}

fn moves(host: &Host) -> Result<()> {
    if !bare::in_lab()? {
        return Ok(());
    }
    let module = Module::load(host)?;
    let all = bare::online()?;
    // Linux keeps one.
    let spare = u32::try_from(std::thread::available_parallelism()?.get())? - 1;
    let cpus = CPUS.min(spare);
    let wire = Wire::new(cpus)?;
    rounds(host, &wire, (cpus, Some(Device::open(Device::PATH)?)))?;
    wire.remove()?;
    bare::wait_online(&all)?;
    module.unload()
}

fn rounds(host: &Host, wire: &Wire, (cpus, owned): (u32, Option<Device>)) -> Result<()> {
    let address = SocketAddr::from_abstract_name(format!("basalt-case-snapshot-{}", std::process::id()))?;
    let mut stage = Stage {
        host,
        wire,
        listener: UnixListener::bind_addr(&address)?,
        address,
        disk: host.scratch.join("disk-0"),
        fio: snapshot_fio::make_disk(&host.scratch)?,
        cpus,
        owned,
    };
    let (mut machine, first) = boot(&stage)?;
    refused_while_running(&mut machine, &mut Files::new(host, "running"))?;
    let mut last: Option<Files> = None;
    for round in 0..rounds_wanted()? {
        let mut files = Files::new(host, &round.to_string());
        if let Some(last) = &last {
            files.below = last.below.iter().chain([&last.memory]).cloned().collect();
        }
        let goes_on_first = round % 2 == 1;
        if goes_on_first {
            // The far end would hear of two guests in one stream.
            stage.stream(snapshot_guest::Stream::End)?;
        }
        let typist = goes_on_first.then(|| stage.agent().map(Typist::begin));
        let typist = typist.transpose()?;
        if let Some(typist) = &typist {
            typist.goes_on(PATIENCE)?;
        }
        let before = stage.report_within(PATIENCE)?;
        // One that is open when the VM is saved: both ends learn that it is gone.
        let held = connect(&stage.address, snapshot_guest::HOLD)?;
        machine.vmm.client.pause()?;
        let began = Instant::now();
        let lie_below = files.below.len();
        let beside = files.take(&mut machine)?;
        ensure!(
            beside == (lie_below < MAX_FILES),
            "round {round}: {lie_below} files lay below, and changes alone were written: {beside}"
        );
        let saved_in = began.elapsed();
        let next = host.scratch.join(format!("disk-{}", round + 1));
        fs::copy(&stage.disk, &next)?;
        if goes_on_first {
            rebase(&stage, &mut machine, &files)?;
            original_goes_on(&stage, &mut machine, held, &before)?;
        }
        if let Some(typist) = typist {
            typist.goes_on(PATIENCE)?;
            typist.end()?;
        }
        drop(machine);
        fs::remove_file(std::mem::replace(&mut stage.disk, next))?;
        if round == 0 && stage.owned.is_none() {
            refusals(&stage, &files)?;
        }
        let began = Instant::now();
        machine = stage.restore(&files, round)?;
        machine.vmm.client.resume()?;
        let restored_in = began.elapsed();
        if goes_on_first {
            stage.stream(snapshot_guest::Stream::Begin)?;
        }
        let resets = before.resets + 1;
        let goes_on = |report: &Report| stage.has_gone_on(report, &before) && report.resets >= resets;
        let after = stage.wait("the load's next steps, and the reset of the held connection", goes_on)?;
        ensure!(after.boot_id == first.boot_id, "the boot id changed: {after:?}");
        ensure!(
            after.resets == resets,
            "more connections were reset than one: {after:?}"
        );
        agent_answers(&stage, &first)?;
        let pinned = stage.owned.is_some() && goes_on_first;
        report_sizes(&files, (round, pinned), (saved_in, restored_in))?;
        fs::remove_file(&files.state)?;
        // What lies below no other any more.
        if let Some(last) = last.filter(|_| files.below.is_empty()) {
            last.below.iter().chain([&last.memory]).try_for_each(fs::remove_file)?;
        }
        last = Some(files);
    }
    console_is_alive(&stage, &machine)?;
    stage.stream(snapshot_guest::Stream::End)?;
    vm_ends(machine)
}

/// A machine whose load is at work, and what it has said then.
fn boot(stage: &Stage<'_>) -> Result<(Vm, Report)> {
    File::create_new(&stage.disk)?.set_len(snapshot_guest::DISK_BYTES)?;
    let machine = stage
        .builder()?
        .start_listening(Some(stage.listener.try_clone()?.into()))?;
    start_load(&machine, stage.wire)?;
    wait_for_load(stage, &machine)?;
    // Not before it was heard: whether the guest listens is not to depend on what its load leaves it. And not when it believes that
    // it was: an answer that comes late is one that nobody has heard.
    let begin = || {
        stage.stream(snapshot_guest::Stream::Loads)?;
        stage.stream(snapshot_guest::Stream::Begin)?;
        let at_work = |report: &Report| stage.has_gone_on(report, &Report::default());
        stage.wait_within(3 * PATIENCE, "the load", at_work)
    };
    let first = begin().or_else(|error| Err(evidence(stage, &machine, &error)?))?;
    Ok((machine, first))
}

/// An error with all that can be learnt of a guest that does not answer. What tells a guest that stands still from an answer that was lost
/// is in the last line, which is all that a run's sum shows.
fn evidence(stage: &Stage<'_>, machine: &Vm, error: &anyhow::Error) -> Result<anyhow::Error> {
    let (agent, load) = (text(stage.agent()), text(stage.report_within(ATTEMPT)));
    let (console, threads) = (machine.console()?, stall::evidence(machine.vmm.pid()));
    Ok(anyhow!(
        "the console:\n{console}\nthe VMM's threads:\n{threads}\n{error:#}; asked again, the agent: {agent}; the load: {load}"
    ))
}

/// Waits until the guest half answers. Where it did not, on machines that did much else, nothing else could be learnt.
fn wait_for_load(stage: &Stage<'_>, machine: &Vm) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    let mut refused = 0;
    while let Err(error) = stage.report_within(ATTEMPT) {
        refused += 1;
        if Instant::now() > deadline {
            let error = error.context(format!(
                "after {refused} attempts in {PATIENCE:?} the load does not listen"
            ));
            return Err(evidence(stage, machine, &error)?);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

/// Installs the guest half and leaves it running by itself.
fn start_load(machine: &Vm, wire: &Wire) -> Result<()> {
    let mut agent = machine.agent_with(Some(&wire.attachment.guest))?;
    vm::install(&mut agent)?;
    vm::detach_guest_half(&mut agent, CASE.name)
}

fn refused_while_running(machine: &mut Vm, files: &mut Files) -> Result<()> {
    let error = text(files.take(machine));
    ensure!(
        error.contains("`snapshot` needs a VM that is paused"),
        "running: {error}"
    );
    fs::remove_file(&files.state)?;
    Ok(fs::remove_file(&files.memory)?)
}

fn text<T>(result: Result<T>) -> String {
    result
        .err()
        .map_or_else(|| "no error".to_owned(), |error| format!("{error:#}"))
}

/// What was written takes the place of what is mapped, but for a guest that has its memory pinned.
fn rebase(stage: &Stage<'_>, machine: &mut Vm, files: &Files) -> Result<()> {
    let rebased = machine.vmm.client.rebase(File::open(&files.memory)?.as_fd());
    match stage.owned {
        None => Ok(rebased?),
        Some(_) => {
            let refused = text(rebased.map_err(Into::into));
            ensure!(refused.contains("stays where it is"), "pinned memory: {refused}");
            Ok(())
        }
    }
}

/// A VM that was saved can go on as if it had not been: its connection is still there.
fn original_goes_on(stage: &Stage<'_>, machine: &mut Vm, mut held: UnixStream, before: &Report) -> Result<()> {
    machine.vmm.client.resume()?;
    vm::echo(&mut held, b"still here")?;
    let ticks = before.ticks + 20;
    let report = stage.wait("the original's next steps", |report| report.ticks > ticks)?;
    ensure!(
        report.resets == before.resets,
        "the original lost a connection: {report:?}"
    );
    Ok(())
}

/// The agent takes a new connection and runs commands.
fn agent_answers(stage: &Stage<'_>, first: &Report) -> Result<()> {
    let mut agent = stage.agent()?;
    let argv = ["cat", "/proc/sys/kernel/random/boot_id"].map(Into::into).to_vec();
    let Collected { stdout, .. } = agent
        .exec(&ExecRequest {
            argv,
            ..ExecRequest::default()
        })?
        .collect()?;
    let boot_id = String::from_utf8_lossy(&stdout);
    ensure!(boot_id.trim() == first.boot_id, "the agent says {boot_id:?}");
    Ok(())
}

/// The memory file is as large as the memory and takes the place of what is in it, or of what has changed.
/// Of a guest whose memory was pinned, every page is one of its own.
fn report_sizes(
    files: &Files,
    (round, pinned): (usize, bool),
    (saved_in, restored_in): (Duration, Duration),
) -> Result<()> {
    let memory = fs::metadata(&files.memory)?;
    let (size, used) = (memory.len(), memory.blocks() * 512);
    ensure!(size == 128 << 20, "the memory file has {size} bytes");
    ensure!(
        used < size * 3 / 4,
        "{used} of {size} bytes are written: untouched pages are no holes"
    );
    ensure!(
        used > size / 20 || !files.below.is_empty(),
        "{used} of {size} bytes are written: where is the guest?"
    );
    ensure!(
        used < size / 8 || files.below.is_empty() || pinned,
        "{used} of {size} bytes are written: so much cannot have changed"
    );
    let state = fs::metadata(&files.state)?.len();
    writeln!(
        std::io::stdout(),
        "round {round}: state {state} bytes, memory {} KiB of {} MiB beside {} files, saved in {saved_in:?}, restored in \
         {restored_in:?}",
        used >> 10,
        size >> 20,
        files.below.len()
    )?;
    Ok(())
}

/// Files that do not fit, devices that do not fit: each is one sentence, and no harm is done.
fn refusals(stage: &Stage<'_>, files: &Files) -> Result<()> {
    let refused = |what: &str, state: &[u8], memory: &Path, expected: &str| -> Result<()> {
        let other = Files {
            state: stage.host.scratch.join("refused.state"),
            memory: memory.to_owned(),
            below: Vec::new(),
        };
        fs::write(&other.state, state)?;
        // Whatever was read before: these very files, or the good ones, which are not those that are asked for.
        for ahead in [&other, files] {
            let error = text(stage.restore_after(&other, ahead));
            ensure!(error.contains(expected), "{what}: {error}");
        }
        Ok(())
    };
    let state = fs::read(&files.state)?;
    let half = state.get(..state.len() / 2).context("a state without content")?;
    refused("a truncated state", half, &files.memory, "cut short")?;
    refused("no state", b"", &files.memory, "this is no snapshot")?;
    let mut damaged = state.clone();
    if let Some(byte) = damaged.last_mut() {
        *byte ^= 1;
    }
    refused("a damaged state", &damaged, &files.memory, "the snapshot is damaged")?;
    let mut elsewhere = Container::parse(&state)?;
    elsewhere.fingerprint.cpuid ^= 1;
    refused(
        "another CPU",
        &elsewhere.to_bytes()?,
        &files.memory,
        "another set of CPU features",
    )?;
    let mut elsewhere = Container::parse(&state)?;
    elsewhere.fingerprint.kernel = "2.6.20".into();
    refused(
        "another kernel",
        &elsewhere.to_bytes()?,
        &files.memory,
        "another host kernel (2.6.20; here",
    )?;

    let short = stage.host.scratch.join("short.memory");
    fs::copy(&files.memory, &short)?;
    OpenOptions::new()
        .write(true)
        .open(&short)?
        .set_len((128 << 20) - 4096)?;
    refused("a truncated memory", &state, &short, "the memory file has")?;
    OpenOptions::new().write(true).open(&short)?.set_len(128 << 20)?;
    // Of the pages with content some are known; which ones is nobody's business here.
    let file = OpenOptions::new().write(true).open(&short)?;
    for page in 0..(128 << 20) / 4096 {
        file.write_all_at(&[0x5a], page * 4096 + 77)?;
    }
    refused("another memory", &state, &short, "differs from what was saved")?;
    fs::remove_file(&short)?;

    let smaller = Stage {
        host: stage.host,
        wire: stage.wire,
        listener: stage.listener.try_clone()?,
        address: stage.address.clone(),
        disk: stage.host.scratch.join("smaller"),
        fio: stage.fio.clone(),
        cpus: stage.cpus,
        owned: None,
    };
    File::create_new(&smaller.disk)?.set_len(snapshot_guest::DISK_BYTES / 2)?;
    let error = text(smaller.restore(files, 1));
    ensure!(
        error.contains("device `data`: it was saved with other properties"),
        "a smaller disk: {error}"
    );
    let builder = Builder::new(stage.host)?;
    let (state, memory) = files.open()?;
    let error = text(builder.restore(stage.listener.try_clone()?.into(), state, memory));
    ensure!(
        error.contains("was saved with the devices `console, rng, root, data, net"),
        "a missing disk: {error}"
    );
    Ok(())
}

/// What the guest writes to its console reaches the file of the VMM that it is in now.
fn console_is_alive(stage: &Stage<'_>, machine: &Vm) -> Result<()> {
    let mut stream = connect(&stage.address, snapshot_guest::PRINT)?;
    stream.write_all(b"console after the last restore")?;
    drop(stream);
    machine.wait_console("console after the last restore", PATIENCE)
}

/// The guest of the last VMM powers off by its event device's button or not at all; its VMM is simply ended.
fn vm_ends(mut machine: Vm) -> Result<()> {
    machine.vmm.client.stop()?;
    ensure!(
        machine.vmm.wait(Duration::from_secs(20))?,
        "the VMM ended with a failure"
    );
    Ok(())
}
