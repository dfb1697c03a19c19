//! A VM that goes back to its own snapshot in place, in the stages of a restore as far as there is anything to make. Until a
//! [`Replacement`] is complete the machine is only looked at: its stages have it by a shared reference.
//!
//! ```text
//!  Received ── take_with ───▶ Inputs ── match_machine ─▶ Matched ── make_devices ─▶ Replacement
//!                                                                                     │ (the VM is paused)
//!                                                                                     │ apply
//!                                                                                     ▼
//!                                                                                   Applied, or a machine of no use
//! ```

use std::fs::File;
use std::os::fd::OwnedFd;

use device::{FdTable, SpaceAlarm};
use engine::Engine;
use machine::{Machine, MachineError, MachineState, SerialOutput};
use observe::Registry;
use vmm_api::{ApiError, DeviceSpec, ErrorKind, Paging, RestoreConfig};

use super::{Devices, Inputs, Received};
use crate::balloon::Balloon;
use crate::devices::{Created, Surroundings};
use crate::refusal::{from_machine, from_snapshot, refuse};
use crate::taps::Taps;
use crate::vm::VMM_VERSION;

const NOT_MAPPED: &str = "a rollback in place keeps how memory is mapped: leave `paging` out, or restore another VM";

const FILES_AS_MEMORY: &str = "a rollback in place keeps the machine's memory, and what is in its files (pmem) is whoever's it is that has \
     them: restore another VM";

impl<'a> Received<'a> {
    /// Refuses what only another VM can be restored from.
    pub(crate) fn check_in_place(self) -> Result<Self, ApiError> {
        match self.0.paging {
            Paging::Mapped => Ok(self),
            Paging::Eager | Paging::OnDemand { .. } => Err(refuse(ErrorKind::Invalid, NOT_MAPPED)),
        }
    }

    /// As [`Received::take`], for a VM whose interfaces have `taps`.
    pub(crate) fn take_with(self, taps: &Taps, mut fds: Vec<OwnedFd>) -> Result<Inputs<'a>, ApiError> {
        let devices = taps.give(&self.0.devices, &mut fds)?;
        Inputs::take(self.0, devices, fds)
    }
}

impl<'a> Inputs<'a> {
    /// Reads the state, and checks that it and the memory are of this machine.
    pub(crate) fn match_machine(self, engine: &dyn Engine, machine: &Machine) -> Result<Matched<'a>, ApiError> {
        let Inputs {
            config,
            devices,
            opened,
            fds,
        } = self;
        let state = snapshot::host_traits(engine, VMM_VERSION)
            .and_then(|here| snapshot::read_for(machine, &opened.state, opened.memory, &here))
            .map_err(|error| from_snapshot(&error))?;
        Ok(Matched {
            config,
            state,
            serial: opened.serial,
            specs: devices,
            fds,
        })
    }
}

/// A state of the machine's own.
pub(crate) struct Matched<'a> {
    config: &'a RestoreConfig,
    state: MachineState,
    serial: SerialOutput,
    specs: Vec<DeviceSpec>,
    fds: FdTable,
}

impl<'a> Matched<'a> {
    /// Makes the devices that take the place of the machine's.
    pub(crate) fn make_devices(
        mut self,
        machine: &Machine,
        no_space: &SpaceAlarm,
    ) -> Result<Replacement<'a>, ApiError> {
        let registry = Registry::new();
        let surroundings = Surroundings {
            registry: &registry,
            no_space,
            memory: machine.memory_sizes(),
            pins: machine.pins(),
        };
        let devices = Devices::make(&self.specs, &mut self.fds, surroundings)?;
        if !devices.created.pmem.is_empty() {
            return Err(refuse(ErrorKind::Invalid, FILES_AS_MEMORY));
        }
        let fits = machine.fits(&self.state, &devices.created.devices);
        fits.map_err(|error| from_machine(&error))?;
        Ok(Replacement {
            config: self.config,
            state: self.state,
            serial: self.serial,
            devices,
            registry,
        })
    }
}

/// All that a machine is put back with; nothing of it has been touched yet.
pub(crate) struct Replacement<'a> {
    config: &'a RestoreConfig,
    state: MachineState,
    serial: SerialOutput,
    devices: Devices,
    registry: Registry,
}

/// What came with the state that the machine has now.
pub(crate) struct Applied {
    pub(crate) taps: Taps,
    pub(crate) balloon: Balloon,
    /// The new devices' metrics.
    pub(crate) registry: Registry,
}

impl Replacement<'_> {
    /// Puts a paused machine back.
    ///
    /// # Errors
    /// The machine is of no use any more.
    pub(crate) fn apply(self, machine: &mut Machine, pagemap: Option<&File>) -> Result<Applied, MachineError> {
        let Devices { created, taps } = self.devices;
        let Created {
            devices,
            pluggable,
            iommu,
            balloon,
            ballooned,
            // There is none: `Matched::make_devices` refuses it.
            pmem: _,
        } = created;
        machine.roll_back(&self.state, self.serial, devices, &self.registry, pagemap)?;
        machine.set_pluggable(pluggable);
        machine.set_ballooned(ballooned);
        machine.set_iommu(iommu);
        machine.populate_write(&self.config.write_set);
        if !self.config.skip_notification {
            machine.notify_generation();
        }
        Ok(Applied {
            taps,
            balloon: Balloon(balloon),
            registry: self.registry,
        })
    }
}
