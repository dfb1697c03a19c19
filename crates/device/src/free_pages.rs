//! What becomes of pages that a guest has no use for, and how it is asked to do without a part of its memory. Knows neither who takes the
//! guest's word nor who needs its pages to stay.
//!
//! ```text
//!  guest: these are free ──▶ device ── FreePages::discard ──▶ pinned? ── no ──▶ the guest's own? ── yes ──▶ the host's again
//!                                                               │ yes             │ no
//!                                                               ▼                 ▼
//!                                                             stays             stays
//! ```
//! The guest may use such a page again at any time: it is there when it is touched, with zeroes or with what the memory is mapped from.

use std::io;
use std::sync::Arc;

use memory::layout::Range;
use memory::{GuestRam, Pins, discard};
use virtio::VirtioDevice;
use vmm_api::DeviceSpec;

use crate::{BalloonedDma, CreateError, DeviceContext, PluggableDma};

/// What became of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Discard {
    /// The host has them.
    Done,
    /// Somebody reaches them past this process's page tables: a function of the host's, or a guest that owns its CPUs.
    Pinned,
    /// They lie in memory that is not plugged, which is discarded when it is unplugged.
    Unplugged,
}

/// What is done for the host with pages that a guest has no use for. One object a device; called by the device's thread.
pub trait FreePages: Send {
    /// Gives whole pages of guest memory back to the host, unless they have to stay. Whoever maps memory for a function of the host's waits
    /// for it.
    ///
    /// # Errors
    /// The host refuses, or it is no guest memory; a part may be gone.
    fn discard(&mut self, memory: &GuestRam, pages: Range) -> io::Result<Discard>;

    /// The guest does without these pages until it says that it takes them back. Of a driver alone that has to say so.
    fn inflated(&mut self, pages: &[Range]);

    /// The guest takes pages back, which are its own when it is answered.
    ///
    /// # Errors
    /// They cannot be made ready: it is not answered until they are, which is tried again.
    fn deflate(&mut self, pages: &[Range]) -> io::Result<()>;

    /// The driver has gone, and the next one has no page in its balloon. Whether there is something for [`FreePages::settle`] to do.
    fn forget(&mut self) -> bool;

    /// Makes a part of what [`FreePages::forget`] has left to the guest ready: as much as whoever pauses the device can wait for. Whether that was
    /// all.
    ///
    /// # Errors
    /// It cannot be, which is tried again.
    fn settle(&mut self) -> io::Result<bool>;
}

/// Those of a VM.
#[derive(Clone)]
pub struct GuestPages {
    /// Whether its pages have to stay.
    pub pins: Pins,
    /// What can be plugged of its memory.
    pub pluggable: Option<PluggableDma>,
    /// What of the memory that it boots with is in its balloon, if functions of the host's do without that.
    pub ballooned: Option<BalloonedDma>,
}

impl FreePages for GuestPages {
    fn discard(&mut self, memory: &GuestRam, pages: Range) -> io::Result<Discard> {
        if self.pluggable.as_ref().is_some_and(|region| !region.is_plugged(pages)) {
            return Ok(Discard::Unplugged);
        }
        match self.pins.unless_pinned(|| discard(memory, pages)) {
            Some(Ok(())) => Ok(Discard::Done),
            Some(Err(error)) => Err(io::Error::other(error)),
            None => Ok(Discard::Pinned),
        }
    }

    fn inflated(&mut self, pages: &[Range]) {
        if let Some(ballooned) = &self.ballooned {
            ballooned.inflate(pages);
        }
    }

    fn deflate(&mut self, pages: &[Range]) -> io::Result<()> {
        self.ballooned
            .as_ref()
            .map_or(Ok(()), |ballooned| ballooned.deflate(pages))
    }

    fn forget(&mut self) -> bool {
        self.ballooned.as_ref().is_some_and(BalloonedDma::forget)
    }

    fn settle(&mut self) -> io::Result<bool> {
        self.ballooned.as_ref().map_or(Ok(true), BalloonedDma::settle)
    }
}

/// A balloon as it stands, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BalloonInfo {
    /// How much memory the guest is to do without.
    pub target: u64,
    /// How much it does without, by its driver's word.
    pub inflated: u64,
    /// How much it has reported as free since its device was made; the same page as often as it was.
    pub reported: u64,
    /// How much of both the host has been given.
    pub discarded: u64,
}

/// Changes how much of its memory a guest is to do without. Its driver follows when it can, and need not come all the way.
pub trait ResizeBalloon: Send + Sync {
    /// How it stands now.
    fn info(&self) -> BalloonInfo;

    /// Requests another size, and tells the driver, now or when the device goes on.
    ///
    /// # Errors
    /// It is no multiple of 4 KiB, or more than a balloon can hold; nothing has changed.
    fn request(&self, bytes: u64) -> Result<(), CreateError>;
}

/// A device by which a guest gives memory back, and who changes its size.
pub struct Balloon {
    /// The device.
    pub device: Box<dyn VirtioDevice>,
    /// Its size.
    pub resize: Arc<dyn ResizeBalloon>,
}

/// One kind of such devices. Its crate exports one value of this.
pub trait BalloonModule: Sync {
    /// The kind's name in [`DeviceSpec::kind`].
    fn kind(&self) -> &'static str;

    /// Makes a device. It starts no thread before it is activated.
    ///
    /// # Errors
    /// The configuration makes no sense.
    fn create(
        &self,
        spec: &DeviceSpec,
        context: &DeviceContext<'_>,
        pages: Box<dyn FreePages>,
    ) -> Result<Balloon, CreateError>;
}

#[cfg(test)]
mod tests {
    use base::ByteSize;
    use memory::Ram;
    use memory::layout::MemorySize;
    use vfio::AddressSpace;
    use vfio::fake::{FakeSpace, Op};
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::{DmaMemory, DmaSpace, MemoryBlocks};

    const MIB: u64 = 1 << 20;

    fn range(start: u64, length: u64) -> Range {
        Range { start, length }
    }

    struct Rig {
        ram: Ram,
        pages: GuestPages,
        fake: Arc<FakeSpace>,
        space: Arc<DmaSpace>,
    }

    /// 128 MiB, of which all words that are asked for are 7, and 256 MiB that can be plugged.
    fn rig() -> Rig {
        let size = MemorySize::from(ByteSize::mib(128)).with_hotplug(ByteSize::mib(256));
        let ram = Ram::allocate(size).unwrap();
        let fake = Arc::new(FakeSpace::new());
        Rig {
            pages: GuestPages {
                pins: ram.pins().clone(),
                pluggable: Some(PluggableDma::new(ram.hotplug().unwrap())),
                ballooned: None,
            },
            ram,
            space: DmaSpace::new(Arc::clone(&fake) as Arc<dyn AddressSpace>),
            fake,
        }
    }

    impl Rig {
        /// What becomes of a page with something in it, and whether that is still there.
        fn discard(&self, place: u64) -> (Discard, bool) {
            let at = GuestAddress(place);
            self.ram.guest().write_obj(7_u64, at).unwrap();
            let fate = self.pages.clone().discard(self.ram.guest(), range(place, 2 * MIB));
            (fate.unwrap(), self.ram.guest().read_obj::<u64>(at).unwrap() == 7)
        }

        fn memory(&self) -> DmaMemory {
            DmaMemory::of(&self.ram).with_pluggable(&self.ram, self.pages.pluggable.clone().unwrap())
        }
    }

    #[test]
    fn nothing_goes_while_functions_reach_it_and_all_that_is_given_back_after_the_last() {
        let rig = rig();
        assert_eq!(rig.discard(4 * MIB), (Discard::Done, false));
        let first = rig.space.map(&rig.memory()).unwrap();
        let second = rig.space.map(&rig.memory()).unwrap();
        assert_eq!(rig.discard(4 * MIB), (Discard::Pinned, true));
        drop(first);
        assert_eq!(rig.discard(4 * MIB), (Discard::Pinned, true));
        drop(second);
        assert_eq!(rig.fake.mapped_bytes(), 0);
        assert_eq!(rig.discard(4 * MIB), (Discard::Done, false));
    }

    #[test]
    fn memory_that_could_not_be_mapped_is_not_pinned_and_what_stays_mapped_is() {
        let rig = rig();
        rig.fake.fail(Op::Map, 1);
        assert!(rig.space.map(&rig.memory()).is_err());
        assert_eq!(rig.discard(4 * MIB), (Discard::Done, false));
        let mapped = rig.space.map(&rig.memory()).unwrap();
        rig.fake.fail(Op::Unmap, 1);
        drop(mapped);
        assert_eq!(
            rig.discard(4 * MIB),
            (Discard::Pinned, true),
            "a function could still write there"
        );
    }

    #[test]
    fn a_plugged_block_that_stays_mapped_is_pinned() {
        let rig = rig();
        let start = rig.ram.hotplug().unwrap().start;
        let mut region = rig.pages.pluggable.clone().unwrap();
        region.plug(rig.ram.guest(), range(start, 4 * MIB)).unwrap();
        let mapped = rig.space.map(&rig.memory()).unwrap();
        rig.fake.fail(Op::Unmap, 1);
        drop(mapped);
        assert_eq!(rig.fake.mapped_bytes(), 128 * MIB, "what was plugged is unmapped first");
        assert_eq!(rig.discard(start), (Discard::Pinned, true));
    }

    #[test]
    fn of_what_can_be_plugged_only_what_is() {
        let rig = rig();
        let start = rig.ram.hotplug().unwrap().start;
        let mut region = rig.pages.pluggable.clone().unwrap();
        let plugged = range(start + 126 * MIB, 4 * MIB);
        region.plug(rig.ram.guest(), plugged).unwrap();
        assert_eq!(rig.discard(start), (Discard::Unplugged, true));
        for place in [126, 128] {
            assert_eq!(rig.discard(start + place * MIB), (Discard::Done, false));
        }
        for place in [125, 129] {
            assert_eq!(
                rig.discard(start + place * MIB),
                (Discard::Unplugged, true),
                "a part is not plugged"
            );
        }
        region.unplug(rig.ram.guest(), plugged).unwrap();
        assert_eq!(rig.discard(start + 126 * MIB), (Discard::Unplugged, true));
    }

    #[test]
    fn what_is_no_memory_is_refused() {
        let rig = rig();
        for bad in [
            range(120 * MIB, 16 * MIB),
            range(3 << 30, 4096),
            range(5, 4096),
            range(u64::MAX - 4095, 4096),
        ] {
            let told = rig.pages.clone().discard(rig.ram.guest(), bad).unwrap_err().to_string();
            assert!(told.contains("cannot be given back"), "{told}");
        }
    }
}
