//! Cgroups that are kept off isolated CPUs: all but those of the sandboxes that own them, and those above these.
//!
//! Linux 6.1 gives CPUs away as a whole (`cpuset.cpus.partition`) only to children of the root cgroup, and a sandbox's memory and
//! processes are accounted elsewhere; so it is the others that are told what is left for them.

use std::fs;
use std::path::{Path, PathBuf};

use super::files::CpuFile;
use super::journal::Locked;
use super::threads::CONTROL;
use super::{Error, names};

const CONTROLLERS: &str = "cgroup.subtree_control";

/// Has the children of all cgroups on the way to `open` have cpusets.
pub(super) fn enable(top: &Path, open: &[PathBuf], locked: &mut Locked) -> Result<(), Error> {
    let mut above: Vec<&Path> = vec![top];
    let ways = open.iter().flat_map(|cgroup| cgroup.ancestors().skip(1));
    above.extend(ways.filter(|path| path.starts_with(top)));
    // From the top on.
    above.sort();
    above.dedup();
    for cgroup in above {
        let path = cgroup.join(CONTROLLERS);
        let text = fs::read_to_string(&path).map_err(Error::file("read", &path))?;
        if text.split_whitespace().any(|name| name == "cpuset") {
            continue;
        }
        locked.journal.enabled.push(cgroup.to_owned());
        locked.store()?;
        fs::write(&path, "+cpuset").map_err(|why| Error::NoCpuset {
            path: cgroup.to_owned(),
            why,
        })?;
    }
    Ok(())
}

/// And as before; somebody else may need them meanwhile.
pub(super) fn disable(locked: &mut Locked) {
    while let Some(cgroup) = locked.journal.enabled.pop() {
        let path = cgroup.join(CONTROLLERS);
        match fs::write(&path, "-cpuset") {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                log::info!("{} keeps its cpusets: {error}", cgroup.display());
            }
            _ => (),
        }
    }
}

/// The files of the cgroups that are to be kept off.
pub(super) fn files(top: &Path, open: &[PathBuf]) -> Result<Vec<CpuFile>, Error> {
    let mut files = Vec::new();
    let mut ways = vec![top.to_owned()];
    while let Some(way) = ways.pop() {
        for child in names(&way)?.into_iter().map(|name| way.join(name)) {
            if open.contains(&child) {
                files.push(CpuFile::of_cgroup(&child.join(CONTROL)));
            } else if open.iter().any(|cgroup| cgroup.starts_with(&child)) {
                ways.push(child);
            } else if child.is_dir() {
                files.push(CpuFile::of_cgroup(&child));
            }
        }
    }
    Ok(files)
}
