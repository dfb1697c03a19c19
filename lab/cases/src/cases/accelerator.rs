//! An accelerator in a sandbox: a program with the usual loader computes on the host's OpenCL driver by forwarded calls, several at once;
//! a server that is killed, a sandbox that ends, and what is refused. Two sandboxes have their parts of the time, and one whose server is
//! gone says so. One that is saved goes on in its clones, and when it is put back, with what it had on the accelerator, also where it owns
//! its CPU. Calls that are waited for leave the guest alone. The guest's half is `accelerator.py` beside this file.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Pid;

use super::bare::{Module, in_lab};
use super::dedicated::vmm_of;
use super::nvme_disk::tell;
use crate::basalt::{expect_code, expect_refusal};
use crate::daemon::{Daemon, kill};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "accelerator",
    limit: Duration::from_secs(600),
    host,
    guest: None,
};

/// The server's process, as the kernel shortens its name.
const SERVER: &str = "basalt-accel-se";

/// A sandbox that owns its CPU.
const BARE: &str = "bare";

/// What a program of a guest needs: Debian's loader, and a program that shows what there is.
const FILES: [&str; 2] = ["/usr/bin/clinfo", "/usr/lib/x86_64-linux-gnu/libOpenCL.so.1"];

/// Calls that are waited for, and how many exits there may be for them all beside those of a guest that is as busy without.
const CALLS: u64 = 1000;
const MOST_EXITS: u64 = CALLS / 5;

/// How long two sandboxes are watched while they compute side by side; and the part of the time that the one with a quarter may have, in percent.
const SIDE_BY_SIDE: Duration = Duration::from_secs(10);
const A_QUARTER: std::ops::RangeInclusive<u64> = 15..=35;

/// How long both sides look for a call, in microseconds: in an emulated host all takes a hundred times as long as on a real one.
const POLL: u32 = 200_000;

fn host(host: &Host) -> Result<()> {
    let daemon = Daemon::with_templates(host)?;
    let shared = host.scratch.join("cl");
    fs::create_dir_all(&shared)?;
    for file in FILES {
        let path = Path::new(file);
        let name = path.file_name().context("a file without a name")?;
        fs::copy(path, shared.join(name)).with_context(|| format!("{file} of the lab's host"))?;
    }
    fs::write(shared.join("accelerator.py"), include_str!("accelerator.py"))?;
    let volume = format!("{}:/cl:ro", shared.display());
    let run = |name: &str, accelerator: &[&str]| {
        let words = ["run", "-d", "--name", name, "--memory", "256m", "-v", &volume];
        daemon.ok(&[&words[..], accelerator, &[daemon.image(), "--", "sleep", "10000"]].concat())
    };
    run("gpu", &["--accel", "opencl:window=64m,memory=256m,share=100"])?;
    programs_compute(&daemon)?;
    a_server_that_is_killed(&daemon)?;
    what_is_refused(&daemon)?;
    // By its other name.
    run(
        "big",
        &[
            "--device",
            "basalt/accel=opencl",
            "--accel",
            "opencl:window=64m,share=300",
        ],
    )?;
    parts_of_the_time(&daemon, ["gpu", "big"])?;
    a_server_that_is_gone(&daemon, "big")?;
    daemon.ok(&["rm", "-f", "gpu", "big"])?;
    ensure!(daemon.processes(SERVER)?.is_empty(), "a server outlives its sandbox");

    what_is_saved_goes_on(&daemon, &volume)?;

    run("bell", &["--accel", "null:window=32m,memory=1m,transport=bell,poll=0"])?;
    let spin = format!("null:window=32m,memory=1m,transport=spin,poll={POLL}");
    run("spin", &["--accel", &spin])?;
    calls_leave_the_guest_alone(&daemon, &["spin", "bell"])?;
    daemon.ok(&["rm", "-f", "bell"])?;
    // A daemon that dies leaves it alone, and the next one knows it.
    let servers = daemon.processes(SERVER)?;
    daemon.kill()?;
    let said = daemon.ok(&["exec", "spin", "python3", "/cl/accelerator.py", "call", "10"])?;
    ensure!(said.trim().parse::<u64>().is_ok(), "{said}");
    ensure!(
        daemon.processes(SERVER)? == servers,
        "there are other servers than before"
    );
    daemon.ok(&["stop", "-t", "0", "spin"])?;
    ensure!(daemon.processes(SERVER)?.is_empty(), "a server outlives its machine");
    daemon.ok(&["start", "spin"])?;
    daemon.ok(&["exec", "spin", "python3", "/cl/accelerator.py", "call", "10"])?;
    daemon.ok(&["rm", "-f", "spin"])?;
    if in_lab()? {
        let module = Module::load(host)?;
        let accelerator = format!("null:window=32m,memory=1m,transport=spin,poll={POLL}");
        let words = [
            "run",
            "-d",
            "--name",
            BARE,
            "--class",
            "bare",
            "--memory",
            "128m",
            "--accel",
            &accelerator,
            "-v",
            &volume,
        ];
        daemon.ok(&[&words[..], &[daemon.image(), "--", "sleep", "10000"]].concat())?;
        calls_leave_the_guest_alone(&daemon, &[BARE])?;
        daemon.ok(&["rm", "-f", BARE])?;
        what_owns_its_cpu_goes_on(&daemon, &volume)?;
        module.unload()?;
    }
    daemon.end()
}

fn programs_compute(daemon: &Daemon<'_>) -> Result<()> {
    let said = daemon.ok(&["exec", "--env", "LD_LIBRARY_PATH=/cl", "gpu", "/cl/clinfo", "-l"])?;
    ensure!(said.contains("Portable Computing Language"), "clinfo said {said:?}");
    tell(&format!("in the sandbox: {}", said.trim()));
    // Another user's program has it, too, at the same time, and the window's files are root's alone.
    let compute = daemon.start(&["exec", "gpu", "python3", "/cl/accelerator.py", "compute", "1000"])?;
    let said = daemon.ok(&[
        "exec",
        "--user",
        "nobody",
        "gpu",
        "python3",
        "/cl/accelerator.py",
        "call",
        "10",
    ])?;
    ensure!(said.trim().parse::<u64>().is_ok(), "{said:?}");
    let output = compute.wait_with_output()?;
    expect_code(&output, 0)?;
    ensure!(output.stdout == b"right\n", "{output:?}");
    // Data crosses in records, past the window.
    let by_stream = ["exec", "--env", "BASALT_ACCEL_TRANSPORT=stream", "gpu"];
    let said = daemon.ok(&[&by_stream[..], &["python3", "/cl/accelerator.py", "compute", "1000"]].concat())?;
    ensure!(said == "right\n", "by a stream: {said:?}");
    let read = daemon.run(&["exec", "--user", "nobody", "gpu", "cat", "/run/basalt/accel/slot-0"])?;
    ensure!(!read.status.success(), "a user reads what others share with the server");
    Ok(())
}

/// Its clients have an error at once, and the next context works.
fn a_server_that_is_killed(daemon: &Daemon<'_>) -> Result<()> {
    let mut command = daemon.command(&["exec", "gpu", "python3", "/cl/accelerator.py", "survive"]);
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let mut lines = BufReader::new(child.stdout.take().context("its output")?).lines();
    let ready = lines.next().context("the program ended")??;
    ensure!(ready == "ready", "{ready}");
    let processes = daemon.processes(SERVER)?;
    // The older one starts others, one after the other.
    let serving = processes
        .iter()
        .copied()
        .find(|pid| parent(*pid).is_some_and(|parent| processes.contains(&parent)));
    kill(serving.context("no process serves")?)?;
    let survived = lines.next().context("the program ended")??;
    tell(&survived);
    ensure!(child.wait()?.success(), "it did not survive");
    Ok(())
}

fn parent(pid: Pid) -> Option<Pid> {
    let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
    Pid::from_raw(line.trim().parse().ok()?)
}

/// Starts a sandbox whose program has a kernel and so many mebibytes of numbers; tells the time that they took to be made, in us.
fn keeps(daemon: &Daemon<'_>, name: &str, more: &[&str], mebibytes: &str) -> Result<u64> {
    let words = ["run", "-d", "--name", name, "--memory", "256m"];
    let program = [daemon.image(), "--", "python3", "/cl/accelerator.py", "keep", mebibytes];
    daemon.ok(&[&words[..], more, &program].concat())?;
    let wait = "until [ -e /tmp/ready ]; do sleep 0.05; done; cat /tmp/ready";
    let made = daemon.ok(&["exec", name, "sh", "-c", wait])?;
    made.trim().parse().with_context(|| format!("{made:?}"))
}

/// Has the program add a number to all of its, which are `all` then; tells the time that took, in us.
fn add(daemon: &Daemon<'_>, sandbox: &str, number: u64, all: u64) -> Result<u64> {
    let ask = format!("echo {number} > /tmp/ask; cat /tmp/answer");
    let said = daemon.ok(&["exec", sandbox, "sh", "-c", &ask])?;
    // The first number and the last, and the time.
    let numbers: Vec<u64> = said.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
    ensure!(
        numbers.len() == 3 && numbers[..2] == [all, all],
        "{sandbox}: {said:?} where both are {all}"
    );
    Ok(numbers[2])
}

/// The longest time that nothing came from a sandbox that says something each 5 ms, while it is saved.
fn stands_still(daemon: &Daemon<'_>, sandbox: &str, snapshot: &str) -> Result<Duration> {
    const SAYS: &str = "import time\nwhile True: print(flush=True); time.sleep(0.005)";
    let mut command = daemon.command(&["exec", sandbox, "python3", "-c", SAYS]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
    let mut lines = BufReader::new(child.stdout.take().context("its output")?).lines();
    lines.next().context("it says nothing")??;
    let mut longest = Duration::ZERO;
    std::thread::scope(|scope| -> Result<()> {
        let saves = scope.spawn(|| daemon.ok(&["snapshot", "create", sandbox, snapshot]));
        let mut last = Instant::now();
        while !saves.is_finished() {
            lines.next().context("it says nothing more")??;
            longest = longest.max(last.elapsed());
            last = Instant::now();
        }
        saves.join().expect("it does not panic").map(drop)
    })?;
    child.kill()?;
    child.wait()?;
    Ok(longest)
}

/// One that owns its CPU is saved and removed; its clone goes on, and is put back.
fn what_owns_its_cpu_goes_on(daemon: &Daemon<'_>, volume: &str) -> Result<()> {
    let accelerator = "opencl:window=32m,memory=64m";
    keeps(
        daemon,
        BARE,
        &["--class", "bare", "--accel", accelerator, "-v", volume],
        "4",
    )?;
    add(daemon, BARE, 7, 7)?;
    daemon.ok(&["snapshot", "create", BARE, "owns"])?;
    add(daemon, BARE, 1, 8)?;
    daemon.ok(&["rm", "-f", BARE])?;
    daemon.ok(&["clone", "--name", "owner", "owns"])?;
    let class = daemon.ok(&["inspect", "owner"])?;
    ensure!(class.contains("\"bare\""), "its clone is of another class: {class}");
    add(daemon, "owner", 10, 17)?;
    daemon.ok(&["snapshot", "create", "owner", "later"])?;
    add(daemon, "owner", 1, 18)?;
    daemon.ok(&["rollback", "owner", "later"])?;
    add(daemon, "owner", 2, 19)?;
    daemon.ok(&["rm", "-f", "owner"])?;
    for snapshot in ["owns", "later"] {
        daemon.ok(&["snapshot", "rm", snapshot])?;
    }
    Ok(())
}

/// A program with a kernel and memory on the accelerator goes on with both: in a clone, in a clone of that, and when it is put back.
fn what_is_saved_goes_on(daemon: &Daemon<'_>, volume: &str) -> Result<()> {
    let accelerator = ["--accel", "opencl:window=64m,memory=256m", "-v", volume];
    let made = keeps(daemon, "kept", &accelerator, "64")?;
    let add = |sandbox: &str, number: u64, all: u64| add(daemon, sandbox, number, all);
    add("kept", 1, 1)?;
    let still = stands_still(daemon, "kept", "ready")?;
    let begun = Instant::now();
    daemon.ok(&["clone", "--name", "twin", "ready"])?;
    let launch = add("twin", 10, 11)?;
    let with = begun.elapsed();
    add("kept", 100, 101)?;
    daemon.ok(&["snapshot", "create", "twin", "later"])?;
    daemon.ok(&["clone", "--name", "third", "later"])?;
    add("third", 1000, 1011)?;
    add("twin", 1, 12)?;
    daemon.ok(&["rollback", "kept", "ready"])?;
    add("kept", 5, 6)?;
    daemon.ok(&["snapshot", "verify", "ready"])?;

    // The same without an accelerator, for what a clone takes by itself.
    let script = "mkfifo /tmp/ask /tmp/answer; while read -r x < /tmp/ask; do echo $x > /tmp/answer; done";
    let words = ["run", "-d", "--name", "plain", "--memory", "256m", daemon.image()];
    daemon.ok(&[&words[..], &["--", "sh", "-c", script]].concat())?;
    daemon.ok(&[
        "exec",
        "plain",
        "sh",
        "-c",
        "until [ -p /tmp/answer ]; do sleep 0.05; done",
    ])?;
    let plain = stands_still(daemon, "plain", "plain")?;
    let begun = Instant::now();
    daemon.ok(&["clone", "--name", "other", "plain"])?;
    daemon.ok(&["exec", "other", "sh", "-c", "echo 1 > /tmp/ask; cat /tmp/answer"])?;
    let without = begun.elapsed();
    tell(&format!(
        "context, program and 64 MiB made in {made} us; a clone that has launched took {} us more than one without an accelerator, {launch} \
         of them for the launch; the sandbox stood still for {} ms while it was saved, and the one without for {} ms",
        with.saturating_sub(without).as_micros(),
        still.as_millis(),
        plain.as_millis()
    ));
    daemon.ok(&["rm", "-f", "kept", "twin", "third", "plain", "other"])?;
    for snapshot in ["ready", "later", "plain"] {
        daemon.ok(&["snapshot", "rm", snapshot])?;
    }
    Ok(())
}

/// Two that always have work have time by their shares, of which the one has three times the other's.
fn parts_of_the_time(daemon: &Daemon<'_>, [small, big]: [&str; 2]) -> Result<()> {
    let load = |sandbox| -> Result<_> {
        let mut command = daemon.command(&["exec", sandbox, "python3", "/cl/accelerator.py", "load"]);
        let mut child = command.stdout(Stdio::piped()).spawn()?;
        let lines = BufReader::new(child.stdout.take().context("its output")?).lines();
        Ok((child, lines))
    };
    let mut loads = [load(small)?, load(big)?];
    for (_, lines) in &mut loads {
        let ready = lines.next().context("the program ended")??;
        ensure!(ready == "ready", "{ready}");
    }
    // What was computed until now was not beside anybody.
    std::thread::sleep(Duration::from_secs(2));
    let before = [used(daemon, small)?, used(daemon, big)?];
    std::thread::sleep(SIDE_BY_SIDE);
    let after = [used(daemon, small)?, used(daemon, big)?];
    // Not after a time of their own: the one may be ready long before the other.
    for (sandbox, (mut child, _)) in [small, big].into_iter().zip(loads) {
        daemon.ok(&["exec", sandbox, "touch", "/tmp/enough"])?;
        ensure!(child.wait()?.success(), "a program that computes has failed");
    }
    let [small_used, big_used] = [after[0] - before[0], after[1] - before[1]];
    let percent = small_used * 100 / (small_used + big_used).max(1);
    tell(&format!(
        "of {} ms of the accelerator's time the sandbox with one part of four had {percent} %",
        (small_used + big_used) / 1_000_000
    ));
    ensure!(A_QUARTER.contains(&percent), "{percent} % is not about a quarter");
    let told = daemon.ok(&["daemon", "metrics"])?;
    let launches = told
        .lines()
        .filter(|line| line.starts_with("basalt_sandbox_accelerator_launches_total{"));
    ensure!(launches.count() == 2, "metrics do not tell of both: {told}");
    Ok(())
}

/// What `accel ls` tells of a sandbox.
fn listed(daemon: &Daemon<'_>, sandbox: &str) -> Result<serde_json::Value> {
    let all: Vec<serde_json::Value> = serde_json::from_str(&daemon.ok(&["--json", "accel", "ls"])?)?;
    let found = all.into_iter().find(|one| one["sandbox"] == sandbox);
    found.with_context(|| format!("`accel ls` does not know {sandbox}"))
}

/// The accelerator's time that its server says it has used, in nanoseconds.
fn used(daemon: &Daemon<'_>, sandbox: &str) -> Result<u64> {
    let listed = listed(daemon, sandbox)?;
    ensure!(
        listed["part"]["is_connected"] == true,
        "nothing limits {sandbox}: {listed}"
    );
    let used = listed["stats"]["time"]["used_ns"].as_u64();
    used.with_context(|| format!("no time is told of {sandbox}: {listed}"))
}

/// One whose first process is killed says so.
fn a_server_that_is_gone(daemon: &Daemon<'_>, sandbox: &str) -> Result<()> {
    let server = listed(daemon, sandbox)?["server"]["pid"].as_i64();
    let server = server.and_then(|pid| Pid::from_raw(pid.try_into().ok()?));
    kill(server.context("no server")?)?;
    let begin = Instant::now();
    loop {
        let shown = daemon.ok(&["ps"])?;
        if shown.contains("running (accelerator ended)") {
            break;
        }
        ensure!(begin.elapsed() < Duration::from_secs(30), "nobody says it: {shown}");
        std::thread::sleep(Duration::from_millis(200));
    }
    let why = listed(daemon, sandbox)?["why"].to_string();
    ensure!(why.contains(&format!("basalt restart {sandbox}")), "{why}");
    Ok(())
}

fn what_is_refused(daemon: &Daemon<'_>) -> Result<()> {
    let output = daemon.run(&["run", "--accel", "cuda", daemon.image(), "--", "true"])?;
    expect_refusal(
        &output,
        125,
        &["there is no accelerator", "opencl, or reference for CUDA"],
    )
}

/// Calls that are waited for while the server looks for them take no exits; where it sleeps each takes some, which says that they are seen.
fn calls_leave_the_guest_alone(daemon: &Daemon<'_>, sandboxes: &[&str]) -> Result<()> {
    let count = CALLS.to_string();
    let measure = |sandbox: &str| -> Result<(u64, u64)> {
        let exits = || match sandbox {
            BARE => exits_of_bare(daemon),
            _ => exits(vmm_of(daemon, sandbox)?),
        };
        let during = |words: [&str; 2]| -> Result<(u64, String)> {
            let before = exits()?;
            let words = [&["exec", sandbox, "python3", "/cl/accelerator.py"][..], &words].concat();
            let said = daemon.ok(&words)?;
            Ok((exits()? - before, said.trim().to_owned()))
        };
        // The program's files have been read then.
        during(["call", "1"])?;
        let (with_calls, each) = during(["call", &count])?;
        // Timers of a guest that is as busy for as long, without a call.
        let (without, _) = during(["busy", &(each.parse::<u64>()? * CALLS).to_string()])?;
        tell(&format!(
            "{sandbox}: {each} ns a call; {with_calls} exits with {CALLS} calls, {without} in the same time without"
        ));
        Ok((with_calls, without))
    };
    for sandbox in sandboxes.iter().filter(|name| **name != "bell") {
        let (by_spin, without) = measure(sandbox)?;
        ensure!(
            by_spin < without + MOST_EXITS,
            "{sandbox}: {CALLS} calls took {by_spin} exits, and {without} none"
        );
    }
    if !sandboxes.contains(&"bell") {
        return Ok(());
    }
    let (by_bell, without) = measure("bell")?;
    ensure!(
        by_bell > without + CALLS,
        "{CALLS} calls by bell took only {by_bell} exits, and {without} none"
    );
    Ok(())
}

/// Exits of the one guest that owns its CPU, as its engine counts them.
fn exits_of_bare(daemon: &Daemon<'_>) -> Result<u64> {
    let told = daemon.ok(&["daemon", "metrics"])?;
    let counted = told
        .lines()
        .filter(|line| line.contains("engine_exits_total") && !line.starts_with('#'));
    let values = counted.map(|line| {
        line.rsplit_once(' ')
            .context("a line without a value")?
            .1
            .parse::<u64>()
            .context("a value")
    });
    let values: Vec<u64> = values.collect::<Result<_>>()?;
    ensure!(!values.is_empty(), "the engine counts no exits: {told}");
    Ok(values.iter().sum())
}

/// Exits of a VMM's virtual CPUs, as KVM counts them.
fn exits(vmm: u64) -> Result<u64> {
    for entry in fs::read_dir("/sys/kernel/debug/kvm")? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(&format!("{vmm}-")) {
            return Ok(fs::read_to_string(entry.path().join("exits"))?.trim().parse()?);
        }
    }
    bail!("KVM counts nothing of process {vmm}")
}
