//! Interrupts of devices of the host's, whose driver signals an event fd for each: KVM takes the signal itself, in the driver's own
//! interrupt handler, and no thread of this process runs (`KVM_IRQFD`). Knows neither VFIO nor MSI-X.
//!
//! ```text
//!  the host's driver ─ signals ─▶ event fd ─ irqfd ─▶ GSI ─ routing table ─▶ message ─▶ local APIC     while a message is routed
//!                                 event fd keeps it: the pending bit                                   while none is
//! ```
//! Where the host's interrupt controller can post interrupts, KVM and VFIO find each other by the event fd (Linux, irqbypass), and
//! the device interrupts a vCPU that runs without the host. Nothing here is needed for it but that KVM knows of the function
//! (`host_functions`), and nothing may come between: no thread waits on the event, and it is the one that VFIO was given.
//!
//! Emulated devices send messages instead (`KVM_SIGNAL_MSI`): they are threads of this process, for whom the signal of an event is a
//! system call as well, and a message needs no registration.
//!
//! **What each step costs.** What waits, waits for all readers of the VM's routes (`irq_srcu`; virt/kvm/eventfd.c and irqchip.c of Linux),
//! and a deassign for those of other VMs as well, as one queue of the host's has them all. Measured 200 times, one after the other and
//! 5 ms apart, on Linux 6.18 with two CPUs that were busy besides and without hardware virtualization: medians, and what a
//! tenth took longer than.
//!
//! | step | waits | µs, median | µs, a tenth | when |
//! |---|---|---|---|---|
//! | assign | no | 3 to 8 | 10 | a vector is unmasked |
//! | deassign | yes | 37 to 82 | 4000 | a vector is masked |
//! | set the table, 64 entries | yes | 60 to 230 | 4000 | a message has changed that is to be routed |
//!
//! So the table keeps the entry of a vector that is masked: one that is masked and unmasked again, with the same message, costs a
//! deassign and an assign, one wait, and no table. A message that changes while it is routed costs the table, one wait, and the irqfd stays.
//! Vectors that become routed together ([`engine::Interrupt::prepare`]) have one table, one wait, for all: when MSI-X or the function's
//! mask is switched. A driver that writes and unmasks one vector after the other, as Linux's, has a table for each. A masked vector cannot
//! do without the deassign: KVM takes the signal out of the event and has nowhere to keep it where the GSI has no route, and what
//! was routed elsewhere for the time would be delivered, not kept.
//!
//! **No signal is lost or kept twice.** KVM joins the event's waiters before it looks whether the event is signalled, and delivers then
//! (assign); it takes what comes in the same moment as it comes, under the event's own lock, and leaves the waiters under that lock,
//! emptying the event (deassign). So a signal before a deassign was delivered, and one after it stays in the event; one before an assign
//! or during it is delivered by that assign.
//!
//! Such a signal stays in the event besides, until the next one or a deassign empties it: whether an event is signalled says
//! something only while no irqfd is assigned. While an irqfd is assigned its GSI has an entry in the table, also during the
//! deassign: one that comes then is delivered by the table.

mod routes;
mod source;
#[cfg(test)]
mod tests;

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd};

use base::EventFd;
use engine::MsiMessage;
use kvm_bindings::{KVM_IRQ_ROUTING_MSI, KvmIrqRouting, kvm_irq_routing_entry, kvm_irq_routing_msi};
use kvm_ioctls::{Cap, VmFd};

pub(crate) use routes::Routes;
pub(crate) use source::Source;

/// What of KVM this needs.
pub(crate) trait Calls: Send + Sync {
    /// How many routes a VM can have; none where KVM has no irqfds.
    fn most_routes(&self) -> u32;

    /// Replaces all routes: each GSI's message.
    fn set_routes(&self, routes: &[(u32, MsiMessage)]) -> io::Result<()>;

    /// From now on each signal of the event is one of the GSI.
    fn assign(&self, event: &EventFd, gsi: u32) -> io::Result<()>;

    /// It is not any more when this returns.
    fn deassign(&self, event: &EventFd, gsi: u32) -> io::Result<()>;
}

impl Calls for VmFd {
    fn most_routes(&self) -> u32 {
        match self.check_extension(Cap::Irqfd) {
            true => u32::try_from(self.check_extension_int(Cap::IrqRouting)).unwrap_or(0),
            false => 0,
        }
    }

    fn set_routes(&self, routes: &[(u32, MsiMessage)]) -> io::Result<()> {
        let entries: Vec<_> = routes.iter().map(|(gsi, message)| entry(*gsi, *message)).collect();
        let table = KvmIrqRouting::from_entries(&entries)
            .map_err(|error| io::Error::other(format!("{} routes: {error:?}", entries.len())))?;
        Ok(self.set_gsi_routing(&table)?)
    }

    fn assign(&self, event: &EventFd, gsi: u32) -> io::Result<()> {
        Ok(self.register_irqfd(&borrow(event), gsi)?)
    }

    fn deassign(&self, event: &EventFd, gsi: u32) -> io::Result<()> {
        Ok(self.unregister_irqfd(&borrow(event), gsi)?)
    }
}

fn entry(gsi: u32, message: MsiMessage) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry {
        gsi,
        type_: KVM_IRQ_ROUTING_MSI,
        ..kvm_irq_routing_entry::default()
    };
    let (address_lo, address_hi) = crate::interrupt::halves(message.address);
    entry.u.msi = kvm_irq_routing_msi {
        address_lo,
        address_hi,
        data: message.data,
        ..kvm_irq_routing_msi::default()
    };
    entry
}

/// The event in the type that kvm-ioctls wants, without giving the descriptor away.
pub(crate) fn borrow(event: &EventFd) -> ManuallyDrop<vmm_sys_util::eventfd::EventFd> {
    // SAFETY: 1. the descriptor is an open event fd for as long as `event` is borrowed; 2. ManuallyDrop keeps it
    // from being closed twice.
    ManuallyDrop::new(unsafe { vmm_sys_util::eventfd::EventFd::from_raw_fd(event.as_raw_fd()) })
}
