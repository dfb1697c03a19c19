//! Guest memory as a sparse file: RAM region after region, pages without content as holes. Written from memory that
//! stands still, and mapped privately by any number of VMs afterwards.
//!
//! Which pages are worth a look is told by two things, so that untouched ones are not read: the kernel's page map of this
//! process (what the guest or a device has touched), and the data of the files that the memory was mapped from, if it was
//! mapped from some. Without a page map all pages are read. How several files make one memory is `layers`' affair.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use base::ByteSize;
use rustix::fs::SeekFrom;
use vm_memory::{GuestMemoryRegion, GuestRegionMmap};

use crate::layers::Layers;
use crate::{MemoryError, PAGE, Ram};

/// What one look at the page map covers: 32 MiB of memory, 64 KiB of entries.
const CHUNK_PAGES: usize = 8192;

/// Bytes of an entry of the page map (Documentation/admin-guide/mm/pagemap.rst).
const ENTRY: usize = 8;

/// The entry's bits 62 (swapped) and 63 (present).
const TOUCHED: u64 = 0b11 << 62;

/// Bit 61: the page is a file's, and not this process's own.
const OF_FILE: u64 = 1 << 61;

/// What one entry of the page map says.
#[derive(Clone, Copy)]
pub(crate) struct Entry(u64);

impl Entry {
    pub(crate) fn of(bytes: [u8; ENTRY]) -> Self {
        Self(u64::from_le_bytes(bytes))
    }

    /// Somebody has read or written the page.
    pub(crate) fn is_touched(self) -> bool {
        self.0 & TOUCHED != 0
    }

    /// The page of a private mapping of a file was written since it was mapped: it is this process's own.
    pub(crate) fn is_changed(self) -> bool {
        self.is_touched() && self.0 & OF_FILE == 0
    }
}

/// The most that one write takes.
const RUN_PAGES: usize = 128;

/// Witnesses are kept for between half as many and as many pages.
const MAX_WITNESSES: usize = 32;

/// The content of one page: by a few of them a file is known for the one that was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Witness {
    /// The page's number in the file.
    pub page: u64,
    /// CRC-32 of its content.
    pub checksum: u32,
}

/// What is known of a file that was written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Image {
    /// Pages with content.
    pub pages: u64,
    /// Some of them, evenly spread.
    pub witnesses: Vec<Witness>,
}

impl Image {
    /// Counts a page with content; keeps each `stride`-th for a witness.
    pub(crate) fn add(&mut self, page: u64, bytes: &[u8], stride: &mut u64) {
        if self.pages.is_multiple_of(*stride) {
            if self.witnesses.len() == MAX_WITNESSES {
                // Every other one goes: what is left is as if the stride had been twice as long from the start.
                let mut keep = false;
                self.witnesses.retain(|_| {
                    keep = !keep;
                    keep
                });
                *stride *= 2;
            }
            if self.pages.is_multiple_of(*stride) {
                let checksum = crc32fast::hash(bytes);
                self.witnesses.push(Witness { page, checksum });
            }
        }
        self.pages += 1;
    }

    /// Checks that `file` is the one that was written, as far as witnesses tell.
    ///
    /// # Errors
    /// It is another, or cannot be read.
    pub fn check(&self, file: &File) -> Result<(), MemoryError> {
        let mut bytes = [0; PAGE];
        // More than are ever written are nobody's but a forger's, who would keep us busy.
        for witness in self.witnesses.iter().take(MAX_WITNESSES) {
            let at = witness.page.saturating_mul(PAGE as u64);
            file.read_exact_at(&mut bytes, at).map_err(failed("read"))?;
            if crc32fast::hash(&bytes) != witness.checksum {
                return Err(MemoryError::OtherImage(witness.page));
            }
        }
        Ok(())
    }
}

pub(crate) fn failed(what: &'static str) -> impl Fn(io::Error) -> MemoryError {
    move |source| MemoryError::Image { what, source }
}

/// Where the files that memory was mapped from have data, asked for with rising offsets.
struct Extents<'a> {
    layers: Option<&'a Layers>,
    /// The extent of the lowest file that was found last.
    start: u64,
    end: u64,
}

impl<'a> Extents<'a> {
    fn new(layers: Option<&'a Layers>) -> Self {
        Self {
            layers,
            start: 0,
            end: 0,
        }
    }

    /// Whether there is data in the page at `offset`.
    fn has(&mut self, offset: u64) -> Result<bool, MemoryError> {
        let Some(layers) = self.layers else { return Ok(false) };
        if layers.covers(offset / PAGE as u64) {
            return Ok(true);
        }
        if offset >= self.end {
            let file = layers.base()?;
            match rustix::fs::seek(&**file, SeekFrom::Data(offset)) {
                Ok(start) => {
                    self.start = start;
                    let end = rustix::fs::seek(&**file, SeekFrom::Hole(start));
                    self.end = end.map_err(|error| failed("written: its base")(error.into()))?;
                }
                // No more data in this file.
                Err(rustix::io::Errno::NXIO) => (self.start, self.end) = (u64::MAX, u64::MAX),
                Err(error) => return Err(failed("written: its base")(error.into())),
            }
        }
        Ok(self.start < offset.saturating_add(PAGE as u64))
    }
}

/// Writes pages: those with content that follow each other at once, those without not at all.
pub(crate) struct Writer<'a> {
    file: &'a File,
    image: Image,
    stride: u64,
    /// Where what is not written yet begins.
    start: u64,
    bytes: Vec<u8>,
    page: Box<[u8; PAGE]>,
}

impl<'a> Writer<'a> {
    /// To an empty file, which gets the size of the memory.
    pub(crate) fn new(file: &'a File, ram: &Ram) -> Result<Self, MemoryError> {
        let metadata = file.metadata().map_err(failed("looked at"))?;
        if !metadata.is_file() || metadata.len() != 0 {
            return Err(MemoryError::NotEmpty(metadata.len()));
        }
        file.set_len(ram.sizes().all().bytes()).map_err(failed("enlarged"))?;
        Ok(Self {
            file,
            image: Image::default(),
            stride: 1,
            start: 0,
            bytes: Vec::with_capacity(RUN_PAGES * PAGE),
            page: Box::new([0; PAGE]),
        })
    }

    fn flush(&mut self) -> Result<(), MemoryError> {
        if !self.bytes.is_empty() {
            let written = self.file.write_all_at(&self.bytes, self.start);
            written.map_err(failed("written"))?;
            self.bytes.clear();
        }
        Ok(())
    }

    /// The page that lies at `at` in the region, and at `place` in the file.
    pub(crate) fn page(&mut self, region: &GuestRegionMmap<()>, at: usize, place: u64) -> Result<(), MemoryError> {
        copy_page(region, at, &mut *self.page)?;
        self.add(place)
    }

    /// The page that lies at `place` in files, and nowhere else.
    fn page_of(&mut self, layers: &Layers, place: u64) -> Result<(), MemoryError> {
        layers.read(place / PAGE as u64, &mut self.page)?;
        self.add(place)
    }

    fn add(&mut self, place: u64) -> Result<(), MemoryError> {
        if self.page.iter().all(|&byte| byte == 0) {
            return Ok(());
        }
        self.image.add(place / PAGE as u64, &*self.page, &mut self.stride);
        let follows = self.start + self.bytes.len() as u64 == place;
        if !follows || self.bytes.len() == RUN_PAGES * PAGE {
            self.flush()?;
        }
        if self.bytes.is_empty() {
            self.start = place;
        }
        self.bytes.extend_from_slice(&*self.page);
        Ok(())
    }

    pub(crate) fn finish(mut self) -> Result<Image, MemoryError> {
        self.flush()?;
        Ok(self.image)
    }
}

/// What is in the page at `at` of a region.
pub(crate) fn copy_page(region: &GuestRegionMmap<()>, at: usize, page: &mut [u8]) -> Result<(), MemoryError> {
    let all = region.as_volatile_slice().ok();
    let slice = all.and_then(|all| all.subslice(at, PAGE).ok());
    slice.ok_or(MemoryError::Layout(ByteSize(region.len())))?.copy_to(page);
    Ok(())
}

/// Calls `each` with what the page map says of every page, those that nobody has ever touched excepted unless `untouched`: the
/// region, the offset in it and the place in a file. A large guest has touched few of its pages. Of memory that came zeroed the page map
/// does not tell that: all of its pages are touched and changed.
pub(crate) fn each_page(
    ram: &Ram,
    pagemap: Option<&File>,
    untouched: bool,
    mut each: impl FnMut(&GuestRegionMmap<()>, usize, u64, Entry) -> Result<(), MemoryError>,
) -> Result<(), MemoryError> {
    let mut offset = 0;
    let mut bytes = Vec::new();
    let zeroed = &ram.zeroed;
    for region in ram.regions() {
        for first in (0..region.size()).step_by(CHUNK_PAGES * PAGE) {
            let last = region.size().min(first + CHUNK_PAGES * PAGE);
            // All of it is, or nothing.
            let told = pagemap.filter(|_| !zeroed.overlaps(offset + first as u64..offset + last as u64));
            let read = entries(region, (first, last), told, &mut bytes);
            let entries = read.map_err(failed("written: page map"))?;
            for (at, entry) in (first..last).step_by(PAGE).zip(entries) {
                let entry = Entry::of(*entry);
                if entry.is_touched() || untouched {
                    each(region, at, offset + at as u64, entry)?;
                }
            }
        }
        offset += region.len();
    }
    Ok(())
}

impl Ram {
    /// Writes all pages that have content to `file`, which must be empty, and gives it the size of the memory. Nothing may
    /// change the memory meanwhile. `pagemap` is this process's `/proc/self/pagemap`.
    ///
    /// # Errors
    /// The file is not empty, or the host refused.
    pub fn write_image(&self, file: &File, pagemap: Option<&File>) -> Result<Image, MemoryError> {
        let mut writer = Writer::new(file, self)?;
        let pagemap = pagemap.filter(|_| !self.mixed);
        let paged = self.pager.as_ref().map(|pager| pager.layers());
        let below = self.layers().or(paged);
        let mut extents = Extents::new(below);
        each_page(self, pagemap, below.is_some(), |region, at, place, entry| {
            let touched = entry.is_touched();
            if !touched && !extents.has(place)? {
                return Ok(());
            }
            match paged {
                // It has not come yet, and need not.
                Some(layers) if !touched => writer.page_of(layers, place),
                _ => writer.page(region, at, place),
            }
        })?;
        writer.finish()
    }
}

/// What the page map says of the pages between two offsets of a region, in `bytes`; that all are touched where nobody can tell.
pub(crate) fn entries<'b>(
    region: &GuestRegionMmap<()>,
    (first, last): (usize, usize),
    pagemap: Option<&File>,
    bytes: &'b mut Vec<u8>,
) -> io::Result<&'b [[u8; ENTRY]]> {
    let count = (last - first) / PAGE;
    bytes.resize(count * ENTRY, 0);
    match pagemap {
        Some(pagemap) => {
            let number = (region.as_ptr().addr() + first) / PAGE;
            pagemap.read_exact_at(bytes, (number * ENTRY) as u64)?;
        }
        None => bytes.as_chunks_mut::<ENTRY>().0.fill(TOUCHED.to_le_bytes()),
    }
    Ok(bytes.as_chunks::<ENTRY>().0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;
    use std::sync::Arc;
    use vm_memory::{Bytes, GuestAddress};

    fn pagemap() -> Option<File> {
        Some(File::open("/proc/self/pagemap").unwrap())
    }

    fn mapped(file: &File, image: &Image) -> Ram {
        let layers = Layers::single(Arc::new(file.try_clone().unwrap()), image.clone());
        Ram::from_layers(layers, SIZE).unwrap()
    }

    const SIZE: ByteSize = ByteSize::mib(64);
    const PLACES: [u64; 5] = [0, 0x1000, 0x20_3ff8, 0x100_0000, (64 << 20) - 8];

    fn filled() -> Ram {
        let ram = Ram::allocate(SIZE).unwrap();
        for place in PLACES {
            ram.guest().write_obj(place | 1, GuestAddress(place)).unwrap();
        }
        // Touched, and nothing in it.
        ram.guest().write_obj(0_u64, GuestAddress(0x30_0000)).unwrap();
        ram
    }

    #[test]
    fn what_was_written_is_there_again_and_the_rest_is_holes() {
        for pagemap in [pagemap(), None] {
            let file = tempfile::tempfile().unwrap();
            let image = filled().write_image(&file, pagemap.as_ref()).unwrap();
            assert_eq!(image.pages, PLACES.len() as u64);
            let metadata = file.metadata().unwrap();
            assert_eq!(metadata.len(), SIZE.bytes());
            assert!(metadata.blocks() * 512 <= 16 * PAGE as u64, "{}", metadata.blocks());
            image.check(&file).unwrap();
            let copy = mapped(&file, &image);
            for place in PLACES {
                let value: u64 = copy.guest().read_obj(GuestAddress(place)).unwrap();
                assert_eq!(value, place | 1);
            }
            assert_eq!(copy.guest().read_obj::<u64>(GuestAddress(0x5000)).unwrap(), 0);
        }
    }

    #[test]
    fn a_copy_is_its_own_and_can_be_written_again() {
        let (file, second, third) = (
            tempfile::tempfile().unwrap(),
            tempfile::tempfile().unwrap(),
            tempfile::tempfile().unwrap(),
        );
        let first = filled().write_image(&file, pagemap().as_ref()).unwrap();
        let copy = mapped(&file, &first);
        // Pages that the copy has never looked at come along all the same.
        let unchanged = copy.write_image(&second, pagemap().as_ref()).unwrap();
        assert_eq!(unchanged, first);
        copy.guest().write_obj(9_u64, GuestAddress(0x1000)).unwrap();
        copy.guest().write_obj(9_u64, GuestAddress(0x7000)).unwrap();
        // A page that was made empty again.
        copy.guest().write_obj(0_u64, GuestAddress(0x100_0000)).unwrap();
        first.check(&file).unwrap();
        let image = copy.write_image(&third, pagemap().as_ref()).unwrap();
        assert_eq!(image.pages, first.pages);
        let again = mapped(&third, &image);
        for (place, value) in [
            (0, 1),
            (0x1000, 9),
            (0x7000, 9),
            (0x100_0000, 0),
            (0x20_3ff8, 0x20_3ff9),
        ] {
            assert_eq!(
                again.guest().read_obj::<u64>(GuestAddress(place)).unwrap(),
                value,
                "{place:#x}"
            );
        }
    }

    #[test]
    fn witnesses_are_spread_and_know_a_changed_file() {
        let ram = Ram::allocate(SIZE).unwrap();
        for page in 1..1000 {
            ram.guest().write_obj(page, GuestAddress(page * PAGE as u64)).unwrap();
        }
        let file = tempfile::tempfile().unwrap();
        let image = ram.write_image(&file, pagemap().as_ref()).unwrap();
        assert!((MAX_WITNESSES / 2..=MAX_WITNESSES).contains(&image.witnesses.len()));
        let gaps: Vec<_> = image
            .witnesses
            .windows(2)
            .map(|pair| pair[1].page - pair[0].page)
            .collect();
        assert!(gaps.iter().all(|gap| *gap == gaps[0]), "{gaps:?}");
        let at = image.witnesses[3].page * PAGE as u64;
        file.write_all_at(&[0xff], at).unwrap();
        let error = image.check(&file).unwrap_err();
        assert!(matches!(error, MemoryError::OtherImage(_)), "{error}");
    }

    #[test]
    fn files_of_another_size_are_refused() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(SIZE.bytes() - 4096).unwrap();
        let layers = Layers::single(Arc::new(file.try_clone().unwrap()), Image::default());
        let error = Ram::from_layers(layers, SIZE).unwrap_err();
        assert!(matches!(error, MemoryError::ImageSize { .. }), "{error}");
        let error = filled().write_image(&file, None).unwrap_err();
        assert!(matches!(error, MemoryError::NotEmpty(_)), "{error}");
    }
}
