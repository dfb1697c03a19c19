//! An engine without a CPU: interrupts that count and doorbells that a test rings. Knows no device.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::EventFd;
use engine::{Doorbell, EngineError, Interrupt, MsiMessage, Presence, Vcpu, Vm, VmState};
use vm_memory::GuestRegionMmap;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn refused(what: &str) -> EngineError {
    EngineError::Unusable(format!("the fake engine refuses: {what}"))
}

#[derive(Debug, Default)]
struct InterruptState {
    route: Option<MsiMessage>,
    pending: bool,
    delivered: u64,
    /// What ends are reported of, if any are.
    ends: Option<MsiMessage>,
}

/// An interrupt that counts what it would have delivered.
#[derive(Debug, Default)]
pub struct FakeInterrupt(Mutex<InterruptState>);

impl FakeInterrupt {
    /// How many messages would have reached the guest.
    pub fn delivered(&self) -> u64 {
        lock(&self.0).delivered
    }

    /// What is routed now.
    pub fn routed(&self) -> Option<MsiMessage> {
        lock(&self.0).route
    }

    /// The message whose ends are reported.
    pub fn ends(&self) -> Option<MsiMessage> {
        lock(&self.0).ends
    }
}

impl Interrupt for FakeInterrupt {
    fn trigger(&self) {
        let mut state = lock(&self.0);
        if state.route.is_some() {
            state.delivered += 1;
        } else {
            state.pending = true;
        }
    }

    fn route(&self, message: Option<MsiMessage>) {
        let mut state = lock(&self.0);
        state.route = message;
        if message.is_some() && std::mem::take(&mut state.pending) {
            state.delivered += 1;
        }
    }

    fn is_pending(&self) -> bool {
        lock(&self.0).pending
    }

    fn report_ends(&self, _: u32, message: Option<MsiMessage>) -> engine::Result<()> {
        lock(&self.0).ends = message;
        Ok(())
    }
}

/// A VM that has interrupts and doorbells, and nothing else.
#[derive(Debug, Default)]
pub struct FakeVm {
    interrupts: Mutex<Vec<Arc<FakeInterrupt>>>,
    bells: Mutex<BTreeMap<u64, EventFd>>,
    ahead: Mutex<Ahead>,
}

/// What was to be mapped ahead: addresses and bytes, in their order, and from which address on that is refused.
#[derive(Debug, Default)]
struct Ahead {
    asked: Vec<(u64, u64)>,
    refuses: Option<u64>,
}

impl FakeVm {
    /// The interrupt that was made as number `index`.
    pub fn interrupt(&self, index: usize) -> Option<Arc<FakeInterrupt>> {
        lock(&self.interrupts).get(index).cloned()
    }

    /// Rings the bell at an address or a port, as a guest's write would; tells whether there is one.
    pub fn ring(&self, address: u64) -> bool {
        let bells = lock(&self.bells);
        let bell = bells.get(&address);
        if let Some(event) = bell {
            event.signal();
        }
        bell.is_some()
    }

    /// What [`Vm::map_ahead`] was asked for, in its order, that which was refused too.
    pub fn asked_ahead(&self) -> Vec<(u64, u64)> {
        lock(&self.ahead).asked.clone()
    }

    /// Has it refuse what begins at this address.
    pub fn refuse_ahead(&self, guest: u64) {
        lock(&self.ahead).refuses = Some(guest);
    }

    /// The addresses and ports that have a bell.
    pub fn bells(&self) -> Vec<u64> {
        lock(&self.bells).keys().copied().collect()
    }
}

/// Ports are no addresses that a BAR in memory is ever at.
fn place(bell: Doorbell) -> u64 {
    match bell {
        Doorbell::Mmio(address) => address,
        Doorbell::Port(port) => u64::from(port),
    }
}

impl Vm for FakeVm {
    fn create_vcpu(&self, _: u32, _: u32) -> engine::Result<Box<dyn Vcpu>> {
        Err(refused("it has no CPUs"))
    }

    fn map_ram(&self, _: u32, _: Arc<GuestRegionMmap<()>>, _: Presence) -> engine::Result<()> {
        Err(refused("it maps no memory"))
    }

    fn map_ahead(&self, guest: u64, bytes: u64) -> engine::Result<()> {
        let mut ahead = lock(&self.ahead);
        ahead.asked.push((guest, bytes));
        match ahead.refuses == Some(guest) {
            true => Err(refused("this is mapped when it is touched")),
            false => Ok(()),
        }
    }

    fn set_dirty_tracking(&self, _: u32, _: bool) -> engine::Result<()> {
        Err(refused("it maps no memory"))
    }

    fn dirty_log(&self, _: u32) -> engine::Result<Vec<u64>> {
        Err(refused("it maps no memory"))
    }

    fn send_msi(&self, _: MsiMessage) -> engine::Result<()> {
        Err(refused("it has no APIC"))
    }

    fn create_interrupt(&self) -> Arc<dyn Interrupt> {
        let interrupt = Arc::new(FakeInterrupt::default());
        lock(&self.interrupts).push(Arc::clone(&interrupt));
        interrupt
    }

    fn attach_doorbell(&self, bell: Doorbell, event: &EventFd) -> engine::Result<()> {
        let address = place(bell);
        let mut bells = lock(&self.bells);
        if bells.contains_key(&address) {
            return Err(refused("the bell is in use"));
        }
        let event = event
            .try_clone()
            .map_err(|source| EngineError::Call { call: "dup", source })?;
        bells.insert(address, event);
        Ok(())
    }

    fn detach_doorbell(&self, bell: Doorbell, _: &EventFd) -> engine::Result<()> {
        match lock(&self.bells).remove(&place(bell)) {
            Some(_) => Ok(()),
            None => Err(refused("no such bell")),
        }
    }

    fn reserve_ioapic_pins(&self, _: u32) -> engine::Result<()> {
        Err(refused("it has no I/O APIC"))
    }

    fn save(&self) -> engine::Result<VmState> {
        Err(refused("it has no state"))
    }

    fn restore(&self, _: &VmState) -> engine::Result<()> {
        Err(refused("it has no state"))
    }
}
