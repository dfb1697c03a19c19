//! A function's registers as the guest sees them: configuration space and MSI-X are ours, everything else is the function's own.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::EventFd;
use device::CreateError;
use engine::Interrupt;
use memory::Ram;
use observe::LogLimit;
use pci::config::{Command, register};
use pci::{BAR_COUNT, ConfigSpace, MemoryRanges, MsixTable, PciFunction};
use vfio::{CONFIG_REGION, Device, Function, Irq, Mapped, Region, Type1};
use vm_memory::GuestRegionMmap;

use crate::description::{Description, Place};
use crate::windows::Windows;
use crate::{borrowed, refused};

/// MSI-X is on (6.8.2.3).
const MSIX_ENABLE: u16 = 1 << 15;

/// Where in its capability that stands.
const MSIX_CONTROL: usize = 2;

/// Log lines in a second, which a guest can cause.
const LOG_LINES: u32 = 2;

struct State {
    space: ConfigSpace,
    msix: MsixTable,
    windows: Windows,
    /// The host has it on.
    on: bool,
}

/// A function on the guest's bus.
pub(crate) struct Registers {
    // Fields are dropped in this order: nothing of the host's reaches the memory any more when that goes.
    state: Mutex<State>,
    function: Function,
    _space: Type1,
    _mapped: Vec<Mapped>,
    _memory: Vec<Arc<GuestRegionMmap<()>>>,
    events: Vec<EventFd>,
    capability: usize,
    bars: [Region; BAR_COUNT],
    config: Region,
    table: Place,
    pending: Place,
    log_limit: LogLimit,
}

impl Registers {
    pub(crate) fn new(
        function: Function,
        (space, mapped): (Type1, Vec<Mapped>),
        ram: &Ram,
        description: &Description,
        (interrupts, events, windows): (Vec<Arc<dyn Interrupt>>, Vec<EventFd>, Windows),
    ) -> Result<Self, CreateError> {
        let mut bars: [Region; BAR_COUNT] = Default::default();
        for (index, bar) in (0..).zip(&mut bars) {
            *bar = function.region(index).map_err(refused("its BARs"))?;
        }
        let config = function
            .region(CONFIG_REGION)
            .map_err(refused("its configuration space"))?;
        let (shown, capability) = description
            .space()
            .map_err(|error| CreateError::Value(error.to_string()))?;
        Ok(Self {
            state: Mutex::new(State {
                space: shown,
                msix: MsixTable::new(interrupts),
                windows,
                on: false,
            }),
            function,
            _space: space,
            _mapped: mapped,
            _memory: ram.regions().to_vec(),
            events,
            capability,
            bars,
            config,
            table: description.table(),
            pending: description.pending(),
            log_limit: LogLimit::new(LOG_LINES),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes over message control, which the guest may have changed.
    fn follow_msix(&self, state: &mut State) {
        let control = state.space.u16(self.capability + MSIX_CONTROL);
        let on = control & MSIX_ENABLE != 0;
        let events = match on {
            true => borrowed(&self.events),
            false => Vec::new(),
        };
        if !on {
            state.msix.set_control(control);
        }
        if on != state.on {
            match self.function.set_interrupts(Irq::MsiX, &events) {
                Ok(()) => state.on = on,
                Err(error) => self.warn("its interrupts", &error),
            }
        }
        if on {
            state.msix.set_control(control);
        }
    }

    /// Which bits of the command register are the function's own (6.2.2).
    fn follow_command(&self, command: Command) {
        let passed = command & (Command::MEMORY_SPACE | Command::BUS_MASTER);
        // It is not to raise INTx, which nobody would hear.
        let bits = (passed | Command::INTERRUPT_DISABLE).bits().to_le_bytes();
        if let Err(error) = self.function.write(&self.config, register::COMMAND as u64, &bits) {
            self.warn("its command register", &error);
        }
    }

    /// What a guest can cause as often as it likes.
    fn warn(&self, what: &str, error: &dyn std::error::Error) {
        if self.log_limit.allow() {
            log::warn!("a PCI function of the host cannot be used: {what}: {error}");
        }
    }
}

impl PciFunction for Registers {
    fn config_read(&self, offset: usize, data: &mut [u8]) {
        self.state().space.read(offset, data);
    }

    fn config_write(&self, offset: usize, data: &[u8]) {
        let mut state = self.state();
        let before = state.space.command();
        state.space.write(offset, data);
        let command = state.space.command();
        if command != before {
            self.follow_command(command);
        }
        if ConfigSpace::moves_memory(offset, data.len()) {
            let ranges = state.space.memory_ranges();
            state.windows.follow(&ranges);
        }
        self.follow_msix(&mut state);
    }

    fn memory_ranges(&self) -> MemoryRanges {
        self.state().space.memory_ranges()
    }

    fn bar_read(&self, bar: usize, offset: u64, data: &mut [u8]) {
        if let Some(at) = self.table.hit(bar, offset) {
            self.state().msix.read(at, data);
        } else if let Some(at) = self.pending.hit(bar, offset) {
            self.state().msix.read_pending(at, data);
        } else if let Err(error) = self.function.read(&self.bars[bar], offset, data) {
            data.fill(0xff);
            self.warn("reading a register", &error);
        }
    }

    fn bar_write(&self, bar: usize, offset: u64, data: &[u8]) {
        if let Some(at) = self.table.hit(bar, offset) {
            self.state().msix.write(at, data);
        } else if self.pending.hit(bar, offset).is_none()
            && let Err(error) = self.function.write(&self.bars[bar], offset, data)
        {
            self.warn("writing a register", &error);
        }
    }
}
