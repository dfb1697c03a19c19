//! A network function that has neither MSI nor MSI-X: a sandbox that has it is interrupted by its pin, a level. Echoes come back as they were
//! sent, each by an interrupt; it is taken away under load, and given again. The host's IOMMU sees no fault.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::bare::{in_lab, run};
use super::device_attach::{expect_function, expect_state};
use super::interface;
use super::nvme_disk::{interrupts, tell};
use crate::basalt::expect_code;
use crate::daemon::Daemon;
use crate::kernel_log::{expect_no_dma_fault, kernel_log};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "device-intx",
    limit: Duration::from_secs(300),
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
    expect_no_dma_fault(&mut log)?;
    daemon.end()
}

/// What the guest's driver has called it.
fn interface(daemon: &Daemon<'_>) -> Result<&'static str> {
    daemon.wait_in("card", "the guest's driver", "test -e /sys/class/net/eth1")?;
    Ok("eth1")
}

/// The guest's interrupts by pins that are levels: how many, and the lines of its table.
fn levels(daemon: &Daemon<'_>) -> Result<(u64, String)> {
    let table = daemon.ok(&["exec", "card", "cat", "/proc/interrupts"])?;
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
    let (before, lines) = levels(daemon)?;
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
    let (guest, host) = (levels(daemon)?.0 - before, interrupts("vfio-intx")? - host_before);
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
