//! The descriptors that come with a request.

use std::fs::File;
use std::os::fd::OwnedFd;

use device::FdTable;
use machine::SerialOutput;
use vmm_api::{ApiError, ErrorKind, FdRef, PageRuns, Paging, RestoreConfig};

use crate::refusal::refuse;

/// What a VM is restored from, but for its devices.
pub(crate) struct RestoreFds {
    pub(crate) state: File,
    pub(crate) memory: Vec<File>,
    pub(crate) kvm: Option<OwnedFd>,
    /// CPUs that Linux has given up.
    pub(crate) reservation: Option<OwnedFd>,
    pub(crate) serial: SerialOutput,
    /// For memory that comes on demand: `/dev/userfaultfd`, and in which order pages are brought before they are touched.
    pub(crate) on_demand: Option<(OwnedFd, PageRuns)>,
}

impl RestoreFds {
    pub(crate) fn take(config: &RestoreConfig, fds: &mut FdTable) -> Result<Self, ApiError> {
        let mut take = |fd: FdRef| fds.take(fd).map_err(|error| refuse(ErrorKind::Invalid, error));
        let memory = config.files.memory.iter();
        Ok(Self {
            state: File::from(take(config.files.state)?),
            memory: memory.map(|fd| take(*fd).map(File::from)).collect::<Result<_, _>>()?,
            kvm: config.kvm.map(&mut take).transpose()?,
            reservation: config.reservation.map(&mut take).transpose()?,
            serial: SerialOutput {
                file: config.serial.map(&mut take).transpose()?,
                keep: config.serial_keep,
            },
            on_demand: match &config.paging {
                Paging::OnDemand { userfaultfd, order } => Some((take(*userfaultfd)?, order.clone())),
                Paging::Mapped | Paging::Eager => None,
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
