//! PCI functions to vfio-pci and back, by `driver_override` and `drivers_probe` (Linux, Documentation/ABI/testing/sysfs-bus-pci). Never by
//! `new_id`, which would take every other function of the same kind along.
//!
//! ```text
//!   the original driver ──unbind──▶ none ──driver_override=vfio-pci, drivers_probe──▶ vfio-pci
//!                       ◀──drivers_probe── none ◀──driver_override as before── ◀──unbind──┘
//! ```
//! Whoever binds keeps a [`BindingRecord`] before the first step. With it and what sysfs says, [`plan`] tells what is left to do in either
//! direction, wherever the one who was at it has died: each step is only planned where it is needed, so that a plan that was carried out
//! has nothing left. Nothing of a record is kept here.

use base::PciAddress;
use serde::{Deserialize, Serialize};

use super::error::DeviceError;
use super::files::Sysfs;
use super::inventory::{VFIO_PCI, driver, driver_override, look};

/// What nobody is called where a driver is shown.
pub(super) const NOBODY: &str = "nobody";

/// How a function was before it was bound.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BindingRecord {
    /// Which.
    pub address: PciAddress,
    /// Who had it.
    pub driver: Original,
    /// The only driver that it might come to, if there was one.
    pub driver_override: Option<String>,
}

/// Who had a function before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Original {
    /// This driver.
    Driver(String),
    /// Nobody.
    Nobody,
    /// Nobody knows any more: the kernel finds one.
    Unknown,
}

impl BindingRecord {
    /// Of a function as it is now.
    ///
    /// # Errors
    /// There is no such function, or sysfs cannot be read.
    pub fn take(sysfs: &Sysfs, address: PciAddress) -> Result<Self, DeviceError> {
        let function = look(sysfs, address)?.ok_or(DeviceError::NotFound(address))?;
        Ok(Self {
            address,
            driver: function.driver.map_or(Original::Nobody, Original::Driver),
            driver_override: function.driver_override,
        })
    }

    /// Of a function that was bound, and whose record is lost.
    pub fn lost(address: PciAddress) -> Self {
        Self {
            address,
            driver: Original::Unknown,
            driver_override: None,
        }
    }
}

/// Whose a function is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    /// vfio-pci's.
    Bound,
    /// Whose it was.
    GivenBack,
}

/// One write to sysfs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Take it from its driver. With vfio-pci this waits until nobody has it open.
    Unbind {
        /// Which.
        address: PciAddress,
        /// From whom.
        driver: String,
    },
    /// Name the only driver that it may come to, or none.
    Override {
        /// Which.
        address: PciAddress,
        /// The driver.
        driver: Option<String>,
    },
    /// Let the kernel find its driver.
    Probe {
        /// Which.
        address: PciAddress,
        /// Who has to have it then; whoever the kernel finds, where not given.
        driver: Option<String>,
    },
}

impl Step {
    /// Takes it.
    ///
    /// # Errors
    /// The kernel refuses, or the function has come to another driver.
    pub fn apply(&self, sysfs: &Sysfs) -> Result<(), DeviceError> {
        match self {
            Self::Unbind { address, driver } => {
                let path = sysfs.sys(&format!("bus/pci/drivers/{driver}/unbind"));
                sysfs.write(&path, &address.to_string())
            }
            Self::Override { address, driver } => {
                // A line end where there is none: the kernel is not told of a write of no bytes.
                let text = format!("{}\n", driver.as_deref().unwrap_or_default());
                sysfs.write(&sysfs.function(*address, "driver_override"), &text)
            }
            Self::Probe {
                address,
                driver: wanted,
            } => {
                let path = sysfs.sys("bus/pci/drivers_probe");
                sysfs.write(&path, &address.to_string())?;
                // A driver that refuses the function makes no error of the write.
                let found = driver(sysfs, *address)?;
                match wanted {
                    Some(wanted) if found.as_ref() != Some(wanted) => Err(DeviceError::OtherDriver {
                        address: *address,
                        wanted: wanted.clone(),
                        found: found.unwrap_or_else(|| NOBODY.to_owned()),
                    }),
                    _ => Ok(()),
                }
            }
        }
    }
}

/// Whose a function is to be at the end of a plan.
#[derive(PartialEq, Eq)]
enum Wanted {
    This(String),
    Nobody,
    /// Anybody's but vfio-pci's.
    Any,
}

/// What is left to do until a function is whose it is to be; nothing where it is.
///
/// # Errors
/// sysfs cannot be read, or the function is gone that is to be bound.
pub fn plan(sysfs: &Sysfs, record: &BindingRecord, goal: Goal) -> Result<Vec<Step>, DeviceError> {
    let address = record.address;
    let Some(function) = look(sysfs, address)? else {
        return match goal {
            Goal::Bound => Err(DeviceError::NotFound(address)),
            // It has nothing any more that could be put back.
            Goal::GivenBack => Ok(Vec::new()),
        };
    };
    let driver = function.driver.clone();
    let is_vfio = driver.as_deref() == Some(VFIO_PCI);
    let (only, wanted) = match (goal, &record.driver) {
        (Goal::Bound, _) => (Some(VFIO_PCI.to_owned()), Wanted::This(VFIO_PCI.to_owned())),
        (Goal::GivenBack, Original::Driver(driver)) => (record.driver_override.clone(), Wanted::This(driver.clone())),
        (Goal::GivenBack, Original::Nobody) => (record.driver_override.clone(), Wanted::Nobody),
        (Goal::GivenBack, Original::Unknown) => (None, Wanted::Any),
    };
    let is_there = match &wanted {
        Wanted::This(wanted) => driver.as_ref() == Some(wanted),
        Wanted::Nobody => driver.is_none(),
        Wanted::Any => driver.is_some() && !is_vfio,
    };
    // What somebody has given to another driver meanwhile may be in use there.
    let is_anothers = goal == Goal::GivenBack && driver.is_some() && !is_vfio;
    let mut steps = Vec::new();
    if !is_there
        && !is_anothers
        && let Some(driver) = driver
    {
        steps.push(Step::Unbind { address, driver });
    }
    if function.driver_override != only {
        steps.push(Step::Override { address, driver: only });
    }
    if !is_there && !is_anothers && wanted != Wanted::Nobody {
        let driver = match wanted {
            Wanted::This(driver) => Some(driver),
            Wanted::Nobody | Wanted::Any => None,
        };
        steps.push(Step::Probe { address, driver });
    }
    Ok(steps)
}

/// Does what is left to do. `before` is called before each step, and a step is not taken where that fails.
///
/// # Errors
/// Those of [`plan`], of a step, or of `before`; what was done until then stays, and the same call goes on with the rest.
pub fn carry_out<E: From<DeviceError>>(
    sysfs: &Sysfs,
    record: &BindingRecord,
    goal: Goal,
    mut before: impl FnMut(&Step) -> Result<(), E>,
) -> Result<(), E> {
    for step in plan(sysfs, record, goal)? {
        before(&step)?;
        step.apply(sysfs)?;
    }
    Ok(())
}

/// A function is vfio-pci's now.
///
/// # Errors
/// sysfs cannot be read.
pub fn is_bound(sysfs: &Sysfs, address: PciAddress) -> Result<bool, DeviceError> {
    Ok(driver(sysfs, address)?.as_deref() == Some(VFIO_PCI))
}

/// Something is left of a binding: its driver, or that it may come to no other.
///
/// # Errors
/// sysfs cannot be read.
pub fn has_trace(sysfs: &Sysfs, address: PciAddress) -> Result<bool, DeviceError> {
    Ok(is_bound(sysfs, address)? || driver_override(sysfs, address)?.as_deref() == Some(VFIO_PCI))
}

/// Resets a function that nobody has open: what a guest has left in it is gone.
///
/// # Errors
/// The kernel knows no way to, or none that has worked.
pub fn reset(sysfs: &Sysfs, address: PciAddress) -> Result<(), DeviceError> {
    let function = look(sysfs, address)?.ok_or(DeviceError::NotFound(address))?;
    if function.reset_methods.is_empty() {
        return Err(DeviceError::NoReset(address));
    }
    sysfs.write(&sysfs.function(address, "reset"), "1")
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::host::simulated::Kernel;

    fn address(text: &str) -> PciAddress {
        text.parse().unwrap()
    }

    fn state(kernel: &Kernel, address: PciAddress) -> (Option<String>, Option<String>) {
        (kernel.driver(address), kernel.driver_override(address))
    }

    fn go(kernel: &Kernel, record: &BindingRecord, goal: Goal) -> Result<(), DeviceError> {
        carry_out(&kernel.sysfs(), record, goal, |_| Ok(()))
    }

    fn bound() -> (Option<String>, Option<String>) {
        (Some("vfio-pci".into()), Some("vfio-pci".into()))
    }

    #[test]
    fn a_function_is_bound_and_given_back_to_who_had_it() {
        for name in ["0000:01:00.0", "0000:00:02.0"] {
            let (kernel, address) = (Kernel::typical(), address(name));
            let before = state(&kernel, address);
            let record = BindingRecord::take(&kernel.sysfs(), address).unwrap();
            go(&kernel, &record, Goal::Bound).unwrap();
            assert_eq!(state(&kernel, address), bound(), "{name}");
            assert!(plan(&kernel.sysfs(), &record, Goal::Bound).unwrap().is_empty());
            go(&kernel, &record, Goal::Bound).unwrap();
            go(&kernel, &record, Goal::GivenBack).unwrap();
            assert_eq!(state(&kernel, address), before, "{name}");
            assert!(plan(&kernel.sysfs(), &record, Goal::GivenBack).unwrap().is_empty());
        }
    }

    #[test]
    fn one_that_was_vfios_before_stays_that() {
        let (kernel, address) = (Kernel::typical(), address("0000:01:00.0"));
        go(
            &kernel,
            &BindingRecord::take(&kernel.sysfs(), address).unwrap(),
            Goal::Bound,
        )
        .unwrap();
        let record = BindingRecord::take(&kernel.sysfs(), address).unwrap();
        assert!(plan(&kernel.sysfs(), &record, Goal::Bound).unwrap().is_empty());
        go(&kernel, &record, Goal::GivenBack).unwrap();
        assert_eq!(state(&kernel, address), bound());
        // Without a record it goes to whom the kernel finds.
        go(&kernel, &BindingRecord::lost(address), Goal::GivenBack).unwrap();
        assert_eq!(state(&kernel, address), (Some("nvme".into()), None));
    }

    #[test]
    fn wherever_somebody_dies_it_can_be_finished_and_undone() {
        let mut seen = 0;
        for (begun, number) in [Goal::Bound, Goal::GivenBack]
            .iter()
            .flat_map(|goal| (0..4).map(move |at| (*goal, at)))
        {
            for ended in [Goal::Bound, Goal::GivenBack] {
                let (kernel, address) = (Kernel::typical(), address("0000:01:00.0"));
                let before = state(&kernel, address);
                let record = BindingRecord::take(&kernel.sysfs(), address).unwrap();
                if begun == Goal::GivenBack {
                    go(&kernel, &record, Goal::Bound).unwrap();
                }
                kernel.refuse_from(number);
                seen += usize::from(go(&kernel, &record, begun).is_err());
                kernel.refuse_nothing();
                go(&kernel, &record, ended).unwrap();
                let wanted = if ended == Goal::Bound { bound() } else { before };
                assert_eq!(
                    state(&kernel, address),
                    wanted,
                    "{begun:?} dead at {number}, then {ended:?}"
                );
            }
        }
        // Three writes in either direction, each of which failed.
        assert_eq!(seen, 12);
    }

    #[test]
    fn a_driver_that_does_not_take_it_is_an_error() {
        let (kernel, address) = (Kernel::typical(), address("0000:01:00.0"));
        let record = BindingRecord::take(&kernel.sysfs(), address).unwrap();
        kernel.remove("sys/bus/pci/drivers/vfio-pci");
        let error = go(&kernel, &record, Goal::Bound).unwrap_err().to_string();
        assert!(error.contains("vfio-pci") && error.contains("nobody"), "{error}");
        go(&kernel, &record, Goal::GivenBack).unwrap();
        assert_eq!(state(&kernel, address), (Some("nvme".into()), None));
    }

    #[test]
    fn one_that_is_gone_has_nothing_to_be_given_back() {
        let (kernel, address) = (Kernel::typical(), address("0000:01:00.0"));
        let record = BindingRecord::take(&kernel.sysfs(), address).unwrap();
        kernel.remove("sys/bus/pci/devices/0000:01:00.0");
        go(&kernel, &record, Goal::GivenBack).unwrap();
        assert!(matches!(
            go(&kernel, &record, Goal::Bound),
            Err(DeviceError::NotFound(_))
        ));
        assert!(!has_trace(&kernel.sysfs(), address).unwrap());
    }

    #[test]
    fn no_step_is_taken_that_could_not_be_told_before() {
        let (kernel, address) = (Kernel::typical(), address("0000:01:00.0"));
        let record = BindingRecord::take(&kernel.sysfs(), address).unwrap();
        let refused = carry_out(&kernel.sysfs(), &record, Goal::Bound, |_| {
            Err(DeviceError::NoReset(address))
        });
        refused.unwrap_err();
        assert_eq!(state(&kernel, address), (Some("nvme".into()), None));
    }

    #[test]
    fn what_somebody_has_given_to_another_driver_is_not_taken_from_it() {
        let (kernel, address) = (Kernel::typical(), address("0000:01:00.0"));
        let record = BindingRecord {
            address,
            driver: Original::Nobody,
            driver_override: None,
        };
        go(&kernel, &record, Goal::GivenBack).unwrap();
        assert_eq!(state(&kernel, address), (Some("nvme".into()), None));
        // All that is left of a binding then is who it may come to next.
        let sysfs = kernel.sysfs();
        sysfs
            .write(&sysfs.function(address, "driver_override"), "vfio-pci")
            .unwrap();
        let other = BindingRecord {
            driver: Original::Driver("ahci".into()),
            ..record
        };
        go(&kernel, &other, Goal::GivenBack).unwrap();
        assert_eq!(state(&kernel, address), (Some("nvme".into()), None));
    }

    #[test]
    fn a_reset_is_the_kernels_and_needs_a_way() {
        let kernel = Kernel::typical();
        let sysfs = kernel.sysfs();
        reset(&sysfs, address("0000:01:00.0")).unwrap();
        assert_eq!(kernel.resets(address("0000:01:00.0")), 1);
        let error = reset(&sysfs, address("0000:00:02.0")).unwrap_err();
        assert!(matches!(error, DeviceError::NoReset(_)), "{error}");
    }
}
