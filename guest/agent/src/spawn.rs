//! fork(2) and execve(2): everything is resolved and allocated before the fork; the child only makes system calls and
//! reports the one that failed. Knows no connection.

use std::ffi::{CString, NulError};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr;

use agent_api::{ExecFailure, ExitStatus, FailureKind};
use rustix::pipe::{PipeFlags, pipe_with};

use crate::identity::Identity;
use crate::reaper::Reaper;

/// What to start, and as what.
pub(crate) struct Plan<'a> {
    pub(crate) program: CString,
    pub(crate) argv: Vec<CString>,
    pub(crate) env: Vec<CString>,
    pub(crate) cwd: CString,
    pub(crate) identity: &'a Identity,
    /// Standard input, output, error; made for this command.
    pub(crate) stdio: [BorrowedFd<'a>; 3],
    /// Whether standard input is the terminal to control.
    pub(crate) tty: bool,
    /// `cgroup.procs` of the cgroup to enter.
    pub(crate) cgroup: Option<BorrowedFd<'a>>,
}

/// The child's steps, in order.
#[derive(Clone, Copy)]
enum Step {
    Session = 1,
    Cgroup,
    Stdio,
    Terminal,
    Cwd,
    Groups,
    User,
    Exec,
}

/// Exit code of a child that did not get as far as its program; nobody sees it.
const NOT_STARTED: i32 = 127;

/// Starts the command as the leader of a new session and process group; `on_exit` is called when it ends, also if this
/// fails after the fork.
pub(crate) fn spawn(
    plan: &Plan<'_>,
    reaper: &Reaper,
    on_exit: impl FnOnce(ExitStatus) + Send + 'static,
) -> Result<i32, ExecFailure> {
    let (report_read, report_write) = pipe_with(PipeFlags::CLOEXEC).map_err(|errno| other("making a pipe", errno))?;
    let stdio = above_stdio(&plan.stdio)?;
    let argv = pointers(&plan.argv);
    let env = pointers(&plan.env);
    let child = ChildSide {
        program: plan.program.as_ptr(),
        argv: argv.as_ptr(),
        env: env.as_ptr(),
        cwd: plan.cwd.as_ptr(),
        identity: plan.identity,
        stdio: [stdio[0].as_raw_fd(), stdio[1].as_raw_fd(), stdio[2].as_raw_fd()],
        tty: plan.tty,
        cgroup: plan.cgroup.map(|fd| fd.as_raw_fd()),
        report: report_write.as_raw_fd(),
    };
    let fork = || {
        // SAFETY: 1. The child makes only async-signal-safe calls on memory that was prepared before (see `ChildSide`).
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            0 => child.run(),
            pid => Ok(pid),
        }
    };
    let pid = reaper
        .fork_with(fork, on_exit)
        .map_err(|error| other("starting a process", error))?;
    drop(report_write);
    match read_report(&report_read) {
        None => Ok(pid),
        Some((step, errno)) => Err(explain(plan, step, errno)),
    }
}

/// Pointers to C strings with the null at the end; valid as long as the strings are.
fn pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
    strings
        .iter()
        .map(|string| string.as_ptr())
        .chain([ptr::null()])
        .collect()
}

/// C strings of texts; an error where one contains a zero byte.
pub(crate) fn c_strings<'a>(texts: impl Iterator<Item = &'a [u8]>) -> Result<Vec<CString>, NulError> {
    texts.map(CString::new).collect()
}

/// Copies of the descriptors with numbers from 3 on: dup2(2) onto 0 to 2 must not hit one that is still needed.
fn above_stdio(fds: &[BorrowedFd<'_>; 3]) -> Result<[OwnedFd; 3], ExecFailure> {
    let copy = |fd: &BorrowedFd<'_>| {
        rustix::io::fcntl_dupfd_cloexec(fd, 3).map_err(|errno| other("copying a file descriptor", errno))
    };
    Ok([copy(&fds[0])?, copy(&fds[1])?, copy(&fds[2])?])
}

/// What the child reported: step and errno; `None` if it executed its program.
fn read_report(fd: &OwnedFd) -> Option<(u8, i32)> {
    let mut bytes = [0; 5];
    let mut done = 0;
    while let Some(space) = bytes.get_mut(done..).filter(|space| !space.is_empty()) {
        match rustix::io::read(fd.as_fd(), space) {
            Ok(0) => break,
            Ok(got) => done += got,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => break,
        }
    }
    let [step, errno @ ..] = bytes;
    (done == bytes.len()).then(|| (step, i32::from_le_bytes(errno)))
}

fn explain(plan: &Plan<'_>, step: u8, errno: i32) -> ExecFailure {
    let error = io::Error::from_raw_os_error(errno);
    let program = plan.program.to_string_lossy();
    let (kind, message) = if step == Step::Exec as u8 {
        match errno {
            libc::ENOENT if std::path::Path::new(program.as_ref()).is_absolute() && exists(&program) => (
                FailureKind::NotFound,
                format!("the interpreter that {program} names does not exist"),
            ),
            libc::ENOENT | libc::ENOTDIR => (FailureKind::NotFound, format!("there is no program {program}")),
            libc::ENOEXEC => (
                FailureKind::NotExecutable,
                format!("{program} is neither a program for this machine nor a script"),
            ),
            libc::EACCES => (
                FailureKind::NotExecutable,
                format!("{program} cannot be executed: it is a directory or the permission is missing"),
            ),
            _ => (
                FailureKind::NotExecutable,
                format!("{program} cannot be executed: {error}"),
            ),
        }
    } else if step == Step::Cwd as u8 {
        let cwd = plan.cwd.to_string_lossy();
        (
            FailureKind::BadCwd,
            format!(
                "the working directory {cwd} cannot be entered: {error}; give one that exists and that the user may enter"
            ),
        )
    } else {
        let what = match step {
            s if s == Step::Session as u8 => "starting a session",
            s if s == Step::Cgroup as u8 => "entering the cgroup",
            s if s == Step::Stdio as u8 => "setting up standard input and output",
            s if s == Step::Terminal as u8 => "taking the terminal",
            s if s == Step::Groups as u8 => "setting the groups",
            _ => "setting the user",
        };
        (FailureKind::Other, format!("{what}: {error}"))
    };
    ExecFailure { kind, message }
}

fn exists(path: &str) -> bool {
    std::path::Path::new(path).exists()
}

pub(crate) fn other(what: &str, error: impl std::fmt::Display) -> ExecFailure {
    ExecFailure {
        kind: FailureKind::Other,
        message: format!("{what}: {error}"),
    }
}

/// What the child needs, as plain numbers and pointers. Nothing here is allocated, freed or locked after the fork.
struct ChildSide<'a> {
    program: *const libc::c_char,
    argv: *const *const libc::c_char,
    env: *const *const libc::c_char,
    cwd: *const libc::c_char,
    identity: &'a Identity,
    stdio: [RawFd; 3],
    tty: bool,
    cgroup: Option<RawFd>,
    report: RawFd,
}

impl ChildSide<'_> {
    /// Becomes the program, or reports why not and ends.
    fn run(&self) -> ! {
        let step = match self.become_program() {
            Ok(never) => match never {},
            Err(step) => step,
        };
        // SAFETY: 1. `__errno_location` returns this thread's errno.
        let location = unsafe { libc::__errno_location() };
        // SAFETY: 1. The location is valid and belongs to this thread.
        let errno = unsafe { *location }.to_le_bytes();
        let report = [step as u8, errno[0], errno[1], errno[2], errno[3]];
        // SAFETY: 1. `report` is readable for its length. A failed write cannot be told to anybody: the parent then takes
        // the command for started and sees it end with 127.
        unsafe { libc::write(self.report, report.as_ptr().cast(), report.len()) };
        // SAFETY: 1. `_exit` runs no handlers of the parent's.
        unsafe { libc::_exit(NOT_STARTED) }
    }

    fn become_program(&self) -> Result<std::convert::Infallible, Step> {
        // SAFETY: 1. No memory is touched.
        check(unsafe { libc::setsid() }, Step::Session)?;
        if let Some(fd) = self.cgroup {
            // SAFETY: 1. One readable byte of static memory.
            let written = unsafe { libc::write(fd, c"0".as_ptr().cast(), 1) };
            check(if written == 1 { 0 } else { -1 }, Step::Cgroup)?;
        }
        for (target, fd) in (0..).zip(self.stdio) {
            // SAFETY: 1. No memory is touched; the parent made sure that `fd` is none of 0 to 2.
            check(unsafe { libc::dup2(fd, target) }, Step::Stdio)?;
        }
        if self.tty {
            // SAFETY: 1. TIOCSCTTY takes a number, no pointer.
            check(unsafe { libc::ioctl(0, libc::TIOCSCTTY, 0) }, Step::Terminal)?;
        }
        // SAFETY: 1. `cwd` is a C string that the parent holds.
        check(unsafe { libc::chdir(self.cwd) }, Step::Cwd)?;
        self.become_user()?;
        reset_signals();
        // SAFETY: 1. All three are built from C strings that the parent holds, the arrays end with null.
        unsafe { libc::execve(self.program, self.argv, self.env) };
        Err(Step::Exec)
    }

    fn become_user(&self) -> Result<(), Step> {
        let Identity { uid, gid, groups, .. } = self.identity;
        for fd in 0..3 {
            // So that the command can open /dev/stdout. The null device stays root's, hence not for every type.
            // SAFETY: 1. See `is_ours`; no memory is touched.
            if is_ours(fd) && unsafe { libc::fchown(fd, *uid, gid_for(self.tty, *gid)) } != 0 {
                return Err(Step::Stdio);
            }
        }
        // SAFETY: 1. `groups` is readable for its length and prepared before the fork.
        check(unsafe { libc::setgroups(groups.len(), groups.as_ptr()) }, Step::Groups)?;
        // SAFETY: 1. No memory is touched. The same holds for the next call.
        check(unsafe { libc::setresgid(*gid, *gid, *gid) }, Step::Groups)?;
        // SAFETY: 1. As above.
        check(unsafe { libc::setresuid(*uid, *uid, *uid) }, Step::User)
    }
}

/// A terminal keeps its group (`tty`), as login(1) leaves it: -1 changes nothing.
fn gid_for(tty: bool, gid: u32) -> u32 {
    if tty { u32::MAX } else { gid }
}

/// Whether descriptor `fd` is a pipe, or a terminal: made for this command, not shared with others.
fn is_ours(fd: RawFd) -> bool {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: 1. `stat` is writable and of the right type.
    if unsafe { libc::fstat(fd, stat.as_mut_ptr()) } != 0 {
        return false;
    }
    // SAFETY: 1. Zeroed before and filled by the call.
    let mode = unsafe { stat.assume_init() }.st_mode & libc::S_IFMT;
    // SAFETY: 1. No memory of ours is touched.
    mode == libc::S_IFIFO || (mode == libc::S_IFCHR && unsafe { libc::isatty(fd) } == 1)
}

/// Signals as a program expects them: nothing blocked, nothing ignored (this process ignores SIGPIPE).
fn reset_signals() {
    // Handler (SIG_DFL is 0), flags, restorer, mask: the kernel's struct sigaction (rt_sigaction(2)). The system call
    // itself, since the C library keeps two signals for itself and would not reset them.
    let default = [0_u64; 4];
    for number in 1..=64 {
        // SAFETY: 1. `default` is readable and as large as the kernel's struct, whose mask has 8 bytes. 2. No old value is
        // asked for. For the two signals that cannot be changed the call fails harmlessly.
        unsafe {
            libc::syscall(
                libc::SYS_rt_sigaction,
                number,
                default.as_ptr(),
                ptr::null_mut::<u64>(),
                8,
            )
        };
    }
    let mut none = std::mem::MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: 1. `none` is writable and of the right type.
    unsafe { libc::sigemptyset(none.as_mut_ptr()) };
    // SAFETY: 1. `none` was initialised by the call before; the old set is not wanted.
    unsafe { libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), ptr::null_mut()) };
}

fn check(result: i32, step: Step) -> Result<(), Step> {
    if result < 0 { Err(step) } else { Ok(()) }
}
