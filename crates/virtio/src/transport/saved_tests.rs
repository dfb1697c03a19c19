//! Saving and restoring a device that only counts: what was pending stays pending, and what does not fit is refused.

use std::sync::Arc;

use memory::GuestRam;
use observe::Registry;
use pci::PciFunction;
use state::Saved;
use vm_memory::GuestAddress;

use super::common::{CommonState, QueueSetup};
use super::saved::Position;
use super::signals::SignalState;
use super::{DeviceState, TransportError, TransportState, VirtioPciDevice};
use crate::conformance::driver::Driver;
use crate::conformance::fakes::FakeVm;
use crate::device::{Activation, ActiveQueue, DeviceError, VirtioDevice};

/// Holds its queues, and nothing else.
struct Plain {
    queues: Vec<ActiveQueue>,
    sizes: [u16; 2],
    features: u64,
    byte: u8,
    /// What its configuration space has beside, which changes while it runs.
    level: u8,
}

impl Plain {
    fn new() -> Self {
        Self {
            queues: Vec::new(),
            sizes: [16, 16],
            features: 1,
            byte: 7,
            level: 1,
        }
    }
}

impl VirtioDevice for Plain {
    fn device_type(&self) -> u16 {
        if self.byte == 0 { 3 } else { 2 }
    }
    fn features(&self) -> u64 {
        self.features
    }
    fn queue_sizes(&self) -> &[u16] {
        &self.sizes
    }
    fn read_config(&self, offset: usize, data: &mut [u8]) {
        let rest = [self.byte, self.level].into_iter().skip(offset);
        data.iter_mut().zip(rest).for_each(|(byte, value)| *byte = value);
    }
    fn write_config(&mut self, _: usize, _: &[u8]) {}
    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        self.queues = activation.queues;
        Ok(())
    }
    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        std::mem::take(&mut self.queues)
    }
    fn save(&self) -> Result<Saved, DeviceError> {
        Ok(Saved {
            kind: "plain".into(),
            version: 1,
            payload: vec![self.level],
        })
    }
    fn restore(&mut self, saved: &Saved) -> Result<(), DeviceError> {
        let [level] = saved.payload[..] else {
            return Err(DeviceError::Lost);
        };
        self.level = level;
        Ok(())
    }
}

fn driver() -> Driver {
    let mut driver = Driver::new(Box::new(Plain::new()));
    driver.start();
    driver
}

/// The device's like, in a machine of its own.
fn other(driver: &Driver, device: Plain) -> (Arc<VirtioPciDevice>, Arc<FakeVm>) {
    let vm = Arc::new(FakeVm::default());
    let engine = Arc::clone(&vm) as Arc<dyn engine::Vm>;
    let memory = Arc::clone(driver.memory());
    let device = VirtioPciDevice::new("it", Box::new(device), engine, memory, &Registry::new()).unwrap();
    (device, vm)
}

fn saved(driver: &Driver) -> DeviceState {
    driver.device().pause();
    driver.device().save().unwrap()
}

#[test]
fn only_what_is_paused_is_saved() {
    let driver = driver();
    assert!(matches!(driver.device().save(), Err(TransportError::NotPaused)));
    let state = saved(&driver);
    driver.device().resume().unwrap();
    assert!(matches!(driver.device().save(), Err(TransportError::NotPaused)));
    assert_eq!(saved(&driver), state);
}

#[test]
fn the_copy_has_the_registers_and_the_doorbells() {
    let driver = driver();
    let state = saved(&driver);
    let (copy, vm) = other(&driver, Plain::new());
    copy.restore(&state).unwrap();
    assert_eq!(copy.save().unwrap(), state);
    assert_eq!(vm.bells(), driver.vm().bells());
    assert_eq!(vm.bells().len(), 2);
    assert_eq!(copy.memory_ranges(), driver.device().memory_ranges());
    let mut status = [0];
    copy.bar_read(0, 0x14, &mut status);
    assert_eq!(status, [0xf]);
}

#[test]
fn a_masked_interrupt_and_an_isr_bit_stay_pending() {
    let driver = driver();
    // Queue 0 has vector 1, which is masked; queue 1 has none any more.
    driver.write(0x4000 + 16 + 12, 4, 1);
    driver.write(0x16, 2, 1);
    driver.write(0x1a, 2, 0xffff);
    let mut state = saved(&driver);
    state.transport.msix[1].pending = true;
    state.transport.signals.isr = 1;
    let (copy, vm) = other(&driver, Plain::new());
    copy.restore(&state).unwrap();
    assert_eq!(copy.save().unwrap(), state);
    let interrupt = vm.interrupt(1).unwrap();
    assert_eq!(interrupt.delivered(), 0);
    copy.bar_write(0, 0x4000 + 16 + 12, &0_u32.to_le_bytes());
    assert_eq!(interrupt.delivered(), 1);
    let mut isr = [0];
    copy.bar_read(0, 0x1000, &mut isr);
    assert_eq!(isr, [1]);
}

#[test]
fn the_driver_is_made_to_look_at_all_queues_once() {
    let driver = driver();
    let state = saved(&driver);
    let (copy, vm) = other(&driver, Plain::new());
    copy.restore(&state).unwrap();
    let delivered = || [1, 2].map(|vector| vm.interrupt(vector).unwrap().delivered());
    assert_eq!(delivered(), [0, 0]);
    copy.resume().unwrap();
    assert_eq!(delivered(), [1, 1]);
    copy.pause();
    copy.resume().unwrap();
    assert_eq!(delivered(), [1, 1], "a plain pause is no restore");
}

#[test]
fn what_was_configured_otherwise_is_refused() {
    let driver = driver();
    let state = saved(&driver);
    let refused = |device: Plain| {
        let (other, _) = other(&driver, device);
        other.restore(&state).unwrap_err().to_string()
    };
    assert!(
        refused(Plain {
            features: 3,
            ..Plain::new()
        })
        .contains("other features or queues")
    );
    assert!(
        refused(Plain {
            sizes: [16, 8],
            ..Plain::new()
        })
        .contains("other features or queues")
    );
    assert!(
        refused(Plain {
            byte: 8,
            ..Plain::new()
        })
        .contains("other properties")
    );
    assert!(
        refused(Plain {
            byte: 0,
            ..Plain::new()
        })
        .contains("other kind of device")
    );
}

#[test]
fn what_changes_while_it_runs_is_compared_as_it_was_saved() {
    let mut driver = driver();
    let level = |driver: &Driver| driver.config(1, 1);
    assert_eq!(level(&driver), 1);
    let changed = Plain {
        level: 2,
        ..Plain::new()
    };
    driver.migrate(Box::new(changed)).unwrap();
    assert_eq!(level(&driver), 1, "it goes on with what was saved");
    let mut state = saved(&driver);
    state.own.payload = vec![3];
    let (other, _) = other(&driver, Plain::new());
    let error = other.restore(&state).unwrap_err().to_string();
    assert!(error.contains("other properties"), "{error}");
}

#[test]
fn a_state_that_contradicts_itself_is_refused() {
    let driver = driver();
    let good = saved(&driver);
    let refused = |change: fn(&mut TransportState)| {
        let mut state = good.clone();
        change(&mut state.transport);
        let (other, _) = other(&driver, Plain::new());
        other.restore(&state).unwrap_err()
    };
    let unlike = |error| matches!(error, TransportError::Unlike("queues"));
    assert!(unlike(refused(|t| t.active = Some(Vec::new()))));
    assert!(unlike(refused(|t| t.active.as_mut().unwrap()[0].index = 9)));
    assert!(unlike(refused(|t| t.common.queues[0].desc = u64::MAX)));
    assert!(unlike(refused(|t| t.common.queues[1].size = 17)));
    assert!(unlike(refused(|t| t.common.status = 0xb)), "queues before DRIVER_OK");
    let agreed = |error| matches!(error, TransportError::Unlike("features or queues"));
    assert!(
        agreed(refused(|t| t.common.accepted |= 1 << 50)),
        "what was never offered"
    );
    assert!(matches!(refused(|t| t.space[0] ^= 1), TransportError::Pci(_)));
    assert!(matches!(refused(|t| t.space.truncate(9)), TransportError::Pci(_)));
    assert!(matches!(refused(|t| t.msix.truncate(1)), TransportError::Pci(_)));
}

#[test]
fn a_device_without_a_saved_form_refuses_in_a_sentence() {
    struct Old;
    impl VirtioDevice for Old {
        fn device_type(&self) -> u16 {
            1
        }
        fn features(&self) -> u64 {
            0
        }
        fn queue_sizes(&self) -> &[u16] {
            &[8]
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
    let vm = Arc::new(FakeVm::default());
    let memory = Arc::new(GuestRam::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap());
    let device = VirtioPciDevice::new("old", Box::new(Old), vm, memory, &Registry::new()).unwrap();
    let error = device.save().unwrap_err().to_string();
    assert!(error.contains("cannot be part of a snapshot"), "{error}");
}

#[test]
fn the_state_is_what_the_golden_file_says() {
    let queue = QueueSetup {
        max_size: 16,
        size: 8,
        enabled: true,
        desc: 0x10_0000,
        driver: 0x10_0100,
        device: 0x10_0200,
    };
    let position = Position {
        index: 0,
        next_avail: 65535,
        next_used: 3,
    };
    let state = TransportState {
        device_type: 2,
        space: vec![0xf4, 0x1a],
        msix: vec![pci::VectorState {
            entry: [1; 16],
            pending: true,
        }],
        common: CommonState {
            offered: 1 << 32 | 7,
            accepted: 1 << 32,
            status: 0xf,
            queues: vec![queue],
            ..CommonState::default()
        },
        signals: SignalState {
            queue_vectors: vec![1],
            config_vector: 0xffff,
            isr: 2,
            generation: 9,
        },
        config: vec![7],
        active: Some(vec![position]),
    };
    state::golden::check(env!("CARGO_MANIFEST_DIR"), &state);
    assert_eq!(
        state::golden::load::<TransportState>(env!("CARGO_MANIFEST_DIR"), 1),
        state
    );
}
