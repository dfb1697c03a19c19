//! The host's devices as whoever asks is told of them: what sysfs says, joined with the table. Changes nothing.

use std::collections::BTreeMap;

use base::PciAddress;
use node_api::{Device, DeviceGroup, DeviceIdentity, DeviceState, GroupMember, Vfs};
use vfio::host::inventory::{self, Group, Identity, PciFunction};

use super::claim::owner;
use super::{Devices, DevicesError};
use crate::Error;
use crate::sandbox::registry::Sandboxes;
use crate::store::devices::{Stage, StoredDevice};

impl Devices {
    /// All of the host's, in the order of its buses, and those that are gone and known still.
    pub(crate) fn list(&self, sandboxes: &Sandboxes) -> Result<Vec<Device>, Error> {
        let functions = inventory::list(self.sysfs()).map_err(DevicesError::from)?;
        let mut names = self.cdi_names();
        let mut known: BTreeMap<PciAddress, StoredDevice> = self.table().clone();
        let mut all: Vec<Device> = functions
            .into_iter()
            .map(|function| {
                let known = known.remove(&function.address);
                joined(of_host(function), known.as_ref(), sandboxes)
            })
            .collect();
        all.extend(
            known
                .values()
                .map(|gone| joined(Device::unknown(gone.address()), Some(gone), sandboxes)),
        );
        for device in &mut all {
            device.cdi = names.remove(&device.address).unwrap_or_default();
        }
        all.sort_by_key(|device| device.address);
        Ok(all)
    }

    /// One of them.
    pub(crate) fn show(&self, address: PciAddress, sandboxes: &Sandboxes) -> Result<Device, Error> {
        let function = inventory::find(self.sysfs(), address).map_err(DevicesError::from)?;
        Ok(joined(of_host(function), self.find(address).as_ref(), sandboxes))
    }
}

/// What a stage is called.
pub(super) fn state_of(stage: &Stage) -> DeviceState {
    match stage {
        Stage::Binding => DeviceState::Binding,
        Stage::Ready => DeviceState::Ready,
        Stage::Claimed { .. } => DeviceState::Claimed,
        Stage::Resetting => DeviceState::Resetting,
        Stage::Quarantined { .. } => DeviceState::Quarantined,
        Stage::Waiting { .. } => DeviceState::Waiting,
        Stage::Unbinding => DeviceState::Unbinding,
    }
}

fn joined(device: Device, known: Option<&StoredDevice>, sandboxes: &Sandboxes) -> Device {
    let Some(known) = known else { return device };
    let sandbox = owner(known);
    let why = match &known.stage {
        Stage::Quarantined { why } | Stage::Waiting { why } => Some(why.clone()),
        _ if device.identity.is_none() => Some("there is no such function any more".to_owned()),
        _ => None,
    };
    Device {
        state: state_of(&known.stage),
        why,
        sandbox: sandbox.map(str::to_owned),
        sandbox_name: sandbox.and_then(|id| {
            let all = sandboxes.list();
            all.into_iter()
                .find(|sandbox| sandbox.id == id)
                .map(|sandbox| sandbox.name)
        }),
        terms: Some(known.terms),
        guest: None,
        ..device
    }
}

fn of_host(function: PciFunction) -> Device {
    let address = function.address;
    let vfs = function.sriov.map(|sriov| Vfs {
        total: sriov.total,
        used: sriov.used,
    });
    Device {
        identity: Some(identity(function.identity)),
        driver: function.driver,
        group: function.group.map(|group| group_of(address, &group)),
        numa_node: function.numa_node,
        reset_methods: function.reset_methods,
        sriov: vfs,
        physical: function.physical,
        bars: function.bars.iter().map(|bar| (bar.index, bar.size)).collect(),
        ..Device::unknown(address)
    }
}

fn identity(identity: Identity) -> DeviceIdentity {
    DeviceIdentity {
        class: identity.class,
        class_name: identity.class_name,
        vendor: identity.vendor,
        vendor_name: identity.vendor_name,
        device: identity.device,
        device_name: identity.device_name,
    }
}

fn group_of(address: PciAddress, group: &Group) -> DeviceGroup {
    let others = group.others(address).map(|member| GroupMember {
        name: member.name.clone(),
        driver: member.driver.clone(),
    });
    DeviceGroup {
        number: group.number,
        kind: group.kind.as_str().to_owned(),
        viable: group.is_viable(),
        others: others.collect(),
    }
}
