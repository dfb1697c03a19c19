//! The virtio-pci transport, modern only (4.1): puts a [`VirtioDevice`] behind PCI registers.
//!
//! One lock guards the registers and the device. It is held while the device starts and stops, which joins the
//! device's threads; those signal through [`signals::Signals`], which takes no lock, so they cannot wait for it.

mod common;
mod layout;
mod saved;
mod signals;
mod table;

#[cfg(test)]
mod ports_tests;
#[cfg(test)]
mod saved_tests;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::EventFd;
use engine::{Doorbell, Vm};
use memory::GuestRam;
use observe::{Counter, LogLimit, Registry};
use pci::{ConfigSpace, MemoryRanges, MsixTable, PciError, PciFunction};
use virtio_bindings::{
    virtio_config::VIRTIO_F_VERSION_1,
    virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC},
};
use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddress, GuestMemory, Permissions};

use crate::busy_poll::BusyPoll;
use crate::device::{Activation, ActiveQueue, DeviceError, QueueInterrupt, VirtioDevice};
use common::{CommonConfig, Effect, QueueSetup};
use layout::{Layout, Region};
pub use saved::{DeviceState, TransportState};
use signals::Signals;
use table::Table;

/// The feature bits that are the transport's (6): each ring can do these.
const TRANSPORT_FEATURES: u64 =
    1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_RING_F_INDIRECT_DESC;

/// Feature bits 24 to 49: a device leaves them to the transport (2.2).
const RESERVED_FEATURES: u64 = (1 << 50) - (1 << 24);

/// Why a device cannot be put on the bus.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// More queues than there are vectors or doorbells.
    #[error("a device with {queues} queues: the most is {most} here")]
    Queues {
        /// How many it has.
        queues: usize,
        /// How many there can be.
        most: usize,
    },
    /// The device claims feature bits of the transport.
    #[error("the device claims the transport's feature bits {0:#x}")]
    Features(u64),
    /// The configuration space cannot be built.
    #[error(transparent)]
    Pci(#[from] PciError),
    /// The host refused an event fd.
    #[error("no event fd for a queue")]
    Event(#[source] std::io::Error),
    /// The device works, or is in no state to be saved.
    #[error("it has to be paused before it is saved")]
    NotPaused,
    /// The device refused to be saved or restored.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The saved state is another device's.
    #[error("it was saved with other {0}: restore with the configuration that it was saved with")]
    Unlike(&'static str),
}

struct Metrics {
    activations: Counter,
    resets: Counter,
    config_errors: Counter,
    notify_exits: Counter,
}

impl Metrics {
    fn new(registry: &Registry, id: &str) -> Self {
        let counter = |name| registry.counter(name, &[("device", id)]);
        Self {
            activations: counter("virtio_activations_total"),
            resets: counter("virtio_resets_total"),
            config_errors: counter("virtio_config_errors_total"),
            notify_exits: counter("virtio_notify_exits_total"),
        }
    }
}

/// How guests reach a device's registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// By memory, where the guest's accesses to it come out.
    Memory,
    /// By ports; the MSI-X table is memory of the guest's.
    Ports,
}

/// Where the queues are.
enum Phase {
    /// Nowhere: the driver has not set them up.
    Idle,
    /// With the device.
    Active,
    /// Here, while the machine is paused.
    Parked(Vec<ActiveQueue>),
}

struct State {
    space: ConfigSpace,
    msix_capability: usize,
    pci_cfg: usize,
    msix: MsixTable,
    common: CommonConfig,
    device: Box<dyn VirtioDevice>,
    phase: Phase,
    // The doorbells that the engine rings now, and the queues they are for.
    doorbells: Vec<(Doorbell, usize)>,
    // Restored and not resumed yet: the driver is to look at all of its queues.
    restored: bool,
}

/// A virtio device on the PCI bus.
pub struct VirtioPciDevice {
    id: String,
    layout: &'static Layout,
    vm: Arc<dyn Vm>,
    memory: Arc<GuestRam>,
    /// Where vectors are read from, if that is memory.
    table: Option<Arc<Table>>,
    kicks: Vec<Arc<EventFd>>,
    signals: Arc<Signals>,
    metrics: Metrics,
    log_limit: LogLimit,
    state: Mutex<State>,
}

impl VirtioPciDevice {
    /// Puts `device`, called `id`, behind the registers of a PCI function.
    ///
    /// # Errors
    /// The device asks for what the transport does not have, or the host refused an event fd.
    pub fn new(
        id: &str,
        device: Box<dyn VirtioDevice>,
        vm: Arc<dyn Vm>,
        memory: Arc<GuestRam>,
        metrics: &Registry,
    ) -> Result<Arc<Self>, TransportError> {
        Self::reached_by(Reach::Memory, (id, device), vm, memory, metrics)
    }

    /// The same, for guests that reach it in a way of their own.
    ///
    /// # Errors
    /// As there.
    pub fn reached_by(
        reach: Reach,
        (id, device): (&str, Box<dyn VirtioDevice>),
        vm: Arc<dyn Vm>,
        memory: Arc<GuestRam>,
        metrics: &Registry,
    ) -> Result<Arc<Self>, TransportError> {
        let layout = match reach {
            Reach::Memory => &layout::IN_MEMORY,
            Reach::Ports => &layout::IN_PORTS,
        };
        let sizes = device.queue_sizes();
        let queues = u16::try_from(sizes.len())
            .ok()
            .filter(|_| sizes.len() < layout.vectors)
            .ok_or(TransportError::Queues {
                queues: sizes.len(),
                most: layout.vectors - 1,
            })?;
        let features = device.features();
        if features & RESERVED_FEATURES != 0 {
            return Err(TransportError::Features(features & RESERVED_FEATURES));
        }
        // One vector a queue, and one for configuration changes.
        let mut interrupts: Vec<_> = (0..=queues).map(|_| vm.create_interrupt()).collect();
        let table = (reach == Reach::Ports).then(|| {
            let table = Arc::new(Table::new(Arc::clone(&memory), std::mem::take(&mut interrupts)));
            interrupts = table.sources();
            table
        });
        let kicks = (0..queues)
            .map(|_| EventFd::new().map(Arc::new))
            .collect::<Result<Vec<_>, _>>()
            .map_err(TransportError::Event)?;
        let signals = Arc::new(Signals::new(interrupts.clone(), usize::from(queues)));
        let built = layout::build(layout, device.device_type(), queues)?;
        let state = State {
            space: built.space,
            msix_capability: built.msix,
            pci_cfg: built.pci_cfg,
            msix: MsixTable::new(interrupts),
            common: CommonConfig::new(features | TRANSPORT_FEATURES, sizes, Arc::clone(&signals)),
            device,
            phase: Phase::Idle,
            doorbells: Vec::new(),
            restored: false,
        };
        Ok(Arc::new(Self {
            id: id.to_owned(),
            layout,
            vm,
            memory,
            table,
            kicks,
            signals,
            metrics: Metrics::new(metrics, id),
            log_limit: LogLimit::new(4),
            state: Mutex::new(state),
        }))
    }

    /// The device's name within the VM.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Takes the queues from the device, whose threads have stopped on return. Registers stay as they are.
    pub fn pause(&self) {
        let mut state = self.lock();
        if matches!(state.phase, Phase::Active) {
            let queues = state.device.deactivate();
            state.phase = Phase::Parked(queues);
        }
    }

    /// Gives the device its queues back. Kicks that came in between are not lost.
    ///
    /// # Errors
    /// The device could not start again; it then waits for its driver to reset it.
    pub fn resume(&self) -> Result<(), DeviceError> {
        let mut guard = self.lock();
        let state = &mut *guard;
        if !matches!(state.phase, Phase::Parked(_)) {
            return Ok(());
        }
        let Phase::Parked(queues) = std::mem::replace(&mut state.phase, Phase::Idle) else {
            return Ok(());
        };
        let kicks: Vec<_> = queues
            .iter()
            .map(|queue| (queue.index, Arc::clone(&queue.kick)))
            .collect();
        if let Err(error) = self.start(state, queues) {
            self.give_up(state, &error.to_string());
            self.move_doorbells(state);
            return Err(error);
        }
        let restored = std::mem::take(&mut state.restored);
        for (index, kick) in kicks {
            kick.signal();
            // What the device had given back without having told is not written anywhere: one interrupt more does no harm.
            if restored {
                self.signals.signal_queue(index);
            }
        }
        Ok(())
    }

    /// Resets the device as its driver can by writing 0 to the device status. BARs and MSI-X stay as they are.
    pub fn reset(&self) {
        self.reset_state(&mut self.lock());
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing leaves the state half changed: registers are plain values, and the device sorts itself out.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reset_state(&self, state: &mut State) {
        if matches!(std::mem::replace(&mut state.phase, Phase::Idle), Phase::Active) {
            state.device.discard();
            drop(state.device.deactivate());
        }
        state.device.reset();
        self.move_doorbells(state);
        state.common.reset();
        for kick in &self.kicks {
            kick.consume();
        }
        self.metrics.resets.increment();
    }

    fn activate(&self, state: &mut State) {
        let started = self
            .build_queues(&state.common)
            .and_then(|queues| self.start(state, queues).map_err(|error| error.to_string()));
        match started {
            Ok(()) => self.metrics.activations.increment(),
            Err(why) => self.give_up(state, &why),
        }
        self.move_doorbells(state);
    }

    fn start(&self, state: &mut State, queues: Vec<ActiveQueue>) -> Result<(), DeviceError> {
        state.device.activate(Activation {
            memory: Arc::clone(&self.memory),
            interrupt: Arc::clone(&self.signals) as Arc<dyn QueueInterrupt>,
            features: state.common.accepted(),
            queues,
        })?;
        state.phase = Phase::Active;
        Ok(())
    }

    /// Tells the driver that only a reset helps (2.1.2).
    fn give_up(&self, state: &mut State, why: &str) {
        self.metrics.config_errors.increment();
        if self.log_limit.allow() {
            log::warn!("{}: the device needs a reset: {why}", self.id);
        }
        state.common.set_needs_reset();
        self.signals.signal_config();
    }

    fn build_queues(&self, common: &CommonConfig) -> Result<Vec<ActiveQueue>, String> {
        let event_idx = common.accepted() & (1 << VIRTIO_RING_F_EVENT_IDX) != 0;
        let enabled = common.queues().iter().zip(&self.kicks).zip(0_u16..);
        enabled
            .filter(|((setup, _), _)| setup.enabled)
            .map(|((setup, kick), index)| {
                let mut queue = self
                    .build_queue(setup)
                    .ok_or_else(|| format!("queue {index} is set up wrongly: {setup:x?}"))?;
                queue.set_event_idx(event_idx);
                queue.set_ready(true);
                Ok(ActiveQueue {
                    index,
                    queue,
                    kick: Arc::clone(kick),
                    busy_poll: BusyPoll::up_to(self.vm.busy_poll()),
                    held: Vec::new(),
                })
            })
            .collect()
    }

    /// A ring whose parts are aligned and lie in guest memory (2.7); `None` when they do not.
    fn build_queue(&self, setup: &QueueSetup) -> Option<Queue> {
        let mut queue = Queue::new(setup.max_size).ok()?;
        queue.try_set_size(setup.size).ok()?;
        queue.try_set_desc_table_address(GuestAddress(setup.desc)).ok()?;
        queue.try_set_avail_ring_address(GuestAddress(setup.driver)).ok()?;
        queue.try_set_used_ring_address(GuestAddress(setup.device)).ok()?;
        let size = usize::from(setup.size);
        let in_memory = |address, length, how| self.memory.check_range(GuestAddress(address), length, how);
        let all = in_memory(setup.desc, 16 * size, Permissions::Read)
            && in_memory(setup.driver, 6 + 2 * size, Permissions::Read)
            && in_memory(setup.device, 6 + 8 * size, Permissions::Write)
            // The queue implementation takes an available ring at 0 for one that was not set up.
            && setup.driver != 0;
        all.then_some(queue)
    }

    /// Makes the engine's doorbells those of the queues in use, where the BAR is now.
    fn move_doorbells(&self, state: &mut State) {
        let base = self.layout.base(&state.space);
        let in_use = !matches!(state.phase, Phase::Idle);
        let wanted: Vec<(Doorbell, usize)> = base
            .filter(|_| in_use)
            .map(|base| {
                let enabled = state
                    .common
                    .queues()
                    .iter()
                    .enumerate()
                    .filter(|(_, setup)| setup.enabled);
                enabled
                    .filter_map(|(queue, _)| Some((self.layout.doorbell(base, queue)?, queue)))
                    .collect()
            })
            .unwrap_or_default();
        if wanted == state.doorbells {
            return;
        }
        for (bell, queue) in std::mem::take(&mut state.doorbells) {
            if let Err(error) = self.vm.detach_doorbell(bell, &self.kicks[queue]) {
                log::error!("{}: a doorbell at {bell:x?} could not be detached: {error}", self.id);
            }
        }
        for (bell, queue) in wanted {
            match self.vm.attach_doorbell(bell, &self.kicks[queue]) {
                Ok(()) => state.doorbells.push((bell, queue)),
                // The guest moved the BAR onto another device's; kicks come as exits then.
                Err(error) if self.log_limit.allow() => {
                    log::warn!("{}: no doorbell at {bell:x?}: {error}", self.id);
                }
                Err(_) => (),
            }
        }
    }

    fn read_bar(&self, state: &State, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let (region, offset) = self.layout.region(offset);
        match region {
            Region::Common => state.common.read(offset, data),
            Region::Isr => {
                if let (0, Some(first)) = (offset, data.first_mut()) {
                    *first = self.signals.take_isr();
                }
            }
            Region::Device => state.device.read_config(offset, data),
            Region::MsixTable => state.msix.read(offset, data),
            Region::MsixPending => state.msix.read_pending(offset, data),
            Region::Notify | Region::None => (),
        }
    }

    fn write_bar(&self, state: &mut State, offset: u64, data: &[u8]) {
        let (region, offset) = self.layout.region(offset);
        match region {
            Region::Common => match state.common.write(offset, data) {
                Effect::Done => (),
                Effect::Refused => self.metrics.config_errors.increment(),
                Effect::Reset => self.reset_state(state),
                Effect::Activate => self.activate(state),
            },
            Region::Device => state.device.write_config(offset, data),
            Region::Notify => {
                self.metrics.notify_exits.increment();
                if let Some(kick) = self.kicks.get(offset / layout::NOTIFY_OFF_MULTIPLIER as usize) {
                    kick.signal();
                }
            }
            Region::MsixTable => state.msix.write(offset, data),
            Region::Isr | Region::MsixPending | Region::None => (),
        }
    }

    /// Sends interrupts that a mask had kept.
    fn serve_kept(&self) {
        if let Some(table) = &self.table {
            table.send_kept();
        }
    }

    /// What the PCI configuration access capability points to (4.1.4.9): offset and length of an aligned access.
    fn pci_cfg_window(&self, state: &State) -> Option<(u64, usize)> {
        let at = state.pci_cfg;
        let offset = state.space.u32(at + layout::PCI_CFG_OFFSET);
        let length = state.space.u32(at + layout::PCI_CFG_LENGTH);
        let bar = state.space.u16(at + layout::PCI_CFG_BAR) & 0xff;
        let valid = bar == u16::from(layout::BAR)
            && matches!(length, 1 | 2 | 4)
            && offset.is_multiple_of(length)
            && u64::from(offset) < self.layout.size;
        valid.then_some((u64::from(offset), length as usize))
    }
}

fn overlaps(offset: usize, length: usize, start: usize, end: usize) -> bool {
    offset < end && offset.saturating_add(length) > start
}

impl PciFunction for VirtioPciDevice {
    fn config_read(&self, offset: usize, data: &mut [u8]) {
        let mut state = self.lock();
        let window = state.pci_cfg + layout::PCI_CFG_DATA;
        if overlaps(offset, data.len(), window, window + 4)
            && let Some((at, length)) = self.pci_cfg_window(&state)
        {
            let mut value = [0; 4];
            self.read_bar(&state, at, &mut value[..length]);
            state.space.write(window, &value[..length]);
        }
        state.space.read(offset, data);
    }

    fn config_write(&self, offset: usize, data: &[u8]) {
        let mut guard = self.lock();
        let state = &mut *guard;
        state.space.write(offset, data);
        let control = state.msix_capability + 2;
        if overlaps(offset, data.len(), control, control + 2) {
            let control = state.space.u16(control);
            state.msix.set_control(control);
        }
        if let Some(table) = &self.table {
            let bar = state.space.memory_ranges()[usize::from(layout::TABLE_BAR)];
            table.put_at(bar.map(|bar| bar.start()).filter(|_| state.msix.may_fire()));
        }
        let window = state.pci_cfg + layout::PCI_CFG_DATA;
        if overlaps(offset, data.len(), window, window + 4)
            && let Some((at, length)) = self.pci_cfg_window(state)
        {
            let value = state.space.u32(window).to_le_bytes();
            self.write_bar(state, at, &value[..length]);
        }
        if ConfigSpace::moves_memory(offset, data.len()) {
            self.move_doorbells(state);
        }
    }

    fn memory_ranges(&self) -> MemoryRanges {
        self.lock().space.memory_ranges()
    }

    fn port_ranges(&self) -> MemoryRanges {
        self.lock().space.port_ranges()
    }

    fn bar_read(&self, bar: usize, offset: u64, data: &mut [u8]) {
        self.serve_kept();
        match bar == usize::from(layout::BAR) {
            true => self.read_bar(&self.lock(), offset, data),
            // A table that is memory, which its guest reads there.
            false => data.fill(0),
        }
    }

    fn bar_write(&self, bar: usize, offset: u64, data: &[u8]) {
        self.serve_kept();
        if bar == usize::from(layout::BAR) {
            self.write_bar(&mut self.lock(), offset, data);
        }
    }
}
