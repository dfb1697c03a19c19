//! A function's interrupts: which kind the guest has turned on, told to the host, and where each goes, told to the engine.
//!
//! MSI and MSI-X have the same interrupts of the engine's, as one kind is on at a time; a guest that turns both on has MSI-X. One that
//! has turned on neither has the pin (PCI 3.0, 6.8.1.3), from when it has turned on the function's memory: before that nobody could serve it.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use base::EventFd;
use device::{CreateError, InterruptPin};
use engine::{Interrupt, Vm};
use pci::config::Command;
use pci::{ConfigSpace, Msi, MsixTable};
use vfio::{Device, IntxMask, Irq, VfioError};

use crate::description::Description;

/// MSI-X's message control (6.8.2.3), in its capability, and the bit that turns it on.
const MSIX_CONTROL: usize = 2;
const MSIX_ENABLE: u16 = 1 << 15;

/// The pin as it is turned on.
const PIN: (Irq, usize) = (Irq::IntX, 1);

/// All of a function's.
pub(crate) struct Interrupts {
    events: Vec<EventFd>,
    msi: Option<Msi>,
    msix: Option<(usize, MsixTable)>,
    pin: Option<Arc<dyn InterruptPin>>,
    /// What the guest has turned on, and how many.
    on: Option<(Irq, usize)>,
    /// The host has done so.
    works: bool,
}

impl Interrupts {
    /// As many as the function has, with an event each, all off.
    pub(crate) fn new(
        vm: &dyn Vm,
        shown: &Description,
        pin: Option<Arc<dyn InterruptPin>>,
    ) -> Result<Self, CreateError> {
        let host = |what| move |source| CreateError::Host { what, source };
        let (mut sources, mut events) = (Vec::new(), Vec::new());
        for _ in 0..shown.vectors() {
            let (event, source) = (EventFd::new().map_err(host("an event fd"))?, vm.create_interrupt());
            let theirs = event.try_clone().map_err(host("a copy of an event fd"))?;
            let attached = source.attach(theirs);
            attached.map_err(|error| CreateError::Value(error.to_string()))?;
            sources.push(source);
            events.push(event);
        }
        let first = |count: u16| -> Vec<Arc<dyn Interrupt>> { sources.iter().take(count.into()).cloned().collect() };
        let msi = shown
            .msi
            .map(|(at, layout)| Msi::new(layout, at, first(layout.vectors())));
        let msix = shown.msix.map(|(at, vectors)| (at, MsixTable::new(first(vectors))));
        Ok(Self {
            events,
            msi,
            msix,
            pin: pin.filter(|_| shown.pin),
            on: None,
            works: false,
        })
    }

    /// MSI-X's table.
    pub(crate) fn table(&mut self) -> Option<&mut MsixTable> {
        self.msix.as_mut().map(|(_, table)| table)
    }

    /// MSI's pending bits.
    pub(crate) fn msi_pending(&self) -> u32 {
        self.msi.as_ref().map_or(0, Msi::pending)
    }

    /// What the guest has turned on, in words.
    pub(crate) fn what(&self) -> &'static str {
        match self.on {
            Some(PIN) => "its interrupt pin",
            _ => "its interrupts",
        }
    }

    /// Whether the function may assert its pin: the host listens to it, and the guest has not turned it off.
    pub(crate) fn hears_pin(&self, space: &ConfigSpace) -> bool {
        self.works && self.on == Some(PIN) && self.wanted(space) == self.on
    }

    /// The function may assert its pin from now on, or has just been told not to.
    pub(crate) fn switch_pin(&self, on: bool) {
        if let Some(pin) = &self.pin {
            pin.switch(on);
        }
    }

    /// Takes over what the registers in configuration space say.
    ///
    /// # Errors
    /// The host refuses: the guest gets no interrupts until it turns them off and on.
    pub(crate) fn follow(&mut self, space: &ConfigSpace, function: &dyn Device) -> Result<(), VfioError> {
        let wanted = self.wanted(space);
        let changed = if wanted == self.on {
            Ok(())
        } else {
            self.change(wanted, space, function)
        };
        let (irq, works) = (self.on.map(|(irq, _)| irq), self.works);
        self.route(irq.filter(|_| works), space);
        changed
    }

    /// All is off and as it was at first.
    ///
    /// # Errors
    /// The host refuses.
    pub(crate) fn reset(&mut self, fresh: &ConfigSpace, function: &dyn Device) -> Result<(), VfioError> {
        let changed = self.follow(fresh, function);
        if let Some((_, table)) = &mut self.msix {
            table.reset();
        }
        changed
    }

    fn wanted(&self, space: &ConfigSpace) -> Option<(Irq, usize)> {
        if let Some((at, table)) = &self.msix
            && space.u16(at + MSIX_CONTROL) & MSIX_ENABLE != 0
        {
            return Some((Irq::MsiX, table.len()));
        }
        let count = self.msi.as_ref().map_or(0, |msi| msi.enabled(space));
        if count > 0 {
            return Some((Irq::Msi, count.into()));
        }
        let reached = space.command().contains(Command::MEMORY_SPACE);
        (self.pin.is_some() && reached).then_some(PIN)
    }

    /// Nothing goes anywhere while the host changes over.
    fn change(
        &mut self,
        wanted: Option<(Irq, usize)>,
        space: &ConfigSpace,
        function: &dyn Device,
    ) -> Result<(), VfioError> {
        self.route(None, space);
        let off = match self.on.take() {
            Some((irq, _)) if self.works => function.set_interrupts(irq, &[]),
            _ => Ok(()),
        };
        self.on = wanted;
        self.works = false;
        let on = match (wanted, &self.pin) {
            (Some(PIN), Some(pin)) => turn_pin_on(function, pin.as_ref()),
            (Some((irq, count)), _) => turn_on(function, irq, &self.events[..count]),
            (None, _) => return off,
        };
        self.works = on.is_ok();
        off.and(on)
    }

    fn route(&mut self, irq: Option<Irq>, space: &ConfigSpace) {
        // One kind is off before the other goes on: the interrupts are the same.
        if let Some(msi) = self.msi.as_mut().filter(|_| irq != Some(Irq::Msi)) {
            msi.follow(space, false);
        }
        if let Some((at, table)) = &mut self.msix {
            match irq {
                Some(Irq::MsiX) => table.set_control(space.u16(*at + MSIX_CONTROL)),
                _ => table.set_control(0),
            }
        }
        if let Some(msi) = self.msi.as_mut().filter(|_| irq == Some(Irq::Msi)) {
            msi.follow(space, true);
        }
    }
}

/// Until the function may assert its pin nothing comes: its command register is told afterwards.
fn turn_pin_on(function: &dyn Device, pin: &dyn InterruptPin) -> Result<(), VfioError> {
    function.set_interrupts(Irq::IntX, &[pin.asserts().as_fd()])?;
    function
        .mask_intx(IntxMask::UnmaskBy(pin.ended().as_fd()))
        .inspect_err(|_| {
            if let Err(error) = function.set_interrupts(Irq::IntX, &[]) {
                log::error!("the interrupt pin of a PCI function of the host could not be turned off: {error}");
            }
        })
}

/// Of MSI a host may have fewer than the guest wants: the function is told of so many then, and uses no more.
fn turn_on(function: &dyn Device, irq: Irq, events: &[EventFd]) -> Result<(), VfioError> {
    let events: Vec<BorrowedFd<'_>> = events.iter().map(AsFd::as_fd).collect();
    match function.set_interrupts(irq, &events) {
        Err(VfioError::Vectors { available, .. }) if irq == Irq::Msi && available > 0 => {
            let fewer = 1_usize << available.ilog2();
            function.set_interrupts(irq, &events[..fewer.min(events.len())])
        }
        other => other,
    }
}
