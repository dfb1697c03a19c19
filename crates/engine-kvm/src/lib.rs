//! The KVM back end of the engine traits. Knows no device and no machine.
//!
//! KVM supplies the local APICs; the I/O APIC is user space's (split interrupt controller); there is no PIC and no
//! PIT. Emulated devices send their interrupts as messages (`KVM_SIGNAL_MSI`), so that none has to be registered; those of
//! devices of the host's go from their driver's event to the guest by themselves (`irqfd`), as the guest reaches their registers
//! by itself (`registers`).
#![allow(
    unsafe_code,
    reason = "KVM's calls take raw addresses and descriptors; each block says what it relies on"
)]

mod convert;
mod cpuid;
mod host_functions;
mod interrupt;
mod irqfd;
mod kick;
mod map_ahead;
mod msrs;
mod registers;
mod vcpu;
mod vm;
#[cfg(test)]
mod with_kvm;

use std::os::fd::{IntoRawFd, OwnedFd};
use std::sync::Arc;

use engine::{CpuModel, Engine, EngineError, Result, Traits, Vm, failed};
use kvm_bindings::{
    KVM_CAP_HALT_POLL, KVM_CAP_X86_DISABLE_EXITS, KVM_X86_DISABLE_EXITS_HLT, KVM_X86_DISABLE_EXITS_MWAIT,
    KVM_X86_DISABLE_EXITS_PAUSE,
};
use kvm_ioctls::{Cap, Kvm};

/// What every machine of this VMM needs from KVM, with the reason.
const REQUIRED: &[(Cap, &str)] = &[
    (
        Cap::SplitIrqchip,
        "local APICs in the kernel, I/O APIC in user space (KVM_CAP_SPLIT_IRQCHIP, Linux 4.5)",
    ),
    (Cap::Ioeventfd, "doorbells (KVM_CAP_IOEVENTFD)"),
    (Cap::SignalMsi, "message-signalled interrupts (KVM_CAP_SIGNAL_MSI)"),
    (Cap::ImmediateExit, "kicking vCPUs (KVM_CAP_IMMEDIATE_EXIT, Linux 4.13)"),
    (Cap::UserMemory, "guest memory (KVM_CAP_USER_MEMORY)"),
];

/// What the saved state's form and meaning depend on, a bit each from 0 on. Only ever appended to.
const STATE_CAPS: &[Cap] = &[
    Cap::SplitIrqchip,
    Cap::X2ApicApi,
    Cap::VcpuEvents,
    Cap::Debugregs,
    Cap::Xsave,
    Cap::Xcrs,
    Cap::TscControl,
    Cap::TscDeadlineTimer,
    Cap::AdjustClock,
    Cap::MpState,
];

/// Those of them that a restored vCPU asks for itself where it needs them: its TSC may run here as it did there.
const ASKED_BY_VCPUS: &[Cap] = &[Cap::TscControl];

/// The KVM engine over one open `/dev/kvm`, which its clones share.
#[derive(Clone)]
pub struct KvmEngine {
    kvm: Arc<Kvm>,
    /// How its vCPUs are to keep CPUs that nothing else runs on.
    own_cpus: Option<OwnCpus>,
}

/// What this host can do for vCPUs that need not leave their CPUs to others.
#[derive(Clone, Copy)]
struct OwnCpus {
    /// The exits that it can do without, as `KVM_CAP_X86_DISABLE_EXITS` counts them.
    exits: u64,
    /// Whether one that leaves its guest can be kept from polling.
    halt_poll: bool,
}

impl KvmEngine {
    /// Opens `/dev/kvm`.
    ///
    /// # Errors
    /// It does not exist, is not permitted, or lacks a capability.
    pub fn open() -> Result<Self> {
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/kvm")
            .map_err(|error| {
                EngineError::Unusable(format!(
                    "/dev/kvm cannot be opened ({error}): load kvm-amd or kvm-intel, or run `basalt doctor`"
                ))
            })?;
        Self::from_fd(file.into())
    }

    /// Uses an open `/dev/kvm` that somebody handed over.
    ///
    /// # Errors
    /// It is no KVM, or lacks a capability.
    pub fn from_fd(fd: OwnedFd) -> Result<Self> {
        // SAFETY: 1. the descriptor is open and owned, and ownership passes to the `Kvm`; 2. that it is KVM is
        // checked by the version call below, before anything else is asked of it.
        let kvm = unsafe { <Kvm as std::os::fd::FromRawFd>::from_raw_fd(fd.into_raw_fd()) };
        let version = kvm.get_api_version();
        if version != 12 {
            return Err(EngineError::Unusable(format!(
                "the descriptor given as /dev/kvm answers API version {version}, not 12: it is no KVM; `basalt doctor` tells more"
            )));
        }
        if let Some((_, what)) = REQUIRED.iter().find(|(cap, _)| !kvm.check_extension(*cap)) {
            return Err(EngineError::Unusable(format!(
                "this host's KVM lacks {what}: use a newer kernel"
            )));
        }
        Ok(Self {
            kvm: Arc::new(kvm),
            own_cpus: None,
        })
    }

    /// The same for vCPUs that have CPUs to themselves: their guests keep them while they wait, as far as this host can have them
    /// (Linux, `virt/kvm/api.rst`, `KVM_CAP_X86_DISABLE_EXITS` and `KVM_CAP_HALT_POLL`).
    #[must_use]
    pub fn on_own_cpus(self) -> Self {
        let offered = |cap: u32| self.kvm.check_extension_raw(u64::from(cap));
        let wanted = u64::from(KVM_X86_DISABLE_EXITS_MWAIT | KVM_X86_DISABLE_EXITS_HLT | KVM_X86_DISABLE_EXITS_PAUSE);
        let own_cpus = OwnCpus {
            exits: wanted & u64::try_from(offered(KVM_CAP_X86_DISABLE_EXITS)).unwrap_or(0),
            halt_poll: offered(KVM_CAP_HALT_POLL) > 0,
        };
        Self {
            own_cpus: Some(own_cpus),
            ..self
        }
    }
}

impl Engine for KvmEngine {
    fn name(&self) -> &'static str {
        "kvm"
    }

    fn create_vm(&self, cpu: CpuModel) -> Result<Arc<dyn Vm>> {
        let vm = vm::KvmVm::new(Arc::clone(&self.kvm), cpu)?;
        if let Some(own_cpus) = self.own_cpus {
            vm.keep_cpus(own_cpus)?;
        }
        Ok(Arc::new(vm))
    }

    fn traits(&self) -> Result<Traits> {
        let supported = self
            .kvm
            .get_supported_cpuid(kvm_bindings::KVM_MAX_CPUID_ENTRIES)
            .map_err(failed("KVM_GET_SUPPORTED_CPUID"))?;
        Ok(Traits {
            cpuid: cpuid::entries(&cpuid::for_vcpu(&supported, CpuModel::Host, 0, 1)?),
            former_cpuid: cpuid::former_hash(&supported),
            capabilities: state_caps(|cap| self.kvm.check_extension(cap)),
            asked_by_vcpus: asked_by_vcpus(),
        })
    }
}

/// The bits of the capabilities of which this is so.
fn state_caps(is: impl Fn(Cap) -> bool) -> u64 {
    let caps = STATE_CAPS.iter().enumerate();
    caps.fold(0, |bits, (bit, &cap)| bits | u64::from(is(cap)) << bit)
}

fn asked_by_vcpus() -> u64 {
    // `Cap` is no `PartialEq`, but a number.
    state_caps(|cap| ASKED_BY_VCPUS.iter().any(|&asked| asked as u32 == cap as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bits_of_a_fingerprint_stay_where_they_are() {
        assert_eq!(state_caps(|_| true), (1 << STATE_CAPS.len()) - 1);
        assert_eq!(state_caps(|cap| matches!(cap, Cap::X2ApicApi)), 1 << 1);
        assert_eq!(asked_by_vcpus(), 1 << 6, "TSC scaling");
    }
}
