//! A machine that is put back to an earlier state of itself, in place: the VM, its vCPUs and what of its memory has not changed
//! stay, and with them what the host has mapped for the guest. Knows neither files nor who keeps them.
//!
//! ```text
//!  paused ─► old devices gone ─► changed pages dropped ─► new devices ─► vCPUs, clock ─► paused
//! ```
//! Devices are made anew, as for every restore: nothing of what they held of the time in between stays.

use std::fs::File;

use engine::VcpuState;
use observe::Registry;

use crate::devices::NamedDevice;
use crate::error::MachineError;
use crate::machine::{Machine, add_platform};
use crate::root::add_devices;
use crate::saved::{MachineState, SerialOutput, restore_devices};
use crate::vcpu::VcpuCommand;

impl Machine {
    /// Whether a state and devices fit this machine.
    ///
    /// # Errors
    /// What does not.
    pub fn fits(&self, state: &MachineState, devices: &[NamedDevice]) -> Result<(), MachineError> {
        if state.vcpus.len() != self.threads.len() {
            return Err(MachineError::Vcpus(state.vcpus.len()));
        }
        state.check(&self.ram, devices)
    }

    /// Puts a paused machine back to `state`, which must be that of when its memory was what it is mapped from. `pagemap` is
    /// this process's `/proc/self/pagemap`.
    ///
    /// # Errors
    /// A part could not be put back: the machine is of no use any more.
    pub fn roll_back(
        &mut self,
        state: &MachineState,
        serial: SerialOutput,
        devices: Vec<NamedDevice>,
        registry: &Registry,
        pagemap: Option<&File>,
    ) -> Result<(), MachineError> {
        self.fits(state, &devices)?;
        debug_assert!(self.paused, "the guest may change what is put back");
        self.fresh = true;
        for device in self.devices.drain(..) {
            device.reset();
        }
        self.shared.ports.clear();
        self.shared.mmio.clear();
        self.ram.drop_changes(pagemap)?;
        let vm = self.vm.as_ref();
        self.platform = add_platform(vm, &self.shared, (serial.file, serial.keep), Some(&state.platform))?;
        (self.devices, self.pci) = add_devices(&self.vm, &self.ram, &self.shared, devices, registry)?;
        restore_devices(state, &self.devices, &self.pci)?;
        let restored = |index| {
            state
                .vcpus
                .get(index)
                .map(|state: &VcpuState| VcpuCommand::Restore(Box::new(state.clone())))
        };
        self.command_vcpus(restored)?;
        self.new_generation()?;
        // Last, as in `restore`.
        Ok(self.vm.restore(&state.vm)?)
    }
}
