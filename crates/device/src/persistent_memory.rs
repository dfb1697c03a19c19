//! Files that are memory of the guest's beside its RAM. Knows neither what a guest does with them nor where they lie.

use std::sync::Arc;

use virtio::VirtioDevice;
use vm_memory::GuestRegionMmap;
use vmm_api::DeviceSpec;

use crate::{CreateError, DeviceContext, FdTable};

/// A device that tells the guest of such memory, and the memory, which the machine has to map.
pub struct PersistentMemory {
    /// The device.
    pub device: Box<dyn VirtioDevice>,
    /// The memory.
    pub region: Arc<GuestRegionMmap<()>>,
}

/// One kind of such device. Its crate exports one value of this.
pub trait PmemModule: Sync {
    /// The kind's name in [`DeviceSpec::kind`].
    fn kind(&self) -> &'static str;

    /// Makes a device whose memory begins at this guest physical address. It takes its descriptors out of `fds`, and starts no thread before it
    /// is activated.
    ///
    /// # Errors
    /// The configuration makes no sense, or the host refuses.
    fn create(
        &self,
        spec: &DeviceSpec,
        fds: &mut FdTable,
        context: &DeviceContext<'_>,
        start: u64,
    ) -> Result<PersistentMemory, CreateError>;
}
