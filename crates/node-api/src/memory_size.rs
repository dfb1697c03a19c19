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
        whole_blocks(memory, boot)?;
        whole_blocks(most, boot)?;
        if !self.has_devices() && self.device_start.is_some() {
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
    /// Bytes that devices can reach, and are to.
    pub dma_mapped: u64,
    /// See `dma_mapped`; 0 where it has no device.
    pub dma_total: u64,
    /// Pieces in which that was mapped.
    pub map_calls: u64,
    /// Blocks that were mapped before the guest plugged them, and those that were not.
    pub plug_hits: u64,
    /// See `plug_hits`.
    pub plug_misses: u64,
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

impl MemoryState {
    /// All of its memory is there, and all of its devices.
    pub fn is_settled(&self) -> bool {
        let failed = self.failed.is_some() || self.memory_failed.is_some();
        self.present == self.target && self.coming.is_empty() && !failed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::class::Class;
    use crate::config::tests::config;

    const GIB: u64 = 1 << 30;

    fn of(memory: u64, boot: Option<u64>, most: Option<u64>) -> SandboxConfig {
        let mut config = config();
        let mib = |size: u64| ByteSize::mib(size);
        (config.resources.memory, config.resources.boot_memory) = (mib(memory), boot.map(mib));
        config.resources.max_memory = most.map(mib);
        config
    }

    #[test]
    fn what_is_not_booted_with_is_plugged_in_whole_sections() {
        let fixed = of(512, None, None).resources;
        assert_eq!((fixed.region(), fixed.plugged()), (None, ByteSize(0)));
        let divided = of(1026, Some(512), None).resources;
        assert_eq!(
            (divided.boots_with(), divided.plugged()),
            (ByteSize::mib(512), ByteSize::mib(514))
        );
        assert_eq!(divided.region(), Some(ByteSize::mib(640)), "rounded up");
        let grows = of(512, None, Some(1024)).resources;
        assert_eq!(
            (grows.plugged(), grows.region()),
            (ByteSize(0), Some(ByteSize::mib(512)))
        );
        assert!(!grows.boots() && !fixed.boots());
    }

    #[test]
    fn one_machine_is_template_of_all_that_boot_with_as_much() {
        let of_machine = |memory, boot, most| of(memory, boot, most).resources.of_machine();
        let one = of_machine(1024, Some(256), None);
        for other in [
            of_machine(512, Some(256), Some(1024)),
            of_machine(256, None, Some(768)),
            of_machine(100 << 10, Some(256), None),
            one.of_machine(),
        ] {
            assert_eq!(one, other);
        }
        assert_eq!(
            (one.memory, one.region()),
            (ByteSize::mib(256), Some(HOTPLUG_ADDRESSES))
        );
        let fixed = of_machine(256, None, None);
        assert_ne!(one, fixed, "it has no device for it");
        assert_eq!(fixed, of_machine(256, Some(256), Some(256)), "nothing can be plugged");
        assert_ne!(one, of_machine(1024, Some(512), None));
        let large = of(256 << 10, Some(256), None).resources;
        assert!(large.boots() && large.hotplug_addresses() > Some(HOTPLUG_ADDRESSES));
    }

    #[test]
    fn another_size_leaves_the_ends_where_they_are() {
        let resources = of(512, None, Some(1024)).resources;
        let more = resources.resized(ByteSize::mib(1024)).unwrap();
        let back = more.resized(ByteSize::mib(512)).unwrap();
        for other in [&more, &back] {
            assert_eq!(
                (other.region(), other.boots_with()),
                (resources.region(), ByteSize::mib(512))
            );
        }
        let told = |resources: &Resources, mib| resources.resized(mib).unwrap_err().to_string();
        for outside in [511, 1025] {
            assert!(told(&more, ByteSize::mib(outside)).contains("512 MiB to 1 GiB"));
        }
        assert!(told(&more, ByteSize::mib(513)).contains("2 MiB"));
        let fixed = of(512, None, None).resources;
        assert!(told(&fixed, ByteSize::mib(512)).contains("--max-memory"));
    }

    #[test]
    fn what_cannot_be_divided_so_is_refused_with_what_can() {
        let told = |config: &SandboxConfig| config.validate().unwrap_err().to_string();
        assert!(told(&of(512, Some(514), None)).contains("no more with --boot-memory"));
        assert!(told(&of(512, None, Some(510))).contains("no less with --max-memory"));
        assert!(told(&of(513, Some(512), None)).contains("multiples of 2 MiB"));
        assert!(told(&of(512, None, Some(513))).contains("multiples of 2 MiB"));
        let mut bare = of(512, None, Some(1024));
        bare.resources.class = Class::Bare;
        assert!(told(&bare).contains("--class bare"));
        let mut cloned = of(512, Some(256), None);
        cloned.template = Some("web".into());
        assert!(told(&cloned).contains("--template"));
        let mut none = of(512, None, None);
        none.device_start = Some(DeviceStart::Late);
        assert!(told(&none).contains("--device ADDRESS"));
        let mut ready = of(512, None, None);
        ready.memory_ready = true;
        assert!(told(&ready).contains("--boot-memory SIZE"));
        ready.resources.boot_memory = Some(ByteSize::mib(256));
        assert_eq!(ready.validate(), Ok(()));
        ready.resources = ready.resources.resized(ByteSize::mib(256)).unwrap();
        assert_eq!(ready.validate(), Ok(()), "it has what it boots with, for now");
        let mut eager = of(512, Some(256), None);
        (eager.devices, eager.device_start) = (vec!["0000:01:00.0".parse().unwrap()], Some(DeviceStart::Eager));
        assert!(told(&eager).contains("--device-start async"));
    }

    #[test]
    fn a_balloon_is_what_is_beyond_the_boot_memory() {
        let mut config = of(3 << 10, None, None);
        (config.devices, config.device_start) =
            (vec!["0000:01:00.0".parse().unwrap()], Some(DeviceStart::AsyncBalloon));
        let inflated = |boot: Option<u64>| {
            let mut config = config.clone();
            config.resources.boot_memory = boot.map(ByteSize::mib);
            assert_eq!(config.validate(), Ok(()));
            config.choose_boot_memory();
            assert_eq!((config.resources.boot_memory, config.resources.region()), (None, None));
            assert_eq!(config.validate(), Ok(()));
            config.resources.inflated
        };
        assert_eq!(inflated(None), Some(ByteSize::gib(2)));
        assert_eq!(inflated(Some(512)), Some(ByteSize::mib(2560)));
        assert_eq!(inflated(Some(3 << 10)), None);
        let told = |config: &SandboxConfig| config.validate().unwrap_err().to_string();
        let mut more = config.clone();
        more.resources.max_memory = Some(ByteSize::gib(4));
        assert!(told(&more).contains("leave --max-memory out"));
        let mut bare = config.clone();
        bare.resources.class = Class::Bare;
        assert!(told(&bare).contains("--device-start late"));
        config.template = Some("web".into());
        assert!(told(&config).contains("--device-start late"));
    }

    #[test]
    fn a_large_sandbox_with_devices_boots_with_a_gibibyte() {
        let chosen = |change: fn(&mut SandboxConfig)| {
            let mut config = of(3 << 10, None, None);
            config.devices = vec!["0000:01:00.0".parse().unwrap()];
            change(&mut config);
            config.choose_boot_memory();
            assert_eq!(config.check_memory(), Ok(()));
            config.resources.boot_memory.map(ByteSize::bytes)
        };
        assert_eq!(chosen(|_| ()), Some(GIB));
        assert_eq!(chosen(|c| c.device_start = Some(DeviceStart::Async)), Some(GIB));
        assert_eq!(
            chosen(|c| c.resources.memory = ByteSize(3 * GIB + 4096)),
            Some(GIB + 4096)
        );
        assert_eq!(
            chosen(|c| c.resources.boot_memory = Some(ByteSize::gib(2))),
            Some(2 * GIB)
        );
        assert_eq!(chosen(|c| c.resources.memory = USUAL_BOOT), None);
        assert_eq!(chosen(|c| c.devices.clear()), None);
        assert_eq!(chosen(|c| c.device_start = Some(DeviceStart::Late)), None);
        assert_eq!(chosen(|c| c.device_start = Some(DeviceStart::Eager)), None);
        assert_eq!(chosen(|c| c.template = Some("web".into())), None);
        assert_eq!(chosen(|c| c.resources.class = Class::Bare), None);
    }

    #[test]
    fn what_is_mapped_are_whole_sections_of_what_is_plugged() {
        for (memory, boot, mapped) in [
            (1050, Some(256), 1152),
            (1280, Some(256), 1280),
            (258, Some(256), 384),
            (512, None, 512),
        ] {
            let resources = of(memory, boot, None).resources;
            assert_eq!(resources.mapped(), ByteSize::mib(mapped), "{memory} MiB");
        }
    }

    #[test]
    fn what_is_held_is_what_it_had_until_somebody_knows_better() {
        let old = of(512, Some(256), Some(1024)).resources;
        assert_eq!(old.held(), ByteSize::mib(1024), "nobody has kept it");
        let kept = old.holding(ByteSize(0));
        assert_eq!((kept.held(), kept.mapped()), (ByteSize::mib(512), ByteSize::mib(512)));
        let less = kept.resized(ByteSize::mib(256)).unwrap();
        assert_eq!((less.memory, less.held()), (ByteSize::mib(256), ByteSize::mib(512)));
        assert_eq!(less.mapped(), ByteSize::mib(512));
        let again = less.resized(ByteSize::mib(300)).unwrap();
        assert_eq!(again.held(), ByteSize::mib(512), "it gives back still");
        let more = again.resized(ByteSize::mib(1024)).unwrap();
        assert_eq!(more.held(), ByteSize::mib(1024));
        assert_eq!(more.of_machine().held_memory, None);
        let fixed = of(512, None, None).resources.holding(ByteSize::mib(1024));
        assert_eq!((fixed.held_memory, fixed.held()), (None, ByteSize::mib(512)));
        for held in [256, 2048] {
            let mut config = of(512, Some(256), Some(1024));
            config.resources.held_memory = Some(ByteSize::mib(held));
            let told = config.validate().unwrap_err().to_string();
            assert!(told.contains("leave held_memory out"), "{told}");
        }
    }
}
