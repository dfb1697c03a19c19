//! The common configuration structure (4.1.4.3): a table of registers, feature negotiation and the device status.
//!
//! ```text
//!  0 ─▶ ACKNOWLEDGE ─▶ DRIVER ─▶ FEATURES_OK ─▶ DRIVER_OK          (3.1.1)
//!  ▲                                  │ refused: the bit stays clear    │
//!  └── writing 0 resets, from anywhere; NEEDS_RESET and FAILED only end that way
//! ```
//! Pure state: what has to happen outside is returned as an [`Effect`].

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;

use super::signals::Signals;

/// Device status bits (2.1).
pub(crate) mod status {
    pub(crate) const ACKNOWLEDGE: u8 = 1;
    pub(crate) const DRIVER: u8 = 2;
    pub(crate) const DRIVER_OK: u8 = 4;
    pub(crate) const FEATURES_OK: u8 = 8;
    pub(crate) const DEVICE_NEEDS_RESET: u8 = 64;
    pub(crate) const FAILED: u8 = 128;
}

/// The registers, by their names in `struct virtio_pci_common_cfg`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Register {
    DeviceFeatureSelect,
    DeviceFeature,
    DriverFeatureSelect,
    DriverFeature,
    ConfigMsixVector,
    NumQueues,
    DeviceStatus,
    ConfigGeneration,
    QueueSelect,
    QueueSize,
    QueueMsixVector,
    QueueEnable,
    QueueNotifyOff,
    QueueDesc,
    QueueDriver,
    QueueDevice,
}

/// Offset and width of each register.
const LAYOUT: [(usize, usize, Register); 16] = [
    (0x00, 4, Register::DeviceFeatureSelect),
    (0x04, 4, Register::DeviceFeature),
    (0x08, 4, Register::DriverFeatureSelect),
    (0x0c, 4, Register::DriverFeature),
    (0x10, 2, Register::ConfigMsixVector),
    (0x12, 2, Register::NumQueues),
    (0x14, 1, Register::DeviceStatus),
    (0x15, 1, Register::ConfigGeneration),
    (0x16, 2, Register::QueueSelect),
    (0x18, 2, Register::QueueSize),
    (0x1a, 2, Register::QueueMsixVector),
    (0x1c, 2, Register::QueueEnable),
    (0x1e, 2, Register::QueueNotifyOff),
    (0x20, 8, Register::QueueDesc),
    (0x28, 8, Register::QueueDriver),
    (0x30, 8, Register::QueueDevice),
];

/// Bytes of the structure without the registers of features that are not offered.
pub(crate) const LENGTH: u32 = 0x38;

/// What a write asks of the transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Nothing more.
    Done,
    /// The driver did what the specification forbids; nothing changed.
    Refused,
    /// The device is to be reset.
    Reset,
    /// The driver is ready: the device is to be activated.
    Activate,
}

/// What the driver has set up of one queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct QueueSetup {
    pub(crate) max_size: u16,
    pub(crate) size: u16,
    pub(crate) enabled: bool,
    pub(crate) desc: u64,
    pub(crate) driver: u64,
    pub(crate) device: u64,
}

/// The registers as they are saved; vectors and what is pending are the signals'.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CommonState {
    pub(crate) offered: u64,
    pub(crate) accepted: u64,
    pub(crate) device_feature_select: u32,
    pub(crate) driver_feature_select: u32,
    pub(crate) status: u8,
    pub(crate) queue_select: u16,
    pub(crate) queues: Vec<QueueSetup>,
}

pub(crate) struct CommonConfig {
    offered: u64,
    accepted: u64,
    device_feature_select: u32,
    driver_feature_select: u32,
    status: u8,
    queue_select: u16,
    queues: Vec<QueueSetup>,
    signals: Arc<Signals>,
}

impl CommonConfig {
    pub(crate) fn new(offered: u64, queue_sizes: &[u16], signals: Arc<Signals>) -> Self {
        let queues = queue_sizes
            .iter()
            .map(|&max_size| QueueSetup {
                max_size,
                size: max_size,
                ..QueueSetup::default()
            })
            .collect();
        Self {
            offered,
            accepted: 0,
            device_feature_select: 0,
            driver_feature_select: 0,
            status: 0,
            queue_select: 0,
            queues,
            signals,
        }
    }

    /// Everything as it was before the driver came (2.4.1).
    pub(crate) fn reset(&mut self) {
        self.signals.reset();
        let sizes: Vec<u16> = self.queues.iter().map(|queue| queue.max_size).collect();
        *self = Self::new(self.offered, &sizes, Arc::clone(&self.signals));
    }

    pub(crate) fn save(&self) -> CommonState {
        CommonState {
            offered: self.offered,
            accepted: self.accepted,
            device_feature_select: self.device_feature_select,
            driver_feature_select: self.driver_feature_select,
            status: self.status,
            queue_select: self.queue_select,
            queues: self.queues.clone(),
        }
    }

    /// Takes over what [`Self::save`] gave; false, and nothing done, if it was a device that offered something else.
    pub(crate) fn restore(&mut self, saved: &CommonState) -> bool {
        let sizes = |queues: &[QueueSetup]| queues.iter().map(|queue| queue.max_size).collect::<Vec<_>>();
        // What was agreed on is what a driver could have agreed on: devices rely on that.
        let agreed = saved.status & status::FEATURES_OK == 0 || saved.accepted & !saved.offered == 0;
        if saved.offered != self.offered || sizes(&saved.queues) != sizes(&self.queues) || !agreed {
            return false;
        }
        self.accepted = saved.accepted;
        self.device_feature_select = saved.device_feature_select;
        self.driver_feature_select = saved.driver_feature_select;
        self.status = saved.status;
        self.queue_select = saved.queue_select;
        self.queues.clone_from(&saved.queues);
        true
    }

    pub(crate) fn accepted(&self) -> u64 {
        self.accepted
    }

    /// The driver has agreed on features and set the device up.
    pub(crate) fn is_live(&self) -> bool {
        let live = status::FEATURES_OK | status::DRIVER_OK;
        self.status & live == live
    }

    pub(crate) fn queues(&self) -> &[QueueSetup] {
        &self.queues
    }

    /// The device cannot go on until it is reset (2.1.2).
    pub(crate) fn set_needs_reset(&mut self) {
        self.status |= status::DEVICE_NEEDS_RESET;
    }

    /// Reads any bytes of the structure; those of no register are zero.
    pub(crate) fn read(&self, offset: usize, data: &mut [u8]) {
        data.fill(0);
        for (start, width, register) in LAYOUT {
            let value = self.get(register).to_le_bytes();
            for (at, byte) in data.iter_mut().enumerate() {
                if let Some(index) = offset.saturating_add(at).checked_sub(start).filter(|&i| i < width) {
                    *byte = value[index];
                }
            }
        }
    }

    /// Takes a write of a whole register, or of one half of a 64-bit one (4.1.3.1); others are refused.
    pub(crate) fn write(&mut self, offset: usize, data: &[u8]) -> Effect {
        for (start, width, register) in LAYOUT {
            let Some(index) = offset.checked_sub(start).filter(|&i| i < width) else {
                continue;
            };
            let whole = index == 0 && data.len() == width;
            let half = width == 8 && index % 4 == 0 && data.len() == 4;
            if !whole && !half {
                return Effect::Refused;
            }
            let mut value = self.get(register).to_le_bytes();
            value[index..index + data.len()].copy_from_slice(data);
            return self.set(register, u64::from_le_bytes(value));
        }
        Effect::Refused
    }

    fn selected(&self) -> Option<&QueueSetup> {
        self.queues.get(usize::from(self.queue_select))
    }

    fn get(&self, register: Register) -> u64 {
        let queue = self.selected().copied().unwrap_or_default();
        match register {
            Register::DeviceFeatureSelect => u64::from(self.device_feature_select),
            Register::DeviceFeature => half(self.offered, self.device_feature_select),
            Register::DriverFeatureSelect => u64::from(self.driver_feature_select),
            Register::DriverFeature => half(self.accepted, self.driver_feature_select),
            Register::ConfigMsixVector => u64::from(self.signals.config_vector()),
            Register::NumQueues => self.queues.len() as u64,
            Register::DeviceStatus => u64::from(self.status),
            Register::ConfigGeneration => u64::from(self.signals.generation()),
            Register::QueueSelect => u64::from(self.queue_select),
            // A queue that is not there has size 0 (4.1.4.3.1).
            Register::QueueSize => u64::from(queue.size),
            Register::QueueMsixVector => u64::from(self.signals.queue_vector(usize::from(self.queue_select))),
            Register::QueueEnable => u64::from(queue.enabled),
            Register::QueueNotifyOff => self.selected().map_or(0, |_| u64::from(self.queue_select)),
            Register::QueueDesc => queue.desc,
            Register::QueueDriver => queue.driver,
            Register::QueueDevice => queue.device,
        }
    }

    #[allow(
        clippy::cast_possible_truncation,
        reason = "the value has no more bytes than the register is wide"
    )]
    fn set(&mut self, register: Register, value: u64) -> Effect {
        match register {
            Register::DeviceFeatureSelect => self.device_feature_select = value as u32,
            Register::DriverFeatureSelect => self.driver_feature_select = value as u32,
            Register::DriverFeature => return self.set_driver_feature(value as u32),
            Register::ConfigMsixVector => self.signals.set_config_vector(value as u16),
            Register::DeviceStatus => return self.set_status(value as u8),
            Register::QueueSelect => self.queue_select = value as u16,
            Register::QueueMsixVector => self
                .signals
                .set_queue_vector(usize::from(self.queue_select), value as u16),
            Register::QueueSize => return self.set_up_queue(|queue| queue.size = value as u16),
            Register::QueueDesc => return self.set_up_queue(|queue| queue.desc = value),
            Register::QueueDriver => return self.set_up_queue(|queue| queue.driver = value),
            Register::QueueDevice => return self.set_up_queue(|queue| queue.device = value),
            // Only enabling exists: VIRTIO_F_RING_RESET is not offered.
            Register::QueueEnable if value == 1 => return self.set_up_queue(|queue| queue.enabled = true),
            Register::QueueEnable
            | Register::DeviceFeature
            | Register::NumQueues
            | Register::ConfigGeneration
            | Register::QueueNotifyOff => return Effect::Refused,
        }
        Effect::Done
    }

    fn set_driver_feature(&mut self, value: u32) -> Effect {
        let shift = match self.driver_feature_select {
            0 => 0,
            1 => 32,
            // Feature bits from 64 on do not exist; zeroes there are what a driver that knows more writes.
            _ if value == 0 => return Effect::Done,
            _ => return Effect::Refused,
        };
        // What was agreed on stands until the next reset (3.1.1).
        if self.status & status::FEATURES_OK != 0 {
            return Effect::Refused;
        }
        self.accepted = (self.accepted & !(0xffff_ffff << shift)) | (u64::from(value) << shift);
        Effect::Done
    }

    /// Queues are set up between FEATURES_OK and DRIVER_OK, each until it is enabled.
    fn set_up_queue(&mut self, change: impl FnOnce(&mut QueueSetup)) -> Effect {
        let open = self.status & (status::FEATURES_OK | status::DRIVER_OK) == status::FEATURES_OK;
        match self.queues.get_mut(usize::from(self.queue_select)) {
            Some(queue) if open && !queue.enabled => {
                change(queue);
                Effect::Done
            }
            _ => Effect::Refused,
        }
    }

    fn set_status(&mut self, value: u8) -> Effect {
        if value == 0 {
            return Effect::Reset;
        }
        // NEEDS_RESET is the device's own; the driver adds bits and never clears one (2.1.1).
        let value = value & !status::DEVICE_NEEDS_RESET;
        let current = self.status & !status::DEVICE_NEEDS_RESET;
        if current & !value != 0 {
            return Effect::Refused;
        }
        let mut effect = Effect::Done;
        for bit in [
            status::ACKNOWLEDGE,
            status::DRIVER,
            status::FEATURES_OK,
            status::DRIVER_OK,
            status::FAILED,
        ] {
            if value & !self.status & bit == 0 {
                continue;
            }
            if !self.may_set(bit) {
                return Effect::Refused;
            }
            self.status |= bit;
            if bit == status::DRIVER_OK {
                effect = Effect::Activate;
            }
        }
        effect
    }

    fn may_set(&self, bit: u8) -> bool {
        let has = |bits: u8| self.status & bits == bits;
        match bit {
            status::DRIVER => has(status::ACKNOWLEDGE),
            status::FEATURES_OK => {
                // A driver that takes what was not offered, or speaks only the legacy interface, is refused (2.2.2, 6.2).
                has(status::ACKNOWLEDGE | status::DRIVER)
                    && self.accepted & !self.offered == 0
                    && self.accepted & (1 << VIRTIO_F_VERSION_1) != 0
            }
            status::DRIVER_OK => has(status::FEATURES_OK) && !has(status::FAILED),
            _ => true,
        }
    }
}

/// 32 feature bits of 64; beyond them there is none.
fn half(bits: u64, select: u32) -> u64 {
    match select {
        0 => bits & 0xffff_ffff,
        1 => bits >> 32,
        _ => 0,
    }
}
