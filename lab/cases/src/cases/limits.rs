//! Limits of processors, processes and memory, each seen to bite; and statistics that say what the kernels say.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::basalt::{expect_code, expect_refusal};
use crate::daemon::{Daemon, wait_for};
use crate::{Case, Host};

pub(crate) const CPU: Case = Case {
    name: "limits-cpu",
    limit: Duration::from_secs(300),
    host: cpu,
    guest: None,
};

pub(crate) const PIDS: Case = Case {
    name: "limits-pids",
    limit: Duration::from_secs(300),
    host: pids,
    guest: None,
};

pub(crate) const MEMORY: Case = Case {
    name: "limits-memory",
    limit: Duration::from_secs(300),
    host: memory,
    guest: None,
};

pub(crate) const STATS: Case = Case {
    name: "stats-add-up",
    limit: Duration::from_secs(300),
    host: stats_add_up,
    guest: None,
};

/// For how long processor time is looked at.
const WINDOW: Duration = Duration::from_secs(5);

/// Starts a detached sandbox of 128 MiB with these flags and this command.
pub(crate) fn start(host: &Host, daemon: &Daemon<'_>, name: &str, flags: &[&str], command: &[&str]) -> Result<String> {
    let mut words = vec!["run", "-d", "--memory", "128m", "--name", name];
    words.extend(flags);
    words.extend([host.digest.as_str(), "--"]);
    words.extend(command);
    Ok(daemon.ok(&words)?.trim().to_owned())
}

/// What `basalt stats` says of a sandbox.
pub(crate) fn usage(daemon: &Daemon<'_>, name: &str) -> Result<Value> {
    let mut samples: Value = serde_json::from_str(&daemon.ok(&["--json", "stats", "--no-stream", name])?)?;
    Ok(samples[0]["usage"].take())
}

pub(crate) fn number(value: &Value, path: &str) -> Result<u64> {
    let found = value.pointer(path).and_then(Value::as_u64);
    found.with_context(|| format!("{path} is no number in {value}"))
}

/// A file of a sandbox's cgroup.
pub(super) fn cgroup_file(daemon: &Daemon<'_>, id: &str, name: &str) -> Result<PathBuf> {
    let root = daemon.cgroup().context("the daemon has no cgroup")?;
    Ok(PathBuf::from("/sys/fs/cgroup").join(root).join(id).join(name))
}

pub(super) fn read(daemon: &Daemon<'_>, id: &str, name: &str) -> Result<String> {
    let path = cgroup_file(daemon, id, name)?;
    fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
}

fn cpu(host: &Host) -> Result<()> {
    let daemon = Daemon::with_templates(host)?;
    let busy = ["sh", "-c", "while :; do :; done"];
    // A boot takes as many times longer as the limit is small: the first one is what is restarted.
    let quotas = [("fast", 0.6), ("slow", 0.2)];
    for (name, quota) in quotas {
        let id = start(
            host,
            &daemon,
            name,
            &["--cpu-limit", &quota.to_string(), "--cpu-weight", "50"],
            &busy,
        )?;
        ensure!(read(&daemon, &id, "cpu.weight")?.trim() == "50", "the weight is lost");
    }
    let spent = |name: &str| -> Result<(u64, u64)> {
        let usage = usage(&daemon, name)?;
        Ok((number(&usage, "/cpu_usec")?, number(&usage, "/cpu_throttled_usec")?))
    };
    let begun = Instant::now();
    let before = [spent("fast")?, spent("slow")?];
    std::thread::sleep(WINDOW);
    let after = [spent("fast")?, spent("slow")?];
    let elapsed = begun.elapsed().as_secs_f64();
    let mut shares = Vec::new();
    for (((name, quota), before), after) in quotas.into_iter().zip(before).zip(after) {
        let share = Duration::from_micros(after.0 - before.0).as_secs_f64() / elapsed;
        eprintln!(
            "{name}: {share:.3} processors of {quota}, held back {} us",
            after.1 - before.1
        );
        // A period's worth at either end may be counted on top.
        ensure!(
            share <= quota * 1.1 + 0.05,
            "{name} took {share} processors, its limit is {quota}"
        );
        ensure!(after.1 > before.1, "{name} was never held back");
        shares.push(share);
    }
    ensure!(
        shares[0] > shares[1] * 1.5,
        "three times the limit made no difference: {shares:?}"
    );
    // They are kept over a restart, and shown.
    daemon.ok(&["rm", "--force", "slow"])?;
    daemon.ok(&["restart", "--time", "0", "fast"])?;
    let inspected: Value = serde_json::from_str(&daemon.ok(&["inspect", "fast"])?)?;
    ensure!(
        number(&inspected, "/0/config/limits/cpu_millis")? == 600,
        "inspect shows {inspected}"
    );
    let id = inspected[0]["id"].as_str().context("no id")?.to_owned();
    ensure!(
        read(&daemon, &id, "cpu.max")?.trim() == "60000 100000",
        "the restarted one has no limit"
    );
    daemon.end()
}

/// Starts processes until there are no more to be had; says how many, and why not.
const FORKS: &str = "
import os, errno, time
count = 0
try:
    while count < 1000:
        if os.fork() == 0:
            os.close(0); os.close(1); os.close(2)
            time.sleep(1000)
        count += 1
    print(count, 'no end')
except OSError as error:
    print(count, errno.errorcode[error.errno])
";

/// A fork bomb; shells that cannot fork end, and others take their place.
const BOMB: &str = "
import subprocess, time
while True:
    try:
        subprocess.Popen(['sh', '-c', 'bomb() { while :; do bomb & done; }; bomb'], stderr=subprocess.DEVNULL)
    except OSError:
        time.sleep(0.01)
";

/// How long a command beside it may take in a host that is emulated.
const PATIENCE: Duration = Duration::from_secs(60);

fn pids(host: &Host) -> Result<()> {
    let daemon = Daemon::with_templates(host)?;
    let id = start(host, &daemon, "few", &["--pids-limit", "20"], &["sleep", "10000"])?;
    let said = daemon.ok(&["exec", "few", "python3", "-c", FORKS])?;
    let words: Vec<_> = said.split_whitespace().collect();
    let [count, why] = words.as_slice() else {
        bail!("it printed {said:?}")
    };
    let count: u64 = count.parse()?;
    ensure!(
        *why == "EAGAIN" && (10..20).contains(&count),
        "{count} processes, then {why}"
    );
    // It lives, and one more command gets in although it can start nothing.
    ensure!(
        daemon.ok(&["exec", "few", "sh", "-c", "echo alive"])? == "alive\n",
        "it is silent"
    );
    let full = daemon.run(&["exec", "few", "sh", "-c", "/bin/true"])?;
    let forks = daemon.run(&["exec", "few", "sh", "-c", "/bin/true; /bin/true"])?;
    ensure!(
        !forks.status.success(),
        "a process more than its limit: {full:?} {forks:?}"
    );
    ensure!(
        read(&daemon, &id, "pids.max")?.trim() == "1024",
        "the VMM's threads are not limited"
    );
    // Without a limit there are more.
    start(host, &daemon, "many", &[], &["sleep", "10000"])?;
    let said = daemon.ok(&["exec", "many", "python3", "-c", &FORKS.replace("1000:", "60:")])?;
    ensure!(said == "60 no end\n", "one without a limit printed {said:?}");
    // Those that fork without end leave room and time for other commands.
    start(host, &daemon, "bomb", &[], &["python3", "-c", BOMB])?;
    let bound = daemon.ok(&["exec", "bomb", "sh", "-c", "cat /sys/fs/cgroup/basalt/*/pids.max"])?;
    ensure!(
        bound.lines().all(|line| line == "256"),
        "its commands may have {bound:?} processes"
    );
    let begun = Instant::now();
    let said = daemon.ok(&["exec", "bomb", "sh", "-c", "/bin/true; echo alive"])?;
    ensure!(
        said == "alive\n" && begun.elapsed() < PATIENCE,
        "after {:?}: {said:?}",
        begun.elapsed()
    );
    expect_refusal(
        &daemon.run(&["run", "--pids-limit", "0", &host.digest, "--", "true"])?,
        125,
        &["at least 1"],
    )?;
    daemon.end()
}

fn memory(host: &Host) -> Result<()> {
    // One that boots has all of its memory to itself; a clone would have next to none.
    let daemon = Daemon::new(host)?;
    let id = start(host, &daemon, "runaway", &[], &["sleep", "10000"])?;
    start(host, &daemon, "neighbour", &[], &["sleep", "10000"])?;
    let limit: u64 = read(&daemon, &id, "memory.max")?.trim().parse()?;
    ensure!(limit == (128 + 1 + 128) << 20, "memory.max is {limit}");
    ensure!(
        read(&daemon, &id, "memory.oom.group")?.trim() == "1",
        "it would be killed in part"
    );
    let usage = usage(&daemon, "runaway")?;
    ensure!(number(&usage, "/memory_limit")? == limit, "stats say {usage}");
    ensure!(
        number(&usage, "/memory")? < limit / 2,
        "an idle one is near its limit: {usage}"
    );
    // The guest cannot have more than its memory, whatever it does. A VMM that would is not at hand, so its limit is taken away
    // from under this one.
    fs::write(cgroup_file(&daemon, &id, "memory.max")?, "8M")?;
    let mut sandbox = Value::Null;
    wait_for("the end of a VMM without memory", || {
        sandbox = daemon.find("runaway")?.context("it is gone")?;
        Ok(sandbox["state"] == "exited")
    })?;
    let why = sandbox["ended"]["failed"].as_str().unwrap_or_default();
    ensure!(
        why.contains("took more memory than its limit of 257 MiB") && why.contains("was killed"),
        "it ended so: {}",
        sandbox["ended"]
    );
    expect_code(&daemon.run(&["exec", "neighbour", "true"])?, 0)?;
    daemon.end()
}

fn stats_add_up(host: &Host) -> Result<()> {
    let daemon = Daemon::with_templates(host)?;
    let id = start(host, &daemon, "counted", &["--disk", "64m"], &["sleep", "10000"])?;
    daemon.ok(&[
        "exec",
        "counted",
        "sh",
        "-c",
        "dd if=/dev/zero of=/file bs=64k count=32 conv=fsync 2>/dev/null; cat /usr/lib/python3*/*.py > /dev/null; \
         python3 -c 'import socket; s=socket.socket(socket.AF_INET, socket.SOCK_DGRAM); \
         [s.sendto(bytes(1000), (\"192.0.2.99\", 9)) for i in range(50)]'",
    ])?;
    // What the guest's kernel has counted; then what the host's has, around what we say.
    let guest = daemon.ok(&[
        "exec",
        "counted",
        "sh",
        "-c",
        "sync; sleep 1; cat /sys/class/net/eth0/statistics/tx_bytes /sys/class/net/eth0/statistics/tx_packets; \
         cat /sys/block/vd*/stat | awk '{ r += $3; w += $7 } END { print r, w }'",
    ])?;
    let cpu = || -> Result<u64> {
        let text = read(&daemon, &id, "cpu.stat")?;
        let line = text.lines().find_map(|line| line.strip_prefix("usage_usec "));
        Ok(line.context("no usage_usec")?.parse()?)
    };
    let count = |name: &str| -> Result<u64> { Ok(read(&daemon, &id, name)?.trim().parse()?) };
    let (cpu_before, memory_before) = (cpu()?, count("memory.current")?);
    let usage = usage(&daemon, "counted")?;
    let (cpu_after, memory_after) = (cpu()?, count("memory.current")?);
    let cpu = number(&usage, "/cpu_usec")?;
    ensure!(
        (cpu_before..=cpu_after).contains(&cpu),
        "{cpu} us are not in {cpu_before}..{cpu_after}"
    );
    let memory = number(&usage, "/memory")?;
    let slack = 1 << 20;
    let (least, most) = (memory_before.min(memory_after), memory_before.max(memory_after));
    ensure!(
        (least - slack..=most + slack).contains(&memory),
        "{memory} bytes are not in {least}..{most}"
    );
    ensure!(number(&usage, "/pids")? == count("pids.current")?, "threads: {usage}");
    let numbers: Vec<u64> = guest.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
    let [sent, packets, read_sectors, written_sectors] = numbers.as_slice() else {
        bail!("the guest printed {guest:?}");
    };
    eprintln!("the guest: {guest:?}; stats: {usage}");
    ensure!(
        written_sectors * 512 >= 2 << 20 && *packets >= 50,
        "the guest did too little: {guest:?}"
    );
    // It may have gone on a little since it was asked.
    for (name, counted, said) in [
        ("bytes sent", *sent, number(&usage, "/network/bytes_out")?),
        ("packets sent", *packets, number(&usage, "/network/operations_out")?),
        ("bytes read", read_sectors * 512, number(&usage, "/block/bytes_in")?),
    ] {
        ensure!(
            said >= counted && said <= counted + counted / 10 + (256 << 10),
            "{name}: the guest has counted {counted}, stats say {said}"
        );
    }
    // The guest counts as written what it has the disk fill with zeroes, too; no data goes by then.
    let written = number(&usage, "/block/bytes_out")?;
    ensure!(
        (2 << 20..=written_sectors * 512).contains(&written),
        "the guest has counted {written_sectors} sectors, stats say {written} bytes"
    );
    daemon.end()
}
