//! Guest memory that lies in several files: the lowest has all pages, each further one what had changed since the one before
//! it was written. Only the pages that changed are written, and only they are mapped over the lowest file's.
//!
//! ```text
//!  file 2         ██            ████       what changed since file 1 was written
//!  file 1   ████        ██████             what changed since file 0 was written
//!  file 0   ████████████████████████████   all pages; those without content are holes
//! ```
//! Files of a machine that could plug nothing end where that begins which can be plugged in those that go on from it: there they have
//! nothing.
//!
//! What has changed is not logged but read off: memory is a private mapping of its files, so whatever was written since, by the
//! guest, by a device's thread or by the kernel for one, is a page of this process's own, and the kernel's page map says
//! which are.

use std::ffi::c_void;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

use base::ByteSize;
use base::sparse::blocks_with_data;
use rustix::mm::{Advice, MapFlags, madvise, mmap};
use vm_memory::{Address as _, GuestMemoryRegion};

use crate::image::{Writer, copy_page, each_page, failed};
use crate::layout::MemorySize;
use crate::zeroed::ZeroedPieces;
use crate::{HUGE_PAGE, Image, MemoryError, PAGE, PROTECTION, Ram, SHARING};

/// The most files of one memory: each costs whoever maps it, and keeps what the others have long replaced.
pub const MAX_LAYERS: usize = 8;

/// The most runs of pages that are written at a time: each is a mapping of its own, of which a process can have some 65 000
/// (`vm.max_map_count`).
const MAX_RUNS: usize = 1024;

/// So many pages that have not changed are written between two that have: a mapping less for everybody who is restored from them, for 32 KiB
/// at most of a file that all of them share. docs/benchmarks/history.md has what it comes to.
const NEAR: u64 = 8;

/// Pages that follow each other and lie in one file other than the lowest, at the place that they have in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The first page's number.
    pub first: u64,
    /// How many.
    pub pages: u64,
    /// The file's number.
    pub file: usize,
}

impl Segment {
    fn end(&self) -> u64 {
        self.first.saturating_add(self.pages)
    }

    /// The same in bytes.
    pub(crate) fn places(&self) -> Range<u64> {
        self.first * PAGE as u64..self.end() * PAGE as u64
    }
}

/// One file, and what is known of it.
#[derive(Clone, Debug)]
pub struct Layer {
    /// The file.
    pub file: Arc<File>,
    /// What was written to it.
    pub image: Image,
}

/// All files of a memory, the lowest first.
#[derive(Clone, Debug)]
pub struct Layers {
    files: Vec<Layer>,
    /// By rising numbers of pages; what is in none lies in the lowest file.
    segments: Vec<Segment>,
}

/// What was written of a memory.
#[derive(Debug)]
pub enum Written {
    /// All of it: the file is a memory by itself.
    Whole(Image),
    /// What had changed; these runs of pages, by first page and number.
    Changes(Image, Vec<(u64, u64)>),
}

impl Layers {
    /// One file with all pages.
    pub fn single(file: Arc<File>, image: Image) -> Self {
        Self {
            files: vec![Layer { file, image }],
            segments: Vec::new(),
        }
    }

    /// The same with another descriptor of the newest file.
    ///
    /// # Errors
    /// It is another file.
    pub fn with_newest(mut self, file: File) -> Result<Self, MemoryError> {
        let identity = |file: &File| {
            let metadata = file.metadata().map_err(failed("looked at"))?;
            Ok::<_, MemoryError>((metadata.dev(), metadata.ino()))
        };
        let newest = self.files.last_mut().ok_or(MemoryError::Segments(0))?;
        if identity(&newest.file)? != identity(&file)? {
            return Err(MemoryError::OtherFile);
        }
        newest.file = Arc::new(file);
        Ok(self)
    }

    /// Files, and which of their pages count. Whether that makes sense is found out when they are mapped.
    pub fn new(files: Vec<Layer>, segments: Vec<Segment>) -> Self {
        Self { files, segments }
    }

    /// The files, the lowest first.
    pub fn files(&self) -> &[Layer] {
        &self.files
    }

    /// What lies in other files than the lowest.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    pub(crate) fn base(&self) -> Result<&Arc<File>, MemoryError> {
        let base = self.files.first().map(|layer| &layer.file);
        base.ok_or(MemoryError::Segments(0))
    }

    /// Whether a page lies in another file than the lowest.
    pub(crate) fn covers(&self, page: u64) -> bool {
        self.file_of(page) != 0
    }

    /// The number of the file that a page lies in.
    fn file_of(&self, page: u64) -> usize {
        let after = self.segments.partition_point(|segment| segment.first <= page);
        let before = after.checked_sub(1).and_then(|index| self.segments.get(index));
        before
            .filter(|segment| page < segment.end())
            .map_or(0, |segment| segment.file)
    }

    /// What a page holds.
    pub(crate) fn read(&self, page: u64, bytes: &mut [u8; PAGE]) -> Result<(), MemoryError> {
        let layer = self
            .files
            .get(self.file_of(page))
            .ok_or(MemoryError::Segments(self.files.len()))?;
        match layer.file.read_exact_at(bytes, page * PAGE as u64) {
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                bytes.fill(0);
                Ok(())
            }
            read => read.map_err(failed("read")),
        }
    }

    /// Checks that the files of a memory of this size are those that were written.
    ///
    /// # Errors
    /// One is another, or cannot be read, or the segments make no sense.
    pub fn check_content(&self, size: impl Into<MemorySize>) -> Result<(), MemoryError> {
        self.check(size.into())?;
        self.files.iter().try_for_each(|layer| layer.image.check(&layer.file))
    }

    /// The same with one file more, of whose pages these runs, by rising numbers, count from now on.
    #[must_use]
    pub fn with(&self, layer: Layer, runs: &[(u64, u64)]) -> Self {
        let mut files = self.files.clone();
        let file = files.len();
        files.push(layer);
        let new = runs.iter().map(|&(first, pages)| Segment { first, pages, file });
        let mut segments: Vec<Segment> = new.collect();
        let over = segments.clone();
        for old in &self.segments {
            // What is left of it between those that lie over it.
            let mut first = old.first;
            let begin = over.partition_point(|run| run.end() <= old.first);
            for run in over.iter().skip(begin).take_while(|run| run.first < old.end()) {
                if run.first > first {
                    let pages = run.first - first;
                    segments.push(Segment { first, pages, ..*old });
                }
                first = run.end();
            }
            if first < old.end() {
                let pages = old.end() - first;
                segments.push(Segment { first, pages, ..*old });
            }
        }
        segments.sort_unstable_by_key(|segment| segment.first);
        Self { files, segments }
    }

    /// Checks that the files have the memory's size, but those below, which may be of when nothing could be plugged; and that the segments lie
    /// in them, one behind the other. A state's file can be anybody's.
    pub(crate) fn check(&self, size: MemorySize) -> Result<(), MemoryError> {
        let wrong = || MemoryError::Segments(self.files.len());
        if self.files.is_empty() || self.files.len() > MAX_LAYERS {
            return Err(wrong());
        }
        let mut lengths = Vec::with_capacity(self.files.len());
        for layer in &self.files {
            let found = layer.file.metadata().map_err(failed("looked at"))?.len();
            let is_below = lengths.len() + 1 < self.files.len();
            let is_short = is_below && found == size.boot.bytes() && lengths.iter().all(|length| *length == found);
            if found != size.all().bytes() && !is_short {
                return Err(MemoryError::ImageSize {
                    expected: size.all().bytes(),
                    found,
                });
            }
            lengths.push(found);
        }
        let mut end = 0;
        for segment in &self.segments {
            let length = lengths.get(segment.file).filter(|_| segment.file > 0);
            let in_its_file = length.is_some_and(|length| segment.end() <= length / PAGE as u64);
            if !in_its_file || segment.pages == 0 || segment.first < end {
                return Err(wrong());
            }
            end = segment.end();
        }
        Ok(())
    }
}

impl Ram {
    /// Writes what has changed since the memory was mapped, or all of it where that cannot be told or would make too many files.
    /// Otherwise as [`Ram::write_image`].
    ///
    /// # Errors
    /// The file is not empty, or the host refused.
    pub fn write_changes(&self, file: &File, pagemap: Option<&File>) -> Result<Written, MemoryError> {
        let below = self.layers().filter(|layers| layers.files().len() < MAX_LAYERS);
        let (Some(_), Some(pagemap)) = (below, pagemap) else {
            return self.write_image(file, pagemap).map(Written::Whole);
        };
        let runs = fewer(joined(self.changed(pagemap)?, NEAR), MAX_RUNS);
        let mut writer = Writer::new(file, self)?;
        for &(first, pages) in &runs {
            for page in first..first + pages {
                let place = page * PAGE as u64;
                let (region, at) = self.at(place)?;
                writer.page(region, at, place)?;
            }
        }
        Ok(Written::Changes(writer.finish()?, runs))
    }

    /// Runs of pages that have changed since the memory was mapped, by first page and number.
    fn changed(&self, pagemap: &File) -> Result<Vec<(u64, u64)>, MemoryError> {
        const BLOCK: u64 = (HUGE_PAGE / PAGE) as u64;
        let mut changed = Vec::new();
        for (first, pages) in self.marked_changed(pagemap)? {
            let (mut start, end) = (first, first + pages);
            let mut block = first.next_multiple_of(BLOCK);
            while block + BLOCK <= end {
                // What came zeroed is to be in the newest file, so that this takes its place when the memory is mapped from that.
                let places = block * PAGE as u64..(block + BLOCK) * PAGE as u64;
                if !self.zeroed.overlaps(places) && self.is_the_lowest_files(block, BLOCK)? {
                    changed.extend((start < block).then_some((start, block - start)));
                    start = block + BLOCK;
                }
                block += BLOCK;
            }
            changed.extend((start < end).then_some((start, end - start)));
        }
        Ok(changed)
    }

    /// Whether pages are, by their content, still those of the lowest file.
    fn is_the_lowest_files(&self, first: u64, pages: u64) -> Result<bool, MemoryError> {
        let Some(layers) = self.layers() else { return Ok(false) };
        if (first..first + pages).any(|page| layers.covers(page)) {
            return Ok(false);
        }
        /// What is read of the file at a time.
        const PIECE: usize = 16;
        let (mut here, mut there) = ([0; PAGE], vec![0; PAGE * PIECE]);
        for piece in (first..first + pages).step_by(PIECE) {
            match layers.base()?.read_exact_at(&mut there, piece * PAGE as u64) {
                // It has nothing there.
                Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(false),
                read => read.map_err(failed("read"))?,
            }
            for (page, there) in (piece..).zip(there.chunks_exact(PAGE)) {
                let (region, at) = self.at(page * PAGE as u64)?;
                copy_page(region, at, &mut here)?;
                if here != there {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// The same runs as the page map tells of them. Linux before 6.11 does not say of what it has mapped of a file by a huge page that
    /// it is the file's, so that it looks changed, all of it.
    fn marked_changed(&self, pagemap: &File) -> Result<Vec<(u64, u64)>, MemoryError> {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        each_page(self, Some(pagemap), false, |_, _, place, entry| {
            if entry.is_changed() {
                let page = place / PAGE as u64;
                match runs.last_mut() {
                    Some((first, pages)) if *first + *pages == page => *pages += 1,
                    _ => runs.push((page, 1)),
                }
            }
            Ok(())
        })?;
        Ok(runs)
    }

    /// Runs of pages that have changed since the memory was mapped, by first page and number; of the lowest ones, as many as
    /// `most` pages hold. None where that cannot be told, as in memory that came zeroed.
    ///
    /// # Errors
    /// The page map cannot be read.
    pub fn write_set(&self, pagemap: Option<&File>, most: u64) -> Result<Vec<(u64, u64)>, MemoryError> {
        let (Some(_), Some(pagemap)) = (self.layers(), pagemap) else {
            return Ok(Vec::new());
        };
        let mut left = most;
        // The page map says of what came zeroed that it is a file's, so that nothing of it has changed.
        let told = Self {
            zeroed: ZeroedPieces::default(),
            ..self.clone()
        };
        let mut runs = told.changed(pagemap)?;
        runs.retain(|(_, pages)| {
            let fits = *pages <= left;
            left = if fits { left - pages } else { 0 };
            fits
        });
        runs.truncate(MAX_RUNS);
        Ok(runs)
    }

    /// Copies pages of the files before anybody writes to them: each is a page of this process's own then, which costs its first
    /// writer nothing. It makes no difference to what is in the memory, so nothing of it is an error: runs that the memory does not
    /// have are left out, and a host that cannot copy ahead (Linux before 5.14) copies when the pages are written.
    #[allow(unsafe_code, reason = "pages are written to as they are")]
    pub fn populate_write(&self, runs: &[(u64, u64)]) {
        let end = self.sizes().all().bytes() / PAGE as u64;
        for &(first, pages) in runs {
            if first.checked_add(pages).is_none_or(|last| last > end) {
                log::warn!(
                    "a write set has pages that {} of memory do not: {pages} from {first}",
                    self.sizes().all()
                );
                continue;
            }
            let copied = self.each_part(first, pages, |address, bytes, _| {
                // SAFETY: 1. the range lies within one region's mapping, which the region keeps; 2. the content of its pages
                // stays what it is.
                let copied = unsafe { madvise(address, bytes, Advice::LinuxPopulateWrite) };
                copied.map_err(|error| failed("copied")(error.into()))
            });
            if let Err(error) = copied {
                log::debug!("pages are copied when they are written: {error}");
                return;
            }
        }
    }

    /// Where the guest has these pages: addresses and bytes, in pieces of one region each. As with [`Ram::populate_write`] runs that the
    /// memory does not have are left out.
    pub fn guest_ranges(&self, runs: &[(u64, u64)]) -> Vec<(u64, u64)> {
        let mut ranges = Vec::with_capacity(runs.len());
        let end = self.sizes().all().bytes();
        for &(first, pages) in runs {
            let last = first.checked_add(pages).and_then(|last| last.checked_mul(PAGE as u64));
            let Some(last) = last.filter(|last| *last <= end) else {
                continue;
            };
            let mut place = first * PAGE as u64;
            while place < last
                && let Ok((region, at)) = self.at(place)
            {
                let length = (last - place).min(region.len() - at as u64);
                ranges.push((region.start_addr().raw_value() + at as u64, length));
                place += length;
            }
        }
        ranges
    }

    /// Reads all that the files have into the host's page cache, and maps it: no access has to wait for a disk later, and none but the first
    /// write to a page costs a fault. As with [`Ram::populate_write`] nothing of it is an error.
    #[allow(unsafe_code, reason = "pages are read as they are")]
    pub fn populate_read(&self) {
        /// What is looked at: smaller holes are read as well.
        const PIECE: u64 = 64 << 10;
        let Some(layers) = self.layers() else { return };
        let read = || {
            let whole = 0..self.sizes().all().bytes();
            let mut runs: Vec<_> = blocks_with_data(layers.base()?, whole, PIECE).map_err(failed("looked at"))?;
            let others = layers.segments().iter();
            runs.extend(others.map(Segment::places));
            for run in runs {
                let (first, last) = (run.start / PAGE as u64, run.end.div_ceil(PAGE as u64));
                self.each_part(first, last - first, |address, bytes, _| {
                    // SAFETY: 1. the range lies within one region's mapping, which the region keeps; 2. nothing is written.
                    let read = unsafe { madvise(address, bytes, Advice::LinuxPopulateRead) };
                    read.map_err(|error| failed("read")(error.into()))
                })?;
            }
            Ok::<_, MemoryError>(())
        };
        if let Err(error) = read() {
            log::warn!("memory is read when it is touched: {error}");
        }
    }

    /// Makes the memory what it is mapped from, by forgetting what has changed since; without a page map by forgetting all that is
    /// mapped. What came zeroed goes. Nothing may access the memory meanwhile.
    ///
    /// # Errors
    /// It is not mapped from files, or the host refused.
    #[allow(unsafe_code, reason = "pages are given back")]
    pub fn drop_changes(&self, pagemap: Option<&File>) -> Result<(), MemoryError> {
        if self.layers().is_none() {
            return Err(MemoryError::Segments(0));
        }
        // First, as the page map tells nothing of it, and a shared file would keep what is forgotten here.
        self.put_back_zeroed()?;
        let whole = || vec![(0, self.sizes().all().bytes() / PAGE as u64)];
        let runs = pagemap.map_or_else(|| Ok(whole()), |pagemap| self.marked_changed(pagemap))?;
        for (first, pages) in runs {
            self.each_part(first, pages, |address, bytes, _| {
                // SAFETY: 1. the range lies within one region's mapping, which the region keeps; 2. it is a private mapping of a
                // file, so what is there next is the file's content; 3. nothing refers to what is in it but by volatile
                // accesses of the region.
                let dropped = unsafe { madvise(address, bytes, Advice::LinuxDontNeed) };
                dropped.map_err(|error| failed("mapped")(error.into()))
            })?;
        }
        Ok(())
    }

    /// Maps, in place of what it has of its own, files that hold the same. Nothing may access the memory meanwhile. If it fails
    /// the content is what it was, and what was written to which file is forgotten.
    ///
    /// # Errors
    /// The layers make no sense, or the host cannot map them.
    pub fn rebase(&mut self, layers: Layers) -> Result<(), MemoryError> {
        // Without what can be plugged they are those of `Ram::without_hotplug`.
        let without = MemorySize {
            hotplug: ByteSize(0),
            ..self.sizes()
        };
        if layers.check(without).is_err() {
            layers.check(self.sizes())?;
        }
        // Only what was written last is not mapped yet; with one file that is everything.
        let newest = layers.files().len() - 1;
        let length = layers.base()?.metadata().map_err(failed("looked at"))?.len();
        let pages = length / PAGE as u64;
        let whole = [Segment {
            first: 0,
            pages,
            file: 0,
        }];
        let segments = match newest {
            0 => &whole,
            _ => layers.segments(),
        };
        // Until all is mapped nobody can tell what lies where.
        (self.layers, self.mixed) = (None, true);
        for segment in segments.iter().filter(|segment| segment.file == newest) {
            let layer = layers.files().get(newest).ok_or(MemoryError::Segments(newest))?;
            self.map(segment, &layer.file)?;
            self.zeroed.replaced(segment.places());
        }
        (self.layers, self.mixed) = (Some(layers), false);
        // Nothing is left that it could bring.
        self.pager = None;
        Ok(())
    }

    /// Maps a segment of its layers over the lowest file's pages.
    pub(crate) fn map_over(&self, segment: &Segment) -> Result<(), MemoryError> {
        let layers = self.layers().map(Layers::files).unwrap_or_default();
        let layer = layers.get(segment.file).ok_or(MemoryError::Segments(layers.len()))?;
        self.map(segment, &layer.file)
    }

    /// The region of a place in a file, and the offset in it.
    pub(crate) fn at(&self, place: u64) -> Result<(&vm_memory::GuestRegionMmap<()>, usize), MemoryError> {
        let mut start = 0;
        for region in self.regions() {
            if place - start < region.len() {
                let at = usize::try_from(place - start).map_err(|_| MemoryError::Layout(self.sizes().all()))?;
                return Ok((region, at));
            }
            start += region.len();
        }
        Err(MemoryError::Layout(self.sizes().all()))
    }

    /// Maps pages of a file, which has them, where the same pages are now.
    #[allow(unsafe_code, reason = "a part of a region is mapped anew")]
    pub(crate) fn map(&self, segment: &Segment, file: &File) -> Result<(), MemoryError> {
        self.each_part(segment.first, segment.pages, |address, bytes, place| {
            // SAFETY: 1. the range lies within one region's mapping, which the region keeps and unmaps as a whole; 2. nothing
            // refers to what is in it but by volatile accesses of the region, which find memory there before and after; 3. of a file
            // that has all of the segment, as `Layers::check` has found, no page of the mapping lies behind the end.
            let mapped = unsafe { mmap(address, bytes, PROTECTION, SHARING.union(MapFlags::FIXED), file, place) };
            mapped.map(drop).map_err(|error| failed("mapped")(error.into()))
        })
    }

    /// Calls `each` with address, length in bytes and place in a file of what lies within one region of a run of pages.
    pub(crate) fn each_part(
        &self,
        first: u64,
        pages: u64,
        mut each: impl FnMut(*mut c_void, usize, u64) -> Result<(), MemoryError>,
    ) -> Result<(), MemoryError> {
        let (mut place, end) = (first * PAGE as u64, first.saturating_add(pages) * PAGE as u64);
        while place < end {
            let (region, at) = self.at(place)?;
            let length = (end - place).min(region.len() - at as u64);
            let bytes = usize::try_from(length).map_err(|_| MemoryError::Layout(self.sizes().all()))?;
            each(region.as_ptr().wrapping_add(at).cast(), bytes, place)?;
            place += length;
        }
        Ok(())
    }
}

/// The same pages and those between them, where no more than `near` lie between two runs.
fn joined(runs: Vec<(u64, u64)>, near: u64) -> Vec<(u64, u64)> {
    let mut joined: Vec<(u64, u64)> = Vec::with_capacity(runs.len());
    for (first, pages) in runs {
        match joined.last_mut() {
            Some(last) if first - last.0 - last.1 <= near => last.1 = first + pages - last.0,
            _ => joined.push((first, pages)),
        }
    }
    joined
}

/// At most so many runs that hold at least the same pages: the smallest gaps between them are filled.
fn fewer(runs: Vec<(u64, u64)>, most: usize) -> Vec<(u64, u64)> {
    let Some(surplus) = runs.len().checked_sub(most).filter(|surplus| *surplus > 0) else {
        return runs;
    };
    let gap = |pair: &[(u64, u64)]| pair[1].0 - pair[0].0 - pair[0].1;
    let mut gaps: Vec<u64> = runs.windows(2).map(gap).collect();
    let (_, &mut widest, _) = gaps.select_nth_unstable(surplus - 1);
    joined(runs, widest)
}

#[cfg(test)]
mod tests;
