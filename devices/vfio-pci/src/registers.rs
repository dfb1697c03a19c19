//! A function's registers as the guest sees them: configuration space and MSI-X are ours, as [`crate::policy`] says; everything else is the
//! function's own.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device::{CreateError, Reach};
use engine::FunctionGuard;
use observe::LogLimit;
use pci::config::{Command, SIZE, register};
use pci::{BAR_COUNT, ConfigSpace, MemoryRanges, PciFunction};
use vfio::{CONFIG_REGION, Device, Group, Region, VfioError};

use crate::description::Description;
use crate::interrupts::Interrupts;
use crate::policy::{D3_HOT, DEVICE_CONTROL, INITIATE_FUNCTION_LEVEL_RESET, PMCSR, POWER_STATE};
use crate::refused;
use crate::windows::Windows;

/// Log lines in a second, which a guest can cause.
const LOG_LINES: u32 = 2;

/// The byte of device control whose upper bit resets the function, and that bit.
const RESET_BYTE: usize = DEVICE_CONTROL + 1;
const RESET_BIT: u8 = INITIATE_FUNCTION_LEVEL_RESET.to_le_bytes()[1];

/// In the status register (6.2.3).
const INTERRUPT_STATUS: u16 = 1 << 3;

struct State {
    space: ConfigSpace,
    interrupts: Interrupts,
    windows: Windows,
    /// What the function's command register was given.
    command: Command,
}

/// A function on the guest's bus.
pub(crate) struct Registers {
    // Fields are dropped in this order: the function is closed, which resets it, before memory is unmapped and goes.
    state: Mutex<State>,
    function: Box<dyn Device>,
    _known: FunctionGuard,
    _reach: Reach,
    _group: Option<Arc<Group>>,
    bars: [Region; BAR_COUNT],
    config: Region,
    shown: Description,
    log_limit: LogLimit,
}

impl Registers {
    /// A function that nothing is turned on in.
    pub(crate) fn new(
        // Dropped the last first.
        (reach, group): (Reach, Option<Arc<Group>>),
        (function, known): (Box<dyn Device>, FunctionGuard),
        shown: Description,
        (interrupts, windows): (Interrupts, Windows),
    ) -> Result<Self, CreateError> {
        let mut bars: [Region; BAR_COUNT] = Default::default();
        for (index, bar) in (0..).zip(&mut bars) {
            *bar = function.region(index).map_err(refused("its BARs"))?;
        }
        let config = function
            .region(CONFIG_REGION)
            .map_err(refused("its configuration space"))?;
        let registers = Self {
            state: Mutex::new(State {
                space: shown.space.clone(),
                interrupts,
                windows,
                command: Command::INTERRUPT_DISABLE,
            }),
            function,
            _known: known,
            _reach: reach,
            _group: group,
            bars,
            config,
            shown,
            log_limit: LogLimit::new(LOG_LINES),
        };
        let written = registers.write_command(Command::INTERRUPT_DISABLE);
        written.map_err(|source| CreateError::Host {
            what: "its command register",
            source,
        })?;
        Ok(registers)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Which bits of the command register are the function's own (6.2.2). It is not to assert its pin while nobody would hear it.
    fn command(&self, state: &State) -> Command {
        let space = &state.space;
        let mut passed = space.command() & (Command::MEMORY_SPACE | Command::BUS_MASTER | Command::INTERRUPT_DISABLE);
        passed.set(
            Command::INTERRUPT_DISABLE,
            passed.contains(Command::INTERRUPT_DISABLE) || !state.interrupts.hears_pin(space),
        );
        let asleep = self
            .shown
            .power
            .is_some_and(|at| space.u16(at + PMCSR) & POWER_STATE == D3_HOT);
        match asleep {
            true => (passed - Command::BUS_MASTER) | Command::INTERRUPT_DISABLE,
            false => passed,
        }
    }

    fn follow_command(&self, state: &mut State) {
        let command = self.command(state);
        if command == state.command {
            return;
        }
        let switches = (command ^ state.command).contains(Command::INTERRUPT_DISABLE);
        let is_off = command.contains(Command::INTERRUPT_DISABLE);
        // What the function asserts as soon as it may is not to be missed, and what it has asserted before is nothing afterwards.
        if switches && !is_off {
            state.interrupts.switch_pin(true);
        }
        match self.write_command(command) {
            Ok(()) => state.command = command,
            Err(error) => self.warn("its command register", &error),
        }
        if switches && is_off {
            state.interrupts.switch_pin(false);
        }
    }

    fn write_command(&self, command: Command) -> io::Result<()> {
        let bits = command.bits().to_le_bytes();
        self.function.write(&self.config, register::COMMAND as u64, &bits)
    }

    /// The function is told not to assert its pin before the host stops to listen, and that it may after the host has begun: between two
    /// looks at the command register.
    fn follow_interrupts(&self, state: &mut State) {
        if let Err(error) = state.interrupts.follow(&state.space, self.function.as_ref()) {
            self.warn(state.interrupts.what(), &error);
        }
    }

    /// Whether the function wants something that it would assert its pin for (6.2.3): a read of the status register shows it.
    fn show_interrupt_status(&self, space: &mut ConfigSpace) {
        let mut status = [0; 2];
        if let Err(error) = self.function.read(&self.config, register::STATUS as u64, &mut status) {
            self.warn("its status register", &error);
            return;
        }
        let wants = u16::from_le_bytes(status) & INTERRUPT_STATUS;
        let shown = space.u16(register::STATUS) & !INTERRUPT_STATUS | wants;
        space.put(register::STATUS, &shown.to_le_bytes());
    }

    /// A state that the function does not have is not entered (PCI Power Management 1.2, 3.2.4).
    fn keep_power_state(&self, before: &ConfigSpace, space: &mut ConfigSpace) {
        let Some(at) = self.shown.power.map(|at| at + PMCSR) else {
            return;
        };
        if ![0, D3_HOT].contains(&(space.u16(at) & POWER_STATE)) {
            space.put(at, &before.u16(at).to_le_bytes());
        }
    }

    /// Whether a write resets the function.
    fn resets(&self, offset: usize, data: &[u8]) -> bool {
        let at = self
            .shown
            .express
            .filter(|_| self.shown.resets)
            .map(|at| at + RESET_BYTE);
        let byte = at.and_then(|at| data.get(at.checked_sub(offset)?));
        byte.is_some_and(|byte| byte & RESET_BIT != 0)
    }

    /// The guest has asked for a function level reset (PCI Express 5.0, 6.6.2): all is as it was at first, but for the MSI-X table's
    /// place and what else is read-only.
    fn reset(&self, state: &mut State) {
        state.space = self.shown.space.clone();
        self.follow_command(state);
        if let Err(error) = state.interrupts.reset(&state.space, self.function.as_ref()) {
            self.warn("its interrupts", &error);
        }
        let ranges = state.space.memory_ranges();
        state.windows.follow(&ranges);
        if let Err(error) = self.function.reset() {
            self.warn("its reset", &error);
        }
        // The host's driver has put back what stood there.
        if let Err(error) = self.write_command(state.command) {
            self.warn("its command register", &error);
        }
    }

    /// The bytes of an access that are the function's: from where in the access on, and which.
    fn passed(&self, offset: usize, length: usize) -> impl Iterator<Item = Range<usize>> {
        let end = offset.saturating_add(length);
        let within = move |range: &Range<usize>| {
            let (start, end) = (range.start.max(offset), range.end.min(end));
            (start < end).then_some(start..end)
        };
        self.shown.passed.iter().filter_map(within)
    }

    /// What a guest can cause as often as it likes.
    fn warn(&self, what: &str, error: &dyn std::error::Error) {
        if self.log_limit.allow() {
            log::warn!("a PCI function of the host cannot be used: {what}: {error}");
        }
    }
}

impl PciFunction for Registers {
    fn config_size(&self) -> usize {
        SIZE + self.shown.extended.len()
    }

    fn config_read(&self, offset: usize, data: &mut [u8]) {
        let mut state = self.state();
        if let Some((at, layout)) = self.shown.msi
            && let Some(bits) = layout.pending_bits()
        {
            let pending = state.interrupts.msi_pending();
            state.space.put(at + bits, &pending.to_le_bytes());
        }
        if self.shown.pin && (offset..offset.saturating_add(data.len())).contains(&register::STATUS) {
            self.show_interrupt_status(&mut state.space);
        }
        state.space.read(offset, data);
        drop(state);
        for (byte, at) in data.iter_mut().zip(offset..) {
            if let Some(extended) = at.checked_sub(SIZE).and_then(|at| self.shown.extended.get(at)) {
                *byte = *extended;
            }
        }
        for bytes in self.passed(offset, data.len()) {
            let part = &mut data[bytes.start - offset..bytes.end - offset];
            if let Err(error) = self.function.read(&self.config, bytes.start as u64, part) {
                part.fill(0xff);
                self.warn("reading a capability", &error);
            }
        }
    }

    fn config_write(&self, offset: usize, data: &[u8]) {
        let mut state = self.state();
        if self.resets(offset, data) {
            self.reset(&mut state);
            return;
        }
        let before = state.space.clone();
        state.space.write(offset, data);
        self.keep_power_state(&before, &mut state.space);
        self.follow_command(&mut state);
        if ConfigSpace::moves_memory(offset, data.len()) {
            let ranges = state.space.memory_ranges();
            state.windows.follow(&ranges);
        }
        self.follow_interrupts(&mut state);
        self.follow_command(&mut state);
        drop(state);
        for bytes in self.passed(offset, data.len()) {
            let part = &data[bytes.start - offset..bytes.end - offset];
            if let Err(error) = self.function.write(&self.config, bytes.start as u64, part) {
                self.warn("writing a capability", &error);
            }
        }
    }

    fn moves_memory(&self, offset: usize, length: usize) -> bool {
        let reset = self
            .shown
            .express
            .filter(|_| self.shown.resets)
            .map(|at| at + RESET_BYTE);
        let resets = reset.is_some_and(|at| offset <= at && at - offset < length);
        resets || ConfigSpace::moves_memory(offset, length)
    }

    fn memory_ranges(&self) -> MemoryRanges {
        self.state().space.memory_ranges()
    }

    fn bar_read(&self, bar: usize, offset: u64, data: &mut [u8]) {
        let tables = &self.shown.tables;
        if let Some(at) = tables.table.hit(bar, offset) {
            data.fill(0);
            if let Some(table) = self.state().interrupts.table() {
                table.read(at, data);
            }
        } else if let Some(at) = tables.pending.hit(bar, offset) {
            data.fill(0);
            if let Some(table) = self.state().interrupts.table() {
                table.read_pending(at, data);
            }
        } else if let Err(error) = self.function.read(&self.bars[bar], offset, data) {
            data.fill(0xff);
            self.warn("reading a register", &error);
        }
    }

    fn bar_write(&self, bar: usize, offset: u64, data: &[u8]) {
        let tables = &self.shown.tables;
        if let Some(at) = tables.table.hit(bar, offset) {
            if let Some(table) = self.state().interrupts.table() {
                table.write(at, data);
            }
        } else if tables.pending.hit(bar, offset).is_none()
            && let Err(error) = self.function.write(&self.bars[bar], offset, data)
        {
            self.warn("writing a register", &error);
        }
    }
}

impl Drop for Registers {
    /// Somebody else may have a copy of the function's descriptor, so that closing ours resets nothing: it is quiet all the same before
    /// its memory is taken away.
    fn drop(&mut self) {
        let quiet = self.write_command(Command::INTERRUPT_DISABLE);
        let mut state = self.state();
        let off: Result<(), VfioError> = state.interrupts.reset(&self.shown.space, self.function.as_ref());
        drop(state);
        if let Err(error) = quiet {
            log::error!("a PCI function of the host could not be kept from memory: {error}");
        }
        if let Err(error) = off {
            log::error!("the interrupts of a PCI function of the host could not be turned off: {error}");
        }
    }
}
