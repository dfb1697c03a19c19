//! The agent's part of a clone, without any snapshot: while the guest is frozen a process stands still and none starts, what
//! it has written is on the disk, and what was fetched of the host's entropy is used up; after the re-identification name, machine id,
//! boot id and clock are those that were asked for, for new processes and for the one that was frozen; hooks run before it
//! goes on, and one that fails or hangs keeps it where it is.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use agent_api::{Connection, ExecRequest, Identity, Reidentify, Upload, VSOCK_PORT};
use anyhow::{Context, Result, bail, ensure};
use vmm_api::devices::{BlockConfig, BlockEngine, BlockLimits};

use super::block::find;
use super::vsock::connect;
use crate::vm::{self, Builder, GuestHalf, Vm};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "reidentify",
    limit: Duration::from_secs(300),
    host,
    guest: Some(guest),
};

/// The serial number and size of the disk that the guest half writes to.
const DISK: &str = "data";
const DISK_BYTES: u64 = 1 << 20;
const TICK_DIGITS: usize = 8;

/// Where an image has its hooks (docs/agent.md).
const HOOKS: &str = "/etc/basalt/on-clone.d";

/// What the hook writes, and where.
const HOOKED: &str = "/hooked";
const HOOK: &str = "#!/bin/sh\nread boot < /proc/sys/kernel/random/boot_id\nread name < /proc/sys/kernel/hostname\n\
                    echo \"$name $BASALT_CLONE_ID $boot\" >> /hooked\n";

/// Enough for a hook here; and what a hook that hangs gets.
const HOOK_MS: u32 = 30_000;
const SHORT_MS: u32 = 1_500;

/// What the driver fetches at once (`SMP_CACHE_BYTES`, drivers/char/hw_random/virtio-rng.c).
const PREFETCH: u64 = 64;

const DAY: u64 = 86_400;

type Agent = Connection<UnixStream>;

/// What a process in the guest sees of its machine.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    hostname: String,
    machine_id: String,
    boot_id: String,
    /// Since 1970.
    seconds: u64,
}

impl Seen {
    fn parse(line: &str) -> Result<Self> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [hostname, machine_id, boot_id, seconds] = words.as_slice() else {
            bail!("the guest half wrote {line:?}");
        };
        Ok(Self {
            hostname: (*hostname).to_owned(),
            machine_id: (*machine_id).to_owned(),
            boot_id: (*boot_id).to_owned(),
            seconds: seconds.parse()?,
        })
    }

    /// The line without the time.
    fn names(&self) -> String {
        format!("{} {} {}", self.hostname, self.machine_id, self.boot_id)
    }
}

/// The guest, and how it is reached.
struct Guest {
    machine: Vm,
    /// Holds the tick that it has written last.
    disk: File,
    address: SocketAddr,
    half: GuestHalf,
}

impl Guest {
    fn connect(&self) -> Result<Agent> {
        Ok(Connection::new(connect(&self.address, VSOCK_PORT)?, None)?)
    }

    fn look(&self) -> Result<Seen> {
        Seen::parse(&vm::guest_half(&mut self.connect()?, CASE.name, &["look"])?)
    }

    /// How many random bytes its kernel has fetched from the host.
    fn fetched(&mut self) -> Result<u64> {
        let metrics = self.machine.vmm.client.metrics()?;
        let found = metrics.iter().find(|sample| sample.name == "rng_bytes_total");
        Ok(found.context("no metric of the entropy device")?.value)
    }

    /// What was fetched ahead of time is used up: the driver asks for more.
    fn fetches(&mut self, what: impl FnOnce(&Self) -> Result<String>) -> Result<String> {
        let before = self.fetched()?;
        let result = what(self)?;
        let fetched = self.fetched()? - before;
        ensure!(fetched >= PREFETCH, "{fetched} random bytes were fetched");
        Ok(result)
    }

    fn hook(&self, name: &str, script: &str) -> Result<()> {
        store(&mut self.connect()?, name, script)
    }

    fn stands_still(&mut self) -> Result<()> {
        // What was on its way.
        self.half.drain(Duration::from_millis(500))?;
        let before = self.half.collected().len();
        self.half.drain(Duration::from_millis(1000))?;
        let more = self.half.collected().get(before..).unwrap_or_default();
        ensure!(more.is_empty(), "the guest half goes on: {more}");
        Ok(())
    }

    /// What it has written is on the disk: it writes before it tells.
    fn is_on_disk(&self) -> Result<()> {
        let mut bytes = [0; TICK_DIGITS];
        self.disk.read_exact_at(&mut bytes, 0)?;
        let text = String::from_utf8_lossy(&bytes);
        let on_disk: usize = text.parse().with_context(|| format!("{text:?} is on the disk"))?;
        let told = self.half.collected().lines().count();
        ensure!(
            on_disk + 1 == told || on_disk == told,
            "the disk holds tick {on_disk} of {told}"
        );
        Ok(())
    }

    /// The process that was frozen sees the same, and has counted every tick.
    fn goes_on(&mut self, names: &str) -> Result<()> {
        // What a running guest has written before.
        self.half.drain(Duration::from_millis(200))?;
        let before = self.half.collected().lines().count();
        self.half.wait_for(&format!("tick {} {names}", before + 2))?;
        for (index, line) in self.half.collected().lines().enumerate() {
            ensure!(line.starts_with(&format!("tick {index} ")), "line {index} is {line:?}");
        }
        Ok(())
    }
}

fn host(host: &Host) -> Result<()> {
    let address = SocketAddr::from_abstract_name(format!("basalt-case-re-identify-{}", std::process::id()))?;
    let listener = UnixListener::bind_addr(&address)?;
    let mut builder = Builder::new(host)?.cpus(2);
    let disk = File::create_new(host.scratch.join("disk"))?;
    disk.set_len(DISK_BYTES)?;
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(host.scratch.join("disk"))?;
    let data = BlockConfig {
        file: builder.fd(file),
        read_only: false,
        queues: 1,
        serial: DISK.into(),
        engine: BlockEngine::Auto,
        limits: BlockLimits::default(),
    };
    builder.device(DISK, &data)?;
    let machine = builder.start_listening(Some(listener.into()))?;
    let mut agent = machine.agent()?;
    vm::install(&mut agent)?;
    store(&mut agent, "10-note", HOOK)?;
    let half = vm::start_guest_half(agent, CASE.name);
    let mut guest = Guest {
        machine,
        disk,
        address,
        half,
    };
    guest.half.wait_for("tick 3 ")?;

    displace(&guest)?;
    let before = guest.look()?;
    let first = frozen(&mut guest, &before)?;
    let second = running(&mut guest, &first)?;
    failing(&mut guest, &second)?;
    rolled_back(&mut guest)?;
    marks(&guest)?;
    let mut machine = guest.machine;
    machine.vmm.client.stop()?;
    ensure!(machine.vmm.wait(Duration::from_secs(10))?, "the VMM did not end well");
    Ok(())
}

/// Does to the agent what a container engine in the guest may do: moves it out of the root of all cgroups.
fn displace(guest: &Guest) -> Result<()> {
    let script = "mkdir /sys/fs/cgroup/init && echo 1 > /sys/fs/cgroup/init/cgroup.procs && cat /proc/1/cgroup";
    let request = ExecRequest {
        argv: ["sh", "-c", script].map(Into::into).to_vec(),
        ..ExecRequest::default()
    };
    let output = guest.connect()?.exec(&request)?.collect()?;
    ensure!(
        output.stdout == b"0::/init\n",
        "the agent could not be moved: {output:?}"
    );
    Ok(())
}

fn store(agent: &mut Agent, name: &str, script: &str) -> Result<()> {
    let upload = Upload {
        path: format!("{HOOKS}/{name}").into(),
        mode: 0o755,
        size: script.len().try_into()?,
    };
    Ok(agent.upload(&upload, &mut script.as_bytes())?)
}

/// A request whose clock is so many days ahead.
fn request(hostname: &str, digit: char, days: u64) -> Result<Reidentify> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs() + days * DAY;
    Ok(Reidentify {
        clock_ns: now * 1_000_000_000,
        // Cases need no secrets.
        entropy: vec![9; 64],
        identity: Some(Identity {
            hostname: hostname.to_owned(),
            machine_id: std::iter::repeat_n(digit, 32).collect(),
        }),
        hook_ms: HOOK_MS,
        thaw: true,
        ..Reidentify::default()
    })
}

/// A new process sees what was asked for, and nothing of what was before.
fn became(guest: &Guest, request: &Reidentify, boot_id: &str, before: &Seen) -> Result<Seen> {
    let seen = guest.look()?;
    let identity = request.identity.as_ref().context("no identity was asked for")?;
    let expected = format!("{} {} {boot_id}", identity.hostname, identity.machine_id);
    ensure!(seen.names() == expected, "a new process sees {seen:?}, not {expected}");
    ensure!(
        seen.hostname != before.hostname && seen.machine_id != before.machine_id && seen.boot_id != before.boot_id,
        "something stays as it was: {before:?}, {seen:?}"
    );
    let asked = request.clock_ns / 1_000_000_000;
    ensure!(
        (asked..asked + 120).contains(&seen.seconds),
        "the clock says {}, not {asked}",
        seen.seconds
    );
    Ok(seen)
}

fn refusal<T>(result: Result<T, agent_api::Error>, words: &str) -> Result<()> {
    match result {
        Err(agent_api::Error::Refused(message)) if message.contains(words) => Ok(()),
        Err(error) => bail!("it was refused, but does not say `{words}`: {error}"),
        Ok(_) => bail!("it was not refused, which should say `{words}`"),
    }
}

fn frozen(guest: &mut Guest, before: &Seen) -> Result<Seen> {
    let mut freezing = guest.connect()?;
    guest.fetches(|_| Ok(freezing.freeze().map(|()| String::new())?))?;
    freezing.freeze()?;
    guest.stands_still()?;
    guest.is_on_disk()?;
    let command = ExecRequest {
        argv: vec!["true".into()],
        ..ExecRequest::default()
    };
    refusal(guest.connect()?.exec(&command).map(drop), "is frozen for a snapshot")?;
    drop(freezing);

    let request = request("one", '1', 1)?;
    let boot_id = guest.fetches(|guest| Ok(guest.connect()?.reidentify(&request)?))?;
    let seen = became(guest, &request, &boot_id, before)?;
    guest.goes_on(&seen.names())?;
    // The hook saw the new names, and ran once.
    hooked(guest, &[&seen.names()])?;
    Ok(seen)
}

/// A guest that was not frozen is re-identified as well.
fn running(guest: &mut Guest, before: &Seen) -> Result<Seen> {
    let request = request("two", '2', 2)?;
    let boot_id = guest.connect()?.reidentify(&request)?;
    let seen = became(guest, &request, &boot_id, before)?;
    guest.goes_on(&seen.names())?;
    hooked(guest, &[&before.names(), &seen.names()])?;
    Ok(seen)
}

fn hooked(guest: &Guest, expected: &[&str]) -> Result<()> {
    let request = ExecRequest {
        argv: ["cat", HOOKED].map(Into::into).to_vec(),
        ..ExecRequest::default()
    };
    let output = guest.connect()?.exec(&request)?.collect()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(
        text.lines().eq(expected.iter().copied()),
        "the hook wrote {text:?}, not {expected:?}"
    );
    Ok(())
}

fn failing(guest: &mut Guest, before: &Seen) -> Result<()> {
    let mut last = before.clone();
    let hooks = [
        ("exit 7", "20-bad ended with code 7"),
        ("sleep 1000", "20-bad did not end within 1.5s"),
    ];
    for (script, words) in hooks {
        guest.hook("20-bad", &format!("#!/bin/sh\n{script}\n"))?;
        let mut agent = guest.connect()?;
        agent.freeze()?;
        let mut request = request("three", '3', 0)?;
        let few = Reidentify {
            entropy: vec![9; 31],
            ..request.clone()
        };
        refusal(agent.reidentify(&few), "31 random bytes are too few")?;
        request.hook_ms = SHORT_MS;
        refusal(agent.reidentify(&request), words)?;
        guest.stands_still()?;
        // Without hooks it goes on.
        request.hook_ms = 0;
        let boot_id = agent.reidentify(&request)?;
        let seen = guest.look()?;
        ensure!(
            seen.boot_id == boot_id && boot_id != last.boot_id,
            "the boot id is {seen:?}"
        );
        guest.goes_on(&seen.names())?;
        last = seen;
    }
    guest.hook("20-bad", "#!/bin/sh\nexit 0\n")
}

/// Who it is stays; which boot it is does not.
fn rolled_back(guest: &mut Guest) -> Result<()> {
    let before = guest.look()?;
    let mut agent = guest.connect()?;
    agent.freeze()?;
    let request = Reidentify {
        identity: None,
        ..request("unused", '4', 0)?
    };
    let boot_id = agent.reidentify(&request)?;
    let seen = guest.look()?;
    let expected = format!("{} {} {boot_id}", before.hostname, before.machine_id);
    ensure!(
        seen.names() == expected && boot_id != before.boot_id,
        "{before:?} became {seen:?}"
    );
    guest.goes_on(&seen.names())
}

/// Each step says when it was reached, in this order.
fn marks(guest: &Guest) -> Result<()> {
    const STEPS: [&str; 14] = [
        "freeze asked",
        "commands frozen",
        "disks written",
        "prefetched randomness used up",
        "frozen",
        "re-identify asked",
        "re-identify: clock set",
        "re-identify: prefetched randomness used up",
        "re-identify: entropy added",
        "re-identify: names written",
        "re-identify: boot id changed",
        "hooks run",
        "re-identification acknowledged",
        "thawed",
    ];
    let info = guest.connect()?.hello()?;
    let mut last = None;
    for step in STEPS {
        let (_, at) = info
            .marks
            .iter()
            .find(|(name, _)| name == step)
            .with_context(|| format!("no mark `{step}`"))?;
        if let Some(last) = last {
            eprintln!("{step}: {} us", at.saturating_sub(last) / 1000);
        }
        ensure!(Some(*at) >= last, "`{step}` was reached before what it comes after");
        last = Some(*at);
    }
    Ok(())
}

fn guest(arguments: &[String]) -> Result<()> {
    let mut out = std::io::stdout();
    if arguments.first().is_some_and(|word| word == "look") {
        return Ok(writeln!(out, "{}", look()?)?);
    }
    // Held open, as closing it would write it back.
    let disk = OpenOptions::new().write(true).open(find(DISK)?)?;
    for tick in 0.. {
        disk.write_all_at(format!("{tick:0TICK_DIGITS$}").as_bytes(), 0)?;
        writeln!(out, "tick {tick} {}", look()?)?;
        out.flush()?;
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// Name, machine id, boot id, seconds.
fn look() -> Result<String> {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let file = fs::read_to_string("/etc/hostname")?;
    // Before the first re-identification an image may have none.
    let machine_id = fs::read_to_string("/etc/machine-id").unwrap_or_default();
    let machine_id = Some(machine_id.trim()).filter(|id| !id.is_empty()).unwrap_or("none");
    let hosts = fs::read_to_string("/etc/hosts")?;
    let named = hosts
        .lines()
        .filter(|line| line.ends_with(&format!("\t{name}")))
        .count();
    // Between the kernel and the files nobody looks while all stand still; a re-identification of a running guest is not that quick.
    let agree = file.trim() == name && named == 1;
    let name = if agree {
        name
    } else {
        format!("{name}/{}/{named}", file.trim())
    };
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    Ok(format!("{name} {machine_id} {} {seconds}", boot_id.trim()))
}
