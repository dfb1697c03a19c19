//! Which slot a new sandbox gets: its user, its addresses and its TAP follow from that number. One that has just become free
//! is the last to be given again, so that what still thinks of the old sandbox does not meet a new one. Pure numbers.

use std::collections::BTreeSet;

/// So many are gone through in turn even on a node with few sandboxes. Not all at once: each slot's first use costs its TAP.
const LEAST: u32 = 256;

/// Where the search for the next one begins.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Slots {
    next: u32,
}

impl Slots {
    /// Goes on behind `last`, the newest that is known.
    pub(crate) fn behind(last: Option<u32>) -> Self {
        Self {
            next: last.map_or(0, |last| last.wrapping_add(1)),
        }
    }

    /// What [`Slots::take`] would give next, if nobody went.
    pub(crate) fn coming(mut self, mut taken: BTreeSet<u32>, most: u32, count: usize) -> Vec<u32> {
        let mut coming = Vec::new();
        while coming.len() < count
            && let Some(slot) = self.take(&taken, most)
        {
            taken.insert(slot);
            coming.push(slot);
        }
        coming
    }

    /// Takes the next that is not among `taken`, of `most`; `None` when all are.
    pub(crate) fn take(&mut self, taken: &BTreeSet<u32>, most: u32) -> Option<u32> {
        let used = u32::try_from(taken.len()).unwrap_or(u32::MAX);
        let turn = used.saturating_mul(2).max(LEAST).min(most);
        let found = (0..turn)
            .map(|step| (self.next % turn + step) % turn)
            .find(|slot| !taken.contains(slot))?;
        self.next = found + 1;
        Some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_became_free_is_given_last() {
        let mut slots = Slots::default();
        let mut taken = BTreeSet::new();
        for expected in 0..3 {
            assert_eq!(slots.take(&taken, 4096), Some(expected));
            taken.insert(expected);
        }
        taken.remove(&1);
        let rest: Vec<_> = (0..LEAST - 2).filter_map(|_| slots.take(&taken, 4096)).collect();
        assert_eq!((rest.first(), rest.last()), (Some(&3), Some(&1)));
        assert_eq!(rest.len(), rest.iter().collect::<BTreeSet<_>>().len());
    }

    #[test]
    fn what_comes_is_what_is_taken() {
        let mut slots = Slots::behind(Some(LEAST - 3));
        let mut taken = BTreeSet::from([0, LEAST - 1]);
        let coming = slots.coming(taken.clone(), 4096, 3);
        assert_eq!(coming, [LEAST - 2, 1, 2]);
        for expected in coming {
            assert_eq!(slots.take(&taken, 4096), Some(expected));
            taken.insert(expected);
        }
        assert_eq!(slots.coming(BTreeSet::from([0, 1]), 3, 8), [2]);
    }

    #[test]
    fn a_later_daemon_goes_on_where_the_one_before_was() {
        assert_eq!(Slots::behind(Some(41)).take(&BTreeSet::from([41, 42]), 4096), Some(43));
        assert_eq!(Slots::behind(Some(LEAST - 1)).take(&BTreeSet::new(), 4096), Some(0));
        assert_eq!(Slots::behind(None).take(&BTreeSet::new(), 4096), Some(0));
    }

    #[test]
    fn every_slot_can_be_had_and_no_more() {
        let mut slots = Slots::default();
        let mut taken = BTreeSet::new();
        while let Some(slot) = slots.take(&taken, 1000) {
            assert!(slot < 1000 && taken.insert(slot));
        }
        assert_eq!(taken.len(), 1000);
    }
}
