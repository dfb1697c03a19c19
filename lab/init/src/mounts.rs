//! The lab's file systems: from the initramfs to the root image, then the data disks. Knows nothing of networks.

use std::ffi::CString;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

use crate::disks::{self, Content, Format};
use crate::log;
use lab_init::contract::{BINARIES, EXT4_DISK, MODULES_DISK, ROOT_DISK, XFS_DISK};

/// Mounts that exist from the start and move along to the root image.
const KERNEL: [(&str, &str); 3] = [("devtmpfs", "/dev"), ("proc", "/proc"), ("sysfs", "/sys")];

/// Mounts made once the root image is reached.
const RUNTIME: [(&str, &str, &str); 7] = [
    ("tmpfs", "/run", "mode=0755"),
    ("tmpfs", "/tmp", "mode=1777"),
    ("devpts", "/dev/pts", "mode=0620,gid=5,ptmxmode=0666"),
    ("tmpfs", "/dev/shm", "mode=1777"),
    ("cgroup2", "/sys/fs/cgroup", ""),
    ("tracefs", "/sys/kernel/tracing", ""),
    ("debugfs", "/sys/kernel/debug", ""),
];

/// Data disks by serial number, what they become, and where.
const DATA: [(&str, Format, &str); 2] = [
    (XFS_DISK, Format::Xfs, "/mnt/xfs"),
    (EXT4_DISK, Format::Ext4, "/mnt/ext4"),
];

/// Directories of the XFS disk that stand in for directories of the root image, so that they outlive the lab.
const KEPT: [(&str, &str); 2] = [("/mnt/xfs/state", "/var/lib/basalt"), ("/mnt/xfs/opt", "/opt/basalt")];

fn mount(source: &str, target: &str, kind: &str, flags: MountFlags, data: &str) -> Result<()> {
    let data = CString::new(data)?;
    rustix::mount::mount(source, target, kind, flags, data.as_c_str())
        .with_context(|| format!("cannot mount {kind} at {target}"))
}

fn make_directory(path: &str) -> Result<()> {
    fs::create_dir_all(path).with_context(|| format!("cannot make the directory {path}"))
}

/// `/dev`, `/proc` and `/sys` of the initramfs.
pub(crate) fn kernel() -> Result<()> {
    for (kind, target) in KERNEL {
        make_directory(target)?;
        mount(kind, target, kind, MountFlags::empty(), "")?;
    }
    Ok(())
}

/// Goes from the initramfs to the root image: read-only below, a tmpfs above, so that the image never changes.
pub(crate) fn enter_root() -> Result<()> {
    for directory in ["/lower", "/upper", "/newroot"] {
        make_directory(directory)?;
    }
    let device = disks::find(ROOT_DISK)?;
    mount(&device.to_string_lossy(), "/lower", "erofs", MountFlags::RDONLY, "")?;
    mount("tmpfs", "/upper", "tmpfs", MountFlags::empty(), "mode=0755")?;
    make_directory("/upper/data")?;
    make_directory("/upper/work")?;
    let layers = "lowerdir=/lower,upperdir=/upper/data,workdir=/upper/work";
    mount("overlay", "/newroot", "overlay", MountFlags::empty(), layers)?;
    for (_, target) in KERNEL {
        let moved = format!("/newroot{target}");
        rustix::mount::mount_move(target, moved.as_str()).with_context(|| format!("cannot move {target}"))?;
    }
    // The modules and this program's file: gone from memory once the root has changed.
    for left in ["/lib", "/lab"] {
        fs::remove_dir_all(left).with_context(|| format!("cannot remove {left} of the initramfs"))?;
    }
    fs::remove_file("/init").context("cannot remove /init of the initramfs")?;
    std::env::set_current_dir("/newroot").context("cannot enter the root image")?;
    rustix::mount::mount_move(".", "/").context("cannot move the root image to /")?;
    rustix::process::chroot(".").context("cannot make the root image the root")?;
    std::env::set_current_dir("/").context("cannot enter the new root")?;
    Ok(())
}

/// The running kernel's modules, where the root image has another's: they are on a disk of their own.
pub(crate) fn modules() -> Result<()> {
    const MODULES: &str = "/usr/lib/modules";
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    if Path::new(MODULES).join(release).exists() {
        return Ok(());
    }
    let device = disks::find(MODULES_DISK)?;
    mount(&device.to_string_lossy(), MODULES, "erofs", MountFlags::RDONLY, "")
}

/// The file systems that a Linux system has at run time.
pub(crate) fn runtime() -> Result<()> {
    for (kind, target, data) in RUNTIME {
        make_directory(target)?;
        mount(kind, target, kind, MountFlags::empty(), data)?;
    }
    for (link, target) in [
        ("fd", "/proc/self/fd"),
        ("stdin", "fd/0"),
        ("stdout", "fd/1"),
        ("stderr", "fd/2"),
    ] {
        let link = format!("/dev/{link}");
        std::os::unix::fs::symlink(target, &link).with_context(|| format!("cannot make the link {link}"))?;
    }
    Ok(())
}

/// The data disks, formatted if they are blank, and the directories that are kept on them.
pub(crate) fn data() -> Result<()> {
    for (serial, format, target) in DATA {
        let device = disks::find(serial)?;
        match disks::inspect(&device, format)? {
            Content::Formatted => {}
            Content::Blank => {
                log(&format!("formatting the blank disk {serial} as {}", format.name()));
                disks::format(&device, format)?;
            }
            Content::Foreign => bail!("the disk {serial} holds something that is not {}", format.name()),
        }
        mount_or_format(&device, format, target)?;
    }
    for (kept, target) in KEPT {
        make_directory(kept)?;
        make_directory(target)?;
        rustix::mount::mount_bind(kept, target).with_context(|| format!("cannot put {kept} at {target}"))?;
    }
    make_directory(BINARIES)
}

/// A data disk is a cache of what the outside has. One that cannot be mounted (the lab was killed while writing) is made
/// anew, and the console says so.
fn mount_or_format(device: &Path, format: Format, target: &str) -> Result<()> {
    make_directory(target)?;
    let attempt = || {
        mount(
            &device.to_string_lossy(),
            target,
            format.name(),
            MountFlags::NOATIME,
            "",
        )
    };
    let Err(error) = attempt() else { return Ok(()) };
    log(&format!("{error:#}; the disk is damaged and is formatted anew"));
    disks::format(device, format)?;
    attempt()
}

/// Writes everything out and detaches what can be detached, before power goes off.
pub(crate) fn leave() {
    rustix::fs::sync();
    let kept = KEPT.iter().map(|(_, target)| *target);
    let data = DATA.iter().map(|(_, _, target)| *target);
    for target in kept.chain(data) {
        match rustix::mount::unmount(target, UnmountFlags::empty()) {
            // EINVAL: not mounted, since the start ended before that.
            Ok(()) | Err(Errno::INVAL) => {}
            // Still used by a process that would not die: what was written is on the disk since the sync above.
            Err(error) => log(&format!("{target} stays mounted: {error}")),
        }
    }
    rustix::fs::sync();
}
