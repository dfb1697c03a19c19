//! Messages by `KVM_SIGNAL_MSI`.

use std::sync::Arc;

use engine::{Deliver, MsiMessage};
use kvm_bindings::kvm_msi;
use kvm_ioctls::VmFd;

/// What interrupt sources send by.
pub(crate) struct Sender(pub(crate) Arc<VmFd>);

impl Deliver for Sender {
    fn deliver(&self, message: MsiMessage) {
        if let Err(error) = send(&self.0, message) {
            log::debug!("an interrupt was not delivered: {error}");
        }
    }
}

/// Sends one message; `Ok(false)` when no local APIC took it.
pub(crate) fn send(vm: &VmFd, message: MsiMessage) -> Result<bool, kvm_ioctls::Error> {
    let (address_lo, address_hi) = halves(message.address);
    let msi = kvm_msi {
        address_lo,
        address_hi,
        data: message.data,
        ..kvm_msi::default()
    };
    vm.signal_msi(msi).map(|delivered| delivered > 0)
}

/// An address as KVM has it: its lower and its upper 32 bits.
pub(crate) fn halves(address: u64) -> (u32, u32) {
    let half = |bits: u64| u32::try_from(bits & 0xffff_ffff).unwrap_or(0);
    (half(address), half(address >> 32))
}
