//! An address space by a container of VFIO's with the IOMMU type 1, version 2 (linux/vfio.h). Knows no guest.
//!
//! What the kernel does, measured with Linux 6.1: mapping zeroes and pins the memory and takes one lock of the container for that time;
//! only whole mappings are unmapped; a container takes 65 535 of them.

use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;

use crate::group::refused;
use crate::info::{self, u32_at, u64_at};
use crate::space::{AddressSpace, DmaAccess, Mapped, Owner, Piece, UnmapError};
use crate::uapi::{self, DmaMap, DmaUnmap};
use crate::{Group, VfioError, failed};

/// A container with an IOMMU: what is mapped here is what all functions of its groups reach.
#[derive(Debug)]
pub struct Type1 {
    container: OwnedFd,
    owner: Owner,
}

/// Which writes by functions are told (`VFIO_IOMMU_TYPE1_INFO_CAP_MIGRATION`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirtyTracking {
    /// In pages of which sizes, a bit each.
    pub page_sizes: u64,
    /// How many bytes a bitmap of a request may have.
    pub max_bitmap: u64,
}

/// What a container tells of its IOMMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IommuInfo {
    /// Sizes of pages, a bit each.
    pub page_sizes: u64,
    /// Which addresses can be mapped; all, where the kernel is too old to tell.
    pub iova_ranges: Vec<RangeInclusive<u64>>,
    /// How many more mappings there can be; `None` where it does not tell.
    pub available: Option<u32>,
    /// Whether writes by functions can be told.
    pub dirty_tracking: Option<DirtyTracking>,
}

impl Type1 {
    /// An empty container, as [`crate::host::open_container`] has opened it, with its first group.
    ///
    /// # Errors
    /// The descriptor is no container, the group is in another one, or the host's IOMMU does not remap interrupts and no guest is trusted.
    pub fn new(container: OwnedFd, first: &Group) -> Result<Self, VfioError> {
        first.join(container.as_fd())?;
        let kind = std::ptr::without_provenance_mut::<u8>(uapi::TYPE1V2);
        // SAFETY: the request takes a number.
        unsafe { uapi::call(&container, uapi::SET_IOMMU, kind) }.map_err(refused("VFIO_SET_IOMMU"))?;
        let space = Self {
            container,
            owner: Owner::default(),
        };
        space.info()?;
        Ok(space)
    }

    /// Has the functions of another group reach the same memory.
    ///
    /// # Errors
    /// The group is in another container, its IOMMU is of another kind, or it cannot reach what is mapped.
    pub fn join(&self, group: &Group) -> Result<(), VfioError> {
        group.join(self.container.as_fd())
    }

    /// What it tells now: less can be mapped after another function has joined.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn info(&self) -> Result<IommuInfo, VfioError> {
        let (request, call) = (uapi::IOMMU_GET_INFO, "VFIO_IOMMU_GET_INFO");
        info::ask(&self.container, request, call, &[0; uapi::IOMMU_INFO_WORDS]).map(|answer| parse(&answer))
    }
}

/// Reads `struct vfio_iommu_type1_info`: size, flags, page sizes, where the first capability is.
fn parse(answer: &[u8]) -> IommuInfo {
    let flags = u32_at(answer, 4).unwrap_or(0);
    let mut told = IommuInfo {
        page_sizes: u64_at(answer, 8)
            .filter(|_| flags & uapi::IOMMU_INFO_PGSIZES != 0)
            .unwrap_or(uapi::SMALLEST_PAGE),
        iova_ranges: vec![0..=u64::MAX],
        available: None,
        dirty_tracking: None,
    };
    let first = u32_at(answer, 16).filter(|_| flags & uapi::IOMMU_INFO_CAPS != 0);
    for (id, body) in info::capabilities(answer, first.unwrap_or(0)) {
        match id {
            uapi::TYPE1_CAP_IOVA_RANGE => {
                told.iova_ranges = info::pairs(body).into_iter().map(|(start, end)| start..=end).collect();
            }
            uapi::TYPE1_CAP_MIGRATION => {
                told.dirty_tracking = u64_at(body, 4)
                    .zip(u64_at(body, 12))
                    .map(|(page_sizes, max_bitmap)| DirtyTracking { page_sizes, max_bitmap });
            }
            uapi::TYPE1_CAP_DMA_AVAIL => told.available = u32_at(body, 0),
            _ => {}
        }
    }
    told
}

/// What to do about a mapping that failed.
pub(crate) fn next_step(error: &io::Error) -> &'static str {
    match Errno::from_io_error(error) {
        Some(Errno::NOMEM) => {
            ": the process may not lock so much memory (raise RLIMIT_MEMLOCK by the guest's memory), or the host has none left"
        }
        Some(Errno::EXIST) => ": something is mapped there already",
        Some(Errno::NOSPC) => ": the container takes no more mappings (dma_entry_limit of vfio_iommu_type1)",
        Some(Errno::FAULT) => {
            ": the memory cannot be pinned, as pages that somebody brings when they are touched: bring them first"
        }
        Some(Errno::INVAL) => ": it is no multiple of a page, or not among the addresses that the IOMMU translates",
        _ => "",
    }
}

impl AddressSpace for Type1 {
    unsafe fn map_for(&self, piece: Piece, access: DmaAccess) -> Result<Mapped, VfioError> {
        let mut map = DmaMap {
            argsz: uapi::size_of::<DmaMap>(),
            flags: match access {
                DmaAccess::Read => uapi::DMA_READ,
                DmaAccess::ReadWrite => uapi::DMA_READ_WRITE,
            },
            address: piece.address,
            iova: piece.iova,
            size: piece.length,
        };
        // SAFETY: 1. the request reads this structure; 2. that the memory stays and may change is the caller's.
        let answer = unsafe { uapi::call(&self.container, uapi::IOMMU_MAP_DMA, &raw mut map) };
        self.owner.map(piece, answer, next_step)
    }

    fn unmap(&self, mapped: Mapped) -> Result<(), UnmapError> {
        let mapped = self.owner.check(mapped)?;
        let Piece { iova, length, .. } = mapped.piece();
        let mut unmap = DmaUnmap {
            argsz: uapi::size_of::<DmaUnmap>(),
            flags: 0,
            iova,
            size: length,
        };
        // SAFETY: the request reads and writes this structure.
        let answer = unsafe { uapi::call(&self.container, uapi::IOMMU_UNMAP_DMA, &raw mut unmap) };
        let answer = answer.map(|_| unmap.size).map_err(failed("VFIO_IOMMU_UNMAP_DMA"));
        Owner::unmap(mapped, answer)
    }

    fn iova_ranges(&self) -> Result<Vec<RangeInclusive<u64>>, VfioError> {
        self.info().map(|told| told.iova_ranges)
    }

    fn page_sizes(&self) -> Result<u64, VfioError> {
        self.info().map(|told| told.page_sizes)
    }

    fn available(&self) -> Result<Option<u32>, VfioError> {
        self.info().map(|told| told.available)
    }
}

impl AsFd for Type1 {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.container.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::info::capability;

    /// What Linux 6.1 answers with the IOMMU of the lab.
    fn answer() -> Vec<u8> {
        let mut bytes = [128_u32, 3].map(u32::to_ne_bytes).concat();
        bytes.extend(0x4020_1000_u64.to_ne_bytes());
        bytes.extend([24_u32, 0].map(u32::to_ne_bytes).concat());
        let mut ranges = [2_u32, 0].map(u32::to_ne_bytes).concat();
        ranges.extend(
            [0, 0xfedf_ffff, 0xfef0_0000, u64::MAX >> 16]
                .map(u64::to_ne_bytes)
                .concat(),
        );
        let mut migration = 0_u32.to_ne_bytes().to_vec();
        migration.extend([0x1000, 0x2000_0000_u64].map(u64::to_ne_bytes).concat());
        bytes.extend(capability(1, 72, &ranges));
        bytes.extend(capability(2, 100, &migration));
        bytes.extend(capability(3, 0, &65_535_u32.to_ne_bytes()));
        bytes
    }

    #[test]
    fn a_container_tells_what_can_be_mapped() {
        let told = parse(&answer());
        assert_eq!(
            told,
            IommuInfo {
                page_sizes: 0x4020_1000,
                iova_ranges: vec![0..=0xfedf_ffff, 0xfef0_0000..=u64::MAX >> 16],
                available: Some(65_535),
                dirty_tracking: Some(DirtyTracking {
                    page_sizes: 0x1000,
                    max_bitmap: 0x2000_0000,
                }),
            }
        );
    }

    #[test]
    fn a_kernel_that_tells_less_is_taken_at_its_word() {
        let mut old = answer();
        old[4..8].copy_from_slice(&0_u32.to_ne_bytes());
        let told = parse(&old);
        assert_eq!((told.page_sizes, told.available), (4096, None));
        assert_eq!(told.iova_ranges, [0..=u64::MAX]);
        // A chain that is cut off anywhere breaks nothing.
        for length in 0..answer().len() {
            let told = parse(&answer()[..length]);
            assert!(told.iova_ranges.len() <= 2, "{length}");
        }
    }

    #[test]
    fn a_file_is_no_container() {
        let file = || std::fs::File::open("/proc/self/status").unwrap().into();
        let error = Type1::new(file(), &Group::from_fd(file())).unwrap_err();
        let told = error.to_string();
        assert!(told.contains("VFIO_GROUP_SET_CONTAINER failed"), "{told}");
    }

    #[test]
    fn failures_name_what_to_do() {
        let told = |errno: Errno| next_step(&errno.into());
        assert!(told(Errno::NOMEM).contains("RLIMIT_MEMLOCK"));
        assert!(told(Errno::FAULT).contains("bring them first"));
        assert_eq!(told(Errno::PERM), "");
    }
}
