//! The daemon's own cgroup, beside those of its sandboxes: whoever started it by hand may be ended with all that is in its
//! cgroup. Knows nothing of sandboxes, nor of a service manager, which has a cgroup for its daemon.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use host::cgroup::{Limits, Root};

use crate::Error;

const NAME: &str = "daemon";

/// Where the process was before it moved, if it did.
#[derive(Debug, Default)]
pub(crate) struct OwnCgroup {
    before: OnceLock<PathBuf>,
}

impl OwnCgroup {
    /// Moves this process to a cgroup of its own below `root`.
    pub(crate) fn enter(&self, root: &Root) -> Result<(), Error> {
        let now = current(top(root))?;
        let cgroup = root.create(NAME, &Limits::default())?;
        enter(cgroup.path())?;
        // Whoever moves again was in this one before.
        self.before.get_or_init(|| now);
        Ok(())
    }

    /// Moves this process back, and removes `root` with nothing but this cgroup in it.
    pub(crate) fn take_away(&self, root: &Root) -> Result<(), Error> {
        if let Some(before) = self.before.get()
            && enter(before).is_err()
        {
            // That one is gone. The root of all takes any process, unless it is a container's.
            enter(top(root))?;
        }
        if root.find(NAME)?.is_some() {
            root.remove(NAME)?;
        }
        match fs::remove_dir(root.path()) {
            // A service manager removes what is empty in a service that has ended.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            done => done.map_err(Error::file("remove", root.path())),
        }
    }
}

fn top(root: &Root) -> &Path {
    root.path().parent().unwrap_or(root.path())
}

/// This process's cgroup (cgroups(7), "/proc/pid/cgroup"), below the mount point `top`.
fn current(top: &Path) -> Result<PathBuf, Error> {
    let path = Path::new("/proc/self/cgroup");
    let text = fs::read_to_string(path).map_err(Error::file("read", path))?;
    let own = text.lines().find_map(|line| line.strip_prefix("0::/"));
    Ok(top.join(own.unwrap_or_default()))
}

fn enter(cgroup: &Path) -> Result<(), Error> {
    let path = cgroup.join("cgroup.procs");
    fs::write(&path, "0").map_err(Error::file("write", &path))
}
