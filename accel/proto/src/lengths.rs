//! How long something is, computed from what a call says; `None` where no 64 bits can hold it.
//!
//! The expressions are those of `accel/spec` that are more than a product.

use crate::plain::List;

/// Bytes from a buffer's beginning to the end of a box in it: origin and region are bytes, rows and slices; a pitch of zero is as long as
/// the region (OpenCL API, clEnqueueReadBufferRect).
#[must_use]
pub fn rect(origin: &List<'_, u64>, region: &List<'_, u64>, row_pitch: u64, slice_pitch: u64) -> Option<u64> {
    let at = |list: &List<'_, u64>, index| list.get(index).unwrap_or(0);
    let (width, rows, slices) = (at(region, 0), at(region, 1), at(region, 2));
    if width == 0 || rows == 0 || slices == 0 {
        return Some(0);
    }
    let row = if row_pitch == 0 { width } else { row_pitch };
    let slice = if slice_pitch == 0 {
        row.checked_mul(rows)?
    } else {
        slice_pitch
    };
    let last_row = at(origin, 1).checked_add(rows - 1)?.checked_mul(row)?;
    let last_slice = at(origin, 2).checked_add(slices - 1)?.checked_mul(slice)?;
    at(origin, 0)
        .checked_add(width)?
        .checked_add(last_row)?
        .checked_add(last_slice)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(origin: [u64; 3], region: [u64; 3], row: u64, slice: u64) -> Option<u64> {
        rect(&List::new(&origin), &List::new(&region), row, slice)
    }

    #[test]
    fn a_box_ends_with_its_last_byte() {
        assert_eq!(of([0; 3], [4, 3, 2], 0, 0), Some(24));
        assert_eq!(of([1, 0, 0], [4, 3, 1], 10, 0), Some(1 + 4 + 2 * 10));
        assert_eq!(of([0, 2, 1], [4, 1, 1], 10, 100), Some(100 + 20 + 4));
        assert_eq!(of([5; 3], [4, 0, 2], 10, 100), Some(0));
    }

    #[test]
    fn what_no_number_holds_is_none() {
        assert_eq!(of([0; 3], [2, u64::MAX, 1], 2, 0), None);
        assert_eq!(of([0, 0, u64::MAX], [1, 1, 2], 1, 1), None);
        assert_eq!(of([u64::MAX, 0, 0], [1, 1, 1], 0, 0), None);
    }
}
