//! The routing table: which message each GSI is. KVM has it as a whole, and takes it as a whole. Knows no event.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use engine::{EngineError, MsiMessage, Result, failed};

use super::Calls;

/// A VM's routes. GSIs of devices of the host's come behind the I/O APIC's pins, in whose routes KVM looks for interrupts with ends that are to
/// come out (`KVM_CAP_SPLIT_IRQCHIP`; `kvm_scan_ioapic_routes` of Linux): those of messages that are levels. Nothing is delivered by a pin's
/// route, as what a pin sends is sent as a message.
pub(crate) struct Routes<K> {
    kvm: Arc<K>,
    // Held for the time of one system call, which waits for no guest.
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    /// The first GSI that is no pin's; nobody has reserved the pins yet.
    first: Option<u32>,
    /// GSIs that are taken, with the message of each that had one.
    routes: BTreeMap<u32, Option<MsiMessage>>,
    /// KVM has another table.
    changed: bool,
}

impl<K: Calls> Routes<K> {
    pub(crate) fn new(kvm: Arc<K>) -> Self {
        Self {
            kvm,
            table: Mutex::default(),
        }
    }

    pub(crate) fn kvm(&self) -> &K {
        &self.kvm
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The I/O APIC has so many pins.
    pub(crate) fn reserve(&self, pins: u32) {
        self.table().first = Some(pins);
    }

    /// Takes a GSI that nobody has.
    pub(super) fn take(&self) -> Result<u32> {
        let most = self.kvm.most_routes();
        let mut table = self.table();
        let first = table.first.ok_or_else(|| {
            EngineError::State("an interrupt was attached before the VM had an interrupt controller".into())
        })?;
        let free = (first..most).find(|gsi| !table.routes.contains_key(gsi)).ok_or_else(|| {
            EngineError::Unusable(format!(
                "all {} interrupt routes that this host's KVM has for a VM are taken (KVM_CAP_IRQFD, KVM_CAP_IRQ_ROUTING): give the \
                 guest fewer devices of the host's",
                most.saturating_sub(first)
            ))
        })?;
        table.routes.insert(free, None);
        Ok(free)
    }

    /// Gives one back that no irqfd has. That KVM has its route until the next change is nothing to anybody.
    pub(super) fn give_back(&self, gsi: u32) {
        self.table().routes.remove(&gsi);
    }

    /// The GSI's message is to be this one: KVM knows after the next [`Self::commit`].
    pub(super) fn set(&self, gsi: u32, message: MsiMessage) {
        let mut table = self.table();
        if table.routes.insert(gsi, Some(message)) != Some(Some(message)) {
            table.changed = true;
        }
    }

    /// Has ends of the interrupt that this message is come out, or has KVM forget the pin at the next change.
    pub(super) fn set_pin(&self, pin: u32, message: Option<MsiMessage>) -> Result<()> {
        let mut table = self.table();
        if table.first.is_none_or(|pins| pin >= pins) {
            return Err(EngineError::State(format!("the I/O APIC has no pin {pin}")));
        }
        let Some(message) = message else {
            table.changed |= table.routes.remove(&pin).is_some();
            return Ok(());
        };
        drop(table);
        self.set(pin, message);
        self.commit()
    }

    /// Has KVM know all that was set, in one call; in none where it knows.
    pub(super) fn commit(&self) -> Result<()> {
        let mut table = self.table();
        if !table.changed {
            return Ok(());
        }
        let routes = table.routes.iter();
        let routes: Vec<_> = routes.filter_map(|(gsi, message)| Some((*gsi, (*message)?))).collect();
        self.kvm.set_routes(&routes).map_err(failed("KVM_SET_GSI_ROUTING"))?;
        table.changed = false;
        Ok(())
    }
}
