//! Starts a program in namespaces, a cgroup and an identity of its own, with nothing but the descriptors it is given.
//!
//! The child is born in its cgroup, in new user, pid, mount, ipc and uts namespaces and in an empty network namespace, which
//! is that of all children. It shares this process's
//! memory until it executes the program, as with vfork(2), so a large parent starts it as fast as a small one; but this
//! thread is not suspended, because it writes the child's identity meanwhile. The program is given as an open file, and
//! its death does not hang on ours. Does not know what the program does; emptying its file system is its own first act
//! ([`crate::confine`]).

mod child;
mod identity;
mod nowhere;
mod raw;

use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType};
use rustix::process::{
    DumpableBehavior, Pid, Resource, Rlimit, Signal, WaitId, WaitIdOptions, WaitIdStatus, pidfd_send_signal, waitid,
};

use crate::Error;
use child::{FIRST, MAX_DESCRIPTORS, Plan, STEPS};
use raw::CloneArgs;

pub use identity::{Identity, OWNERS_BASE, OWNERS_COUNT, Pool};

/// How far the child is set apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isolation {
    /// In all six namespaces, none of them ours; its root user is this one of ours.
    Full(Identity),
    /// Not at all: for tests and for hosts where the caller was told to do without.
    None,
}

/// What is to be started, and with what.
#[derive(Debug)]
pub struct Launch<'a> {
    /// The program, open for reading. One that is not static has its loader and libraries from the host's file system, which it
    /// sees until it confines itself.
    pub program: BorrowedFd<'a>,
    /// Its arguments, from its own name on.
    pub arguments: &'a [CString],
    /// Its whole environment.
    pub environment: &'a [CString],
    /// What it finds at 3, 4 and so on; it inherits nothing else. At most 64.
    pub descriptors: &'a [BorrowedFd<'a>],
    /// Its standard output and error; its input is empty.
    pub log: BorrowedFd<'a>,
    /// The directory of the cgroup that it is born in.
    pub cgroup: Option<BorrowedFd<'a>>,
    /// How far it is set apart.
    pub isolation: Isolation,
    /// How many descriptors it may have open, where that is not what we may.
    pub open_files: Option<u64>,
    /// It may lock, or have pinned, as much memory as its cgroup lets it have: a guest that owns its CPUs has all of its memory pinned.
    pub locks_memory: bool,
}

/// How long the steps of a start took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timing {
    /// The process with its namespaces (clone3).
    pub clone: Duration,
    /// Its identity and limits.
    pub identity: Duration,
    /// From there until the program was executed.
    pub exec: Duration,
}

/// A started program. Dropping this leaves the process alone.
#[derive(Debug)]
pub struct Child {
    /// Readable when it has ended.
    pub pidfd: OwnedFd,
    /// Its number in our pid namespace.
    pub pid: u32,
    /// What its start cost.
    pub timing: Timing,
}

impl Child {
    /// Kills it; it is fine if it has ended. Does not wait.
    ///
    /// # Errors
    /// Those of pidfd_send_signal(2).
    pub fn kill(&self) -> io::Result<()> {
        match pidfd_send_signal(&self.pidfd, Signal::KILL) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits for its end and reaps it. Only whoever started it can.
    ///
    /// # Errors
    /// Those of waitid(2); it was waited for before.
    pub fn wait(&self) -> io::Result<WaitIdStatus> {
        loop {
            match waitid(WaitId::PidFd(self.pidfd.as_fd()), WaitIdOptions::EXITED) {
                Ok(Some(status)) => return Ok(status),
                Ok(None) | Err(Errno::INTR) => (),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Bytes of stack for the child; its frames are small even without optimization.
const STACK: usize = 64 << 10;

/// Starts a program.
///
/// # Errors
/// [`Error::NoJail`] when rights or kernel do not suffice, [`Error::Launch`] and [`Error::Child`] when a step failed. No
/// process is left behind then.
pub fn spawn(launch: &Launch<'_>) -> Result<Child, Error> {
    let begun = Instant::now();
    match launch.isolation {
        // Whoever may not make one namespace may make none.
        Isolation::Full(_) => {
            nowhere::run(|| spawn_here(launch, begun)).map_err(|error| match error.raw_os_error() {
                Some(code) => no_clone(code, launch),
                None => io_step("entering the empty network namespace")(error),
            })?
        }
        Isolation::None => spawn_here(launch, begun),
    }
}

fn spawn_here(launch: &Launch<'_>, begun: Instant) -> Result<Child, Error> {
    if launch.descriptors.len() > MAX_DESCRIPTORS {
        let why = format!(
            "{} descriptors are more than {MAX_DESCRIPTORS}",
            launch.descriptors.len()
        );
        let next = "send the rest over one of them";
        return Err(Error::NoJail { why, next });
    }
    let flags = SocketFlags::CLOEXEC;
    let (ours, theirs) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(step("making a socket pair"))?;
    let null = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(step("opening /dev/null"))?;
    let (arguments, environment) = (pointers(launch.arguments), pointers(launch.environment));
    let mut descriptors = [-1; MAX_DESCRIPTORS];
    for (slot, fd) in descriptors.iter_mut().zip(launch.descriptors) {
        *slot = fd.as_raw_fd();
    }
    let plan = Plan {
        status: theirs.as_raw_fd(),
        parents_end: ours.as_raw_fd(),
        null: null.as_raw_fd(),
        log: launch.log.as_raw_fd(),
        program: launch.program.as_raw_fd(),
        descriptors,
        count: launch.descriptors.len(),
        arguments: arguments.as_ptr(),
        environment: environment.as_ptr(),
        identity: launch.isolation != Isolation::None,
    };
    let dumpable = dumpable();
    let mut stack = Stack::new();
    let (pid, pidfd) = clone(launch, &plan, &mut stack)?;
    drop(theirs);
    let cloned = Instant::now();
    let mapped = settle(launch, pid, &ours);
    let settled = Instant::now();
    let started = match mapped {
        Ok(()) => outcome(&ours),
        Err(error) => {
            // The child sees the end of file and ends.
            drop(ours);
            Err(error)
        }
    };
    let started = started.and(restore_dumpable(dumpable));
    let child = Child {
        pidfd,
        pid,
        timing: Timing {
            clone: cloned - begun,
            identity: settled - cloned,
            exec: settled.elapsed(),
        },
    };
    if let Err(error) = started {
        child
            .kill()
            .and_then(|()| child.wait())
            .map_err(io_step("reaping what did not start"))?;
        return Err(error);
    }
    // Until here the child used them.
    drop((stack, plan, arguments, environment));
    Ok(child)
}

fn step(step: &'static str) -> impl Fn(Errno) -> Error {
    move |error| Error::Launch {
        step,
        cause: error.into(),
    }
}

fn io_step(step: &'static str) -> impl Fn(io::Error) -> Error {
    move |cause| Error::Launch { step, cause }
}

/// A null-terminated array, as execve wants it.
fn pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
    strings
        .iter()
        .map(|string| string.as_ptr())
        .chain([std::ptr::null()])
        .collect()
}

/// A child's stack.
struct Stack(Box<[MaybeUninit<Aligned>]>);

#[repr(align(16))]
struct Aligned(#[expect(dead_code, reason = "only its size and alignment matter")] [u8; 16]);

impl Stack {
    fn new() -> Self {
        Self(Box::new_uninit_slice(STACK / size_of::<Aligned>()))
    }
}

/// Makes the process, all signals blocked meanwhile: a handler of ours must not run in it.
fn clone(launch: &Launch<'_>, plan: &Plan, stack: &mut Stack) -> Result<(u32, OwnedFd), Error> {
    let mut flags = libc::CLONE_VM | libc::CLONE_PIDFD;
    if launch.isolation != Isolation::None {
        flags |= libc::CLONE_NEWUSER | libc::CLONE_NEWPID | libc::CLONE_NEWNS;
        flags |= libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;
    }
    let mut flags = u64::from(flags.cast_unsigned()) | CLONE_CLEAR_SIGHAND;
    if launch.cgroup.is_some() {
        flags |= CLONE_INTO_CGROUP;
    }
    let mut pidfd: RawFd = -1;
    let arguments = CloneArgs {
        flags,
        pidfd: (&raw mut pidfd) as u64,
        exit_signal: u64::from(libc::SIGCHLD.cast_unsigned()),
        stack: stack.0.as_mut_ptr() as u64,
        stack_size: STACK as u64,
        cgroup: launch.cgroup.map_or(0, |fd| u64::from(fd.as_raw_fd().cast_unsigned())),
        ..CloneArgs::default()
    };
    let plan = std::ptr::from_ref(plan).cast_mut().cast();
    let mask = block_signals()?;
    // SAFETY: 1. the stack is the child's alone, and `spawn` keeps it and all that the plan points to until the status
    // socket has told that the program runs, or the child was reaped; 2. `child::main` reads the plan and its own stack,
    // and makes raw system calls only.
    let cloned = unsafe { raw::clone3(&arguments, child::main, plan) };
    restore_signals(&mask);
    let pid = cloned.map_err(|error| no_clone(error, launch))?;
    // SAFETY: the kernel has just made this descriptor for us.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    Ok((u32::try_from(pid).unwrap_or(u32::MAX), pidfd))
}

/// `CLONE_CLEAR_SIGHAND` and `CLONE_INTO_CGROUP` (clone(2)); the libc crate has them in a narrower type.
const CLONE_CLEAR_SIGHAND: u64 = 0x1_0000_0000;
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Says what the kernel meant.
fn no_clone(error: i32, launch: &Launch<'_>) -> Error {
    let (why, next) = match error {
        libc::EPERM => ("this user may not make namespaces", "run the node's daemon as root"),
        libc::ENOSPC | libc::EUSERS => (
            "the host's limit of namespaces is reached",
            "raise the numbers in /proc/sys/user/max_*_namespaces",
        ),
        libc::ENOSYS | libc::EINVAL => (
            "this kernel has no clone3 with these namespaces",
            "use Linux 5.14 or later with user, pid, network and ipc namespaces",
        ),
        libc::EBUSY | libc::ENODEV | libc::EOPNOTSUPP if launch.cgroup.is_some() => (
            "the cgroup takes no process",
            "make it anew with host::cgroup: it was removed, or hands controllers down to children",
        ),
        libc::EAGAIN => (
            "the limit of processes is reached",
            "raise pids.max or RLIMIT_NPROC of the daemon",
        ),
        _ => {
            return Error::Launch {
                step: "making the process",
                cause: io::Error::from_raw_os_error(error),
            };
        }
    };
    let cause = io::Error::from_raw_os_error(error);
    Error::NoJail {
        why: format!("{why} ({cause})"),
        next,
    }
}

fn block_signals() -> Result<libc::sigset_t, Error> {
    let mut all = MaybeUninit::uninit();
    let mut before = MaybeUninit::uninit();
    // SAFETY: `sigfillset` writes the whole set.
    let filled = unsafe { libc::sigfillset(all.as_mut_ptr()) };
    // SAFETY: `all` was written above, `before` is written by the call; both live through it.
    let result = unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) };
    if filled != 0 || result != 0 {
        return Err(io_step("blocking signals")(io::Error::from_raw_os_error(result)));
    }
    // SAFETY: the call above succeeded and wrote it.
    Ok(unsafe { before.assume_init() })
}

fn restore_signals(mask: &libc::sigset_t) {
    // SAFETY: the mask is a set that the C library wrote; the old one is not asked for.
    let error = unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, mask, std::ptr::null_mut()) };
    // It fails for a set that is none, which this is not.
    debug_assert_eq!(error, 0);
}

/// Gives the child its identity and limits and tells it to go on.
fn settle(launch: &Launch<'_>, pid: u32, status: &OwnedFd) -> Result<(), Error> {
    let set = |resource, limit: Option<u64>, what| {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let limit = Rlimit {
            current: limit,
            maximum: limit,
        };
        rustix::process::prlimit(pid, resource, limit)
            .map_err(step(what))
            .map(drop)
    };
    if launch.locks_memory {
        set(Resource::Memlock, None, "setting its limit of locked memory")?;
    }
    if launch.open_files.is_some() {
        set(Resource::Nofile, launch.open_files, "setting its limit of open files")?;
    }
    if let Isolation::Full(identity) = launch.isolation {
        identity.map(pid)?;
    }
    rustix::net::send(status, &[1], SendFlags::NOSIGNAL).map_err(step("telling the child to go on"))?;
    Ok(())
}

/// Waits until the child has executed the program, or told what failed.
fn outcome(status: &OwnedFd) -> Result<(), Error> {
    let mut message = [0; 8];
    let mut length = 0;
    while let Some(rest @ [_, ..]) = message.get_mut(length..) {
        match rustix::io::read(status, rest) {
            Ok(0) => break,
            Ok(count) => length += count,
            Err(Errno::INTR) => (),
            Err(error) => return Err(step("hearing from the child")(error)),
        }
    }
    if length < message.len() {
        return Ok(());
    }
    let [a, b, c, d, e, f, g, h] = message;
    let position = usize::try_from(u32::from_ne_bytes([a, b, c, d])).unwrap_or(usize::MAX);
    Err(Error::Child {
        step: STEPS.get(position).copied().unwrap_or("an unknown step"),
        cause: io::Error::from_raw_os_error(i32::from_ne_bytes([e, f, g, h])),
    })
}

/// Whether this process may be dumped and looked into, at the first launch.
///
/// A child that takes another user's identity while it shares our memory makes that memory undumpable, which would stay
/// so for us; that child's own memory is another one by the time it is put back.
fn dumpable() -> DumpableBehavior {
    static FIRST: OnceLock<DumpableBehavior> = OnceLock::new();
    *FIRST.get_or_init(|| rustix::process::dumpable_behavior().unwrap_or(DumpableBehavior::NotDumpable))
}

fn restore_dumpable(before: DumpableBehavior) -> Result<(), Error> {
    if before == DumpableBehavior::Dumpable {
        rustix::process::set_dumpable_behavior(before).map_err(step("staying dumpable"))?;
    }
    Ok(())
}

/// The number at which a program finds the descriptor of this position.
pub fn number_of(position: usize) -> usize {
    FIRST + position
}

/// A C string of one argument.
///
/// # Errors
/// It contains a null byte.
pub fn argument(text: &str) -> Result<CString, Error> {
    CString::new(text).map_err(|_| Error::NoJail {
        why: format!("the argument {text:?} contains a null byte"),
        next: "leave it out",
    })
}

#[cfg(test)]
mod tests;
