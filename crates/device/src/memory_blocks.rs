//! What plugging and unplugging a guest's memory means for the host, and how its size is asked for. Knows neither who takes the guest's
//! requests nor what else has the memory mapped.
//!
//! ```text
//!  guest: PLUG ───▶ device ── MemoryBlocks::plug ────▶ done ──▶ marked plugged ───▶ ACK
//!  guest: UNPLUG ─▶ device ── MemoryBlocks::unplug ──▶ done ──▶ marked unplugged ─▶ ACK
//!                                             └─ failed ──▶ nothing changes ──▶ BUSY
//! ```
//! What the guest owns is therefore always what the host has made ready: a block is ready before the guest may touch it, and is not taken
//! back before the guest has given it up.

use std::io;
use std::sync::Arc;

use memory::GuestRam;
use memory::layout::{self, MemorySize, Range};
use virtio::VirtioDevice;
use vmm_api::DeviceSpec;

use crate::{CreateError, DeviceContext};

/// What is done with blocks of memory for the host. One object a device; called by the device's thread, which waits, and with it the guest's
/// request. All runs begin at multiples of the block size and are as long as several blocks.
pub trait MemoryBlocks: Send {
    /// Makes a run of blocks ready, which the guest owns from the answer on: before that none of them is marked plugged. A block may be
    /// plugged that was touched before, which nothing can keep a guest from: its content is the guest's own, or zeroes.
    ///
    /// # Errors
    /// None of it is the guest's. The guest is told to try again later, and may find a part of it ready then.
    fn plug(&mut self, memory: &GuestRam, run: Range) -> io::Result<()>;

    /// Takes a run of blocks back, which the guest has given up and owns until the answer. Whoever has it mapped for devices of the host's
    /// unmaps it before it is discarded.
    ///
    /// # Errors
    /// The guest keeps all of the run, which must be ready as before. It is told to try again later.
    fn unplug(&mut self, memory: &GuestRam, run: Range) -> io::Result<()>;

    /// The guest owns these runs since before its device was made, as it was restored. Called at most once, before anything else and before
    /// the guest runs; the host has made nothing ready of them.
    ///
    /// # Errors
    /// They cannot be made ready: the VM is not restored.
    fn restored(&mut self, runs: &[Range]) -> io::Result<()>;
}

/// Where a machine's memory can be plugged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HotplugRegion {
    /// All addresses that are kept for it: what the guest is told of, once.
    pub addresses: Range,
    /// Memory from the first of them on, all that can be plugged now.
    pub memory: Range,
}

impl HotplugRegion {
    /// That of a machine with so much memory; `None` if nothing can be plugged.
    pub fn of(size: MemorySize) -> Option<Self> {
        Some(Self {
            addresses: layout::hotplug_region(size)?,
            memory: layout::hotplug(size)?,
        })
    }
}

/// How much of a guest's hot-pluggable memory there is, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PluggableSizes {
    /// The most that can be plugged.
    pub region: u64,
    /// What all others are multiples of.
    pub block: u64,
    /// What the guest is to have plugged.
    pub requested: u64,
    /// What it has plugged.
    pub plugged: u64,
}

/// Changes how much memory a guest is to have plugged. The guest's driver follows when it can, and need not come all the way.
pub trait ResizeMemory: Send + Sync {
    /// The sizes now.
    fn sizes(&self) -> PluggableSizes;

    /// Whether such a size could be requested.
    ///
    /// # Errors
    /// As [`ResizeMemory::request`].
    fn check(&self, bytes: u64) -> Result<(), CreateError>;

    /// Requests another size, and tells the driver, now or when the device goes on.
    ///
    /// # Errors
    /// It is more than the region, or no multiple of the block size; nothing has changed.
    fn request(&self, bytes: u64) -> Result<(), CreateError>;
}

/// A device that plugs memory, and who changes its size.
pub struct PluggableMemory {
    /// The device.
    pub device: Box<dyn VirtioDevice>,
    /// Its size.
    pub resize: Arc<dyn ResizeMemory>,
}

/// One kind of device that plugs memory. Its crate exports one value of this.
pub trait MemoryModule: Sync {
    /// The kind's name in [`DeviceSpec::kind`].
    fn kind(&self) -> &'static str;

    /// Makes a device for what memory can be plugged there, which is all that its configuration says. How many addresses there are is the
    /// machine's to say, which may have been saved. It starts no thread before it is activated.
    ///
    /// # Errors
    /// The configuration makes no sense, or is of other memory.
    fn create(
        &self,
        spec: &DeviceSpec,
        context: &DeviceContext<'_>,
        region: HotplugRegion,
        blocks: Box<dyn MemoryBlocks>,
    ) -> Result<PluggableMemory, CreateError>;
}
