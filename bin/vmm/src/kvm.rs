//! Where KVM comes from: with the request, inherited, or opened here. Does not know what is made of it.

use std::os::fd::OwnedFd;

use engine_kvm::KvmEngine;
use vmm_api::{ApiError, ErrorKind};

use crate::refusal::refuse;

const NO_KVM: &str = "a VMM in its jail cannot open /dev/kvm: send it open, as `kvm`, or start the VMM with --kvm-fd";

/// The KVM that this process has or may open.
#[derive(Default)]
pub(crate) struct KvmSource {
    /// It can open nothing itself.
    pub(crate) jailed: bool,
    /// An inherited KVM.
    pub(crate) inherited: Option<OwnedFd>,
    /// vCPUs need not leave their CPUs to others.
    pub(crate) own_cpus: bool,
}

impl KvmSource {
    /// The one that was sent, or the inherited one, or the host's.
    pub(crate) fn open(&self, sent: Option<OwnedFd>) -> Result<KvmEngine, ApiError> {
        let engine = match (sent, &self.inherited) {
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
