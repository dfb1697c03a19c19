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
    /// The virtual one.
    pub(crate) function: PciAddress,
}

impl<'n> Port<'n> {
    pub(crate) fn take(node: &'n Node) -> Result<Self> {
        for driver in [DRIVER, DRIVER_OF_VIRTUAL] {
            run("modprobe", &[driver])?;
        }
        // Without its driver the device has no virtual functions either.
        Kept::Module(DRIVER.to_owned()).tell(true);
        let physical = find()?;
        let interface = interface(physical)?;
        node.ok(&["device", "vfs", &physical.to_string(), "1"])?;
        let function = target(&of(physical).join("virtfn0"))?;
        let this = Self {
            node,
            physical,
            function,
        };
        run("ip", &["address", "replace", SERVER, "dev", &interface])?;
        run("ip", &["link", "set", &interface, "up"])?;
        Ok(this)
    }
}

impl Drop for Port<'_> {
    fn drop(&mut self) {
        let removed = self.node.ok(&["device", "vfs", &self.physical.to_string(), "0"]);
        let gone = removed.map(drop).and_then(|()| run("rmmod", &[DRIVER]));
        match gone {
            Ok(()) => Kept::Module(DRIVER.to_owned()).tell(false),
            Err(error) => eprintln!("{} stays as it is for now: {error:#}", self.physical),
        }
    }
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
