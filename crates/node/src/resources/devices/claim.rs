//! Who has which device: claimed before a machine is given it, reset when the machine is gone. A group of the IOMMU goes to one sandbox as a
//! whole, whichever of it was asked for. Opens no device: that is for whoever has claimed it.

use std::collections::BTreeSet;
use std::sync::MutexGuard;
use std::time::Duration;

use base::PciAddress;
use base::points::{DEVICE_CLAIMED, DEVICE_RESET, DEVICE_RESETTING};
use vfio::host::binding;
use vfio::host::inventory::{self, Group, PciFunction};

use super::resets::{Scope, UnderWay};
use super::shown::state_of;
use super::{Devices, DevicesError, HostPlace};
use crate::Error;
use crate::error::words::with_causes;
use crate::store::devices::{Stage, StoredDevice};

/// What a reset takes at most that does not stand still: function-level ones 100 ms, and a device may need a second to answer after any
/// (PCI Express 5.0, 6.6.1 and 6.6.2).
const RESET_TIME: Duration = Duration::from_secs(2);

/// Devices that are a sandbox's from now on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Claimed {
    /// Those that were asked for, in that order, each once.
    pub(crate) functions: Vec<PciAddress>,
    /// Their groups, each once.
    pub(crate) groups: BTreeSet<u32>,
}

impl Devices {
    /// Makes devices a sandbox's, all of them or none, with all else of their groups. It may have some of them already. They are given back by
    /// [`Devices::release`], which the end of its machine calls.
    pub(crate) fn claim(&self, sandbox: &str, addresses: &[PciAddress]) -> Result<Claimed, Error> {
        self.await_resets(addresses);
        let _changing = self.changing();
        let mut claimed = Claimed {
            functions: Vec::new(),
            groups: BTreeSet::new(),
        };
        let mut change: Vec<StoredDevice> = Vec::new();
        for &address in addresses {
            if claimed.functions.contains(&address) {
                continue;
            }
            let device = self.free_for(sandbox, address)?;
            let function = inventory::find(self.sysfs(), address).map_err(DevicesError::from)?;
            let group = function.group.as_ref().ok_or(DevicesError::NotBound(address))?;
            for other in self.rest_of_group(sandbox, &function, group)? {
                if !change.iter().any(|changed| changed.address() == other.address()) {
                    change.push(owned(other, sandbox, false));
                }
            }
            change.retain(|changed| changed.address() != address);
            change.push(owned(device, sandbox, true));
            claimed.groups.insert(group.number);
            claimed.functions.push(address);
        }
        self.keep(change)?;
        self.point(DEVICE_CLAIMED);
        Ok(claimed)
    }

    /// A device that this sandbox can have, or has.
    fn free_for(&self, sandbox: &str, address: PciAddress) -> Result<StoredDevice, Error> {
        let Some(device) = self.find(address) else {
            inventory::find(self.sysfs(), address).map_err(DevicesError::from)?;
            return Err(DevicesError::NotBound(address).into());
        };
        let why = match &device.stage {
            Stage::Ready => None,
            Stage::Claimed { sandbox: owner, .. } if owner == sandbox => None,
            Stage::Claimed { sandbox, .. } => Some(DevicesError::InUse {
                address,
                sandbox: sandbox.clone(),
            }),
            Stage::Quarantined { why } => Some(DevicesError::Quarantined {
                address,
                why: why.clone(),
            }),
            Stage::Waiting { why } => Some(DevicesError::Waiting {
                address,
                why: why.clone(),
            }),
            stage @ (Stage::Binding | Stage::Unbinding | Stage::Resetting) => Some(DevicesError::Busy {
                address,
                state: state_of(stage),
            }),
        };
        match why {
            Some(why) => Err(why.into()),
            // Somebody else may have given it to another driver.
            None if !binding::is_bound(self.sysfs(), address).map_err(DevicesError::from)? => {
                Err(DevicesError::NotBound(address).into())
            }
            None => Ok(device),
        }
    }

    /// All else of a group, which has to be free of the host and of other sandboxes; those that are known.
    fn rest_of_group(&self, sandbox: &str, function: &PciFunction, group: &Group) -> Result<Vec<StoredDevice>, Error> {
        let (address, group_number) = (function.address, group.number);
        let busy: Vec<_> = group
            .others(address)
            .filter(|member| member.is_in_hosts_use())
            .map(|member| format!("{} ({})", member.name, member.driver.clone().unwrap_or_default()))
            .collect();
        if !busy.is_empty() {
            return Err(DevicesError::NotViable {
                address,
                group: group_number,
                others: busy.join(", "),
            }
            .into());
        }
        let mut rest = Vec::new();
        for member in group.others(address).filter_map(inventory::Member::address) {
            // Bridges, and what has no driver, are nobody's to claim.
            let Some(other) = self.find(member) else { continue };
            match &other.stage {
                Stage::Claimed { sandbox: owner, .. } if owner != sandbox => {
                    return Err(DevicesError::InUse {
                        address: member,
                        sandbox: owner.clone(),
                    }
                    .into());
                }
                // Claimed as it is, it may have been asked for.
                Stage::Claimed { .. } | Stage::Waiting { .. } => (),
                Stage::Ready => rest.push(other),
                stage => {
                    return Err(DevicesError::GroupBusy {
                        address,
                        group: group_number,
                        other: member,
                        state: state_of(stage),
                    }
                    .into());
                }
            }
        }
        Ok(rest)
    }

    /// The sandboxes that have devices.
    pub(crate) fn owners(&self) -> BTreeSet<String> {
        let table = self.table();
        let owners = table.values().filter_map(|device| owner(device).map(str::to_owned));
        owners.collect()
    }

    /// The sandbox that has the first device of which this is so.
    pub(crate) fn owner_of(&self, is_it: impl Fn(PciAddress) -> bool) -> Option<String> {
        let table = self.table();
        let mut its = table.values().filter(|device| is_it(device.address()));
        its.find_map(|device| owner(device).map(str::to_owned))
    }

    /// The devices that a sandbox asked for and has.
    pub(crate) fn of(&self, sandbox: &str) -> Vec<PciAddress> {
        let table = self.table();
        let asked = |device: &&StoredDevice| match &device.stage {
            Stage::Claimed { sandbox: owner, asked } => owner == sandbox && *asked,
            _ => false,
        };
        table.values().filter(asked).map(StoredDevice::address).collect()
    }

    /// Gives back all that a sandbox has, which nobody has open any more: each is reset, and those that cannot be are nobody's from then on.
    /// It is fine if it has none.
    pub(crate) fn release(&self, sandbox: &str) -> Result<(), Error> {
        // Most have none, and wait for nobody.
        if !self.owners().contains(sandbox) {
            return Ok(());
        }
        let changing = self.changing();
        let its: Vec<StoredDevice> = self
            .table()
            .values()
            .filter(|it| owner(it) == Some(sandbox))
            .cloned()
            .collect();
        self.reset_all(&its, changing)
    }

    /// Finishes what was begun to be reset and could not be noted, as there was no space; how many are left.
    pub(crate) fn finish_resets(&self) -> usize {
        let resetting = self.resetting();
        let left = resetting.iter().filter(|device| {
            // Whoever is busy may be so with another of its bus, and not come to it.
            let Some(turn) = self.resets.try_begin(self.scope(device.address())) else {
                return true;
            };
            let finished = self.reset_in(&turn, device.address());
            finished
                .inspect_err(|error| log::warn!("the device {} is being reset still: {error}", device.address()))
                .is_err()
        });
        left.count()
    }

    fn resetting(&self) -> Vec<StoredDevice> {
        let table = self.table();
        let resetting = table.values().filter(|device| device.stage == Stage::Resetting);
        resetting.cloned().collect()
    }

    /// Waits for the resets of devices and of all else of their groups, if that takes no longer than resets do.
    pub(super) fn await_resets(&self, addresses: &[PciAddress]) {
        if self.resetting().is_empty() {
            return;
        }
        // What cannot be read is told by whoever needs it.
        let functions = addresses
            .iter()
            .filter_map(|&address| inventory::find(self.sysfs(), address).ok());
        let groups = functions.filter_map(|function| function.group);
        let members = groups.flat_map(|group| {
            group
                .members
                .iter()
                .filter_map(inventory::Member::address)
                .collect::<Vec<_>>()
        });
        let awaited: BTreeSet<PciAddress> = addresses.iter().copied().chain(members).collect();
        let left = || {
            self.resetting()
                .iter()
                .filter(|device| awaited.contains(&device.address()))
                .count()
        };
        // Those of one sandbox are reset one after the other.
        let limit = RESET_TIME * u32::try_from(left()).unwrap_or(u32::MAX);
        self.resets.wait_while(limit, || left() > 0);
    }

    /// The same of some of them, with all of their groups of which it needs nothing any more.
    pub(crate) fn release_some(&self, sandbox: &str, addresses: &[PciAddress]) -> Result<(), Error> {
        let changing = self.changing();
        let its: Vec<StoredDevice> = self
            .table()
            .values()
            .filter(|it| owner(it) == Some(sandbox))
            .cloned()
            .collect();
        let is_asked = |device: &StoredDevice| matches!(device.stage, Stage::Claimed { asked: true, .. });
        let (ends, stays): (Vec<_>, Vec<_>) = its
            .into_iter()
            .partition(|device| !is_asked(device) || addresses.contains(&device.address()));
        let groups = |devices: &[StoredDevice]| -> Result<BTreeSet<u32>, Error> {
            let groups = devices
                .iter()
                .filter_map(|device| self.group(device.address()).transpose());
            groups.collect()
        };
        let used = groups(&stays)?;
        let (mut released, mut kept) = (Vec::new(), Vec::new());
        for device in ends {
            match self.group(device.address())? {
                Some(group) if used.contains(&group) => kept.push(owned(device, sandbox, false)),
                _ => released.push(device),
            }
        }
        self.keep(kept)?;
        self.reset_all(&released, changing)
    }

    /// The group of one that is there.
    pub(crate) fn group(&self, address: PciAddress) -> Result<Option<u32>, Error> {
        Ok(self.place(address)?.group)
    }

    /// Where one is that is there.
    pub(crate) fn place(&self, address: PciAddress) -> Result<HostPlace, Error> {
        let (group, numa_node) = match inventory::find(self.sysfs(), address) {
            Ok(function) => (function.group.map(|group| group.number), function.numa_node),
            // It was pulled out.
            Err(vfio::host::DeviceError::NotFound(_)) => (None, None),
            Err(error) => return Err(DevicesError::from(error).into()),
        };
        Ok(HostPlace {
            address,
            group,
            numa_node,
        })
    }

    /// Nobody else waits for the kernel to reset them.
    fn reset_all(&self, released: &[StoredDevice], changing: MutexGuard<'_, ()>) -> Result<(), Error> {
        if released.is_empty() {
            return Ok(());
        }
        let resetting = released.iter().map(|device| StoredDevice {
            stage: Stage::Resetting,
            ..device.clone()
        });
        self.keep(resetting.collect())?;
        drop(changing);
        self.point(DEVICE_RESETTING);
        // One that fails keeps the others from nothing.
        let reset = released.iter().map(|device| self.reset(device.address()));
        let reset = reset.fold(Ok(()), Result::and);
        // Whoever looks after what lacks space goes on.
        reset.inspect_err(|_| self.hold.lack.tell())
    }

    /// What of the host its reset changes.
    fn scope(&self, address: PciAddress) -> Scope {
        // What cannot be read is found out by the reset.
        let function = inventory::find(self.sysfs(), address).ok();
        Scope::of(address, function.as_ref())
    }

    /// Resets a device that a sandbox had.
    pub(super) fn reset(&self, address: PciAddress) -> Result<(), Error> {
        self.reset_in(&self.resets.begin(self.scope(address)), address)
    }

    fn reset_in(&self, _turn: &UnderWay<'_>, address: PciAddress) -> Result<(), Error> {
        // Somebody else may have finished it.
        let Some(device) = self.find(address).filter(|device| device.stage == Stage::Resetting) else {
            return Ok(());
        };
        if !binding::is_bound(self.sysfs(), address).map_err(DevicesError::from)? {
            log::warn!("the device {address} is not vfio-pci's any more, and is left to whoever has it");
            return self.forget(address);
        }
        let stage = match binding::reset(self.sysfs(), address) {
            Ok(()) => Stage::Ready,
            Err(vfio::host::DeviceError::NoReset(_)) if device.terms.allow_no_reset => Stage::Ready,
            Err(error) => {
                let why = with_causes(&error);
                log::error!("the device {address} is in quarantine: {why}");
                Stage::Quarantined { why }
            }
        };
        self.point(DEVICE_RESET);
        self.advance(&device, stage)
    }
}

fn owned(device: StoredDevice, sandbox: &str, asked: bool) -> StoredDevice {
    let sandbox = sandbox.to_owned();
    StoredDevice {
        stage: Stage::Claimed { sandbox, asked },
        ..device
    }
}

/// The sandbox that has it.
pub(super) fn owner(device: &StoredDevice) -> Option<&str> {
    match &device.stage {
        Stage::Claimed { sandbox, .. } => Some(sandbox),
        _ => None,
    }
}
