//! A VM that goes on from a snapshot, in stages. Each stage is a value that consumes the one before it, so no other order can be written,
//! and it owns all that was made so far: one that is dropped on an error takes everything back. `rollback.rs` has the stages in place.
//!
//! ```text
//!  request ─ Received ── take ──────▶ Inputs         the configuration is valid, its descriptors are here
//!                                       │ open_engine
//!                                       ▼
//!                                     EngineOpen     a thread makes the VM meanwhile (KVM only)
//!                                       │ read_state
//!                                       ▼
//!                                     StateRead      state checked against the host, memory mapped (by `ahead`, if it was given
//!                                       │ make_devices   the files before); the thread prefetches pages
//!                                       ▼
//!                                     DevicesMade    every descriptor has a user
//!                                       │ build
//!                                       ▼
//!                                     Built          the machine, paused where it was saved
//!                                       │ finish
//!                                       ▼
//!                                     Made           pages prefetched, guest notified, threads for directories enclosed
//! ```
//! Does not know which VM the process has, nor what state that is in: [`crate::vm::Vm`] takes over what was made.

pub(crate) mod ahead;
mod restorer;
pub(crate) mod rollback;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use base::ByteSize;
use device::{FdTable, SpaceAlarm};
use engine::{CpuModel, Engine};
use machine::{Machine, MachineState, SerialOutput};
use memory::Ram;
use observe::{Registry, marks};
use vmm_api::{ApiError, DeviceSpec, ErrorKind, Paging, RestoreConfig};

use self::ahead::{Ahead, Read};
use self::restorer::{Prefetch, Restorer};
use crate::balloon::Balloon;
use crate::bare;
use crate::devices::{Created, Surroundings, create_devices};
use crate::kvm::KvmSource;
use crate::made::Made;
use crate::refusal::{from_machine, from_snapshot, refuse};
use crate::request_fds::{RestoreFds, all_used};
use crate::shared::{enclose, shared_directories};
use crate::taps::Taps;
use crate::vm::VMM_VERSION;

/// A request whose configuration makes sense.
pub(crate) struct Received<'a>(&'a RestoreConfig);

impl<'a> Received<'a> {
    pub(crate) fn check(config: &'a RestoreConfig) -> Result<Self, ApiError> {
        config.validate().map_err(|error| refuse(ErrorKind::Invalid, error))?;
        Ok(Self(config))
    }

    /// Takes the descriptors that came with it, but for those of devices.
    pub(crate) fn take(self, fds: Vec<OwnedFd>) -> Result<Inputs<'a>, ApiError> {
        Inputs::take(self.0, self.0.devices.clone(), fds)
    }
}

/// What is restored from, opened.
pub(crate) struct Inputs<'a> {
    config: &'a RestoreConfig,
    devices: Vec<DeviceSpec>,
    opened: RestoreFds,
    /// Those of devices are still in it.
    fds: FdTable,
}

impl<'a> Inputs<'a> {
    fn take(config: &'a RestoreConfig, devices: Vec<DeviceSpec>, fds: Vec<OwnedFd>) -> Result<Self, ApiError> {
        let mut fds = FdTable::new(fds);
        Ok(Self {
            config,
            devices,
            opened: RestoreFds::take(config, &mut fds)?,
            fds,
        })
    }

    /// Opens the engine. What was done `ahead` goes if it is not of this engine.
    pub(crate) fn open_engine(mut self, source: &KvmSource, ahead: &mut Ahead) -> Result<EngineOpen<'a>, ApiError> {
        let (kvm, reservation) = (self.opened.kvm.take(), self.opened.reservation.take());
        let mut ahead = std::mem::take(ahead);
        if kvm.is_some() || reservation.is_some() {
            ahead = Ahead::default();
        }
        let (engine, restorer): (Arc<dyn Engine>, _) = match reservation {
            // All of its memory is read and copied as it is pinned: there is nothing to do beside that.
            Some(reservation) => (bare::engine(reservation, None)?, None),
            None => {
                let engine = source.open(kvm)?;
                let started = ahead.restorer.map_or_else(|| Restorer::start(&engine), Ok);
                let restorer = started.map_err(|error| refuse(ErrorKind::Host, error))?;
                (Arc::new(engine), Some(restorer))
            }
        };
        marks::mark("engine open");
        Ok(EngineOpen {
            inputs: self,
            read: ahead.snapshot,
            engine,
            restorer,
        })
    }
}

/// There is an engine, and on KVM a thread that makes the VM.
pub(crate) struct EngineOpen<'a> {
    inputs: Inputs<'a>,
    /// A snapshot that was read ahead, of whichever files.
    read: Option<Read>,
    engine: Arc<dyn Engine>,
    restorer: Option<Restorer>,
}

impl<'a> EngineOpen<'a> {
    /// Reads the state, checks that it can go on here, and maps the memory.
    pub(crate) fn read_state(self) -> Result<StateRead<'a>, ApiError> {
        let Self {
            inputs,
            read,
            engine,
            restorer,
        } = self;
        let Inputs {
            config,
            devices,
            opened,
            fds,
        } = inputs;
        let mapped = opened.on_demand.is_none();
        let (state, ram) = match read.filter(|read| mapped && read.is_of(&opened.state, &opened.memory)) {
            Some(read) => (read.state, read.ram),
            None => {
                let here =
                    snapshot::host_traits(engine.as_ref(), VMM_VERSION).map_err(|error| from_snapshot(&error))?;
                let read = snapshot::read(&opened.state, opened.memory, &here, |layers, size| {
                    match opened.on_demand {
                        Some((userfaultfd, order)) => Ram::paged(layers, size, &userfaultfd, order),
                        None => Ram::from_layers(layers, size),
                    }
                });
                read.map_err(|error| from_snapshot(&error))?
            }
        };
        if config.anonymous_holes && mapped {
            let holes = ram.map_holes_anonymous();
            holes.map_err(|error| refuse(ErrorKind::Host, error))?;
        }
        let ram = with_hotplug(ram, &devices)?;
        marks::mark("snapshot read");
        if engine.pins_memory() {
            ram.pins().pin().for_ever();
        }
        if let Some(restorer) = &restorer {
            restorer.prepare(Prefetch {
                ram: ram.clone(),
                write_set: config.write_set.clone(),
                all: config.paging == Paging::Eager,
            });
        }
        Ok(StateRead {
            config,
            engine,
            restorer,
            state,
            ram,
            serial: opened.serial,
            specs: devices,
            fds,
        })
    }
}

/// The memory of a machine that was saved before it could plug any, with what it can plug from now on.
fn with_hotplug(ram: Ram, devices: &[DeviceSpec]) -> Result<Ram, ApiError> {
    let mem = vmm_api::mem_device(devices).map_err(|error| refuse(ErrorKind::Invalid, error))?;
    let max = mem.map_or(ByteSize(0), |(_, config)| config.max_size());
    let kept = ram.sizes().hotplug_region;
    if ram.sizes().hotplug != ByteSize(0) || kept == ByteSize(0) {
        // Its device has what it had.
        return Ok(ram);
    }
    if max > kept {
        let message =
            format!("{max} of hot-pluggable memory were asked for, and the saved VM has addresses for {kept}");
        return Err(refuse(ErrorKind::Invalid, message));
    }
    let ram = ram.with_hotplug(max);
    ram.map_err(|error| refuse(ErrorKind::Host, error))
}

/// The machine's state and memory are here.
pub(crate) struct StateRead<'a> {
    config: &'a RestoreConfig,
    engine: Arc<dyn Engine>,
    restorer: Option<Restorer>,
    state: MachineState,
    ram: Ram,
    serial: SerialOutput,
    specs: Vec<DeviceSpec>,
    fds: FdTable,
}

impl<'a> StateRead<'a> {
    /// Makes the devices of what is left of the descriptors.
    pub(crate) fn make_devices(mut self) -> Result<DevicesMade<'a>, ApiError> {
        let shared = shared_directories(&self.specs, &self.fds)?;
        let no_space = SpaceAlarm::new().map_err(|error| refuse(ErrorKind::Host, error))?;
        let registry = Registry::new();
        let surroundings = Surroundings {
            registry: &registry,
            no_space: &no_space,
            memory: self.ram.sizes(),
            pins: self.ram.pins(),
        };
        let devices = Devices::make(&self.specs, &mut self.fds, surroundings)?;
        marks::mark("devices made");
        Ok(DevicesMade {
            before: self,
            shared,
            no_space,
            registry,
            devices,
        })
    }
}

/// Devices, and the TAPs of those that are interfaces.
struct Devices {
    created: Created,
    taps: Taps,
}

impl Devices {
    /// Makes all of them; no descriptor may be left over.
    fn make(specs: &[DeviceSpec], fds: &mut FdTable, surroundings: Surroundings<'_>) -> Result<Self, ApiError> {
        let taps = Taps::of(specs, fds)?;
        let created = create_devices(specs, fds, surroundings)?;
        all_used(fds)?;
        Ok(Self { created, taps })
    }
}

/// All is there that the machine is put together from, but for the VM.
pub(crate) struct DevicesMade<'a> {
    before: StateRead<'a>,
    shared: Vec<OwnedFd>,
    no_space: SpaceAlarm,
    registry: Registry,
    devices: Devices,
}

impl<'a> DevicesMade<'a> {
    /// Waits for the VM, and makes it the machine that was saved.
    pub(crate) fn build(self) -> Result<Built<'a>, ApiError> {
        let StateRead {
            config,
            engine,
            restorer,
            state,
            ram,
            serial,
            ..
        } = self.before;
        let vm = match &restorer {
            Some(restorer) => restorer.vm(),
            None => engine.create_vm(CpuModel::Host),
        };
        let vm = vm.map_err(|error| refuse(ErrorKind::Host, error))?;
        marks::mark("VM made");
        let Devices { created, taps } = self.devices;
        let ram = match created.pmem.is_empty() {
            true => ram,
            false => ram
                .with_pmem(created.pmem)
                .map_err(|error| refuse(ErrorKind::Invalid, error))?,
        };
        let mut machine = Machine::restore(vm, serial, &state, ram, created.devices, &self.registry)
            .map_err(|error| from_machine(&error))?;
        machine.set_pluggable(created.pluggable);
        machine.set_ballooned(created.ballooned);
        machine.set_iommu(created.iommu);
        if let Some(restorer) = &restorer {
            restorer.has_memory();
        }
        marks::mark("machine built");
        Ok(Built {
            config,
            restorer,
            shared: self.shared,
            made: Made {
                machine,
                no_space: self.no_space,
                taps,
                balloon: Balloon(created.balloon),
                cpus: state.shape.cpus,
                engine,
                registry: self.registry,
            },
        })
    }
}

/// The machine is there and paused.
pub(crate) struct Built<'a> {
    config: &'a RestoreConfig,
    restorer: Option<Restorer>,
    shared: Vec<OwnedFd>,
    made: Made,
}

impl Built<'_> {
    /// Waits for what is done beside, and does last what cannot be taken back.
    pub(crate) fn finish(self) -> Result<Made, ApiError> {
        if let Some(restorer) = self.restorer {
            restorer.finish();
        }
        marks::mark("prefetched");
        if !self.config.skip_notification {
            self.made.machine.notify_generation();
        }
        enclose(self.shared)?;
        Ok(self.made)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;

    use vmm_api::{FdRef, SnapshotFiles};

    use super::*;

    fn config() -> RestoreConfig {
        RestoreConfig {
            files: SnapshotFiles {
                state: FdRef(0),
                memory: vec![FdRef(1)],
            },
            kvm: None,
            reservation: None,
            serial: None,
            serial_keep: None,
            devices: Vec::new(),
            write_set: Vec::new(),
            skip_notification: false,
            paging: Paging::Mapped,
            anonymous_holes: false,
        }
    }

    fn refusal<T>(result: Result<T, ApiError>) -> (ErrorKind, String) {
        let error = result.err().unwrap();
        (error.kind, error.message)
    }

    #[test]
    fn a_descriptor_that_did_not_come_is_named() {
        let config = config();
        let null = OwnedFd::from(File::open("/dev/null").unwrap());
        let taken = Received::check(&config).unwrap().take(vec![null]);
        let (kind, message) = refusal(taken);
        assert_eq!(kind, ErrorKind::Invalid);
        assert!(message.contains("file descriptor 1"), "{message}");
    }

    #[test]
    fn memory_that_is_not_mapped_from_files_is_not_put_back() {
        let mut config = config();
        assert!(Received::check(&config).unwrap().check_in_place().is_ok());
        config.paging = Paging::Eager;
        let (kind, message) = refusal(Received::check(&config).unwrap().check_in_place());
        assert_eq!(kind, ErrorKind::Invalid);
        assert!(message.contains("paging"), "{message}");
    }

    #[test]
    fn a_stage_that_ends_takes_back_what_it_has() {
        let config = config();
        let (mut reader, writer) = std::io::pipe().unwrap();
        let fds = vec![OwnedFd::from(writer.try_clone().unwrap()), OwnedFd::from(writer)];
        let inputs = Received::check(&config).unwrap().take(fds).unwrap();
        drop(inputs);
        assert_eq!(reader.read(&mut [0]).unwrap(), 0, "nobody can write any more");
    }
}
