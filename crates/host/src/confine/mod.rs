//! How a process that was started with all it needs gives up everything else, once and for good.
//!
//! For a process with one thread, before it reads anything from a stranger. Afterwards it is in an empty, read-only root,
//! has no capability and can get none, may open no file by a path, and cannot be looked into by its like; or, with
//! [`enter_root`], its root has what it needs, and landlock keeps it to that. System calls
//! are not filtered here: which ones are needed is known to the program only. One thread can be set aside before, which
//! keeps the rights to files ([`keep_files`]). Does not know who prepared the namespaces ([`crate::jail`]), if anybody.

mod files;
mod landlock;
mod root;

use std::ffi::CString;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use rustix::io::Errno;
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::process::{DumpableBehavior, Resource, Rlimit};
use rustix::thread::{CapabilitiesSecureBits, CapabilitySet, CapabilitySets, Gid, Uid, UnshareFlags};

use crate::Error;
use crate::jail::Pool;

pub use files::{enclose_files, keep_files};
pub use root::{Root, Scratch};

/// What became of the parts that depend on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// Whether a parent had made the namespaces, as [`crate::jail::spawn`] does. If not, this process is in new ones but
    /// for the pid namespace, and the user it is outside is shared by all that confine themselves so.
    pub prepared: bool,
    /// The version of landlock's interface; `None` where the kernel has none, or has it turned off.
    pub landlock: Option<u32>,
}

/// Confines this process. `before` is called in the empty root, with every capability still there: it is where a thread
/// is set aside that keeps some.
///
/// # Errors
/// [`Error::Confine`] with the step; the process is half confined then and should end.
pub fn enter(before: impl FnOnce() -> io::Result<()>) -> Result<Report, Error> {
    // The first process of a pid namespace was put there by somebody who made the others too.
    let prepared = rustix::process::getpid().as_raw_nonzero().get() == 1;
    if !prepared {
        unshare()?;
    }
    empty_root()?;
    rustix::system::sethostname(b"basalt").map_err(failed("setting the host name", NEEDS_NAMESPACES))?;
    limit_resources().map_err(failed("limiting resources", ""))?;
    before().map_err(|cause| Error::Confine {
        step: "setting a thread aside",
        next: "",
        cause,
    })?;
    give_up_capabilities(CapabilitySet::empty())?;
    let landlock = landlock::deny_everything()?;
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(failed("becoming undumpable", ""))?;
    Ok(Report { prepared, landlock })
}

/// Confines this process to a root with what it needs, for one that runs other people's code in itself: it may execute
/// programs and map code, so its namespaces have to be made by somebody else. `processes` are the most that its user may
/// have at a time, threads counted, and `file` is how long it may make a file, its log among them: the kernel's signal for
/// more is ignored, and who writes has an error (setrlimit(2), `RLIMIT_FSIZE`).
///
/// # Errors
/// [`Error::NoJail`] outside of namespaces of its own, before anything was changed; [`Error::Root`] and [`Error::Confine`]
/// with the step: the process is half confined then and should end.
pub fn enter_root(root: Root, processes: u64, file: u64) -> Result<Report, Error> {
    in_own_namespaces()?;
    let scratch = root.enter()?;
    rustix::system::sethostname(b"basalt").map_err(failed("setting the host name", NEEDS_NAMESPACES))?;
    limit_resources()
        .and_then(|()| {
            let limit = |most| Rlimit {
                current: Some(most),
                maximum: Some(most),
            };
            ignore_long_files();
            rustix::process::setrlimit(Resource::Fsize, limit(file))?;
            rustix::process::setrlimit(Resource::Nproc, limit(processes))
        })
        .map_err(failed("limiting resources", ""))?;
    give_up_capabilities(CapabilitySet::empty())?;
    let directory = |path: &Path| root::open(path).map_err(failed("opening a directory of the new root", ""));
    let (all, devices, room) = (
        directory("/".as_ref())?,
        directory("/dev".as_ref())?,
        directory(&scratch.at)?,
    );
    let landlock = landlock::deny_all_but(&[
        (all.as_fd(), landlock::FS_READ),
        (devices.as_fd(), landlock::FS_DEVICES),
        (room.as_fd(), landlock::FS_BENEATH | landlock::FS_EXECUTE),
    ])?;
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(failed("becoming undumpable", ""))?;
    Ok(Report {
        prepared: true,
        landlock,
    })
}

/// Leaves the network that this process is in for an empty one, before [`enter_root`]: sockets that it has by then stay where they are, and it
/// can make no other there.
///
/// # Errors
/// [`Error::NoJail`] as there; [`Error::Confine`] where the kernel makes no network namespace.
pub fn leave_network() -> Result<(), Error> {
    in_own_namespaces()?;
    // SAFETY: the descriptor table stays shared; this flag does not touch it.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }
        .map_err(failed("leaving the network", NEEDS_NAMESPACES))
}

/// Whether somebody has made namespaces for this process. Its user namespace is another one than the host's when not all
/// users are themselves in it; the others are made with it, and cannot be told from the host's without the host's.
fn in_own_namespaces() -> Result<(), Error> {
    let path = "/proc/self/uid_map";
    let map = std::fs::read_to_string(path).map_err(|cause| Error::Root {
        step: "finding out about namespaces",
        path: path.into(),
        cause,
    })?;
    let everybody = map.split_whitespace().eq(["0", "0", "4294967295"]);
    if rustix::process::getpid().as_raw_nonzero().get() == 1 && !everybody && rustix::process::geteuid().is_root() {
        return Ok(());
    }
    Err(Error::NoJail {
        why: "nobody has made namespaces for this process, in which it is the first one".to_owned(),
        next: "have it started by the node's daemon, or by `unshare --user --map-root-user --pid --fork --mount --net \
               --ipc --uts`, or do without the jail",
    })
}

const NEEDS_NAMESPACES: &str = "; start it by a daemon that makes its namespaces, or as root of the host";

fn failed(step: &'static str, next: &'static str) -> impl Fn(Errno) -> Error {
    move |error| Error::Confine {
        step,
        next,
        cause: error.into(),
    }
}

/// Namespaces of our own, for want of a parent that made them. Root first becomes somebody else outside.
fn unshare() -> Result<(), Error> {
    let (mut uid, mut gid) = (rustix::process::geteuid(), rustix::process::getegid());
    if uid.is_root() {
        let pool = Pool::default();
        let last = pool
            .identity(pool.count - 1)
            .map_or(u32::MAX - 1, |identity| identity.uid);
        (uid, gid) = (Uid::from_raw(last), Gid::from_raw(last));
        let step = failed("becoming an unprivileged user", "");
        rustix::thread::set_thread_groups(&[]).map_err(&step)?;
        rustix::thread::set_thread_res_gid(gid, gid, gid).map_err(&step)?;
        rustix::thread::set_thread_res_uid(uid, uid, uid).map_err(&step)?;
        // The files of /proc/self belong to root until this process may be looked into again.
        rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable).map_err(&step)?;
    }
    let flags = UnshareFlags::NEWUSER
        | UnshareFlags::NEWNS
        | UnshareFlags::NEWNET
        | UnshareFlags::NEWIPC
        | UnshareFlags::NEWUTS;
    let next = "; allow unprivileged user namespaces (kernel.unprivileged_userns_clone, user.max_user_namespaces), or start it by a daemon that makes them";
    // SAFETY: the descriptor table stays shared; no flag here touches it.
    unsafe { rustix::thread::unshare_unsafe(flags) }.map_err(failed("making namespaces", next))?;
    let map = |path, text: String| {
        std::fs::write(path, text).map_err(|cause| Error::Confine {
            step: "mapping this user",
            next,
            cause,
        })
    };
    map("/proc/self/setgroups", "deny".to_owned())?;
    map("/proc/self/uid_map", format!("0 {} 1\n", uid.as_raw()))?;
    map("/proc/self/gid_map", format!("0 {} 1\n", gid.as_raw()))
}

/// Makes an empty file system the root, and lets go of every other mount.
fn empty_root() -> Result<(), Error> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::RDONLY;
    change_root(flags, "size=4k,nr_inodes=1,mode=0555")
}

/// Makes a new tmpfs the root, and lets go of every other mount.
fn change_root(flags: MountFlags, options: &str) -> Result<(), Error> {
    let at = |step| failed(step, NEEDS_NAMESPACES);
    // What is unmounted here must stay mounted elsewhere.
    let propagation = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", propagation).map_err(at("making mounts private"))?;
    let step = "mounting an empty file system";
    let options = CString::new(options).map_err(|_| at(step)(Errno::INVAL))?;
    // Any directory that every host has will do: it is seen for three lines.
    rustix::mount::mount("basalt", "/proc", "tmpfs", flags, options.as_c_str()).map_err(at(step))?;
    rustix::process::chdir("/proc").map_err(at("entering the empty file system"))?;
    // The old root is put on top of the new one, and goes from there (pivot_root(2), notes).
    rustix::process::pivot_root(".", ".").map_err(at("changing the root"))?;
    rustix::mount::unmount(".", UnmountFlags::DETACH).map_err(at("leaving the old root"))?;
    rustix::process::chdir("/").map_err(at("entering the new root"))
}

/// No core files, as they hold guest memory; as many descriptors as the hard limit allows, since each vsock connection is
/// one. Locked memory needs no room: io_uring has not counted its rings against it since Linux 5.12, and no buffer is
/// registered.
fn limit_resources() -> Result<(), Errno> {
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    rustix::process::setrlimit(Resource::Core, none)?;
    let mut files = rustix::process::getrlimit(Resource::Nofile);
    files.current = files.maximum;
    rustix::process::setrlimit(Resource::Nofile, files)
}

/// Has the signal for a file that would be too long do nothing; what it executes finds it so.
#[allow(unsafe_code, reason = "signal(2) has no safe wrapper")]
fn ignore_long_files() {
    // SAFETY: no handler is installed, and the signal's number is one.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// None of this thread's capabilities but `kept` now, and none by executing anything.
fn give_up_capabilities(kept: CapabilitySet) -> Result<(), Error> {
    let step = failed("giving up capabilities", "");
    for number in 0..u64::BITS {
        match rustix::thread::remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << number)) {
            Ok(()) => (),
            // One more than the kernel has.
            Err(Errno::INVAL) if number > 0 => break,
            Err(error) => return Err(step(error)),
        }
    }
    // Root's user id gives no capability on exec, nor on a change of ids; and no way back.
    let bits = CapabilitiesSecureBits::NO_ROOT
        | CapabilitiesSecureBits::NO_ROOT_LOCKED
        | CapabilitiesSecureBits::NO_SETUID_FIXUP
        | CapabilitiesSecureBits::NO_SETUID_FIXUP_LOCKED
        | CapabilitiesSecureBits::KEEP_CAPS_LOCKED
        | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE
        | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE_LOCKED;
    rustix::thread::set_capabilities_secure_bits(bits).map_err(&step)?;
    rustix::thread::clear_ambient_capability_set().map_err(&step)?;
    let left = CapabilitySets {
        effective: kept,
        permitted: kept,
        inheritable: CapabilitySet::empty(),
    };
    rustix::thread::set_capabilities(None, left).map_err(&step)?;
    rustix::thread::set_no_new_privs(true).map_err(&step)
}

/// The error of a raw system call.
fn last_error() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}
