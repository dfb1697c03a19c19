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
    let (low, high) = (message.address & 0xffff_ffff, message.address >> 32);
    let msi = kvm_msi {
        address_lo: u32::try_from(low).unwrap_or(0),
        address_hi: u32::try_from(high).unwrap_or(0),
        data: message.data,
        ..kvm_msi::default()
    };
    vm.signal_msi(msi).map(|delivered| delivered > 0)
}
