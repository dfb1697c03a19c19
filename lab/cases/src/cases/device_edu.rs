//! QEMU's educational device (its docs/specs/edu.rst), for which Linux has no driver: a program in the guest uses its registers and its DMA.
//!
//! Pages from all over the guest's memory, plugged ones among them, go to the device's memory and come back to other pages, while the guest has
//! grown, has shrunk and has grown again. The host's IOMMU sees no fault. Then the guest has the device read from where it has no memory: the daemon
//! counts a fault for each line of the kernel's, and tells it.

use std::fs::File;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::bare::{in_lab, run};
use super::device_attach::{expect_function, expect_state};
use super::device_start::{has_all, shown};
use super::nvme_disk::tell;
use crate::basalt::expect_code;
use crate::daemon::{Daemon, wait_for};
use crate::kernel_log::{complaints, expect_no_dma_fault, is_dma_fault, kernel_log};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "device-edu",
    limit: Duration::from_secs(300),
    host,
    guest: None,
};

/// Where the lab's emulator has it (lab/ctl).
const ADDRESS: &str = "0000:00:0c.0";

/// Pages that go to the device and back in one run of the program; the device takes 100 ms for each way.
const PAGES: &str = "8";

/// In the guest: finds the device, tries its registers, and has it copy pages, half of them from above 4 GiB where its memory lies on both sides.
/// Prints how many pages were right, and how many of them were above 4 GiB. What it takes of memory is its first argument, in MiB; how many
/// pages, its second; with none it has the device read from where no memory is.
const PROGRAM: &str = "
import array, ctypes, glob, mmap, os, random, struct, sys, time
mib, count = int(sys.argv[1]), int(sys.argv[2])
PAGE, ABOVE = 4096, 1 << 20
def word(path):
    return open(path).read().strip()
devices = [d for d in glob.glob('/sys/bus/pci/devices/*') if word(d + '/vendor') == '0x1234' and word(d + '/device') == '0x11e8']
assert len(devices) == 1, devices
device = devices[0]
if word(device + '/enable') == '0':
    open(device + '/enable', 'w').write('1')
config = os.open(device + '/config', os.O_RDWR)
command, = struct.unpack('<H', os.pread(config, 2, 4))
os.pwrite(config, struct.pack('<H', command | 6), 4)
registers = mmap.mmap(os.open(device + '/resource0', os.O_RDWR | os.O_SYNC), 1 << 20)
def r32(at):
    return ctypes.c_uint32.from_buffer(registers, at)
def r64(at):
    return ctypes.c_uint64.from_buffer(registers, at)
assert r32(0).value == 0x010000ed, hex(r32(0).value)
r32(4).value = 0x12345678
assert r32(4).value == 0xedcba987, hex(r32(4).value)
def wait(what, busy):
    end = time.monotonic() + 20
    while busy():
        assert time.monotonic() < end, what
        time.sleep(0.002)
r32(8).value = 12
wait('factorial', lambda: r32(0x20).value & 1)
assert r32(8).value == 479001600, r32(8).value
def copy(source, target, ways):
    r64(0x80).value, r64(0x88).value, r64(0x90).value = source, target, PAGE // 2
    r64(0x98).value = 1 | ways
    wait('DMA', lambda: r64(0x98).value & 1)
if count == 0:
    copy(6 << 30, 0x40000, 0)
    print('told to')
    sys.exit()
memory = mmap.mmap(-1, mib << 20)
memory[::PAGE] = bytes([1]) * ((mib << 20) // PAGE)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
pagemap = os.open('/proc/self/pagemap', os.O_RDONLY)
def frames(first, pages):
    entries = array.array('Q')
    entries.frombytes(os.pread(pagemap, pages * 8, (start // PAGE + first) * 8))
    return [entry & ((1 << 55) - 1) if entry >> 63 else 0 for entry in entries]
pools = [[], []]
for page, number in enumerate(frames(0, (mib << 20) // PAGE)):
    if number:
        pools[number < ABOVE].append(page)
pools = [pool for pool in pools if len(pool) > 1]
right = above = 0
while right < count:
    pair = random.sample(pools[right % len(pools)], 2)
    one, other = pair
    sent, half = os.urandom(PAGE), random.choice((0, PAGE // 2))
    memory[one * PAGE:(one + 1) * PAGE] = sent
    memory[other * PAGE:(other + 1) * PAGE] = bytes(PAGE)
    before = [frames(page, 1)[0] for page in pair]
    copy(before[0] * PAGE + half, 0x40000, 0)
    copy(0x40000, before[1] * PAGE + half, 2)
    if [frames(page, 1)[0] for page in pair] != before:
        continue # the kernel has moved one of them
    came = memory[other * PAGE:(other + 1) * PAGE]
    assert came[half:half + PAGE // 2] == sent[half:half + PAGE // 2], [hex(number) for number in before]
    assert came.count(0) >= PAGE // 2, 'the other half was written'
    right += 1
    above += before[0] >= ABOVE
print(right, above)
";

fn host(host: &Host) -> Result<()> {
    if !in_lab()? {
        return Ok(());
    }
    expect_function(ADDRESS, "0x11e8")?;
    run("modprobe", &["vfio-pci"])?;
    let daemon = Daemon::with_templates(host)?;
    let mut log = kernel_log()?;
    // It has no reset of its own; nobody had it before.
    daemon.ok(&["device", "bind", "--allow-no-reset", ADDRESS])?;
    let words = [
        "run",
        "-d",
        "--name",
        "unit",
        "--memory",
        "512m",
        "--boot-memory",
        "256m",
    ];
    let rest = ["--device", ADDRESS, &host.digest, "--", "sleep", "10000"];
    daemon.ok(&[&words[..], &rest].concat())?;
    has_all(&daemon, "unit", 512 << 20)?;
    copies(&daemon, 300, true)?;
    daemon.ok(&["update", "unit", "--memory", "256m"])?;
    copies(&daemon, 32, false)?;
    daemon.ok(&["update", "unit", "--memory", "384m"])?;
    has_all(&daemon, "unit", 384 << 20)?;
    copies(&daemon, 180, true)?;
    expect_no_dma_fault(&mut log)?;
    is_refused(&daemon, &mut log)?;
    daemon.ok(&["device", "detach", "unit", ADDRESS])?;
    let gone = daemon.run(&["exec", "unit", "python3", "-c", PROGRAM, "8", "1"])?;
    expect_code(&gone, 1)?;
    daemon.ok(&["rm", "--force", "unit"])?;
    expect_state(&daemon, ADDRESS, "ready")?;
    daemon.ok(&["device", "unbind", ADDRESS])?;
    expect_no_dma_fault(&mut log)?;
    daemon.end()
}

/// DMA to where the guest has no memory: told by the daemon as often as by the kernel, and not before.
fn is_refused(daemon: &Daemon<'_>, log: &mut File) -> Result<()> {
    let faults = || anyhow::Ok(shown(daemon, "unit")?["memory_state"]["dma_faults"].as_u64());
    let before = faults()?;
    ensure!(before == Some(0), "{before:?} faults were counted, and there was none");
    daemon.ok(&["exec", "unit", "python3", "-c", PROGRAM, "1", "0"])?;
    let mut lines = Vec::new();
    wait_for("a DMA fault that is counted", || {
        lines.extend(complaints(log)?.into_iter().filter(|line| is_dma_fault(line)));
        Ok(!lines.is_empty() && faults()? == Some(lines.len() as u64))
    })?;
    let (count, state) = (lines.len(), daemon.ok(&["ps"])?);
    ensure!(state.contains(&format!("DMA faults: {count}")), "`ps` says {state}");
    let stats = daemon.ok(&["stats", "--no-stream", "unit"])?;
    ensure!(
        stats.contains("DMA FAULTS") && stats.contains("MAP RATE") && stats.contains("/s"),
        "`stats` says {stats}"
    );
    tell(&format!("{count} DMA faults: {}{stats}", lines.join("")));
    Ok(())
}

/// Has pages copied of a program that takes so much memory; pages that were plugged must be among them, or need not.
fn copies(daemon: &Daemon<'_>, mib: u64, plugged: bool) -> Result<()> {
    let taken = mib.to_string();
    let said = daemon.ok(&["exec", "unit", "python3", "-c", PROGRAM, &taken, PAGES])?;
    let (right, above) = said.trim().split_once(' ').context("two numbers")?;
    ensure!(right == PAGES, "the guest says {said}");
    ensure!(
        !plugged || above.parse::<u64>()? > 0,
        "no page of plugged memory was copied: {said}"
    );
    tell(&format!(
        "{right} pages by DMA and back out of {mib} MiB, {above} of them plugged"
    ));
    Ok(())
}
