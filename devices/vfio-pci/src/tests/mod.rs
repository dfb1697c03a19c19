//! What guests see of functions, and what functions see of guests, with configuration spaces as they are and as they should not be.

mod hostile;
mod images;
mod intx;
mod kit;

use pci::{MemoryRange, PciFunction};
use vfio::Irq;
use vfio::fake::{FakeDevice, Op};

use images::{both_device, edu_device, igbvf_device, nvme_device, virtio_device};
use kit::Machine;

/// The command register with memory, and with memory and bus master, as the function gets it while nobody listens to its pin.
const MEMORY: [u8; 2] = [0x02, 0x04];
const BUS_MASTER: [u8; 2] = [0x06, 0x04];

fn all_devices() -> Vec<(&'static str, FakeDevice)> {
    vec![
        ("nvme", nvme_device()),
        ("virtio", virtio_device()),
        ("igbvf", igbvf_device()),
        ("edu", edu_device()),
        ("both", both_device()),
    ]
}

#[test]
fn a_disk_is_shown_with_power_management_express_and_msix() {
    let machine = Machine::new(nvme_device());
    assert_eq!(
        (machine.read32(0), machine.read32(8), machine.read32(0x2c)),
        (0x0010_1b36, 0x0108_0202, 0x1100_1af4)
    );
    assert_eq!(machine.capabilities(), [(0x11, 0x40), (0x10, 0x80), (0x01, 0x60)]);
    assert_eq!(
        (machine.read16(0x42), machine.read32(0x44), machine.read32(0x48)),
        (64, 0x2000, 0x3000)
    );
    assert_eq!(machine.read16(0x3c), 0x01ff, "INTA#, and no line of a controller");
    machine.config_write(0x10, &[0xff; 8]);
    assert_eq!((machine.read32(0x10), machine.read32(0x14)), (0xffff_c004, u32::MAX));
}

#[test]
fn express_is_an_integrated_endpoint_without_links_and_errors() {
    let machine = Machine::new(nvme_device());
    // Version 2, type 9; payload, extended tags, role-based errors, function level reset.
    assert_eq!((machine.read16(0x82), machine.read32(0x84)), (0x0092, 0x1000_8021));
    // As the host has set it, without the four bits of errors.
    assert_eq!(machine.read16(0x88), 0x2920);
    machine.write16(0x88, 0x7fff);
    assert_eq!(machine.read16(0x88), 0x79f0);
    for at in (0x8a..0x80 + 0x3c).step_by(2) {
        machine.write16(at, 0xffff);
        assert_eq!(machine.read16(at), 0, "{at:#x}");
    }
    assert_eq!(machine.seen(), [], "the function's own are the host's");
}

#[test]
fn only_the_serial_number_is_left_of_extended_capabilities() {
    for (device, at, serial) in [
        (nvme_device(), 0x100, [1, 2, 3, 4, 5, 6, 7, 8]),
        (igbvf_device(), 0x100, [9, 8, 7, 6, 5, 4, 3, 2]),
    ] {
        let machine = Machine::new(device);
        assert_eq!(machine.config_size(), 4096);
        let mut number = [0; 8];
        machine.config_read(at + 4, &mut number);
        assert_eq!((machine.read32(at) & 0x000f_ffff, number), (0x0001_0003, serial));
    }
    let machine = Machine::new(igbvf_device());
    assert_eq!(
        (machine.read32(0x100), machine.read32(0x10c)),
        (0x10c1_0003, 0x0001_0003)
    );
    for at in (0x118..4096).step_by(4) {
        assert_eq!(machine.read32(at), 0, "{at:#x}");
    }
    // An access across the border.
    assert_eq!(machine.read32(0xfe), 0x0003_0000);
    machine.write32(0x104, u32::MAX);
    assert_eq!((machine.read32(0x104), machine.seen()), (0x0607_0809, vec![]));
    assert_eq!(Machine::new(virtio_device()).config_size(), 256);
}

/// A guest writes ones to each register, by itself and then all at once, as wide as it likes.
#[test]
fn whatever_a_guest_writes_the_function_sees_what_the_policy_lets_through() {
    for (name, device) in all_devices() {
        let machine = Machine::new(device);
        let allowed = |at: u64| match name {
            // The bodies of vendor specific capabilities.
            "virtio" => [(0x84, 0x14), (0x70, 0x14), (0x60, 0x10), (0x50, 0x10), (0x40, 0x10)]
                .iter()
                .any(|&(start, length)| (start + 3..start + length).contains(&at)),
            _ => false,
        };
        for width in [1, 2, 4, 8, machine.config_size()] {
            for at in (0..machine.config_size() + 1 - width).step_by(width.min(4)) {
                machine.config_write(at, &vec![0xff; width]);
                for (offset, data) in machine.seen() {
                    let is_command = offset == 4 && matches!(data.as_slice(), [0, 4] | [2 | 6, 0 | 4]);
                    let passed = (offset..offset + data.len() as u64).all(allowed);
                    assert!(is_command || passed, "{name}: {data:x?} at {offset:#x}");
                }
            }
        }
        machine.write16(4, 0);
        assert_eq!(machine.device.on(Irq::IntX), 0);
    }
}

#[test]
fn vendor_specific_capabilities_are_the_functions_own() {
    let machine = Machine::new(virtio_device());
    let places = [0x98, 0x84, 0x70, 0x60, 0x50, 0x40];
    assert_eq!(
        machine.capabilities().iter().map(|(_, at)| *at).collect::<Vec<_>>(),
        places
    );
    // Length, kind and BAR of the common configuration; the notifications' offset.
    assert_eq!((machine.read32(0x40), machine.read32(0x44)), (0x0110_0009, 4));
    assert_eq!(machine.read32(0x78), 0x3000);
    // The window by configuration space: its offset, its length, its data.
    machine.write32(0x84 + 8, 0x1234);
    machine.config_write(0x84 + 2, &[0x55, 5, 1]);
    machine.write32(0x84 + 16, 0xcafe);
    let seen = [
        (0x8c, vec![0x34, 0x12, 0, 0]),
        (0x87, vec![5, 1]),
        (0x94, vec![0xfe, 0xca, 0, 0]),
    ];
    assert_eq!(machine.seen(), seen);
    // What the function has there by itself.
    machine.device.set(vfio::CONFIG_REGION, 0x94, &[1, 2, 3, 4]).unwrap();
    assert_eq!((machine.read32(0x94), machine.read16(0x86) & 0xff), (0x0403_0201, 0x14));
}

#[test]
fn bus_mastering_is_the_guests_to_turn_on_and_off() {
    let machine = Machine::new(nvme_device());
    machine.write16(4, 0x0006);
    machine.write16(4, 0x0002);
    machine.write16(4, 0x0002);
    machine.write16(4, 0x0402);
    machine.write16(4, 0x0107);
    machine.write16(4, 0x0000);
    let seen: Vec<_> = machine.seen().into_iter().map(|(_, data)| data).collect();
    // The first bit of the second byte is the interrupt pin's: off while nobody listens, or the guest wants it off.
    assert_eq!(seen, [[6, 4], [6, 0], [2, 0], [2, 4], [6, 0], [0, 4]]);
    assert_eq!(machine.read16(4), 0);
}

#[test]
fn a_function_that_sleeps_is_no_bus_master() {
    let machine = Machine::new(nvme_device());
    machine.write16(4, 6);
    assert_eq!((machine.read16(0x62), machine.read32(0x64)), (0x0003, 0x0008));
    // D1 and D2, which it has not.
    for state in [1, 2] {
        machine.write16(0x64, state);
        assert_eq!(machine.read16(0x64), 8);
    }
    machine.write16(0x64, 0xff03);
    assert_eq!(machine.read16(0x64), 0xb);
    machine.write16(0x64, 0);
    let seen: Vec<_> = machine.seen().into_iter().map(|(_, data)| data).collect();
    // Its pin is off meanwhile.
    assert_eq!(seen, [BUS_MASTER, [6, 0], MEMORY, [6, 0]]);
}

#[test]
fn msix_is_turned_on_at_the_host_and_routed_by_the_guest() {
    let machine = Machine::new(nvme_device());
    machine.bar_write(0, 0x2010, &0xfee0_0000_u64.to_le_bytes());
    machine.bar_write(0, 0x2018, &0x41_u64.to_le_bytes());
    machine.write16(0x42, 0x8000);
    assert_eq!(machine.device.on(Irq::MsiX), 65);
    assert_eq!(machine.engine.routed()[..3], [None, Some(0x41), None]);
    // A masked vector is pending.
    assert!(machine.device.interrupt(Irq::MsiX, 2).unwrap());
    let mut pending = [0; 8];
    machine.bar_read(0, 0x3000, &mut pending);
    assert_eq!(pending, [4, 0, 0, 0, 0, 0, 0, 0]);
    // Neither table nor pending bits are the function's.
    machine.bar_write(0, 0x3000, &[0xff; 8]);
    assert_eq!(machine.device.take_written().len(), 0);
    machine.bar_write(0, 0x2800, &[1, 2, 3, 4]);
    assert_eq!(machine.device.take_written().len(), 1, "the rest of the page is");
    machine.write16(0x42, 0);
    assert_eq!((machine.device.on(Irq::MsiX), machine.engine.routed()[1]), (0, None));
}

#[test]
fn msi_alone_is_enough() {
    let machine = Machine::new(edu_device());
    assert_eq!(
        (machine.capabilities(), machine.read16(0x42)),
        (vec![(5, 0x40)], 0x0080)
    );
    machine.write32(0x44, 0xfee0_0000);
    machine.write32(0x48, 1);
    machine.write16(0x4c, 0x4031);
    machine.write16(0x42, 1);
    assert_eq!(machine.device.on(Irq::Msi), 1);
    let message = machine.engine.source(0).routed().unwrap();
    assert_eq!((message.address, message.data), (0x1_fee0_0000, 0x4031));
    assert!(machine.device.interrupt(Irq::Msi, 0).unwrap());
    machine.write16(0x42, 0);
    assert_eq!((machine.device.on(Irq::Msi), machine.engine.routed()), (0, vec![None]));
    assert_eq!(machine.seen(), []);
}

#[test]
fn msi_has_several_vectors_and_masks() {
    let machine = Machine::new(both_device());
    // 64 bits, masks, eight vectors.
    assert_eq!(machine.read16(0x52), 0x0186);
    machine.write16(0x5c, 0x4047);
    machine.write32(0x60, 0b10);
    machine.write16(0x52, 0x0031);
    assert_eq!(machine.device.on(Irq::Msi), 8);
    let routed = machine.engine.routed();
    assert_eq!(routed[..4], [Some(0x4040), None, Some(0x4042), Some(0x4043)]);
    assert!(machine.device.interrupt(Irq::Msi, 1).unwrap());
    assert_eq!(machine.read32(0x64), 0b10, "it is pending");
    machine.write32(0x64, 0);
    assert_eq!(machine.read32(0x64), 0b10, "and stays so");
    machine.write32(0x60, 0);
    assert_eq!(machine.engine.routed()[1], Some(0x4041));
    // Two of them are another number for the host.
    machine.write16(0x52, 0x0011);
    assert_eq!((machine.device.on(Irq::Msi), machine.engine.routed()[2]), (2, None));
}

#[test]
fn of_msi_the_host_may_have_fewer_and_of_msix_it_must_have_all() {
    let machine = Machine::new(both_device().with_vectors(3));
    machine.write16(0x52, 0x0031);
    assert_eq!(machine.device.on(Irq::Msi), 2);
    machine.write16(0x52, 0);
    machine.write16(0x72, 0x8000);
    assert_eq!((machine.device.on(Irq::MsiX), machine.read16(0x72)), (0, 0x8003));
    // It is not asked again for each write of a guest's.
    let four = Machine::new(both_device());
    four.write16(0x72, 0x8000);
    assert_eq!(four.device.on(Irq::MsiX), 4);
}

#[test]
fn of_two_kinds_msix_is_the_one_that_is_on() {
    let machine = Machine::new(both_device());
    machine.write16(0x5c, 0x4040);
    machine.write16(0x52, 0x0031);
    machine.bar_write(0, 0x8, &0x55_u64.to_le_bytes());
    machine.write16(0x72, 0x8000);
    assert_eq!((machine.device.on(Irq::Msi), machine.device.on(Irq::MsiX)), (0, 4));
    assert_eq!(machine.engine.routed()[..3], [Some(0x55), None, None]);
    machine.write16(0x72, 0);
    assert_eq!((machine.device.on(Irq::Msi), machine.device.on(Irq::MsiX)), (8, 0));
    assert_eq!(machine.engine.routed()[1], Some(0x4041));
}

#[test]
fn a_guests_reset_is_the_functions_and_leaves_nothing_on() {
    let machine = Machine::new(nvme_device());
    machine.write32(0x10, 0xc000_0000);
    machine.write16(4, 6);
    machine.write16(0x64, 3);
    machine.write16(0x42, 0x8000);
    machine.bar_write(0, 0x2000, &[0x10; 16]);
    machine.seen();
    assert!(machine.moves_memory(0x88, 2) && machine.moves_memory(0x89, 1) && !machine.moves_memory(0x88, 1));
    machine.write16(0x88, 0x8000 | 0x7810);
    assert_eq!((machine.device.resets(), machine.device.on(Irq::MsiX)), (1, 0));
    assert_eq!((machine.memory_ranges(), machine.engine.given()), ([None; 6], vec![]));
    assert_eq!(
        (machine.read16(4), machine.read32(0x10), machine.read16(0x42)),
        (0, 4, 64)
    );
    assert_eq!((machine.read16(0x64), machine.read16(0x88)), (8, 0x2920));
    let mut entry = [0; 16];
    machine.bar_read(0, 0x2000, &mut entry);
    assert_eq!(entry, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]);
    // Before the reset, and after it, as the host puts back what was there.
    assert_eq!(machine.seen(), [(4, vec![0, 4]), (4, vec![0, 4])]);
    machine.config_write(0x88, &[0xff]);
    assert_eq!(machine.device.resets(), 1);
}

#[test]
fn a_function_that_cannot_be_reset_does_not_say_so() {
    let machine = Machine::new(nvme_device().without_reset());
    assert_eq!(machine.read32(0x84), 0x0000_8021);
    machine.write16(0x88, 0x8000);
    assert!(!machine.moves_memory(0x88, 2));
    assert_eq!((machine.device.resets(), machine.read16(0x88)), (0, 0));
}

#[test]
fn pages_of_bars_are_the_guests_where_nothing_of_ours_is() {
    let machine = Machine::new(nvme_device());
    machine.config_write(0x10, &0x40_0000_0000_u64.to_le_bytes());
    assert_eq!(machine.engine.given(), []);
    machine.write16(4, 2);
    assert_eq!(machine.memory_ranges()[0], MemoryRange::new(0x40_0000_0000, 0x4000));
    assert_eq!(machine.engine.given(), [(0x40_0000_0000, 0x2000)]);
    machine.write32(0x14, 0x41);
    assert_eq!(machine.engine.given(), [(0x41_0000_0000, 0x2000)]);
    machine.write16(4, 0);
    assert_eq!(machine.engine.given(), []);
}

#[test]
fn bars_of_two_registers_may_be_prefetchable() {
    let machine = Machine::new(virtio_device());
    machine.config_write(0x20, &[0xff; 8]);
    assert_eq!((machine.read32(0x20), machine.read32(0x24)), (0xffff_c00c, u32::MAX));
    machine.config_write(0x20, &0x40_0000_0000_u64.to_le_bytes());
    machine.write16(4, 2);
    assert_eq!(
        machine.engine.given(),
        [(0x40_0000_0000, 0x4000)],
        "the table's BAR is ours"
    );
}

#[test]
fn bars_smaller_than_a_page_are_served_and_those_of_ports_hidden() {
    let machine = Machine::new(both_device());
    for at in [0x10, 0x14, 0x18] {
        machine.write32(at, u32::MAX);
    }
    assert_eq!(
        (machine.read32(0x10), machine.read32(0x14), machine.read32(0x18)),
        (0xffff_e000, 0, 0xffff_ff00)
    );
    machine.write32(0x10, 0xc000_0000);
    machine.write32(0x18, 0xc000_8000);
    machine.write16(4, 0xffff);
    assert_eq!(machine.read16(4), 0x0406, "no ports");
    assert_eq!(machine.engine.given(), [(0xc000_1000, 0x1000)]);
    machine.device.take_written();
    machine.bar_write(2, 0xfc, &[1, 2, 3, 4]);
    let mut data = [0; 4];
    machine.bar_read(2, 0xfc, &mut data);
    assert_eq!((data, machine.device.take_written().len()), ([1, 2, 3, 4], 1));
}

#[test]
fn all_memory_is_mapped_for_a_function_and_unmapped_after_it_is_closed() {
    let machine = Machine::new(nvme_device());
    let (space, device) = (machine.space.clone(), machine.device.clone());
    assert_eq!((space.mapped_bytes(), space.count(Op::Map)), (256 << 20, 2));
    machine.write16(4, 6);
    machine.write16(0x42, 0x8000);
    // That it is no bus master when it is closed, and memory still mapped, is looked at by the function.
    drop(machine);
    assert_eq!((space.mapped_bytes(), device.on(Irq::MsiX)), (0, 0));
}

#[test]
fn functions_of_one_guest_share_what_is_mapped() {
    let space = std::sync::Arc::new(vfio::fake::FakeSpace::new());
    let shared = device::DmaSpace::new(std::sync::Arc::clone(&space) as std::sync::Arc<dyn vfio::AddressSpace>);
    let first = Machine::sharing(nvme_device(), space.clone(), shared.clone());
    let second = Machine::sharing(igbvf_device(), space.clone(), shared);
    assert_eq!(space.count(Op::Map), 2);
    drop(first);
    assert_eq!(space.mapped_bytes(), 256 << 20);
    drop(second);
    assert_eq!(space.mapped_bytes(), 0);
}
