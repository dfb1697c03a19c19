//! Functions whose configuration space is wrong: what can be used is shown, and nothing of it leads elsewhere.

use pci::PciFunction;
use vfio::Irq;

use super::images::{Image, both, edu, igbvf, nvme, virtio};
use super::kit::{Machine, refusal, without_levels};

#[test]
fn circles_end() {
    let mut image = nvme();
    // Power management leads back to MSI-X, which comes first.
    image.put(0x61, &[0x40]);
    let device = image.device().with_bar(0, 0x4000).with_irqs(Irq::MsiX, 65);
    assert_eq!(
        Machine::new(device).capabilities(),
        [(0x11, 0x40), (0x10, 0x80), (0x01, 0x60)]
    );
    // The extended list as well, before the serial number.
    image.put(0x102, &[1, 0x10]);
    let device = image.device().with_bar(0, 0x4000).with_irqs(Irq::MsiX, 65);
    assert_eq!(Machine::new(device).read32(0x100), 0);
}

#[test]
fn capabilities_that_overlap_are_cut_or_hidden() {
    let mut image = virtio();
    // The first vendor capability says that it reaches over all others: into those of the notifications, and of MSI-X.
    image.put(0x42, &[0xc0]).put(0x72, &[0xc0]);
    let device = image
        .device()
        .with_bar(1, 0x1000)
        .with_bar(4, 0x4000)
        .with_irqs(Irq::MsiX, 4);
    let machine = Machine::new(device);
    let places: Vec<usize> = machine.capabilities().iter().map(|(_, at)| *at).collect();
    assert_eq!(places, [0x98, 0x84, 0x60, 0x50]);
    machine.config_write(0x40, &[0xff; 16]);
    machine.config_write(0x70, &[0xff; 20]);
    assert_eq!(
        (machine.seen(), machine.read32(0x40), machine.read32(0x70)),
        (vec![], 0, 0)
    );
    // PCI Express with power management in the midst of it.
    let mut image = nvme();
    image.put(0x81, &[0xa0]).put(0xa0, &[1, 0]);
    let device = image.device().with_bar(0, 0x4000).with_irqs(Irq::MsiX, 65);
    let machine = Machine::new(device);
    assert_eq!(
        (machine.capabilities(), machine.config_size()),
        (vec![(0x11, 0x40), (0x01, 0xa0)], 256)
    );
}

#[test]
fn capabilities_that_are_cut_short_are_hidden() {
    let mut image = both();
    image.put(0x71, &[0xfc]).put(0xfc, &[0x10, 0, 2, 0]);
    let device = image
        .device()
        .with_bar(0, 0x2000)
        .with_irqs(Irq::Msi, 8)
        .with_irqs(Irq::MsiX, 4);
    assert_eq!(Machine::new(device).capabilities(), [(5, 0x50), (0x11, 0x70)]);
    // A length of nothing.
    let mut image = virtio();
    image.put(0x42, &[2]).put(0x52, &[0]);
    let device = image.device().with_bar(1, 0x1000).with_irqs(Irq::MsiX, 4);
    let machine = Machine::new(device);
    assert_eq!(machine.capabilities().len(), 4);
    // All of MSI-X behind the end.
    let mut image = Image::new(256, 0x1234_5678, 0);
    image.capabilities(&[(0xf8, 0x11, &[0, 0])]);
    let told = refusal(image.device().with_bar(0, 0x1000).with_irqs(Irq::MsiX, 1));
    assert!(told.contains("neither MSI nor MSI-X"), "{told}");
}

#[test]
fn extended_capabilities_that_are_cut_short_are_hidden() {
    // By the end, and by another one.
    for (first, second, at) in [(0xff8_u16, 0, 0xff8_usize), (0x140, 0x148_u32, 0x140)] {
        let mut image = igbvf();
        image.put(0x102, &(1 | first << 4).to_le_bytes());
        image.put(at, &(0x0001_0003_u32 | second << 20).to_le_bytes());
        image.put(0x148, &[0x0f, 0, 1, 0]);
        let device = image.device().with_bar(3, 0x4000).with_irqs(Irq::MsiX, 3);
        let machine = Machine::new(device);
        assert_eq!((machine.config_size(), machine.read32(0x100)), (4096, 0), "{first:#x}");
    }
}

#[test]
fn a_second_capability_of_a_kind_is_hidden() {
    let mut image = edu();
    image.put(0x41, &[0x60]).put(0x60, &[5, 0, 0x82, 0]);
    let device = image.device().with_bar(0, 0x1000).with_irqs(Irq::Msi, 2);
    let machine = Machine::new(device);
    assert_eq!(machine.capabilities(), [(5, 0x40)]);
    machine.config_write(0x60, &[0xff; 16]);
    assert_eq!((machine.read32(0x60), machine.device.on(Irq::Msi)), (0, 0));
}

#[test]
fn a_table_that_is_in_no_bar_is_no_msix() {
    for (size, table) in [
        (0x2000, 0x2000_u32),
        (0x4000, 0x3ff0),
        (0x4000, 0x2001),
        (0x4000, 0xffff_fff8),
    ] {
        let mut image = nvme();
        image.put(0x44, &table.to_le_bytes());
        let told = refusal(image.device().with_bar(0, size).with_irqs(Irq::MsiX, 65));
        assert!(told.contains("neither MSI nor MSI-X"), "{table:#x}: {told}");
    }
    // In one of ports, and in one that is fine.
    let mut image = nvme();
    image.put(0x10, &[1]);
    assert!(refusal(image.device().with_bar(0, 0x4000).with_irqs(Irq::MsiX, 65)).contains("neither"));
    assert_eq!(
        refusal(nvme().device().with_bar(0, 0x4000).with_irqs(Irq::MsiX, 65)),
        ""
    );
}

#[test]
fn vectors_that_the_host_has_not_are_not_shown() {
    let told = refusal(nvme().device().with_bar(0, 0x4000).with_irqs(Irq::MsiX, 64));
    assert!(told.contains("neither"), "{told}");
    let device = both().device().with_bar(0, 0x2000).with_irqs(Irq::Msi, 3);
    let machine = Machine::new(device);
    assert_eq!((machine.capabilities()[0], machine.read16(0x52)), ((5, 0x50), 0x0182));
}

#[test]
fn functions_that_cannot_be_given_away_are_told_why() {
    let mut image = edu();
    image.put(0x34, &[0]);
    let device = || image.device().with_bar(0, 0x1000).with_irqs(Irq::IntX, 1);
    assert_eq!(refusal(device()), "");
    let told = without_levels(device()).unwrap_err();
    assert!(
        told.contains("by its pin (INTx) alone") && told.contains("`standard`"),
        "{told}"
    );
    // The host does not hear it, or there is none.
    assert!(refusal(image.device()).contains("no way to interrupt"));
    image.put(0x3d, &[0]);
    assert!(refusal(image.device().with_irqs(Irq::IntX, 1)).contains("no way to interrupt"));
    let mut bridge = edu();
    bridge.put(0x0e, &[0x81]);
    assert!(refusal(bridge.device().with_irqs(Irq::Msi, 1)).contains("is a bridge"));
    // A BAR that no register can express.
    let told = refusal(edu().device().with_bar(0, 0x3000).with_irqs(Irq::Msi, 1));
    assert!(told.contains("BAR 0 of 0x3000 bytes cannot be"), "{told}");
    // A port of a switch has an express capability of another kind.
    let mut port = igbvf();
    port.put(0xa2, &[0x62]);
    let machine = Machine::new(port.device().with_bar(3, 0x4000).with_irqs(Irq::MsiX, 3));
    assert_eq!(
        (machine.capabilities(), machine.config_size()),
        (vec![(0x11, 0x70)], 256)
    );
}

/// Any bytes at all: whatever is shown, the list ends, the guest's writes reach nothing but what is passed, and nothing panics.
#[test]
fn whatever_a_function_says_nothing_breaks() {
    let mut random = 0x5eed_u64;
    let mut next = || {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (random >> 33).to_le_bytes()[0]
    };
    let mut shown = 0;
    for round in 0..400 {
        let mut image = igbvf();
        for _ in 0..next() % 24 {
            let at = 0x34 + usize::from(next()) % 0xcc;
            image.put(at, &[next()]);
        }
        for _ in 0..next() % 8 {
            image.put(0x100 + 15 * usize::from(next()), &[next(), next() % 4, 1, next()]);
        }
        if image.bytes()[0x34] < 0x40 {
            image.put(0x34, &[0x70]);
        }
        let device = || {
            image
                .device()
                .with_bar(0, 0x4000)
                .with_bar(3, 0x4000)
                .with_irqs(Irq::MsiX, 3)
                .with_irqs(Irq::Msi, 4)
        };
        if !refusal(device()).is_empty() {
            continue;
        }
        shown += 1;
        let machine = Machine::new(device());
        let places = machine.capabilities();
        assert!(places.len() <= 48, "round {round}");
        for at in 0x40..machine.config_size() - 4 {
            machine.config_write(at, &[next(), next(), next(), next()]);
        }
        for (offset, data) in machine.seen() {
            let start = usize::try_from(offset).unwrap();
            let end = start + data.len();
            let vendor = places.iter().any(|(id, at)| *id == 9 && *at + 3 <= start && end <= 256);
            assert!(offset == 4 || vendor, "round {round}: {data:x?} at {offset:#x}");
        }
        let _ = machine.read32(0x64);
    }
    assert!(shown > 100, "{shown} of 400 could be shown at all");
}
