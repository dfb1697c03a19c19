//! Directories that the guest shares with its host, mounted in the container's root. Knows neither what they are on the
//! host nor why they are there.

use std::fs;
use std::path::{Component, Path};

use agent_api::Share;
use rustix::mount::{MountFlags, mount};

use crate::Error;

/// Mounts one; this process is in the container's root, so that the image's links lead nowhere else.
pub(crate) fn mount_one(share: &Share) -> Result<(), Error> {
    let path = Path::new(&share.path);
    check(path)?;
    fs::create_dir_all(path).map_err(Error::system(format!("making {} for a volume", share.path)))?;
    // The host offers no device nodes; if one is there, it is none of the guest's.
    let mut flags = MountFlags::NODEV;
    if share.read_only {
        flags |= MountFlags::RDONLY;
    }
    mount(&share.tag, path, "virtiofs", flags, None)
        .map_err(Error::system(format!("mounting the volume at {}", share.path)))
}

/// An absolute path that means what it says.
fn check(path: &Path) -> Result<(), Error> {
    let mut components = path.components();
    let absolute = components.next() == Some(Component::RootDir);
    let mut rest = components.peekable();
    if absolute && rest.peek().is_some() && rest.all(|component| matches!(component, Component::Normal(_))) {
        return Ok(());
    }
    Err(Error::Refused(format!(
        "a volume cannot be mounted at {}: the path must be absolute, without `..`",
        path.display()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_absolute_and_plain() {
        for good in ["/src", "/a/b/", "/a//b"] {
            assert!(check(Path::new(good)).is_ok(), "{good}");
        }
        for bad in ["/", "", "src", "./src", "/a/../b", ".."] {
            assert!(check(Path::new(bad)).is_err(), "{bad}");
        }
    }
}
