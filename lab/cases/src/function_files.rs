//! The files of a host's PCI function as a VM is sent them, by iommufd where this host has it, and a case's own hand on them. Knows no device.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use anyhow::{Context, Result, ensure};
use vfio::host::{self, Sysfs};
use vfio::{Function, Group};
use vmm_api::FdRef;
use vmm_api::devices::VfioPciConfig;

/// `VFIO_IOMMU_UNMAP_DMA` of linux/vfio.h, and `IOMMU_IOAS_UNMAP` of linux/iommufd.h.
const UNMAP_DMA: libc::Ioctl = 0x3b72;
const IOAS_UNMAP: libc::Ioctl = 0x3b86;

/// The number of the first thing that is made in iommufd: the VMM's I/O address space.
const FIRST: u64 = 1;

/// A case's own hand on the files that a VM was sent.
pub(crate) enum Hand {
    Group {
        name: String,
        group: Group,
        container: OwnedFd,
    },
    Itself {
        function: OwnedFd,
        iommufd: OwnedFd,
    },
}

/// The files of the first function of a VM, handed to `add`.
pub(crate) fn open(name: &str, mut add: impl FnMut(OwnedFd) -> FdRef) -> Result<(VfioPciConfig, Hand)> {
    let (sysfs, address) = (Sysfs::of_host(), name.parse()?);
    let config = VfioPciConfig {
        name: name.to_owned(),
        ..VfioPciConfig::default()
    };
    if host::has_own_file(&sysfs, address)? {
        let (function, iommufd) = (host::open_function(&sysfs, address)?, host::open_iommufd()?);
        let hand = Hand::Itself {
            function: function.try_clone()?,
            iommufd: iommufd.try_clone()?,
        };
        let config = VfioPciConfig {
            device: Some(add(function)),
            iommufd: Some(add(iommufd)),
            ..config
        };
        return Ok((config, hand));
    }
    let (group, container) = (host::open_group(&sysfs, address)?, host::open_container()?);
    let hand = Hand::Group {
        name: name.to_owned(),
        group: Group::from_fd(group.try_clone()?),
        container: container.try_clone()?,
    };
    let config = VfioPciConfig {
        group: Some(add(group)),
        container: Some(add(container)),
        ..config
    };
    Ok((config, hand))
}

impl Hand {
    /// The function, once the VM has taken it.
    pub(crate) fn function(self) -> Result<Function> {
        Ok(match self {
            Self::Group { name, group, .. } => group.take(&name)?,
            Self::Itself { function, .. } => Function::from_fd(function)?,
        })
    }

    /// Which way it was given.
    pub(crate) fn way(&self) -> &'static str {
        match self {
            Self::Group { .. } => "its IOMMU group",
            Self::Itself { .. } => "its own file and iommufd",
        }
    }

    /// How many bytes were mapped there, and are not any more (`struct vfio_iommu_type1_dma_unmap`, `struct iommu_ioas_unmap`).
    pub(crate) fn unmap(&self, iova: u64, size: u64) -> Result<u64> {
        let mut request = [24, iova, size];
        let (file, number) = match self {
            Self::Group { container, .. } => (container.as_fd(), UNMAP_DMA),
            Self::Itself { iommufd, .. } => {
                request[0] |= FIRST << 32;
                (iommufd.as_fd(), IOAS_UNMAP)
            }
        };
        #[expect(
            unsafe_code,
            reason = "the piece is another process's, whose mapping no safe wrapper takes away"
        )]
        // SAFETY: the kernel reads and writes 24 bytes, which there are.
        let done = unsafe { libc::ioctl(file.as_raw_fd(), number, request.as_mut_ptr()) };
        ensure!(done == 0, "{}", std::io::Error::last_os_error());
        request.get(2).copied().context("a size")
    }
}
