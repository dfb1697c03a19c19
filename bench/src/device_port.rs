//! The host's network device with virtual functions, as `device_io` uses it: the physical function is the server's end, a virtual one is
//! the other, in a network namespace of the host's or in a guest. Knows Linux's files and `ip`, and no load.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use base::PciAddress;

use crate::class::run;
use crate::device_io::{PATIENCE, PAUSE, wait_for};
use crate::guard::Kept;
use crate::run::Node;

/// An Intel 82576, of which the newer lab has one (docs/lab.md): vendor and device.
const VENDOR_DEVICE: (&str, &str) = ("0x8086", "0x10c9");
const DRIVER: &str = "igb";
const DRIVER_OF_VIRTUAL: &str = "igbvf";

/// Addresses of the two ends, of the range for documentation (RFC 5737).
pub(crate) const SERVER: &str = "192.0.2.1/24";
pub(crate) const CLIENT: &str = "192.0.2.2/24";
const NAMESPACE: &str = "basalt-bench-io";

const FUNCTIONS: &str = "/sys/bus/pci/devices";

fn of(function: PciAddress) -> PathBuf {
    Path::new(FUNCTIONS).join(function.to_string())
}

/// The network device of a function, when its driver has made one.
fn interface(function: PciAddress) -> Result<String> {
    let place = of(function).join("net");
    wait_for(&place)?;
    let entry = fs::read_dir(&place)?
        .next()
        .context("a driver without an interface")??;
    Ok(entry.file_name().to_string_lossy().into_owned())
}

/// The function that is a file's target.
fn target(link: &Path) -> Result<PciAddress> {
    let target = fs::read_link(link).with_context(|| link.display().to_string())?;
    let name = target.file_name().context("a link to nowhere")?.to_string_lossy();
    name.parse().with_context(|| format!("{name} is no function"))
}

/// The physical function, up, with one virtual function; as it was found when this is dropped.
pub(crate) struct Port<'n> {
    node: &'n Node,
    physical: PciAddress,
    interface: String,
    /// The host had no driver of it before.
    driver: Option<Driver>,
    /// The virtual one.
    pub(crate) function: PciAddress,
}

/// The host's driver of the physical function, which is unloaded with this. Without it the device has no virtual functions either.
struct Driver;

impl Driver {
    /// None where there is one already, which others may need.
    fn load() -> Result<Option<Self>> {
        if Path::new("/sys/module").join(DRIVER).exists() {
            return Ok(None);
        }
        run("modprobe", &[DRIVER])?;
        Kept::Module(DRIVER.to_owned()).tell(true);
        Ok(Some(Self))
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        match run("rmmod", &[DRIVER]) {
            Ok(()) => Kept::Module(DRIVER.to_owned()).tell(false),
            Err(error) => eprintln!("the module {DRIVER} stays for now: {error:#}"),
        }
    }
}

impl<'n> Port<'n> {
    /// # Errors
    /// There is none, or somebody uses it.
    pub(crate) fn take(node: &'n Node) -> Result<Self> {
        let physical = find()?;
        let driver = Driver::load()?;
        run("modprobe", &[DRIVER_OF_VIRTUAL])?;
        let interface = interface(physical)?;
        let flags = fs::read_to_string(Path::new("/sys/class/net").join(&interface).join("flags"))?;
        ensure!(
            !is_up(&flags)?,
            "{interface}, which is {physical}, is up: `ip link set {interface} down` if nobody uses it, and run this again"
        );
        node.ok(&["device", "vfs", &physical.to_string(), "1"])?;
        let function = target(&of(physical).join("virtfn0"))?;
        let this = Self {
            node,
            physical,
            interface,
            driver,
            function,
        };
        run("ip", &["address", "replace", SERVER, "dev", &this.interface])?;
        run("ip", &["link", "set", &this.interface, "up"])?;
        Ok(this)
    }
}

impl Drop for Port<'_> {
    fn drop(&mut self) {
        let removed = self
            .node
            .ok(&["device", "vfs", &self.physical.to_string(), "0"])
            .map(drop);
        let address = || run("ip", &["address", "del", SERVER, "dev", &self.interface]);
        let down = || run("ip", &["link", "set", &self.interface, "down"]);
        if let Err(error) = removed.and_then(|()| address()).and_then(|()| down()) {
            eprintln!("{} stays as it is for now: {error:#}", self.physical);
        }
        drop(self.driver.take());
    }
}

/// Whether an interface's flags have IFF_UP (netdevice(7)).
fn is_up(flags: &str) -> Result<bool> {
    let digits = flags.trim().trim_start_matches("0x");
    let flags = u32::from_str_radix(digits, 16).with_context(|| format!("flags of an interface: {flags:?}"))?;
    Ok(flags & 1 != 0)
}

fn find() -> Result<PciAddress> {
    for entry in fs::read_dir(FUNCTIONS)? {
        let path = entry?.path();
        let told = |name: &str| fs::read_to_string(path.join(name)).unwrap_or_default();
        if (told("vendor").trim(), told("device").trim()) == VENDOR_DEVICE {
            let name = path
                .file_name()
                .context("a function without an address")?
                .to_string_lossy()
                .into_owned();
            return name.parse().with_context(|| format!("{name} is no function"));
        }
    }
    bail!(
        "this host has no network device with virtual functions: `basalt-lab up --kernel newer` starts a lab that has one"
    )
}

/// Whether the other end of the wire is there (ip-link(8), LOWER_UP).
fn has_carrier(interface: &str) -> Result<bool> {
    let output = Command::new("ip")
        .args(["-n", NAMESPACE, "link", "show", "dev", interface])
        .output()?;
    Ok(String::from_utf8_lossy(&output.stdout).contains("LOWER_UP"))
}

/// A network namespace with a virtual function in it, by the host's driver, while this lives.
pub(crate) struct Namespace(PciAddress);

impl Namespace {
    pub(crate) fn with(function: PciAddress) -> Result<Self> {
        // One that a killed run has left; usually there is none.
        drop(run("ip", &["netns", "del", NAMESPACE]));
        run("ip", &["netns", "add", NAMESPACE])?;
        let this = Self(function);
        fs::write("/sys/bus/pci/drivers_probe", function.to_string())?;
        let interface = interface(function)?;
        run("ip", &["link", "set", &interface, "netns", NAMESPACE])?;
        run(
            "ip",
            &["-n", NAMESPACE, "address", "replace", CLIENT, "dev", &interface],
        )?;
        run("ip", &["-n", NAMESPACE, "link", "set", &interface, "up"])?;
        let deadline = Instant::now() + PATIENCE;
        while !has_carrier(&interface)? {
            ensure!(Instant::now() < deadline, "{interface} has no link after {PATIENCE:?}");
            thread::sleep(PAUSE);
        }
        Ok(this)
    }

    /// The words that start a program in it.
    pub(crate) fn enter(&self) -> [&'static str; 4] {
        ["ip", "netns", "exec", NAMESPACE]
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let driver = of(self.0).join("driver/unbind");
        let unbound = match driver.exists() {
            true => fs::write(&driver, self.0.to_string()).map_err(Into::into),
            false => Ok(()),
        };
        if let Err(error) = unbound.and_then(|()| run("ip", &["netns", "del", NAMESPACE])) {
            eprintln!("the network namespace {NAMESPACE} stays: {error:#}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_that_is_up_is_somebodys() {
        assert!(is_up("0x1003\n").unwrap());
        assert!(!is_up("0x1002\n").unwrap());
        is_up("").unwrap_err();
    }
}
