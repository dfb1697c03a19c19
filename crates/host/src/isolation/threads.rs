//! A VMM's threads, each where it belongs: the vCPUs on CPUs of their own, the rest on those that are everybody's.
//!
//! The sandbox's cgroup becomes the root of a threaded subtree (Linux, `cgroup-v2.rst`, "Threads"), so that memory and processes are
//! accounted as ever. A cpuset, unlike an affinity, outlasts CPUs that come and go.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use base::CpuSet;

use super::{Error, names};

/// Where all threads are but the vCPUs.
pub const CONTROL: &str = "control";

/// Between two looks for threads.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// A vCPU's thread is called so, and its cgroup, with its number behind.
const VCPU: &str = "vcpu";

/// Makes the children of a sandbox's cgroup: one for each of its vCPUs with a CPU, and one with the others.
pub(super) fn divide(cgroup: &Path, cpus: &CpuSet, others: &CpuSet, nodes: Option<&str>) -> Result<(), Error> {
    if let Some(nodes) = nodes {
        write(&cgroup.join("cpuset.mems"), nodes)?;
    }
    let own = cpus.iter().enumerate();
    let mut children: Vec<(PathBuf, String)> = own.map(|(index, cpu)| (vcpu(cgroup, index), cpu.to_string())).collect();
    children.push((cgroup.join(CONTROL), others.to_string()));
    for (child, _) in &children {
        match fs::create_dir(child) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => (),
            made => made.map_err(Error::file("make", child))?,
        }
        write(&child.join("cgroup.type"), "threaded")?;
    }
    write(&cgroup.join("cgroup.subtree_control"), "+cpuset")?;
    children
        .iter()
        .try_for_each(|(child, cpus)| write(&child.join("cpuset.cpus"), cpus))
}

/// And as it was, as far as it was divided.
pub(super) fn unite(cgroup: &Path) {
    let children = names(cgroup).unwrap_or_default();
    let own = children
        .iter()
        .filter(|name| *name == CONTROL || name.starts_with(VCPU));
    let gone = own.map(|name| fs::remove_dir(cgroup.join(name)));
    let all: std::io::Result<()> = gone.collect();
    if let Err(error) = all.and_then(|()| fs::write(cgroup.join("cgroup.subtree_control"), "-cpuset")) {
        log::info!("{} stays divided until it is removed: {error}", cgroup.display());
    }
}

/// Takes the vCPUs' threads of a process to their CPUs, as soon as they have said what they are called.
///
/// # Errors
/// The process is gone, it still lacks one of the `count` threads after `limit`, or the kernel refuses.
pub fn place(cgroup: &Path, pid: u32, count: usize, limit: Duration) -> Result<(), Error> {
    let tasks = PathBuf::from(format!("/proc/{pid}/task"));
    let deadline = Instant::now() + limit;
    loop {
        let threads = vcpus_of(&tasks, count)?;
        if threads.len() == count {
            let mut threads = threads.into_iter();
            return threads.try_for_each(|(index, task)| write(&vcpu(cgroup, index).join("cgroup.threads"), &task));
        }
        if Instant::now() >= deadline {
            return Err(Error::Format {
                path: tasks,
                why: format!("{} of {count} vCPUs have a thread", threads.len()),
            });
        }
        thread::sleep(LOOK_AGAIN);
    }
}

/// The threads of so many vCPUs that are there, by their vCPUs' numbers.
fn vcpus_of(tasks: &Path, count: usize) -> Result<BTreeMap<usize, String>, Error> {
    let mut found = BTreeMap::new();
    for task in names(tasks)? {
        // One that ends meanwhile is none.
        let Ok(name) = fs::read_to_string(tasks.join(&task).join("comm")) else {
            continue;
        };
        let number = name.trim().strip_prefix(VCPU).and_then(|number| number.parse().ok());
        if let Some(index) = number.filter(|index| *index < count) {
            found.insert(index, task);
        }
    }
    Ok(found)
}

fn vcpu(cgroup: &Path, index: usize) -> PathBuf {
    cgroup.join(format!("{VCPU}{index}"))
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    fs::write(path, text).map_err(Error::file("write", path))
}
