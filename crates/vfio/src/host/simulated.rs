//! A kernel in memory, for tests of this crate and of those that use it: a tree of files that behaves as sysfs does when drivers are unbound
//! and probed, overridden, virtual functions made, functions reset (Linux, drivers/pci/pci-sysfs.c, drivers/base/bus.c). Knows no device.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::{self, BufRead, Cursor};
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::PciAddress;
use rustix::io::Errno;

use super::files::{DeviceNumber, Files, Sysfs};

const DEVICES: &str = "/sys/bus/pci/devices";
const DRIVERS: &str = "/sys/bus/pci/drivers";
const GROUPS: &str = "/sys/kernel/iommu_groups";

/// More than any path needs.
const MOST_LINKS: u32 = 16;

/// Is told of each write before it is done, and can refuse it.
pub type Hook = Arc<dyn Fn(&Path, &str) -> io::Result<()> + Send + Sync>;

/// One kernel; clones are the same one.
#[derive(Clone, Default)]
pub struct Kernel(Arc<Mutex<State>>);

#[derive(Clone, Default)]
struct State {
    tree: BTreeMap<PathBuf, Entry>,
    /// Which driver the kernel finds for a function by its ids.
    natives: BTreeMap<String, String>,
    claimed: BTreeSet<PathBuf>,
    /// How often each function was reset.
    resets: BTreeMap<String, u32>,
    hook: Option<Hook>,
    booted: Option<Box<State>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Entry {
    Directory,
    File(String),
    Link(PathBuf),
    /// A character device.
    Device(DeviceNumber),
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Kernel")
    }
}

/// A function of it.
#[derive(Clone, Copy, Debug)]
pub struct Function<'a> {
    /// Where it is, such as `0000:01:00.0`.
    pub address: &'a str,
    /// The bridge that it is behind.
    pub behind: Option<&'a str>,
    /// Class, vendor and device, as the files say it.
    pub ids: [&'a str; 3],
    /// The driver that matches it, which has it.
    pub native: Option<&'a str>,
    /// Its IOMMU group.
    pub group: u32,
    /// `reset_method`.
    pub resets: &'a str,
}

impl Kernel {
    /// With a bridge, an NVMe disk, an interface that can make seven virtual functions, a display, and three functions that share a group.
    pub fn typical() -> Self {
        let kernel = Self::default();
        let fixed = [
            (
                "proc/interrupts",
                "  9:  0  IR-IO-APIC  9-fasteoi  acpi\n 24:  7  IR-PCI-MSI  520192-edge  nvme0q0\n",
            ),
            ("proc/self/mountinfo", "22 1 0:20 / / rw - overlay overlay rw\n"),
            ("proc/swaps", "Filename\tType\tSize\tUsed\tPriority\n"),
            (
                "proc/net/route",
                "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n",
            ),
            ("proc/net/ipv6_route", ""),
            ("sys/bus/pci/drivers_probe", ""),
            (
                "usr/share/misc/pci.ids",
                "1b36  Red Hat, Inc.\n\t0010  QEMU NVM Express Controller\nC 01  Mass storage controller\n\t08  Non-Volatile memory controller\n",
            ),
        ];
        fixed.iter().for_each(|(path, text)| kernel.set(path, text));
        for driver in ["vfio-pci", "nvme", "igb", "igbvf", "pcieport", "ahci", "i801_smbus"] {
            kernel.load_driver(driver);
        }
        let functions = [
            ("0000:00:02.0", None, ["0x030000", "0x1234", "0x1111"], None, 0, ""),
            (
                "0000:00:1c.0",
                None,
                ["0x060400", "0x1b36", "0x000c"],
                Some("pcieport"),
                5,
                "pm",
            ),
            ("0000:00:1f.0", None, ["0x060100", "0x8086", "0x2918"], None, 6, ""),
            (
                "0000:00:1f.2",
                None,
                ["0x010601", "0x8086", "0x2922"],
                Some("ahci"),
                6,
                "pm",
            ),
            (
                "0000:00:1f.3",
                None,
                ["0x0c0500", "0x8086", "0x2930"],
                Some("i801_smbus"),
                6,
                "",
            ),
            (
                "0000:01:00.0",
                Some("0000:00:1c.0"),
                ["0x010802", "0x1b36", "0x0010"],
                Some("nvme"),
                1,
                "flr bus",
            ),
            (
                "0000:02:00.0",
                None,
                ["0x020000", "0x8086", "0x10c9"],
                Some("igb"),
                2,
                "flr pm",
            ),
        ];
        for (address, behind, ids, native, group, resets) in functions {
            kernel.add(&Function {
                address,
                behind,
                ids,
                native,
                group,
                resets,
            });
        }
        let resource = "0x0000380000000000 0x0000380000003fff 0x0000000000140204\n";
        kernel.set("sys/bus/pci/devices/0000:01:00.0/resource", resource);
        kernel.set("sys/bus/pci/devices/0000:00:02.0/boot_vga", "1\n");
        for (name, text) in [
            ("sriov_totalvfs", "7\n"),
            ("sriov_numvfs", "0\n"),
            ("sriov_drivers_autoprobe", "1\n"),
        ] {
            kernel.set(&format!("sys/bus/pci/devices/0000:02:00.0/{name}"), text);
        }
        let state = kernel.lock().clone();
        kernel.lock().booted = Some(Box::new(state));
        kernel
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its files.
    pub fn sysfs(&self) -> Sysfs {
        Sysfs::with(Arc::new(self.clone()), Path::new("/"))
    }

    /// Has a file say something; it and what is above it are made.
    pub fn set(&self, path: &str, text: &str) {
        self.lock().put(&absolute(path), Entry::File(text.to_owned()));
    }

    /// Makes a link.
    pub fn link(&self, path: &str, to: &str) {
        self.lock().put(&absolute(path), Entry::Link(absolute(to)));
    }

    /// Makes a directory.
    pub fn directory(&self, path: &str) {
        self.lock().put(&absolute(path), Entry::Directory);
    }

    /// Makes a character device, whose number is as sysfs has it: `MAJOR:MINOR`.
    pub fn device(&self, path: &str, number: &str) {
        let (major, minor) = number.split_once(':').unwrap_or_default();
        let number = DeviceNumber(major.parse().unwrap_or(0), minor.parse().unwrap_or(0));
        self.lock().put(&absolute(path), Entry::Device(number));
    }

    /// Removes a path with all below it.
    pub fn remove(&self, path: &str) {
        let mut state = self.lock();
        let path = state.resolve(&absolute(path), false);
        state.remove(&path);
    }

    /// Somebody has a device to itself.
    pub fn claim(&self, device: &str) {
        self.lock().claimed.insert(absolute(device));
    }

    /// Loads a driver.
    pub fn load_driver(&self, name: &str) {
        self.set(&format!("{DRIVERS}/{name}/unbind"), "");
        self.set(&format!("{DRIVERS}/{name}/bind"), "");
    }

    /// Adds a function, which comes to its driver.
    pub fn add(&self, function: &Function<'_>) {
        let mut state = self.lock();
        state.add(function);
        state.probe(function.address);
    }

    /// Calls `hook` before each write.
    pub fn on_write(&self, hook: Hook) {
        self.lock().hook = Some(hook);
    }

    /// Every write from the `number`th on fails, as those of somebody who has died.
    pub fn refuse_from(&self, number: usize) {
        let passed = AtomicUsize::new(0);
        self.on_write(Arc::new(move |_, _| {
            match passed.fetch_add(1, Ordering::SeqCst) < number {
                true => Ok(()),
                false => Err(io::Error::other("it has died")),
            }
        }));
    }

    /// No write fails any more.
    pub fn refuse_nothing(&self) {
        self.lock().hook = None;
    }

    /// All is as when it had booted.
    pub fn reboot(&self) {
        let mut state = self.lock();
        if let Some(booted) = state.booted.take() {
            let hook = state.hook.take();
            *state = (*booted).clone();
            (state.booted, state.hook) = (Some(booted), hook);
        }
    }

    /// What a file says.
    pub fn text(&self, path: &str) -> Option<String> {
        let text = self.lock().text(path)?;
        Some(text.trim_end().to_owned())
    }

    /// A function's driver.
    pub fn driver(&self, address: PciAddress) -> Option<String> {
        self.lock().driver(&address.to_string())
    }

    /// What a function may come to alone.
    pub fn driver_override(&self, address: PciAddress) -> Option<String> {
        let text = self.lock().text(&format!("{DEVICES}/{address}/driver_override"))?;
        Some(text.trim().to_owned()).filter(|text| text != "(null)")
    }

    /// How often a function was reset.
    pub fn resets(&self, address: PciAddress) -> u32 {
        self.lock().resets.get(&address.to_string()).copied().unwrap_or(0)
    }
}

fn absolute(path: &str) -> PathBuf {
    Path::new("/").join(path)
}

impl State {
    fn put(&mut self, path: &Path, entry: Entry) {
        let path = self.resolve(path, false);
        for above in path.ancestors().skip(1) {
            self.tree.entry(above.to_owned()).or_insert(Entry::Directory);
        }
        self.tree.insert(path, entry);
    }

    fn remove(&mut self, path: &Path) {
        self.tree.retain(|other, _| !other.starts_with(path));
    }

    /// Follows links on the way, and at its end.
    fn resolve(&self, path: &Path, last_too: bool) -> PathBuf {
        let mut path = path.to_owned();
        for _ in 0..MOST_LINKS {
            let mut walked = PathBuf::new();
            let mut parts = path.components();
            let mut followed = None;
            while let Some(part) = parts.next() {
                match part {
                    Component::ParentDir => drop(walked.pop()),
                    part => walked.push(part),
                }
                let rest = parts.as_path();
                if let Some(Entry::Link(to)) = self.tree.get(&walked)
                    && (last_too || !rest.as_os_str().is_empty())
                {
                    followed = Some(if rest.as_os_str().is_empty() {
                        to.clone()
                    } else {
                        to.join(rest)
                    });
                    break;
                }
            }
            match followed {
                Some(next) => path = next,
                None => return walked,
            }
        }
        path
    }

    fn entry(&self, path: &Path) -> Option<&Entry> {
        self.tree.get(&self.resolve(path, true))
    }

    fn text(&self, path: &str) -> Option<String> {
        match self.entry(Path::new(path)) {
            Some(Entry::File(text)) => Some(text.clone()),
            _ => None,
        }
    }

    fn say(&mut self, path: &str, text: impl Into<String>) {
        self.put(Path::new(path), Entry::File(text.into()));
    }

    fn driver(&self, address: &str) -> Option<String> {
        match self
            .tree
            .get(&self.resolve(Path::new(&format!("{DEVICES}/{address}/driver")), false))
        {
            Some(Entry::Link(to)) => Some(to.file_name()?.to_string_lossy().into_owned()),
            _ => None,
        }
    }

    fn add(&mut self, function: &Function<'_>) {
        let Function { address, group, .. } = *function;
        let behind = function.behind.map(|bridge| format!("/{bridge}")).unwrap_or_default();
        let directory = format!("/sys/devices/pci0000:00{behind}/{address}");
        let [class, vendor, device] = function.ids;
        for (name, text) in [
            ("class", class),
            ("vendor", vendor),
            ("device", device),
            ("driver_override", "(null)"),
            ("numa_node", "0"),
            ("reset_method", function.resets),
            ("reset", ""),
        ] {
            self.say(&format!("{directory}/{name}"), format!("{text}\n"));
        }
        let link = |to: &str| Entry::Link(to.into());
        self.put(Path::new(&format!("{DEVICES}/{address}")), link(&directory));
        let group = format!("{GROUPS}/{group}");
        self.say(&format!("{group}/type"), "DMA-FQ\n");
        self.put(Path::new(&format!("{group}/devices/{address}")), link(&directory));
        self.put(Path::new(&format!("{directory}/iommu_group")), link(&group));
        if let Some(native) = function.native {
            self.natives.insert(address.to_owned(), native.to_owned());
        }
    }

    /// `device_attach`: by the override alone where there is one, and else by the ids.
    fn probe(&mut self, address: &str) {
        let wanted = self
            .text(&format!("{DEVICES}/{address}/driver_override"))
            .unwrap_or_default();
        let driver = match wanted.trim() {
            "(null)" | "" => self.natives.get(address).cloned(),
            only => Some(only.to_owned()),
        };
        let Some(driver) = driver.filter(|_| self.driver(address).is_none()) else {
            return;
        };
        let directory = format!("{DRIVERS}/{driver}");
        if self.entry(Path::new(&directory)).is_some() {
            self.put(
                Path::new(&format!("{DEVICES}/{address}/driver")),
                Entry::Link(directory.into()),
            );
        }
    }

    fn unbind(&mut self, driver: &str, address: &str) -> io::Result<()> {
        if self.driver(address).as_deref() != Some(driver) {
            return Err(Errno::NODEV.into());
        }
        let link = self.resolve(Path::new(&format!("{DEVICES}/{address}/driver")), false);
        self.remove(&link);
        Ok(())
    }

    /// `sriov_numvfs_store`.
    fn make_vfs(&mut self, physical: &str, text: &str) -> io::Result<()> {
        let count = |name: &str| {
            let text = self.text(&format!("{DEVICES}/{physical}/{name}")).unwrap_or_default();
            text.trim().parse::<u32>().unwrap_or(0)
        };
        let (now, total) = (count("sriov_numvfs"), count("sriov_totalvfs"));
        let probes = count("sriov_drivers_autoprobe") == 1;
        let wanted: u32 = text.trim().parse().map_err(|_| Errno::INVAL)?;
        match (now, wanted) {
            (now, wanted) if now == wanted => return Ok(()),
            _ if wanted > total => return Err(Errno::RANGE.into()),
            _ if self.driver(physical).as_deref() != Some("igb") => return Err(Errno::NOENT.into()),
            (1.., 1..) => return Err(Errno::BUSY.into()),
            _ => (),
        }
        for number in 0..now.max(wanted) {
            let address = format!("{}10.{number}", physical.trim_end_matches("00.0"));
            let link = format!("{DEVICES}/{physical}/virtfn{number}");
            if wanted == 0 {
                let directory = self.resolve(Path::new(&format!("{DEVICES}/{address}")), true);
                let group = self.resolve(Path::new(&format!("{DEVICES}/{address}/iommu_group")), true);
                let own = self.resolve(Path::new(&link), false);
                for path in [&directory, &group, &own, Path::new(&format!("{DEVICES}/{address}"))] {
                    self.remove(path);
                }
                continue;
            }
            self.add(&Function {
                address: &address,
                behind: None,
                ids: ["0x020000", "0x8086", "0x10ca"],
                native: Some("igbvf"),
                group: 100 + number,
                resets: "flr",
            });
            let device = |address: &str| Entry::Link(format!("{DEVICES}/{address}").into());
            self.put(Path::new(&link), device(&address));
            self.put(Path::new(&format!("{DEVICES}/{address}/physfn")), device(physical));
            if probes {
                self.probe(&address);
            }
        }
        self.say(&format!("{DEVICES}/{physical}/sriov_numvfs"), format!("{wanted}\n"));
        Ok(())
    }

    fn reset(&mut self, address: &str) -> io::Result<()> {
        let methods = self
            .text(&format!("{DEVICES}/{address}/reset_method"))
            .unwrap_or_default();
        if methods.trim().is_empty() {
            return Err(Errno::NOTTY.into());
        }
        *self.resets.entry(address.to_owned()).or_default() += 1;
        Ok(())
    }

    fn write(&mut self, path: &Path, text: &str) -> io::Result<()> {
        let path = self.resolve(path, true);
        if !matches!(self.tree.get(&path), Some(Entry::File(_))) {
            return Err(Errno::NOENT.into());
        }
        let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let (attribute, owner) = (name(&path), path.parent().map(name).unwrap_or_default());
        let word = text.trim();
        match attribute.as_str() {
            "unbind" => self.unbind(&owner, word),
            "drivers_probe" => {
                match self.entry(Path::new(&format!("{DEVICES}/{word}"))) {
                    None => return Err(Errno::NODEV.into()),
                    Some(_) => self.probe(word),
                }
                Ok(())
            }
            "driver_override" => {
                let shown = if word.is_empty() { "(null)" } else { word };
                self.tree.insert(path, Entry::File(format!("{shown}\n")));
                Ok(())
            }
            "sriov_numvfs" => self.make_vfs(&owner, word),
            "reset" => self.reset(&owner),
            _ => {
                self.tree.insert(path, Entry::File(format!("{word}\n")));
                Ok(())
            }
        }
    }
}

impl Files for Kernel {
    fn open(&self, path: &Path) -> io::Result<Box<dyn BufRead>> {
        match self.lock().entry(path) {
            Some(Entry::File(text)) => Ok(Box::new(Cursor::new(text.clone().into_bytes()))),
            Some(_) => Err(Errno::ISDIR.into()),
            None => Err(Errno::NOENT.into()),
        }
    }

    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        let hook = self.lock().hook.clone();
        if let Some(hook) = hook {
            hook(path, text)?;
        }
        self.lock().write(path, text)
    }

    fn link(&self, path: &Path) -> io::Result<PathBuf> {
        let state = self.lock();
        match state.tree.get(&state.resolve(path, false)) {
            Some(Entry::Link(to)) => Ok(to.clone()),
            Some(_) => Err(Errno::INVAL.into()),
            None => Err(Errno::NOENT.into()),
        }
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        let state = self.lock();
        let path = state.resolve(path, true);
        if !matches!(state.tree.get(&path), Some(Entry::Directory)) {
            return Err(Errno::NOENT.into());
        }
        let below = state.tree.keys().filter(|other| other.parent() == Some(&path));
        Ok(below
            .filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned()))
            .collect())
    }

    fn is_claimed(&self, device: &Path) -> io::Result<bool> {
        Ok(self.lock().claimed.contains(device))
    }

    fn device_number(&self, path: &Path) -> io::Result<Option<DeviceNumber>> {
        match self.lock().entry(path) {
            Some(Entry::Device(number)) => Ok(Some(*number)),
            Some(_) => Ok(None),
            None => Err(Errno::NOENT.into()),
        }
    }
}
