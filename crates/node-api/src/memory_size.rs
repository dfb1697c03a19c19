//! How a sandbox's memory is divided: what its machine boots with, and a region above it of which more or less is plugged while it runs
//! (virtio-mem). Pure numbers, and what there is of it now.

use base::{ByteSize, PciAddress};
use serde::{Deserialize, Serialize};

use crate::config::{Resources, SandboxConfig};
use crate::device_start::DeviceStart;

/// Memory is plugged in blocks of this size: that of the host's huge pages.
pub const BLOCK: ByteSize = ByteSize::mib(2);

/// The region of what can be plugged is a multiple of this: a section of Linux's memory on x86-64.
pub const SECTION: ByteSize = ByteSize::mib(128);

/// So many addresses are kept for memory that can be plugged, whatever can be: a guest reads once how many there are, and machines that go on
/// from a template can plug more than the one that it was made of. They cost nothing, and lie below the window of PCI devices.
pub const HOTPLUG_ADDRESSES: ByteSize = ByteSize::gib(128);

/// What a sandbox with devices boots with where it is to have more and nobody says how much.
pub const USUAL_BOOT: ByteSize = ByteSize::gib(1);

/// Why memory cannot be divided so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// It would boot with more than it is to have.
    #[error(
        "it cannot boot with {boot} where it is to have {memory}: give no more with --boot-memory than with --memory"
    )]
    Boot {
        /// What it boots with.
        boot: ByteSize,
        /// What it is to have.
        memory: ByteSize,
    },
    /// It could not have what it is to have.
    #[error(
        "it cannot have at most {most} where it is to have {memory}: give no less with --max-memory than with --memory"
    )]
    Most {
        /// The most.
        most: ByteSize,
        /// What it is to have.
        memory: ByteSize,
    },
    /// It holds what it cannot have, or less than it is to have.
    #[error("it cannot hold {held} where it is to have {memory}, and at most {most}: leave held_memory out")]
    Held {
        /// What it would hold.
        held: ByteSize,
        /// What it is to have.
        memory: ByteSize,
        /// The most.
        most: ByteSize,
    },
    /// No whole blocks are plugged.
    #[error(
        "memory is plugged in blocks of {BLOCK}, and {memory} is not {boot} and some of these: give --memory, --boot-memory and --max-memory as \
         multiples of {BLOCK}, such as 2g"
    )]
    Blocks {
        /// What it would have.
        memory: ByteSize,
        /// What it boots with.
        boot: ByteSize,
    },
    /// All of its memory is pinned from its boot on.
    #[error(
        "a sandbox of the class bare has all of its memory when it boots: leave --boot-memory and --max-memory out, or --class bare"
    )]
    Bare,
    /// Its machine is made already.
    #[error(
        "a machine that goes on from a template has the memory that it was saved with, all of it: leave --boot-memory and --max-memory out, or \
         --template"
    )]
    OfTemplate,
    /// A template goes on as it was built.
    #[error("a template is built with all of its memory: leave boot_memory and max_memory out")]
    Template,
    /// Nothing is plugged later.
    #[error(
        "with --device-start eager all memory is there, and mapped, when it boots: leave --boot-memory out, or give --device-start async"
    )]
    Eager,
    /// Its guest has all of it from the start on.
    #[error(
        "with --device-start async-balloon all memory is there when it boots, and no more can be plugged: leave --max-memory out, or give \
         --device-start async"
    )]
    Balloon,
    /// Nothing boots, or all of its memory is pinned from its boot on.
    #[error(
        "--device-start async-balloon is for machines that boot, and whose memory is not pinned from then on: leave --template and --class bare \
         out, or give --device-start late"
    )]
    BalloonOfOthers,
    /// Its guest's IOMMU maps what it boots with, and no class bare has one.
    #[error(
        "a sandbox whose guest has an IOMMU (--device-start lazy) has all of its memory when it boots, and is not of the class bare: leave \
         --boot-memory, --max-memory and --class bare out, or give another --device-start"
    )]
    Iommu,
    /// Its machine was made without.
    #[error(
        "a machine that goes on from a template has the IOMMU that it was built with, and templates are built without: leave --template out, or \
         give another --device-start than lazy"
    )]
    IommuOfTemplate,
    /// There is nothing that could be there early or late.
    #[error(
        "--device-start says when devices are there, and this sandbox gets none: add --device ADDRESS (`basalt device ls` shows them), or leave it \
         out"
    )]
    NoDevice,
    /// There is nothing to wait for.
    #[error(
        "all memory of this sandbox is there when it boots: leave --memory-ready out, or add --boot-memory SIZE or --device ADDRESS"
    )]
    Ready,
    /// Nothing can be plugged, or taken back.
    #[error(
        "this sandbox has {memory}, no more and no less as long as it is there: make one with --max-memory SIZE, or with --boot-memory SIZE, whose \
         memory can be changed"
    )]
    Fixed {
        /// What it has.
        memory: ByteSize,
    },
    /// Less than it boots with, or more than its region has room for.
    #[error(
        "this sandbox can have {boot} to {most}, and not {asked}: make another with --boot-memory or --max-memory for it"
    )]
    Range {
        /// What was asked for.
        asked: ByteSize,
        /// What it boots with.
        boot: ByteSize,
        /// The most.
        most: ByteSize,
    },
}

impl Resources {
    /// What its machine boots with.
    pub fn boots_with(&self) -> ByteSize {
        self.boot_memory.unwrap_or(self.memory)
    }

    /// The most that it can be given while it runs.
    pub fn most_memory(&self) -> ByteSize {
        self.max_memory.unwrap_or(self.memory)
    }

    /// The size of the region in which memory is plugged, whole sections; `None` where nothing can be.
    pub fn region(&self) -> Option<ByteSize> {
        let bytes = self.most_memory().bytes().saturating_sub(self.boots_with().bytes());
        (bytes > 0).then(|| ByteSize(bytes.div_ceil(SECTION.bytes()).saturating_mul(SECTION.bytes())))
    }

    /// How many addresses are kept for what can be plugged; `None` where nothing can be.
    pub fn hotplug_addresses(&self) -> Option<ByteSize> {
        self.region().map(|region| region.max(HOTPLUG_ADDRESSES))
    }

    /// A machine of which all go on that boot with as much, and can plug whatever they like in so many addresses.
    #[must_use]
    pub(crate) fn with_nothing_plugged(&self) -> Self {
        let memory = self.boots_with();
        let most = |addresses: ByteSize| ByteSize(memory.bytes().saturating_add(addresses.bytes()));
        Self {
            memory,
            boot_memory: None,
            max_memory: self.hotplug_addresses().map(most),
            held_memory: None,
            ..self.clone()
        }
    }

    /// The most that its machine may have, whatever it is to have: until its guest has given back what it had before.
    pub fn held(&self) -> ByteSize {
        match self.region() {
            Some(_) => self.held_memory.unwrap_or(self.most_memory()).max(self.memory),
            None => self.memory,
        }
    }

    /// The same of a machine that may have so much, or what it is to have.
    #[must_use]
    pub fn holding(&self, memory: ByteSize) -> Self {
        Self {
            held_memory: self.region().map(|_| memory.max(self.memory)),
            ..self.clone()
        }
    }

    /// What all that it holds takes where a device reaches it: that maps whole sections of what is plugged.
    pub fn mapped(&self) -> ByteSize {
        let boot = self.boots_with().bytes();
        let sections = self.held().bytes().saturating_sub(boot).div_ceil(SECTION.bytes());
        ByteSize(boot.saturating_add(sections.saturating_mul(SECTION.bytes())))
    }

    /// How much of the region is to be plugged.
    pub fn plugged(&self) -> ByteSize {
        ByteSize(self.memory.bytes().saturating_sub(self.boots_with().bytes()))
    }

    /// The same with another size, on its boot memory and within its region. It holds what it held, or that size.
    ///
    /// # Errors
    /// It cannot have that.
    pub fn resized(&self, asked: ByteSize) -> Result<Self, MemoryError> {
        let (boot, most, memory) = (self.boots_with(), self.most_memory(), self.memory);
        if self.region().is_none() {
            return Err(MemoryError::Fixed { memory });
        }
        if !(boot..=most).contains(&asked) {
            return Err(MemoryError::Range { asked, boot, most });
        }
        whole_blocks(asked, boot)?;
        Ok(Self {
            memory: asked,
            held_memory: Some(self.held().max(asked)),
            // They are what they were, also where one of them was what it had.
            boot_memory: Some(boot),
            max_memory: Some(most),
            ..self.clone()
        })
    }
}

fn whole_blocks(memory: ByteSize, boot: ByteSize) -> Result<(), MemoryError> {
    let plugged = memory.bytes().saturating_sub(boot.bytes());
    match plugged.is_multiple_of(BLOCK.bytes()) {
        true => Ok(()),
        false => Err(MemoryError::Blocks { memory, boot }),
    }
}

impl SandboxConfig {
    /// When it gets the devices that it is started with.
    pub fn device_start(&self) -> DeviceStart {
        self.device_start.unwrap_or_default()
    }

    /// It is started with devices of the host.
    pub fn has_devices(&self) -> bool {
        !(self.devices.is_empty() && self.cdi_devices.is_empty())
    }

    /// The same, and they reach all of its memory: not what its guest maps for them alone.
    pub fn devices_reach_all(&self) -> bool {
        self.has_devices() && !self.resources.guest_iommu
    }

    /// Fills in what it boots with, where it gets devices and nobody has said it: so that it need not wait until more is mapped for them.
    pub fn choose_boot_memory(&mut self) {
        let has_devices = self.has_devices();
        if has_devices && self.device_start() == DeviceStart::AsyncBalloon {
            return self.choose_inflated();
        }
        let resources = &mut self.resources;
        let divides = has_devices
            && self.device_start.unwrap_or_default() == DeviceStart::Async
            && self.template.is_none()
            && !resources.class.is_bare()
            && !resources.guest_iommu
            && resources.boot_memory.is_none();
        if divides && resources.memory > USUAL_BOOT {
            // What is no whole block is there from the boot on.
            let odd = resources.memory.bytes() % BLOCK.bytes();
            resources.boot_memory = Some(ByteSize(USUAL_BOOT.bytes() + odd));
        }
    }

    /// What it boots with is what its guest has at first of all that is there.
    fn choose_inflated(&mut self) {
        let resources = &mut self.resources;
        let boot = resources.boot_memory.take().unwrap_or(USUAL_BOOT);
        let inflated = ByteSize(resources.memory.bytes().saturating_sub(boot.bytes()));
        resources.inflated = Some(inflated).filter(|inflated| inflated.bytes() > 0);
    }

    /// Fills in that its guest has an IOMMU, where its devices are to be there by that.
    pub fn choose_iommu(&mut self) {
        self.resources.guest_iommu |= self.device_start == Some(DeviceStart::Lazy);
    }

    /// Checks how its memory is divided, and when its devices are to be there.
    pub(crate) fn check_memory(&self) -> Result<(), MemoryError> {
        let resources = &self.resources;
        let (boot, memory, most) = (resources.boots_with(), resources.memory, resources.most_memory());
        if boot > memory {
            return Err(MemoryError::Boot { boot, memory });
        }
        if most < memory {
            return Err(MemoryError::Most { most, memory });
        }
        if let Some(held) = resources.held_memory
            && !(memory..=most).contains(&held)
        {
            return Err(MemoryError::Held { held, memory, most });
        }
        let is_divided = resources.boot_memory.is_some() || resources.max_memory.is_some();
        if is_divided && resources.class.is_bare() {
            return Err(MemoryError::Bare);
        }
        if is_divided && self.template.is_some() {
            return Err(MemoryError::OfTemplate);
        }
        // A machine has it from the boot on, so that devices can come to one that has none yet.
        let is_lazy = self.device_start == Some(DeviceStart::Lazy);
        if (is_lazy || resources.guest_iommu) && (is_divided || resources.class.is_bare()) {
            return Err(MemoryError::Iommu);
        }
        if is_lazy && self.template.is_some() {
            return Err(MemoryError::IommuOfTemplate);
        }
        whole_blocks(memory, boot)?;
        whole_blocks(most, boot)?;
        if !self.has_devices() && self.device_start.is_some() && !is_lazy {
            return Err(MemoryError::NoDevice);
        }
        if self.device_start == Some(DeviceStart::AsyncBalloon) {
            if resources.max_memory.is_some() {
                return Err(MemoryError::Balloon);
            }
            if resources.class.is_bare() || self.template.is_some() {
                return Err(MemoryError::BalloonOfOthers);
            }
        }
        if self.device_start == Some(DeviceStart::Eager) && boot < memory {
            return Err(MemoryError::Eager);
        }
        if self.memory_ready && !self.has_devices() && resources.region().is_none() {
            return Err(MemoryError::Ready);
        }
        Ok(())
    }
}

/// How much of its memory, and which of its devices, a sandbox that runs has now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryState {
    /// Bytes that its guest has: what it booted with, and what it has plugged.
    pub present: u64,
    /// Bytes that it is to have.
    pub target: u64,
    /// Bytes that came zeroed ([`crate::ZeroedMemory`]), at most; they count as the sandbox's memory, and are charged to another cgroup.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub zeroed: u64,
    /// What of it devices reach.
    #[serde(flatten)]
    pub dma: DmaState,
    /// Bytes that its guest has reported as free since its machine was made, the same memory as often as it was; 0 where it does not.
    #[serde(default)]
    pub reported: u64,
    /// What of that the host was given.
    #[serde(default)]
    pub discarded: u64,
    /// With `async-balloon`: its guest did not give up in time what was not mapped yet, so that its devices waited for all of it, as with `late`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fell_back: bool,
    /// Why no more is mapped now, which is tried again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub map_error: Option<String>,
    /// Devices that its guest does not have yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub coming: Vec<PciAddress>,
    /// Why devices did not come that were to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
    /// Why its memory could not be brought to its size, which is tried again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_failed: Option<String>,
}

/// What of a sandbox's memory its devices reach, and how it came to be.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DmaState {
    /// Bytes that devices can reach, and are to.
    #[serde(rename = "dma_mapped")]
    pub mapped: u64,
    /// See `mapped`; 0 where it has no device.
    #[serde(rename = "dma_total")]
    pub total: u64,
    /// Pieces in which that was mapped.
    pub map_calls: u64,
    /// Bytes that were mapped since its first device came, whatever was unmapped since.
    #[serde(default)]
    pub map_bytes: u64,
    /// Microseconds in which memory was being filled and mapped for that: [`DmaState::rate`].
    #[serde(default)]
    pub map_usec: u64,
    /// Blocks that were mapped before the guest plugged them, and those that were not.
    pub plug_hits: u64,
    /// See `plug_hits`.
    pub plug_misses: u64,
    /// How often an IOMMU refused DMA of its devices since the daemon's start, at least: the kernel does not log all of a flood. `None` where it
    /// has no device, and where the daemon may not read the kernel's log.
    #[serde(default, rename = "dma_faults", skip_serializing_if = "Option::is_none")]
    pub faults: Option<u64>,
}

impl DmaState {
    /// How fast memory was filled and mapped for its devices, bytes a second; `None` where none was yet.
    pub fn rate(&self) -> Option<u64> {
        let bytes = u128::from(self.map_bytes) * 1_000_000;
        let rate = bytes.checked_div(u128::from(self.map_usec))?;
        u64::try_from(rate).ok().filter(|rate| *rate > 0)
    }
}

impl MemoryState {
    /// All of its memory is there, and all of its devices.
    pub fn is_settled(&self) -> bool {
        let failed = self.failed.is_some() || self.memory_failed.is_some();
        self.present == self.target && self.coming.is_empty() && !failed
    }
}

fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

#[cfg(test)]
mod tests;
