//! Virtual functions of a physical one (SR-IOV; Linux, Documentation/PCI/pci-iov-howto.rst): made so that no driver of the host takes them. As
//! with a binding, how it was is a record that the caller keeps before the first write. Knows not whether anybody uses those that there are.

use base::PciAddress;
use serde::{Deserialize, Serialize};

use super::binding::NOBODY;
use super::error::DeviceError;
use super::files::Sysfs;
use super::inventory::{driver, look, sriov};

/// How a physical function's virtual ones were before they were changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VfRecord {
    /// The physical function.
    pub physical: PciAddress,
    /// How many there were.
    pub count: u32,
    /// New ones came to the host's drivers by themselves.
    pub autoprobe: bool,
}

impl VfRecord {
    /// Of a physical function as it is now, of which `wanted` are to be made.
    ///
    /// # Errors
    /// There is no such function, it can make none or not so many, or sysfs cannot be read.
    pub fn take(sysfs: &Sysfs, physical: PciAddress, wanted: u32) -> Result<Self, DeviceError> {
        let function = look(sysfs, physical)?.ok_or(DeviceError::NotFound(physical))?;
        let sriov = function.sriov.ok_or(DeviceError::NoSrIov(physical))?;
        if wanted > sriov.total {
            return Err(DeviceError::TooManyVfs {
                address: physical,
                total: sriov.total,
                wanted,
            });
        }
        let autoprobe = sysfs.text(&sysfs.function(physical, AUTOPROBE))?;
        Ok(Self {
            physical,
            count: sriov.used,
            autoprobe: autoprobe.is_none_or(|text| text != "0"),
        })
    }
}

const AUTOPROBE: &str = "sriov_drivers_autoprobe";
const COUNT: &str = "sriov_numvfs";

/// Has a physical function have `count` virtual ones, none of which comes to a driver of the host. Where it has others, these go first.
/// `before` is called before each write, as in [`super::binding::carry_out`]; the record was kept before. Whether new ones come to drivers is said again as
/// before, as the host's administrator has it.
///
/// # Errors
/// The kernel or the function's driver refuses, or `before` does.
pub fn make_vfs<E: From<DeviceError>>(
    sysfs: &Sysfs,
    record: &VfRecord,
    count: u32,
    mut before: impl FnMut() -> Result<(), E>,
) -> Result<(), E> {
    let physical = record.physical;
    let mut write = |name: &str, value: u32| -> Result<(), E> {
        before()?;
        Ok(sysfs.write(&sysfs.function(physical, name), &value.to_string())?)
    };
    let used = sriov(sysfs, physical)?.map_or(0, |sriov| sriov.used);
    if used != count {
        // Only from none (Linux, `sriov_numvfs_store`).
        if used > 0 {
            write(COUNT, 0)?;
        }
        if count > 0 {
            if record.autoprobe {
                write(AUTOPROBE, 0)?;
            }
            write(COUNT, count)?;
        }
    }
    put_autoprobe_back(sysfs, record, before)
}

/// Says again what a record has of [`make_vfs`]: all that whoever has died in it can have left. The virtual functions stay as they are.
///
/// # Errors
/// The kernel refuses, or `before` does.
pub fn put_autoprobe_back<E: From<DeviceError>>(
    sysfs: &Sysfs,
    record: &VfRecord,
    before: impl FnOnce() -> Result<(), E>,
) -> Result<(), E> {
    let path = sysfs.function(record.physical, AUTOPROBE);
    let wanted = if record.autoprobe { "1" } else { "0" };
    match sysfs.text(&path)? {
        Some(text) if text != wanted => {
            before()?;
            Ok(sysfs.write(&path, wanted)?)
        }
        _ => Ok(()),
    }
}

/// Says which driver makes no virtual functions, where that is what an error of [`make_vfs`] means.
pub fn explain_vfs(sysfs: &Sysfs, physical: PciAddress, error: DeviceError) -> DeviceError {
    match &error {
        DeviceError::File { path, source, .. }
            if path.ends_with(COUNT) && source.kind() == std::io::ErrorKind::NotFound =>
        {
            match driver(sysfs, physical) {
                Ok(driver) => DeviceError::NoVfDriver {
                    address: physical,
                    driver: driver.unwrap_or_else(|| NOBODY.to_owned()),
                },
                Err(_) => error,
            }
        }
        _ => error,
    }
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::host::binding::{BindingRecord, Goal, carry_out};
    use crate::host::inventory::virtual_functions;
    use crate::host::simulated::Kernel;

    fn address(text: &str) -> PciAddress {
        text.parse().unwrap()
    }

    fn go(kernel: &Kernel, record: &BindingRecord, goal: Goal) -> Result<(), DeviceError> {
        carry_out(&kernel.sysfs(), record, goal, |_| Ok(()))
    }

    fn state(kernel: &Kernel, address: PciAddress) -> (Option<String>, Option<String>) {
        (kernel.driver(address), kernel.driver_override(address))
    }

    #[test]
    fn virtual_functions_come_without_drivers_and_go() {
        let (kernel, nic) = (Kernel::typical(), address("0000:02:00.0"));
        let sysfs = kernel.sysfs();
        let make = |count: u32| -> Result<Vec<PciAddress>, DeviceError> {
            let record = VfRecord::take(&sysfs, nic, count)?;
            make_vfs(&sysfs, &record, count, || Ok::<(), DeviceError>(()))?;
            virtual_functions(&sysfs, nic)
        };
        let vfs = make(3).unwrap();
        assert_eq!(vfs.len(), 3);
        for vf in &vfs {
            assert_eq!(kernel.driver(*vf), None, "the host has taken {vf}");
            assert_eq!(look(&sysfs, *vf).unwrap().unwrap().physical, Some(nic));
            let record = BindingRecord::take(&sysfs, *vf).unwrap();
            go(&kernel, &record, Goal::Bound).unwrap();
            go(&kernel, &record, Goal::GivenBack).unwrap();
            assert_eq!(state(&kernel, *vf), (None, None));
        }
        assert_eq!(
            sysfs.text(&sysfs.function(nic, AUTOPROBE)).unwrap().as_deref(),
            Some("1")
        );
        assert_eq!(make(2).unwrap().len(), 2);
        assert_eq!(make(0).unwrap(), []);
        assert!(matches!(
            make(8),
            Err(DeviceError::TooManyVfs {
                total: 7,
                wanted: 8,
                ..
            })
        ));
        let none = VfRecord::take(&sysfs, address("0000:01:00.0"), 1).unwrap_err();
        assert!(matches!(none, DeviceError::NoSrIov(_)), "{none}");
    }

    #[test]
    fn whoever_dies_while_virtual_functions_are_made_leaves_nothing_that_cannot_be_put_back() {
        for number in 0..5 {
            let (kernel, nic) = (Kernel::typical(), address("0000:02:00.0"));
            let sysfs = kernel.sysfs();
            let record = VfRecord::take(&sysfs, nic, 2).unwrap();
            kernel.refuse_from(number);
            let made = make_vfs(&sysfs, &record, 2, || Ok::<(), DeviceError>(()));
            assert_eq!(made.is_err(), number < 3, "{number}");
            kernel.refuse_nothing();
            put_autoprobe_back(&sysfs, &record, || Ok::<(), DeviceError>(())).unwrap();
            assert_eq!(
                sysfs.text(&sysfs.function(nic, AUTOPROBE)).unwrap().as_deref(),
                Some("1"),
                "{number}"
            );
            make_vfs(&sysfs, &record, 2, || Ok::<(), DeviceError>(())).unwrap();
            assert_eq!(virtual_functions(&sysfs, nic).unwrap().len(), 2);
        }
    }

    #[test]
    fn a_driver_that_makes_none_is_named() {
        let (kernel, nic) = (Kernel::typical(), address("0000:02:00.0"));
        let sysfs = kernel.sysfs();
        go(&kernel, &BindingRecord::take(&sysfs, nic).unwrap(), Goal::Bound).unwrap();
        let record = VfRecord::take(&sysfs, nic, 1).unwrap();
        let error = make_vfs(&sysfs, &record, 1, || Ok::<(), DeviceError>(())).unwrap_err();
        let error = explain_vfs(&sysfs, nic, error).to_string();
        assert!(error.contains("(vfio-pci)"), "{error}");
    }
}
