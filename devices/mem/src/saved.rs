//! The device as it is saved. A state's file can be anybody's: what it says is checked before the host is asked for anything.

use serde::{Deserialize, Serialize};
use state::Schema;
use virtio::DeviceError;

use crate::bitmap::Bitmap;
use crate::plugging::Plugging;
use crate::sizes::Sizes;

/// Which blocks are plugged, and how many are to be. All numbers are bytes.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MemState {
    pub(crate) addr: u64,
    pub(crate) region_size: u64,
    pub(crate) block_size: u64,
    pub(crate) node_id: Option<u16>,
    pub(crate) usable_region_size: u64,
    pub(crate) requested_size: u64,
    /// A bit for each block that could be plugged, the lowest block's first.
    pub(crate) plugged: Vec<u64>,
}

impl Schema for MemState {
    const KIND: &'static str = "mem";
    const VERSION: u32 = 1;
}

impl Plugging {
    pub(crate) fn save(&self) -> MemState {
        let (region, sizes) = (self.sizes.region(), self.sizes.get());
        MemState {
            addr: region.addr,
            region_size: region.size,
            block_size: region.block_size,
            node_id: region.node_id,
            usable_region_size: sizes.usable,
            requested_size: sizes.requested,
            // So that one that can plug more goes on from it.
            plugged: match self.plugged.count() {
                0 => Vec::new(),
                _ => self.plugged.words().to_vec(),
            },
        }
    }

    /// Takes over what was saved, and has the host make ready what the guest owns.
    pub(crate) fn restore(&mut self, saved: MemState) -> Result<(), DeviceError> {
        let region = *self.sizes.region();
        let its = (saved.addr, saved.region_size, saved.block_size, saved.node_id);
        if its != (region.addr, region.size, region.block_size, region.node_id) {
            return Err(DeviceError::Unlike(format!(
                "it had {} bytes of hot-pluggable memory at {:#x}, in blocks of {} bytes",
                saved.region_size, saved.addr, saved.block_size
            )));
        }
        let damaged = || {
            let message = "the saved state of hot-pluggable memory contradicts itself: it is damaged; take it anew";
            DeviceError::Refused(message.to_owned())
        };
        let (usable, requested) = (saved.usable_region_size, saved.requested_size);
        let plugged = match saved.plugged.is_empty() {
            // Whatever could be plugged where it was saved, nothing was.
            true => Bitmap::new(region.blocks()),
            false => Bitmap::from_words(saved.plugged, region.blocks()).ok_or_else(damaged)?,
        };
        let whole = [usable, requested]
            .iter()
            .all(|size| size.is_multiple_of(region.block_size));
        let end = plugged.end() as u64 * region.block_size;
        if !whole || usable > region.max || requested > usable || end > usable {
            return Err(damaged());
        }
        let runs: Vec<_> = plugged.runs().iter().map(|run| self.range(run)).collect();
        self.blocks.restored(&runs)?;
        self.sizes.set(Sizes {
            usable,
            plugged: plugged.count() as u64 * region.block_size,
            requested,
        });
        self.plugged = plugged;
        Ok(())
    }
}
