//! A function as a guest is shown it: its header, and of its capabilities what the policy says. Data only.

use std::ops::Range;

use pci::config::{SIZE, register};
use pci::{BAR_COUNT, Bar, BarKind, ConfigSpace, Identity, MsiLayout, PciError, msix};

use crate::capabilities::{self, EXTENDED_SIZE, Found, u8_at, u16_at, u32_at};
use crate::policy::{self, Capability, EXTENDED, FUNCTION_LEVEL_RESET, Treatment};
use crate::tables::Tables;

/// The header's kind (6.2.1), without the bit of several functions.
const HEADER_TYPE: usize = 0x0e;
const HEADER_TYPE_MASK: u8 = 0x7f;
/// By which pin a function interrupts, if by any, and the first of them; a line that leads to no controller of the first PCs (6.2.4).
const INTERRUPT_PIN: usize = 0x3d;
const INTA: u8 = 1;
const UNKNOWN_LINE: u8 = 0xff;

/// Why functions cannot be given away.
const WITHOUT_INTERRUPTS: &str = "the PCI function has neither MSI nor MSI-X that could be used, and no interrupt pin that the host hears: it has \
                                  no way to interrupt a guest, and cannot be given away";
const WITHOUT_MESSAGES: &str = "the PCI function has neither MSI nor MSI-X that could be used and interrupts by its pin (INTx) alone: that is a \
                                level, and the host is not told when a guest with CPUs of its own has ended an interrupt. Give it to a sandbox \
                                of the class `standard` or `dedicated`, or give this one a function that has MSI";

/// MSI-X (6.8.2.3): how many vectors there are but one.
const TABLE_SIZE: u16 = 0x7ff;

/// In a BAR's register (6.2.5.1).
const IO_SPACE: u8 = 1;
const TYPE: u8 = 0b110;
const TYPE_64: u8 = 0b100;
const PREFETCHABLE: u8 = 0b1000;

/// What the host tells of a function.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts<'a> {
    /// Its configuration space: 256 bytes, or 4096.
    pub(crate) config: &'a [u8],
    /// How large its BARs are; zero where there is none.
    pub(crate) bars: [u64; BAR_COUNT],
    /// How many interrupts of each kind the host can give it.
    pub(crate) msi: u32,
    pub(crate) msix: u32,
    pub(crate) intx: u32,
    /// It can be reset alone.
    pub(crate) can_reset: bool,
}

/// A function as it is shown.
#[derive(Clone, Debug)]
pub(crate) struct Description {
    /// The first 256 bytes.
    pub(crate) space: ConfigSpace,
    /// What is behind them, if anything.
    pub(crate) extended: Vec<u8>,
    /// Bytes whose reads and writes are the function's.
    pub(crate) passed: Vec<Range<usize>>,
    /// Where capabilities are that do something.
    pub(crate) power: Option<usize>,
    pub(crate) express: Option<usize>,
    pub(crate) msi: Option<(usize, MsiLayout)>,
    pub(crate) msix: Option<(usize, u16)>,
    /// It has an interrupt pin, which the host can hear, for drivers that turn on neither MSI nor MSI-X.
    pub(crate) pin: bool,
    /// MSI-X's table and pending bits.
    pub(crate) tables: Tables,
    /// A guest's function level reset is one of the function.
    pub(crate) resets: bool,
}

impl Description {
    /// What a guest is to be shown.
    pub(crate) fn read(facts: &Facts<'_>) -> Result<Self, String> {
        if u8_at(facts.config, HEADER_TYPE) & HEADER_TYPE_MASK != 0 {
            return Err("the PCI function is a bridge: give away the functions behind it".into());
        }
        let mut shown = Self {
            space: header(facts).map_err(told)?,
            extended: Vec::new(),
            passed: Vec::new(),
            power: None,
            express: None,
            msi: None,
            msix: None,
            pin: facts.intx > 0 && u8_at(facts.config, INTERRUPT_PIN) != 0,
            tables: Tables::default(),
            resets: false,
        };
        for found in capabilities::list(facts.config) {
            shown.add(facts, found).map_err(told)?;
        }
        if !shown.has_messages() && !shown.pin {
            return Err(WITHOUT_INTERRUPTS.into());
        }
        shown.show_pin(shown.pin);
        if shown.express.is_some() && facts.config.len() >= EXTENDED_SIZE {
            shown.extended = extended(facts.config);
        }
        Ok(shown)
    }

    fn has_messages(&self) -> bool {
        self.msi.is_some() || self.msix.is_some()
    }

    /// The interrupt pin as the guest has it: INTA#, as of each device that has one function (2.2.6), or none (6.2.4). Which interrupt it leads to
    /// is the machine's to tell; there is no controller of which the line register's number would be.
    fn show_pin(&mut self, is_shown: bool) {
        let (line, pin) = if is_shown { (UNKNOWN_LINE, INTA) } else { (0, 0) };
        self.space.put(register::INTERRUPT_LINE, &[line]);
        self.space.put(INTERRUPT_PIN, &[pin]);
        self.pin = is_shown;
    }

    /// As a guest without level-triggered interrupts is shown it: with messages alone. An error if it has none, with why.
    pub(crate) fn without_pin(mut self) -> Result<Self, String> {
        if !self.has_messages() {
            return Err(WITHOUT_MESSAGES.into());
        }
        self.show_pin(false);
        Ok(self)
    }

    /// How many interrupts are needed at most, without the pin's.
    pub(crate) fn vectors(&self) -> u16 {
        let msi = self.msi.map_or(0, |(_, layout)| layout.vectors());
        self.msix.map_or(0, |(_, vectors)| vectors).max(msi)
    }

    /// Adds one capability, if it is one that is shown.
    fn add(&mut self, facts: &Facts<'_>, found: Found) -> Result<(), PciError> {
        let Some(known) = Capability::of(found.id) else {
            return Ok(());
        };
        let Some(id) = known.shown_id() else {
            return Ok(());
        };
        let length = (known.length)(facts.config, found.at);
        let Some(length) = length.filter(|length| (3..=found.room).contains(length)) else {
            log::warn!(
                "a PCI function's capability {} at {:#x} is hidden: it does not fit into the {} bytes that it has there, or is of another \
                 kind of function",
                known.name,
                found.at,
                found.room
            );
            return Ok(());
        };
        let (body, writable) = match known.treatment {
            Treatment::Hidden => return Ok(()),
            Treatment::Passed => {
                self.passed.push(found.at + 3..found.at + length);
                let mut body = vec![0; length - 2];
                body[0] = u8_at(facts.config, found.at + 2);
                (body, Vec::new())
            }
            Treatment::Registers(registers) => policy::body(registers, length, facts.config, found.at),
            Treatment::Msi => match self.msi(facts, found.at) {
                Some(layout) => layout.capability(),
                None => return Ok(()),
            },
            Treatment::MsiX => match self.msix(facts, found.at) {
                Some(capability) => capability,
                None => return Ok(()),
            },
        };
        self.space.put_capability(found.at, id, &body, &writable)?;
        match id {
            pci::CapabilityId::PowerManagement => self.power = Some(found.at),
            pci::CapabilityId::PciExpress => self.express(facts, found.at),
            _ => {}
        }
        Ok(())
    }

    /// MSI's registers, for as many vectors as the host has. A second capability of the kind is nothing that a function may have.
    fn msi(&mut self, facts: &Facts<'_>, at: usize) -> Option<MsiLayout> {
        if facts.msi == 0 || self.msi.is_some() {
            return None;
        }
        let layout = MsiLayout::of_control(u16_at(facts.config, at + 2), facts.msi);
        self.msi = Some((at, layout));
        Some(layout)
    }

    /// MSI-X's registers. The table must be in memory that the guest reaches, and the host must have all of the vectors.
    fn msix(&mut self, facts: &Facts<'_>, at: usize) -> Option<(Vec<u8>, Vec<u8>)> {
        let vectors = (u16_at(facts.config, at + 2) & TABLE_SIZE) + 1;
        let (table, pending) = (u32_at(facts.config, at + 4), u32_at(facts.config, at + 8));
        let tables = Tables::of(vectors, table, pending);
        if u32::from(vectors) > facts.msix || self.msix.is_some() || !tables.fit(&memory(facts)) {
            log::warn!(
                "a PCI function's MSI-X is hidden: it has {vectors} vectors, the host {}, and its BARs {:#x?} bytes",
                facts.msix,
                facts.bars
            );
            return None;
        }
        self.msix = Some((at, vectors));
        self.tables = tables;
        let (mut body, writable) = msix::capability(vectors, 0, table, 0);
        body[6..].copy_from_slice(&pending.to_le_bytes());
        Some((body.to_vec(), writable.to_vec()))
    }

    /// A function level reset is shown where there is one.
    fn express(&mut self, facts: &Facts<'_>, at: usize) {
        let register = at + policy::DEVICE_CAPABILITIES;
        let capabilities = self.space.u32(register);
        self.express = Some(at);
        self.resets = facts.can_reset && capabilities & FUNCTION_LEVEL_RESET != 0;
        if !self.resets {
            let without = capabilities & !FUNCTION_LEVEL_RESET;
            self.space.put(register, &without.to_le_bytes());
        }
    }
}

fn told(error: PciError) -> String {
    error.to_string()
}

/// The sizes of BARs of memory: no kernel of today needs ports of a function that has both.
fn memory(facts: &Facts<'_>) -> [u64; BAR_COUNT] {
    let mut sizes = facts.bars;
    for (index, size) in sizes.iter_mut().enumerate() {
        // The upper half of one that has two registers has no size anyway.
        if u8_at(facts.config, register::BASE_ADDRESS + 4 * index) & IO_SPACE != 0 {
            *size = 0;
        }
    }
    sizes
}

/// The header and the BARs of memory.
fn header(facts: &Facts<'_>) -> Result<ConfigSpace, PciError> {
    let config = facts.config;
    let mut space = ConfigSpace::new(&Identity {
        vendor: u16_at(config, register::VENDOR_ID),
        device: u16_at(config, register::DEVICE_ID),
        revision: u8_at(config, register::REVISION_ID),
        class: [2, 1, 0].map(|byte| u8_at(config, register::CLASS_CODE + byte)),
        subsystem_vendor: u16_at(config, register::SUBSYSTEM_VENDOR_ID),
        subsystem: u16_at(config, register::SUBSYSTEM_ID),
    });
    for (index, size) in memory(facts).into_iter().enumerate().filter(|(_, size)| *size > 0) {
        let low = u8_at(config, register::BASE_ADDRESS + 4 * index);
        let kind = match low & TYPE {
            TYPE_64 => BarKind::Memory64 {
                prefetchable: low & PREFETCHABLE != 0,
            },
            _ => BarKind::Memory32,
        };
        space.add_bar(Bar { index, kind, size })?;
    }
    Ok(space)
}

/// Copies of the extended capabilities that may be read, one behind the other; zeroes if there are none.
fn extended(config: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; EXTENDED_SIZE - SIZE];
    let (mut at, mut last) = (0, None);
    for found in capabilities::extended(config) {
        let known = EXTENDED.iter().find(|(id, _)| *id == found.id);
        let Some(&(_, length)) = known.filter(|(_, length)| *length <= found.room && at + length <= bytes.len()) else {
            continue;
        };
        bytes[at..at + length].copy_from_slice(&config[found.at..found.at + length]);
        // The next one's place is in the upper 12 bits (PCI Express 5.0, 7.6.3).
        let header = u32_at(config, found.at) & 0x000f_ffff;
        bytes[at..at + 4].copy_from_slice(&header.to_le_bytes());
        if let Some(last) = last {
            let link = u32::try_from(SIZE + at).unwrap_or(0) << 20;
            let header = u32_at(&bytes, last) | link;
            bytes[last..last + 4].copy_from_slice(&header.to_le_bytes());
        }
        last = Some(at);
        at = (at + length).next_multiple_of(4);
    }
    bytes
}
