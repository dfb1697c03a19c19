//! File systems in the guest's memory that a sandbox was asked to have. Knows nothing of the root that they lie over.

use std::ffi::CString;
use std::fs;
use std::path::Path;

use agent_api::TmpfsMount;
use rustix::mount::{MountFlags, mount};

use crate::Error;

/// Mounts one.
pub(crate) fn mount_one(wanted: &TmpfsMount) -> Result<(), Error> {
    let path = Path::new(&wanted.path);
    if !path.is_absolute() {
        return Err(Error::Refused(format!(
            "a tmpfs at {} cannot be: the path must be absolute",
            path.display()
        )));
    }
    fs::create_dir_all(path).map_err(Error::system(format!("making {} for a tmpfs", path.display())))?;
    let mut options = format!("mode={:o}", wanted.mode & 0o7777);
    if let Some(bytes) = wanted.bytes {
        options.push_str(&format!(",size={bytes}"));
    }
    let options = CString::new(options).map_err(|error| Error::Refused(error.to_string()))?;
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV;
    flags.set(MountFlags::NOEXEC, !wanted.exec);
    mount("tmpfs", path, "tmpfs", flags, options.as_c_str())
        .map_err(Error::system(format!("mounting a tmpfs at {}", path.display())))
}
