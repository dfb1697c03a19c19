//! Functions of the host's PCI bus that the guest has or gets. Memory is mapped for them beside the guest, and they come to its bus when
//! all of it is. Knows no kind of function, and not by what it was taken from the host.
//!
//! ```text
//!  attach ──▶ Mapping ── mapped ──▶ Present ── detach ──▶ Leaving ──▶ closed; with the last one the memory is unmapped
//!                └────── refused ─▶ Failed ─── detach ──▶ gone
//! ```
//! Of a guest that has an IOMMU nothing is mapped for them but what it maps itself: they are on the bus at once, each with an address space of
//! its own.
//!
//! One that leaves is closed by this thread, when no vCPU is in an access to it any more: vCPUs may neither close it nor unmap memory.
//! As long as one is more than failed, the host's pages of the guest's memory stay where they are: nothing may be mapped in their place.

mod interrupt_pins;
mod of_machine;
mod plug;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Weak};

use base::{EventFd, StopSignal, Worker};
use boot::GuestIommu;
use device::{CreateError, DmaMemory, DmaSpace, Endpoints, GuestDma, HostFunction, MapCounts, PluggableDma, Reach};
use memory::{HugeBytes, Ram};
use pci::{PciBus, PciFunction};

use crate::deflation::{Ballooned, Deflation};
use crate::error::MachineError;
use crate::growth::{Growth, Pluggable};
use crate::machine::host;
use interrupt_pins::{InterruptPins, Line};
use plug::{plug, plug_behind};

pub(crate) use plug::Board;

/// More threads than this do not fill memory faster than one can map it.
const MAX_FILLERS: u32 = 4;

/// So many threads fill memory ahead of the one that maps it: about as many as there are vCPUs.
fn fillers(cpus: u32) -> usize {
    usize::try_from(cpus.clamp(1, MAX_FILLERS)).unwrap_or(1)
}

/// A guest's memory as it is mapped: filled ahead, if it is not there already.
fn memory(ram: &Ram, cpus: u32, growth: Option<&Growth>, deflation: Option<&Deflation>) -> DmaMemory {
    let mut memory = DmaMemory::of(ram);
    if ram.huge() == HugeBytes::default() && ram.identity_layout().is_none() {
        memory = memory.filled_by(fillers(cpus));
    }
    if let Some(deflation) = deflation {
        memory = memory.with_ballooned(deflation.dma().clone());
    }
    match growth {
        Some(growth) => memory.with_pluggable(ram, growth.dma().clone()),
        None => memory,
    }
}

/// A function of the host's PCI bus and its name.
pub struct NamedFunction {
    /// Its name within the VM.
    pub id: String,
    /// The function.
    pub function: Box<dyn HostFunction>,
}

/// Where a function stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FunctionState {
    /// The guest's memory is being mapped for it.
    Mapping,
    /// It is on the guest's bus, at this device number.
    Present(usize),
    /// It is off the bus, and not closed yet.
    Leaving,
    /// It could not be.
    Failed(String),
}

enum Place {
    Waiting(Box<dyn HostFunction>),
    Present(usize, Option<Arc<Line>>),
    Leaving(Arc<dyn PciFunction>),
    Failed(String),
}

struct Known {
    id: String,
    place: Place,
}

type Mapped = Result<Arc<GuestDma>, CreateError>;

/// Memory that is being mapped.
struct Mapping {
    space: Arc<DmaSpace>,
    // `None` until it has ended.
    worker: Worker<Option<Mapped>>,
    /// No function waits for it any more.
    is_given_up: bool,
}

/// All functions of a VM.
pub(crate) struct HostFunctions {
    /// First, as its thread maps memory of `dma`.
    growth: Option<Growth>,
    /// As `growth`.
    deflation: Option<Deflation>,
    known: Vec<Known>,
    /// Of the guest's IOMMU, behind which they come.
    iommu: Option<Endpoints>,
    interrupt_pins: InterruptPins,
    mapping: Option<Mapping>,
    dma: Option<Arc<GuestDma>>,
    /// Memory that is being unmapped, as long as the first is there.
    unmapping: Option<(Weak<()>, Worker<()>)>,
    /// Signalled when all memory is mapped, or will not be.
    ended: Arc<EventFd>,
}

impl HostFunctions {
    /// None yet, of a guest with memory that can be plugged, or without.
    pub(crate) fn new(pluggable: Option<Pluggable>, cpus: u32) -> Result<Self, MachineError> {
        Ok(Self {
            growth: pluggable.map(|pluggable| Growth::new(pluggable, fillers(cpus))),
            deflation: None,
            known: Vec::new(),
            iommu: None,
            interrupt_pins: InterruptPins::default(),
            mapping: None,
            dma: None,
            unmapping: None,
            ended: Arc::new(EventFd::new().map_err(host("an event fd"))?),
        })
    }

    /// Another device plugs its memory from now on. No function is there.
    pub(crate) fn set_pluggable(&mut self, pluggable: Option<Pluggable>, cpus: u32) {
        self.growth = pluggable.map(|pluggable| Growth::new(pluggable, fillers(cpus)));
    }

    /// With a balloon that functions do without, or without one.
    pub(crate) fn with_ballooned(mut self, ballooned: Option<Ballooned>, cpus: u32) -> Self {
        self.set_ballooned(ballooned, cpus);
        self
    }

    /// Another device is its balloon from now on. No function is there.
    pub(crate) fn set_ballooned(&mut self, ballooned: Option<Ballooned>, cpus: u32) {
        self.deflation = ballooned.map(|ballooned| Deflation::new(ballooned, fillers(cpus)));
    }

    /// They come behind this IOMMU from now on, or behind none. No function is there.
    pub(crate) fn set_iommu(&mut self, iommu: Option<Endpoints>) {
        self.iommu = iommu;
    }

    /// As it is mapped for functions.
    pub(crate) fn memory(&self, ram: &Ram, cpus: u32) -> DmaMemory {
        memory(ram, cpus, self.growth.as_ref(), self.deflation.as_ref())
    }

    /// Puts a function on the bus before the guest runs; its memory is mapped when this returns, unless the guest maps that.
    pub(crate) fn build(
        &mut self,
        NamedFunction { id, function }: NamedFunction,
        board: Board<'_>,
    ) -> Result<(), MachineError> {
        if self.dma.is_none() && self.iommu.is_none() {
            self.growth.iter_mut().for_each(Growth::pace);
            let mapped = function.space().map(board.memory);
            self.dma = Some(mapped.map_err(|source| MachineError::Function { id: id.clone(), source })?);
            self.map_ahead();
        }
        self.known.push(Known {
            id,
            place: Place::Waiting(function),
        });
        self.plug_all(board);
        match self.known.pop() {
            Some(Known {
                id,
                place: Place::Failed(why),
            }) => Err(MachineError::Function {
                id,
                source: CreateError::Value(why),
            }),
            Some(known) => {
                self.known.push(known);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Has a function come to the bus of a guest that may run, when all memory is mapped, or at once if the guest maps that.
    pub(crate) fn attach(
        &mut self,
        NamedFunction { id, function }: NamedFunction,
        board: Board<'_>,
    ) -> Result<(), MachineError> {
        if self.known.iter().any(|known| known.id == id) {
            return Err(MachineError::FunctionTaken(id));
        }
        if self.mapping.as_ref().is_some_and(|mapping| mapping.is_given_up) {
            return Err(MachineError::FunctionsLeave);
        }
        if let Some((_, unmapping)) = self.unmapping.take() {
            unmapping.stop();
        }
        if self.iommu.is_none() && self.dma.is_none() && self.mapping.is_none() {
            self.growth.iter_mut().for_each(Growth::pace);
            let space = function.space();
            let (mapped, memory, ended) = (Arc::clone(&space), board.memory.clone(), Arc::clone(&self.ended));
            let filling = self.deflation.as_ref().map(Deflation::filling);
            let worker = Worker::spawn("dma-map", None, move |_, _| {
                filling.iter().for_each(|filling| filling.wait(&mapped));
                let result = mapped.map(&memory);
                ended.signal();
                Some(result)
            });
            let worker = worker.map_err(host("a thread"))?;
            self.mapping = Some(Mapping {
                space,
                worker,
                is_given_up: false,
            });
        }
        self.known.push(Known {
            id,
            place: Place::Waiting(function),
        });
        if self.dma.is_some() || self.iommu.is_some() {
            self.plug_all(board);
        }
        Ok(())
    }

    /// Readable when [`HostFunctions::finish`] has something to do.
    pub(crate) fn ended(&self) -> &EventFd {
        &self.ended
    }

    /// Takes over what was mapped, if it is time, and puts the functions that have waited for it on the bus.
    pub(crate) fn finish(&mut self, board: Board<'_>) {
        if !self.ended.consume() {
            return;
        }
        let mapped = self.mapping.take().and_then(|mapping| mapping.worker.stop().flatten());
        match mapped {
            Some(Ok(dma)) => {
                self.dma = Some(dma);
                self.plug_all(board);
                self.map_ahead();
            }
            Some(Err(error)) => self.fail(&error.to_string()),
            None => self.fail("the thread that maps memory has panicked: a bug"),
        }
        self.forget_memory_of_none();
    }

    /// Takes a function from the guest, whether or not that has let go of it.
    pub(crate) fn detach(&mut self, id: &str, bus: &PciBus) -> Result<(), MachineError> {
        let position = self.known.iter().position(|known| known.id == id);
        let position = position.ok_or_else(|| MachineError::NoFunction(id.to_owned()))?;
        let removed = match &self.known[position].place {
            Place::Present(slot, line) => {
                if let Some(line) = line {
                    self.interrupt_pins.remove(line);
                }
                if let Some(iommu) = &self.iommu {
                    iommu.remove(GuestIommu::endpoint(*slot));
                }
                bus.remove(*slot)
            }
            Place::Leaving(_) => return Ok(()),
            Place::Waiting(_) | Place::Failed(_) => None,
        };
        match removed {
            Some(function) => self.known[position].place = Place::Leaving(function),
            None => drop(self.known.remove(position)),
        }
        self.close_left();
        Ok(())
    }

    /// Closes functions that have left, and that no vCPU is in an access to.
    pub(crate) fn close_left(&mut self) {
        self.known.retain(|known| match &known.place {
            Place::Leaving(function) => Arc::strong_count(function) > 1,
            _ => true,
        });
        self.forget_memory_of_none();
    }

    /// Memory is being mapped or unmapped, which keeps it where it is and groups open.
    pub(crate) fn is_busy(&self) -> bool {
        let unmapping = self
            .unmapping
            .as_ref()
            .is_some_and(|(lasts, _)| lasts.strong_count() > 0);
        self.mapping.is_some() || unmapping
    }

    /// Each with its name, in the order in which they came.
    pub(crate) fn states(&self) -> Vec<(String, FunctionState)> {
        let state = |place: &Place| match place {
            Place::Waiting(_) => FunctionState::Mapping,
            Place::Present(slot, _) => FunctionState::Present(*slot),
            Place::Leaving(_) => FunctionState::Leaving,
            Place::Failed(why) => FunctionState::Failed(why.clone()),
        };
        self.known
            .iter()
            .map(|known| (known.id.clone(), state(&known.place)))
            .collect()
    }

    /// Where the guest finds them.
    fn slots(&self) -> Vec<usize> {
        let slot = |known: &Known| match known.place {
            Place::Present(slot, _) => Some(slot),
            _ => None,
        };
        self.known.iter().filter_map(slot).collect()
    }

    /// One that the guest's memory is pinned for.
    pub(crate) fn first(&self) -> Option<&str> {
        let pins = |known: &&Known| !matches!(known.place, Place::Failed(_));
        self.known.iter().find(pins).map(|known| known.id.as_str())
    }

    /// Bytes that functions reach.
    pub(crate) fn mapped(&self) -> u64 {
        match (&self.mapping, &self.dma) {
            (Some(mapping), _) => mapping.space.mapped(),
            (None, Some(dma)) => dma.space().mapped(),
            (None, None) => self.iommu.as_ref().map_or(0, Endpoints::mapped),
        }
    }

    /// What can be plugged, as they reach it.
    pub(crate) fn pluggable(&self) -> Option<&PluggableDma> {
        self.growth.as_ref().map(Growth::dma)
    }

    /// What has been mapped, and how long that took.
    fn map_counts(&self) -> MapCounts {
        match (&self.mapping, &self.dma) {
            (Some(mapping), _) => mapping.space.map_counts(),
            (None, Some(dma)) => dma.space().map_counts(),
            (None, None) => self.iommu.as_ref().map(Endpoints::map_counts).unwrap_or_default(),
        }
    }

    fn plug_all(&mut self, board: Board<'_>) {
        for known in &mut self.known {
            let place = std::mem::replace(&mut known.place, Place::Failed(String::new()));
            let Place::Waiting(function) = place else {
                known.place = place;
                continue;
            };
            let pins = &mut self.interrupt_pins;
            let plugged = match (&self.iommu, &self.dma) {
                (Some(iommu), _) => plug_behind(iommu, function, board, pins),
                (None, Some(dma)) => plug(function, Reach::All(Arc::clone(dma)), board, pins, |_| ()),
                (None, None) => {
                    known.place = Place::Waiting(function);
                    continue;
                }
            };
            known.place = plugged.map_or_else(Place::Failed, |plugged| Place::Present(plugged.slot, plugged.line));
            if let Place::Failed(why) = &known.place {
                log::warn!(
                    "the PCI function `{}` of the host's is not the guest's: {why}",
                    known.id
                );
            }
        }
    }

    fn map_ahead(&mut self) {
        if let Some(growth) = &mut self.growth
            && let Err(error) = growth.go_on()
        {
            log::error!("memory is mapped as the guest plugs it, not ahead: {error}");
        }
        if let Some(deflation) = &mut self.deflation
            && let Err(error) = deflation.go_on()
        {
            log::error!("the guest's balloon stays as it is: {error}");
        }
    }

    fn fail(&mut self, why: &str) {
        log::warn!("the guest's memory is not mapped for functions of the host's: {why}");
        for known in &mut self.known {
            if matches!(known.place, Place::Waiting(_)) {
                known.place = Place::Failed(why.to_owned());
            }
        }
    }

    /// Nothing more is mapped for them: whoever ends the VM does not wait for that.
    pub(crate) fn give_up(&self) {
        let mapping = self.mapping.iter().map(|mapping| &mapping.space);
        let mapped = self.dma.iter().map(|dma| dma.space());
        mapping.chain(mapped).for_each(|space| space.stop());
    }

    /// With the last function the memory is unmapped. That takes as long as there is memory, which nobody has to wait for.
    fn forget_memory_of_none(&mut self) {
        if self.first().is_some() {
            let mapping = self.mapping.as_ref().map(|mapping| &mapping.space);
            if let Some(space) = self.dma.as_ref().map(|dma| dma.space()).or(mapping) {
                space.close_groups();
            }
            return;
        }
        if let Some(mapping) = &mut self.mapping {
            // `finish` comes when it has ended.
            mapping.space.stop();
            mapping.is_given_up = true;
        }
        if self.mapping.is_none() {
            self.growth.iter_mut().for_each(Growth::free);
            self.deflation.iter_mut().for_each(Deflation::free);
        }
        if let Some(dma) = self.dma.take() {
            let unmapped = Arc::new(());
            let lasts = Arc::downgrade(&unmapped);
            let unmap = move |(), _: &StopSignal| {
                drop(dma);
                drop(unmapped);
            };
            match Worker::spawn("dma-unmap", (), unmap) {
                Ok(worker) => self.unmapping = Some((lasts, worker)),
                Err(error) => log::warn!("the guest's memory was unmapped while others waited: {error}"),
            }
        }
    }
}

impl Drop for HostFunctions {
    fn drop(&mut self) {
        self.give_up();
    }
}
