//! Guests whose memory nobody translates: they see it where the host's bus has it, and reach their devices by ports. `bare-identity`
//! has machines of that kind, `class-identity` sandboxes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use agent_api::{Collected, Connection, ExecRequest};
use anyhow::{Context, Result, ensure};
use reservation::{Device, ReservedMemory};
use rustix::process::{Pid, Signal, kill_process};

use super::bare::{CPU, MOST, Module, Reserved, in_lab, online, stays_in, wait_online};
use super::dedicated::{kill_vmm, vmm_of};
use super::limits::start;
use crate::basalt::expect_refusal;
use crate::daemon::Daemon;
use crate::vm::{Builder, Vm};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "bare-identity",
    limit: Duration::from_secs(300),
    host,
    guest: None,
};

pub(crate) const CLASS: Case = Case {
    name: "class-identity",
    limit: Duration::from_secs(300),
    host: class,
    guest: None,
};

/// How long memory may take to be free after whoever had it was killed.
const SOON: Duration = Duration::from_secs(5);

fn host(host: &Host) -> Result<()> {
    if !in_lab()? {
        return Ok(());
    }
    let Some(reserved) = Reserved::of_host()? else {
        #[expect(clippy::print_stdout, reason = "a case's own output")]
        {
            println!("this lab has too little memory for some to be reserved");
        }
        return Ok(());
    };
    without_memory(host)?;
    let module = reserved.load(host)?;
    let device = Device::open(Device::PATH)?;
    let free = device.reserved_memory()?;
    ensure!(free.total > 0 && free.free == free.total, "{free:?} is not all free");
    let cpus = u32::try_from(std::thread::available_parallelism()?.get())?;
    let most = (cpus - 1).min(MOST);
    for vcpus in BTreeSet::from([1, most]) {
        runs(host, (&device, &reserved), vcpus).with_context(|| format!("with {vcpus} vCPUs"))?;
        wait_free(&device, &free)?;
    }
    side_by_side(host, &device, cpus)?;
    killed(host, &device)?;
    wait_free(&device, &free)?;
    drop(device);
    module.unload()
}

fn builder<'a>(host: &'a Host, device: &Device, cpus: std::ops::Range<u32>) -> Result<Builder<'a>> {
    let reservation = device.reserve(&cpus.clone().collect::<Vec<_>>())?;
    let builder = Builder::new(host)?.cpus(u32::try_from(cpus.len())?).identity();
    builder.reservation(reservation.as_fd().try_clone_to_owned()?)
}

/// A module that was told of no memory refuses, and says what to do.
fn without_memory(host: &Host) -> Result<()> {
    let module = Module::load(host)?;
    let device = Device::open(Device::PATH)?;
    let refused = builder(host, &device, CPU..CPU + 1)?.start();
    let said = refused
        .err()
        .context("a guest has memory that nobody reserved")?
        .to_string();
    for word in ["no memory is reserved", "memmap=", "insmod"] {
        ensure!(said.contains(word), "without `{word}`: {said}");
    }
    drop(device);
    module.unload()
}

/// Until all that was free is.
fn wait_free(device: &Device, all: &ReservedMemory) -> Result<()> {
    let limit = Instant::now() + SOON;
    while device.reserved_memory()? != *all {
        let now = device.reserved_memory()?;
        ensure!(
            Instant::now() < limit,
            "of {all:?} there is {now:?} after the guest's end"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

fn says(agent: &mut Connection<std::os::unix::net::UnixStream>, script: &str) -> Result<String> {
    let request = ExecRequest {
        argv: ["sh", "-c", script].map(Into::into).to_vec(),
        ..ExecRequest::default()
    };
    let Collected { stdout, .. } = agent.exec(&request)?.collect()?;
    Ok(String::from_utf8_lossy(&stdout).into_owned())
}

/// Where the guest's kernel says that it has memory.
fn memory_of(agent: &mut Connection<std::os::unix::net::UnixStream>) -> Result<Vec<u64>> {
    let told = says(agent, "grep 'System RAM' /proc/iomem")?;
    let starts = told.lines().filter_map(|line| line.trim_start().split_once('-'));
    let starts = starts.map(|(start, _)| u64::from_str_radix(start, 16));
    starts.collect::<Result<_, _>>().with_context(|| format!("`{told}`"))
}

/// What exits a VMM has counted.
fn exits(machine: &mut Vm) -> Result<BTreeMap<String, u64>> {
    let samples = machine.vmm.client.metrics()?.into_iter();
    let exits = samples.filter(|sample| sample.name == "engine_exits_total");
    let named = exits.filter_map(|sample| Some((sample.labels.first()?.1.clone(), sample.value)));
    Ok(named.collect())
}

fn runs(host: &Host, (device, reserved): (&Device, &Reserved), vcpus: u32) -> Result<()> {
    let all = online()?;
    let mut machine = builder(host, device, CPU..CPU + vcpus)?.start()?;
    let mut agent = machine.agent()?;
    let seen = says(&mut agent, "grep -c ^processor /proc/cpuinfo")?;
    ensure!(seen.trim() == vcpus.to_string(), "the guest has {seen} processors");
    // What it takes for physical addresses is what the host does.
    let starts = memory_of(&mut agent)?;
    for range in [&reserved.memory, &reserved.low] {
        let at = range
            .rsplit_once("@0x")
            .map(|(_, start)| u64::from_str_radix(start, 16));
        let at = at.context("a range without a start")??;
        ensure!(
            starts.contains(&at),
            "the host has reserved {range}, and its memory begins at {starts:x?}"
        );
    }
    let told = says(
        &mut agent,
        "cat /proc/ioports; dmesg | grep -c MMCONFIG; cat /proc/interrupts",
    )?;
    ensure!(
        told.contains("virtio") && told.contains("MSI"),
        "its devices are {told}"
    );
    // Its disk and its connections have been at work: by ports alone.
    ensure!(says(&mut agent, "cat /bin/* /lib/* 2>/dev/null | wc -c")?.trim().len() > 6);
    let counted = exits(&mut machine)?;
    ensure!(
        counted.get("memory") == Some(&0),
        "its accesses to memory came out: {counted:?}"
    );
    ensure!(
        counted.get("port").is_some_and(|ports| *ports > 0),
        "no port was counted: {counted:?}"
    );
    // What has no other form than where it is.
    machine.vmm.client.pause()?;
    let [state, memory] = ["state", "memory"].map(|name| File::create(host.scratch.join(name)));
    let kept = machine.vmm.client.snapshot(state?.as_fd(), memory?.as_fd(), &[]);
    let said = kept.err().context("it was saved")?.to_string();
    ensure!(said.contains("translated"), "{said}");
    machine.vmm.client.resume()?;
    stays_in(&mut machine, &mut agent, vcpus)?;
    drop(agent);
    machine.vmm.client.stop()?;
    drop(machine);
    wait_online(&all)
}

/// Two at once have memory of their own, and a third has none.
fn side_by_side(host: &Host, device: &Device, cpus: u32) -> Result<()> {
    if cpus < 4 {
        return Ok(());
    }
    let all = online()?;
    let machines = [CPU, CPU + 1].map(|cpu| builder(host, device, cpu..cpu + 1)?.start());
    let [first, second] = machines;
    let (first, second) = (first?, second?);
    let (mut near, mut far) = (first.agent()?, second.agent()?);
    let starts = (memory_of(&mut near)?, memory_of(&mut far)?);
    ensure!(
        starts.0.iter().all(|start| !starts.1.contains(start)),
        "they share {starts:x?}"
    );
    for agent in [&mut near, &mut far] {
        ensure!(says(agent, "sha256sum /bin/busybox /bin/sh | sort | uniq | wc -l")?.trim() != "0");
    }
    let third = builder(host, device, CPU + 2..CPU + 3)?.start();
    let said = third.err().context("a third guest has memory")?.to_string();
    ensure!(said.contains("MiB that are reserved"), "{said}");
    drop((near, far, first, second));
    wait_online(&all)
}

/// One whose VMM is killed while it is busy.
fn killed(host: &Host, device: &Device) -> Result<()> {
    let all = online()?;
    let machine = builder(host, device, CPU..CPU + 1)?.start()?;
    let mut agent = machine.agent()?;
    let busy = agent.exec(&ExecRequest {
        argv: ["sh", "-c", "while :; do :; done"].map(Into::into).to_vec(),
        ..ExecRequest::default()
    })?;
    let vmm = i32::try_from(machine.vmm.pid()).ok().and_then(Pid::from_raw);
    kill_process(vmm.context("a VMM")?, Signal::KILL)?;
    drop(busy);
    drop(agent);
    drop(machine);
    wait_online(&all)
}

/// Works on the disk and in the volume, and tells what it has read there.
const WORK: &str = "head -c 4000000 /dev/urandom > /var/tmp/a && cp /var/tmp/a /data/b && sync && echo 3 > /proc/sys/vm/drop_caches; \
    cmp /var/tmp/a /data/b && wc -c < /data/b";

/// A sandbox has all of its devices, is stopped and started, killed, and refused what its memory cannot do.
fn class(host: &Host) -> Result<()> {
    let reserved = if in_lab()? { Reserved::of_host()? } else { None };
    let Some(reserved) = reserved else {
        return Ok(());
    };
    let digest = host.digest.as_str();
    let daemon = Daemon::new(host)?;
    let module = Module::load(host)?;
    let asked = ["run", "--class", "bare", "--memory-mode", "identity"];
    let run = |more: &[&str]| daemon.run(&[&asked, more, &[digest, "--", "true"]].concat());
    expect_refusal(&run(&[])?, 125, &["no memory is reserved", "memmap=", "docs/bare.md"])?;
    module.unload()?;
    let module = reserved.load(host)?;
    expect_refusal(
        &run(&["--memory", "1g"])?,
        125,
        &["in one piece", "the largest free piece has 288 MiB"],
    )?;
    let device = Device::open(Device::PATH)?;
    let free = device.reserved_memory()?;
    let all = online()?;
    let cpus = if std::thread::available_parallelism()?.get() < 4 {
        "1"
    } else {
        "2"
    };
    let options = [
        "--class",
        "bare",
        "--memory-mode",
        "identity",
        "--cpus",
        cpus,
        "-v",
        "kept:/data",
    ];
    start(host, &daemon, "trusted", &options, &["sleep", "1000"])?;
    for _ in 0..2 {
        let told = daemon.ok(&["exec", "trusted", "--", "nproc"])?;
        ensure!(told.trim() == cpus, "it has {told} processors");
        let told = daemon.ok(&["exec", "trusted", "--", "sh", "-c", WORK])?;
        ensure!(told.trim() == "4000000", "it has read {told}");
        ensure!(device.reserved_memory()?.free < free.free && online()? != all);
        let why = "its guest knows where the host has it";
        expect_refusal(&daemon.run(&["snapshot", "create", "trusted"])?, 1, &[why, "basalt cp"])?;
        expect_refusal(&daemon.run(&["move", "--class", "standard", "trusted"])?, 1, &[why])?;
        for verb in ["pause", "unpause", "stop"] {
            daemon.ok(&[verb, "trusted"])?;
        }
        wait_online(&all)?;
        wait_free(&device, &free)?;
        daemon.ok(&["start", "trusted"])?;
    }
    kill_vmm(vmm_of(&daemon, "trusted")?)?;
    wait_online(&all)?;
    wait_free(&device, &free)?;
    daemon.ok(&["rm", "--force", "trusted"])?;
    drop(device);
    daemon.end()?;
    module.unload()
}
