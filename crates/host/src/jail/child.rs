//! The child's side of a launch, between clone and exec.
//!
//! It shares its parent's memory while other threads of the parent run: it takes no lock, allocates nothing, writes to
//! its own stack alone and makes raw system calls only. Knows nothing of the parent but a [`Plan`] and a socket.

use std::ffi::c_void;

use super::raw::{Returned, call, exit};

/// The most descriptors that a program can be given.
pub(super) const MAX_DESCRIPTORS: usize = 64;

/// The first number after the standard streams.
pub(super) const FIRST: usize = 3;

/// What the child needs to know, laid out by the parent beforehand.
pub(super) struct Plan {
    /// Where the child hears that it has its identity and its limits, and tells what failed.
    pub(super) status: i32,
    /// The parent's end of that, open here too.
    pub(super) parents_end: i32,
    pub(super) null: i32,
    pub(super) log: i32,
    pub(super) program: i32,
    pub(super) descriptors: [i32; MAX_DESCRIPTORS],
    pub(super) count: usize,
    /// Null-terminated arrays of C strings.
    pub(super) arguments: *const *const libc::c_char,
    pub(super) environment: *const *const libc::c_char,
    /// Whether there is a user namespace whose root this becomes.
    pub(super) identity: bool,
}

/// What a failed step is called; sent as its position.
pub(super) const STEPS: [&str; 10] = [
    "waiting for its identity and its limits",
    "making a session",
    "resetting signals",
    "giving up groups",
    "taking its group",
    "taking its user",
    "placing descriptors",
    "closing other descriptors",
    "clearing the signal mask",
    "executing the program",
];

/// A step that failed: its position in [`STEPS`], and the error number.
type Failed = (u32, i32);

fn at(step: u32) -> impl Fn(i32) -> Failed {
    move |error| (step, error)
}

/// A system call of plain numbers.
fn numbers(number: libc::c_long, a: usize, b: usize, c: usize) -> Returned {
    // SAFETY: the callers below pass calls whose arguments are no pointers, or null.
    unsafe { call(number, [a, b, c, 0, 0]) }
}

fn fd(number: i32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// Runs on the child's own stack.
///
/// # Safety
/// `plan` points to a [`Plan`] that stays as it is, with all that it points to, until this process has executed its
/// program or ended.
pub(super) unsafe extern "C" fn main(plan: *mut c_void) -> ! {
    // SAFETY: the caller's promise.
    let plan = unsafe { &*plan.cast::<Plan>() };
    let mut status = fd(plan.status);
    let Err((step, error)) = run(plan, &mut status);
    let [a, b, c, d] = step.to_ne_bytes();
    let [e, f, g, h] = error.to_ne_bytes();
    let message = [a, b, c, d, e, f, g, h];
    // SAFETY: the message lives through the call. If nobody is there to be told, ending is all that is left.
    let _ = unsafe {
        call(
            libc::SYS_write,
            [status, message.as_ptr() as usize, message.len(), 0, 0],
        )
    };
    exit(127)
}

/// Gives back only what failed; keeps in `status` where that can be told.
fn run(plan: &Plan, status: &mut usize) -> Result<std::convert::Infallible, Failed> {
    // So that the parent's death is seen as end of file below.
    numbers(libc::SYS_close, fd(plan.parents_end), 0, 0).map_err(at(0))?;
    wait_for_parent(plan.status)?;
    numbers(libc::SYS_setsid, 0, 0, 0).map_err(at(1))?;
    default_signals().map_err(at(2))?;
    if plan.identity {
        numbers(libc::SYS_setgroups, 0, 0, 0).map_err(at(3))?;
        numbers(libc::SYS_setresgid, 0, 0, 0).map_err(at(4))?;
        numbers(libc::SYS_setresuid, 0, 0, 0).map_err(at(5))?;
    }
    let program = place(plan, status)?;
    let mask: u64 = 0;
    let how = libc::SIG_SETMASK as usize;
    // SAFETY: the mask lives through the call and has the kernel's size of a signal set.
    unsafe {
        call(
            libc::SYS_rt_sigprocmask,
            [how, (&raw const mask) as usize, 0, size_of::<u64>(), 0],
        )
    }
    .map_err(at(8))?;
    let (arguments, environment) = (plan.arguments as usize, plan.environment as usize);
    let flags = fd(libc::AT_EMPTY_PATH);
    // SAFETY: 1. the path is an empty C string; 2. both arrays end with null, and the parent keeps them until now.
    let failed = unsafe {
        call(
            libc::SYS_execveat,
            [program, c"".as_ptr() as usize, arguments, environment, flags],
        )
    };
    Err((9, failed.err().unwrap_or(libc::EIO)))
}

fn wait_for_parent(status: i32) -> Result<(), Failed> {
    let mut byte = 0_u8;
    loop {
        // SAFETY: the byte lives through the call.
        match unsafe { call(libc::SYS_read, [fd(status), (&raw mut byte) as usize, 1, 0, 0]) } {
            Ok(0) => return Err((0, libc::EPIPE)),
            Ok(_) => return Ok(()),
            Err(libc::EINTR) => (),
            Err(error) => return Err((0, error)),
        }
    }
}

/// Ignored signals stay ignored over exec, and Rust programs ignore SIGPIPE.
fn default_signals() -> Result<(), i32> {
    // The kernel's `struct sigaction`: handler, flags, restorer, mask; all zero is SIG_DFL.
    let default = [0_u64; 4];
    for signal in 1..=64 {
        if signal == libc::SIGKILL as usize || signal == libc::SIGSTOP as usize {
            continue;
        }
        let action = default.as_ptr() as usize;
        // SAFETY: the action lives through the call and is as large as the kernel's structure; nothing is written back.
        unsafe { call(libc::SYS_rt_sigaction, [signal, action, 0, size_of::<u64>(), 0]) }?;
    }
    Ok(())
}

/// Puts everything where the program expects it and closes all else; gives the number of the program's own file.
fn place(plan: &Plan, status: &mut usize) -> Result<usize, Failed> {
    // First everything out of the way of every target, then each to its place.
    let program = FIRST + plan.count;
    let last = program + 1;
    let clear = last + 1;
    let duplicate =
        |from: i32| numbers(libc::SYS_fcntl, fd(from), libc::F_DUPFD_CLOEXEC as usize, clear).map_err(at(6));
    let put =
        |from: usize, to: usize, flags: i32| numbers(libc::SYS_dup3, from, to, fd(flags)).map_err(at(6)).map(drop);
    *status = duplicate(plan.status)?;
    let new_program = duplicate(plan.program)?;
    let (null, log) = (duplicate(plan.null)?, duplicate(plan.log)?);
    let mut moved = [0; MAX_DESCRIPTORS];
    for (slot, &from) in moved.iter_mut().zip(&plan.descriptors).take(plan.count) {
        *slot = duplicate(from)?;
    }
    put(null, 0, 0)?;
    put(log, 1, 0)?;
    put(log, 2, 0)?;
    for (index, &from) in moved.iter().enumerate().take(plan.count) {
        put(from, FIRST + index, 0)?;
    }
    put(new_program, program, libc::O_CLOEXEC)?;
    // The parent reads on until exec closes this copy, the last one.
    put(*status, last, libc::O_CLOEXEC)?;
    *status = last;
    numbers(libc::SYS_close_range, clear, u32::MAX as usize, 0).map_err(at(7))?;
    Ok(program)
}
