//! What comes with a request: files, and descriptions of devices.

use std::fs::File;
use std::os::fd::OwnedFd;

use device::{DeviceContext, FdTable};
use machine::{NamedDevice, SerialOutput};
use observe::Registry;
use vmm_api::{ApiError, DeviceSpec, ErrorKind, FdRef, RestoreConfig};

use crate::catalog;
use crate::refusal::refuse;

/// What a VM is restored from, but for its devices.
pub(crate) struct Opened {
    pub(crate) state: File,
    pub(crate) memory: Vec<File>,
    pub(crate) kvm: Option<OwnedFd>,
    /// CPUs that Linux has given up.
    pub(crate) claim: Option<OwnedFd>,
    pub(crate) serial: SerialOutput,
}

impl Opened {
    pub(crate) fn take(config: &RestoreConfig, fds: &mut FdTable) -> Result<Self, ApiError> {
        let mut take = |fd: FdRef| fds.take(fd).map_err(|error| refuse(ErrorKind::Invalid, error));
        let memory = config.files.memory.iter();
        Ok(Self {
            state: File::from(take(config.files.state)?),
            memory: memory.map(|fd| take(*fd).map(File::from)).collect::<Result<_, _>>()?,
            kvm: config.kvm.map(&mut take).transpose()?,
            claim: config.claim.map(&mut take).transpose()?,
            serial: SerialOutput {
                file: config.serial.map(&mut take).transpose()?,
                keep: config.serial_keep,
            },
        })
    }
}

/// Refuses descriptors that nothing has taken.
pub(crate) fn all_used(fds: &FdTable) -> Result<(), ApiError> {
    match fds.left_over() {
        0 => Ok(()),
        count => {
            let message = format!("{count} file descriptors came with the request that nothing refers to");
            Err(refuse(ErrorKind::Invalid, message))
        }
    }
}

/// Has each device made by its module.
pub(crate) fn create_devices(
    specs: &[DeviceSpec],
    fds: &mut FdTable,
    registry: &Registry,
) -> Result<Vec<NamedDevice>, ApiError> {
    let create = |spec: &DeviceSpec| {
        let module = catalog::find(&spec.kind).ok_or_else(|| {
            let kinds = catalog::kinds();
            let message = format!(
                "device `{}` is of kind `{}`, which is unknown: there are {kinds}",
                spec.id, spec.kind
            );
            refuse(ErrorKind::Invalid, message)
        })?;
        let context = DeviceContext {
            id: &spec.id,
            metrics: registry,
        };
        let device = module
            .create(spec, fds, &context)
            .map_err(|error| refuse(ErrorKind::Invalid, format!("device `{}`: {error}", spec.id)))?;
        Ok(NamedDevice {
            id: spec.id.clone(),
            device,
        })
    };
    specs.iter().map(create).collect()
}
