//! A network function that has neither MSI nor MSI-X: a sandbox that has it is interrupted by its pin, a level. Echoes come back as they were
//! sent, each by an interrupt; it is taken away under load, and given again. One that has MSI-X, of a guest that is told to use no
//! messages for it, interrupts by its pin as well, and by MSI-X again when the guest may. The host's IOMMU sees no fault.

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
    limit: Duration::from_secs(400),
    host,
    guest: None,
};

/// Where the lab's emulator has it, one that has MSI-X, and their networks, whose routers answer echoes (lab/ctl).
const ADDRESS: &str = "0000:00:0b.0";
const WITH_MESSAGES: &str = "0000:00:0d.0";
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

fn host(host: &Host) -> Result<()> {
    if !in_lab()? {
        return Ok(());
    }
    for address in [ADDRESS, WITH_MESSAGES] {
        expect_function(address, "0x1041")?;
    }
    run("modprobe", &["vfio-pci"])?;
    let daemon = Daemon::with_templates(host)?;
    let mut log = kernel_log()?;
    by_pin_alone(&daemon)?;
    with_messages(&daemon)?;
    expect_no_dma_fault(&mut log)?;
    daemon.end()
}

/// A network function of the host's, and the sandbox that has it.
struct Card {
    sandbox: &'static str,
    address: &'static str,
}

impl Card {
    fn bind_and_run(&self, daemon: &Daemon<'_>) -> Result<()> {
        // The emulator has no way to reset it; each driver of virtio does so first (virtio 1.2, 3.1.1).
        daemon.ok(&["device", "bind", "--allow-no-reset", self.address])?;
        let words = ["run", "-d", "--name", self.sandbox, "--memory", "256m"];
        let rest = ["--device", self.address, daemon.image(), "--", "sleep", "10000"];
        daemon.ok(&[&words[..], &rest].concat())?;
        Ok(())
    }

    fn remove_and_unbind(&self, daemon: &Daemon<'_>) -> Result<()> {
        daemon.ok(&["rm", "--force", self.sandbox])?;
        expect_state(daemon, self.address, "ready")?;
        daemon.ok(&["device", "unbind", self.address])?;
        Ok(())
    }

    /// What the guest's driver has called it.
    fn interface(&self, daemon: &Daemon<'_>) -> Result<&'static str> {
        daemon.wait_in(self.sandbox, "the guest's driver", "test -e /sys/class/net/eth1")?;
        Ok("eth1")
    }

    /// What has the guest send so many echo requests by it, or for ever.
    fn echo<'w>(&self, script: &'w str, interface: &'w str, count: &'w str) -> [&'w str; 9] {
        [
            "exec",
            self.sandbox,
            "python3",
            "-c",
            script,
            interface,
            GUEST,
            ROUTER,
            count,
        ]
    }

    /// They come back as they were sent; how many interrupts by levels the guest had for them, and its table's lines of those.
    fn echoes(&self, daemon: &Daemon<'_>) -> Result<(u64, String)> {
        let name = self.interface(daemon)?;
        let (before, lines) = levels(daemon, self.sandbox)?;
        let began = Instant::now();
        let count = ECHOES.to_string();
        let said = daemon.ok(&self.echo(&echo_script(), name, &count))?;
        let took = began.elapsed();
        ensure!(said.trim() == count, "the guest says {said}");
        let taken = levels(daemon, self.sandbox)?.0 - before;
        tell(&format!(
            "{ECHOES} echoes within {took:?}, {taken} interrupts of the guest's by levels: {}",
            lines.trim()
        ));
        daemon.ok(&["exec", self.sandbox, "rm", "-f", "/tmp/loaded"])?;
        Ok((taken, lines))
    }

    /// The same by its pin.
    fn echoes_by_pin(&self, daemon: &Daemon<'_>) -> Result<()> {
        let before = interrupts("vfio-intx")?;
        let (guest, lines) = self.echoes(daemon)?;
        ensure!(
            lines.contains("virtio"),
            "the guest has no level of a virtio device: {lines}"
        );
        as_many_as_the_hosts(guest, interrupts("vfio-intx")? - before)
    }

    /// It goes while echoes are on their way; the guest lives on, and its pin is silent.
    fn taken_under_load(&self, daemon: &Daemon<'_>) -> Result<()> {
        let name = self.interface(daemon)?;
        let mut load = daemon.start(&self.echo(&echo_script(), name, "0"))?;
        daemon.wait_in(self.sandbox, "load", "test -e /tmp/loaded")?;
        let began = Instant::now();
        daemon.ok(&["device", "detach", self.sandbox, self.address])?;
        tell(&format!("taken from a guest that sends within {:?}", began.elapsed()));
        expect_state(daemon, self.address, "ready")?;
        let there = ["exec", self.sandbox, "test", "-e", "/sys/class/net/eth1"];
        expect_code(&daemon.run(&there)?, 1)?;
        let quiet = interrupts("vfio-intx")?;
        thread::sleep(Duration::from_millis(500));
        ensure!(interrupts("vfio-intx")? == quiet, "somebody still listens to its pin");
        // It waits for an answer that does not come.
        load.kill()?;
        load.wait()?;
        daemon.ok(&["exec", self.sandbox, "rm", "-f", "/tmp/loaded"])?;
        Ok(())
    }
}

/// One that has no messages is taken away under load, and given again.
fn by_pin_alone(daemon: &Daemon<'_>) -> Result<()> {
    let card = Card {
        sandbox: "card",
        address: ADDRESS,
    };
    card.bind_and_run(daemon)?;
    card.echoes_by_pin(daemon)?;
    card.taken_under_load(daemon)?;
    daemon.ok(&["device", "attach", card.sandbox, card.address])?;
    card.echoes_by_pin(daemon)?;
    card.remove_and_unbind(daemon)
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

/// Each echo comes back by an interrupt, and for each interrupt of the guest's the host had one: a level that is not served at once is masked
/// until the guest has ended it.
fn as_many_as_the_hosts(guest: u64, host: u64) -> Result<()> {
    ensure!(
        guest >= ECHOES / 2,
        "{guest} interrupts are too few for {ECHOES} echoes"
    );
    ensure!(
        host + 4 >= guest && host <= 4 * guest,
        "the host had {host} interrupts for {guest} of the guest's"
    );
    Ok(())
}

/// In the guest: takes the function of an interface from its driver, and gives it back; the kernel may use messages for it then, or not
/// (`msi_bus`, Linux's sysfs-bus-pci).
const AGAIN: &str = "
set -e
function=$(readlink -f /sys/class/net/$1/device/..)
driver=$(readlink -f $function/driver)
echo ${function##*/} > $driver/unbind
echo $2 > $function/msi_bus
echo ${function##*/} > $driver/bind
";

/// One whose driver uses MSI-X, then the pin, and then MSI-X again. It is none of the lab's disk: QEMU's NVMe keeps its pin asserted for ever when
/// it was once reset with completions that nobody had read (docs/lab.md, traps).
fn with_messages(daemon: &Daemon<'_>) -> Result<()> {
    let card = Card {
        sandbox: "messages",
        address: WITH_MESSAGES,
    };
    card.bind_and_run(daemon)?;
    for messages in ["1", "0", "1"] {
        let name = card.interface(daemon)?;
        daemon.ok(&["exec", card.sandbox, "sh", "-c", AGAIN, "sh", name, messages])?;
        let (pin, msix) = (interrupts("vfio-intx")?, interrupts("vfio-msix")?);
        let by_pin = messages == "0";
        let (by_levels, lines) = card.echoes(daemon)?;
        let host = (interrupts("vfio-intx")? - pin, interrupts("vfio-msix")? - msix);
        tell(&format!(
            "may use messages ({messages}): {by_levels} interrupts of the guest's by a level; of the host's {} by its pin, {} by MSI-X",
            host.0, host.1
        ));
        let (there, not) = if by_pin { host } else { (host.1, host.0) };
        ensure!(
            there >= ECHOES / 2 && not == 0,
            "the host had {there} interrupts of one kind and {not} of the other"
        );
        match by_pin {
            true => as_many_as_the_hosts(by_levels, host.0)?,
            false => ensure!(
                by_levels == 0,
                "the guest had {by_levels} interrupts by its pin: {lines}"
            ),
        }
    }
    card.remove_and_unbind(daemon)
}
