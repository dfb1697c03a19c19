//! A disk of the host's that is reset, taken away, and whose guest reboots, all while the guest writes to it as fast as it can: what was read
//! back is what was written, nothing waits for ever, and the host's IOMMU sees no fault.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::bare::{in_lab, run};
use super::device_attach::{expect_state, prove};
use super::nvme_disk::{Disk, tell};
use crate::daemon::{Daemon, wait_for};
use crate::kernel_log::{expect_no_dma_fault, kernel_log};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "device-load",
    limit: Duration::from_secs(300),
    host,
    guest: None,
};

/// Threads that write to the disk, and how often it is reset under them.
const THREADS: &str = "3";
const RESETS: &str = "6";

/// In the guest: so many threads write to places of their own and read back for so many seconds, while the disk is reset so many times.
const LOAD: &str = "
import mmap, os, random, sys, threading, time
MIB = 1 << 20
threads, seconds, resets = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
disk = os.open('/dev/nvme0n1', os.O_RDWR | os.O_DIRECT)
end, done, wrong = time.monotonic() + seconds, [0] * threads, []
def work(own):
    chance = random.Random(own)
    ours, back = mmap.mmap(-1, MIB), mmap.mmap(-1, MIB)
    try:
        while time.monotonic() < end:
            ours[:] = chance.randbytes(MIB // 16) * 16
            at = (64 + 32 * own + chance.randrange(32)) * MIB
            assert os.pwritev(disk, [ours], at) == MIB, 'short write'
            assert os.preadv(disk, [back], at) == MIB, 'short read'
            assert ours[:] == back[:], f'other data at {at:#x}'
            done[own] += 1
    except (AssertionError, OSError) as error:
        wrong.append(str(error))
working = [threading.Thread(target=work, args=[own]) for own in range(threads)]
for thread in working:
    thread.start()
open('/tmp/loaded', 'w').close()
for _ in range(resets):
    time.sleep(seconds / (resets + 1))
    with open('/sys/class/nvme/nvme0/device/reset', 'w') as reset:
        reset.write('1')
for thread in working:
    thread.join()
os.unlink('/tmp/loaded')
if wrong:
    sys.exit(wrong[0])
print(sum(done), min(done))
";

fn host(host: &Host) -> Result<()> {
    if !in_lab()? {
        return Ok(());
    }
    let disk = Disk::find()?;
    let address = disk.address().to_owned();
    let daemon = Daemon::with_templates(host)?;
    run("modprobe", &["vfio-pci"])?;
    let mut log = kernel_log()?;
    daemon.ok(&["device", "bind", &address])?;
    let idle = ["--", "sleep", "10000"];
    let words = ["run", "-d", "--name", "busy", "--cpus", "2", "--memory", "512m"];
    let words = [&words[..], &["--device", &address, host.digest.as_str()], &idle].concat();
    daemon.ok(&words)?;
    daemon.wait_in("busy", "the disk", "test -b /dev/nvme0n1")?;
    reset_under_load(&daemon)?;
    taken_under_load(&daemon, &address)?;
    reboots_under_load(&daemon, &address)?;
    daemon.ok(&["rm", "--force", "busy"])?;
    daemon.ok(&["device", "unbind", &address])?;
    drop(Disk::find()?);
    expect_no_dma_fault(&mut log)?;
    daemon.end()
}

/// Its driver begins anew each time, and repeats what was under way.
fn reset_under_load(daemon: &Daemon<'_>) -> Result<()> {
    let said = daemon.ok(&["exec", "busy", "python3", "-c", LOAD, THREADS, "7", RESETS])?;
    let (all, least) = said.trim().split_once(' ').context("two numbers")?;
    let (all, least): (u64, u64) = (all.parse()?, least.parse()?);
    ensure!(least > 0, "a thread has written nothing: {said}");
    tell(&format!("{all} MiB written and read back under {RESETS} resets"));
    prove(daemon, "busy", "1")
}

/// The requests under way end with errors, as with a disk that somebody pulls; the guest goes on, and can have it again.
fn taken_under_load(daemon: &Daemon<'_>, address: &str) -> Result<()> {
    let mut load = daemon.start(&["exec", "busy", "python3", "-c", LOAD, THREADS, "120", "0"])?;
    daemon.wait_in("busy", "load", "test -e /tmp/loaded")?;
    let began = Instant::now();
    daemon.ok(&["device", "detach", "busy", address])?;
    tell(&format!("taken from a guest that writes within {:?}", began.elapsed()));
    expect_state(daemon, address, "ready")?;
    wait_for("the load to end", || Ok(load.try_wait()?.is_some()))?;
    let status = load.wait()?;
    ensure!(!status.success(), "it wrote to a disk that was not there");
    daemon.ok(&["exec", "busy", "sh", "-c", "rm -f /tmp/loaded; ! test -e /dev/nvme0n1"])?;
    daemon.ok(&["device", "attach", "busy", address])?;
    prove(daemon, "busy", "2")
}

/// A guest that resets itself ends its machine; the disk is reset, and the next machine has it.
fn reboots_under_load(daemon: &Daemon<'_>, address: &str) -> Result<()> {
    let mut load = daemon.start(&["exec", "busy", "python3", "-c", LOAD, THREADS, "120", "0"])?;
    daemon.wait_in("busy", "load", "test -e /tmp/loaded")?;
    // Its answer may not come any more.
    drop(daemon.run(&["exec", "busy", "sh", "-c", "echo b > /proc/sysrq-trigger"])?);
    wait_for("the load to end", || Ok(load.try_wait()?.is_some()))?;
    daemon.run(&["wait", "busy"])?;
    expect_state(daemon, address, "ready")?;
    daemon.ok(&["start", "busy"])?;
    daemon.wait_in("busy", "the disk", "test -b /dev/nvme0n1")?;
    prove(daemon, "busy", "3")
}
