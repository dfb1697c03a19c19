//! How functions come to a VM and into its address space: by their IOMMU groups and a container of VFIO's, or by files of their own and
//! iommufd. What is mapped there is the other files' affair.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vfio::{Function, Group, Iommufd, Type1, VfioError};
use vmm_api::devices::VfioPciConfig;

use super::fill::FillPolicy;
use super::{DmaSpace, refused};
use crate::{CreateError, FdTable};

/// The address spaces of a VM's functions.
pub enum DmaSpaces {
    /// One that all of them share, from the first to the last.
    Shared(Option<Arc<DmaSpace>>),
    /// One for each, which goes with it: behind an IOMMU that the guest has.
    Separate {
        /// Whether the last one came by a file of its own.
        iommufd: bool,
    },
}

impl Default for DmaSpaces {
    fn default() -> Self {
        Self::Shared(None)
    }
}

/// A function that a VM has been given.
pub struct Taken {
    /// It.
    pub function: Function,
    /// What it reaches.
    pub space: Arc<DmaSpace>,
    /// Its IOMMU group, by which an engine is told of it, and which it keeps open; of one that came by a file of its own that file.
    pub known_by: KnownBy,
}

/// The file by which an engine is told of a function.
pub enum KnownBy {
    /// Its group's, open as long as the function is.
    Group(Arc<Group>),
    /// Its own, once more: to be closed as soon as the engine has been told.
    Itself(OwnedFd),
}

impl DmaSpaces {
    /// The function that was sent with a configuration, in the address space of the VM or one of its own. What was sent for a VM's first function
    /// beside it is closed if the VM has one that functions share.
    ///
    /// # Errors
    /// What the first function needs did not come along, the descriptors are something else, the VM's functions came the other way,
    /// memory cannot be filled as it says, or the host refuses.
    pub fn take(&mut self, config: &VfioPciConfig, fds: &mut FdTable) -> Result<Taken, CreateError> {
        let group = fds.take_optional(config.group)?.map(Group::from_fd);
        let container = fds.take_optional(config.container)?;
        let device = fds.take_optional(config.device)?;
        let iommufd = fds.take_optional(config.iommufd)?;
        let fill = FillPolicy::of(config.memory_fill.unwrap_or_default())?;
        match device {
            Some(device) => self.take_itself(device, iommufd, fill),
            None => self.take_of_group(&config.name, (container, group), fill),
        }
    }

    fn take_itself(
        &mut self,
        device: OwnedFd,
        iommufd: Option<OwnedFd>,
        fill: FillPolicy,
    ) -> Result<Taken, CreateError> {
        let space = match (self.shared(), iommufd) {
            (Some(space), _) => Arc::clone(space),
            (None, Some(iommufd)) => DmaSpace::of_iommufd(iommufd, fill)?,
            (None, None) => {
                return Err(CreateError::Value(
                    "the first function of a VM that comes by a file of its own, and each behind an IOMMU of the guest's, comes with iommufd: \
                     send both"
                        .into(),
                ));
            }
        };
        let Access::Iommufd(iommufd) = &space.access else {
            return Err(CreateError::Value(
                "the VM's functions came by their IOMMU groups: send this one's, and not its own file".into(),
            ));
        };
        iommufd
            .attach(device.as_fd())
            .map_err(refused("a PCI function of the host"))?;
        let what = "a file of a PCI function's";
        let known_by = rustix::io::fcntl_dupfd_cloexec(&device, 3).map_err(|error| CreateError::Host {
            what,
            source: error.into(),
        })?;
        let function = Function::from_fd(device).map_err(refused("a PCI function of the host"))?;
        self.keep(&space);
        Ok(Taken {
            function,
            space,
            known_by: KnownBy::Itself(known_by),
        })
    }

    fn take_of_group(
        &mut self,
        name: &str,
        (container, group): (Option<OwnedFd>, Option<Group>),
        fill: FillPolicy,
    ) -> Result<Taken, CreateError> {
        let is_separate = matches!(self, Self::Separate { .. });
        let space = match (self.shared(), container, group) {
            (Some(space), ..) if space.has_iommufd() => {
                return Err(CreateError::Value(
                    "the VM's functions came by files of their own: send this one's, and not its IOMMU group".into(),
                ));
            }
            (Some(space), _, None) => Arc::clone(space),
            (Some(space), _, Some(group)) => {
                space.access.join(group)?;
                Arc::clone(space)
            }
            (None, Some(container), Some(group)) => DmaSpace::of_group(container, group, fill)?,
            (None, ..) if is_separate => {
                return Err(CreateError::Value(
                    "behind an IOMMU of the guest's each function comes with its IOMMU group and a container of VFIO's, as it has an address \
                     space of its own, which functions of one group cannot have: send both, and one function of a group"
                        .into(),
                ));
            }
            (None, ..) => {
                return Err(CreateError::Value(
                    "the first function of a VM comes with a container of VFIO's and its IOMMU group: send both".into(),
                ));
            }
        };
        self.keep(&space);
        let (function, group) = space.access.take(name)?;
        Ok(Taken {
            function,
            space,
            known_by: KnownBy::Group(group),
        })
    }

    /// Whether the VM's functions came by files of their own.
    pub fn has_iommufd(&self) -> bool {
        match self {
            Self::Shared(space) => space.as_ref().is_some_and(|space| space.has_iommufd()),
            Self::Separate { iommufd } => *iommufd,
        }
    }

    /// As [`DmaSpace::close_groups`], if there is a function. One that has an address space of its own closes its group itself.
    pub fn close_groups(&self) {
        if let Some(space) = self.shared() {
            space.close_groups();
        }
    }

    /// The last function has left: the next one comes with a container, or with iommufd.
    pub fn clear(&mut self) {
        *self = match self {
            Self::Shared(_) => Self::Shared(None),
            Self::Separate { .. } => Self::Separate { iommufd: false },
        };
    }

    fn shared(&self) -> Option<&Arc<DmaSpace>> {
        match self {
            Self::Shared(space) => space.as_ref(),
            Self::Separate { .. } => None,
        }
    }

    /// A function has come, which reaches this one.
    fn keep(&mut self, space: &Arc<DmaSpace>) {
        match self {
            Self::Shared(shared) => *shared = Some(Arc::clone(space)),
            Self::Separate { iommufd } => *iommufd = space.has_iommufd(),
        }
    }
}

/// By what a VM's functions came.
pub(super) enum Access {
    Groups(Groups),
    Iommufd(Arc<Iommufd>),
    /// The address space is served by something else.
    None,
}

/// The groups of a VM's functions. The container works as long as one of them is open.
pub(super) struct Groups {
    container: Arc<Type1>,
    /// Functions have theirs as well.
    open: Mutex<Vec<Arc<Group>>>,
}

impl Groups {
    fn open(&self) -> MutexGuard<'_, Vec<Arc<Group>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Access {
    fn join(&self, group: Group) -> Result<(), CreateError> {
        let Self::Groups(groups) = self else { return Ok(()) };
        groups.container.join(&group).map_err(refused("its IOMMU group"))?;
        groups.open().push(Arc::new(group));
        Ok(())
    }

    /// A function of one of the groups, and that group, which it keeps open.
    fn take(&self, name: &str) -> Result<(Function, Arc<Group>), CreateError> {
        let mut last = VfioError::Other("its IOMMU group did not come along");
        let open = match self {
            Self::Groups(groups) => Some(groups.open()),
            Self::Iommufd(_) | Self::None => None,
        };
        for group in open.iter().flat_map(|open| open.iter().rev()) {
            match group.take(name) {
                Ok(function) => return Ok((function, Arc::clone(group))),
                Err(error) => last = error,
            }
        }
        Err(refused("a PCI function of the host")(last))
    }

    pub(super) fn close_groups(&self) {
        if let Self::Groups(groups) = self {
            groups.open().retain(|group| Arc::strong_count(group) > 1);
        }
    }
}

impl DmaSpace {
    fn of_group(container: OwnedFd, group: Group, fill: FillPolicy) -> Result<Arc<Self>, CreateError> {
        let container = Arc::new(Type1::new(container, &group).map_err(refused("a container of VFIO's"))?);
        let groups = Groups {
            container: Arc::clone(&container),
            open: Mutex::new(vec![Arc::new(group)]),
        };
        Ok(Self::with_access(container, Access::Groups(groups), fill))
    }

    fn of_iommufd(iommufd: OwnedFd, fill: FillPolicy) -> Result<Arc<Self>, CreateError> {
        let space = Arc::new(Iommufd::new(iommufd).map_err(refused("iommufd"))?);
        let access = Access::Iommufd(Arc::clone(&space));
        Ok(Self::with_access(space, access, fill))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use vfio::fake::FakeSpace;
    use vmm_api::FdRef;

    /// A configuration with these descriptors: of a container, a group, a function, and iommufd.
    fn config(fds: [Option<u32>; 4]) -> VfioPciConfig {
        let [container, group, device, iommufd] = fds.map(|fd| fd.map(FdRef));
        VfioPciConfig {
            name: "0000:00:04.0".into(),
            group,
            container,
            device,
            iommufd,
            memory_fill: None,
        }
    }

    fn refusal(spaces: &mut DmaSpaces, fds: [Option<u32>; 4]) -> CreateError {
        let fd = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let mut sent = FdTable::new(vec![fd(), fd()]);
        spaces.take(&config(fds), &mut sent).err().unwrap()
    }

    #[test]
    fn descriptors_that_are_something_else_and_those_that_lack_are_refused() {
        let mut spaces = DmaSpaces::default();
        let mut refusal = |fds| refusal(&mut spaces, fds);
        for both in [[Some(0), Some(1), None, None], [None, None, Some(0), Some(1)]] {
            assert!(matches!(refusal(both), CreateError::Host { .. }));
        }
        assert!(matches!(
            refusal([Some(0), Some(2), None, None]),
            CreateError::MissingFd(2)
        ));
        assert!(matches!(
            refusal([None, None, Some(0), Some(2)]),
            CreateError::MissingFd(2)
        ));
        for (container, group) in [(None, None), (Some(0), None), (None, Some(0))] {
            let told = refusal([container, group, None, None]).to_string();
            assert!(told.contains("container") && told.contains("send both"), "{told}");
        }
        let told = refusal([None, None, Some(0), None]).to_string();
        assert!(told.contains("iommufd") && told.contains("send both"), "{told}");
    }

    #[test]
    fn a_further_function_of_a_group_brings_nothing() {
        let space = DmaSpace::new(Arc::new(FakeSpace::new()));
        let mut spaces = DmaSpaces::Shared(Some(Arc::clone(&space)));
        let told = refusal(&mut spaces, [None; 4]).to_string();
        assert!(told.contains("did not come along"), "{told}");
        spaces.clear();
        let told = refusal(&mut spaces, [None; 4]).to_string();
        assert!(told.contains("send both"), "{told}");
    }

    #[test]
    fn all_functions_of_a_vm_come_in_one_way() {
        let space = DmaSpace::new(Arc::new(FakeSpace::new()));
        let mut spaces = DmaSpaces::Shared(Some(space));
        let told = refusal(&mut spaces, [None, None, Some(0), Some(1)]).to_string();
        assert!(told.contains("came by their IOMMU groups"), "{told}");
    }

    #[test]
    fn behind_an_iommu_each_function_brings_what_the_first_one_does() {
        let mut spaces = DmaSpaces::Separate { iommufd: true };
        for (fds, said) in [
            ([None; 4], "one function of a group"),
            ([None, Some(0), None, None], "one function of a group"),
            ([None, None, Some(0), None], "each behind an IOMMU"),
        ] {
            let told = refusal(&mut spaces, fds).to_string();
            assert!(told.contains(said), "{told}");
        }
        assert!(spaces.has_iommufd(), "those that there are came so");
        spaces.clear();
        assert!(matches!(spaces, DmaSpaces::Separate { iommufd: false }));
    }
}
