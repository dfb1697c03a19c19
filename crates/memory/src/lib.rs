//! Guest physical memory: where it lies, what backs it, and checked access to it. Knows no device.

mod discard;
mod holes;
mod huge;
mod identity;
mod image;
mod layers;
pub mod layout;
mod pager;
mod pins;
mod pmem;
mod userfault;
mod zeroed;

use std::ffi::c_void;
use std::fs::File;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use base::ByteSize;
use base::sparse::blocks_with_data;
use layout::MemorySize;
use pager::Pager;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};
use zeroed::ZeroedPieces;

pub use discard::{discard, place_of};
pub use huge::HugeBytes;
pub use identity::{IdentityLayout, TABLES};
pub use image::{Image, Witness};
pub use layers::{Layer, Layers, MAX_LAYERS, Segment, Written};
pub use pins::{Pin, Pins};
pub use pmem::{PmemPart, PmemWrites, map_pmem};
pub use zeroed::{ZEROED_PIECE, check_zeroed};

/// Guest memory as devices and loaders see it: every access is checked against its regions.
///
/// One name for the type, so that a dirty bitmap can come in at one place.
pub type GuestRam = GuestMemoryMmap<()>;

/// What second-stage page tables map at once, and what guest memory is aligned to.
pub const HUGE_PAGE: usize = 2 << 20;

/// What the host maps at least.
const PAGE: usize = 4 << 10;

/// How files of saved memory are mapped.
const PROTECTION: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);
const SHARING: MapFlags = MapFlags::PRIVATE.union(MapFlags::NORESERVE);

/// Why guest memory could not be had.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The host has no address space or memory for it.
    #[error("{size} of guest memory cannot be mapped: ask for less, or free memory on the host ({source})")]
    Map {
        /// How much was asked for.
        size: ByteSize,
        /// Why.
        source: vm_memory::mmap::MmapRegionError,
    },
    /// The file of saved memory could not be used.
    #[error("the memory file cannot be {what}: {source}")]
    Image {
        /// What was to be done with it.
        what: &'static str,
        /// Why.
        source: std::io::Error,
    },
    /// The file of saved memory is of another VM, or was cut short.
    #[error(
        "the memory file has {found} bytes, the saved VM {expected}: give the file that was written with its state"
    )]
    ImageSize {
        /// What the VM has.
        expected: u64,
        /// What the file has.
        found: u64,
    },
    /// The file of saved memory is not the one that belongs to the state.
    #[error("the memory file differs from what was saved in page {0}: it was changed, or belongs to another snapshot")]
    OtherImage(u64),
    /// A file was given that is not the one that was written.
    #[error("this is not the memory file that was written last: give that one")]
    OtherFile,
    /// What says which page lies in which file makes no sense.
    #[error(
        "the saved state does not say rightly in which of {0} memory files each page lies: it is damaged; take it anew"
    )]
    Segments(usize),
    /// The host does not tell of pages that are touched.
    #[error(
        "memory cannot come on demand: it needs Linux 6.1 and its /dev/userfaultfd; without it choose another --paging ({source})"
    )]
    Userfault {
        /// Why.
        source: std::io::Error,
    },
    /// There is nobody who brings pages, or whoever does cannot put them there.
    #[error("pages of memory cannot be brought when they are touched: see whether the host has memory left ({source})")]
    Pager {
        /// Why.
        source: std::io::Error,
    },
    /// A file is none that a guest can have as memory.
    #[error(
        "a file of {0} bytes cannot be memory: give a regular file, opened to be read and written, of a multiple of 2 MiB"
    )]
    PmemFile(u64),
    /// A part of it is to be another file's, and cannot.
    #[error("a part of {length:#x} bytes at {at:#x} of a file as memory (pmem) cannot be another file's: {why}")]
    PmemPart {
        /// Where.
        at: u64,
        /// How long.
        length: u64,
        /// What is wrong with it, and what would be right.
        why: String,
    },
    /// A file that is to be memory cannot be looked at.
    #[error("the file that is to be memory cannot be looked at: {0}")]
    Pmem(#[source] std::io::Error),
    /// Memory could not be given back.
    #[error("{length:#x} bytes of guest memory at {start:#x} cannot be given back to the host: {source}")]
    Discard {
        /// Where it begins.
        start: u64,
        /// How much it is.
        length: u64,
        /// Why.
        source: std::io::Error,
    },
    /// A file of zeroed memory is none that can be used.
    #[error(
        "a file of zeroed memory {0}: give files of 128 MiB, opened to be read and written, each of a tmpfs of its own with room for it, or of one whose size is not limited (size=0)"
    )]
    ZeroedFile(&'static str),
    /// The host does not have a file of zeroed memory in the place of memory that can be plugged.
    #[error("zeroed memory cannot be {what}: {source}")]
    Zeroed {
        /// What was to be done with it.
        what: &'static str,
        /// Why.
        source: std::io::Error,
    },
    /// Memory is saved to empty files only.
    #[error("the memory file is no empty regular file ({0} bytes): give one")]
    NotEmpty(u64),
    /// The regions do not form an address space; a bug.
    #[error("the memory layout of {0} is inconsistent")]
    Layout(ByteSize),
}

/// All RAM of one VM.
#[derive(Clone, Debug)]
pub struct Ram {
    guest: Arc<GuestRam>,
    regions: Vec<Arc<GuestRegionMmap<()>>>,
    /// What it was mapped from.
    layers: Option<Layers>,
    /// A part of it is mapped from other files than is known: what is in it can only be read there.
    mixed: bool,
    /// Who brings its pages; it is over when nobody can touch them any more.
    pager: Option<Arc<Pager>>,
    /// Where it is, if nobody translates.
    identity: Option<IdentityLayout>,
    /// What of it lies in pages that the host had set aside.
    huge: HugeBytes,
    /// How much there is of it.
    sizes: MemorySize,
    /// Who needs the host's pages to stay.
    pins: Pins,
    /// What of it are files that came zeroed.
    zeroed: ZeroedPieces,
    /// What files lie beside it.
    pmem: Vec<Arc<GuestRegionMmap<()>>>,
}

impl Ram {
    /// Maps `size` of zeroed memory, in the regions that [`layout::regions`] gives.
    ///
    /// The mappings are private and anonymous, begin on a 2 MiB boundary and ask for transparent huge pages: a guest's
    /// first touch of a 2 MiB range then costs one second-stage fault instead of 512. Nothing is taken before it is touched, so that memory
    /// that may be plugged one day costs addresses alone.
    ///
    /// # Errors
    /// The host cannot map that much.
    pub fn allocate(size: impl Into<MemorySize>) -> Result<Self, MemoryError> {
        Self::anonymous(size.into(), |_| HUGE_PAGE, all_huge_pages)
    }

    /// The same for a guest whose memory is pinned, all of it: in huge pages that the host has set aside (hugetlb), those of 1 GiB first,
    /// then those of 2 MiB, and what is left as [`Ram::allocate`] has it. Such pages are taken at once and filled; they cannot be
    /// missing later.
    ///
    /// # Errors
    /// The host cannot map that much. A host without huge pages is no error.
    pub fn allocate_pinned(size: ByteSize) -> Result<Self, MemoryError> {
        let mut counted = HugeBytes::default();
        let mut ram = Self::anonymous(size.into(), huge::alignment, |mapping| {
            huge_pages(mapping, 0..mapping.size());
            huge::fill(mapping, &mut counted)
        })?;
        ram.huge = counted;
        Ok(ram)
    }

    fn anonymous(
        sizes: MemorySize,
        alignment: impl Fn(usize) -> usize,
        mut back: impl FnMut(&MmapRegion<()>) -> Result<(), MemoryError>,
    ) -> Result<Self, MemoryError> {
        let mut regions = Vec::new();
        for range in layout::regions(sizes) {
            regions.push(Arc::new(anonymous_region(range, sizes, &alignment, &mut back)?));
        }
        Self::from_regions(sizes, regions, None)
    }

    /// The same memory, and so much zeroed memory that can be plugged, where there are addresses for it and was none: as much as none of the
    /// files that the rest is mapped from has.
    ///
    /// # Errors
    /// There are fewer addresses, or there was some. Or the host cannot map that much.
    pub fn with_hotplug(mut self, hotplug: ByteSize) -> Result<Self, MemoryError> {
        let sizes = self.sizes.with_hotplug(hotplug);
        if !self.sizes.can_become(sizes) {
            return Err(MemoryError::Layout(sizes.all()));
        }
        let added = layout::hotplug(sizes).filter(|range| range.length > 0 && self.sizes.hotplug != hotplug);
        if let Some(range) = added {
            let region = anonymous_region(range, sizes, |_| HUGE_PAGE, all_huge_pages)?;
            self.regions.push(Arc::new(region));
            self.guest = Arc::new(self.guest_of(&self.regions)?);
        }
        self.sizes = sizes;
        Ok(self)
    }

    /// Maps what was written before, privately: pages that are only read are the files' own, in the host's page cache, and the
    /// files never change. They must not be changed by anybody else either; a page that is cut off kills whoever reads it.
    ///
    /// Where 2 MiB of the lowest file lie in the page cache in one piece, and nothing in them was written, they are mapped by one
    /// second-stage fault.
    ///
    /// # Errors
    /// A file has another size, the layers make no sense, or the host cannot map them.
    pub fn from_layers(layers: Layers, size: impl Into<MemorySize>) -> Result<Self, MemoryError> {
        let sizes = size.into();
        let size = sizes.all();
        layers.check(sizes)?;
        let base = layers.base()?;
        let base_end = base.metadata().map_err(image::failed("looked at"))?.len();
        let mut regions = Vec::new();
        let mut offset = 0;
        for range in layout::regions(sizes) {
            if offset >= base_end {
                // It was made of a machine that could plug nothing.
                regions.push(Arc::new(anonymous_region(range, sizes, |_| HUGE_PAGE, all_huge_pages)?));
                continue;
            }
            let length = usize::try_from(range.length).map_err(|_| MemoryError::Layout(size))?;
            let place = FileOffset::from_arc(Arc::clone(base), offset);
            let (protection, flags) = (PROTECTION.bits().cast_signed(), SHARING.bits().cast_signed());
            let map = || MmapRegion::build(Some(place.clone()), length, protection, flags);
            let mapping = aligned(length, HUGE_PAGE, map).map_err(|source| MemoryError::Map { size, source })?;
            huge_pages_of_data(&mapping, base, offset)?;
            let region = GuestRegionMmap::new(mapping, GuestAddress(range.start)).ok_or(MemoryError::Layout(size))?;
            regions.push(Arc::new(region));
            offset += range.length;
        }
        let ram = Self::from_regions(sizes, regions, Some(layers))?;
        let layers = ram.layers.iter().flat_map(Layers::segments);
        layers.into_iter().try_for_each(|segment| ram.map_over(segment))?;
        Ok(ram)
    }

    /// The same memory without what can be plugged, as that of a guest is saved which has plugged nothing: machines that go on from it can
    /// plug as much as they like. `None` where it is mapped from files that have some of that.
    ///
    /// # Errors
    /// A file cannot be looked at.
    pub fn without_hotplug(&self) -> Result<Option<Self>, MemoryError> {
        let sizes = MemorySize {
            hotplug: ByteSize(0),
            ..self.sizes
        };
        for layer in self.layers.iter().flat_map(Layers::files) {
            let length = layer.file.metadata().map_err(image::failed("looked at"))?.len();
            if length != sizes.boot.bytes() {
                return Ok(None);
            }
        }
        let mut regions = self.regions.clone();
        regions.truncate(layout::regions(sizes).len());
        Ok(Some(Self {
            guest: Arc::new(self.guest_of(&regions)?),
            regions,
            sizes,
            ..self.clone()
        }))
    }

    fn from_regions(
        sizes: MemorySize,
        regions: Vec<Arc<GuestRegionMmap<()>>>,
        layers: Option<Layers>,
    ) -> Result<Self, MemoryError> {
        let guest = GuestRam::from_arc_regions(regions.clone()).map_err(|_| MemoryError::Layout(sizes.all()))?;
        Ok(Self {
            guest: Arc::new(guest),
            regions,
            layers,
            mixed: false,
            pager: None,
            identity: None,
            huge: HugeBytes::default(),
            sizes,
            pins: Pins::default(),
            zeroed: ZeroedPieces::default(),
            pmem: Vec::new(),
        })
    }

    /// The checked view for loaders and devices: all that can be plugged is in it, as there is memory whether it is plugged or not. A guest
    /// that has a device use what is not plugged reaches zeroes, or what it has put there itself.
    pub fn guest(&self) -> &Arc<GuestRam> {
        &self.guest
    }

    /// The regions, lowest address first; each becomes a slot of the engine.
    pub fn regions(&self) -> &[Arc<GuestRegionMmap<()>>] {
        &self.regions
    }

    /// The files that it is mapped from, if it is.
    pub fn layers(&self) -> Option<&Layers> {
        self.layers.as_ref()
    }

    /// The same, which whoever has these knows the pins of.
    #[must_use]
    pub fn with_pins(self, pins: Pins) -> Self {
        Self { pins, ..self }
    }

    /// Whether the host's pages of it have to stay.
    pub fn pins(&self) -> &Pins {
        &self.pins
    }

    /// What of it lies in pages that the host had set aside.
    pub fn huge(&self) -> HugeBytes {
        self.huge
    }

    /// The number of bytes that the guest boots with, but for what is low in memory that nobody translates.
    pub fn size(&self) -> ByteSize {
        self.sizes.boot
    }

    /// The same, and how much can be plugged.
    pub fn sizes(&self) -> MemorySize {
        self.sizes
    }

    /// Where memory lies that can be plugged: the last of the regions, or none of them, and without bytes, where addresses alone are kept for
    /// some. `None` if there are none.
    pub fn hotplug(&self) -> Option<layout::Range> {
        layout::hotplug(self.sizes)
    }

    /// All addresses that are kept for it.
    pub fn hotplug_region(&self) -> Option<layout::Range> {
        layout::hotplug_region(self.sizes)
    }
}

/// Zeroed memory of its own for a part of the address space.
fn anonymous_region(
    range: layout::Range,
    sizes: MemorySize,
    alignment: impl Fn(usize) -> usize,
    mut back: impl FnMut(&MmapRegion<()>) -> Result<(), MemoryError>,
) -> Result<GuestRegionMmap<()>, MemoryError> {
    let size = sizes.all();
    let length = usize::try_from(range.length).map_err(|_| MemoryError::Layout(size))?;
    let mapping = aligned(length, alignment(length), || MmapRegion::new(length))
        .map_err(|source| MemoryError::Map { size, source })?;
    back(&mapping)?;
    GuestRegionMmap::new(mapping, GuestAddress(range.start)).ok_or(MemoryError::Layout(size))
}

/// A mapping whose address is a multiple of `alignment`, as its guest physical address is: only then can an engine map the
/// guest's huge pages as such. Where that does not come about the guest is slower, not wrong.
///
/// Linux gives anonymous mappings such addresses by itself only from 6.7 on, and those of files on some file systems. It takes
/// the highest hole that is large enough: so a place is reserved, a hole of the right size and address is made in it, and the
/// mapping goes there unless there is another hole above; then it stays until the next attempt, so that there is not any more.
/// A Linux that gives such addresses by itself wants room for a [`HUGE_PAGE`] more, and takes the upper end of it, or the lower one.
fn aligned(
    length: usize,
    alignment: usize,
    map: impl Fn() -> Result<MmapRegion<()>, vm_memory::mmap::MmapRegionError>,
) -> Result<MmapRegion<()>, vm_memory::mmap::MmapRegionError> {
    const ATTEMPTS: usize = 4;
    let mut in_the_way = Vec::new();
    for attempt in 0..ATTEMPTS {
        let spare = if attempt % 2 == 0 {
            (HUGE_PAGE, 0)
        } else {
            (0, HUGE_PAGE)
        };
        let hole = Hole::make(length, alignment, spare);
        let mapping = match map() {
            Ok(mapping) => mapping,
            // Its addresses may be limited (`ulimit -v`): better badly placed than none.
            Err(error) => return in_the_way.pop().ok_or(error),
        };
        drop(hole);
        if mapping.as_ptr().addr().is_multiple_of(alignment) {
            return Ok(mapping);
        }
        in_the_way.push(mapping);
    }
    log::debug!("guest memory is not aligned to huge pages");
    in_the_way.pop().map_or_else(map, Ok)
}

/// Reserved addresses on both sides of an aligned hole; given back when dropped, but not what was mapped into the hole.
struct Hole(Vec<(*mut c_void, usize)>);

impl Hole {
    /// Larger by what is to spare below and above. `None` if the host has no such place.
    #[allow(unsafe_code, reason = "addresses are reserved and given back")]
    fn make(length: usize, alignment: usize, (below, above): (usize, usize)) -> Option<Self> {
        let length = length.checked_next_multiple_of(PAGE)?.checked_add(below + above)?;
        let whole = length.checked_add(alignment)?;
        // SAFETY: 1. a new mapping at an address of the kernel's choice replaces nothing; 2. nobody accesses it.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), whole, ProtFlags::empty(), MapFlags::PRIVATE) }.ok()?;
        let before = (start.addr() + below).next_multiple_of(alignment) - below - start.addr();
        let hole = start.wrapping_byte_add(before);
        // SAFETY: 1. the range lies in the mapping made above; 2. nobody knows of it but this function.
        if let Err(error) = unsafe { munmap(hole, length) } {
            log::debug!("reserved addresses cannot be given back: {error}");
        }
        let after = hole.wrapping_byte_add(length);
        Some(Self(vec![(start, before), (after, alignment - before)]))
    }
}

impl Drop for Hole {
    #[allow(unsafe_code, reason = "addresses are reserved and given back")]
    fn drop(&mut self) {
        for &(start, length) in self.0.iter().filter(|(_, length)| *length > 0) {
            // SAFETY: 1. the range is what is left of the mapping of `make`, beside the hole; 2. nobody accesses it.
            if let Err(error) = unsafe { munmap(start, length) } {
                log::debug!("reserved addresses cannot be given back: {error}");
            }
        }
    }
}

/// Asks for huge pages where the file has data, of which `mapping` maps what begins at `offset`. Elsewhere it would have the kernel read
/// megabytes of nothing for each page that is touched.
fn huge_pages_of_data(mapping: &MmapRegion<()>, file: &File, offset: u64) -> Result<(), MemoryError> {
    let range = offset..offset + mapping.size() as u64;
    let runs = blocks_with_data(file, range, HUGE_PAGE as u64).map_err(image::failed("looked at"))?;
    let within = |place: u64| usize::try_from(place - offset).unwrap_or(usize::MAX);
    for run in runs {
        huge_pages(mapping, within(run.start)..within(run.end));
    }
    Ok(())
}

/// Asks for them everywhere.
#[expect(clippy::unnecessary_wraps, reason = "what else memory is backed by may be missing")]
fn all_huge_pages(mapping: &MmapRegion<()>) -> Result<(), MemoryError> {
    huge_pages(mapping, 0..mapping.size());
    Ok(())
}

#[allow(unsafe_code, reason = "madvise takes a raw address")]
fn huge_pages(mapping: &MmapRegion<()>, range: Range<usize>) {
    debug_assert!(range.end <= mapping.size(), "it is not all of this mapping");
    let place = mapping.as_ptr().wrapping_add(range.start);
    // SAFETY: 1. the range lies within a mapping that `mapping` owns and keeps; 2. MADV_HUGEPAGE changes how pages
    // are backed, never what they hold.
    let result = unsafe { madvise(place.cast(), range.len(), Advice::LinuxHugepage) };
    if let Err(error) = result {
        // A kernel without transparent huge pages: slower, not wrong.
        log::debug!("no huge pages for guest memory: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::Bytes;

    #[test]
    fn memory_is_zero_and_checked() {
        let ram = Ram::allocate(ByteSize::mib(64)).unwrap();
        assert_eq!(ram.size(), ByteSize::mib(64));
        assert_eq!(ram.guest().read_obj::<u64>(GuestAddress(0x1000)).unwrap(), 0);
        assert!(ram.guest().write_obj(1_u64, GuestAddress((64 << 20) - 4)).is_err());
    }
}
