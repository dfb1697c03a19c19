//! Several vCPUs, all of them up and busy at the same time, with timers and IPIs between them; memory above 4 GiB.

use std::fs;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use base::ByteSize;

use crate::vm::{self, Builder};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "processors",
    limit: Duration::from_secs(300),
    host,
    guest: Some(guest),
};

fn host(host: &Host) -> Result<()> {
    for (cpus, memory) in [
        (2, ByteSize::mib(256)),
        (4, ByteSize(ByteSize::gib(3).0 + ByteSize::mib(512).0)),
    ] {
        let machine = Builder::new(host)?.cpus(cpus).memory(memory).start()?;
        let mut agent = machine.agent()?;
        vm::install(&mut agent)?;
        let mib = memory.bytes() >> 20;
        vm::guest_half(&mut agent, CASE.name, &[&cpus.to_string(), &mib.to_string()])?;
    }
    Ok(())
}

fn guest(arguments: &[String]) -> Result<()> {
    let number =
        |index: usize| -> Result<usize> { Ok(arguments.get(index).context("an argument is missing")?.parse()?) };
    let (cpus, mib) = (number(0)?, number(1)?);
    let online = fs::read_to_string("/sys/devices/system/cpu/online")?;
    ensure!(online.trim() == format!("0-{}", cpus - 1), "online: {online}");
    let info = fs::read_to_string("/proc/meminfo")?;
    let total: usize = info
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")?.parse().ok())
        .context("no MemTotal")?;
    // The kernel's own part and its table of pages are less than an eighth and 32 MiB.
    ensure!(
        total >> 10 <= mib && total >> 10 > mib - mib / 8 - 32,
        "{total} kB of {mib} MiB"
    );
    everyone_at_once(cpus)
}

/// Threads pinned to each CPU meet again and again: each meeting is futex wake-ups, so IPIs, across all of them.
fn everyone_at_once(cpus: usize) -> Result<()> {
    const MEETINGS: u64 = 200;
    let barrier = Barrier::new(cpus);
    let count = AtomicU64::new(0);
    let began = Instant::now();
    std::thread::scope(|scope| -> Result<()> {
        let workers: Vec<_> = (0..cpus)
            .map(|cpu| {
                let (barrier, count) = (&barrier, &count);
                scope.spawn(move || -> Result<()> {
                    let mut set = rustix::thread::CpuSet::new();
                    set.set(cpu);
                    rustix::thread::sched_setaffinity(None, &set)?;
                    for _ in 0..MEETINGS {
                        barrier.wait();
                        count.fetch_add(1, Ordering::Relaxed);
                    }
                    Ok(())
                })
            })
            .collect();
        for worker in workers {
            worker.join().map_err(|_| anyhow::anyhow!("a worker panicked"))??;
        }
        Ok(())
    })?;
    let met = count.load(Ordering::Relaxed);
    ensure!(met == MEETINGS * cpus as u64, "{met} meetings");
    std::thread::sleep(Duration::from_millis(20));
    ensure!(began.elapsed() >= Duration::from_millis(20), "the clock stands still");
    Ok(())
}
