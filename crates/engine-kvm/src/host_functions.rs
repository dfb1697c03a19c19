//! What KVM is told of a guest's functions of the host's, by the files that VFIO has for them: KVM's device `vfio` (Linux,
//! Documentation/virt/kvm/devices/vfio.rst). Knows neither registers nor interrupts.
//!
//! A function behind an IOMMU that does not keep all DMA coherent with the processors' caches (VT-d without snoop control, as in the
//! lab) can go past them. Its driver in the guest then relies on types of memory and on WBINVD, and KVM, which makes both void
//! otherwise, has to let them be. It asks VFIO, and that needs the file: of the IOMMU group; from Linux 6.6 on the function's
//! own will do. KVM also posts no interrupts of devices to a guest of which it does not know that it has some.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use engine::{EngineError, FunctionGuard, Result, failed};
use kvm_bindings::{
    KVM_DEV_VFIO_FILE, KVM_DEV_VFIO_FILE_ADD, KVM_DEV_VFIO_FILE_DEL, kvm_create_device, kvm_device_attr,
    kvm_device_type_KVM_DEV_TYPE_VFIO,
};
use kvm_ioctls::{DeviceFd, VmFd};

/// What of KVM this needs: one such device, of which a VM has one at most.
pub(crate) trait Files: Send + Sync + Sized {
    /// What makes it.
    type Vm: Send + Sync;

    fn create(vm: &Self::Vm) -> io::Result<Self>;

    fn add(&self, file: BorrowedFd<'_>) -> io::Result<()>;

    fn remove(&self, file: BorrowedFd<'_>) -> io::Result<()>;
}

impl Files for DeviceFd {
    type Vm = VmFd;

    fn create(vm: &VmFd) -> io::Result<Self> {
        let mut request = kvm_create_device {
            type_: kvm_device_type_KVM_DEV_TYPE_VFIO,
            ..kvm_create_device::default()
        };
        Ok(vm.create_device(&mut request)?)
    }

    fn add(&self, file: BorrowedFd<'_>) -> io::Result<()> {
        set(self, KVM_DEV_VFIO_FILE_ADD, file)
    }

    fn remove(&self, file: BorrowedFd<'_>) -> io::Result<()> {
        set(self, KVM_DEV_VFIO_FILE_DEL, file)
    }
}

fn set(device: &DeviceFd, attribute: u32, file: BorrowedFd<'_>) -> io::Result<()> {
    let number = file.as_raw_fd();
    let request = kvm_device_attr {
        group: KVM_DEV_VFIO_FILE,
        attr: attribute.into(),
        addr: (&raw const number) as u64,
        ..kvm_device_attr::default()
    };
    Ok(device.set_device_attr(&request)?)
}

/// A VM's functions of the host's.
pub(crate) struct HostFunctions<F: Files = DeviceFd> {
    vm: Arc<F::Vm>,
    // Held for the time of one system call.
    state: Mutex<State<F>>,
}

struct State<F: Files> {
    device: Option<Arc<F>>,
    /// Groups that KVM knows, by the number of their file.
    groups: Vec<(u64, Weak<Known<F>>)>,
}

/// A file that KVM knows, for all functions that came from it.
struct Known<F: Files> {
    device: Arc<F>,
    file: OwnedFd,
}

impl<F: Files> Drop for Known<F> {
    fn drop(&mut self) {
        // KVM has the file open until then, and nobody else can open its group.
        if let Err(error) = self.device.remove(self.file.as_fd()) {
            log::error!(
                "KVM keeps a function of the host's that its guest has no more: KVM_DEV_VFIO_FILE_DEL: {error}"
            );
        }
    }
}

impl<F: Files + 'static> HostFunctions<F> {
    pub(crate) fn new(vm: Arc<F::Vm>) -> Self {
        Self {
            vm,
            state: Mutex::new(State {
                device: None,
                groups: Vec::new(),
            }),
        }
    }

    /// Has KVM know of a function by this file. Functions of one group come with one file, which KVM takes once.
    pub(crate) fn add(&self, file: BorrowedFd<'_>) -> Result<FunctionGuard> {
        // Not by the standard library, which sets flags once more with musl: no filter lets that pass.
        let file = rustix::io::fcntl_dupfd_cloexec(file, 3).map_err(failed("dup of a file of VFIO's"))?;
        // Of a group the number of its device node; a function's own file has none.
        let number = rustix::fs::fstat(&file)
            .map_err(failed("fstat of a file of VFIO's"))?
            .st_rdev;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.groups.retain(|(_, known)| known.strong_count() > 0);
        let same = state.groups.iter().filter(|(other, _)| number != 0 && *other == number);
        if let Some(known) = same.filter_map(|(_, known)| known.upgrade()).next() {
            return Ok(FunctionGuard::new(known));
        }
        let device = match &state.device {
            Some(device) => Arc::clone(device),
            None => Arc::new(F::create(&self.vm).map_err(failed("KVM_CREATE_DEVICE of KVM_DEV_TYPE_VFIO"))?),
        };
        state.device = Some(Arc::clone(&device));
        device.add(file.as_fd()).map_err(refused)?;
        let known = Arc::new(Known { device, file });
        state.groups.push((number, Arc::downgrade(&known)));
        Ok(FunctionGuard::new(known))
    }
}

fn refused(source: io::Error) -> EngineError {
    match source.raw_os_error() {
        Some(libc::EINVAL) => EngineError::Unusable(
            "this host's KVM takes no function of the host's by the file that came with it: send the file of its IOMMU group as well \
             (Linux 6.6 and later take the function's own)"
                .into(),
        ),
        _ => failed("KVM_DEV_VFIO_FILE_ADD")(source),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    type Calls = Arc<Mutex<Vec<&'static str>>>;

    struct Fake(Calls);

    impl Files for Fake {
        type Vm = Calls;

        fn create(calls: &Calls) -> io::Result<Self> {
            calls.lock().unwrap().push("create");
            Ok(Self(Arc::clone(calls)))
        }

        fn add(&self, _: BorrowedFd<'_>) -> io::Result<()> {
            self.0.lock().unwrap().push("add");
            Ok(())
        }

        fn remove(&self, _: BorrowedFd<'_>) -> io::Result<()> {
            self.0.lock().unwrap().push("remove");
            Ok(())
        }
    }

    #[test]
    fn a_group_is_known_once_and_as_long_as_one_of_its_functions_is_there() {
        let calls = Calls::default();
        let told = || std::mem::take(&mut *calls.lock().unwrap());
        let functions = HostFunctions::<Fake>::new(Arc::new(Arc::clone(&calls)));
        // Device nodes, as those of groups are, and files that are none, as those of functions.
        let (group, other) = (File::open("/dev/null").unwrap(), File::open("/dev/zero").unwrap());
        let (own, (alike, _writer)) = (File::open("/proc/self/status").unwrap(), io::pipe().unwrap());
        let first = functions.add(group.as_fd()).unwrap();
        let second = functions.add(group.as_fd()).unwrap();
        assert_eq!(told(), ["create", "add"]);
        let third = functions.add(other.as_fd()).unwrap();
        let fourth = (
            functions.add(own.as_fd()).unwrap(),
            functions.add(alike.as_fd()).unwrap(),
        );
        assert_eq!(told(), ["add", "add", "add"]);
        drop(first);
        assert!(told().is_empty(), "the second still has the group");
        drop(second);
        assert_eq!(told(), ["remove"]);
        let again = functions.add(group.as_fd()).unwrap();
        assert_eq!(told(), ["add"]);
        drop((again, third, fourth));
        assert_eq!(told(), ["remove"; 4]);
    }
}
