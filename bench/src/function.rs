//! A PCI function of the host's that guests of a run are given: found, bound to vfio-pci while it is needed, and given back to whoever had
//! it. Knows Linux's files by `vfio::host`, and no guest.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use base::PciAddress;
use vfio::VfioError;
use vfio::host::binding::{BindingRecord, Goal, carry_out, is_bound};
use vfio::host::checks::{Terms, check};
use vfio::host::inventory::{self, PciFunction};
use vfio::host::users::open_file;
use vfio::host::{DeviceError, Sysfs, open_container, open_group};

use crate::class::run;
use crate::guard::Kept;

/// NVM Express (PCI Code and ID Assignment 1.11, base class 01h).
const NVME: u32 = 0x01_0802;

/// How long the kernel may take to close what a guest has had.
const PATIENCE: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(5);

/// One that is vfio-pci's while this lives.
pub(crate) struct Bound {
    sysfs: Sysfs,
    record: BindingRecord,
}

impl Bound {
    /// Takes the one that is wanted, or the host's NVMe disk.
    ///
    /// # Errors
    /// There is none, or something speaks against taking it, with all that does.
    pub(crate) fn take(wanted: Option<PciAddress>) -> Result<Self> {
        run("modprobe", &["vfio-pci"])?;
        Self::take_of(Sysfs::of_host(), wanted)
    }

    fn take_of(sysfs: Sysfs, wanted: Option<PciAddress>) -> Result<Self> {
        let found = choose(inventory::list(&sysfs)?, wanted)?;
        let address = found.address;
        check(&sysfs, &found, &Terms::default())?;
        if let Some(open) = open_file(&sysfs, address)? {
            let path = open.path.display();
            bail!(
                "{address} is in use: {path} is open; end whoever has it (`basalt device ls` names a sandbox), and run this again"
            );
        }
        let record = BindingRecord::take(&sysfs, address)?;
        if !is_bound(&sysfs, address)? {
            // Before the first write: whoever kills this run next leaves it to the guard.
            Kept::Function(record.clone()).tell(true);
        }
        let bound = Self { sysfs, record };
        carry_out(&bound.sysfs, &bound.record, Goal::Bound, |_| Ok::<(), DeviceError>(()))?;
        Ok(bound)
    }

    pub(crate) fn address(&self) -> PciAddress {
        self.record.address
    }

    /// Its group's file and an empty container, for one guest. The guest before may be on its way out still.
    ///
    /// # Errors
    /// Somebody else has the group, or the kernel refuses.
    pub(crate) fn open(&self) -> Result<(OwnedFd, OwnedFd)> {
        let begun = Instant::now();
        let group = loop {
            match open_group(&self.sysfs, self.address()) {
                Err(VfioError::InUse { .. }) if begun.elapsed() < PATIENCE => std::thread::sleep(PAUSE),
                other => break other?,
            }
        };
        Ok((group, open_container()?))
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        match give_back(&self.sysfs, &self.record) {
            Ok(()) => Kept::Function(self.record.clone()).tell(false),
            // The guard tries again when this run has ended.
            Err(error) => eprintln!("{} stays with vfio-pci for now: {error:#}", self.address()),
        }
    }
}

/// The one that is wanted, or the host's NVMe disk.
///
/// # Errors
/// There is none, or more than one.
pub(crate) fn find(wanted: Option<PciAddress>) -> Result<PciAddress> {
    Ok(choose(inventory::list(&Sysfs::of_host())?, wanted)?.address)
}

/// Gives one back to whoever had it.
///
/// # Errors
/// The kernel's.
pub(crate) fn give_back(sysfs: &Sysfs, record: &BindingRecord) -> Result<()> {
    carry_out(sysfs, record, Goal::GivenBack, |_| Ok::<(), DeviceError>(()))
        .with_context(|| format!("giving {} back (`basalt device unbind` does it)", record.address))
}

fn choose(all: Vec<PciFunction>, wanted: Option<PciAddress>) -> Result<PciFunction> {
    let mut fit = all.into_iter().filter(|function| match wanted {
        Some(wanted) => function.address == wanted,
        None => function.identity.class == NVME,
    });
    let first = fit.next();
    let more: Vec<String> = fit.map(|function| function.address.to_string()).collect();
    match (first, wanted) {
        (Some(first), _) => {
            ensure!(
                more.is_empty(),
                "the host has several NVMe disks, {} and {}: say which by --device",
                first.address,
                more.join(", ")
            );
            Ok(first)
        }
        (None, Some(wanted)) => bail!("this host has no PCI function {wanted}: `basalt device ls` shows what it has"),
        (None, None) => bail!(
            "this host has no NVMe disk that guests could be given: `basalt-lab down` and `up` start a lab that has one, --device names \
             another function"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use vfio::host::simulated::Kernel;

    const DISK: &str = "0000:01:00.0";

    fn address(text: &str) -> PciAddress {
        text.parse().unwrap()
    }

    fn refused(kernel: &Kernel, wanted: Option<&str>) -> String {
        let taken = Bound::take_of(kernel.sysfs(), wanted.map(address));
        format!("{:#}", taken.map(|_| ()).unwrap_err())
    }

    #[test]
    fn it_is_bound_and_given_back() {
        let kernel = Kernel::typical();
        let disk = address(DISK);
        let bound = Bound::take_of(kernel.sysfs(), None).unwrap();
        assert_eq!(bound.address(), disk);
        assert_eq!(kernel.driver(disk).as_deref(), Some("vfio-pci"));
        drop(bound);
        assert_eq!(
            (kernel.driver(disk).as_deref(), kernel.driver_override(disk)),
            (Some("nvme"), None)
        );
    }

    #[test]
    fn one_that_was_bound_before_stays_so() {
        let kernel = Kernel::typical();
        let disk = address(DISK);
        let record = BindingRecord::take(&kernel.sysfs(), disk).unwrap();
        carry_out(&kernel.sysfs(), &record, Goal::Bound, |_| Ok::<(), DeviceError>(())).unwrap();
        drop(Bound::take_of(kernel.sysfs(), Some(disk)).unwrap());
        assert_eq!(kernel.driver(disk).as_deref(), Some("vfio-pci"));
        kernel.claim("dev/vfio/1");
        let told = refused(&kernel, None);
        assert!(told.contains(DISK) && told.contains("/dev/vfio/1 is open"), "{told}");
    }

    #[test]
    fn a_step_that_fails_leaves_nothing_bound() {
        let kernel = Kernel::typical();
        let disk = address(DISK);
        kernel.remove("sys/bus/pci/drivers_probe");
        refused(&kernel, None);
        assert_eq!(kernel.driver(disk), None, "it was taken from its driver");
        kernel.set("sys/bus/pci/drivers_probe", "");
        assert_eq!(kernel.driver_override(disk), None);
    }

    #[test]
    fn what_is_not_there_or_cannot_be_taken_is_told() {
        let kernel = Kernel::typical();
        assert!(refused(&kernel, Some("0000:05:00.0")).contains("no PCI function 0000:05:00.0"));
        let told = refused(&kernel, Some("0000:00:1f.2"));
        assert!(told.contains("0000:00:1f.3"), "{told}");
        kernel.remove("sys/bus/pci/devices/0000:01:00.0");
        assert!(refused(&kernel, None).contains("no NVMe disk"), "none is left");
    }
}
