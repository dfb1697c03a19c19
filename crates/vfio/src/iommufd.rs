//! An address space by iommufd (linux/iommufd.h, Linux 6.2; functions opened by files of their own, Linux 6.6): an I/O address space
//! (IOAS), which functions are attached to. Knows no guest.
//!
//! What the kernel does, measured with Linux 6.12 on the emulated host: docs/devices.md. Mappings are unmapped whole, as a container's are; there is no
//! limit of them but memory.

use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;

use crate::space::{AddressSpace, DmaAccess, Mapped, Owner, Piece, UnmapError};
use crate::type1::next_step;
use crate::{VfioError, failed, uapi};

/// `_IO(';', 0x80 + n)`.
const fn number(n: u32) -> u32 {
    0x3b << 8 | (0x80 + n)
}

const IOAS_ALLOC: u32 = number(1);
const IOAS_IOVA_RANGES: u32 = number(4);
const IOAS_MAP: u32 = number(5);
const IOAS_UNMAP: u32 = number(6);
const OPTION: u32 = number(7);

/// `IOMMU_IOAS_MAP_FIXED_IOVA` and `_READABLE`, and `_WRITEABLE`.
const MAP_FLAGS: u32 = 1 << 0 | 1 << 2;
const MAP_WRITEABLE: u32 = 1 << 1;

/// How many ranges are asked for at first, and how often more.
const RANGES: usize = 16;
const TRIES: usize = 4;

/// `struct iommu_ioas_alloc`.
#[repr(C)]
#[derive(Default)]
struct Alloc {
    size: u32,
    flags: u32,
    ioas: u32,
}

/// `struct iommu_iova_range`: the first address and the last.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct IovaRange {
    start: u64,
    last: u64,
}

/// `struct iommu_ioas_iova_ranges`.
#[repr(C)]
#[derive(Default)]
struct IovaRanges {
    size: u32,
    ioas: u32,
    count: u32,
    reserved: u32,
    ranges: u64,
    alignment: u64,
}

/// `struct iommu_ioas_map`.
#[repr(C)]
#[derive(Default)]
struct Map {
    size: u32,
    flags: u32,
    ioas: u32,
    reserved: u32,
    address: u64,
    length: u64,
    iova: u64,
}

/// `struct iommu_ioas_unmap`.
#[repr(C)]
#[derive(Default)]
struct Unmap {
    size: u32,
    ioas: u32,
    iova: u64,
    length: u64,
}

/// `IOMMU_OPTION_RLIMIT_MODE`, and its value by which each process answers for what it maps.
const OPTION_RLIMIT_MODE: u32 = 0;
const BY_PROCESS: u64 = 1;

/// `struct iommu_option`. The operation is `IOMMU_OPTION_OP_SET`, which is 0, and the object none.
#[repr(C)]
#[derive(Default)]
struct SetOption {
    size: u32,
    option: u32,
    operation: u16,
    reserved: u16,
    object: u32,
    value: u64,
}

/// Has what is mapped count against the limit of locked memory of the process that maps it, as with a container, and not of its user, whom
/// other VMMs may run as. Needs `CAP_SYS_RESOURCE`, and nothing made of it yet.
pub(crate) fn count_by_process(iommufd: &OwnedFd) -> Result<(), VfioError> {
    let mut option = SetOption {
        size: uapi::size_of::<SetOption>(),
        option: OPTION_RLIMIT_MODE,
        value: BY_PROCESS,
        ..SetOption::default()
    };
    // SAFETY: the request reads and writes this structure, whose size is in it.
    unsafe { uapi::call(iommufd, OPTION, &raw mut option) }.map_err(failed("IOMMU_OPTION_RLIMIT_MODE"))?;
    Ok(())
}

/// `struct vfio_device_bind_iommufd`.
#[repr(C)]
#[derive(Default)]
struct Bind {
    argsz: u32,
    flags: u32,
    iommufd: i32,
    device: u32,
}

/// `struct vfio_device_attach_iommufd_pt`.
#[repr(C)]
#[derive(Default)]
struct Attach {
    argsz: u32,
    flags: u32,
    ioas: u32,
}

/// An I/O address space: what is mapped here is what all functions reach that are attached.
#[derive(Debug)]
pub struct Iommufd {
    iommufd: OwnedFd,
    ioas: u32,
    owner: Owner,
}

impl Iommufd {
    /// A new one of an open `/dev/iommu`.
    ///
    /// # Errors
    /// The descriptor is none of iommufd's, or the kernel has no memory.
    pub fn new(iommufd: OwnedFd) -> Result<Self, VfioError> {
        let mut alloc = Alloc {
            size: uapi::size_of::<Alloc>(),
            ..Alloc::default()
        };
        // SAFETY: the request reads and writes this structure, whose size is in it.
        unsafe { uapi::call(&iommufd, IOAS_ALLOC, &raw mut alloc) }.map_err(failed("IOMMU_IOAS_ALLOC"))?;
        Ok(Self {
            iommufd,
            ioas: alloc.ioas,
            owner: Owner::default(),
        })
    }

    /// Lets a function reach what is mapped, by its own file (`/dev/vfio/devices/vfioN`). Before that nothing can be asked of it: it becomes a
    /// [`crate::Function`] afterwards.
    ///
    /// # Errors
    /// The file is none of a function's or the function has an address space, the host uses another of its group, or something is mapped
    /// that it cannot reach.
    pub fn attach(&self, device: BorrowedFd<'_>) -> Result<(), VfioError> {
        let mut bind = Bind {
            argsz: uapi::size_of::<Bind>(),
            iommufd: self.iommufd.as_raw_fd(),
            ..Bind::default()
        };
        // SAFETY: the request reads and writes this structure, whose size is in it.
        unsafe { uapi::call(device, uapi::DEVICE_BIND_IOMMUFD, &raw mut bind) }.map_err(not_bound)?;
        let mut attach = Attach {
            argsz: uapi::size_of::<Attach>(),
            flags: 0,
            ioas: self.ioas,
        };
        // SAFETY: as above.
        unsafe { uapi::call(device, uapi::DEVICE_ATTACH_IOMMUFD_PT, &raw mut attach) }
            .map_err(failed("VFIO_DEVICE_ATTACH_IOMMUFD_PT"))?;
        Ok(())
    }

    /// The ranges that can be mapped, and what addresses have to be multiples of.
    fn ranges(&self) -> Result<(Vec<IovaRange>, u64), VfioError> {
        let mut ranges = vec![IovaRange::default(); RANGES];
        for _ in 0..TRIES {
            let mut request = IovaRanges {
                size: uapi::size_of::<IovaRanges>(),
                ioas: self.ioas,
                count: u32::try_from(ranges.len()).unwrap_or(0),
                ranges: ranges.as_mut_ptr() as u64,
                ..IovaRanges::default()
            };
            // SAFETY: the request reads and writes this structure, whose size is in it, and as many ranges as it says that there is room for.
            let answer = unsafe { uapi::call(&self.iommufd, IOAS_IOVA_RANGES, &raw mut request) };
            let count = usize::try_from(request.count).unwrap_or(0);
            match answer {
                Ok(_) => {
                    ranges.truncate(count);
                    return Ok((ranges, request.alignment));
                }
                Err(error) if Errno::from_io_error(&error) == Some(Errno::MSGSIZE) => {
                    ranges.resize(count.max(ranges.len()), IovaRange::default());
                }
                Err(error) => return Err(failed("IOMMU_IOAS_IOVA_RANGES")(error)),
            }
        }
        Err(VfioError::Other("the ranges that an IOMMU translates keep growing"))
    }
}

/// The kernel says EINVAL of a function that is open, and EBUSY of one whose group is used otherwise.
fn not_bound(error: io::Error) -> VfioError {
    match Errno::from_io_error(&error) {
        Some(Errno::INVAL | Errno::BUSY) => VfioError::HasUser(error),
        Some(Errno::PERM) => VfioError::NoRemapping("iommufd"),
        _ => failed("VFIO_DEVICE_BIND_IOMMUFD")(error),
    }
}

impl AddressSpace for Iommufd {
    unsafe fn map_for(&self, piece: Piece, access: DmaAccess) -> Result<Mapped, VfioError> {
        let mut map = Map {
            size: uapi::size_of::<Map>(),
            flags: match access {
                DmaAccess::Read => MAP_FLAGS,
                DmaAccess::ReadWrite => MAP_FLAGS | MAP_WRITEABLE,
            },
            ioas: self.ioas,
            reserved: 0,
            address: piece.address,
            length: piece.length,
            iova: piece.iova,
        };
        // SAFETY: 1. the request reads and writes this structure, whose size is in it; 2. that the memory stays and may change is the caller's.
        let answer = unsafe { uapi::call(&self.iommufd, IOAS_MAP, &raw mut map) };
        self.owner.map(piece, answer, next_step)
    }

    fn unmap(&self, mapped: Mapped) -> Result<(), UnmapError> {
        let mapped = self.owner.check(mapped)?;
        let Piece { iova, length, .. } = mapped.piece();
        let mut unmap = Unmap {
            size: uapi::size_of::<Unmap>(),
            ioas: self.ioas,
            iova,
            length,
        };
        // SAFETY: the request reads and writes this structure, whose size is in it.
        let answer: io::Result<i32> = unsafe { uapi::call(&self.iommufd, IOAS_UNMAP, &raw mut unmap) };
        let answer = answer.map(|_| unmap.length).map_err(failed("IOMMU_IOAS_UNMAP"));
        Owner::unmap(mapped, answer)
    }

    fn iova_ranges(&self) -> Result<Vec<RangeInclusive<u64>>, VfioError> {
        let (ranges, _) = self.ranges()?;
        Ok(ranges.iter().map(|range| range.start..=range.last).collect())
    }

    /// The smallest alone, which is all that iommufd tells.
    fn page_sizes(&self) -> Result<u64, VfioError> {
        self.ranges().map(|(_, alignment)| alignment.max(uapi::SMALLEST_PAGE))
    }

    fn available(&self) -> Result<Option<u32>, VfioError> {
        Ok(None)
    }
}

impl AsFd for Iommufd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.iommufd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_numbers_are_those_of_the_header() {
        let sizes = [
            uapi::size_of::<Alloc>(),
            uapi::size_of::<IovaRange>(),
            uapi::size_of::<IovaRanges>(),
            uapi::size_of::<Map>(),
            uapi::size_of::<Unmap>(),
            uapi::size_of::<Bind>(),
            uapi::size_of::<Attach>(),
            uapi::size_of::<SetOption>(),
        ];
        assert_eq!(sizes, [12, 16, 32, 40, 24, 16, 12, 24]);
        assert_eq!(
            (IOAS_ALLOC, IOAS_IOVA_RANGES, IOAS_MAP, IOAS_UNMAP, OPTION),
            (0x3b81, 0x3b84, 0x3b85, 0x3b86, 0x3b87)
        );
        assert_eq!((MAP_FLAGS, MAP_WRITEABLE), (5, 2));
        assert_eq!(
            (uapi::DEVICE_BIND_IOMMUFD, uapi::DEVICE_ATTACH_IOMMUFD_PT),
            (0x3b76, 0x3b77)
        );
    }

    #[test]
    fn a_function_that_is_in_use_is_told_so() {
        for errno in [Errno::INVAL, Errno::BUSY] {
            let told = not_bound(errno.into()).to_string();
            assert!(told.contains("in use") && told.contains("End the VM"), "{told}");
        }
        let told = not_bound(Errno::PERM.into()).to_string();
        assert!(
            told.contains("/sys/module/iommufd/parameters/allow_unsafe_interrupts"),
            "{told}"
        );
        let told = not_bound(Errno::NODEV.into()).to_string();
        assert!(told.starts_with("VFIO_DEVICE_BIND_IOMMUFD failed"), "{told}");
    }

    #[test]
    fn a_file_is_no_address_space() {
        let file = std::fs::File::open("/proc/self/status").unwrap();
        let error = Iommufd::new(file.into()).unwrap_err();
        assert!(
            matches!(
                error,
                VfioError::Call {
                    call: "IOMMU_IOAS_ALLOC",
                    ..
                }
            ),
            "{error}"
        );
    }
}
