//! Where the engine of a VM comes from: a KVM that came with the request, that was inherited or that is opened here, or CPUs that Linux
//! has given up. Does not know what is made of it.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use engine::Engine;
use engine_bare::BareEngine;
use engine_kvm::KvmEngine;
use vmm_api::{ApiError, ErrorKind};

use crate::refusal::refuse;

const NO_KVM: &str = "a VMM in its jail cannot open /dev/kvm: send it open, as `kvm`, or start the VMM with --kvm-fd";

/// What this process has, and may open.
#[derive(Default)]
pub(crate) struct Engines {
    /// It can open nothing itself.
    pub(crate) jailed: bool,
    /// An inherited KVM.
    pub(crate) kvm: Option<OwnedFd>,
    /// vCPUs need not leave their CPUs to others.
    pub(crate) own_cpus: bool,
}

impl Engines {
    /// KVM: the one that was sent, or the inherited one, or the host's.
    pub(crate) fn open_kvm(&self, sent: Option<OwnedFd>) -> Result<KvmEngine, ApiError> {
        let engine = match (sent, &self.kvm) {
            (Some(fd), _) => KvmEngine::from_fd(fd),
            (None, Some(inherited)) => {
                let fd =
                    rustix::io::fcntl_dupfd_cloexec(inherited, 0).map_err(|error| refuse(ErrorKind::Host, error))?;
                KvmEngine::from_fd(fd)
            }
            (None, None) if self.jailed => return Err(refuse(ErrorKind::Invalid, NO_KVM)),
            (None, None) => KvmEngine::open(),
        }
        .map_err(|error| refuse(ErrorKind::Host, error))?;
        Ok(match self.own_cpus {
            true => engine.on_own_cpus(),
            false => engine,
        })
    }
}

/// The engine of CPUs that Linux has given up.
pub(crate) fn own_engine(claim: OwnedFd, busy_poll_us: Option<u32>) -> Result<Arc<dyn Engine>, ApiError> {
    let engine = BareEngine::from_fd(claim).map_err(|error| refuse(ErrorKind::Host, error))?;
    Ok(match busy_poll_us {
        Some(microseconds) => Arc::new(engine.busy_polling(Duration::from_micros(microseconds.into()))),
        None => Arc::new(engine),
    })
}
