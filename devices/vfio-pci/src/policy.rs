//! What a guest is shown of a function's capabilities, and what of its writes the function is shown. One table; what is not in it is hidden.
//! Data only.
//!
//! What is hidden is as if it were not there: the list of capabilities leads past it, its bytes read as zeroes, writes there are dropped.
//! Of what is shown the registers are ours, with bits of the function's where a register below says so; the function sees a write to a
//! capability that is passed, and none to another.
//!
//! * Power states are ours: the guest reads back what it wrote, and the function stays in D0, but is no bus master while the guest has it
//!   in D3hot. The host's driver suspends functions that nobody has open. A guest so finds the function's state after D3hot as it was,
//!   which `No_Soft_Reset` tells it.
//! * The function is an endpoint on the guest's root bus, where there are no links: it is shown as an integrated endpoint, which has no link
//!   registers (PCI Express 5.0, 7.5.3.2). Reports of errors, which go to a root port of the host's, cannot be turned on. Payload, read
//!   request and ordering are kept as the guest wrote them, and the function's are the host's.
//! * A guest's function level reset is one by the host's driver.

use pci::CapabilityId;

use crate::capabilities::{u8_at, u16_at};

/// What a guest is given of a capability.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Treatment {
    /// Nothing.
    Hidden,
    /// All of it, by reads and writes of the function; not its header.
    Passed,
    /// Registers of ours.
    Registers(&'static [Register]),
    /// Message control and what follows from it: [`pci::msi`].
    Msi,
    /// As well: [`pci::msix`].
    MsiX,
}

/// One capability.
pub(crate) struct Capability {
    /// Its id (PCI Code and ID Assignment 1.11, 2).
    pub(crate) id: u8,
    /// What it is.
    pub(crate) name: &'static str,
    /// How many bytes it has, by its own registers, which begin at the offset; `None` if they are of a kind that no endpoint has.
    pub(crate) length: fn(&[u8], usize) -> Option<usize>,
    pub(crate) treatment: Treatment,
}

/// A register of 16 bits, or of 32, of a capability.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Register {
    /// Where in the capability.
    pub(crate) at: usize,
    /// Its bytes.
    pub(crate) width: usize,
    /// Bits that are as the function has them.
    pub(crate) function: u32,
    /// Bits that are set.
    pub(crate) set: u32,
    /// Bits that the guest may change.
    pub(crate) writable: u32,
}

const fn word(at: usize, function: u32, set: u32, writable: u32) -> Register {
    Register {
        at,
        width: 2,
        function,
        set,
        writable,
    }
}

const fn dword(at: usize, function: u32, set: u32, writable: u32) -> Register {
    Register {
        at,
        width: 4,
        function,
        set,
        writable,
    }
}

/// Power management control and status (PCI Power Management 1.2, 3.2.4).
pub(crate) const PMCSR: usize = 4;
pub(crate) const POWER_STATE: u16 = 0b11;
pub(crate) const D3_HOT: u16 = 0b11;

/// PCI Express device control (PCI Express 5.0, 7.5.3.4), and its bit that resets the function when it is written.
pub(crate) const DEVICE_CONTROL: usize = 8;
pub(crate) const INITIATE_FUNCTION_LEVEL_RESET: u16 = 1 << 15;

/// PCI Express device capabilities (7.5.3.3), and the bit that says that the one above is there.
pub(crate) const DEVICE_CAPABILITIES: usize = 4;
pub(crate) const FUNCTION_LEVEL_RESET: u32 = 1 << 28;

/// The kind of a function in its PCI Express capabilities register (7.5.3.2).
const TYPE_SHIFT: u16 = 4;
const TYPE_ENDPOINT: u16 = 0;
const TYPE_LEGACY_ENDPOINT: u16 = 1;
const TYPE_INTEGRATED_ENDPOINT: u16 = 9;

const POWER_MANAGEMENT: &[Register] = &[
    // Version 3; neither D1 nor D2, no PME (3.2.3).
    word(2, 0, 0x0003, 0),
    // No_Soft_Reset; the state.
    word(PMCSR, 0, 1 << 3, POWER_STATE as u32),
];

const PCI_EXPRESS: &[Register] = &[
    // The version; no slot, no interrupt message number.
    word(2, 0x000f, (TYPE_INTEGRATED_ENDPOINT << TYPE_SHIFT) as u32, 0),
    // Payload, extended tags, latencies, role-based error reporting, function level reset; neither phantom functions nor slot power.
    dword(
        DEVICE_CAPABILITIES,
        0x7 | 1 << 5 | 0x3f << 6 | 1 << 15 | FUNCTION_LEVEL_RESET,
        0,
        0,
    ),
    // Relaxed ordering, payload, extended tags, no snoop, read request; of errors (bits 0 to 3) nothing, nor of power.
    word(
        DEVICE_CONTROL,
        1 << 4 | 0x7 << 5 | 1 << 8 | 1 << 11 | 0x7 << 12,
        0,
        1 << 4 | 0x7 << 5 | 1 << 8 | 1 << 11 | 0x7 << 12,
    ),
    // Device status, link registers and all of the second set read as zeroes.
];

/// The table, by id.
pub(crate) const CAPABILITIES: &[Capability] = &[
    capability(
        0x01,
        "power management",
        |_, _| Some(8),
        Treatment::Registers(POWER_MANAGEMENT),
    ),
    // Its writes reach a memory of the board's that outlives the guest.
    capability(0x03, "vital product data", |_, _| Some(8), Treatment::Hidden),
    capability(
        0x05,
        "MSI",
        |config, at| Some(pci::MsiLayout::of_control(u16_at(config, at + 2), 32).length()),
        Treatment::Msi,
    ),
    // Its third byte is its length (appendix H); virtio's capabilities are such (virtio 1.2, 4.1.4).
    capability(
        0x09,
        "vendor specific",
        |config, at| Some(usize::from(u8_at(config, at + 2))),
        Treatment::Passed,
    ),
    capability(0x10, "PCI Express", express_length, Treatment::Registers(PCI_EXPRESS)),
    capability(0x11, "MSI-X", |_, _| Some(12), Treatment::MsiX),
    // A second way to reset the function, of those that are not PCI Express.
    capability(0x13, "advanced features", |_, _| Some(6), Treatment::Hidden),
    // Where BARs are is what the BARs say.
    capability(0x14, "enhanced allocation", |_, _| Some(4), Treatment::Hidden),
];

/// Extended capabilities that a guest may read, with their bytes: they are copied once. All others are hidden, among them advanced error
/// reporting (0x0001), access control (0x000d), address translation (0x000f), SR-IOV (0x0010), page requests (0x0013), resizable BARs
/// (0x0015) and process address spaces (0x001b): each would have the guest configure what is the host's.
pub(crate) const EXTENDED: &[(u16, usize)] = &[
    // Device serial number (PCI Express 5.0, 7.9.3).
    (0x0003, 12),
];

const fn capability(
    id: u8,
    name: &'static str,
    length: fn(&[u8], usize) -> Option<usize>,
    treatment: Treatment,
) -> Capability {
    Capability {
        id,
        name,
        length,
        treatment,
    }
}

/// Up to the link registers with version 1, and the second set with version 2 (7.5.3); a function that is no endpoint has none here.
fn express_length(config: &[u8], at: usize) -> Option<usize> {
    let capabilities = u16_at(config, at + 2);
    let kind = capabilities >> TYPE_SHIFT & 0xf;
    match (kind, capabilities & 0xf) {
        (TYPE_ENDPOINT | TYPE_LEGACY_ENDPOINT, 0 | 1) => Some(0x14),
        (TYPE_INTEGRATED_ENDPOINT, 0 | 1) => Some(0x0c),
        (TYPE_ENDPOINT | TYPE_LEGACY_ENDPOINT, _) => Some(0x3c),
        (TYPE_INTEGRATED_ENDPOINT, _) => Some(0x2c),
        _ => None,
    }
}

impl Capability {
    /// The one of this id that the table has.
    pub(crate) fn of(id: u16) -> Option<&'static Self> {
        CAPABILITIES.iter().find(|known| u16::from(known.id) == id)
    }

    /// Its id, of those that can be shown.
    pub(crate) fn shown_id(&self) -> Option<CapabilityId> {
        use CapabilityId::{Msi, MsiX, PciExpress, PowerManagement, VendorSpecific};
        let ids = [PowerManagement, Msi, VendorSpecific, PciExpress, MsiX];
        ids.into_iter().find(|id| *id as u8 == self.id)
    }
}

/// A capability's body after id and link, and its write mask: registers of ours, at `at` in a function's configuration space.
pub(crate) fn body(registers: &[Register], length: usize, config: &[u8], at: usize) -> (Vec<u8>, Vec<u8>) {
    let mut body = vec![0; length - 2];
    let mut writable = vec![0; length - 2];
    for register in registers {
        let value = u32::from(u16_at(config, at + register.at)) | u32::from(u16_at(config, at + register.at + 2)) << 16;
        let value = value & register.function | register.set;
        let (start, end) = (register.at - 2, register.at - 2 + register.width);
        body[start..end].copy_from_slice(&value.to_le_bytes()[..register.width]);
        writable[start..end].copy_from_slice(&register.writable.to_le_bytes()[..register.width]);
    }
    (body, writable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_has_an_id_and_registers_within_it() {
        for capability in CAPABILITIES {
            let is_shown = !matches!(capability.treatment, Treatment::Hidden);
            assert!(!is_shown || capability.shown_id().is_some(), "{}", capability.name);
            let Treatment::Registers(registers) = capability.treatment else {
                continue;
            };
            let shortest = (capability.length)(&[0; 64], 0).unwrap();
            for register in registers {
                let end = register.at + register.width;
                assert!(
                    register.at >= 2 && end <= shortest,
                    "{} at {}",
                    capability.name,
                    register.at
                );
                assert!(register.width == 4 || register.function | register.set | register.writable <= 0xffff);
            }
        }
    }

    #[test]
    fn errors_and_resets_are_no_bits_that_a_guest_keeps() {
        let control = PCI_EXPRESS
            .iter()
            .find(|register| register.at == DEVICE_CONTROL)
            .unwrap();
        assert_eq!(control.writable & (0xf | u32::from(INITIATE_FUNCTION_LEVEL_RESET)), 0);
        assert_eq!(
            control.writable, control.function,
            "what it starts from is the function's"
        );
    }
}
