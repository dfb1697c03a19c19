//! Interrupt sources over `KVM_SIGNAL_MSI`.

use std::sync::{Arc, Mutex, PoisonError};

use engine::{Interrupt, MsiMessage};
use kvm_bindings::kvm_msi;
use kvm_ioctls::VmFd;

/// One source: where it goes now, and whether it waits to go anywhere.
pub(crate) struct KvmInterrupt {
    vm: Arc<VmFd>,
    // Held for the time of one system call, and never across a call into a device: a vCPU that reprograms the
    // vector waits for at most one delivery.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    route: Option<MsiMessage>,
    pending: bool,
}

impl KvmInterrupt {
    pub(crate) fn new(vm: Arc<VmFd>) -> Self {
        Self {
            vm,
            state: Mutex::new(State::default()),
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

impl Interrupt for KvmInterrupt {
    fn trigger(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(message) = state.route else {
            state.pending = true;
            return;
        };
        // A guest can program any address; one that names no APIC is its own loss.
        if let Err(error) = send(&self.vm, message) {
            log::debug!("an interrupt was not delivered: {error}");
        }
    }

    fn route(&self, message: Option<MsiMessage>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.route = message;
        if message.is_some() && std::mem::take(&mut state.pending) {
            drop(state);
            self.trigger();
        }
    }

    fn is_pending(&self) -> bool {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).pending
    }
}
