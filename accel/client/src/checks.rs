//! What a command is refused for before it crosses: `checks` of its annotations, which its function calls by these names, and which nobody
//! would be told of at once otherwise. Codes are those of the command's section of the OpenCL API; what only the device knows is the
//! server's to find.

use crate::bulk::Shape;
use crate::codes::Code;
use crate::object::Object;
use crate::{image, mapping};

/// The longest pattern, which is a vector of sixteen numbers of 64 bits.
const PATTERN: u64 = 128;

/// A list that is not NULL.
pub(crate) fn there<T>(list: Option<T>) -> Result<(), Code> {
    list.map(drop).ok_or(Code::INVALID_VALUE)
}

/// A number has none but these bits.
pub(crate) fn bits(number: u64, all: u64) -> Result<(), Code> {
    if number & !all == 0 {
        Ok(())
    } else {
        Err(Code::INVALID_VALUE)
    }
}

/// A pattern is there, has a length that types have, and fills whole parts (clEnqueueFillBuffer, clEnqueueSVMMemFill).
pub(crate) fn pattern(pattern: Option<&[u8]>, pattern_size: u64, offset: u64, size: u64) -> Result<(), Code> {
    there(pattern)?;
    let is_length = pattern_size.is_power_of_two() && pattern_size <= PATTERN;
    if is_length && offset.is_multiple_of(pattern_size) && size.is_multiple_of(pattern_size) {
        Ok(())
    } else {
        Err(Code::INVALID_VALUE)
    }
}

/// So many bytes from an offset on are within a buffer. What is not known here is left to the server.
pub(crate) fn in_bounds(buffer: &Object, offset: u64, size: u64) -> Result<(), Code> {
    let state = mapping::state(buffer)?;
    let end = offset.checked_add(size).ok_or(Code::INVALID_VALUE)?;
    match state.size() {
        Some(length) if end > length => Err(Code::INVALID_VALUE),
        _ => Ok(()),
    }
}

/// A box of at least one byte, with rows and slices of these pitches, is within a buffer.
pub(crate) fn rect_in_bounds(
    buffer: &Object,
    origin: &[u64],
    region: &[u64],
    row_pitch: u64,
    slice_pitch: u64,
) -> Result<(), Code> {
    let (origin, region) = (three(origin)?, three(region)?);
    if region.contains(&0) {
        return Err(Code::INVALID_VALUE);
    }
    let there = Shape::rows(region, row_pitch, slice_pitch)?.at(origin)?;
    in_bounds(buffer, 0, there.extent().unwrap_or(u64::MAX))
}

/// Two parts of buffers do not overlap. Buffers that lie in one are told apart by the server.
pub(crate) fn apart(one: &Object, at_one: u64, other: &Object, at_other: u64, size: u64) -> Result<(), Code> {
    if std::ptr::eq(one, other) && at_one.abs_diff(at_other) < size {
        return Err(Code::MEM_COPY_OVERLAP);
    }
    Ok(())
}

/// A region of at least one pixel is within an image.
pub(crate) fn image_region(image: &Object, origin: &[u64], region: &[u64]) -> Result<(), Code> {
    let (origin, region) = (three(origin)?, three(region)?);
    if region.contains(&0) {
        return Err(Code::INVALID_VALUE);
    }
    let Some(known) = mapping::state(image)?.image() else {
        return Ok(());
    };
    let is_within = |index: usize| {
        let end = origin[index].checked_add(region[index]);
        end.is_some_and(|end| end <= known.extent[index])
    };
    match (0..3).all(is_within) {
        true => Ok(()),
        false => Err(Code::INVALID_VALUE),
    }
}

/// Pixels of two images are of one format (clEnqueueCopyImage).
pub(crate) fn same_format(one: &Object, other: &Object) -> Result<(), Code> {
    let (one, other) = (mapping::state(one)?.image(), mapping::state(other)?.image());
    match one.zip(other) {
        Some((one, other)) if one.format != other.format => Err(Code::IMAGE_FORMAT_MISMATCH),
        _ => Ok(()),
    }
}

/// Pixels of a region, without gaps, are within a buffer from an offset on.
pub(crate) fn pixels_in_bounds(image: &Object, region: &[u64], buffer: &Object, offset: u64) -> Result<(), Code> {
    let shape = image::shape(image, three(region)?, 0, 0)?;
    in_bounds(buffer, offset, shape.extent().ok_or(Code::INVALID_VALUE)?)
}

/// Three numbers, as lists of the API have them.
fn three(list: &[u64]) -> Result<[u64; 3], Code> {
    list.first_chunk().copied().ok_or(Code::INVALID_VALUE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_of_lengths_that_types_have_and_fill_whole_parts() {
        let bytes = [0_u8; 256];
        let checked = |length: u64, offset, size| {
            let bytes = &bytes[..usize::try_from(length).unwrap()];
            pattern(Some(bytes), length, offset, size)
        };
        assert!(
            [1, 2, 4, 8, 16, 32, 64, 128]
                .iter()
                .all(|length| checked(*length, 256, 128).is_ok())
        );
        for (length, offset, size) in [(0, 0, 8), (3, 0, 9), (256, 0, 256), (8, 4, 8), (8, 8, 12)] {
            assert_eq!(
                checked(length, offset, size),
                Err(Code::INVALID_VALUE),
                "{length} {offset} {size}"
            );
        }
        assert_eq!(pattern(None, 4, 0, 4), Err(Code::INVALID_VALUE));
    }

    #[test]
    fn bits_are_known_or_wrong() {
        assert!(bits(3, 3).is_ok() && bits(0, 3).is_ok());
        assert_eq!(
            (bits(4, 3), bits(u64::MAX, 3)),
            (Err(Code::INVALID_VALUE), Err(Code::INVALID_VALUE))
        );
    }
}
