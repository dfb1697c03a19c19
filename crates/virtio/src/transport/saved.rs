//! A device behind its transport as it is saved and restored: everything that a driver has set up or can read.
//!
//! Where the queues lie is what the driver wrote; only how far they have been worked through is the device's. Rings are in
//! guest memory and are saved with it.

use serde::{Deserialize, Serialize};
use state::{Saved, Schema};
use virtio_queue::QueueT;

use pci::VectorState;

use super::common::CommonState;
use super::signals::SignalState;
use super::{Phase, State, TransportError, VirtioPciDevice};

/// As much of the device's configuration space as is compared: more than any device of ours has.
const CONFIG_BYTES: usize = 256;

/// Why a device cannot be saved that keeps requests.
const HELD: &str =
    "it keeps requests for which the host has no space left: make space, let the VM go on, and save it then";

/// How far a queue has been worked through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Position {
    pub(super) index: u16,
    pub(super) next_avail: u16,
    pub(super) next_used: u16,
}

/// The transport's part.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportState {
    pub(super) device_type: u16,
    /// PCI configuration space.
    #[serde(with = "state::bytes")]
    pub(super) space: Vec<u8>,
    pub(super) msix: Vec<VectorState>,
    pub(super) common: CommonState,
    pub(super) signals: SignalState,
    /// The device's configuration space: it must be the same when the device is restored.
    #[serde(with = "state::bytes")]
    pub(super) config: Vec<u8>,
    /// The queues that the device has; none while its driver has not set it up.
    pub(super) active: Option<Vec<Position>>,
}

impl Schema for TransportState {
    const KIND: &'static str = "virtio-pci";
    const VERSION: u32 = 2;
    // The same, with arrays of numbers for what are bytes now.
    const OLDEST: u32 = 1;
}

/// A device: its transport's state and its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceState {
    /// The transport's.
    pub transport: TransportState,
    /// The device's own.
    pub own: Saved,
}

impl VirtioPciDevice {
    /// The whole state of a device that is paused.
    ///
    /// # Errors
    /// It is not paused, or cannot be saved.
    pub fn save(&self) -> Result<DeviceState, TransportError> {
        let state = self.lock();
        let active = match &state.phase {
            Phase::Active => return Err(TransportError::NotPaused),
            Phase::Idle => None,
            Phase::Parked(queues) => {
                let enabled = state.common.queues().iter().filter(|queue| queue.enabled).count();
                if queues.len() != enabled {
                    return Err(crate::DeviceError::Lost.into());
                }
                if queues.iter().any(|active| !active.held.is_empty()) {
                    return Err(crate::DeviceError::Refused(HELD.to_owned()).into());
                }
                let positions = queues.iter().map(|active| Position {
                    index: active.index,
                    next_avail: active.queue.next_avail(),
                    next_used: active.queue.next_used(),
                });
                Some(positions.collect())
            }
        };
        Ok(DeviceState {
            own: state.device.save()?,
            transport: TransportState {
                device_type: state.device.device_type(),
                space: state.space.save(),
                msix: state.msix.save(),
                common: state.common.save(),
                signals: self.signals.save(),
                config: config(&state),
                active,
            },
        })
    }

    /// Takes over what [`VirtioPciDevice::save`] gave, into a device that was just made like the one that was saved. It is
    /// paused then; [`VirtioPciDevice::resume`] lets it go on.
    ///
    /// # Errors
    /// It was another device. This one must not be used then.
    pub fn restore(&self, saved: &DeviceState) -> Result<(), TransportError> {
        let mut guard = self.lock();
        let state = &mut *guard;
        let transport = &saved.transport;
        if transport.device_type != state.device.device_type() {
            return Err(TransportError::Unlike("kind of device"));
        }
        if !state.common.restore(&transport.common) || !self.signals.restore(&transport.signals) {
            return Err(TransportError::Unlike("features or queues"));
        }
        state.space.restore(&transport.space)?;
        let control = state.space.u16(state.msix_capability + 2);
        state.msix.restore(&transport.msix, control)?;
        state.device.restore(&saved.own)?;
        // With what the device knows of itself: some of it can change while it runs, such as how much memory is plugged.
        if transport.config != config(state) {
            return Err(TransportError::Unlike("properties (such as a size or an address)"));
        }
        if let Some(positions) = &transport.active {
            let wrong = || TransportError::Unlike("queues");
            if !state.common.is_live() {
                return Err(wrong());
            }
            let mut queues = self.build_queues(&state.common).map_err(|_| wrong())?;
            if queues.len() != positions.len() {
                return Err(wrong());
            }
            for active in &mut queues {
                let mut positions = positions.iter();
                let position = positions.find(|position| position.index == active.index);
                let position = position.ok_or_else(wrong)?;
                active.queue.set_next_avail(position.next_avail);
                active.queue.set_next_used(position.next_used);
            }
            state.phase = Phase::Parked(queues);
        }
        state.restored = true;
        self.move_doorbells(state);
        Ok(())
    }
}

fn config(state: &State) -> Vec<u8> {
    let mut bytes = vec![0; CONFIG_BYTES];
    state.device.read_config(0, &mut bytes);
    // What a driver has chosen there (such as a write-back mode) would not compare; no device has such a field yet.
    let end = bytes.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
    bytes.truncate(end);
    bytes
}
