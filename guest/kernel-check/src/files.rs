//! Checks of file systems and device nodes. Knows nothing of processes and networks.

use crate::Check;
use rustix::fs::{XattrFlags, setxattr};
use rustix::mount::{MountFlags, mount};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use std::ffi::CString;
use std::fs;
use std::io;
use std::path::Path;

pub(crate) const CHECKS: &[Check] = &[
    ("file systems", file_systems),
    ("device nodes", device_nodes),
    ("tmpfs with xattr", tmpfs_xattr),
    ("overlay", overlay),
    ("cgroup2 controllers", cgroup2),
    ("mqueue", || mount_only("mqueue")),
    ("hugetlbfs", || mount_only("hugetlbfs")),
    ("bpf file system", || mount_only("bpf")),
    ("binfmt_misc", || mount_only("binfmt_misc")),
    ("securityfs", || mount_only("securityfs")),
    ("devpts", || mount_only("devpts")),
    // Which of its settings is on depends on the guest's size: below 512 MB the kernel chooses "never".
    ("huge pages", || {
        contains("/sys/kernel/mm/transparent_hugepage/enabled", "madvise")
    }),
    ("configuration in /proc", || fs::metadata("/proc/config.gz").map(drop)),
    ("driver of an IOMMU", || {
        fs::metadata("/sys/bus/virtio/drivers/virtio_iommu").map(drop)
    }),
    ("symbols", || contains("/proc/kallsyms", " start_kernel")),
];

/// PID 1's root file system: what the checks read.
pub(crate) fn prepare_root() -> io::Result<()> {
    for (kind, target) in [
        ("proc", "/proc"),
        ("sysfs", "/sys"),
        ("devtmpfs", "/dev"),
        ("tmpfs", "/tmp"),
    ] {
        fs::create_dir_all(target)?;
        mount_at(kind, target, "")?;
    }
    Ok(())
}

pub(crate) fn contains(file: &str, wanted: &str) -> io::Result<()> {
    let text = fs::read_to_string(file)?;
    if text.contains(wanted) {
        Ok(())
    } else {
        Err(io::Error::other(format!("{file} lacks \"{wanted}\"")))
    }
}

fn mount_at(kind: &str, target: &str, options: &str) -> io::Result<()> {
    let options = CString::new(options)?;
    mount(kind, target, kind, MountFlags::empty(), options.as_c_str())
        .map_err(|error| io::Error::other(format!("mount -t {kind} {target}: {error}")))
}

/// A mount namespace of this check's own with an empty tmpfs at the returned path.
fn scratch() -> io::Result<&'static str> {
    #[allow(
        unsafe_code,
        reason = "unshare is unsafe in rustix because of file descriptor tables, which stay shared here"
    )]
    // SAFETY: 1. FILES is not among the flags, so no descriptor's owner changes.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }?;
    rustix::mount::mount_change(
        "/",
        rustix::mount::MountPropagationFlags::PRIVATE | rustix::mount::MountPropagationFlags::REC,
    )
    .or_else(|error| {
        if error == rustix::io::Errno::INVAL {
            Ok(())
        } else {
            Err(error)
        }
    })?;
    fs::create_dir_all("/tmp")?;
    mount_at("tmpfs", "/tmp", "mode=0755")?;
    Ok("/tmp")
}

fn mount_only(kind: &str) -> io::Result<()> {
    let target = format!("{}/mounted", scratch()?);
    fs::create_dir(&target)?;
    mount_at(kind, &target, "")
}

fn file_systems() -> io::Result<()> {
    let text = fs::read_to_string("/proc/filesystems")?;
    let known: Vec<&str> = text.split_whitespace().collect();
    missing(
        [
            "erofs", "ext4", "ext2", "overlay", "tmpfs", "fuse", "virtiofs", "cgroup2",
        ]
        .into_iter()
        .filter(|kind| !known.contains(kind)),
    )
}

fn device_nodes() -> io::Result<()> {
    missing(
        [
            "fuse",
            "net/tun",
            "loop-control",
            "ptmx",
            "hwrng",
            "port",
            "mem",
            "kmsg",
            "vsock",
            "urandom",
            "userfaultfd",
        ]
        .into_iter()
        .filter(|node| !Path::new("/dev").join(node).exists()),
    )
}

/// An error that names everything in `what`, or nothing wrong when that is empty.
pub(crate) fn missing<'a>(what: impl Iterator<Item = &'a str>) -> io::Result<()> {
    let names: Vec<&str> = what.collect();
    if names.is_empty() {
        Ok(())
    } else {
        Err(io::Error::other(format!("missing: {}", names.join(", "))))
    }
}

fn tmpfs_xattr() -> io::Result<()> {
    let file = format!("{}/file", scratch()?);
    fs::write(&file, "")?;
    setxattr(&file, "trusted.check", b"value", XattrFlags::empty())?;
    Ok(())
}

/// What the agent does to make a read-only image writable: upper and work directory on tmpfs; a whiteout hides a file.
fn overlay() -> io::Result<()> {
    let base = scratch()?;
    for directory in ["lower", "upper", "work", "merged"] {
        fs::create_dir(format!("{base}/{directory}"))?;
    }
    fs::write(format!("{base}/lower/file"), "lower")?;
    let merged = format!("{base}/merged");
    mount_at(
        "overlay",
        &merged,
        &format!("lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/work"),
    )?;
    fs::remove_file(format!("{merged}/file"))?;
    if fs::exists(format!("{merged}/file"))? || !fs::exists(format!("{base}/lower/file"))? {
        return Err(io::Error::other(
            "removing a file from the overlay did not hide it in the lower layer",
        ));
    }
    Ok(())
}

fn cgroup2() -> io::Result<()> {
    let target = format!("{}/cgroup", scratch()?);
    fs::create_dir(&target)?;
    mount_at("cgroup2", &target, "")?;
    let text = fs::read_to_string(format!("{target}/cgroup.controllers"))?;
    let known: Vec<&str> = text.split_whitespace().collect();
    missing(
        ["cpuset", "cpu", "io", "memory", "hugetlb", "pids", "rdma", "misc"]
            .into_iter()
            .filter(|name| !known.contains(name)),
    )
}
