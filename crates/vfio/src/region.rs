//! Registers of a function: which there are, and how they can be reached (`struct vfio_region_info`). Pure.

use std::ops::Range;

use crate::info::{self, u32_at, u64_at};
use crate::uapi;

/// Registers of a function: a BAR, or configuration space.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Region {
    /// Bytes; zero where there is none.
    pub size: u64,
    /// Where it begins in the descriptor.
    pub(crate) offset: u64,
    /// It can be read and written.
    pub(crate) usable: bool,
    /// What of it can be mapped.
    pub(crate) mappable: Vec<Range<u64>>,
}

impl Region {
    /// One of `size` bytes that begins at `offset` of a descriptor, for tests.
    pub(crate) fn plain(size: u64, offset: u64) -> Self {
        Self {
            size,
            offset,
            usable: true,
            mappable: std::iter::once(0..size).collect(),
        }
    }

    /// What of it can be mapped, ascending: all or nothing with most functions.
    pub fn mappable(&self) -> &[Range<u64>] {
        &self.mappable
    }

    /// Where in the descriptor an access is; `None` if it is not all within the region.
    pub(crate) fn place(&self, offset: u64, length: u64) -> Option<u64> {
        let end = offset.checked_add(length)?;
        (self.usable && end <= self.size).then(|| self.offset.checked_add(offset))?
    }

    /// Whether all of that can be mapped.
    pub(crate) fn can_map(&self, offset: u64, length: u64) -> bool {
        let end = offset.checked_add(length);
        let mut areas = self.mappable.iter();
        areas.any(|area| area.start <= offset && end.is_some_and(|end| end <= area.end))
    }

    /// Reads `struct vfio_region_info`: its size, flags, index, where the first capability is, size, offset.
    pub(crate) fn parse(answer: &[u8]) -> Self {
        let flags = u32_at(answer, 4).unwrap_or(0);
        let size = u64_at(answer, 16).unwrap_or(0);
        let first = u32_at(answer, 12).filter(|_| flags & uapi::REGION_FLAG_CAPS != 0);
        let mut capabilities = info::capabilities(answer, first.unwrap_or(0));
        let sparse = capabilities.find(|(id, _)| *id == uapi::REGION_CAP_SPARSE_MMAP);
        let areas = match sparse {
            Some((_, body)) => info::pairs(body),
            None => vec![(0, size)],
        };
        let within = |(start, length): (u64, u64)| {
            let end = start.checked_add(length)?.min(size);
            (start < end).then_some(start..end)
        };
        let mut mappable: Vec<Range<u64>> = areas.into_iter().filter_map(within).collect();
        mappable.sort_unstable_by_key(|area| area.start);
        if flags & uapi::REGION_FLAG_MMAP == 0 {
            mappable.clear();
        }
        let both = uapi::REGION_FLAG_READ | uapi::REGION_FLAG_WRITE;
        Self {
            size,
            offset: u64_at(answer, 24).unwrap_or(0),
            usable: flags & both == both,
            mappable,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::info::capability;

    fn answer(flags: u32, capabilities: &[u8]) -> Vec<u8> {
        let mut bytes = [0_u32, flags, 0, 32].map(u32::to_ne_bytes).concat();
        bytes.extend([0x6000, 0x7_0000_u64].map(u64::to_ne_bytes).concat());
        bytes.extend(capabilities);
        bytes
    }

    #[test]
    fn what_can_be_mapped_is_all_nothing_or_what_the_kernel_says() {
        let all = Region::parse(&answer(7, &[]));
        assert_eq!((all.size, all.mappable()), (0x6000, std::slice::from_ref(&(0..0x6000))));
        assert!(all.can_map(0x1000, 0x5000) && !all.can_map(0x1000, 0x6000));
        assert!(Region::parse(&answer(3, &[])).mappable().is_empty());
        let mut body = [3_u32, 0].map(u32::to_ne_bytes).concat();
        // The second one leaves the region, the third is none.
        body.extend([0, 0x2000, 0x4000, 0x9000, u64::MAX, 2].map(u64::to_ne_bytes).concat());
        let sparse = Region::parse(&answer(0xf, &capability(1, 0, &body)));
        assert_eq!(sparse.mappable(), [0..0x2000, 0x4000..0x6000]);
        assert!(!sparse.can_map(0x1000, 0x2000) && !sparse.can_map(u64::MAX, 2));
    }

    #[test]
    fn no_access_leaves_its_region() {
        let region = Region {
            size: 0x100,
            offset: 0x7_0000,
            usable: true,
            mappable: Vec::new(),
        };
        assert_eq!(region.place(0xfc, 4), Some(0x7_00fc));
        for offset in [0xfd, 0x100, u64::MAX] {
            assert!(region.place(offset, 4).is_none(), "{offset:#x}");
        }
        assert!(Region::default().place(0, 0).is_none(), "there is none");
    }
}
