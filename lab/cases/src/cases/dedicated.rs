//! Sandboxes whose vCPUs have CPUs to themselves, on a stock kernel: everything else is kept off these, a guest that halts stays on
//! them, and the host is as before when the sandbox is gone, however it went.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::bare::in_lab;
use super::limits::start;
use crate::basalt::expect_refusal;
use crate::daemon::{Daemon, kill, wait_for};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "class-dedicated",
    limit: Duration::from_secs(300),
    host,
    guest: None,
};

/// The one that is taken: the last.
fn last_cpu() -> Result<String> {
    let online = super::bare::online()?;
    let last = online.rsplit(['-', ',']).next();
    last.map(str::to_owned).context("no CPU is online")
}

/// What the host says of its CPUs in every place that isolation changes.
fn everything() -> Result<BTreeMap<PathBuf, String>> {
    let mut paths: Vec<PathBuf> = [
        "/proc/irq/default_smp_affinity",
        "/sys/devices/virtual/workqueue/cpumask",
        "/sys/devices/system/cpu/online",
        "/sys/fs/cgroup/cgroup.subtree_control",
    ]
    .map(PathBuf::from)
    .to_vec();
    for entry in fs::read_dir("/proc/irq")? {
        paths.push(entry?.path().join("smp_affinity_list"));
    }
    for entry in fs::read_dir("/sys/fs/cgroup")? {
        paths.push(entry?.path().join("cpuset.cpus"));
    }
    let read = |path: PathBuf| {
        let text = fs::read_to_string(&path).ok()?;
        Some((path, text.trim().to_owned()))
    };
    let mut all: BTreeMap<_, _> = paths.into_iter().filter_map(read).collect();
    // Of the kernel's threads, and of who begins all others.
    for pid in [1, 2] {
        let process = PathBuf::from(format!("/proc/{pid}"));
        let may = allowed(&process)?;
        all.insert(process, may);
    }
    Ok(all)
}

fn expect_as(before: &BTreeMap<PathBuf, String>, when: &str) -> Result<()> {
    let as_before = || -> Result<bool> {
        let now = everything()?;
        // Cgroups may have come and gone.
        let same = before.iter().all(|(path, text)| match now.get(path) {
            Some(now) => now == text,
            None => path.ends_with("cpuset.cpus"),
        });
        Ok(same && !Path::new("/run/basalt-cpus/journal.json").exists())
    };
    wait_for(when, as_before)
}

/// The CPUs that a thread may run on.
fn allowed(thread: &Path) -> Result<String> {
    let status = fs::read_to_string(thread.join("status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    Ok(line.context("no Cpus_allowed_list")?.trim().to_owned())
}

fn has(list: &str, cpu: &str) -> bool {
    list.parse::<base::CpuSet>()
        .is_ok_and(|set| cpu.parse().is_ok_and(|cpu| set.contains(cpu)))
}

/// Each vCPU of a process has its CPU, and no other thread may come there.
fn expect_placed(pid: u64, cpu: &str) -> Result<()> {
    let mut vcpus = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let task = task?.path();
        let name = fs::read_to_string(task.join("comm"))?;
        let list = allowed(&task)?;
        if name.starts_with("vcpu") {
            ensure!(list == cpu, "{} may run on {list}", name.trim());
            vcpus += 1;
        } else {
            ensure!(!has(&list, cpu), "{} may run on {list}", name.trim());
        }
    }
    ensure!(vcpus == 1, "{vcpus} vCPUs");
    Ok(())
}

fn inspect(daemon: &Daemon<'_>, name: &str) -> Result<Value> {
    let mut all: Value = serde_json::from_str(&daemon.ok(&["inspect", name])?)?;
    Ok(all[0].take())
}

pub(super) fn vmm_of(daemon: &Daemon<'_>, name: &str) -> Result<u64> {
    let sandbox = inspect(daemon, name)?;
    sandbox.pointer("/vmm/pid").and_then(Value::as_u64).context("a VMM")
}

/// How often a VM's guest that has booted has left its CPU because it halted, by KVM.
fn halts(vmm: u64) -> Result<u64> {
    let own = format!("{vmm}-");
    for entry in fs::read_dir("/sys/kernel/debug/kvm")? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(&own) {
            return Ok(fs::read_to_string(entry.path().join("halt_exits"))?.trim().parse()?);
        }
    }
    anyhow::bail!("KVM knows no VM of process {vmm}")
}

/// KVM's counters, mounted as long as this lives if nobody had them mounted.
struct Counters(bool);

impl Counters {
    fn mount() -> Result<Self> {
        if Path::new("/sys/kernel/debug/kvm").exists() {
            return Ok(Self(false));
        }
        let mount = ["-t", "debugfs", "none", "/sys/kernel/debug"];
        let status = Command::new("mount").args(mount).status()?;
        ensure!(status.success(), "debugfs cannot be mounted");
        Ok(Self(true))
    }
}

impl Drop for Counters {
    /// After a failure, whose words are worth more than ours.
    fn drop(&mut self) {
        if self.0 {
            drop(Command::new("umount").arg("/sys/kernel/debug").status());
        }
    }
}

/// Something of the host's that would run everywhere.
struct Busy(Child);

impl Busy {
    fn begin() -> Result<Self> {
        Ok(Self(Command::new("sleep").arg("1000").spawn()?))
    }

    fn allowed(&self) -> Result<String> {
        allowed(&PathBuf::from(format!("/proc/{}", self.0.id())))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        drop(self.0.kill().and_then(|()| self.0.wait()));
    }
}

fn host(host: &Host) -> Result<()> {
    if !in_lab()? {
        return Ok(());
    }
    let daemon = Daemon::with_templates(host)?;
    // Its network and cgroup are there.
    start(host, &daemon, "beside", &["--boot"], &["sleep", "1000"])?;
    let (cpu, before, busy) = (last_cpu()?, everything()?, Busy::begin()?);
    by_hand(&daemon, &cpu, &before, &busy)?;
    // KVM calls a VM after the thread that has made it; the first of a VMM's, if it boots.
    let options = ["--class", "dedicated", "--boot"];
    start(host, &daemon, "owner", &options, &["sleep", "1000"])?;
    owned(&daemon, &cpu, &busy)?;
    let more = [
        "run",
        "--class",
        "dedicated",
        "--cpus",
        "60",
        &host.digest,
        "--",
        "true",
    ];
    expect_refusal(&daemon.run(&more)?, 125, &["60 CPUs are wanted", "basalt host cpus"])?;
    daemon.ok(&["snapshot", "create", "owner", "kept"])?;
    daemon.ok(&["stop", "owner"])?;
    expect_as(&before, "stopped")?;
    // It is in its snapshot of which class it is.
    daemon.ok(&["clone", "--name", "again", "kept"])?;
    let vmm = vmm_of(&daemon, "again")?;
    expect_placed(vmm, &cpu)?;
    daemon.ok(&["exec", "again", "--", "true"])?;
    kill_vmm(vmm)?;
    expect_as(&before, "without a VMM")?;
    // Nobody is there who could give them back, until somebody is.
    daemon.ok(&["start", "owner"])?;
    let vmm = vmm_of(&daemon, "owner")?;
    daemon.kill()?;
    kill_vmm(vmm)?;
    daemon.ok(&["ps"])?;
    expect_as(&before, "without VMM and daemon")?;
    daemon.ok(&["exec", "beside", "--", "true"])?;
    daemon.ok(&["rm", "--force", "owner", "again", "beside"])?;
    daemon.ok(&["snapshot", "rm", "kept"])?;
    daemon.end()
}

pub(super) fn kill_vmm(pid: u64) -> Result<()> {
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
    kill(pid.context("a process")?)
}

/// An operator keeps a CPU free, and gives it back.
fn by_hand(daemon: &Daemon<'_>, cpu: &str, before: &BTreeMap<PathBuf, String>, busy: &Busy) -> Result<()> {
    let first = daemon.run(&["host", "isolate", "0"])?;
    expect_refusal(&first, 1, &["CPU 0", "leave it out"])?;
    let absent = daemon.run(&["host", "isolate", "700"])?;
    expect_refusal(&absent, 1, &["no CPU 700 is online"])?;
    ensure!(has(&busy.allowed()?, cpu), "it could not run there anyway");
    ensure!(daemon.ok(&["host", "isolate", cpu])? == format!("isolated {cpu}\n"));
    ensure!(!has(&busy.allowed()?, cpu), "a task of the host may run on CPU {cpu}");
    let later = Busy::begin()?;
    ensure!(!has(&later.allowed()?, cpu), "a new task may run on CPU {cpu}");
    let default = fs::read_to_string("/proc/irq/default_smp_affinity")?;
    ensure!(
        !base::CpuSet::of_mask(&default)?.contains(cpu.parse()?),
        "new interrupts may come to CPU {cpu}: {default}"
    );
    ensure!(used(daemon, cpu)? == "isolated");
    ensure!(daemon.ok(&["host", "release"])? == format!("released {cpu}\n"));
    ensure!(
        has(&busy.allowed()?, cpu) && has(&later.allowed()?, cpu),
        "a task stays off CPU {cpu}"
    );
    let none = daemon.run(&["host", "release", cpu])?;
    expect_refusal(&none, 1, &["is not isolated"])?;
    expect_as(before, "released")
}

fn used(daemon: &Daemon<'_>, cpu: &str) -> Result<String> {
    let cpus: Vec<Value> = serde_json::from_str(&daemon.ok(&["--json", "host", "cpus"])?)?;
    let number: u64 = cpu.parse()?;
    let found = cpus.iter().find(|one| one["number"] == number);
    let found = found.with_context(|| format!("no CPU {cpu} in {cpus:?}"))?;
    Ok(found["used"].as_str().unwrap_or_default().to_owned())
}

/// For how long two guests that idle are watched.
const WATCHED: Duration = Duration::from_secs(6);

/// A sandbox has a CPU, and nothing else has it.
fn owned(daemon: &Daemon<'_>, cpu: &str, busy: &Busy) -> Result<()> {
    let (vmm, beside) = (vmm_of(daemon, "owner")?, vmm_of(daemon, "beside")?);
    expect_placed(vmm, cpu)?;
    ensure!(!has(&busy.allowed()?, cpu), "a task of the host may run on CPU {cpu}");
    for task in fs::read_dir(format!("/proc/{beside}/task"))? {
        let task = task?.path();
        let (list, name) = (allowed(&task)?, fs::read_to_string(task.join("comm"))?);
        // Linux 6.1 heeds no cpuset for io_uring's workers.
        if name.starts_with("iou-wrk") {
            continue;
        }
        ensure!(!has(&list, cpu), "{} of another sandbox may run on {list}", name.trim());
    }
    let sandbox = inspect(daemon, "owner")?;
    ensure!(sandbox["owned_cpus"] == cpu, "it owns {}", sandbox["owned_cpus"]);
    ensure!(used(daemon, cpu)? == "dedicated");
    let refused = daemon.run(&["host", "isolate", cpu])?;
    expect_refusal(&refused, 1, &["until that ends", "basalt stop"])?;
    for verb in ["pause", "unpause"] {
        daemon.ok(&[verb, "owner"])?;
    }
    daemon.ok(&["exec", "owner", "--", "true"])?;
    let _counters = Counters::mount()?;
    let before = (halts(vmm)?, halts(beside)?);
    thread::sleep(WATCHED);
    let after = (halts(vmm)?, halts(beside)?);
    ensure!(after.1 > before.1, "the other guest did not halt once");
    ensure!(
        after.0 == before.0,
        "the guest that owns its CPU left it {} times to halt",
        after.0 - before.0
    );
    Ok(())
}
