//! Guest memory that KVM maps before the guest touches it (KVM API 4.143, KVM_PRE_FAULT_MEMORY; Linux 6.12). It is an operation of a
//! vCPU, by whichever thread, while that vCPU is not in its guest. Knows no memory slots: KVM refuses what is in none.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use engine::{Result, failed};
use kvm_bindings::{KVM_CAP_PRE_FAULT_MEMORY, KVMIO, kvm_pre_fault_memory};
use kvm_ioctls::VmFd;
use vmm_sys_util::ioctl::ioctl_with_mut_ref;
use vmm_sys_util::ioctl_iowr_nr;

use crate::vcpu::KvmVcpu;

ioctl_iowr_nr!(KVM_PRE_FAULT_MEMORY, KVMIO, 0xd5, kvm_pre_fault_memory);

/// A vCPU as far as memory is mapped by it.
pub(crate) struct MapAhead(OwnedFd);

impl MapAhead {
    /// `None` on a host that cannot.
    pub(crate) fn of(vm: &VmFd, vcpu: &KvmVcpu) -> Result<Option<Self>> {
        let extension = std::os::raw::c_ulong::from(KVM_CAP_PRE_FAULT_MEMORY);
        if vm.check_extension_raw(extension) <= 0 {
            return Ok(None);
        }
        let descriptor = rustix::io::fcntl_dupfd_cloexec(vcpu.as_fd(), 0);
        let failed = |error: rustix::io::Errno| failed("F_DUPFD_CLOEXEC of a vCPU")(std::io::Error::from(error));
        descriptor.map(|descriptor| Some(Self(descriptor))).map_err(failed)
    }

    /// Maps all of a range, or as far as the host does.
    pub(crate) fn map(&self, guest: u64, bytes: u64) -> Result<()> {
        let mut range = kvm_pre_fault_memory {
            gpa: guest,
            size: bytes,
            ..kvm_pre_fault_memory::default()
        };
        while range.size > 0 {
            // SAFETY: 1. the descriptor is a vCPU's, and open; 2. `range` is what this call reads, and writes how far it came to;
            // 3. no memory of this process changes by it.
            let done = unsafe { ioctl_with_mut_ref(&self.0.as_raw_fd(), KVM_PRE_FAULT_MEMORY(), &mut range) };
            if done < 0 {
                let error = std::io::Error::last_os_error();
                // A signal, or another vCPU's fault at the same page.
                if !matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) {
                    return Err(failed("KVM_PRE_FAULT_MEMORY")(error));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number that the filter of the thread which calls it has (bin/vmm/seccomp/constants.toml).
    #[test]
    fn the_call_has_the_headers_number() {
        assert_eq!(KVM_PRE_FAULT_MEMORY(), 0xc040_aed5);
    }
}
