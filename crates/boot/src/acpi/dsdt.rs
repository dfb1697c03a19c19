//! The DSDT: PCI host bridge, reserved ranges, serial port, generic event device, power button, VM generation ID.

use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, And, Arg, Device, EISAName, Equal, Field, FieldAccessType, FieldEntry,
    FieldLockRule, FieldUpdateRule, IO, If, Interrupt, Local, Memory32Fixed, Method, Name, Notify, ONE, OpRegion,
    OpRegionSpace, Package, PackageBuilder, Path, ResourceTemplate, Store, ZERO,
};
use acpi_tables::sdt::Sdt;
use acpi_tables::{Aml, AmlSink};
use memory::layout;

use super::{Board, OEM_ID, OEM_REVISION, OEM_TABLE_ID, Root, SLEEP_TYPE_S5};

/// A finished table, as bytes.
pub(super) struct Dsdt(Sdt);

impl Aml for Dsdt {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        sink.vec(self.0.as_slice());
    }
}

/// "The power button was pressed" (ACPI 6.5, 4.8.2.2.1).
const NOTIFY_POWER_BUTTON: u8 = 0x80;

/// "The generation ID has changed" (Microsoft, Virtual Machine Generation ID).
const NOTIFY_GENERATION: u8 = 0x80;

/// The bits of pending events, as `machine`'s event device has them.
const POWER_BUTTON: u8 = 1;
const NEW_GENERATION: u8 = 2;
const BUS_CHANGED: u8 = 4;

/// "Bus check": look what is there and what is not any more (ACPI 6.5, 5.6.6).
const NOTIFY_BUS_CHECK: u8 = 0;

/// Builds the table.
pub(super) fn build(board: &Board) -> Dsdt {
    let mut aml = Vec::new();
    let ports = IO::new(0xcf8, 0xcf8, 1, 8);
    let uncached = AddressSpaceCacheable::NotCacheable;
    match board.root {
        Root::Memory { window_64: high } => {
            let low = layout::PCI_WINDOW_32;
            let low_end = below_4g(low.start + low.length - 1);
            let window_32 = AddressSpace::<u32>::new_memory(uncached, true, below_4g(low.start), low_end, None);
            let window_64 =
                AddressSpace::<u64>::new_memory(uncached, true, high.start, high.start + high.length - 1, None);
            host_bridge(&[&ports, &window_32, &window_64], Some(board), &mut aml);
            reserved(&mut aml);
            let line = Interrupt::new(true, true, false, false, board.ports.serial_pin);
            serial(board, Some(&line), &mut aml);
            generation_id(&mut aml);
            events(board, &mut aml);
        }
        Root::Ports { ports: bars, tables } => {
            let port = |number: u64| u16::try_from(number).unwrap_or(u16::MAX);
            let bars = AddressSpace::<u16>::new_io(port(bars.start), port(bars.start + bars.length - 1), None);
            let end = tables.start + tables.length - 1;
            let tables =
                AddressSpace::<u64>::new_memory(AddressSpaceCacheable::Cacheable, true, tables.start, end, None);
            host_bridge(&[&ports, &bars, &tables], None, &mut aml);
            serial(board, None, &mut aml);
        }
    }
    Name::new(Path::new("_S5_"), &Package::new(vec![&SLEEP_TYPE_S5])).to_aml_bytes(&mut aml);
    let mut table = Sdt::new(*b"DSDT", 36, 6, OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    table.append_slice(&aml);
    Dsdt(table)
}

fn below_4g(address: u64) -> u32 {
    u32::try_from(address).unwrap_or(u32::MAX)
}

/// Device numbers of a bus; 0 is the host bridge itself.
const SLOTS: u32 = 32;

/// Any function of a slot, in `_PRT` (6.2.13).
const ANY_FUNCTION: u32 = 0xffff;

/// Where INTA# of each slot goes (`_PRT`; ACPI 6.5, 6.2.13): a level, active low, as of all PCI interrupts. The other three pins are those of
/// devices of several functions (PCI 3.0, 2.2.6), and here each has one. Also of slots that are empty: functions come later.
struct Routing([u32; 4]);

impl Aml for Routing {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let mut slots = PackageBuilder::new();
        // Slot 0 has the first pin, slot 1 the second.
        for (slot, pin) in (1..SLOTS).zip(self.0.iter().cycle().skip(1)) {
            let address = slot << 16 | ANY_FUNCTION;
            // INTA#; no link device, so that the last is the number of an interrupt.
            slots.add_element(&Package::new(vec![&address, &ZERO, &ZERO, pin]));
        }
        Name::new(Path::new("_PRT"), &slots).to_aml_bytes(sink);
    }
}

/// Each slot as an object of its own, which has no function or one. Linux's driver of hot-plugged PCI devices (drivers/pci/hotplug/acpiphp_glue.c)
/// looks into those that it knows by their address (`_ADR`) alone when its bus is to be checked; that they have no `_EJ0` says that nobody asks
/// it to let go of one.
struct Slots;

impl Aml for Slots {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        for slot in 1..SLOTS {
            let address = slot << 16;
            let name = format!("S{slot:02X}_");
            let address = Name::new(Path::new("_ADR"), &address);
            Device::new(Path::new(&name), vec![&address]).to_aml_bytes(sink);
        }
    }
}

/// With the board's pins and slots, where it has some.
fn host_bridge(windows: &[&dyn Aml], board: Option<&Board>, aml: &mut Vec<u8>) {
    let buses = AddressSpace::<u16>::new_bus_number(0, 0);
    let mut all: Vec<&dyn Aml> = vec![&buses];
    all.extend(windows);
    let windows = ResourceTemplate::new(all);
    let id = Name::new(Path::new("_HID"), &EISAName::new("PNP0A08"));
    let compatible = Name::new(Path::new("_CID"), &EISAName::new("PNP0A03"));
    let [unique, segment, bus] = ["_UID", "_SEG", "_BBN"].map(|name| Name::new(Path::new(name), &ZERO));
    let resources = Name::new(Path::new("_CRS"), &windows);
    let routing = board.map(|board| Routing(board.ports.slot_pins));
    let slots = board.filter(|board| board.acpi_hotplug).map(|_| Slots);
    let mut objects: Vec<&dyn Aml> = vec![&id, &compatible, &unique, &segment, &bus, &resources];
    objects.extend(routing.as_ref().map(|routing| routing as &dyn Aml));
    objects.extend(slots.as_ref().map(|slots| slots as &dyn Aml));
    Device::new(Path::new("_SB_.PCI0"), objects).to_aml_bytes(aml);
}

/// Linux uses ECAM only if the range is reserved by a motherboard resource.
fn reserved(aml: &mut Vec<u8>) {
    let range = Memory32Fixed::new(true, below_4g(layout::ECAM.start), below_4g(layout::ECAM.length));
    let ecam = ResourceTemplate::new(vec![&range]);
    Device::new(
        Path::new("_SB_.MBRD"),
        vec![
            &Name::new(Path::new("_HID"), &EISAName::new("PNP0C02")),
            &Name::new(Path::new("_UID"), &ZERO),
            &Name::new(Path::new("_CRS"), &ecam),
        ],
    )
    .to_aml_bytes(aml);
}

/// Without a line its driver looks from time to time.
fn serial(board: &Board, line: Option<&Interrupt>, aml: &mut Vec<u8>) {
    let ports = &board.ports;
    let registers = IO::new(ports.serial, ports.serial, 1, 8);
    let mut resources: Vec<&dyn Aml> = vec![&registers];
    resources.extend(line.map(|line| line as &dyn Aml));
    let resources = ResourceTemplate::new(resources);
    Device::new(
        Path::new("_SB_.COM1"),
        vec![
            &Name::new(Path::new("_HID"), &EISAName::new("PNP0501")),
            &Name::new(Path::new("_UID"), &ZERO),
            &Name::new(Path::new("_CRS"), &resources),
        ],
    )
    .to_aml_bytes(aml);
}

/// The VM generation ID (Microsoft, "Virtual Machine Generation ID", 2012): 16 bytes of memory, whose address `ADDR` gives in two
/// halves. Drivers know it by its compatible IDs: the one that the specification names, and the one that is valid in ACPI.
fn generation_id(aml: &mut Vec<u8>) {
    let (low, high) = (below_4g(crate::GENERATION_ID), 0_u32);
    Device::new(
        Path::new("_SB_.VGEN"),
        vec![
            &Name::new(Path::new("_HID"), &"BSLTVGID"),
            &Name::new(Path::new("_CID"), &Package::new(vec![&"VM_Gen_Counter", &"VMGENCTR"])),
            &Name::new(Path::new("_DDN"), &"VM_Gen_Counter"),
            &Name::new(Path::new("_UID"), &ZERO),
            &Name::new(Path::new("ADDR"), &Package::new(vec![&low, &high])),
        ],
    )
    .to_aml_bytes(aml);
}

/// If this bit of what happened (in the first local variable) is set, a device is told of it.
struct Told(u8, &'static str, u8);

impl Aml for Told {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let Self(bit, device, what) = self;
        let masked = And::new(&ZERO, &Local(0), bit);
        let device = Path::new(device);
        let tell = Notify::new(&device, what);
        If::new(&Equal::new(&masked, bit), vec![&tell]).to_aml_bytes(sink);
    }
}

/// The generic event device (5.6.9): one edge-triggered line, one register that tells what happened.
fn events(board: &Board, aml: &mut Vec<u8>) {
    let ports = &board.ports;
    Device::new(
        Path::new("_SB_.PWRB"),
        vec![
            &Name::new(Path::new("_HID"), &EISAName::new("PNP0C0C")),
            &Name::new(Path::new("_UID"), &ZERO),
        ],
    )
    .to_aml_bytes(aml);
    let interrupt = Interrupt::new(true, true, false, false, ports.events_pin);
    let line = ResourceTemplate::new(vec![&interrupt]);
    let pressed = Told(POWER_BUTTON, "\\_SB_.PWRB", NOTIFY_POWER_BUTTON);
    let reidentified = Told(NEW_GENERATION, "\\_SB_.VGEN", NOTIFY_GENERATION);
    let changed = Told(BUS_CHANGED, "\\_SB_.PCI0", NOTIFY_BUS_CHECK);
    let register = Path::new("EVNT");
    let (which, read) = (Store::new(&Local(1), &Arg(0)), Store::new(&Local(0), &register));
    let mut happened: Vec<&dyn Aml> = vec![&which, &read, &pressed, &reidentified];
    if board.acpi_hotplug {
        happened.push(&changed);
    }
    Device::new(
        Path::new("_SB_.GED_"),
        vec![
            &Name::new(Path::new("_HID"), &"ACPI0013"),
            &Name::new(Path::new("_UID"), &ZERO),
            &Name::new(Path::new("_CRS"), &line),
            &OpRegion::new(Path::new("EVRG"), OpRegionSpace::SystemIO, &ports.events, &ONE),
            &Field::new(
                Path::new("EVRG"),
                FieldAccessType::Byte,
                FieldLockRule::NoLock,
                FieldUpdateRule::WriteAsZeroes,
                vec![FieldEntry::Named(*b"EVNT", 8)],
            ),
            &Method::new(Path::new("_EVT"), 1, true, happened),
        ],
    )
    .to_aml_bytes(aml);
}
