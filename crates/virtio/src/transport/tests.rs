//! The transport with a device that only counts.

use std::sync::{Arc, Mutex};

use memory::GuestRam;
use pci::PciFunction;
use virtio_queue::QueueT;

use super::layout;
use crate::conformance::driver::{BAR, Driver};
use crate::device::{Activation, ActiveQueue, DeviceError, QueueInterrupt, VirtioDevice};

#[derive(Default)]
pub(super) struct Seen {
    features: u64,
    pub(super) started: u32,
    queues: Vec<ActiveQueue>,
    pub(super) interrupt: Option<Arc<dyn QueueInterrupt>>,
    memory: Option<Arc<GuestRam>>,
    config: Vec<(usize, Vec<u8>)>,
    refuse: bool,
}

#[derive(Clone, Default)]
pub(super) struct Counting {
    pub(super) seen: Arc<Mutex<Seen>>,
}

impl VirtioDevice for Counting {
    fn device_type(&self) -> u16 {
        2
    }
    fn features(&self) -> u64 {
        0b101
    }
    fn queue_sizes(&self) -> &[u16] {
        &[256, 8]
    }
    fn read_config(&self, offset: usize, data: &mut [u8]) {
        for (at, byte) in data.iter_mut().enumerate() {
            *byte = u8::try_from((offset + at) & 0xff).unwrap();
        }
    }
    fn write_config(&mut self, offset: usize, data: &[u8]) {
        self.seen.lock().unwrap().config.push((offset, data.to_vec()));
    }
    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        let mut seen = self.seen.lock().unwrap();
        if seen.refuse {
            return Err(DeviceError::MissingQueue(7));
        }
        seen.started += 1;
        seen.features = activation.features;
        seen.queues = activation.queues;
        seen.interrupt = Some(activation.interrupt);
        seen.memory = Some(activation.memory);
        Ok(())
    }
    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        std::mem::take(&mut self.seen.lock().unwrap().queues)
    }
}

fn driver() -> (Driver, Arc<Mutex<Seen>>) {
    let device = Counting::default();
    let seen = Arc::clone(&device.seen);
    (Driver::new(Box::new(device)), seen)
}

fn config32(driver: &Driver, offset: usize) -> u32 {
    let mut data = [0; 4];
    driver.device().config_read(offset, &mut data);
    u32::from_le_bytes(data)
}

const NEEDS_RESET: u8 = 64;

#[test]
fn capabilities_lead_to_every_structure() {
    let (driver, _) = driver();
    assert_eq!(config32(&driver, 0), 0x1042_1af4);
    assert_eq!(config32(&driver, 8), 0x0180_0001);
    let mut at = config32(&driver, 0x34) as usize & 0xff;
    let mut found = Vec::new();
    while at != 0 {
        let head = config32(&driver, at);
        if head & 0xff == 9 {
            let kind = head >> 24;
            found.push((
                kind,
                config32(&driver, at + 8),
                config32(&driver, at + 12),
                head >> 16 & 0xff,
            ));
            if kind == 2 {
                assert_eq!(config32(&driver, at + 16), 4, "notify_off_multiplier");
            }
        }
        at = (head >> 8) as usize & 0xff;
    }
    assert_eq!(
        found,
        [
            (1, 0, 0x38, 16),
            (3, 0x1000, 1, 16),
            (2, 0x3000, 8, 20),
            (4, 0x2000, 0x1000, 16),
            (5, 0, 0, 20)
        ]
    );
}

#[test]
fn a_driver_gets_what_it_accepted_and_set_up() {
    let (mut driver, seen) = driver();
    assert_eq!(driver.offered(), 0b101 | 1 << 28 | 1 << 29 | 1 << 32);
    driver.write(0, 4, 2);
    assert_eq!(driver.read(4, 4), 0, "there are 64 feature bits");
    driver.start_with(1 << 32 | 1 << 29 | 1);
    let seen = seen.lock().unwrap();
    assert_eq!(seen.features, 1 << 32 | 1 << 29 | 1);
    let queues: Vec<_> = seen
        .queues
        .iter()
        .map(|q| (q.index, q.queue.size(), q.queue.event_idx_enabled()))
        .collect();
    assert_eq!(queues, [(0, 16, true), (1, 8, true)]);
    assert_eq!(driver.metric("virtio_activations_total"), 1);
    assert_eq!(driver.vm().bells(), [BAR + 0x3000, BAR + 0x3004]);
}

#[test]
fn features_that_were_not_offered_are_refused() {
    let (driver, _) = driver();
    for (low, high) in [(0b10, 1), (0b101, 0), (0b101, 3)] {
        driver.reset();
        driver.write(0x14, 1, 3);
        driver.write(8, 4, 0);
        driver.write(0xc, 4, low);
        driver.write(8, 4, 1);
        driver.write(0xc, 4, high);
        driver.write(0x14, 1, 0xb);
        assert_eq!(driver.status(), 3, "{low:#x} {high:#x}");
        driver.write(0x14, 1, 0xf);
        assert_eq!(driver.status(), 3);
    }
    assert_eq!(driver.metric("virtio_activations_total"), 0);
}

#[test]
fn the_status_only_grows_until_reset() {
    let (mut driver, _) = driver();
    driver.write(0x14, 1, 2);
    assert_eq!(driver.status(), 0, "DRIVER needs ACKNOWLEDGE");
    driver.negotiate(u64::MAX);
    driver.write(0x14, 1, 3);
    assert_eq!(driver.status(), 0xb);
    driver.write(8, 4, 0);
    driver.write(0xc, 4, 0);
    assert_eq!(driver.read(0xc, 4), 0b101 | 1 << 28 | 1 << 29, "features are fixed now");
    driver.write(0x14, 1, 0xb | 64);
    assert_eq!(driver.status(), 0xb, "NEEDS_RESET is not the driver's to set");
    driver.write(0x14, 1, 0x8b);
    driver.write(0x14, 1, 0x8f);
    assert_eq!(driver.status(), 0x8b, "a failed device does not start");
    assert!(driver.metric("virtio_config_errors_total") >= 3);
    driver.reset();
}

#[test]
fn queues_are_fixed_once_enabled_and_none_without_features() {
    let (mut driver, _) = driver();
    driver.write(0x16, 2, 0);
    driver.write(0x1c, 2, 1);
    assert_eq!(driver.read(0x1c, 2), 0);
    driver.negotiate(u64::MAX);
    driver.set_up_queues();
    driver.write(0x16, 2, 0);
    let before = driver.read(0x20, 8);
    driver.write(0x20, 4, 0x77);
    driver.write(0x18, 2, 4);
    driver.write(0x1c, 2, 0);
    assert_eq!(
        (driver.read(0x20, 8), driver.read(0x18, 2), driver.read(0x1c, 2)),
        (before, 16, 1)
    );
    driver.write(0x16, 2, 9);
    assert_eq!(
        (driver.read(0x18, 2), driver.read(0x1c, 2)),
        (0, 0),
        "there is no queue 9"
    );
    driver.write(0x1a, 2, 0);
    assert_eq!(driver.read(0x1a, 2), 0xffff);
}

#[test]
fn a_64_bit_register_can_be_written_in_halves() {
    let (mut driver, _) = driver();
    driver.negotiate(u64::MAX);
    driver.write(0x16, 2, 1);
    driver.write(0x28, 4, 0x5566_7788);
    driver.write(0x2c, 4, 0x1122_3344);
    assert_eq!(driver.read(0x28, 8), 0x1122_3344_5566_7788);
    assert_eq!(driver.read(0x2a, 4), 0x3344_5566, "reads may straddle");
    let errors = driver.metric("virtio_config_errors_total");
    driver.write(0x2a, 4, 0);
    driver.write(0x28, 2, 0);
    driver.write(0x38, 4, 0);
    assert_eq!(driver.metric("virtio_config_errors_total"), errors + 3);
}

#[test]
fn a_queue_outside_of_memory_needs_a_reset() {
    for (register, value) in [
        (0x20, 1 << 40),
        (0x28, 0),
        (0x30, (64 << 20) - 8),
        (0x20, 8),
        (0x18, 3),
        (0x18, 512),
    ] {
        let (mut driver, seen) = driver();
        driver.negotiate(u64::MAX);
        driver.set_up_queues();
        // Once more, this time with queue 1 set up wrongly before it is enabled.
        driver.negotiate(u64::MAX);
        driver.write(0x10, 2, 0);
        driver.write(0x16, 2, 1);
        for (register, address) in [(0x20, 0x10_0000_u64), (0x28, 0x12_0000), (0x30, 0x14_0000)] {
            driver.write(register, 8, address);
        }
        driver.write(register, if register == 0x18 { 2 } else { 8 }, value);
        driver.write(0x1c, 2, 1);
        let before = driver.vm().interrupt(0).unwrap().delivered();
        driver.go();
        assert_eq!(driver.status(), 0xf | NEEDS_RESET, "{register:#x} {value:#x}");
        assert_eq!(
            driver.vm().interrupt(0).unwrap().delivered(),
            before + 1,
            "the driver is told"
        );
        assert_eq!(seen.lock().unwrap().started, 0);
        driver.start();
        assert_eq!(seen.lock().unwrap().started, 1, "a reset helps");
    }
}

#[test]
fn a_device_that_cannot_go_on_after_a_pause_has_no_doorbells() {
    let (mut driver, seen) = driver();
    driver.start();
    driver.device().pause();
    assert!(!driver.vm().bells().is_empty());
    seen.lock().unwrap().refuse = true;
    assert!(driver.device().resume().is_err());
    assert_eq!(driver.status(), 0xf | NEEDS_RESET);
    assert!(driver.vm().bells().is_empty());
    // After the reset it works again.
    seen.lock().unwrap().refuse = false;
    driver.start();
    assert!(!driver.vm().bells().is_empty());
}

#[test]
fn a_device_that_cannot_start_needs_a_reset() {
    let (mut driver, seen) = driver();
    seen.lock().unwrap().refuse = true;
    driver.negotiate(u64::MAX);
    driver.set_up_queues();
    driver.go();
    assert_eq!(driver.status(), 0xf | NEEDS_RESET);
    assert!(driver.vm().bells().is_empty());
}

#[test]
fn doorbells_follow_the_bar_and_end_with_a_reset() {
    let (mut driver, seen) = driver();
    driver.start();
    driver.device().config_write(0x10, &0xd000_0000_u32.to_le_bytes());
    assert_eq!(driver.vm().bells(), [0xd000_3000, 0xd000_3004]);
    driver.device().config_write(4, &[0]);
    assert!(driver.vm().bells().is_empty());
    assert_eq!(driver.device().memory_ranges(), [None; 6]);
    driver.device().config_write(4, &[2]);
    assert_eq!(driver.vm().bells().len(), 2);
    let kick = Arc::clone(&seen.lock().unwrap().queues[1].kick);
    assert!(driver.vm().ring(0xd000_3004));
    assert!(kick.consume());
    driver.write(0x3004, 2, 1);
    assert!(kick.consume(), "a kick that comes as an exit is a kick");
    assert_eq!(driver.metric("virtio_notify_exits_total"), 1);
    driver.write(0x3ffc, 4, 1);
    driver.reset();
    assert!(driver.vm().bells().is_empty());
    assert_eq!(driver.metric("virtio_resets_total"), 2);
}

#[test]
fn interrupts_go_to_the_vector_of_the_queue() {
    let (mut driver, seen) = driver();
    driver.start();
    let interrupt = seen.lock().unwrap().interrupt.clone().unwrap();
    let delivered =
        |driver: &Driver| -> Vec<u64> { (0..3).map(|i| driver.vm().interrupt(i).unwrap().delivered()).collect() };
    interrupt.signal_queue(1);
    interrupt.signal_config();
    assert_eq!(delivered(&driver), [1, 0, 1]);
    assert_eq!(driver.read(0x15, 1), 1, "the configuration is of another generation");
    driver.write(0x16, 2, 1);
    driver.write(0x1a, 2, 99);
    assert_eq!(driver.read(0x1a, 2), 0xffff, "there is no vector 99");
    interrupt.signal_queue(1);
    interrupt.signal_queue(77);
    assert_eq!(delivered(&driver), [1, 0, 1]);
    assert_eq!(driver.read(0x1000, 1), 1, "what has no vector shows in the ISR status");
    assert_eq!(driver.read(0x1000, 1), 0, "until it is read");
}

#[test]
fn a_masked_vector_is_pending() {
    let (mut driver, seen) = driver();
    driver.start();
    let interrupt = seen.lock().unwrap().interrupt.clone().unwrap();
    driver.write(0x4000 + 16 + 12, 4, 1);
    interrupt.signal_queue(0);
    assert_eq!(driver.read(0x5000, 8), 0b10);
    assert_eq!(driver.interrupts(0), 0);
    driver.write(0x4000 + 16 + 12, 4, 0);
    assert_eq!(driver.read(0x5000, 8), 0);
    assert_eq!(driver.interrupts(0), 1);
}

#[test]
fn registers_are_reachable_through_configuration_space() {
    let (mut driver, seen) = driver();
    driver.start();
    // The last capability: bar, offset, length, data.
    let (at, data) = (0x40..0xe0)
        .step_by(4)
        .find(|&at| config32(&driver, at) >> 16 == 0x0514)
        .map(|at| (at, at + 16))
        .unwrap();
    let device = driver.device();
    let aim = |offset: u32, length: u32| {
        device.config_write(at + 8, &offset.to_le_bytes());
        device.config_write(at + 12, &length.to_le_bytes());
    };
    aim(0x14, 1);
    assert_eq!(config32(&driver, data) & 0xff, 0xf);
    aim(0x2010, 4);
    assert_eq!(config32(&driver, data), 0x1312_1110);
    device.config_write(data, &0xaabb_ccdd_u32.to_le_bytes());
    assert_eq!(seen.lock().unwrap().config, [(0x10, vec![0xdd, 0xcc, 0xbb, 0xaa])]);
    for (offset, length) in [(0x2011, 4), (0x8000, 4), (u32::MAX, 1), (0, 0), (0, 3), (0, 8)] {
        aim(offset, length);
        config32(&driver, data);
        device.config_write(data, &[0; 4]);
    }
    assert_eq!(seen.lock().unwrap().config.len(), 1);
    aim(0x14, 1);
    device.config_write(data, &[0]);
    assert_eq!(driver.status(), 0);
}

#[test]
fn any_access_anywhere_is_survived() {
    let (mut driver, _) = driver();
    driver.start();
    let device = driver.device();
    for width in [1, 2, 4, 8] {
        for offset in (0..0x8000)
            .step_by(13)
            .chain(0..0x60)
            .chain([0x7fff, layout::IN_MEMORY.size, u64::MAX])
        {
            device.bar_read(0, offset, &mut [0; 8][..width]);
            device.bar_write(0, offset, &[0xff; 8][..width]);
        }
        for offset in 0..256 {
            device.config_read(offset, &mut [0; 8][..width]);
            device.config_write(offset, &[0xff; 8][..width]);
        }
    }
}

#[test]
fn devices_the_transport_cannot_carry_are_refused() {
    struct Odd(Vec<u16>, u64);
    impl VirtioDevice for Odd {
        fn device_type(&self) -> u16 {
            1
        }
        fn features(&self) -> u64 {
            self.1
        }
        fn queue_sizes(&self) -> &[u16] {
            &self.0
        }
        fn read_config(&self, _: usize, _: &mut [u8]) {}
        fn write_config(&mut self, _: usize, _: &[u8]) {}
        fn activate(&mut self, _: Activation) -> Result<(), DeviceError> {
            Ok(())
        }
        fn deactivate(&mut self) -> Vec<ActiveQueue> {
            Vec::new()
        }
    }
    let (driver, _) = driver();
    let make = |queues: usize, features| {
        let vm = Arc::new(crate::conformance::fakes::FakeVm::default());
        let registry = observe::Registry::new();
        let device = Box::new(Odd(vec![8; queues], features));
        super::VirtioPciDevice::new("odd", device, vm, Arc::clone(driver.memory()), &registry).err()
    };
    assert!(make(255, 0).is_none());
    assert!(matches!(
        make(256, 0),
        Some(super::TransportError::Queues { queues: 256, most: 255 })
    ));
    assert!(matches!(make(1, 1 << 32), Some(super::TransportError::Features(_))));
}
