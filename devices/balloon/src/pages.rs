//! Ranges of pages that a guest names, in any order and as often as it likes, as ranges that each stand for themselves. Knows no memory.

use memory::layout::Range;

use crate::protocol::PAGE;

/// The page of a number.
pub(crate) fn page(number: u32) -> Range {
    Range {
        start: u64::from(number) * PAGE,
        length: PAGE,
    }
}

/// Whether it consists of whole pages.
pub(crate) fn is_whole(range: &Range) -> bool {
    range.length > 0 && range.start.is_multiple_of(PAGE) && range.length.is_multiple_of(PAGE)
}

/// The same pages, each once, the lowest first: what follows each other is one range.
pub(crate) fn merged(mut ranges: Vec<Range>) -> Vec<Range> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut merged: Vec<Range> = Vec::with_capacity(ranges.len());
    for range in ranges {
        let end = range.start.saturating_add(range.length);
        match merged.last_mut() {
            Some(last) if range.start <= last.start + last.length => {
                last.length = last.length.max(end - last.start);
            }
            _ => merged.push(Range {
                start: range.start,
                length: end - range.start,
            }),
        }
    }
    merged
}

/// The lowest of them, up to so many bytes; how many bytes are left out.
pub(crate) fn limited(mut ranges: Vec<Range>, most: u64) -> (Vec<Range>, u64) {
    let (mut room, mut left) = (most, 0);
    ranges.retain_mut(|range| {
        let now = range.length.min(room);
        left += range.length - now;
        room -= now;
        range.length = now;
        now > 0
    });
    (ranges, left)
}

/// So many bytes are in them.
pub(crate) fn bytes(ranges: &[Range]) -> u64 {
    ranges.iter().map(|range| range.length).sum()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn range(start: u64, length: u64) -> Range {
        Range { start, length }
    }

    fn pages(ranges: &[Range]) -> BTreeSet<u64> {
        let each = |range: &Range| range.start / PAGE..(range.start + range.length) / PAGE;
        ranges.iter().flat_map(each).collect()
    }

    #[test]
    fn pages_that_follow_each_other_are_one_range_and_none_is_in_two() {
        let mut state = 7_u64;
        let mut below = |limit: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % limit
        };
        for _ in 0..2000 {
            let ranges: Vec<_> = (0..below(40))
                .map(|_| range(below(100) * PAGE, (1 + below(6)) * PAGE))
                .collect();
            let merged = merged(ranges.clone());
            assert_eq!(pages(&merged), pages(&ranges), "{ranges:?}");
            let apart = merged
                .windows(2)
                .all(|pair| pair[0].start + pair[0].length < pair[1].start);
            assert!(apart, "{ranges:?}: {merged:?}");
            assert_eq!(bytes(&merged), pages(&ranges).len() as u64 * PAGE);
            let most = below(200) * PAGE;
            let (first, left) = limited(merged.clone(), most);
            assert_eq!(bytes(&first), bytes(&merged).min(most));
            assert_eq!(bytes(&first) + left, bytes(&merged));
            assert!(pages(&first).iter().eq(pages(&merged).iter().take(pages(&first).len())));
        }
    }

    #[test]
    fn pages_are_whole_or_none() {
        assert!(is_whole(&range(PAGE, 3 * PAGE)) && is_whole(&page(u32::MAX)));
        for (start, length) in [(0, 0), (1, PAGE), (PAGE, 5), (PAGE / 2, PAGE)] {
            assert!(!is_whole(&range(start, length)), "{start:#x}, {length:#x}");
        }
    }
}
