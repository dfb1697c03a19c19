//! A device of the host's that sandboxes have by address and by name: bound, given to one at its start and to another that runs, taken back,
//! found by the next daemon, and detached and attached again for a snapshot, a rollback and a move. What a guest writes to it by DMA from all over its memory is read back and compared, and the host's IOMMU sees no fault.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::bare::{in_lab, run};
use super::limits::read;
use super::nvme_disk::{Disk, tell};
use crate::basalt::{expect_code, expect_refusal};
use crate::daemon::Daemon;
use crate::kernel_log::{expect_no_dma_fault, kernel_log};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "device-attach",
    limit: Duration::from_secs(600),
    host,
    guest: None,
};

/// In the guest: writes from so many places all over a large piece of memory, past the page cache, and reads it back to other memory. No place
/// has a byte of another's at the same offset (to draw them all takes most of the time in the emulator).
const PROVE: &str = "
import mmap, os, random, sys
MIB = 1 << 20
disk = os.open('/dev/nvme0n1', os.O_RDWR | os.O_DIRECT)
ours, back = mmap.mmap(-1, 96 * MIB), mmap.mmap(-1, MIB)
random.seed(int(sys.argv[1]))
drawn = random.randbytes(MIB)
places = random.sample(range(96), int(sys.argv[2]))
for place in places:
    piece = memoryview(ours)[place * MIB:(place + 1) * MIB]
    piece[:] = drawn.translate(bytes((byte + place) % 256 for byte in range(256)))
    assert os.pwritev(disk, [piece], (64 + place) * MIB) == MIB
for place in places:
    assert os.preadv(disk, [back], (64 + place) * MIB) == MIB
    assert back[:] == ours[place * MIB:(place + 1) * MIB], place
print('verified')
";

/// In the guest: writes to memory that it has not touched yet, until it is told to stop, and looks whether all of that is there.
const WRITE: &str = "
import mmap, os, struct, time
ours, pages, written = mmap.mmap(-1, 48 << 20), 48 << 8, 0
while not os.path.exists('/tmp/stop'):
    for number in range(written, written + 64):
        struct.pack_into('<Q', ours, number % pages * 4096, number % pages + 1)
    written += 64
    time.sleep(0.01)
for page in range(min(written, pages)):
    assert struct.unpack_from('<Q', ours, page * 4096)[0] == page + 1, page
print('whole', written)
";

/// Has that go on in a sandbox.
const BEGIN: &str = "rm -f /tmp/stop /tmp/said; python3 -c \"$0\" > /tmp/said 2>&1 &";
const END: &str = "touch /tmp/stop; until [ -s /tmp/said ]; do sleep 0.1; done; cat /tmp/said";

fn host(host: &Host) -> Result<()> {
    if !in_lab()? {
        return Ok(());
    }
    let disk = Disk::find()?;
    let address = disk.address().to_owned();
    let daemon = Daemon::with_templates(host)?;
    run("modprobe", &["vfio-pci"])?;
    let mut log = kernel_log()?;
    let shown = show(&daemon, &address)?;
    ensure!(
        shown["state"] == "host" && shown["driver"] == "nvme" && shown["identity"]["class"] == 0x01_0802,
        "the disk is {shown}"
    );
    expect_refusal(
        &daemon.run(&["run", "--device", &address, &host.digest, "--", "true"])?,
        125,
        &["basalt device bind", &address],
    )?;
    daemon.ok(&["device", "bind", &address])?;
    daemon.ok(&["device", "bind", &address])?;
    from_its_start(&daemon, &address)?;
    while_it_runs(&daemon, &address)?;
    by_name(&daemon, &address)?;
    while_it_is_saved(&daemon, &address)?;
    daemon.ok(&["device", "unbind", &address])?;
    let shown = show(&daemon, &address)?;
    ensure!(
        shown["state"] == "host" && shown["driver"] == "nvme",
        "the disk was not given back: {shown}"
    );
    drop(Disk::find()?);
    expect_no_dma_fault(&mut log)?;
    daemon.end()
}

fn show(daemon: &Daemon<'_>, address: &str) -> Result<Value> {
    let all: Vec<Value> = serde_json::from_str(&daemon.ok(&["--json", "device", "ls"])?)?;
    let found = all.into_iter().find(|device| device["address"] == address);
    found.with_context(|| format!("`device ls` does not show {address}"))
}

/// The lab's emulator has a function of this device id there.
pub(super) fn expect_function(address: &str, id: &str) -> Result<()> {
    let device = Path::new("/sys/bus/pci/devices").join(address);
    ensure!(
        fs::read_to_string(device.join("device")).is_ok_and(|found| found.trim() == id),
        "the lab has no function {id} at {address}: it was started by an older basalt-lab; `basalt-lab down` and up again"
    );
    Ok(())
}

pub(super) fn expect_state(daemon: &Daemon<'_>, address: &str, state: &str) -> Result<()> {
    let shown = show(daemon, address)?;
    ensure!(shown["state"] == state, "it is not {state}: {shown}");
    Ok(())
}

/// That its device reads and writes all of so much memory, MiB.
pub(super) fn prove_all(daemon: &Daemon<'_>, sandbox: &str, seed: &str) -> Result<()> {
    prove_places(daemon, sandbox, seed, "96")
}

/// The same of some of it: that the device is there and does what it is told to.
pub(super) fn prove(daemon: &Daemon<'_>, sandbox: &str, seed: &str) -> Result<()> {
    prove_places(daemon, sandbox, seed, "12")
}

fn prove_places(daemon: &Daemon<'_>, sandbox: &str, seed: &str, places: &str) -> Result<()> {
    let said = daemon.ok(&["exec", sandbox, "python3", "-c", PROVE, seed, places])?;
    ensure!(said.trim() == "verified", "{sandbox} says {said}");
    Ok(())
}

/// A sandbox whose command finds it, and another one that wants it, too.
fn from_its_start(daemon: &Daemon<'_>, address: &str) -> Result<()> {
    let image = daemon.image();
    let began = Instant::now();
    let there = ["test", "-b", "/dev/nvme0n1"];
    let words = ["run", "--memory", "256m", "--device", address, image, "--"];
    expect_code(&daemon.run(&[&words[..], &there].concat())?, 0)?;
    let with = began.elapsed();
    let began = Instant::now();
    expect_code(
        &daemon.run(&["run", "--memory", "256m", image, "--", "test", "-b", "/dev/nvme0n1"])?,
        1,
    )?;
    tell(&format!(
        "a run with the device {with:?}, one without {:?}",
        began.elapsed()
    ));
    // It went with its machine, and was reset.
    expect_state(daemon, address, "ready")?;
    let idle = ["--", "sleep", "10000"];
    let words = [
        "run", "-d", "--name", "first", "--memory", "256m", "--device", address, image,
    ];
    daemon.ok(&[&words[..], &idle].concat())?;
    expect_state(daemon, address, "claimed")?;
    prove_all(daemon, "first", "1")?;
    let second = [
        "run", "-d", "--name", "second", "--memory", "256m", "--device", address, image,
    ];
    expect_refusal(
        &daemon.run(&[&second[..], &idle].concat())?,
        125,
        &["has the device", address],
    )?;
    ensure!(
        daemon.find("second")?.is_none(),
        "a sandbox without its device is there"
    );
    expect_refusal(
        &daemon.run(&["snapshot", "create", "first"])?,
        1,
        &["basalt device detach first", "--detach-devices", address],
    )?;
    expect_refusal(
        &daemon.run(&["device", "unbind", address])?,
        1,
        &["has the device", "basalt stop"],
    )?;
    // Its next machine has it as well.
    daemon.ok(&["stop", "--time", "1s", "first"])?;
    expect_state(daemon, address, "ready")?;
    daemon.ok(&["start", "first"])?;
    prove(daemon, "first", "2")?;
    // A VMM that is killed leaves it to nobody.
    daemon.ok(&["kill", "first"])?;
    daemon.ok(&["wait", "first"])?;
    expect_state(daemon, address, "ready")?;
    daemon.ok(&["rm", "first"])?;
    Ok(())
}

/// A sandbox that runs gets it, gives it back, and gets it again.
fn while_it_runs(daemon: &Daemon<'_>, address: &str) -> Result<()> {
    let image = daemon.image();
    daemon.ok(&[
        "run", "-d", "--name", "late", "--memory", "256m", image, "--", "sleep", "10000",
    ])?;
    for round in ["3", "4"] {
        daemon.ok(&["exec", "late", "sh", "-c", BEGIN, WRITE])?;
        let before = page_cache(daemon, "late")?;
        let began = Instant::now();
        let said = daemon.ok(&["device", "attach", "late", address])?;
        let took = began.elapsed();
        let came = page_cache(daemon, "late")?.saturating_sub(before);
        tell(&format!(
            "attached within {took:?}, for which {} MiB of page cache were made",
            came >> 20
        ));
        ensure!(said.contains("nvme0n1"), "`attach` says {said}");
        // What the template has no content for is not read from its file.
        ensure!(came < 64 << 20, "{came} bytes of files were brought in for it");
        let written = daemon.ok(&["exec", "late", "sh", "-c", END])?;
        ensure!(
            written.starts_with("whole"),
            "what its guest wrote meanwhile: {written}"
        );
        prove(daemon, "late", round)?;
        daemon.ok(&["device", "detach", "late", address])?;
        expect_code(&daemon.run(&["exec", "late", "test", "-e", "/dev/nvme0n1"])?, 1)?;
        expect_state(daemon, address, "ready")?;
    }
    // Without it the sandbox can be saved again, and a clone has no device.
    daemon.ok(&["snapshot", "create", "late", "without"])?;
    daemon.ok(&["device", "attach", "late", address])?;
    // The next daemon finds it where it is.
    daemon.kill()?;
    expect_state(daemon, address, "claimed")?;
    prove_all(daemon, "late", "5")?;
    expect_refusal(
        &daemon.run(&["device", "attach", "late", address])?,
        1,
        &["has the device", "already"],
    )?;
    daemon.ok(&["clone", "--name", "copy", "without"])?;
    expect_code(&daemon.run(&["exec", "copy", "test", "-e", "/dev/nvme0n1"])?, 1)?;
    daemon.ok(&["rm", "--force", "copy"])?;
    // By force, too, after which it comes to the same place.
    daemon.ok(&["device", "detach", "--force", "late", address])?;
    daemon.ok(&["device", "attach", "late", address])?;
    prove(daemon, "late", "6")?;
    daemon.ok(&["device", "detach", "--force", "late", address])?;
    expect_refusal(
        &daemon.run(&["device", "detach", "late", address])?,
        1,
        &["does not have the device"],
    )?;
    daemon.ok(&["rm", "--force", "late"])?;
    daemon.ok(&["snapshot", "rm", "without"])?;
    Ok(())
}

/// What is charged to a sandbox of files.
fn page_cache(daemon: &Daemon<'_>, name: &str) -> Result<u64> {
    let found = daemon.find(name)?.context("it is gone")?;
    let stat = read(daemon, found["id"].as_str().unwrap_or_default(), "memory.stat")?;
    let file = stat.lines().find_map(|line| line.strip_prefix("file "));
    Ok(file.context("memory.stat does not say it")?.parse()?)
}

/// Where an administrator puts specifications of the Container Device Interface.
const SPECS: &str = "/etc/cdi";

/// Removed with its directory, if nothing else is in that.
struct SpecFile(PathBuf);

impl Drop for SpecFile {
    fn drop(&mut self) {
        // The case has failed already, or it is gone.
        drop(fs::remove_file(&self.0));
        drop(fs::remove_dir(SPECS));
    }
}

/// Named by the specification that `device cdi` prints, and by one that wants what no virtual machine can have.
fn by_name(daemon: &Daemon<'_>, address: &str) -> Result<()> {
    let text = daemon.ok(&["device", "cdi", "--kind", "lab.basalt/disk"])?;
    let name = format!("lab.basalt/disk={address}");
    expect_refusal(
        &daemon.run(&["run", "--device", &name, daemon.image(), "--", "true"])?,
        125,
        &["there is none in /etc/cdi"],
    )?;
    let spec = SpecFile(Path::new(SPECS).join("lab.json"));
    fs::create_dir_all(SPECS)?;
    // With a variable for the command, as whoever makes devices would add one.
    let with_variable = text.replacen("\"deviceNodes\"", "\"env\": [\"DISK=lab\"], \"deviceNodes\"", 1);
    fs::write(&spec.0, &with_variable)?;
    let shown = show(daemon, address)?;
    ensure!(shown["cdi"] == serde_json::json!([name]), "`device ls` shows {shown}");
    let test = ["sh", "-c", "test -b /dev/nvme0n1 && test $DISK = lab"];
    let words = ["run", "--memory", "256m", "--device", &name, daemon.image(), "--"];
    expect_code(&daemon.run(&[&words[..], &test].concat())?, 0)?;
    expect_state(daemon, address, "ready")?;
    fs::write(&spec.0, with_variable.replacen("/dev/vfio/vfio", "/dev/nvidia0", 1))?;
    expect_refusal(
        &daemon.run(&["run", "--device", &name, daemon.image(), "--", "true"])?,
        125,
        &["/dev/nvidia0", "basalt device cdi"],
    )?;
    expect_refusal(
        &daemon.run(&["device", "attach", "nobody", "lab.basalt/disk=other"])?,
        1,
        &["lab.basalt/disk=other", address],
    )
}

/// A sandbox with the disk is saved, goes back, and goes on as another class; its clone has no disk.
fn while_it_is_saved(daemon: &Daemon<'_>, address: &str) -> Result<()> {
    let image = daemon.image();
    daemon.ok(&[
        "run", "-d", "--name", "kept", "--memory", "256m", "--device", address, image, "--", "sleep", "10000",
    ])?;
    prove(daemon, "kept", "7")?;
    let began = Instant::now();
    daemon.ok(&["snapshot", "create", "--detach-devices", "kept", "before"])?;
    tell(&format!(
        "a snapshot with the disk detached and attached again took {:?}",
        began.elapsed()
    ));
    expect_state(daemon, address, "claimed")?;
    prove(daemon, "kept", "8")?;
    daemon.ok(&["exec", "kept", "touch", "/since"])?;
    expect_refusal(&daemon.run(&["rollback", "kept", "before"])?, 1, &["--detach-devices"])?;
    daemon.ok(&["rollback", "--detach-devices", "kept", "before"])?;
    expect_code(&daemon.run(&["exec", "kept", "test", "-e", "/since"])?, 1)?;
    expect_state(daemon, address, "claimed")?;
    prove_all(daemon, "kept", "9")?;
    daemon.ok(&["clone", "--name", "copy", "before"])?;
    expect_code(&daemon.run(&["exec", "copy", "test", "-e", "/dev/nvme0n1"])?, 1)?;
    daemon.ok(&["rm", "--force", "copy"])?;
    daemon.ok(&["move", "--class", "dedicated", "--detach-devices", "kept"])?;
    expect_state(daemon, address, "claimed")?;
    prove(daemon, "kept", "10")?;
    daemon.ok(&["rm", "--force", "kept"])?;
    daemon.ok(&["snapshot", "rm", "before"])?;
    expect_state(daemon, address, "ready")
}
