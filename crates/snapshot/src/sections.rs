//! Which part of a machine's state is which section. Names are forever: a snapshot is read by them.

use machine::{MachineState, Shape};
use state::{Container, StateError};
use virtio::DeviceState;

/// What is known of the memory file.
pub(crate) const MEMORY: &str = "memory";

const MACHINE: &str = "machine";
const VM: &str = "vm";
const PLATFORM: &str = "platform";
const PCI: &str = "pci";

fn vcpu(index: usize) -> String {
    format!("vcpu{index}")
}

fn transport(id: &str) -> String {
    format!("device/{id}")
}

fn own(id: &str) -> String {
    format!("device/{id}/own")
}

pub(crate) fn put(saved: &MachineState, container: &mut Container) -> Result<(), StateError> {
    container.put(MACHINE, &saved.shape)?;
    container.put(VM, &saved.vm)?;
    container.put(PLATFORM, &saved.platform)?;
    container.put(PCI, &saved.pci)?;
    for (index, state) in saved.vcpus.iter().enumerate() {
        container.put(&vcpu(index), state)?;
    }
    for (id, device) in saved.shape.devices.iter().zip(&saved.devices) {
        container.put(&transport(id), &device.transport)?;
        container.put_saved(&own(id), device.own.clone())?;
    }
    Ok(())
}

pub(crate) fn take(container: &mut Container) -> Result<MachineState, StateError> {
    let shape: Shape = container.take(MACHINE)?;
    let mut saved = MachineState {
        vm: container.take(VM)?,
        platform: container.take(PLATFORM)?,
        pci: container.take(PCI)?,
        ..MachineState::default()
    };
    for index in 0..usize::try_from(shape.cpus).unwrap_or(usize::MAX) {
        saved.vcpus.push(container.take(&vcpu(index))?);
    }
    for id in &shape.devices {
        saved.devices.push(DeviceState {
            transport: container.take(&transport(id))?,
            own: container.take_saved(&own(id))?,
        });
    }
    saved.shape = shape;
    Ok(saved)
}
