//! Whether functions can reach all of a guest's memory: checked before anything is mapped. Pure.

use std::ops::RangeInclusive;

use crate::VfioError;

/// What a write by a function is taken for an interrupt at, which no IOMMU translates as memory (Intel SDM 3A, 11.11.1; AMD IOMMU
/// specification, 2.1.3).
pub const MSI_WINDOW: RangeInclusive<u64> = 0xfee0_0000..=0xfeef_ffff;

/// Checks that each range of `layout` (first and last address) lies in what can be mapped, and none in [`MSI_WINDOW`]. `allowed` need not
/// be sorted; what is adjacent there counts as one.
///
/// # Errors
/// The first part of the first range that does not.
pub fn check_layout(
    allowed: &[RangeInclusive<u64>],
    layout: impl IntoIterator<Item = RangeInclusive<u64>>,
) -> Result<(), VfioError> {
    let allowed = joined(allowed);
    for range in layout {
        let start = *range.start();
        match allowed.iter().find(|window| window.contains(&start)) {
            Some(window) if window.end() >= range.end() => {}
            // It ends before the range does, so that there is a next address.
            Some(window) => return Err(refused(window.end() + 1, &range, &allowed)),
            None => return Err(refused(start, &range, &allowed)),
        }
    }
    Ok(())
}

/// The part from `at` on up to where something is allowed again.
fn refused(at: u64, range: &RangeInclusive<u64>, allowed: &[RangeInclusive<u64>]) -> VfioError {
    let next = allowed.iter().map(|window| *window.start()).find(|start| *start > at);
    let text = allowed
        .iter()
        .map(|window| format!("{:#x}-{:#x}", window.start(), window.end()));
    VfioError::Layout {
        start: at,
        end: next.map_or(*range.end(), |next| (next - 1).min(*range.end())),
        allowed: match allowed {
            [] => "nothing".into(),
            _ => text.collect::<Vec<_>>().join(", "),
        },
    }
}

/// Sorted, joined where they touch, without the window of interrupts.
fn joined(allowed: &[RangeInclusive<u64>]) -> Vec<RangeInclusive<u64>> {
    let mut parts = Vec::new();
    for range in allowed.iter().filter(|range| !range.is_empty()) {
        let (start, end) = (*range.start(), *range.end());
        let below = (start, end.min(*MSI_WINDOW.start() - 1));
        let above = (start.max(*MSI_WINDOW.end() + 1), end);
        parts.extend([below, above].into_iter().filter(|(start, end)| start <= end));
    }
    parts.sort_unstable();
    let mut joined: Vec<RangeInclusive<u64>> = Vec::new();
    for (start, end) in parts {
        match joined.last_mut() {
            Some(last) if start <= last.end().saturating_add(1) => *last = *last.start()..=end.max(*last.end()),
            _ => joined.push(start..=end),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As an Intel IOMMU of 48 bits tells.
    const INTEL: [RangeInclusive<u64>; 2] = [0..=0xfedf_ffff, 0xfef0_0000..=0xffff_ffff_ffff];

    fn parts(allowed: &[RangeInclusive<u64>], layout: &[RangeInclusive<u64>]) -> Option<(u64, u64)> {
        match check_layout(allowed, layout.iter().cloned()) {
            Ok(()) => None,
            Err(VfioError::Layout { start, end, .. }) => Some((start, end)),
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn memory_below_and_above_the_window_of_pci_fits() {
        assert_eq!(parts(&INTEL, &[0..=0xbfff_ffff, 0x1_0000_0000..=0x3_3fff_ffff]), None);
        assert_eq!(parts(&INTEL, &[]), None);
    }

    #[test]
    fn the_window_of_interrupts_never_fits() {
        let all = 0..=u64::MAX;
        for allowed in [&INTEL[..], std::slice::from_ref(&all)] {
            assert_eq!(parts(allowed, &[0..=0xffff_ffff]), Some((0xfee0_0000, 0xfeef_ffff)));
            assert_eq!(
                parts(allowed, &[0xfee0_1000..=0xfee0_1fff]),
                Some((0xfee0_1000, 0xfee0_1fff))
            );
            assert_eq!(parts(allowed, &[0..=0xfedf_ffff, 0xfef0_0000..=0xffff_ffff]), None);
        }
    }

    #[test]
    fn reserved_regions_and_the_end_of_the_width_are_named() {
        // A device's reserved memory (RMRR) at 0x7a000000, and 39 bits.
        let allowed = [0..=0x79ff_ffff, 0x7b00_0000..=0x7f_ffff_ffff];
        assert_eq!(parts(&allowed, &[0..=0x7fff_ffff]), Some((0x7a00_0000, 0x7aff_ffff)));
        assert_eq!(
            parts(&allowed, &[0..=0xfff, 0x7f_ffff_f000..=0x80_0000_0fff]),
            Some((0x80_0000_0000, 0x80_0000_0fff))
        );
        assert_eq!(parts(&[], &[0..=0xfff]), Some((0, 0xfff)));
        let text = check_layout(&allowed, [0..=0x7fff_ffff]).unwrap_err().to_string();
        assert!(
            text.contains("0x7a000000 to 0x7affffff") && text.contains("0x0-0x79ffffff"),
            "{text}"
        );
    }

    #[test]
    fn what_is_adjacent_or_out_of_order_counts_as_one() {
        let allowed = [0x2000..=0x2fff, 0..=0xfff, 0x1000..=0x1fff, 0x2800..=0x3fff];
        assert_eq!(parts(&allowed, &[0..=0x3fff]), None);
        assert_eq!(parts(&allowed, &[0..=0x4000]), Some((0x4000, 0x4000)));
        assert_eq!(parts(&[0..=u64::MAX], &[0xfef0_0000..=u64::MAX]), None);
    }
}
