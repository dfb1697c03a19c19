//! The guest finds what it was given, as PCI functions with MSI-X, and nothing that should not be there.

use std::fs;
use std::io::Write;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::vm::{self, Builder};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "devices",
    limit: Duration::from_secs(180),
    host,
    guest: Some(guest),
};

fn host(host: &Host) -> Result<()> {
    let mut machine = Builder::new(host)?.start()?;
    let mut agent = machine.agent()?;
    vm::install(&mut agent)?;
    vm::guest_half(&mut agent, CASE.name, &[])?;
    let before = vm::guest_half(&mut agent, CASE.name, &["events"])?;
    machine.vmm.client.press_power_button()?;
    let after = vm::guest_half(&mut agent, CASE.name, &["events"])?;
    ensure!(
        before != after,
        "the power button caused no event; interrupts stay at {after}"
    );
    machine.vmm.client.stop()?;
    ensure!(machine.vmm.wait(Duration::from_secs(10))?, "the VMM did not end well");
    Ok(())
}

fn guest(arguments: &[String]) -> Result<()> {
    if arguments.first().is_some_and(|word| word == "events") {
        return report_events();
    }
    let mut ids = Vec::new();
    for entry in fs::read_dir("/sys/bus/pci/devices")? {
        let path = entry?.path();
        let read = |name: &str| fs::read_to_string(path.join(name)).map(|text| text.trim().to_owned());
        let id = read("device")?;
        if read("vendor")? == "0x1af4" {
            ensure!(
                path.join("msi_irqs").read_dir()?.count() >= 2,
                "{} has no MSI-X vectors",
                path.display()
            );
        }
        ids.push(id);
    }
    ids.sort();
    // Host bridge; block (2), console (3), entropy (4), socket (19) device: 0x1040 and the number (virtio 1.2, 4.1.2).
    ensure!(
        ids == ["0x0008", "0x1042", "0x1043", "0x1044", "0x1053"],
        "PCI functions: {ids:?}"
    );

    let random = fs::read_to_string("/sys/class/misc/hw_random/rng_current")?;
    ensure!(random.starts_with("virtio_rng"), "the source of entropy is {random}");
    let mut bytes = [0; 64];
    let mut device = fs::File::open("/dev/hwrng")?;
    std::io::Read::read_exact(&mut device, &mut bytes)?;
    ensure!(bytes.iter().any(|&byte| byte != 0), "the entropy device gives zeroes");

    let interrupts = fs::read_to_string("/proc/interrupts")?;
    ensure!(
        interrupts.contains("PCI-MSI"),
        "no message-signalled interrupts:\n{interrupts}"
    );
    let clock = fs::read_to_string("/sys/devices/system/clocksource/clocksource0/current_clocksource")?;
    ensure!(
        clock.trim() == "kvm-clock" || clock.trim() == "tsc",
        "the clock source is {clock}"
    );
    let command_line = fs::read_to_string("/proc/cmdline").context("the command line")?;
    ensure!(
        command_line.contains("console=hvc0"),
        "the command line is {command_line}"
    );
    Ok(())
}

/// Prints how often the generic event device has interrupted.
fn report_events() -> Result<()> {
    let interrupts = fs::read_to_string("/proc/interrupts")?;
    let line = interrupts.lines().find(|line| line.contains("ACPI:Ged"));
    let count = line.and_then(|line| line.split_whitespace().nth(1));
    let count = count.with_context(|| format!("the generic event device has no interrupt:\n{interrupts}"))?;
    Ok(writeln!(std::io::stdout(), "{count}")?)
}
