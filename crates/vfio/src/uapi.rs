//! What `linux/vfio.h` says, for Rust: numbers and structures, and how a request is made.

pub(crate) use base::ioctl::call;

/// All requests are `_IO(';', 100 + n)`: their sizes are in the structures' first member.
const fn number(n: u32) -> u32 {
    0x3b << 8 | (100 + n)
}

pub(crate) const GET_API_VERSION: u32 = number(0);
pub(crate) const SET_IOMMU: u32 = number(2);
pub(crate) const GROUP_GET_STATUS: u32 = number(3);
pub(crate) const GROUP_SET_CONTAINER: u32 = number(4);
pub(crate) const GROUP_GET_DEVICE_FD: u32 = number(6);
pub(crate) const DEVICE_GET_INFO: u32 = number(7);
pub(crate) const DEVICE_GET_REGION_INFO: u32 = number(8);
pub(crate) const DEVICE_GET_IRQ_INFO: u32 = number(9);
pub(crate) const DEVICE_SET_IRQS: u32 = number(10);
pub(crate) const DEVICE_RESET: u32 = number(11);
pub(crate) const IOMMU_GET_INFO: u32 = number(12);
pub(crate) const IOMMU_MAP_DMA: u32 = number(13);
pub(crate) const IOMMU_UNMAP_DMA: u32 = number(14);
pub(crate) const DEVICE_BIND_IOMMUFD: u32 = number(18);
pub(crate) const DEVICE_ATTACH_IOMMUFD_PT: u32 = number(19);

pub(crate) const API_VERSION: i32 = 0;
/// `VFIO_TYPE1v2_IOMMU`.
pub(crate) const TYPE1V2: usize = 3;
pub(crate) const GROUP_FLAGS_VIABLE: u32 = 1;
pub(crate) const DEVICE_FLAGS_RESET: u32 = 1;
pub(crate) const DEVICE_FLAGS_PCI: u32 = 2;
pub(crate) const REGION_FLAG_READ: u32 = 1;
pub(crate) const REGION_FLAG_WRITE: u32 = 2;
pub(crate) const REGION_FLAG_MMAP: u32 = 4;
pub(crate) const REGION_FLAG_CAPS: u32 = 8;
pub(crate) const REGION_CAP_SPARSE_MMAP: u16 = 1;
/// `VFIO_DMA_MAP_FLAG_READ`, and with `_WRITE`.
pub(crate) const DMA_READ: u32 = 1;
pub(crate) const DMA_READ_WRITE: u32 = 3;

pub(crate) const IRQ_INFO_EVENTFD: u32 = 1 << 0;
pub(crate) const IRQ_INFO_MASKABLE: u32 = 1 << 1;
pub(crate) const IRQ_INFO_AUTOMASKED: u32 = 1 << 2;
pub(crate) const IRQ_INFO_NORESIZE: u32 = 1 << 3;

pub(crate) const IRQ_SET_DATA_NONE: u32 = 1 << 0;
pub(crate) const IRQ_SET_DATA_EVENTFD: u32 = 1 << 2;
pub(crate) const IRQ_SET_ACTION_MASK: u32 = 1 << 3;
pub(crate) const IRQ_SET_ACTION_UNMASK: u32 = 1 << 4;
pub(crate) const IRQ_SET_ACTION_TRIGGER: u32 = 1 << 5;

pub(crate) const IOMMU_INFO_PGSIZES: u32 = 1 << 0;
pub(crate) const IOMMU_INFO_CAPS: u32 = 1 << 1;
/// `struct vfio_iommu_type1_info`, behind which its capabilities begin.
pub(crate) const IOMMU_INFO_WORDS: usize = 6;
pub(crate) const TYPE1_CAP_IOVA_RANGE: u16 = 1;
pub(crate) const TYPE1_CAP_MIGRATION: u16 = 2;
pub(crate) const TYPE1_CAP_DMA_AVAIL: u16 = 3;
/// What every IOMMU has that this kernel drives.
pub(crate) const SMALLEST_PAGE: u64 = 4096;

/// The region of configuration space (`VFIO_PCI_CONFIG_REGION_INDEX`); those below are the BARs and the ROM.
pub const CONFIG_REGION: u32 = 7;

#[repr(C)]
#[derive(Default)]
pub(crate) struct GroupStatus {
    pub(crate) argsz: u32,
    pub(crate) flags: u32,
}

#[repr(C)]
#[derive(Default)]
pub(crate) struct DeviceInfo {
    pub(crate) argsz: u32,
    pub(crate) flags: u32,
    pub(crate) regions: u32,
    pub(crate) irqs: u32,
    pub(crate) capabilities: u32,
    pub(crate) padding: u32,
}

/// `struct vfio_region_info`: its size, flags, index, capabilities, and two words each of size and offset.
pub(crate) const REGION_INFO_WORDS: usize = 8;

#[repr(C)]
#[derive(Default)]
pub(crate) struct IrqQuery {
    pub(crate) argsz: u32,
    pub(crate) flags: u32,
    pub(crate) index: u32,
    pub(crate) count: u32,
}

#[repr(C)]
#[derive(Default)]
pub(crate) struct DmaMap {
    pub(crate) argsz: u32,
    pub(crate) flags: u32,
    pub(crate) address: u64,
    pub(crate) iova: u64,
    pub(crate) size: u64,
}

/// `struct vfio_iommu_type1_dma_unmap`, without a bitmap.
#[repr(C)]
#[derive(Default)]
pub(crate) struct DmaUnmap {
    pub(crate) argsz: u32,
    pub(crate) flags: u32,
    pub(crate) iova: u64,
    pub(crate) size: u64,
}

/// A structure's size, for its first member.
pub(crate) fn size_of<T>() -> u32 {
    u32::try_from(std::mem::size_of::<T>()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_header() {
        // By gcc 12, of linux/vfio.h of Linux 6.1.
        let sizes = [
            size_of::<GroupStatus>(),
            size_of::<DeviceInfo>(),
            size_of::<IrqQuery>(),
            size_of::<DmaMap>(),
            size_of::<DmaUnmap>(),
        ];
        assert_eq!(sizes, [8, 24, 16, 32, 24]);
        // `struct vfio_region_info` and `struct vfio_iommu_type1_info`.
        assert_eq!((REGION_INFO_WORDS * 4, IOMMU_INFO_WORDS * 4), (32, 24));
        assert_eq!((GET_API_VERSION, IOMMU_UNMAP_DMA), (0x3b64, 0x3b72));
    }
}
