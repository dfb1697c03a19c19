//! Has each device made by its module. Knows modules by their kinds' names alone.

use device::{CreateError, DeviceContext, DmaSpaces, FdTable, SpaceAlarm};
use machine::{NamedDevice, NamedFunction};
use observe::Registry;
use vmm_api::{ApiError, DeviceSpec, ErrorKind};

use crate::catalog::{self, Module};
use crate::refusal::refuse;

fn module(spec: &DeviceSpec) -> Result<Module, ApiError> {
    catalog::find(&spec.kind).ok_or_else(|| {
        let kinds = catalog::kinds();
        let message = format!(
            "device `{}` is of kind `{}`, which is unknown: there are {kinds}",
            spec.id, spec.kind
        );
        refuse(ErrorKind::Invalid, message)
    })
}

fn named(spec: &DeviceSpec) -> impl Fn(CreateError) -> ApiError {
    move |error| refuse(ErrorKind::Invalid, format!("device `{}`: {error}", spec.id))
}

/// Those that this process is.
pub(crate) fn create_devices(
    specs: &[DeviceSpec],
    fds: &mut FdTable,
    (registry, no_space): (&Registry, &SpaceAlarm),
) -> Result<Vec<NamedDevice>, ApiError> {
    let mut devices = Vec::new();
    for spec in specs {
        let Module::Device(module) = module(spec)? else {
            continue;
        };
        let context = DeviceContext {
            id: &spec.id,
            metrics: registry,
            no_space,
        };
        devices.push(NamedDevice {
            id: spec.id.clone(),
            device: module.create(spec, fds, &context).map_err(named(spec))?,
        });
    }
    Ok(devices)
}

/// Those that the host has, which share the VM's address space.
pub(crate) fn create_functions(
    specs: &[DeviceSpec],
    fds: &mut FdTable,
    spaces: &mut DmaSpaces,
) -> Result<Vec<NamedFunction>, ApiError> {
    let mut functions = Vec::new();
    for spec in specs {
        if let Module::Function(module) = module(spec)? {
            functions.push(NamedFunction {
                id: spec.id.clone(),
                function: module.create(spec, fds, spaces).map_err(named(spec))?,
            });
        }
    }
    Ok(functions)
}
