//! CPUs that Linux gives up, and guests that own them: real basalt.ko, on the lab's own kernel.
//!
//! `reservations` takes a CPU and gives it back, many times, by closing and by `kill -9`, and is refused what would be dangerous. `bare`
//! boots the guest kernel on such CPUs, and sees that nothing makes it leave them. `class-bare` has sandboxes of that class.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use agent_api::{Collected, Connection, ExecRequest};
use anyhow::{Context, Result, bail, ensure};
use reservation::{Device, ReservationError};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::limits::start;
use crate::basalt::expect_refusal;
use crate::daemon::Daemon;
use crate::vm::{Builder, Vm};
use crate::{Case, Host};

pub(crate) const RESERVATIONS: Case = Case {
    name: "reservations",
    limit: Duration::from_secs(240),
    host: reservations,
    guest: None,
};

pub(crate) const BOOT: Case = Case {
    name: "bare",
    limit: Duration::from_secs(240),
    host: boot,
    guest: None,
};

pub(crate) const CLASS: Case = Case {
    name: "class-bare",
    limit: Duration::from_secs(240),
    host: class,
    guest: None,
};

/// Rounds, unless `BASALT_RESERVATIONS` says otherwise.
const ROUNDS: usize = 10;

/// The one that is reserved; CPU 0 is one that Linux does not give.
pub(crate) const CPU: u32 = 1;

/// How long a reservation or a release may take on an idle emulated host.
const SOON: Duration = Duration::from_secs(5);

/// Whether this host is the lab, whose CPUs may be taken and whose kernel the module is built for. Elsewhere these cases have nothing to
/// do: nobody loads a module into a machine because tests are run on it.
pub(crate) fn in_lab() -> Result<bool> {
    // As lab/host/recipe.sh calls it.
    let lab = fs::read_to_string("/etc/hostname").is_ok_and(|name| name.trim() == "basalt-lab");
    #[expect(clippy::print_stdout, reason = "a case's own output")]
    if !lab {
        println!("not the lab: no module is loaded here");
    }
    Ok(lab)
}

/// The module, loaded as long as this lives.
pub(crate) struct Module;

impl Module {
    pub(crate) fn load(host: &Host) -> Result<Self> {
        Self::load_with(host, &[])
    }

    /// With these parameters, each as `NAME=VALUE`.
    pub(crate) fn load_with(host: &Host, parameters: &[&str]) -> Result<Self> {
        let file = host.asset("basalt.ko").display().to_string();
        run("insmod", &[&[file.as_str()], parameters].concat())?;
        Ok(Self)
    }

    pub(super) fn unload(self) -> Result<()> {
        // Not twice.
        std::mem::forget(self);
        run("rmmod", &["basalt"])
    }
}

impl Drop for Module {
    /// After a failure, whose words are worth more than ours.
    fn drop(&mut self) {
        drop(run("rmmod", &["basalt"]));
    }
}

/// Memory that this host's Linux was told to leave alone when it was booted, as the module takes it.
pub(crate) struct Reserved {
    /// Its parameter `memory`, such as `memory=288M@0x100000000`.
    pub(crate) memory: String,
    /// Its parameter `low`.
    pub(crate) low: String,
}

impl Reserved {
    /// What the kernel's command line says (`memmap=SIZE$START`); `None` where nothing is reserved, as in a lab of less memory.
    pub(crate) fn of_host() -> Result<Option<Self>> {
        let line = fs::read_to_string("/proc/cmdline")?;
        let (mut memory, mut low) = (Vec::new(), Vec::new());
        for word in line.split_whitespace() {
            let Some((size, start)) = word.strip_prefix("memmap=").and_then(|rest| rest.split_once('$')) else {
                continue;
            };
            let digits = start.strip_prefix("0x").context("a start that is not hexadecimal")?;
            let at = u64::from_str_radix(digits, 16).with_context(|| format!("`{word}`"))?;
            let ranges = if at < 1 << 20 { &mut low } else { &mut memory };
            ranges.push(format!("{size}@{start}"));
        }
        Ok((!memory.is_empty() && low.len() == 1).then(|| Self {
            memory: format!("memory={}", memory.join(",")),
            low: format!("low={}", low.concat()),
        }))
    }

    /// The module, with this memory.
    pub(crate) fn load(&self, host: &Host) -> Result<Module> {
        Module::load_with(host, &[&self.memory, &self.low])
    }
}

pub(crate) fn run(program: &str, arguments: &[&str]) -> Result<()> {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .context(program.to_owned())?;
    ensure!(
        output.status.success(),
        "{program} {}: {}",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// The CPUs that Linux has.
pub(crate) fn online() -> Result<String> {
    let text = fs::read_to_string("/sys/devices/system/cpu/online")?;
    Ok(text.trim().to_owned())
}

pub(super) fn wait_online(wanted: &str) -> Result<()> {
    let limit = Instant::now() + SOON;
    loop {
        let now = online()?;
        if now == wanted {
            return Ok(());
        }
        ensure!(
            Instant::now() < limit,
            "the CPUs that are online are {now}, not {wanted}"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn reservations(host: &Host) -> Result<()> {
    if !in_lab()? {
        return Ok(());
    }
    let module = Module::load(host)?;
    let device = Device::open(Device::PATH)?;
    let all = online()?;
    let rounds = match std::env::var("BASALT_RESERVATIONS") {
        Ok(text) => text.parse().context("BASALT_RESERVATIONS")?,
        Err(_) => ROUNDS,
    };
    let mut worst = Duration::ZERO;
    for _ in 0..rounds {
        let began = Instant::now();
        let reservation = device.reserve(&[CPU])?;
        ensure!(online()? != all, "CPU {CPU} is reserved and still online");
        drop(reservation);
        worst = worst.max(began.elapsed());
        ensure!(online()? == all, "CPU {CPU} did not come back");
    }
    #[expect(clippy::print_stdout, reason = "a case's own output")]
    {
        println!("{rounds} reservations, the longest with its release {worst:?}");
    }
    refusals(&device)?;
    killed(&device, &all)?;
    drop(device);
    module.unload()
}

/// What may not be had, and what may not be done while a CPU is reserved.
fn refusals(device: &Device) -> Result<()> {
    for cpu in [0, 1000] {
        match device.reserve(&[cpu]) {
            Err(ReservationError::Cpu { cpu: failed, .. }) => ensure!(failed == cpu, "CPU {failed} failed, not {cpu}"),
            other => bail!("CPU {cpu}: {other:?}"),
        }
    }
    ensure!(device.reserve(&[]).is_err() && device.reserve(&[CPU, CPU]).is_err());
    let reservation = device.reserve(&[CPU])?;
    match device.reserve(&[CPU]) {
        Err(ReservationError::Cpu { source, .. }) => {
            let code = source.raw_os_error();
            // It is not online.
            ensure!(
                code == Some(rustix::io::Errno::NODEV.raw_os_error()),
                "a second reservation: {source}"
            );
        }
        other => bail!("a second reservation: {other:?}"),
    }
    let by_hand = fs::write(format!("/sys/devices/system/cpu/cpu{CPU}/online"), "1");
    ensure!(by_hand.is_err(), "a reserved CPU was brought online by hand");
    let unloading = run("rmmod", &["basalt"]).map_err(|error| error.to_string());
    ensure!(
        unloading.is_err_and(|error| error.contains("in use")),
        "the module was unloaded"
    );
    // A host that sleeps would wake with CPUs that are nobody's.
    let sleeping = fs::write("/sys/power/state", "mem");
    ensure!(sleeping.is_err(), "the host has slept while a CPU was reserved");
    drop(reservation);
    Ok(())
}

/// A process that has the reservation and is killed.
fn killed(device: &Device, all: &str) -> Result<()> {
    let reservation = device.reserve(&[CPU])?;
    // Its standard input is a copy of the reservation, of which the command must not keep another.
    let mut command = Command::new("sleep");
    let mut sleeper = command
        .arg("1000")
        .stdin(reservation.as_fd().try_clone_to_owned()?)
        .spawn()?;
    drop(command);
    drop(reservation);
    ensure!(online()? != all, "the copy does not hold the CPU");
    sleeper.kill()?;
    sleeper.wait()?;
    wait_online(all)
}

/// How long a guest is watched: longer than its kernel waits with what it does every few seconds, such as writing back.
const WATCHED: Duration = Duration::from_secs(6);

/// Nothing makes the guest's vCPUs leave it for a while, but for interrupts from one to another, which the module looks at.
fn no_exits(machine: &mut Vm, vcpus: u32, what: &str) -> Result<()> {
    let mut counters = || -> Result<BTreeMap<String, u64>> {
        let samples = machine.vmm.client.metrics()?.into_iter();
        Ok(samples
            .map(|sample| (format!("{} {:?}", sample.name, sample.labels), sample.value))
            .collect())
    };
    let looked_at = |name: &str| vcpus > 1 && name.contains("\"icr\"");
    let of_engine = |counters: &BTreeMap<String, u64>| -> u64 {
        let exits = counters
            .iter()
            .filter(|(name, _)| name.starts_with("engine_exits_total"));
        exits.filter(|(name, _)| !looked_at(name)).map(|(_, count)| count).sum()
    };
    let before = counters()?;
    ensure!(of_engine(&before) > 0, "no exit was ever counted");
    std::thread::sleep(WATCHED);
    let after = counters()?;
    let changed = after.iter().filter(|(name, count)| before.get(*name) != Some(count));
    let changed: Vec<_> = changed.map(|(name, _)| name).collect();
    ensure!(of_engine(&before) == of_engine(&after), "{what} had exits: {changed:?}");
    Ok(())
}

/// Has the guest's kernel ask all of its processors where they are.
const BACKTRACES: &str = "echo l > /proc/sysrq-trigger; sleep 1; dmesg";

/// The most vCPUs that a guest gets here.
pub(super) const MOST: u32 = 3;

fn boot(host: &Host) -> Result<()> {
    if !in_lab()? {
        return Ok(());
    }
    let module = Module::load(host)?;
    let device = Device::open(Device::PATH)?;
    let cpus = u32::try_from(std::thread::available_parallelism()?.get())?;
    for vcpus in 1..cpus.min(MOST + 1) {
        boot_on(host, &device, vcpus).with_context(|| format!("with {vcpus} vCPUs"))?;
    }
    drop(device);
    module.unload()
}

fn boot_on(host: &Host, device: &Device, vcpus: u32) -> Result<()> {
    let all = online()?;
    let reservation = device.reserve(&(CPU..CPU + vcpus).collect::<Vec<_>>())?;
    let builder = Builder::new(host)?.cpus(vcpus);
    let mut machine = builder
        .reservation(reservation.as_fd().try_clone_to_owned()?)?
        .start()?;
    drop(reservation);
    let mut agent = machine.agent()?;
    let request = ExecRequest {
        argv: ["cat", "/proc/cpuinfo"].map(Into::into).to_vec(),
        ..ExecRequest::default()
    };
    let Collected { stdout, .. } = agent.exec(&request)?.collect()?;
    let said = String::from_utf8_lossy(&stdout);
    let seen = said.matches("processor\t").count();
    ensure!(
        seen == usize::try_from(vcpus)?,
        "the guest has {seen} processors: {said}"
    );
    ensure!(machine.vmm.client.info()?.engine == "bare");
    // Each vCPU says where it is, asked by an NMI of another's.
    let Collected { stdout, .. } = agent
        .exec(&ExecRequest {
            argv: ["sh", "-c", BACKTRACES].map(Into::into).to_vec(),
            ..ExecRequest::default()
        })?
        .collect()?;
    let said = String::from_utf8_lossy(&stdout);
    let told = said.matches("NMI backtrace for cpu ").count();
    ensure!(
        told == usize::try_from(vcpus)?,
        "{told} of its processors answered an NMI: {said}"
    );
    stays_in(&mut machine, &mut agent, vcpus)?;
    drop(agent);
    machine.vmm.client.stop()?;
    drop(machine);
    wait_online(&all)
}

/// Nothing makes a guest's vCPUs leave it while it is idle, nor while it is busy.
pub(super) fn stays_in(machine: &mut Vm, agent: &mut Connection<UnixStream>, vcpus: u32) -> Result<()> {
    // Nothing of the agent's last answer is under way any more.
    std::thread::sleep(Duration::from_secs(2));
    no_exits(machine, vcpus, "an idle guest")?;
    let busy = agent.exec(&ExecRequest {
        argv: ["sh", "-c", "while :; do :; done"].map(Into::into).to_vec(),
        ..ExecRequest::default()
    })?;
    std::thread::sleep(Duration::from_secs(2));
    no_exits(machine, vcpus, "a busy guest")?;
    drop(busy);
    Ok(())
}

fn class(host: &Host) -> Result<()> {
    if !in_lab()? {
        return Ok(());
    }
    let daemon = Daemon::new(host)?;
    let digest = host.digest.as_str();
    let without = daemon.run(&["run", "--class", "bare", digest, "--", "true"])?;
    expect_refusal(&without, 125, &["modprobe basalt"])?;
    let module = Module::load(host)?;
    let all = online()?;
    let more = daemon.run(&["run", "--class", "bare", "--cpus", "60", digest, "--", "true"])?;
    expect_refusal(&more, 125, &["60 CPUs are wanted", "can be spared"])?;
    // One of the class standard runs beside it all the time.
    start(host, &daemon, "beside", &[], &["sleep", "1000"])?;
    let shared = daemon.run(&["run", "--idle", "poll", digest, "--", "true"])?;
    expect_refusal(&shared, 125, &["add --class dedicated or bare"])?;
    let reaching = daemon.run(&["run", "--memory-mode", "identity", digest, "--", "true"])?;
    expect_refusal(&reaching, 125, &["--memory-mode identity", "add --class bare"])?;
    let options = ["--class", "bare", "--idle", "poll"];
    let id = start(host, &daemon, "owner", &options, &["sleep", "1000"])?;
    let told = daemon.ok(&["exec", "owner", "--", "cat", "/proc/cmdline"])?;
    ensure!(told.contains(" idle=poll"), "the guest's kernel is told {told}");
    ensure!(
        online()? != all,
        "a sandbox of the class bare runs, and Linux has all CPUs"
    );
    ensure!(
        daemon
            .ok(&["exec", "owner", "--", "cat", "/proc/sys/kernel/hostname"])?
            .trim()
            == id
    );
    for verb in ["pause", "unpause"] {
        daemon.ok(&[verb, "owner"])?;
    }
    daemon.ok(&["exec", "owner", "--", "true"])?;
    daemon.ok(&["stop", "owner"])?;
    wait_online(&all)?;
    daemon.ok(&["start", "owner"])?;
    ensure!(online()? != all, "it was started again, and Linux has all CPUs");
    let inspected: Value = serde_json::from_str(&daemon.ok(&["inspect", "owner"])?)?;
    let refused = inspected.pointer("/0/refused").and_then(Value::as_u64);
    ensure!(
        refused.is_some_and(|count| count > 0),
        "it has tried nothing that no guest may: {inspected}"
    );
    let vmm = inspected
        .pointer("/0/vmm/pid")
        .and_then(Value::as_i64)
        .context("a VMM")?;
    let vmm = i32::try_from(vmm).ok().and_then(Pid::from_raw).context("a process")?;
    kill_process(vmm, Signal::KILL)?;
    wait_online(&all)?;
    daemon.ok(&["exec", "beside", "--", "true"])?;
    waits(&daemon, digest)?;
    daemon.ok(&["rm", "--force", "owner", "beside"])?;
    daemon.end()?;
    module.unload()
}

/// One whose vCPUs wait for writes, which this host's processor can; others are shown it, and told to halt.
fn waits(daemon: &Daemon<'_>, digest: &str) -> Result<()> {
    let asked = "cat /proc/cmdline; grep -c -w monitor /proc/cpuinfo; dmesg | grep 'using mwait'";
    let told = |idle: &str| {
        daemon.run(&[
            "run", "--class", "bare", "--idle", idle, digest, "--", "sh", "-c", asked,
        ])
    };
    let waiting = told("wait")?;
    let said = String::from_utf8_lossy(&waiting.stdout);
    ensure!(
        waiting.status.success() && said.contains("\n1\n") && !said.contains("idle="),
        "a guest that is to wait says {said}{}",
        String::from_utf8_lossy(&waiting.stderr)
    );
    let halting = told("halt")?;
    let said = String::from_utf8_lossy(&halting.stdout);
    ensure!(
        !halting.status.success() && said.contains(" idle=nomwait"),
        "a guest that is to halt says {said}"
    );
    Ok(())
}
