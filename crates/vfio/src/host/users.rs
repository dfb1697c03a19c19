//! Who has a function open by a file of VFIO's: the kernel takes nothing from them, and waits. Finds processes by the descriptors that proc
//! shows, and ends none. A function that was opened by its group, whose file was closed since, shows in neither.

use std::collections::BTreeSet;
use std::path::PathBuf;

use base::PciAddress;

use super::error::DeviceError;
use super::files::{DeviceNumber, Sysfs};
use super::inventory::{self, look};
use super::own_file;

/// A file of VFIO's that is open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenFile {
    /// Which, such as `/dev/vfio/devices/vfio0`.
    pub path: PathBuf,
    /// Who has it open; none where they are of a PID namespace that is not seen from here.
    pub users: Vec<User>,
}

/// A process.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct User {
    /// Its number.
    pub process: u32,
    /// What it is called (proc(5), `/proc/pid/comm`).
    pub name: String,
}

/// The file by which a program has a function open, if one does: the function's own, for iommufd, or that of its group.
///
/// # Errors
/// sysfs or proc cannot be read, or a file cannot be opened.
pub fn open_file(sysfs: &Sysfs, address: PciAddress) -> Result<Option<OpenFile>, DeviceError> {
    let Some(function) = look(sysfs, address)?.filter(|its| its.driver.as_deref().is_some_and(inventory::is_vfio))
    else {
        return Ok(None);
    };
    // Whoever has the function's own file keeps others from the group's.
    if let Some(name) = own_file(sysfs, address)? {
        let path = sysfs.dev(&format!("vfio/devices/{name}"));
        // Any number of programs can have it open.
        let users = users(sysfs, &path)?;
        if !users.is_empty() {
            return Ok(Some(OpenFile { path, users }));
        }
    }
    let Some(group) = function.group else { return Ok(None) };
    let path = sysfs.dev(&format!("vfio/{}", group.number));
    let users = users(sysfs, &path)?;
    // One program at a time can.
    let is_open = !users.is_empty() || sysfs.is_claimed(&path)?;
    Ok(is_open.then_some(OpenFile { path, users }))
}

/// The processes that have a device file open, by whatever name: containers have files of their own for it.
fn users(sysfs: &Sysfs, path: &std::path::Path) -> Result<Vec<User>, DeviceError> {
    let Some(wanted) = sysfs.device_number(path)? else {
        return Ok(Vec::new());
    };
    let mut found = BTreeSet::new();
    for name in sysfs.list(&sysfs.proc(""))? {
        let Ok(process) = name.parse() else { continue };
        if has_open(sysfs, process, wanted) {
            // One that has ended since has no name.
            let name = sysfs.text(&sysfs.proc(&format!("{process}/comm")));
            let name = name.ok().flatten().unwrap_or_default();
            found.insert(User { process, name });
        }
    }
    Ok(found.into_iter().collect())
}

/// What cannot be looked at is no device file: a process that has ended meanwhile, or a file whose server is gone.
fn has_open(sysfs: &Sysfs, process: u32, wanted: DeviceNumber) -> bool {
    let directory = sysfs.proc(&format!("{process}/fd"));
    let descriptors = sysfs.list(&directory).unwrap_or_default();
    descriptors.into_iter().any(|descriptor| {
        sysfs
            .device_number(&directory.join(descriptor))
            .is_ok_and(|its| its == Some(wanted))
    })
}

#[cfg(test)]
mod tests {
    use super::super::binding::{BindingRecord, Goal, carry_out};
    use super::super::simulated::Kernel;
    use super::*;

    fn bound() -> (Kernel, PciAddress) {
        let (kernel, address) = (Kernel::typical(), "0000:01:00.0".parse().unwrap());
        let record = BindingRecord::take(&kernel.sysfs(), address).unwrap();
        carry_out(&kernel.sysfs(), &record, Goal::Bound, |_| Ok::<(), DeviceError>(())).unwrap();
        (kernel, address)
    }

    fn makes_own_file(kernel: &Kernel) {
        kernel.set("sys/bus/pci/devices/0000:01:00.0/vfio-dev/vfio3/dev", "511:3\n");
        kernel.device("dev/vfio/devices/vfio3", "511:3");
    }

    fn process(kernel: &Kernel, number: u32, name: &str, device: &str) {
        kernel.set(&format!("proc/{number}/comm"), &format!("{name}\n"));
        kernel.set(&format!("proc/{number}/fd/0"), "");
        // As a container has it.
        kernel.device(&format!("container/{number}/device"), device);
        kernel.link(&format!("proc/{number}/fd/17"), &format!("container/{number}/device"));
    }

    fn found(kernel: &Kernel, address: PciAddress) -> Option<(String, Vec<(u32, String)>)> {
        let file = open_file(&kernel.sysfs(), address).unwrap()?;
        let users = file.users.into_iter().map(|user| (user.process, user.name));
        Some((file.path.display().to_string(), users.collect()))
    }

    #[test]
    fn a_group_that_a_program_has_open_is_told() {
        let (kernel, address) = bound();
        assert_eq!(found(&kernel, address), None);
        kernel.device("dev/vfio/1", "240:1");
        // Of a PID namespace that is not seen.
        kernel.claim("dev/vfio/1");
        assert_eq!(found(&kernel, address), Some(("/dev/vfio/1".into(), vec![])));
        process(&kernel, 4711, "qemu-system-x86", "240:1");
        let wanted = vec![(4711, "qemu-system-x86".to_owned())];
        assert_eq!(found(&kernel, address), Some(("/dev/vfio/1".into(), wanted)));
    }

    #[test]
    fn a_function_whose_own_file_is_open_is_told_by_that_with_groups_and_without() {
        for has_groups in [false, true] {
            let (kernel, address) = bound();
            makes_own_file(&kernel);
            if has_groups {
                kernel.device("dev/vfio/1", "240:1");
            }
            process(&kernel, 12, "another", "511:4");
            assert_eq!(found(&kernel, address), None);
            process(&kernel, 4711, "cloud-hyperviso", "511:3");
            if has_groups {
                kernel.claim("dev/vfio/1");
            }
            let wanted = vec![(4711, "cloud-hyperviso".to_owned())];
            let wanted = Some(("/dev/vfio/devices/vfio3".to_owned(), wanted));
            assert_eq!(found(&kernel, address), wanted, "with groups: {has_groups}");
        }
    }

    #[test]
    fn one_that_is_not_vfios_is_nobodys_to_have_open() {
        let kernel = Kernel::typical();
        kernel.claim("dev/vfio/1");
        assert_eq!(found(&kernel, "0000:01:00.0".parse().unwrap()), None);
    }

    #[test]
    fn descriptors_of_this_host_are_told_by_what_they_lead_to() {
        let sysfs = Sysfs::of_host();
        let open = std::fs::File::open("/dev/zero").unwrap();
        let users = users(&sysfs, "/dev/zero".as_ref()).unwrap();
        assert!(users.iter().any(|user| user.process == std::process::id()), "{users:?}");
        drop(open);
    }
}
