//! A machine's whole state but its memory, and a machine made from one. Only what stands still can be saved: a
//! [`Quiesced`] is had from a paused machine, and while there is one nothing can start.
//!
//! Devices are made anew from their configuration, with descriptors of whoever restores; what they are restored to must fit.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use base::ByteSize;
use engine::{CpuModel, VcpuState, Vm, VmState};
use memory::Ram;
use memory::layout::MemorySize;
use observe::Registry;
use pci::{PciBus, PciState};
use serde::{Deserialize, Serialize};
use state::Schema;
use virtio::{DeviceState, VirtioPciDevice};

use crate::devices::NamedDevice;
use crate::error::MachineError;
use crate::functions::HostFunctions;
use crate::machine::{Machine, Parts, Platform, add_platform, map_memory, start_threads};
use crate::platform::PlatformState;
use crate::root::add_devices;
use crate::vcpu::{Shared, VcpuCommand};

/// The most vCPUs that a machine can have.
const MAX_CPUS: usize = 64;

/// The size of a machine and the names of its devices, in the order of their PCI slots.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// Number of vCPUs.
    pub cpus: u32,
    /// Bytes of memory that it boots with.
    pub memory: u64,
    /// Bytes of memory that can be plugged, behind the other in the memory file. In versions 1 and 2 there was none.
    #[serde(default)]
    pub hotplug_memory: u64,
    /// Bytes of addresses that are kept for it. Until version 3 there were as many as could be plugged.
    #[serde(default)]
    pub hotplug_region: u64,
    /// The devices' names.
    pub devices: Vec<String>,
    /// Which processor its guest is shown. In version 1 it was the host's.
    #[serde(default)]
    pub cpu: CpuModel,
}

impl Schema for Shape {
    const KIND: &'static str = "machine";
    const VERSION: u32 = 4;
    const OLDEST: u32 = 1;
}

impl Shape {
    /// How much memory it has.
    pub fn memory_size(&self) -> MemorySize {
        MemorySize {
            boot: ByteSize(self.memory),
            hotplug: ByteSize(self.hotplug_memory),
            hotplug_region: ByteSize(self.hotplug_region.max(self.hotplug_memory)),
        }
    }
}

/// Everything but the memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineState {
    /// What it is made of.
    pub shape: Shape,
    /// What its vCPUs share.
    pub vm: VmState,
    /// Its vCPUs, by rising number.
    pub vcpus: Vec<VcpuState>,
    /// The board's own devices.
    pub platform: PlatformState,
    /// The PCI bus.
    pub pci: PciState,
    /// The devices, as `shape` names them.
    pub devices: Vec<DeviceState>,
}

/// Where the output of a restored machine's serial port goes.
#[derive(Debug, Default)]
pub struct SerialOutput {
    /// Dropped when not given.
    pub file: Option<OwnedFd>,
    /// How many of its last bytes a file keeps; all when not given.
    pub keep: Option<u64>,
}

/// A machine in which nothing moves.
pub struct Quiesced<'a> {
    machine: &'a Machine,
    /// Without what can be plugged, if nothing is and no file has any of it.
    ram: Ram,
}

impl<'a> Quiesced<'a> {
    pub(crate) fn new(machine: &'a Machine) -> Self {
        let plugged = machine.growth().map_or(0, |growth| growth.sizes.plugged);
        let without = match plugged {
            // Where that cannot be told it is saved whole.
            0 => machine.ram.without_hotplug().ok().flatten(),
            _ => None,
        };
        let ram = without.unwrap_or_else(|| machine.ram.clone());
        Self { machine, ram }
    }

    /// The whole state but the memory's content.
    ///
    /// # Errors
    /// A device has no saved form, or the engine cannot read a part.
    pub fn save(&self) -> Result<MachineState, MachineError> {
        let machine = self.machine;
        if machine.ram.identity_layout().is_some() {
            return Err(MachineError::IdentityMemory);
        }
        if machine.is_frozen() {
            return Err(MachineError::Frozen);
        }
        if machine.links.any() {
            return Err(MachineError::Linked);
        }
        // Devices first: they refuse for free.
        if let Some(function) = machine.functions.first() {
            return Err(MachineError::NotToBeSaved(function.to_owned()));
        }
        let mut devices = Vec::with_capacity(machine.devices.len());
        for device in &machine.devices {
            let saved = device.save().map_err(|source| MachineError::Transport {
                id: device.id().to_owned(),
                source,
            })?;
            devices.push(saved);
        }
        let vcpus = machine
            .command_vcpus(|_| Some(VcpuCommand::Save))?
            .into_iter()
            .flatten()
            .collect::<Vec<_>>();
        Ok(MachineState {
            shape: Shape {
                cpus: u32::try_from(vcpus.len()).unwrap_or(u32::MAX),
                memory: machine.memory().bytes(),
                hotplug_memory: self.ram.sizes().hotplug.bytes(),
                hotplug_region: self.ram.sizes().hotplug_region.bytes(),
                devices: machine.devices.iter().map(|device| device.id().to_owned()).collect(),
                cpu: machine.cpu,
            },
            vm: machine.vm.save()?,
            vcpus,
            platform: machine.platform.save(),
            pci: machine.pci.save(),
            devices,
        })
    }

    /// The memory that is saved, whose content does not change as long as the machine stands still.
    pub fn ram(&self) -> &Ram {
        &self.ram
    }
}

impl MachineState {
    /// Checks what a machine is made of against what there is to make it of.
    pub(crate) fn check(&self, ram: &Ram, devices: &[NamedDevice]) -> Result<(), MachineError> {
        let cpus = self.vcpus.len();
        let numbered = self.vcpus.iter().zip(0..).all(|(vcpu, id)| vcpu.id == id);
        if cpus == 0 || cpus > MAX_CPUS || usize::try_from(self.shape.cpus) != Ok(cpus) || !numbered {
            return Err(MachineError::Vcpus(cpus));
        }
        if !self.shape.memory_size().can_become(ram.sizes()) {
            return Err(MachineError::OtherMemory {
                saved: self.shape.memory_size().all(),
                here: ram.sizes().all(),
            });
        }
        let here: Vec<&str> = devices.iter().map(|device| device.id.as_str()).collect();
        if here != self.shape.devices || self.devices.len() != devices.len() {
            return Err(MachineError::OtherDevices {
                saved: self.shape.devices.join(", "),
                here: here.join(", "),
            });
        }
        Ok(())
    }
}

impl Machine {
    /// Makes a machine of `vm`, in which there is nothing yet, that goes on where `state` was saved, with the memory `ram`, once it is
    /// let run. It is paused. The processor that `vm` shows its vCPUs does not matter: what they show is part of their state.
    ///
    /// # Errors
    /// The state does not fit the host, the memory or the devices; nothing is left behind.
    pub fn restore(
        vm: Arc<dyn Vm>,
        serial: SerialOutput,
        state: &MachineState,
        ram: Ram,
        devices: Vec<NamedDevice>,
        registry: &Registry,
    ) -> Result<Self, MachineError> {
        state.check(&ram, &devices)?;
        let shared = Shared::new()?;
        map_memory(vm.as_ref(), &ram)?;
        let platform = add_platform(vm.as_ref(), &shared, (serial.file, serial.keep), Some(&state.platform))?;
        let (devices, pci) = add_devices(&vm, &ram, &shared, devices, registry)?;
        restore_devices(state, &devices, &pci)?;
        let mut states = state.vcpus.iter();
        let threads = start_threads(vm.as_ref(), state.shape.cpus, &shared, registry, |_, vcpu| {
            states.next().map_or(Ok(()), |state| vcpu.restore(state))
        })?;
        let mut machine = Self::assemble(Parts {
            threads,
            shared,
            devices,
            platform,
            pci,
            vm,
            ram,
            cpu: state.shape.cpu,
            functions: HostFunctions::new(None, 1)?,
        });
        machine.paused = true;
        machine.new_generation()?;
        // Last: what it counts is guest time, and making a machine is none.
        machine.vm.restore(&state.vm)?;
        Ok(machine)
    }
}

/// Has devices that were just made, and their bus, take over what was saved.
pub(crate) fn restore_devices(
    state: &MachineState,
    devices: &[Arc<VirtioPciDevice>],
    pci: &PciBus,
) -> Result<(), MachineError> {
    for (device, saved) in devices.iter().zip(&state.devices) {
        device.restore(saved).map_err(|source| MachineError::Transport {
            id: device.id().to_owned(),
            source,
        })?;
    }
    pci.restore(&state.pci).map_err(|source| MachineError::Pci {
        id: "the PCI bus".to_owned(),
        source,
    })
}

impl Platform {
    fn save(&self) -> PlatformState {
        PlatformState {
            ioapic: self.ioapic.save(),
            serial: self.serial.save(),
            events: self.events.save(),
            generation: self.generation,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shape_is_what_the_golden_file_says() {
        let shape = Shape {
            cpus: 2,
            memory: 128 << 20,
            hotplug_memory: 512 << 20,
            hotplug_region: 128 << 30,
            devices: vec!["console".into(), "root".into()],
            cpu: CpuModel::V3,
        };
        state::golden::check(env!("CARGO_MANIFEST_DIR"), &shape);
        let third = Shape {
            hotplug_region: 0,
            ..shape
        };
        assert_eq!(third.memory_size().hotplug_region, ByteSize::mib(512));
        assert_eq!(state::golden::load::<Shape>(env!("CARGO_MANIFEST_DIR"), 3), third);
        let second = Shape {
            hotplug_memory: 0,
            ..third
        };
        assert_eq!(state::golden::load::<Shape>(env!("CARGO_MANIFEST_DIR"), 2), second);
        let first = Shape {
            cpu: CpuModel::Host,
            ..second
        };
        assert_eq!(state::golden::load::<Shape>(env!("CARGO_MANIFEST_DIR"), 1), first);
        assert!(Shape::load(5, b"{}").is_err());
    }

    #[test]
    fn a_state_that_contradicts_itself_or_the_memory_is_refused() {
        let ram = Ram::allocate(ByteSize::mib(32)).unwrap();
        let good = MachineState {
            shape: Shape {
                cpus: 1,
                memory: 32 << 20,
                hotplug_memory: 0,
                hotplug_region: 0,
                devices: Vec::new(),
                cpu: CpuModel::Host,
            },
            vcpus: vec![VcpuState::default()],
            ..MachineState::default()
        };
        good.check(&ram, &[]).unwrap();
        let refused = |change: fn(&mut MachineState)| {
            let mut state = good.clone();
            change(&mut state);
            state.check(&ram, &[]).unwrap_err().to_string()
        };
        assert!(refused(|s| s.shape.cpus = 2).contains("vCPUs"));
        assert!(refused(|s| s.vcpus.clear()).contains("vCPUs"));
        assert!(refused(|s| s.vcpus[0].id = 3).contains("vCPUs"));
        assert!(refused(|s| s.shape.memory += 4096).contains("memory"));
        assert!(refused(|s| s.shape.hotplug_memory = 128 << 20).contains("160 MiB of memory"));
        assert!(refused(|s| s.shape.hotplug_region = 128 << 20).contains("memory"));
        let mut kept = good.clone();
        kept.shape.hotplug_region = 256 << 20;
        let size = kept.shape.memory_size();
        let ram = Ram::allocate(size).unwrap();
        kept.check(&ram, &[]).unwrap();
        let more = ram.with_hotplug(ByteSize::mib(128)).unwrap();
        kept.check(&more, &[]).unwrap();
        kept.shape.hotplug_memory = 256 << 20;
        assert!(kept.check(&more, &[]).is_err());
        assert!(refused(|s| s.shape.devices.push("root".into())).contains("root"));
    }
}
