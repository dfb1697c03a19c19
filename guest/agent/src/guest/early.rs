//! The first steps of PID 1: kernel file systems, the benchmark's marker, limits. Nothing here waits for anybody.

use std::fs::{self, DirBuilder};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, symlink};

use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};
use rustix::process::{Resource, Rlimit, setrlimit};

use crate::Error;
use crate::info::Memory;

/// Where cgroup version 2 is mounted.
pub(crate) const CGROUPS: &str = "/sys/fs/cgroup";

/// The word on the kernel's command line that asks for the marker.
const MARKER: &str = "basalt.marker";

/// Open files a process may have: what container engines give, and the kernel's default for `fs.nr_open`.
const OPEN_FILES: u64 = 1_048_576;

/// How much the kernel compacts memory for nobody in particular. Its thread for that wakes twice a second, and each time that is an
/// interrupt of the vCPU; who asks for a large page still has memory compacted.
const COMPACTION: &str = "/proc/sys/vm/compaction_proactiveness";

/// A file system to mount.
struct Mount {
    fs: &'static str,
    target: &'static str,
    flags: MountFlags,
    data: &'static std::ffi::CStr,
    /// Absent from some kernels, and then nobody misses it.
    optional: bool,
}

const QUIET: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);

/// In this order: later ones lie within earlier ones.
const MOUNTS: [Mount; 6] = [
    Mount {
        fs: "sysfs",
        target: "/sys",
        flags: QUIET,
        data: c"",
        optional: false,
    },
    Mount {
        fs: "devtmpfs",
        target: "/dev",
        flags: MountFlags::NOSUID,
        data: c"mode=755",
        optional: false,
    },
    Mount {
        fs: "devpts",
        target: "/dev/pts",
        flags: MountFlags::NOSUID.union(MountFlags::NOEXEC),
        // 5 is the group `tty` of every distribution.
        data: c"gid=5,mode=620,ptmxmode=666",
        optional: false,
    },
    Mount {
        fs: "tmpfs",
        target: "/dev/shm",
        flags: MountFlags::NOSUID.union(MountFlags::NODEV),
        data: c"mode=1777",
        optional: false,
    },
    Mount {
        fs: "mqueue",
        target: "/dev/mqueue",
        flags: QUIET,
        data: c"",
        optional: true,
    },
    Mount {
        fs: "cgroup2",
        target: CGROUPS,
        flags: QUIET,
        data: c"",
        optional: false,
    },
];

/// Names that programs expect in `/dev` and devtmpfs does not make.
const LINKS: [(&str, &str); 4] = [
    ("/proc/self/fd", "/dev/fd"),
    ("/proc/self/fd/0", "/dev/stdin"),
    ("/proc/self/fd/1", "/dev/stdout"),
    ("/proc/self/fd/2", "/dev/stderr"),
];

/// `/proc` alone: the marker needs it and must be early.
pub(crate) fn mount_proc() -> Result<(), Error> {
    mount_one(&Mount {
        fs: "proc",
        target: "/proc",
        flags: QUIET,
        data: c"",
        optional: false,
    })
}

/// The others.
pub(crate) fn mount_rest() -> Result<(), Error> {
    for entry in &MOUNTS {
        mount_one(entry)?;
    }
    for (target, link) in LINKS {
        match symlink(target, link) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(Error::system(format!("making {link}"))(error));
            }
            _ => {}
        }
    }
    Ok(())
}

fn mount_one(entry: &Mount) -> Result<(), Error> {
    ensure_dir(entry.target, 0o755)?;
    match mount(entry.fs, entry.target, entry.fs, entry.flags, entry.data) {
        // A kernel may have mounted devtmpfs itself.
        Ok(()) | Err(Errno::BUSY) => Ok(()),
        Err(Errno::NODEV) if entry.optional => Ok(()),
        Err(errno) => Err(Error::system(format!("mounting {} on {}", entry.fs, entry.target))(
            errno,
        )),
    }
}

/// Makes a directory if it is missing.
pub(crate) fn ensure_dir(path: impl AsRef<std::path::Path>, mode: u32) -> Result<(), Error> {
    let path = path.as_ref();
    match DirBuilder::new().mode(mode).create(path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            Err(Error::system(format!("making {}", path.display()))(error))
        }
        _ => Ok(()),
    }
}

/// Writes the marker to the console if the command line asks for it: one line, in one write.
pub(crate) fn mark(started_ns: u64) -> Result<(), Error> {
    let command_line = fs::read("/proc/cmdline").map_err(Error::system("reading /proc/cmdline"))?;
    if !command_line
        .split(u8::is_ascii_whitespace)
        .any(|word| word == MARKER.as_bytes())
    {
        return Ok(());
    }
    let memory = Memory::read()?;
    let line = format!(
        "basalt-agent: up {started_ns} free {} avail {}\n",
        memory.free_kib, memory.available_kib
    );
    std::io::stderr()
        .write_all(line.as_bytes())
        .map_err(Error::system("writing the marker"))
}

/// What a kernel does now and then without being asked, it does not. (Kernels before 5.9 do not have it.)
pub(crate) fn be_quiet() -> Result<(), Error> {
    match fs::write(COMPACTION, "0") {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(Error::system(format!("writing 0 to {COMPACTION}"))(error))
        }
        _ => Ok(()),
    }
}

/// Limits that commands inherit.
pub(crate) fn raise_limits() -> Result<(), Error> {
    let limit = Rlimit {
        current: Some(OPEN_FILES),
        maximum: Some(OPEN_FILES),
    };
    setrlimit(Resource::Nofile, limit).map_err(Error::system("raising the limit of open files"))
}
