//! The back end of the engine traits for CPUs that Linux has given up: basalt.ko (kmod/) runs each vCPU on a CPU of its own, whose
//! local APIC, timer and halt are the guest's. Knows no device and no machine.
//!
//! ```text
//!  Reservation: CPUs that Linux gives up ──▶ BareEngine ──▶ vm ──▶ vcpu: runs, and answers what comes out
//!                                                   ports, memory and MSRs ─┘   INIT and SIPI: power
//!
//!  vm.rs         the VM: what all vCPUs share, doorbells, who gets which interrupt
//!  vcpu/         a vCPU's loop; the instruction that it stopped at, by its page tables; whether it executes at all
//!  state/        registers, CPUID, MSRs, the clock; a saved vCPU there and back
//!  memory/       the guest's memory: read and written, pinned lazily, or reserved where nobody translates
//!  interrupts/   messages and commands, and what devices send them by
//!  module/       basalt.ko: its requests and structures, and each vCPU's page
//!  untrusted.rs  the parsers of a guest's own bytes, for the fuzzer
//! ```
//! ARCHITECTURE.md, "Guests that own their CPUs", names what else there is of such guests, outside of this crate.
#![allow(
    unsafe_code,
    reason = "the module's calls take raw addresses and descriptors; each block says what it relies on"
)]

mod interrupts;
mod memory;
mod module;
mod state;
pub mod untrusted;
mod vcpu;
mod vm;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use engine::{CpuModel, Engine, IdentityMemory, Result, Traits, Vm, failed};
use reservation::Reservation;

use crate::state::cpuid;

/// How long devices look for a guest's next request, unless somebody says otherwise: about what it takes to wake a thread, twice, while
/// the vCPU that has rung stands still.
const BUSY_POLL: Duration = Duration::from_micros(50);

/// The engine of one reservation, whose CPUs its one VM has.
pub struct BareEngine {
    reservation: Reservation,
    busy_poll: Duration,
}

impl BareEngine {
    /// Uses a reservation that somebody has made and handed over.
    ///
    /// # Errors
    /// The descriptor is of no reservation.
    pub fn from_fd(fd: OwnedFd) -> Result<Self> {
        let reservation = Reservation::from_fd(fd).map_err(failed("BASALT_GET_CLAIMED"))?;
        Ok(Self {
            reservation,
            busy_poll: BUSY_POLL,
        })
    }

    /// The same, whose guests' devices look for their next requests as long as this before they are to ring.
    #[must_use]
    pub fn busy_polling(self, busy_poll: Duration) -> Self {
        Self { busy_poll, ..self }
    }
}

impl Engine for BareEngine {
    fn name(&self) -> &'static str {
        "bare"
    }

    fn create_vm(&self, model: CpuModel) -> Result<Arc<dyn Vm>> {
        Ok(Arc::new(
            vm::BareVm::new(&self.reservation, model)?.busy_polling(self.busy_poll),
        ))
    }

    fn create_identity_vm(&self, model: CpuModel, size: u64) -> Result<(Arc<dyn Vm>, IdentityMemory)> {
        let (vm, placed) = vm::BareVm::identity(&self.reservation, model, size)?;
        Ok((Arc::new(vm.busy_polling(self.busy_poll)), placed))
    }

    fn has_servers(&self) -> bool {
        true
    }

    fn pins_memory(&self) -> bool {
        true
    }

    fn traits(&self) -> Result<Traits> {
        let cpuid = cpuid::as_seen(&cpuid::for_vm(&cpuid::offered(), 1), 0);
        Ok(Traits {
            // It passes on no leaf of caches.
            former_cpuid: cpu::hash(&cpuid),
            cpuid,
            capabilities: 0,
            // What it takes over of a vCPU it looks at itself, all of it.
            asked_by_vcpus: u64::MAX,
        })
    }
}
