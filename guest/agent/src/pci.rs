//! Functions that come to the machine's PCI bus and leave it, by sysfs (Documentation/ABI/testing/sysfs-bus-pci). A machine of ours
//! has no hot-plug controller: its host says when to look. Does not know what a function is for.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use agent_api::{PciDevice, PciRequest};

use crate::Error;

const BUS: &str = "/sys/bus/pci";

/// Between two looks for what a driver makes.
const PAUSE: Duration = Duration::from_millis(5);

/// Where the names are that a driver gives: directories right below the function's, and one further below for controllers.
const DISKS: &str = "block";
const NETWORK: &str = "net";
const CONTROLLERS: &str = "nvme";

/// Base classes (PCI Code and ID Assignment) of functions whose drivers make something with a name.
const STORAGE: &str = "0x01";
const INTERFACE: &str = "0x02";

/// Does what is asked; the function as it is then.
pub(crate) fn answer(request: &PciRequest) -> Result<Option<PciDevice>, Error> {
    Bus(BUS.into()).answer(request)
}

struct Bus(PathBuf);

impl Bus {
    fn answer(&self, request: &PciRequest) -> Result<Option<PciDevice>, Error> {
        match request {
            PciRequest::Add { address, wait_ms } => self.add(address, Duration::from_millis(u64::from(*wait_ms))),
            PciRequest::Remove { address } => self.remove(address),
        }
    }

    fn add(&self, address: &str, wait: Duration) -> Result<Option<PciDevice>, Error> {
        let directory = self.directory(address)?;
        // Linux looks at every slot, and takes those that it does not know; drivers may go on beside it.
        write(&self.0.join("rescan"))?;
        if !directory.exists() {
            return Err(Error::Refused(format!(
                "Linux in the guest finds no PCI function {address}: its kernel log (`dmesg`) may say why"
            )));
        }
        let begun = Instant::now();
        loop {
            let device = describe(&directory, address)?;
            if !is_awaited(&device) || begun.elapsed() >= wait {
                return Ok(Some(device));
            }
            thread::sleep(PAUSE);
        }
    }

    fn remove(&self, address: &str) -> Result<Option<PciDevice>, Error> {
        let directory = self.directory(address)?;
        match directory.exists() {
            // Returns when its driver has let go of it.
            true => write(&directory.join("remove"))?,
            false => return Ok(None),
        }
        match directory.exists() {
            true => describe(&directory, address).map(Some),
            false => Ok(None),
        }
    }

    fn directory(&self, address: &str) -> Result<PathBuf, Error> {
        // A name that is none would lead elsewhere.
        match address
            .bytes()
            .all(|byte| byte.is_ascii_hexdigit() || b":.".contains(&byte))
            && address.contains(':')
        {
            true => Ok(self.0.join("devices").join(address)),
            false => Err(Error::Refused(format!(
                "`{address}` is no address of a PCI function: one is like 0000:00:05.0"
            ))),
        }
    }
}

fn write(path: &Path) -> Result<(), Error> {
    fs::write(path, "1").map_err(Error::system(format!("writing to {}", path.display())))
}

/// Whether its driver has yet to name it.
fn is_awaited(device: &PciDevice) -> bool {
    let class = device.class.as_str();
    device.names.is_empty() && (class.starts_with(STORAGE) || class.starts_with(INTERFACE))
}

fn describe(directory: &Path, address: &str) -> Result<PciDevice, Error> {
    let class = directory.join("class");
    let class = fs::read_to_string(&class).map_err(Error::system(format!("reading {}", class.display())))?;
    let driver = fs::read_link(directory.join("driver")).ok();
    let driver = driver.as_deref().and_then(Path::file_name);
    let mut names = Vec::new();
    for kind in [DISKS, NETWORK] {
        names.extend(entries(&directory.join(kind))?);
    }
    // Disks of a controller: nvme/nvme0/nvme0n1; and those of a virtio function: virtio0/net/eth0.
    for below in entries(&directory.join(CONTROLLERS))? {
        let disks = entries(&directory.join(CONTROLLERS).join(&below))?;
        names.extend(disks.into_iter().filter(|name| is_disk(name)));
    }
    for bus in entries(directory)?.iter().filter(|name| name.starts_with("virtio")) {
        for kind in [DISKS, NETWORK] {
            names.extend(entries(&directory.join(bus).join(kind))?);
        }
    }
    names.sort();
    Ok(PciDevice {
        address: address.to_owned(),
        class: class.trim().to_owned(),
        driver: driver.map(|name| name.to_string_lossy().into_owned()),
        names,
    })
}

/// A name of an NVMe namespace, `nvme0n1`, and not of a further path to one, `nvme0c0n1`.
fn is_disk(name: &str) -> bool {
    let numbers = name.strip_prefix("nvme").and_then(|rest| rest.split_once('n'));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    numbers.is_some_and(|(controller, disk)| is_number(controller) && is_number(disk))
}

/// The names in a directory; none where there is no such.
fn entries(directory: &Path) -> Result<Vec<String>, Error> {
    let failed = || Error::system(format!("reading {}", directory.display()));
    match fs::read_dir(directory) {
        Ok(found) => found
            .map(|entry| Ok(entry.map_err(failed())?.file_name().to_string_lossy().into_owned()))
            .collect(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(failed()(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    const ADDRESS: &str = "0000:00:05.0";

    fn bus(class: &str) -> (tempfile::TempDir, Bus) {
        let directory = tempfile::tempdir().unwrap();
        let bus = Bus(directory.path().to_owned());
        let function = bus.directory(ADDRESS).unwrap();
        fs::create_dir_all(&function).unwrap();
        fs::write(function.join("class"), format!("{class}\n")).unwrap();
        (directory, bus)
    }

    fn add(wait_ms: u32) -> PciRequest {
        PciRequest::Add {
            address: ADDRESS.to_owned(),
            wait_ms,
        }
    }

    #[test]
    fn what_a_driver_makes_is_named() {
        let (_directory, bus) = bus("0x010802");
        let function = bus.directory(ADDRESS).unwrap();
        fs::create_dir_all(function.join("nvme/nvme0/nvme0n1")).unwrap();
        fs::create_dir_all(function.join("nvme/nvme0/nvme0c0n1")).unwrap();
        fs::create_dir_all(function.join("nvme/nvme0/hwmon1")).unwrap();
        symlink("../../../bus/pci/drivers/nvme", function.join("driver")).unwrap();
        let found = bus.answer(&add(0)).unwrap().unwrap();
        assert_eq!(fs::read_to_string(bus.0.join("rescan")).unwrap(), "1");
        assert_eq!(
            (found.class.as_str(), found.driver.as_deref(), found.names.as_slice()),
            ("0x010802", Some("nvme"), ["nvme0n1".to_owned()].as_slice())
        );
        let (_directory, bus) = self::bus("0x020000");
        let function = bus.directory(ADDRESS).unwrap();
        fs::create_dir_all(function.join("virtio3/net/eth1")).unwrap();
        assert_eq!(bus.answer(&add(0)).unwrap().unwrap().names, ["eth1"]);
    }

    #[test]
    fn a_driver_is_waited_for_where_it_will_make_something() {
        let (_directory, bus) = bus("0x010802");
        let disk = bus.directory(ADDRESS).unwrap().join("nvme/nvme0/nvme0n1");
        let late = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            fs::create_dir_all(disk).unwrap();
        });
        assert_eq!(bus.answer(&add(20_000)).unwrap().unwrap().names, ["nvme0n1"]);
        late.join().unwrap();
        // And for no longer than that; not at all for a function of another kind.
        let (_directory, bus) = self::bus("0x010802");
        assert!(bus.answer(&add(20)).unwrap().unwrap().names.is_empty());
        let (_directory, bus) = self::bus("0x00ff00");
        let begun = Instant::now();
        assert!(bus.answer(&add(60_000)).unwrap().unwrap().names.is_empty());
        assert!(begun.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn a_function_that_is_not_there_is_refused_and_one_that_has_gone_is_not() {
        let (_directory, bus) = bus("0x010802");
        fs::remove_dir_all(bus.directory(ADDRESS).unwrap()).unwrap();
        let refused = bus.answer(&add(0)).unwrap_err().to_string();
        assert!(
            refused.contains("0000:00:05.0") && refused.contains("dmesg"),
            "{refused}"
        );
        let remove = PciRequest::Remove {
            address: ADDRESS.to_owned(),
        };
        assert_eq!(bus.answer(&remove).unwrap(), None);
        for address in ["..", "../0000:00:05.0", "", "slots"] {
            assert!(bus.directory(address).is_err(), "{address}");
        }
    }
}
