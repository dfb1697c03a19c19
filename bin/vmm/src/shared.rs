//! Directories that are shared with the guest: which there are, and that the threads that serve them reach no others.

use std::os::fd::OwnedFd;

use device::FdTable;
use vmm_api::devices::{DeviceConfig, FsConfig, FsSource};
use vmm_api::{ApiError, DeviceSpec, ErrorKind};

use crate::refusal::refuse;

/// The directories that devices will share.
pub(crate) fn shared_directories(specs: &[DeviceSpec], fds: &FdTable) -> Result<Vec<OwnedFd>, ApiError> {
    let mut directories = Vec::new();
    for spec in specs.iter().filter(|spec| spec.kind == FsConfig::KIND) {
        let config: FsConfig = device::parse_config(spec).map_err(|error| refuse(ErrorKind::Invalid, error))?;
        let Some(FsSource::Directory(served)) = config.source else {
            continue;
        };
        if let Some(fd) = fds.peek(served.directory) {
            let copy = rustix::io::fcntl_dupfd_cloexec(fd, 3);
            directories.push(copy.map_err(|error| refuse(ErrorKind::Host, format!("copying a descriptor: {error}")))?);
        }
    }
    Ok(directories)
}

/// Keeps the threads that serve these directories beneath them. They are made by the privileged thread factory of a jailed
/// process; where there is none, there is nothing to be kept from it.
pub(crate) fn enclose(directories: Vec<OwnedFd>) -> Result<(), ApiError> {
    let serves = !directories.is_empty();
    let enclosed = base::thread::on_privileged_factory(move || host::confine::enclose_files(&directories))
        .map_err(|error| refuse(ErrorKind::Host, error))?;
    match enclosed.transpose() {
        Ok(Some(None)) if serves => {
            log::info!(
                "this kernel has no landlock, or one from before Linux 5.19, which cannot keep threads beneath shared \
                 directories: that these are mounts of their own has to do"
            );
            Ok(())
        }
        Ok(_) => Ok(()),
        Err(error) => Err(refuse(ErrorKind::Host, error)),
    }
}
