//! What making a VM gives, by `create` or by `restore`, before anybody has a hand on it. Plain data.

use std::sync::Arc;

use device::SpaceAlarm;
use engine::Engine;
use machine::Machine;
use observe::Registry;

use crate::balloon::Balloon;
use crate::taps::Taps;

/// What a VM consists of once all of it was made; its parts go in this order.
pub(crate) struct Made {
    pub(crate) machine: Machine,
    pub(crate) no_space: SpaceAlarm,
    pub(crate) taps: Taps,
    pub(crate) balloon: Balloon,
    pub(crate) cpus: u32,
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) registry: Registry,
}
