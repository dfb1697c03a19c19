//! What the owner of a machine does with its functions of the host's, and is told of them; the guest is told when its bus has changed.

use base::{Epoll, EventFd};
use device::{CreateError, MapCounts};
use memory::Pins;

use super::plug::Board;
use super::{FunctionState, NamedFunction};
use crate::deflation::{Ballooned, Deflation, DeflationInfo};
use crate::error::MachineError;
use crate::growth::{Growth, GrowthInfo, Pluggable};
use crate::iommu::Iommu;
use crate::machine::Machine;
use crate::platform::Event;

impl Machine {
    /// Has a function of the host's come to the guest's bus when all of its memory is mapped for that, which is done beside it. What has become
    /// of it is told by [`Machine::functions`].
    ///
    /// # Errors
    /// There is one of that name, the guest has files as memory, or the host has no thread for it.
    pub fn attach(&mut self, function: NamedFunction) -> Result<(), MachineError> {
        let memory = self.functions.memory(&self.ram, self.cpus());
        let board = Board {
            vm: &self.vm,
            bus: &self.pci,
            ioapic: &self.platform.ioapic,
            memory: &memory,
        };
        if !self.ram.pmem().is_empty() {
            return Err(MachineError::FunctionsAndPmem);
        }
        let before = self.functions.slots();
        let attached = self.functions.attach(function, board);
        self.tell_of_change(&before);
        attached
    }

    /// Has a guest look at its bus whose functions were in these slots before.
    fn tell_of_change(&self, before: &[usize]) {
        if self.functions.slots() != before {
            self.platform.events.raise(Event::BusChanged);
        }
    }

    /// Readable when [`Machine::plug_mapped`] has something to do.
    pub fn mapped_event(&self) -> &EventFd {
        self.functions.ended()
    }

    /// Puts functions on the guest's bus whose memory is mapped by now.
    pub fn plug_mapped(&mut self) {
        let memory = self.functions.memory(&self.ram, 1);
        let board = Board {
            vm: &self.vm,
            bus: &self.pci,
            ioapic: &self.platform.ioapic,
            memory: &memory,
        };
        let before = self.functions.slots();
        self.functions.finish(board);
        self.tell_of_change(&before);
    }

    /// Readable when [`Machine::look_at_pins`] has something to do; none before there is a function.
    pub fn pin_events(&self) -> Option<&Epoll> {
        self.functions.interrupt_pins.events()
    }

    /// Has the guest interrupted by functions that have told so by their pins.
    pub fn look_at_pins(&self) {
        self.functions.interrupt_pins.look();
    }

    /// Takes a function from the guest, whether or not that has let go of it. With the last one its memory is unmapped.
    ///
    /// # Errors
    /// It has none of that name.
    pub fn detach(&mut self, id: &str) -> Result<(), MachineError> {
        let before = self.functions.slots();
        let detached = self.functions.detach(id, &self.pci);
        self.tell_of_change(&before);
        detached
    }

    /// The host's functions that the guest has or gets, by their names, and how many bytes of its memory they reach. Those that have left are
    /// closed, if they can be.
    pub fn functions(&mut self) -> (Vec<(String, FunctionState)>, u64) {
        self.functions.close_left();
        (self.functions.states(), self.functions.mapped())
    }

    /// What has been mapped of its memory for the functions that it has, and how long that took.
    pub fn map_counts(&self) -> MapCounts {
        self.functions.map_counts()
    }

    /// Another device plugs its memory from now on: one that was restored, or made anew for a rollback.
    pub fn set_pluggable(&mut self, pluggable: Option<Pluggable>) {
        let cpus = self.cpus();
        self.functions.set_pluggable(pluggable, cpus);
    }

    /// Another device is its guest's IOMMU from now on: one that was restored, or made anew for a rollback.
    pub fn set_iommu(&mut self, iommu: Option<Iommu>) {
        self.functions.set_iommu(iommu.map(|iommu| iommu.endpoints));
    }

    /// Its guest has an IOMMU, by which it says itself what functions of the host's reach.
    pub fn has_iommu(&self) -> bool {
        self.functions.iommu.is_some()
    }

    /// What is plugged of its memory, if any can be.
    pub fn growth(&self) -> Option<GrowthInfo> {
        self.functions.growth.as_ref().map(Growth::info)
    }

    /// Has the guest come to another size of what is plugged: at once, or, while it has functions, as fast as that is mapped for them. `None` if
    /// nothing can be plugged.
    ///
    /// # Errors
    /// There is no such size, or the host has no thread; nothing has changed in the first case.
    pub fn resize_memory(&mut self, bytes: u64) -> Option<Result<(), CreateError>> {
        self.functions.growth.as_mut().map(|growth| growth.request(bytes))
    }

    /// Has so much of what can be plugged mapped for functions as soon as there are any, before the guest is asked for it. `None` if nothing
    /// can be plugged.
    ///
    /// # Errors
    /// As [`Machine::resize_memory`].
    pub fn map_ahead(&mut self, bytes: u64) -> Option<Result<(), CreateError>> {
        self.functions.growth.as_mut().map(|growth| growth.map_ahead(bytes))
    }

    /// Another device is its balloon from now on: one that was restored, or made anew for a rollback.
    pub fn set_ballooned(&mut self, ballooned: Option<Ballooned>) {
        let cpus = self.cpus();
        self.functions.set_ballooned(ballooned, cpus);
    }

    /// How far what functions do without is mapped for them, if there is such a balloon.
    pub fn deflation(&self) -> Option<DeflationInfo> {
        self.functions.deflation.as_ref().map(Deflation::info)
    }

    /// Has the guest do without so much in the end: at once, or, while it has functions, as the rest is mapped for them. `None` if it has no
    /// balloon that functions do without.
    ///
    /// # Errors
    /// There is no such size, or the host has no thread; nothing has changed in the first case.
    pub fn resize_balloon(&mut self, bytes: u64) -> Option<Result<(), CreateError>> {
        let deflation = self.functions.deflation.as_mut();
        deflation.map(|deflation| deflation.request(bytes))
    }

    fn cpus(&self) -> u32 {
        u32::try_from(self.threads.len()).unwrap_or(1)
    }

    /// One that the guest has or gets.
    pub fn first_function(&self) -> Option<&str> {
        self.functions.first()
    }

    /// Memory is being mapped for functions, or unmapped after the last of them, whose group is open until then.
    pub fn maps_memory(&self) -> bool {
        self.functions.is_busy()
    }

    /// Whether the host's pages of the guest's memory have to stay: more than by [`Machine::is_pinned`], which tells of functions alone.
    pub fn pins(&self) -> &Pins {
        self.ram.pins()
    }

    /// Whether the host's pages of the guest's memory have to stay: nothing may be mapped in their place.
    pub fn is_pinned(&self) -> bool {
        self.functions.first().is_some() || self.functions.is_busy()
    }
}
