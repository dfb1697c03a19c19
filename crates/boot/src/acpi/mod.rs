//! ACPI tables of a hardware-reduced platform (ACPI 6.5, 3.11.1): no PIC, no PIT, no RTC, no SCI.

mod dsdt;
mod srat;
mod viot;

use acpi_tables::Aml;
use acpi_tables::fadt::{FADTBuilder, Flags, PmProfile};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic};
use acpi_tables::mcfg::MCFG;
use acpi_tables::rsdp::Rsdp;
use acpi_tables::xsdt::XSDT;
use memory::layout::{self, Range};
use memory::{GuestRam, Ram};
use vm_memory::{Bytes, GuestAddress};

use crate::{BootError, GENERATION_ID, low};

const OEM_ID: [u8; 6] = *b"BASALT";
const OEM_TABLE_ID: [u8; 8] = *b"BASALTVM";
const OEM_REVISION: u32 = 1;

/// S5, soft off (7.4.2.6): what the guest writes into SLP_TYP of the sleep control register to power off.
pub const SLEEP_TYPE_S5: u8 = 5;

/// What the guest is told of the machine.
#[derive(Clone, Debug)]
pub struct Board {
    /// The ids of the vCPUs' local APICs, the first one's first.
    pub apic_ids: Vec<u32>,
    /// How its PCI devices are reached.
    pub root: Root,
    /// Ports and interrupt lines of the platform devices.
    pub ports: Ports,
    /// The proximity domain of hot-pluggable memory, if there is any; that of everything else is 0.
    pub hotplug_node: u16,
    /// Its guest is told of functions that come and leave: each slot is there, and events tell it to look.
    pub acpi_hotplug: bool,
    /// The IOMMU that its guest has, if any.
    pub iommu: Option<GuestIommu>,
}

/// A virtio-iommu on bus 0, and what stands behind it: functions 0 of the devices of these numbers, which come and go. What the guest knows
/// one by (its endpoint ID) is device and function number, as in its address ([`GuestIommu::endpoint`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestIommu {
    /// Its own device number, which is none of the others.
    pub device: u8,
    /// The first device number behind it.
    pub first: u8,
    /// The last one.
    pub last: u8,
}

impl GuestIommu {
    /// The endpoint ID of the function in a slot of bus 0.
    pub fn endpoint(slot: usize) -> u32 {
        u32::try_from(slot << 3).unwrap_or(u32::MAX)
    }
}

/// How PCI devices are reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Root {
    /// By memory: configuration space, and BARs below 4 GiB and in this window, which depends on the size of RAM. There is an I/O APIC.
    Memory {
        /// The 64-bit window.
        window_64: Range,
    },
    /// By ports, in a machine whose guest's accesses to memory never come out: there is no I/O APIC, and so no interrupt of the serial
    /// port's or of events.
    Ports {
        /// Those of BARs.
        ports: Range,
        /// Memory that BARs name, whose content is that of memory.
        tables: Range,
    },
}

/// Ports and I/O APIC pins of the platform devices.
#[derive(Clone, Copy, Debug)]
pub struct Ports {
    /// Sleep control register, one byte (ACPI 6.5, 4.8.3.7); status is the next port.
    pub sleep_control: u16,
    /// Reset register, one byte (4.8.3.6).
    pub reset: u16,
    /// What to write there.
    pub reset_value: u8,
    /// Pending events of the generic event device, one byte; reading clears.
    pub events: u16,
    /// Its pin.
    pub events_pin: u32,
    /// First of the serial port's eight ports.
    pub serial: u16,
    /// Its pin.
    pub serial_pin: u32,
    /// Pins of PCI slots, one slot after the other.
    pub slot_pins: [u32; 4],
}

/// Writes all tables; gives the address of the RSDP.
pub(crate) fn write(ram: &Ram, board: &Board) -> Result<u64, BootError> {
    let (guest, start) = (ram.guest(), ram.start());
    let mut area = Area {
        guest,
        next: start + low::ACPI + 64,
        end: start + GENERATION_ID,
    };
    let dsdt = area.put(&dsdt::build(board))?;
    let fadt = area.put(&fadt(board, dsdt))?;
    let by_memory = matches!(board.root, Root::Memory { .. });
    let madt = area.put(&madt(&board.apic_ids, by_memory))?;
    let mut xsdt = XSDT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    xsdt.add_entry(fadt);
    xsdt.add_entry(madt);
    if by_memory {
        let mut mcfg = MCFG::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
        mcfg.add_ecam(layout::ECAM.start, 0, 0, 0);
        xsdt.add_entry(area.put(&mcfg)?);
    }
    if let Some(hotplug) = ram.hotplug_region() {
        let nodes = srat::Nodes {
            ram: &ram.ranges(),
            hotplug,
            hotplug_node: board.hotplug_node,
        };
        xsdt.add_entry(area.put(&srat::build(&board.apic_ids, &nodes))?);
    }
    if let Some(iommu) = board.iommu {
        xsdt.add_entry(area.put(&viot::build(iommu))?);
    }
    let xsdt = area.put(&xsdt)?;
    let mut rsdp = Vec::new();
    Rsdp::new(OEM_ID, xsdt).to_aml_bytes(&mut rsdp);
    guest.write_slice(&rsdp, GuestAddress(start + low::ACPI))?;
    Ok(start + low::ACPI)
}

/// Table after table, each on a 64-byte boundary, behind the RSDP.
struct Area<'a> {
    guest: &'a GuestRam,
    next: u64,
    end: u64,
}

impl Area<'_> {
    fn put(&mut self, table: &dyn Aml) -> Result<u64, BootError> {
        let mut bytes = Vec::new();
        table.to_aml_bytes(&mut bytes);
        let start = self.next;
        let end = start + bytes.len() as u64;
        if end > self.end {
            return Err(BootError::Tables(bytes.len(), self.end.saturating_sub(start)));
        }
        self.guest.write_slice(&bytes, GuestAddress(start))?;
        self.next = end.next_multiple_of(64);
        Ok(start)
    }
}

fn byte_port(port: u16) -> GAS {
    GAS::new(AddressSpace::SystemIo, 8, 0, AccessSize::ByteAccess, u64::from(port))
}

fn fadt(board: &Board, dsdt: u64) -> acpi_tables::fadt::FADT {
    let ports = &board.ports;
    let mut fadt = FADTBuilder::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION)
        .dsdt_64(dsdt)
        .preferred_pm_profile(PmProfile::EnterpriseServer)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .flag(Flags::Headless);
    // 5.2.9.3: no VGA to probe for (bit 2), no MSI-less routing; no 8042 (bit 1 clear), no CMOS RTC (bit 5).
    fadt.iapc_boot_arch = (1_u16 << 2 | 1 << 5).into();
    fadt.reset_reg = byte_port(ports.reset);
    fadt.reset_value = ports.reset_value;
    fadt.sleep_control_reg = byte_port(ports.sleep_control);
    fadt.sleep_status_reg = byte_port(ports.sleep_control + 1);
    fadt.finalize()
}

fn madt(apic_ids: &[u32], has_ioapic: bool) -> MADT {
    let lapic = u32::try_from(layout::LOCAL_APIC).unwrap_or(u32::MAX);
    let ioapic = u32::try_from(layout::IOAPIC.start).unwrap_or(u32::MAX);
    let mut madt = MADT::new(
        OEM_ID,
        OEM_TABLE_ID,
        OEM_REVISION,
        LocalInterruptController::Address(lapic),
    );
    // Ids of more than 8 bits would need another structure (5.2.12.12): no board of ours has such.
    let ids = apic_ids.iter().map_while(|id| u8::try_from(*id).ok());
    for (number, id) in (0..).zip(ids) {
        madt.add_structure(ProcessorLocalApic::new(number, id, EnabledStatus::Enabled));
    }
    if has_ioapic {
        madt.add_structure(IoApic::new(0, ioapic, 0));
    }
    madt
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::ByteSize;
    use memory::Ram;
    use memory::layout::MemorySize;

    pub(super) fn board(cpus: u32) -> Board {
        Board {
            apic_ids: (0..cpus).collect(),
            root: Root::Memory {
                window_64: layout::pci_window_64(ByteSize::gib(1)),
            },
            ports: Ports {
                sleep_control: 0x600,
                reset: 0x602,
                reset_value: 1,
                events: 0x604,
                events_pin: 5,
                serial: 0x3f8,
                serial_pin: 4,
                slot_pins: [1, 3, 6, 7],
            },
            hotplug_node: 0,
            acpi_hotplug: false,
            iommu: None,
        }
    }

    #[test]
    fn an_iommu_is_told_with_what_stands_behind_it() {
        let ram = Ram::allocate(ByteSize::mib(64)).unwrap();
        let iommu = GuestIommu {
            device: 4,
            first: 7,
            last: 31,
        };
        let board = Board {
            iommu: Some(iommu),
            ..board(2)
        };
        assert_eq!(tables_of(&ram, &board), ["FACP", "APIC", "MCFG", "VIOT"]);
        let viot = table_called(&ram, &board, "VIOT");
        // Two nodes from 48 on (ACPI 6.5, 5.2.36).
        assert_eq!(viot[36..48], [2, 0, 48, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        // The device by virtio-pci, 3: its length, segment and address.
        assert_eq!(viot[48..64], [3, 0, 16, 0, 0, 0, 4 << 3, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        // A range, 1: the first endpoint, segments, addresses, and where the device's node is.
        let endpoint = GuestIommu::endpoint(7).to_le_bytes();
        assert_eq!(viot[64..68], [1, 0, 24, 0]);
        assert_eq!(viot[68..72], endpoint);
        assert_eq!(
            viot[72..88],
            [0, 0, 0, 0, 7 << 3, 0, 31 << 3, 0, 48, 0, 0, 0, 0, 0, 0, 0]
        );
        assert_eq!(viot.len(), 88);
    }

    #[test]
    fn slots_are_there_for_guests_that_are_told_of_functions() {
        let ram = Ram::allocate(ByteSize::mib(64)).unwrap();
        let dsdt = |acpi_hotplug| {
            let board = Board {
                acpi_hotplug,
                ..board(64)
            };
            // There is room for it beside the others, too.
            assert_eq!(tables_of(&ram, &board), ["FACP", "APIC", "MCFG"]);
            let mut table = Vec::new();
            dsdt::build(&board).to_aml_bytes(&mut table);
            table
        };
        let count = |table: &[u8], text: &[u8]| table.windows(text.len()).filter(|window| *window == text).count();
        let (without, with) = (dsdt(false), dsdt(true));
        for slot in 1..32 {
            let name = format!("S{slot:02X}_");
            assert_eq!(
                (count(&without, name.as_bytes()), count(&with, name.as_bytes())),
                (0, 1),
                "{name}"
            );
        }
        // Named with its parent once more, where it is notified: NotifyOp (ACPI 6.5, 20.2.5.3), root, two segments.
        let notified = b"\x86\x5c\x2e_SB_PCI0";
        assert_eq!((count(&without, notified), count(&with, notified)), (0, 1));
    }

    #[test]
    fn every_table_is_reached_and_sums_to_zero() {
        let ram = Ram::allocate(ByteSize::mib(64)).unwrap();
        assert_eq!(tables_of(&ram, &board(64)), ["FACP", "APIC", "MCFG"]);
        let ram = crate::tests::placed(5 << 30);
        let range = |start, length| Range { start, length };
        let root = Root::Ports {
            ports: range(0xc000, 0x4000),
            tables: ram.identity_layout().unwrap().tables,
        };
        assert_eq!(tables_of(&ram, &Board { root, ..board(64) }), ["FACP", "APIC"]);
    }

    /// As Linux reads it: a package of address, pin, source and number for each slot.
    #[test]
    fn the_pin_of_each_slot_is_routed() {
        let table = |root| {
            let mut bytes = Vec::new();
            dsdt::build(&Board { root, ..board(1) }).to_aml_bytes(&mut bytes);
            bytes
        };
        let bytes = table(board(1).root);
        let at = bytes.windows(4).position(|name| name == b"_PRT").unwrap();
        // The package's own head: opcode, two bytes of length, how many (ACPI 6.5, 20.2.4, 20.2.5.4).
        let (head, entries) = bytes[at + 4..].split_at(4);
        assert_eq!((head[0], head[3]), (0x12, 31));
        let mut rest = entries;
        for slot in 1..32_u8 {
            let pin = board(1).ports.slot_pins[usize::from(slot) % 4].to_le_bytes()[0];
            // 1 is an opcode of its own (20.2.3).
            let number = if pin == 1 { vec![1] } else { vec![0x0a, pin] };
            let mut expected = vec![
                0x12,
                9 + number.len().to_le_bytes()[0],
                4,
                0x0c,
                0xff,
                0xff,
                slot,
                0,
                0,
                0,
            ];
            expected.extend(number);
            let (entry, behind) = rest.split_at(expected.len());
            assert_eq!(entry, expected, "slot {slot}");
            rest = behind;
        }
        // So much the table costs each guest: its name's opcode, its name, and what is in it.
        assert_eq!(1 + 4 + 4 + entries.len() - rest.len(), 374);
        let ports = Root::Ports {
            ports: Range {
                start: 0xc000,
                length: 0x4000,
            },
            tables: Range {
                start: 4 << 30,
                length: 1 << 20,
            },
        };
        assert!(
            !table(ports).windows(4).any(|name| name == b"_PRT"),
            "there is no I/O APIC"
        );
    }

    #[test]
    fn memory_that_can_be_plugged_is_told_where_it_may_come() {
        let size = MemorySize {
            boot: ByteSize::gib(4),
            hotplug: ByteSize::gib(1),
            hotplug_region: ByteSize(0),
        };
        let ram = Ram::allocate(size).unwrap();
        let board = Board {
            hotplug_node: 1,
            ..board(2)
        };
        assert_eq!(tables_of(&ram, &board), ["FACP", "APIC", "MCFG", "SRAT"]);
        let srat = table_called(&ram, &board, "SRAT");
        // Reserved, 1 (ACPI 6.5, 5.2.16).
        assert_eq!(srat[36..48], [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        let (processors, memory) = srat[48..].split_at(2 * 16);
        assert_eq!(processors[..8], [0, 16, 0, 0, 1, 0, 0, 0]);
        assert_eq!(processors[16..24], [0, 16, 0, 1, 1, 0, 0, 0]);
        let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
        // Proximity domain, first address, length, flags: 1 is enabled, 2 hot-pluggable (5.2.16.2).
        let ranges: Vec<_> = memory
            .chunks(40)
            .map(|entry| (entry[0], entry[2], word(&entry[8..16]), word(&entry[16..24]), entry[28]))
            .collect();
        let gib = 1 << 30;
        let expected = [(1, 0, 0, 3 * gib, 1), (1, 0, 4 * gib, gib, 1), (1, 1, 5 * gib, gib, 3)];
        assert_eq!(ranges, expected);
    }

    /// The table of that name.
    fn table_called(ram: &Ram, board: &Board, name: &str) -> Vec<u8> {
        tables(ram, board)
            .into_iter()
            .find(|table| &table[..4] == name.as_bytes())
            .unwrap()
    }

    /// The names of the tables that the RSDP leads to.
    fn tables_of(ram: &Ram, board: &Board) -> Vec<String> {
        let tables = tables(ram, board).into_iter();
        tables
            .map(|table| String::from_utf8_lossy(&table[..4]).into_owned())
            .collect()
    }

    /// All tables that the RSDP leads to.
    fn tables(ram: &Ram, board: &Board) -> Vec<Vec<u8>> {
        let rsdp = write(ram, board).unwrap();
        let bytes = |address: u64, length: usize| {
            let mut bytes = vec![0; length];
            ram.guest().read_slice(&mut bytes, GuestAddress(address)).unwrap();
            bytes
        };
        let sum = |bytes: &[u8]| bytes.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
        let pointer = |address: u64| ram.guest().read_obj::<u64>(GuestAddress(address)).unwrap();
        assert_eq!(sum(&bytes(rsdp, 36)), 0);
        let table = |address: u64| {
            let length = ram.guest().read_obj::<u32>(GuestAddress(address + 4)).unwrap();
            let table = bytes(address, usize::try_from(length).unwrap());
            assert_eq!(sum(&table), 0, "{:?}", String::from_utf8_lossy(&table[..4]));
            table
        };
        let xsdt_address = pointer(rsdp + 24);
        let xsdt = table(xsdt_address);
        let mut found = Vec::new();
        for index in 0..(xsdt.len() - 36) as u64 / 8 {
            let entry = table(pointer(xsdt_address + 36 + index * 8));
            if entry[..4] == *b"FACP" {
                let dsdt = u64::from_le_bytes(entry[140..148].try_into().unwrap());
                assert_eq!(&table(dsdt)[..4], b"DSDT");
                assert_eq!(
                    u32::from_le_bytes(entry[112..116].try_into().unwrap()) >> 20 & 1,
                    1,
                    "hardware-reduced"
                );
            }
            found.push(entry);
        }
        found
    }
}
