//! The numbers of the configuration space that change, shared by the device, its thread, and whoever asks for another size. The lock is
//! held for moments only, never while the host makes memory ready, so that a vCPU that reads them does not wait for that.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device::{CreateError, PluggableSizes, ResizeMemory};
use virtio::{ConfigInterrupt, QueueInterrupt};

use crate::protocol::ConfigSpace;

/// How much more of the region a driver may use than it is to plug, so that it can choose: two of the blocks by which Linux adds memory at
/// least on x86-64 (`SECTION_SIZE_BITS`, 27).
const USABLE_EXTENT: u64 = 256 << 20;

/// The region, which does not change (5.15.4): Linux reads it once, and how much of it is usable at each change of the configuration. So it is
/// as large as it may ever have to be, and what a machine can plug of it now is never more than usable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Region {
    pub(crate) addr: u64,
    pub(crate) size: u64,
    /// What there is of it: blocks that can be plugged.
    pub(crate) max: u64,
    pub(crate) block_size: u64,
    pub(crate) node_id: Option<u16>,
}

impl Region {
    /// How many blocks can be plugged.
    pub(crate) fn blocks(&self) -> usize {
        usize::try_from(self.max / self.block_size).unwrap_or(0)
    }

    /// How much of it is usable when so much is requested: at least that, and nothing when it is nothing.
    pub(crate) fn usable(&self, requested: u64) -> u64 {
        let extended = requested
            .saturating_add(USABLE_EXTENT)
            .next_multiple_of(self.block_size);
        match requested {
            0 => 0,
            _ => extended.min(self.max),
        }
    }
}

/// What changes. Multiples of the block size, and `requested` is never more than `usable`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) usable: u64,
    pub(crate) plugged: u64,
    pub(crate) requested: u64,
}

struct State {
    sizes: Sizes,
    interrupt: ConfigInterrupt,
}

/// The region and its sizes.
pub(crate) struct SharedSizes {
    region: Region,
    state: Mutex<State>,
}

impl SharedSizes {
    pub(crate) fn new(region: Region, requested: u64) -> Self {
        let sizes = Sizes {
            usable: region.usable(requested),
            plugged: 0,
            requested,
        };
        let state = State {
            sizes,
            interrupt: ConfigInterrupt::default(),
        };
        Self {
            region,
            state: Mutex::new(state),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Plain numbers: nothing leaves them half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn region(&self) -> &Region {
        &self.region
    }

    pub(crate) fn get(&self) -> Sizes {
        self.lock().sizes
    }

    pub(crate) fn set(&self, sizes: Sizes) {
        self.lock().sizes = sizes;
    }

    /// So much is plugged now; the driver knows, as it has asked for it.
    pub(crate) fn set_plugged(&self, plugged: u64) {
        self.lock().sizes.plugged = plugged;
    }

    /// Nothing is plugged now, and no more is usable than needs be. The driver has asked for it (5.15.4.2).
    pub(crate) fn unplugged_all(&self) {
        let sizes = &mut self.lock().sizes;
        sizes.plugged = 0;
        sizes.usable = self.region.usable(sizes.requested);
    }

    /// The device has a driver again, which is told of what has changed meanwhile.
    pub(crate) fn attach(&self, interrupt: Arc<dyn QueueInterrupt>) {
        self.lock().interrupt.attach(interrupt);
    }

    /// The device has none for now.
    pub(crate) fn detach(&self) {
        self.lock().interrupt.detach();
    }

    pub(crate) fn config(&self) -> ConfigSpace {
        let Sizes {
            usable,
            plugged,
            requested,
        } = self.get();
        ConfigSpace {
            block_size: self.region.block_size,
            node_id: self.region.node_id.unwrap_or(0),
            addr: self.region.addr,
            region_size: self.region.size,
            usable_region_size: usable,
            plugged_size: plugged,
            requested_size: requested,
        }
    }
}

impl ResizeMemory for SharedSizes {
    fn sizes(&self) -> PluggableSizes {
        let Sizes { plugged, requested, .. } = self.get();
        PluggableSizes {
            region: self.region.max,
            block: self.region.block_size,
            requested,
            plugged,
        }
    }

    fn check(&self, bytes: u64) -> Result<(), CreateError> {
        let Region { max, block_size, .. } = self.region;
        match bytes <= max && bytes.is_multiple_of(block_size) {
            true => Ok(()),
            false => Err(CreateError::Value(format!(
                "{bytes} bytes of hot-pluggable memory were asked for: give a multiple of {block_size}, up to {max}"
            ))),
        }
    }

    fn request(&self, bytes: u64) -> Result<(), CreateError> {
        self.check(bytes)?;
        let mut state = self.lock();
        state.sizes.requested = bytes;
        // It shrinks when the driver has unplugged everything, and never before (5.15.4.2).
        state.sizes.usable = state.sizes.usable.max(self.region.usable(bytes));
        state.interrupt.changed();
        Ok(())
    }
}
