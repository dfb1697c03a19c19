//! Where MSI-X's table and pending bits are in a function's BARs: those are ours, and the pages around them can be the guest's. Data only.

use std::ops::Range;

use pci::msix;

/// A BAR's number, in the lowest bits of where something is (6.8.2.4).
const BAR_NUMBER: u32 = 7;

/// What can be mapped.
const PAGE: u64 = 4096;

/// Where bytes are: in which BAR, from where on, how many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    bar: usize,
    start: u64,
    length: u64,
}

impl Place {
    fn of(word: u32, length: u64) -> Self {
        Self {
            bar: (word & BAR_NUMBER) as usize,
            start: u64::from(word & !BAR_NUMBER),
            length,
        }
    }

    /// Whether it has bytes among those.
    fn overlaps(&self, bar: usize, range: &Range<u64>) -> bool {
        bar == self.bar && range.start < self.start + self.length && self.start < range.end
    }

    /// Where in it an access begins, if it does.
    pub(crate) fn hit(&self, bar: usize, offset: u64) -> Option<usize> {
        let within = offset.checked_sub(self.start).filter(|within| *within < self.length)?;
        usize::try_from(within).ok().filter(|_| bar == self.bar)
    }

    /// Whether all of it is in a BAR of this size.
    fn fits(&self, bars: &[u64]) -> bool {
        bars.get(self.bar).is_some_and(|size| self.start + self.length <= *size)
    }
}

/// A function's table and pending bits; nowhere, in a function that has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tables {
    /// MSI-X's table.
    pub(crate) table: Place,
    /// Its pending bits (6.8.2.10): whole words of 64.
    pub(crate) pending: Place,
}

impl Tables {
    /// Of so many vectors, out of the two registers that say where they are.
    pub(crate) fn of(vectors: u16, table: u32, pending: u32) -> Self {
        Self {
            table: Place::of(table, u64::from(vectors) * msix::ENTRY_SIZE as u64),
            pending: Place::of(pending, u64::from(vectors.div_ceil(64)) * 8),
        }
    }

    /// Whether both are in BARs of these sizes.
    pub(crate) fn fit(&self, bars: &[u64]) -> bool {
        self.table.fits(bars) && self.pending.fits(bars)
    }

    /// Of a BAR the pages that a guest may reach itself, in runs: those that the host lets us map and that have nothing of ours.
    pub(crate) fn open_pages(&self, bar: usize, mappable: &[Range<u64>]) -> Vec<Range<u64>> {
        let mut runs: Vec<Range<u64>> = Vec::new();
        for area in mappable {
            for page in area.start.div_ceil(PAGE)..area.end / PAGE {
                let bytes = page * PAGE..(page + 1) * PAGE;
                if self.table.overlaps(bar, &bytes) || self.pending.overlaps(bar, &bytes) {
                    continue;
                }
                match runs.last_mut() {
                    Some(run) if run.end == bytes.start => run.end = bytes.end,
                    _ => runs.push(bytes),
                }
            }
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(tables: &Tables, bar: usize, areas: &[(u64, u64)]) -> Vec<(u64, u64)> {
        let areas: Vec<_> = areas.iter().map(|&(start, end)| start..end).collect();
        let pages = tables.open_pages(bar, &areas);
        pages.iter().map(|run| (run.start, run.end)).collect()
    }

    #[test]
    fn tables_are_where_the_function_says() {
        let tables = Tables::of(65, 0x2000, 0x3000);
        let (table, pending) = (tables.table, tables.pending);
        assert_eq!((table.hit(0, 0x2000), table.hit(0, 0x240f)), (Some(0), Some(0x40f)));
        for (bar, offset) in [(0, 0x1fff), (0, 0x2410), (1, 0x2000), (0, u64::MAX)] {
            assert_eq!(table.hit(bar, offset), None, "{bar} {offset:#x}");
        }
        assert_eq!((pending.hit(0, 0x300f), pending.hit(0, 0x3010)), (Some(15), None));
        assert!(tables.fit(&[0x4000]) && !tables.fit(&[0x3008]) && !tables.fit(&[]));
    }

    #[test]
    fn pages_around_the_tables_are_the_guests() {
        let tables = Tables::of(65, 0x2000, 0x3000);
        assert_eq!(open(&tables, 0, &[(0, 0x6000)]), [(0, 0x2000), (0x4000, 0x6000)]);
        // The other BARs are the guest's as far as they are pages.
        assert_eq!(open(&tables, 2, &[(0, 0x1000)]), [(0, 0x1000)]);
        assert_eq!(open(&tables, 2, &[(0, 0x800)]), []);
        assert_eq!(open(&tables, 2, &[]), []);
        // Of what the host lets us map in parts, the whole pages.
        let sparse = [(0, 0x1800), (0x1800, 0x2000), (0x4800, 0x6000)];
        assert_eq!(open(&tables, 0, &sparse), [(0, 0x1000), (0x5000, 0x6000)]);
        assert_eq!(open(&Tables::default(), 0, &[(0, 0x2000)]), [(0, 0x2000)]);
    }
}
