//! A device over a directory that the tests look into.

use std::os::fd::OwnedFd;
use std::path::Path;

use device::{DeviceContext, DeviceModule, FdTable};
use observe::Registry;
use rustix::fs::{Mode, OFlags};
use virtio::VirtioDevice;
use vmm_api::devices::{FsConfig, FsDirectory, FsOwners, FsSource};
use vmm_api::{DeviceSpec, FdRef};

fn open(path: &Path) -> OwnedFd {
    rustix::fs::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).unwrap()
}

/// What a test may change.
pub(crate) fn config() -> FsConfig {
    FsConfig {
        tag: "shared".into(),
        source: Some(FsSource::Directory(FsDirectory {
            directory: FdRef(0),
            descriptors: FdRef(1),
            read_only: false,
            owners: FsOwners::One {
                uid: rustix::process::geteuid().as_raw(),
                gid: rustix::process::getegid().as_raw(),
            },
            max_files: 64,
        })),
    }
}

/// The device, or why there is none.
pub(crate) fn make(config: &FsConfig, directory: &Path) -> Result<Box<dyn VirtioDevice>, device::CreateError> {
    let spec = DeviceSpec::new("shared", config).unwrap();
    let context = DeviceContext {
        id: "shared",
        metrics: &Registry::new(),
        no_space: &device::SpaceAlarm::new().unwrap(),
    };
    let fds = vec![open(directory), open(Path::new("/proc/self/fd"))];
    virtiofs::MODULE.create(&spec, &mut FdTable::new(fds), &context)
}
