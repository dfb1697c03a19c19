//! The jail of the server, whose back end runs its clients' code: what it needs of the host, and nothing else.
//!
//! `host::confine` makes the root and gives up rights; here is what OpenCL's loader, drivers, and PoCL with its compiler
//! need to be in it, and which system calls there are. Does not know who made the namespaces, and no client.

mod filter;
mod flags;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use base::ByteSize;
use host::confine::{Root, Scratch};

pub(crate) use flags::{Flags, HELP};

/// What the jail keeps beside what every back end needs.
#[derive(Debug)]
pub(crate) struct Jail {
    /// Files and directories that can be read; sockets in them can be connected to.
    pub(crate) read_only: Vec<PathBuf>,
    /// Files of devices.
    pub(crate) devices: Vec<PathBuf>,
    /// It has a port of the host's, and connections of other machines; it leaves that network, and connects to nothing.
    pub(crate) listens: bool,
    /// The most that compiled kernels and temporary files take.
    pub(crate) scratch: ByteSize,
}

/// What loaders, drivers and compilers read. Links of the host's are kept as links: on most hosts the directories beside
/// /usr are some.
const SYSTEM: [&str; 12] = [
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    // Where libraries and drivers are.
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/etc/OpenCL",
    // How many processors there are and how they share caches: hwloc, by which PoCL has its threads.
    "/sys/devices/system/cpu",
    "/sys/devices/system/node",
];

/// Two files of /proc, which is not there otherwise: what the processor is, and how much memory a device may say it has.
const PROC: [&str; 2] = ["/proc/cpuinfo", "/proc/meminfo"];

/// Where compiled kernels and temporary files are.
const SCRATCH: &str = "/tmp";

/// Where PoCL keeps compiled kernels.
const CACHE: &str = "/tmp/pocl";

/// Where the socket is by which a VMM connects to its guest.
pub(crate) const VSOCK: &str = "/run/vsock";

/// The most processes and threads: those of all clients, and those of the back end.
const PROCESSES: u64 = 4096;

/// The longest file, in bytes: the log, to which clients' code can write without end, and what a compiler leaves in the scratch. Memory that
/// is shared with clients of the host is one, too, and comes on top.
const FILE: u64 = 64 << 20;

/// Names the drivers of OpenCL's loader: a file or a directory, or nothing but a name in /etc/OpenCL/vendors.
const VENDORS: &str = "OCL_ICD_VENDORS";

/// Confines this process for good; while it has one thread, and before it has read anything of a client or loaded a
/// driver. `library` is what carries calls out, which may lie anywhere, as what [`VENDORS`] names may. `window` is
/// how much memory it makes for a client to share, at most. `mounts` are nowhere yet, and go to these paths.
pub(crate) fn enter(
    jail: &Jail,
    library: Option<&Path>,
    window: ByteSize,
    mounts: Vec<(OwnedFd, &str)>,
) -> Result<Confined> {
    if jail.listens {
        host::confine::leave_network()?;
    }
    let devices = !jail.devices.is_empty();
    let scratch = Scratch {
        at: SCRATCH.into(),
        bytes: jail.scratch.0,
    };
    let mut root = Root::new(scratch).system(&SYSTEM).system(&PROC);
    for path in elsewhere(library, std::env::var_os(VENDORS).map(PathBuf::from))? {
        root = root.read_only(path);
    }
    root = jail.read_only.iter().fold(root, Root::read_only);
    root = jail.devices.iter().fold(root, Root::device);
    for (mount, at) in mounts {
        root = root.mount(mount, at);
    }
    // Executed from a descriptor, it has that one's number for a name.
    rustix::thread::set_name(c"basalt-accel-se").context("naming the process")?;
    let report = host::confine::enter_root(root, PROCESSES, FILE + window.0)?;
    match report.landlock {
        Some(version) => log::debug!("landlock, version {version}, keeps it to what it needs"),
        None => log::info!("this kernel has no landlock: the root has to do"),
    }
    environment();
    filter::enter(devices, jail.listens)
        .context("system calls cannot be filtered: use a kernel with CONFIG_SECCOMP_FILTER")?;
    Ok(Confined(()))
}

/// This process is in its jail.
#[derive(Debug)]
pub(crate) struct Confined(());

impl Confined {
    /// Removes what a process has left that served and has ended: what it compiled may be all that fits, and children of its own
    /// are the first process's.
    pub(crate) fn remove_leftovers(&self) {
        while let Ok(Some(_)) = rustix::process::waitpid(None, rustix::process::WaitOptions::NOHANG) {}
        let remove = |entry: std::io::Result<std::fs::DirEntry>| {
            let entry = entry?;
            match entry.file_type()?.is_dir() {
                true => std::fs::remove_dir_all(entry.path()),
                false => std::fs::remove_file(entry.path()),
            }
        };
        let removed = std::fs::read_dir(SCRATCH).and_then(|mut entries| entries.try_for_each(remove));
        if let Err(error) = removed {
            log::warn!("what was compiled cannot all be removed, and takes room: {error}");
        }
    }
}

/// What is named by its path, which must mean the same in the new root; what is only a name is looked for there.
fn elsewhere(library: Option<&Path>, vendors: Option<PathBuf>) -> Result<Vec<PathBuf>> {
    let named = [("--library", library.map(Path::to_owned)), (VENDORS, vendors)];
    let mut paths = Vec::new();
    for (name, path) in named.into_iter().filter_map(|(name, path)| Some((name, path?))) {
        if path.components().count() < 2 {
            continue;
        }
        if !path.is_absolute() {
            bail!("{name} {}: in a jail, give a path from / on", path.display());
        }
        paths.push(path);
    }
    Ok(paths)
}

/// Where programs are looked for, and where files go.
#[allow(unsafe_code, reason = "libraries of C are told by the environment where files go")]
fn environment() {
    for (name, value) in [
        ("PATH", "/usr/bin:/bin"),
        ("HOME", SCRATCH),
        ("TMPDIR", SCRATCH),
        ("POCL_CACHE_DIR", CACHE),
    ] {
        // SAFETY: the process has one thread, so nobody reads the environment meanwhile.
        unsafe { std::env::set_var(name, value) };
    }
}
