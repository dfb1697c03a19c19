//! Which pages of a guest's boot memory are in its balloon, and which units of it are mapped. Plain sets: knows neither who maps nor a driver.

use memory::layout::Range;

/// What a balloon counts in (virtio 1.2, 5.5.6).
pub(super) const PAGE: u64 = 4096;

/// What is mapped at least: a page of the IOMMU's second size, which costs no more than a part of a larger piece.
const SMALLEST: u64 = 2 << 20;

/// A container takes 65 535 mappings: units are larger where there would be more than half as many.
const MOST_UNITS: u64 = 1 << 15;

#[derive(Clone, Debug)]
struct Unit {
    range: Range,
    /// How many of its pages are in the balloon.
    inflated: u64,
    /// How many pages were in the balloon when one of this unit was put in last, that one included: pages are taken back from the top.
    depth: u64,
    mapped: bool,
}

impl Unit {
    fn is_owned(&self) -> bool {
        self.inflated < self.range.length / PAGE
    }
}

/// Units of one region, from this one on.
#[derive(Debug)]
struct Region {
    range: Range,
    first: usize,
}

/// All of them.
#[derive(Debug)]
pub(super) struct Units {
    size: u64,
    regions: Vec<Region>,
    units: Vec<Unit>,
    /// A bit a page, in the order of the units, each of which has whole words.
    pages: Vec<u64>,
    inflated: u64,
}

impl Units {
    /// Of regions that begin at multiples of the units' size, with nothing in the balloon.
    pub(super) fn of(ranges: &[Range]) -> Self {
        let bytes: u64 = ranges.iter().map(|range| range.length).sum();
        let size = bytes.div_ceil(MOST_UNITS).next_power_of_two().max(SMALLEST);
        let (mut regions, mut units) = (Vec::new(), Vec::new());
        for &range in ranges {
            regions.push(Region {
                range,
                first: units.len(),
            });
            let starts = (0..range.length.div_ceil(size)).map(|index| index * size);
            units.extend(starts.map(|offset| Unit {
                range: Range {
                    start: range.start + offset,
                    length: size.min(range.length - offset),
                },
                inflated: 0,
                depth: 0,
                mapped: false,
            }));
        }
        let words = units.len() as u64 * (size / PAGE / u64::from(u64::BITS));
        Self {
            size,
            regions,
            units,
            pages: vec![0; usize::try_from(words).unwrap_or(0)],
            inflated: 0,
        }
    }

    /// Bytes of one.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// How many pages are in the balloon.
    pub(super) fn inflated(&self) -> u64 {
        self.inflated
    }

    pub(super) fn put_in(&mut self, pages: &[Range]) {
        let mut touched = Vec::new();
        for address in each_page(pages) {
            let Some((unit, word, bit)) = self.place(address) else {
                continue;
            };
            if self.pages[word] & bit == 0 {
                self.pages[word] |= bit;
                self.units[unit].inflated += 1;
                self.inflated += 1;
            }
            if touched.last() != Some(&unit) {
                touched.push(unit);
            }
        }
        // Those of one request are taken back in any order.
        for unit in touched {
            self.units[unit].depth = self.inflated;
        }
    }

    pub(super) fn take_out(&mut self, pages: &[Range]) {
        for address in each_page(pages) {
            let Some((unit, word, bit)) = self.place(address) else {
                continue;
            };
            if self.pages[word] & bit != 0 {
                self.pages[word] &= !bit;
                self.units[unit].inflated -= 1;
                self.inflated -= 1;
            }
        }
    }

    /// Nothing is in the balloon any more.
    pub(super) fn empty(&mut self) {
        self.pages.fill(0);
        self.inflated = 0;
        for unit in &mut self.units {
            (unit.inflated, unit.depth) = (0, 0);
        }
    }

    /// Those in which these pages lie and which are not mapped, ascending.
    pub(super) fn unmapped_of(&self, pages: &[Range]) -> Vec<Range> {
        let mut found = Vec::new();
        for range in pages {
            let end = range.start.saturating_add(range.length);
            let mut at = range.start;
            while at < end {
                if let Some(index) = self.unit_at(at).filter(|index| !self.units[*index].mapped) {
                    found.push(index);
                }
                at = (at / self.size + 1) * self.size;
            }
        }
        found.sort_unstable();
        found.dedup();
        found.into_iter().map(|index| self.units[index].range).collect()
    }

    /// Those that have to be mapped, ascending.
    pub(super) fn owned_and_unmapped(&self) -> Vec<Range> {
        let lacks = self.units.iter().filter(|unit| unit.is_owned() && !unit.mapped);
        lacks.map(|unit| unit.range).collect()
    }

    /// So many of those that are not mapped: those that are taken back first.
    pub(super) fn latest_unmapped(&self, most: usize) -> Vec<Range> {
        let mut unmapped: Vec<_> = self.units.iter().filter(|unit| !unit.mapped).collect();
        unmapped.sort_by_key(|unit| std::cmp::Reverse(unit.depth));
        unmapped.truncate(most);
        unmapped.into_iter().map(|unit| unit.range).collect()
    }

    /// The depth of the highest page in the balloon whose unit is not mapped.
    pub(super) fn unmapped_depth(&self) -> u64 {
        let depths = self.units.iter().filter(|unit| !unit.mapped).map(|unit| unit.depth);
        depths.max().unwrap_or(0)
    }

    /// All units from an address on, for so many bytes, are mapped.
    pub(super) fn map(&mut self, start: u64, length: u64) {
        let mut at = start;
        while at < start + length {
            if let Some(index) = self.unit_at(at) {
                self.units[index].mapped = true;
            }
            at += self.size;
        }
    }

    pub(super) fn unmap_all(&mut self) {
        for unit in &mut self.units {
            unit.mapped = false;
        }
    }

    fn unit_at(&self, address: u64) -> Option<usize> {
        let holds = |region: &&Region| {
            let offset = address.checked_sub(region.range.start);
            offset.is_some_and(|offset| offset < region.range.length)
        };
        let region = self.regions.iter().find(holds)?;
        let offset = usize::try_from((address - region.range.start) / self.size).ok()?;
        Some(region.first + offset)
    }

    /// The unit of a page, and its bit.
    fn place(&self, address: u64) -> Option<(usize, usize, u64)> {
        let unit = self.unit_at(address)?;
        let page = (address - self.units[unit].range.start) / PAGE;
        let (word, bit) = (page / u64::from(u64::BITS), page % u64::from(u64::BITS));
        let words = usize::try_from(self.size / PAGE / u64::from(u64::BITS)).ok()?;
        Some((unit, unit * words + usize::try_from(word).ok()?, 1 << bit))
    }
}

fn each_page(ranges: &[Range]) -> impl Iterator<Item = u64> {
    ranges
        .iter()
        .flat_map(|range| (0..range.length / PAGE).map(|page| range.start + page * PAGE))
}
