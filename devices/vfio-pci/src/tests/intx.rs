//! The interrupt pin: a level that the host's driver masks when it tells, of functions that have nothing else and of those whose drivers use
//! nothing else.

use vfio::Irq;
use vfio::fake::FakeDevice;

use super::images::{both_device, edu, edu_device, nvme_device, virtio};
use super::kit::{Machine, without_levels};

/// As `virtio-net-pci` with `vectors=0` is.
fn pin_alone() -> FakeDevice {
    let mut image = virtio();
    // The list begins behind MSI-X.
    image.put(0x34, &[0x84]).put(0x98, &[0; 12]);
    image.device().with_bar(4, 0x4000).with_irqs(Irq::IntX, 1)
}

#[test]
fn a_function_that_has_nothing_else_interrupts_by_its_pin() {
    let machine = Machine::new(pin_alone());
    assert_eq!((machine.read16(0x3c), machine.engine.routed().len()), (0x01ff, 0));
    // Nobody could serve it yet.
    assert_eq!((machine.device.on(Irq::IntX), machine.pin.is_on()), (0, false));
    machine.write16(4, 0x0002);
    assert_eq!((machine.device.on(Irq::IntX), machine.pin.is_on()), (1, true));
    // It listens before the function may say something.
    assert_eq!(machine.seen(), [(4, vec![2, 4]), (4, vec![2, 0])]);
    machine.write16(4, 0x0006);
    assert_eq!((machine.seen(), machine.device.masks()), (vec![(4, vec![6, 0])], 1));
    machine.device.assert_pin(true).unwrap();
    assert!(machine.pin.comes() && !machine.pin.comes());
    assert_eq!(machine.read16(6) & 8, 8, "the function wants something");
    // Not served: it comes again when the guest has ended it, once each time.
    for count in 2..5 {
        machine.pin.end();
        assert_eq!(
            (machine.device.pin_signals().unwrap(), machine.pin.comes()),
            (count, true)
        );
        assert_eq!(
            (machine.device.pin_signals().unwrap(), machine.pin.comes()),
            (count, false)
        );
    }
    machine.device.assert_pin(false).unwrap();
    machine.pin.end();
    assert_eq!((machine.device.pin_signals().unwrap(), machine.pin.comes()), (4, false));
    assert_eq!(machine.read16(6) & 8, 0);
    machine.write16(4, 0);
    assert_eq!((machine.device.on(Irq::IntX), machine.pin.is_on()), (0, false));
    assert_eq!(machine.seen(), [(4, vec![0, 4])]);
}

#[test]
fn the_guests_bit_holds_the_pin_back_and_loses_nothing() {
    let machine = Machine::new(pin_alone());
    machine.write16(4, 0x0006);
    machine.device.assert_pin(true).unwrap();
    // Off before anybody has looked: what was signalled is nothing any more, as the pin is not asserted.
    machine.write16(4, 0x0406);
    assert!(!machine.pin.is_on() && !machine.pin.comes());
    assert_eq!(
        (machine.read16(4), machine.read16(6) & 8),
        (0x0406, 8),
        "it wants something still"
    );
    machine.seen();
    machine.pin.end();
    machine.write16(4, 0x0006);
    assert_eq!((machine.seen(), machine.pin.comes()), (vec![(4, vec![6, 0])], true));
    assert_eq!(machine.device.on(Irq::IntX), 1, "the host has listened all the time");
    // A sleeping function asserts nothing.
    let disk = Machine::new(nvme_device());
    disk.write16(4, 0x0006);
    assert!(disk.pin.is_on());
    disk.write16(0x64, 3);
    assert!(!disk.pin.is_on());
    disk.write16(0x64, 0);
    assert!(disk.pin.is_on());
}

#[test]
fn a_guest_that_turns_on_messages_has_no_pin_and_has_it_again_afterwards() {
    for (device, control) in [(nvme_device(), 0x42), (edu_device(), 0x42)] {
        let machine = Machine::new(device);
        let (kind, on) = match machine.capabilities()[0].0 {
            5 => (Irq::Msi, 0x0001),
            _ => (Irq::MsiX, 0x8000),
        };
        machine.write16(4, 0x0006);
        assert_eq!((machine.device.on(Irq::IntX), machine.device.on(kind)), (1, 0));
        machine.device.assert_pin(true).unwrap();
        machine.seen();
        machine.write16(control, on);
        assert_eq!(machine.device.on(Irq::IntX), 0);
        assert!(machine.device.on(kind) > 0 && !machine.pin.is_on() && !machine.pin.comes());
        assert_eq!(
            machine.seen(),
            [(4, vec![6, 4])],
            "told before the host stops to listen"
        );
        machine.write16(control, 0);
        assert_eq!((machine.device.on(Irq::IntX), machine.device.on(kind)), (1, 0));
        assert!(machine.pin.is_on() && machine.pin.comes(), "it wants something still");
        assert_eq!(machine.seen(), [(4, vec![6, 0])]);
    }
}

#[test]
fn a_guests_reset_turns_the_pin_off() {
    let machine = Machine::new(nvme_device());
    machine.write16(4, 0x0006);
    machine.device.assert_pin(true).unwrap();
    machine.seen();
    machine.write16(0x88, 0x8000);
    assert_eq!((machine.device.resets(), machine.device.on(Irq::IntX)), (1, 0));
    assert!(!machine.pin.is_on() && !machine.pin.comes());
    assert_eq!(machine.seen(), [(4, vec![0, 4]), (4, vec![0, 4])]);
}

#[test]
fn a_function_without_a_pin_shows_none() {
    // The host does not hear it, though the function has one.
    let machine = Machine::new(both_device());
    assert_eq!(machine.read16(0x3c), 0);
    machine.write16(4, 0x0006);
    assert_eq!((machine.device.on(Irq::IntX), machine.pin.is_on()), (0, false));
    assert_eq!(machine.seen(), [(4, vec![6, 4])]);
    machine.device.assert_pin(true).unwrap();
    assert_eq!(machine.read16(6) & 8, 0);
    // A guest without levels has the rest of a function that has more.
    assert_eq!(without_levels(nvme_device()), Ok(0));
    let mut image = edu();
    // Whichever pin it has at the host, it is the first of its own device in the guest.
    image.put(0x3d, &[3]);
    let device = image
        .device()
        .with_bar(0, 0x1000)
        .with_irqs(Irq::IntX, 1)
        .with_irqs(Irq::Msi, 1);
    assert_eq!(Machine::new(device).read16(0x3c), 0x01ff);
}

#[test]
fn a_host_that_cannot_listen_leaves_the_pin_off_and_messages_work() {
    let machine = Machine::new(nvme_device().with_vectors(0));
    machine.write16(4, 0x0006);
    assert_eq!((machine.device.on(Irq::IntX), machine.pin.is_on()), (0, false));
    assert_eq!(machine.seen(), [(4, vec![6, 4])]);
}
