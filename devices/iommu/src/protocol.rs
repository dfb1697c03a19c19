//! What driver and device say to each other (5.13.3 to 5.13.6): numbers, and the layouts of configuration space and requests. Knows no
//! memory and no function.

use std::ops::RangeInclusive;

/// Feature bits (5.13.3).
pub(crate) const VIRTIO_IOMMU_F_INPUT_RANGE: u32 = 0;
pub(crate) const VIRTIO_IOMMU_F_MAP_UNMAP: u32 = 2;
pub(crate) const VIRTIO_IOMMU_F_PROBE: u32 = 4;

/// Queues (5.13.2). The one of events is never used: drivers want it all the same.
pub(crate) const REQUESTS: u16 = 0;
pub(crate) const EVENTS: u16 = 1;
pub(crate) const QUEUE_SIZES: [u16; 2] = [256, 16];

/// `page_size_mask`: pages of 4 KiB alone. Of several sizes Linux makes a request for each that a range has pages of, and chooses them for
/// unmapping without looking at what they are mapped to: it could ask for a part of a mapping, which is refused. Of one size each range is one
/// request, whatever its length.
pub(crate) const PAGE: u64 = 4096;

/// `input_range`: addresses that every host's IOMMU has (39 bits, the least of Intel's), as a machine is made before it is known which host's
/// functions it gets.
pub(crate) const INPUT_RANGE: RangeInclusive<u64> = 0..=(1 << 39) - 1;

/// `probe_size`: what an endpoint's properties take at most: 21 of them.
pub(crate) const PROBE_SIZE: usize = 504;

/// Types of requests (5.13.6).
pub(crate) const VIRTIO_IOMMU_T_ATTACH: u8 = 1;
pub(crate) const VIRTIO_IOMMU_T_DETACH: u8 = 2;
pub(crate) const VIRTIO_IOMMU_T_MAP: u8 = 3;
pub(crate) const VIRTIO_IOMMU_T_UNMAP: u8 = 4;
pub(crate) const VIRTIO_IOMMU_T_PROBE: u8 = 5;

/// Flags of a mapping (5.13.6.5).
pub(crate) const VIRTIO_IOMMU_MAP_F_READ: u32 = 1 << 0;
pub(crate) const VIRTIO_IOMMU_MAP_F_WRITE: u32 = 1 << 1;

/// `struct virtio_iommu_probe_resv_mem` (5.13.6.7.1): its type, and how many bytes follow type and length.
const VIRTIO_IOMMU_PROBE_T_RESV_MEM: u16 = 1;
const RESV_MEM_LENGTH: u16 = 20;
const RESV_MEM_BYTES: usize = RESV_MEM_LENGTH as usize + 4;

/// What became of a request (5.13.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Status {
    Ok = 0,
    /// The host has refused.
    DevErr = 3,
    /// What is unsupported.
    Unsupp = 2,
    Inval = 4,
    Range = 5,
    NoEnt = 6,
    NoMem = 8,
}

/// Bytes of `struct virtio_iommu_req_tail`, of which the first is the status.
pub(crate) const TAIL: usize = 4;

/// A range of addresses that a function uses, which does not wrap around.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Virt {
    pub(crate) start: u64,
    pub(crate) end: u64,
}

/// A request as it was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    Attach {
        domain: u32,
        endpoint: u32,
        flags: u32,
        reserved: bool,
    },
    Detach {
        domain: u32,
        endpoint: u32,
        reserved: bool,
    },
    Map {
        domain: u32,
        virt: Virt,
        phys_start: u64,
        flags: u32,
    },
    Unmap {
        domain: u32,
        virt: Virt,
    },
    Probe {
        endpoint: u32,
    },
}

impl Request {
    /// The most bytes of one that a driver sends: a probe's.
    pub(crate) const MOST: usize = 72;

    /// How many bytes a request of this type has, without what the device writes; `None` of none that there is.
    pub(crate) fn length(kind: u8) -> Option<usize> {
        match kind {
            VIRTIO_IOMMU_T_ATTACH | VIRTIO_IOMMU_T_DETACH => Some(20),
            VIRTIO_IOMMU_T_MAP => Some(36),
            VIRTIO_IOMMU_T_UNMAP => Some(28),
            VIRTIO_IOMMU_T_PROBE => Some(Self::MOST),
            _ => None,
        }
    }

    /// Reads one; `None` if it is too short, or of no type that there is. What is reserved is only looked at where the device has to.
    pub(crate) fn read(bytes: &[u8]) -> Option<Self> {
        let kind = *bytes.first()?;
        let bytes = bytes.get(..Self::length(kind)?)?;
        let u32_at = |at| Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
        let u64_at = |at| Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
        let reserved = |at: usize| bytes[at..].iter().any(|byte| *byte != 0);
        let virt = || {
            Some(Virt {
                start: u64_at(8)?,
                end: u64_at(16)?,
            })
        };
        let first = u32_at(4)?;
        Some(match kind {
            VIRTIO_IOMMU_T_ATTACH => Self::Attach {
                domain: first,
                endpoint: u32_at(8)?,
                flags: u32_at(12)?,
                reserved: reserved(16),
            },
            VIRTIO_IOMMU_T_DETACH => Self::Detach {
                domain: first,
                endpoint: u32_at(8)?,
                reserved: reserved(12),
            },
            VIRTIO_IOMMU_T_MAP => Self::Map {
                domain: first,
                virt: virt()?,
                phys_start: u64_at(24)?,
                flags: u32_at(32)?,
            },
            VIRTIO_IOMMU_T_UNMAP => Self::Unmap {
                domain: first,
                virt: virt()?,
            },
            _ => Self::Probe { endpoint: first },
        })
    }

    /// By its place among the labels of requests.
    pub(crate) fn place(self) -> usize {
        match self {
            Self::Attach { .. } => 0,
            Self::Detach { .. } => 1,
            Self::Map { .. } => 2,
            Self::Unmap { .. } => 3,
            Self::Probe { .. } => 4,
        }
    }
}

/// An address range that a driver must not map (5.13.6.7.1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reserved {
    /// `VIRTIO_IOMMU_RESV_MEM_T_RESERVED`: the host keeps it.
    Memory(RangeInclusive<u64>),
    /// `VIRTIO_IOMMU_RESV_MEM_T_MSI`: a write there is an interrupt.
    Msi(RangeInclusive<u64>),
}

/// The properties of an endpoint: zeroes behind those that there are, which end them. What finds no place is left out.
pub(crate) fn properties(reserved: &[Reserved]) -> [u8; PROBE_SIZE] {
    let mut properties = [0; PROBE_SIZE];
    for (place, one) in properties.chunks_exact_mut(RESV_MEM_BYTES).zip(reserved) {
        let (subtype, range) = match one {
            Reserved::Memory(range) => (0, range),
            Reserved::Msi(range) => (1, range),
        };
        let bytes = [
            &VIRTIO_IOMMU_PROBE_T_RESV_MEM.to_le_bytes()[..],
            &RESV_MEM_LENGTH.to_le_bytes(),
            &[subtype, 0, 0, 0],
            &range.start().to_le_bytes(),
            &range.end().to_le_bytes(),
        ];
        place.copy_from_slice(&bytes.concat());
    }
    properties
}

/// `struct virtio_iommu_config` (5.13.4). A driver can write nothing of it: what it could is there with a feature that is not offered.
pub(crate) fn config_space() -> [u8; 40] {
    let mut bytes = [0; 40];
    let parts = [
        PAGE,
        *INPUT_RANGE.start(),
        *INPUT_RANGE.end(),
        // `domain_range`: all, though its feature is not offered.
        u64::from(u32::MAX) << 32,
        PROBE_SIZE as u64,
    ];
    for (place, part) in bytes.chunks_exact_mut(8).zip(parts) {
        place.copy_from_slice(&part.to_le_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_as_they_are_laid_out() {
        let bytes = |kind: u8| -> Vec<u8> { std::iter::once(kind).chain(1..72).collect() };
        let (four, eight) = (0x0706_0504, 0x0b0a_0908);
        let virt = Virt {
            start: 0x0f0e_0d0c_0b0a_0908,
            end: 0x1716_1514_1312_1110,
        };
        assert_eq!(
            Request::read(&bytes(1)),
            Some(Request::Attach {
                domain: four,
                endpoint: eight,
                flags: 0x0f0e_0d0c,
                reserved: true
            })
        );
        assert_eq!(
            Request::read(&bytes(2)),
            Some(Request::Detach {
                domain: four,
                endpoint: eight,
                reserved: true
            })
        );
        assert_eq!(
            Request::read(&bytes(3)),
            Some(Request::Map {
                domain: four,
                virt,
                phys_start: 0x1f1e_1d1c_1b1a_1918,
                flags: 0x2322_2120
            })
        );
        assert_eq!(Request::read(&bytes(4)), Some(Request::Unmap { domain: four, virt }));
        assert_eq!(Request::read(&bytes(5)), Some(Request::Probe { endpoint: four }));
        for kind in [0, 6, 7, 255] {
            assert_eq!(Request::read(&bytes(kind)), None);
        }
        for kind in 1..=5 {
            let length = Request::length(kind).unwrap();
            assert!(Request::read(&bytes(kind)[..length]).is_some());
            assert!(Request::read(&bytes(kind)[..length - 1]).is_none());
        }
    }

    #[test]
    fn properties_end_with_none() {
        let msi = Reserved::Msi(0xfee0_0000..=0xfeef_ffff);
        let properties = properties(&[msi, Reserved::Memory(1..=2)]);
        assert_eq!(properties[..8], [1, 0, 20, 0, 1, 0, 0, 0]);
        assert_eq!(properties[8..16], 0xfee0_0000_u64.to_le_bytes());
        assert_eq!(properties[16..24], 0xfeef_ffff_u64.to_le_bytes());
        assert_eq!(properties[24..32], [1, 0, 20, 0, 0, 0, 0, 0]);
        assert!(properties[48..].iter().all(|byte| *byte == 0));
        assert_eq!(PROBE_SIZE % RESV_MEM_BYTES, 0);
    }
}
