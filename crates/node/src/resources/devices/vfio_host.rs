//! Linux's VFIO as the node needs it: files that a VMM is given, and the right to lock memory. Knows no sandbox.

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;

use base::{ByteSize, PciAddress};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use vfio::VfioError;
use vfio::host::Sysfs;
use vmm_api::FdRef;
use vmm_api::devices::{MemoryFill, VfioPciConfig};

/// What of the host a device's way into a VMM needs.
pub(crate) trait VfioHost: fmt::Debug + Send + Sync {
    /// An empty container.
    fn container(&self) -> Result<OwnedFd, VfioError>;

    /// A function's group.
    fn group(&self, address: PciAddress) -> Result<OwnedFd, VfioError>;

    /// Whether the host gives a function by a file of its own.
    fn has_own_file(&self, address: PciAddress) -> Result<bool, VfioError>;

    /// iommufd, in which there is nothing.
    fn iommufd(&self) -> Result<OwnedFd, VfioError>;

    /// A function's own file.
    fn function(&self, address: PciAddress) -> Result<OwnedFd, VfioError>;

    /// Lets a process lock so many bytes of memory, if it may not lock more.
    fn allow_locking(&self, process: i32, bytes: u64) -> io::Result<()>;
}

/// Linux's VFIO.
#[derive(Debug)]
pub(crate) struct ThisVfio;

impl VfioHost for ThisVfio {
    fn container(&self) -> Result<OwnedFd, VfioError> {
        vfio::host::open_container()
    }

    fn group(&self, address: PciAddress) -> Result<OwnedFd, VfioError> {
        vfio::host::open_group(&Sysfs::of_host(), address)
    }

    fn has_own_file(&self, address: PciAddress) -> Result<bool, VfioError> {
        Ok(vfio::host::has_own_file(&Sysfs::of_host(), address)?)
    }

    fn iommufd(&self) -> Result<OwnedFd, VfioError> {
        vfio::host::open_iommufd()
    }

    fn function(&self, address: PciAddress) -> Result<OwnedFd, VfioError> {
        vfio::host::open_function(&Sysfs::of_host(), address)
    }

    fn allow_locking(&self, process: i32, bytes: u64) -> io::Result<()> {
        let process = Pid::from_raw(process);
        let before = prlimit(process, Resource::Memlock, limit(Some(bytes), Some(bytes)))?;
        // What was more, or none, stays so.
        let most = |before: Option<u64>| before.map(|before| before.max(bytes));
        prlimit(
            process,
            Resource::Memlock,
            limit(most(before.current), most(before.maximum)),
        )?;
        Ok(())
    }
}

/// Where a function of the host's is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostPlace {
    pub(crate) address: PciAddress,
    /// Its IOMMU group's number.
    pub(crate) group: Option<u32>,
    /// The NUMA node that it is near to, where the host says.
    pub(crate) numa_node: Option<u32>,
}

/// The files that a VM is sent with its functions, all of them in one way: iommufd and a function's own file where the host has them, else a
/// container and the function's group. Where its guest has an IOMMU each function has an address space of its own, and brings iommufd or a
/// container; else the first does.
#[derive(Debug)]
pub(crate) struct FunctionFiles {
    /// It has one: nothing comes along that all have in common.
    has_function: bool,
    /// Its VMM takes functions by files of their own.
    knows_iommufd: bool,
    iommufd: bool,
    /// Its guest has an IOMMU.
    separate: bool,
    /// How its memory is filled is said with what brings an address space, if its VMM knows that.
    knows_fill: bool,
    fill_rate: Option<ByteSize>,
    /// The groups that it has.
    pub(crate) groups: BTreeSet<u32>,
}

impl FunctionFiles {
    /// Of a VM with these functions, whose groups are to be named.
    pub(crate) fn of_vm(told: &vmm_api::Functions) -> Self {
        Self {
            has_function: !told.functions.is_empty(),
            knows_iommufd: told.iommufd.is_some(),
            iommufd: told.iommufd == Some(true),
            separate: false,
            knows_fill: told.memory_fill,
            fill_rate: None,
            groups: BTreeSet::new(),
        }
    }

    /// The same, whose guest may have an IOMMU.
    pub(crate) fn behind_iommu(mut self, has_iommu: bool) -> Self {
        self.separate = has_iommu;
        self
    }

    /// The same, whose memory is filled with so many bytes a second at most.
    pub(crate) fn filled_at(mut self, rate: Option<ByteSize>) -> Self {
        self.fill_rate = rate;
        self
    }

    /// The next function's.
    pub(crate) fn open(
        &mut self,
        host: &dyn VfioHost,
        place: HostPlace,
    ) -> Result<(VfioPciConfig, Vec<OwnedFd>), VfioError> {
        let HostPlace { address, group, .. } = place;
        let mut fds = Vec::new();
        let mut add = |fd: OwnedFd| {
            fds.push(fd);
            u32::try_from(fds.len() - 1).map(FdRef).ok()
        };
        let mut config = VfioPciConfig {
            name: address.to_string(),
            ..VfioPciConfig::default()
        };
        if !self.has_function {
            self.iommufd = self.knows_iommufd && host.has_own_file(address)?;
        }
        let brings_space = self.separate || !self.has_function;
        if self.iommufd {
            config.device = add(host.function(address)?);
            if brings_space {
                config.iommufd = add(host.iommufd()?);
            }
        } else {
            // The kernel opens a group once.
            if !group.is_some_and(|number| self.groups.contains(&number)) {
                config.group = add(host.group(address)?);
            }
            if brings_space {
                config.container = add(host.container()?);
            }
        }
        // Behind an IOMMU of the guest's nothing is filled.
        if !self.has_function && !self.separate && self.knows_fill {
            let fill = MemoryFill {
                rate: self.fill_rate,
                numa_node: place.numa_node,
            };
            config.memory_fill = Some(fill).filter(|fill| *fill != MemoryFill::default());
        }
        self.groups.extend(group);
        self.has_function = true;
        Ok((config, fds))
    }
}

fn limit(current: Option<u64>, maximum: Option<u64>) -> Rlimit {
    Rlimit { current, maximum }
}

/// A host whose files are `/dev/null`, with iommufd or without.
#[cfg(test)]
#[derive(Debug)]
pub(crate) struct NullFiles {
    pub(crate) iommufd: bool,
}

#[cfg(test)]
impl VfioHost for NullFiles {
    fn container(&self) -> Result<OwnedFd, VfioError> {
        Ok(std::fs::File::open("/dev/null").unwrap().into())
    }

    fn group(&self, _: PciAddress) -> Result<OwnedFd, VfioError> {
        self.container()
    }

    fn has_own_file(&self, _: PciAddress) -> Result<bool, VfioError> {
        Ok(self.iommufd)
    }

    fn iommufd(&self) -> Result<OwnedFd, VfioError> {
        self.container()
    }

    fn function(&self, _: PciAddress) -> Result<OwnedFd, VfioError> {
        self.container()
    }

    fn allow_locking(&self, _: i32, _: u64) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(functions: usize, iommufd: Option<bool>) -> vmm_api::Functions {
        let function = vmm_api::FunctionInfo {
            id: "0000:00:04.0".into(),
            state: vmm_api::FunctionState::Mapping,
        };
        vmm_api::Functions {
            functions: vec![function; functions],
            iommufd,
            ..vmm_api::Functions::default()
        }
    }

    fn place(group: u32, numa_node: Option<u32>) -> HostPlace {
        HostPlace {
            address: "0000:00:05.0".parse().unwrap(),
            group: Some(group),
            numa_node,
        }
    }

    /// Which files a configuration has: a group, a container, a function's own, iommufd.
    fn sent(files: &mut FunctionFiles, host: &NullFiles, group: u32) -> [bool; 4] {
        let (config, fds) = files.open(host, place(group, None)).unwrap();
        let all = [config.group, config.container, config.device, config.iommufd];
        assert_eq!(all.iter().flatten().count(), fds.len());
        all.map(|fd| fd.is_some())
    }

    #[test]
    fn functions_come_by_groups_where_the_host_has_no_iommufd() {
        let mut files = FunctionFiles::of_vm(&told(0, Some(false)));
        let sent = |files: &mut _, group| sent(files, &NullFiles { iommufd: false }, group);
        assert_eq!(sent(&mut files, 4), [true, true, false, false]);
        assert_eq!(sent(&mut files, 5), [true, false, false, false]);
        assert_eq!(sent(&mut files, 4), [false; 4], "its group is there");
    }

    #[test]
    fn functions_come_by_their_own_files_where_the_host_has_them() {
        let mut files = FunctionFiles::of_vm(&told(0, Some(false)));
        let sent = |files: &mut _, group| sent(files, &NullFiles { iommufd: true }, group);
        assert_eq!(sent(&mut files, 4), [false, false, true, true]);
        assert_eq!(sent(&mut files, 4), [false, false, true, false]);
        // But to a VMM of before, which does not know of them.
        let mut files = FunctionFiles::of_vm(&told(0, None));
        assert_eq!(sent(&mut files, 4), [true, true, false, false]);
    }

    #[test]
    fn how_memory_is_filled_is_said_with_the_first_function_where_that_is_known() {
        let host = NullFiles { iommufd: false };
        let fill = MemoryFill {
            rate: Some(ByteSize::gib(1)),
            numa_node: Some(4),
        };
        let said = |told: &vmm_api::Functions, iommu| {
            let mut files = FunctionFiles::of_vm(told).behind_iommu(iommu).filled_at(fill.rate);
            // The groups' numbers are their nodes', too.
            [4, 5].map(|group| files.open(&host, place(group, Some(group))).unwrap().0.memory_fill)
        };
        let knows = |functions| vmm_api::Functions {
            memory_fill: true,
            ..told(functions, Some(false))
        };
        assert_eq!(said(&knows(0), false), [Some(fill), None]);
        assert_eq!(said(&knows(1), false), [None; 2], "it is filled already");
        assert_eq!(said(&knows(0), true), [None; 2], "nothing is filled");
        assert_eq!(
            said(&told(0, Some(false)), false),
            [None; 2],
            "a VMM of before refuses it"
        );
        let mut files = FunctionFiles::of_vm(&knows(0)).filled_at(None);
        let (config, _) = files.open(&host, place(4, None)).unwrap();
        assert_eq!(config.memory_fill, None, "there is nothing to say");
    }

    #[test]
    fn behind_an_iommu_of_the_guests_each_function_brings_an_address_space() {
        for iommufd in [false, true] {
            let mut files = FunctionFiles::of_vm(&told(0, Some(false))).behind_iommu(true);
            let host = NullFiles { iommufd };
            let all = [!iommufd, !iommufd, iommufd, iommufd];
            assert_eq!([4, 5].map(|group| sent(&mut files, &host, group)), [all; 2]);
        }
        // The VMM says why it does not take one of a group that it has.
        let mut files = FunctionFiles::of_vm(&told(0, Some(false))).behind_iommu(true);
        let host = NullFiles { iommufd: false };
        assert_eq!(sent(&mut files, &host, 4), [true, true, false, false]);
        assert_eq!(sent(&mut files, &host, 4), [false, true, false, false]);
    }

    #[test]
    fn a_vm_that_has_functions_gets_more_in_the_same_way() {
        // iommufd was loaded since, or its module taken away.
        let mut files = FunctionFiles::of_vm(&told(1, Some(false)));
        assert_eq!(
            sent(&mut files, &NullFiles { iommufd: true }, 5),
            [true, false, false, false]
        );
        let mut files = FunctionFiles::of_vm(&told(1, Some(true)));
        assert_eq!(
            sent(&mut files, &NullFiles { iommufd: false }, 5),
            [false, false, true, false]
        );
    }
}
