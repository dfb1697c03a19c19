//! A network function that has neither MSI nor MSI-X: a sandbox that has it is interrupted by its pin, a level. Echoes come back as they were
//! sent, each by an interrupt; it is taken away under load, and given again. A disk that has MSI-X, of a guest that is told to use no
//! messages for it, interrupts by its pin as well, and by MSI-X again when the guest may. The host's IOMMU sees no fault.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::bare::{in_lab, run};
use super::device_attach::{expect_function, expect_state, prove};
use super::interface;
use super::nvme_disk::{Disk, interrupts, tell};
use crate::basalt::expect_code;
use crate::daemon::Daemon;
use crate::kernel_log::{expect_no_dma_fault, kernel_log};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "device-intx",
    limit: Duration::from_secs(400),
    host,
    guest: None,
};

/// Where the lab's emulator has it, and its network, whose router answers echoes (lab/ctl).
const ADDRESS: &str = "0000:00:0b.0";
const GUEST: &str = "10.0.9.15";
const ROUTER: &str = "10.0.9.2";

/// Echoes of a round.
const ECHOES: u64 = 300;

/// In the guest, behind [`interface::UP`]: sends so many echo requests (RFC 792), one after the other, or for ever, and compares what
/// comes back.
const ECHO: &str = "
import os
peer, count = sys.argv[3], int(sys.argv[4])
wire = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
wire.settimeout(20)
wire.bind((own, 0))
def checksum(data):
    total = sum(struct.unpack('!%dH' % (len(data) // 2), data))
    while total >> 16:
        total = (total & 0xffff) + (total >> 16)
    return ~total & 0xffff
done = 0
while count == 0 or done < count:
    body = os.urandom(8 + done * 37 % 1300 // 2 * 2)
    head = struct.pack('!BBHHH', 8, 0, 0, 0x6261, done & 0xffff)
    head = struct.pack('!BBHHH', 8, 0, checksum(head + body), 0x6261, done & 0xffff)
    wire.sendto(head + body, (peer, 0))
    while True:
        packet = wire.recv(2048)
        kind, ident, number = packet[20], packet[24:26], struct.unpack('!H', packet[26:28])[0]
        if kind == 0 and ident == b'ba' and number == done & 0xffff:
            break
    assert packet[28:] == body, done
    done += 1
    if done == 20:
        open('/tmp/loaded', 'w').close()
print(done)
";

fn echo_script() -> String {
    [interface::UP, ECHO].concat()
}

/// What has the guest send so many echo requests by this interface, or for ever.
fn echo<'w>(script: &'w str, interface: &'w str, count: &'w str) -> [&'w str; 9] {
    ["exec", "card", "python3", "-c", script, interface, GUEST, ROUTER, count]
}

fn host(host: &Host) -> Result<()> {
    if !in_lab()? {
        return Ok(());
    }
    expect_function(ADDRESS, "0x1041")?;
    run("modprobe", &["vfio-pci"])?;
    let daemon = Daemon::with_templates(host)?;
    let mut log = kernel_log()?;
    // The emulator has no way to reset it; each driver of virtio does so first (virtio 1.2, 3.1.1).
    daemon.ok(&["device", "bind", "--allow-no-reset", ADDRESS])?;
    let words = ["run", "-d", "--name", "card", "--memory", "256m", "--device", ADDRESS];
    daemon.ok(&[&words[..], &[&host.digest, "--", "sleep", "10000"]].concat())?;
    echoes(&daemon)?;
    taken_under_load(&daemon)?;
    daemon.ok(&["device", "attach", "card", ADDRESS])?;
    echoes(&daemon)?;
    daemon.ok(&["rm", "--force", "card"])?;
    expect_state(&daemon, ADDRESS, "ready")?;
    daemon.ok(&["device", "unbind", ADDRESS])?;
    disk(&daemon)?;
    expect_no_dma_fault(&mut log)?;
    daemon.end()
}

/// What the guest's driver has called it.
fn interface(daemon: &Daemon<'_>) -> Result<&'static str> {
    daemon.wait_in("card", "the guest's driver", "test -e /sys/class/net/eth1")?;
    Ok("eth1")
}

/// A guest's interrupts by pins that are levels: how many, and the lines of its table.
fn levels(daemon: &Daemon<'_>, sandbox: &str) -> Result<(u64, String)> {
    let table = daemon.ok(&["exec", sandbox, "cat", "/proc/interrupts"])?;
    let columns = table.lines().next().map_or(0, |first| first.split_whitespace().count());
    let of = table
        .lines()
        .filter(|line| line.contains("IO-APIC") && line.contains("fasteoi"));
    let lines: Vec<_> = of.collect();
    let counts = lines
        .iter()
        .flat_map(|line| line.split_whitespace().skip(1).take(columns));
    let count = counts.filter_map(|count| count.parse::<u64>().ok()).sum();
    Ok((count, lines.join("\n")))
}

/// Each comes back by an interrupt, and for each interrupt of the guest's the host had one: a level that is not served at once is masked
/// until the guest has ended it.
fn echoes(daemon: &Daemon<'_>) -> Result<()> {
    let name = interface(daemon)?;
    let (before, lines) = levels(daemon, "card")?;
    ensure!(
        lines.contains("virtio"),
        "the guest has no level of a virtio device: {lines}"
    );
    let host_before = interrupts("vfio-intx")?;
    let began = Instant::now();
    let count = ECHOES.to_string();
    let said = daemon.ok(&echo(&echo_script(), name, &count))?;
    let took = began.elapsed();
    ensure!(said.trim() == count, "the guest says {said}");
    let (guest, host) = (
        levels(daemon, "card")?.0 - before,
        interrupts("vfio-intx")? - host_before,
    );
    tell(&format!(
        "{ECHOES} echoes within {took:?}, {guest} interrupts of the guest's, {host} of the host's: {}",
        lines.trim()
    ));
    ensure!(
        guest >= ECHOES / 2,
        "{guest} interrupts are too few for {ECHOES} echoes"
    );
    ensure!(
        host + 4 >= guest && host <= 4 * guest,
        "the host had {host} interrupts for {guest} of the guest's"
    );
    daemon.ok(&["exec", "card", "rm", "-f", "/tmp/loaded"])?;
    Ok(())
}

/// It goes while echoes are on their way; the guest lives on, and its pin is silent.
fn taken_under_load(daemon: &Daemon<'_>) -> Result<()> {
    let name = interface(daemon)?;
    let mut load = daemon.start(&echo(&echo_script(), name, "0"))?;
    daemon.wait_in("card", "load", "test -e /tmp/loaded")?;
    let began = Instant::now();
    daemon.ok(&["device", "detach", "card", ADDRESS])?;
    tell(&format!("taken from a guest that sends within {:?}", began.elapsed()));
    expect_state(daemon, ADDRESS, "ready")?;
    expect_code(&daemon.run(&["exec", "card", "test", "-e", "/sys/class/net/eth1"])?, 1)?;
    let quiet = interrupts("vfio-intx")?;
    thread::sleep(Duration::from_millis(500));
    ensure!(interrupts("vfio-intx")? == quiet, "somebody still listens to its pin");
    // It waits for an answer that does not come.
    load.kill()?;
    load.wait()?;
    daemon.ok(&["exec", "card", "rm", "-f", "/tmp/loaded"])?;
    Ok(())
}

/// In the guest: takes the disk from its driver, and gives it back; the kernel may use messages for it then, or not (`msi_bus`, Linux's
/// sysfs-bus-pci).
const AGAIN: &str = "
set -e
for disk in /sys/bus/pci/devices/*; do
    read -r class < $disk/class
    [ $class != 0x010802 ] || break
done
driver=/sys/bus/pci/drivers/nvme
echo ${disk##*/} > $driver/unbind
echo $1 > $disk/msi_bus
echo ${disk##*/} > $driver/bind
";

/// Requests that are proved at least: each of them is an interrupt, or shares one with few others.
const REQUESTS: u64 = 12;

/// The lab's disk, whose driver uses MSI-X, then the pin, and then MSI-X again.
fn disk(daemon: &Daemon<'_>) -> Result<()> {
    let disk = Disk::find()?;
    let address = disk.address();
    daemon.ok(&["device", "bind", address])?;
    let words = ["run", "-d", "--name", "disk", "--memory", "256m", "--device", address];
    daemon.ok(&[&words[..], &[daemon.image(), "--", "sleep", "10000"]].concat())?;
    for (seed, messages) in ["1", "0", "1"].into_iter().enumerate() {
        daemon.wait_in("disk", "the disk", "test -b /dev/nvme0n1")?;
        daemon.ok(&["exec", "disk", "sh", "-c", AGAIN, "sh", messages])?;
        daemon.wait_in("disk", "the disk", "test -b /dev/nvme0n1")?;
        let (levels_before, lines) = levels(daemon, "disk")?;
        let host_before = (interrupts("vfio-intx")?, interrupts("vfio-msix")?);
        prove(daemon, "disk", &seed.to_string())?;
        let taken = levels(daemon, "disk")?.0 - levels_before;
        let host = (
            interrupts("vfio-intx")? - host_before.0,
            interrupts("vfio-msix")? - host_before.1,
        );
        tell(&format!(
            "a disk that may use messages ({messages}): {taken} interrupts of the guest's by a level; of the host's {} by its pin, {} by MSI-X",
            host.0, host.1
        ));
        let by_pin = messages == "0";
        ensure!(lines.contains("nvme") == by_pin, "the guest's levels: {lines}");
        ensure!(
            (taken >= REQUESTS) == by_pin,
            "the guest had {taken} interrupts by its pin"
        );
        let (there, not) = if by_pin { host } else { (host.1, host.0) };
        ensure!(
            there >= REQUESTS && not == 0,
            "the host had {there} interrupts of one kind and {not} of the other"
        );
    }
    daemon.ok(&["rm", "--force", "disk"])?;
    daemon.ok(&["device", "unbind", address])?;
    Ok(())
}
