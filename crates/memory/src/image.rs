//! Guest memory as a sparse file: RAM region after region, pages without content as holes. Written from memory that
//! stands still, and mapped privately by any number of VMs afterwards.
//!
//! Which pages are worth a look is told by two things, so that untouched ones are not read: the kernel's page map of this
//! process (what the guest or a device has touched), and the data of the file that the memory was mapped from, if it was
//! mapped from one. Without a page map all pages are read.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::SeekFrom;
use vm_memory::{GuestMemoryRegion, GuestRegionMmap};

use crate::{MemoryError, PAGE, Ram};

/// What one look at the page map covers: 2 MiB of memory, 4 KiB of entries.
const CHUNK_PAGES: usize = 512;

/// Bytes of an entry of the page map (Documentation/admin-guide/mm/pagemap.rst).
const ENTRY: usize = 8;

/// The entry's bits 62 (swapped) and 63 (present).
const TOUCHED: u64 = 0b11 << 62;

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
    fn add(&mut self, page: u64, bytes: &[u8], stride: &mut u64) {
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

fn failed(what: &'static str) -> impl Fn(io::Error) -> MemoryError {
    move |source| MemoryError::Image { what, source }
}

/// Where a file has data, asked for with rising offsets.
struct Extents<'a> {
    file: Option<&'a File>,
    /// The extent found last.
    start: u64,
    end: u64,
}

impl<'a> Extents<'a> {
    fn new(file: Option<&'a File>) -> Self {
        Self { file, start: 0, end: 0 }
    }

    /// Whether there is data in `length` bytes from `offset` on.
    fn has(&mut self, offset: u64, length: u64) -> io::Result<bool> {
        let Some(file) = self.file else { return Ok(false) };
        if offset >= self.end {
            match rustix::fs::seek(file, SeekFrom::Data(offset)) {
                Ok(start) => {
                    self.start = start;
                    self.end = rustix::fs::seek(file, SeekFrom::Hole(start))?;
                }
                // No more data in this file.
                Err(rustix::io::Errno::NXIO) => (self.start, self.end) = (u64::MAX, u64::MAX),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(self.start < offset.saturating_add(length))
    }
}

/// Pages with content that follow each other and are not written yet.
struct Run {
    start: u64,
    bytes: Vec<u8>,
}

impl Run {
    fn flush(&mut self, file: &File) -> io::Result<()> {
        if !self.bytes.is_empty() {
            file.write_all_at(&self.bytes, self.start)?;
            self.bytes.clear();
        }
        Ok(())
    }

    fn push(&mut self, file: &File, at: u64, page: &[u8]) -> io::Result<()> {
        let follows = self.start + self.bytes.len() as u64 == at;
        if !follows || self.bytes.len() == RUN_PAGES * PAGE {
            self.flush(file)?;
        }
        if self.bytes.is_empty() {
            self.start = at;
        }
        self.bytes.extend_from_slice(page);
        Ok(())
    }
}

impl Ram {
    /// Checks that what it was mapped from is what `image` tells of.
    ///
    /// # Errors
    /// It is another file, or cannot be read.
    pub fn check_image(&self, image: &Image) -> Result<(), MemoryError> {
        self.image.as_ref().map_or(Ok(()), |file| image.check(file))
    }

    /// Writes all pages that have content to `file`, which must be empty, and gives it the size of the memory. Nothing may
    /// change the memory meanwhile. `pagemap` is this process's `/proc/self/pagemap`.
    ///
    /// # Errors
    /// The file is not empty, or the host refused.
    pub fn write_image(&self, file: &File, pagemap: Option<&File>) -> Result<Image, MemoryError> {
        let metadata = file.metadata().map_err(failed("looked at"))?;
        if !metadata.is_file() || metadata.len() != 0 {
            return Err(MemoryError::NotEmpty(metadata.len()));
        }
        file.set_len(self.size().bytes()).map_err(failed("enlarged"))?;
        let mut image = Image::default();
        let mut stride = 1;
        let mut base = Extents::new(self.image.as_deref());
        let mut run = Run {
            start: 0,
            bytes: Vec::with_capacity(RUN_PAGES * PAGE),
        };
        let mut offset = 0;
        for region in &self.regions {
            let mut page = vec![0; PAGE];
            for first in (0..region.size()).step_by(CHUNK_PAGES * PAGE) {
                let last = region.size().min(first + CHUNK_PAGES * PAGE);
                let touched = touched(region, first, last, pagemap).map_err(failed("written: page map"))?;
                for (at, touched) in (first..last).step_by(PAGE).zip(touched) {
                    let place = offset + at as u64;
                    if !touched && !base.has(place, PAGE as u64).map_err(failed("written: its base"))? {
                        continue;
                    }
                    let slice = region
                        .as_volatile_slice()
                        .ok()
                        .and_then(|all| all.subslice(at, PAGE).ok());
                    slice.ok_or(MemoryError::Layout(self.size()))?.copy_to(&mut page[..]);
                    if page.iter().any(|&byte| byte != 0) {
                        image.add(place / PAGE as u64, &page, &mut stride);
                        run.push(file, place, &page).map_err(failed("written"))?;
                    }
                }
            }
            offset += region.len();
        }
        run.flush(file).map_err(failed("written"))?;
        Ok(image)
    }
}

/// Which pages between two offsets of a region have been touched; all where nobody can tell.
fn touched(region: &GuestRegionMmap<()>, first: usize, last: usize, pagemap: Option<&File>) -> io::Result<Vec<bool>> {
    let count = (last - first) / PAGE;
    let Some(pagemap) = pagemap else {
        return Ok(vec![true; count]);
    };
    let mut entries = vec![0; count * ENTRY];
    let number = (region.as_ptr().addr() + first) / PAGE;
    pagemap.read_exact_at(&mut entries, (number * ENTRY) as u64)?;
    let entries = entries.as_chunks::<ENTRY>().0;
    Ok(entries
        .iter()
        .map(|entry| u64::from_le_bytes(*entry) & TOUCHED != 0)
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::ByteSize;
    use std::os::unix::fs::MetadataExt;
    use vm_memory::{Bytes, GuestAddress};

    fn pagemap() -> Option<File> {
        Some(File::open("/proc/self/pagemap").unwrap())
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
            let copy = Ram::from_image(file.try_clone().unwrap(), SIZE).unwrap();
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
        let copy = Ram::from_image(file.try_clone().unwrap(), SIZE).unwrap();
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
        let again = Ram::from_image(third, SIZE).unwrap();
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
        let error = Ram::from_image(file.try_clone().unwrap(), SIZE).unwrap_err();
        assert!(matches!(error, MemoryError::ImageSize { .. }), "{error}");
        let error = filled().write_image(&file, None).unwrap_err();
        assert!(matches!(error, MemoryError::NotEmpty(_)), "{error}");
    }
}
