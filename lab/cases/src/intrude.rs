//! Makes a thread of another process execute a system call of our choice, by ptrace(2): so that filters can be tried where
//! they are, in the program as it is delivered, which has no way to be asked for it.
#![allow(unsafe_code, reason = "ptrace has no safe form")]

use std::io;

use anyhow::{Context, Result, bail};

/// `syscall`, then a jump to itself (Intel SDM volume 2), as the four lowest bytes of a word.
const INSTRUCTIONS: libc::c_long = 0xfeeb_050f;

/// A thread that stands still for us.
pub(crate) struct Intruder {
    thread: i32,
}

impl Intruder {
    /// Stops the thread, wherever it is.
    pub(crate) fn seize(thread: i32) -> Result<Self> {
        ptrace(libc::PTRACE_SEIZE, thread, 0, 0).context("the thread cannot be traced")?;
        ptrace(libc::PTRACE_INTERRUPT, thread, 0, 0).context("the thread cannot be interrupted")?;
        let mut status = 0;
        loop {
            // SAFETY: the status lives through the call.
            if unsafe { libc::waitpid(thread, &raw mut status, libc::__WALL) } == thread {
                break;
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error).context("the thread cannot be waited for");
            }
        }
        if !libc::WIFSTOPPED(status) {
            bail!("the thread ended in place of stopping: {status:#x}");
        }
        Ok(Self { thread })
    }

    /// Lets it go on with this call, all arguments zero; if it lives, it spins from then on.
    pub(crate) fn make(self, call: libc::c_long) -> Result<()> {
        // SAFETY: registers are numbers, for which zero is a value.
        let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
        ptrace(libc::PTRACE_GETREGS, self.thread, 0, (&raw mut registers) as usize).context("reading registers")?;
        let place = usize::try_from(registers.rip)?;
        let old = peek(self.thread, place)?;
        ptrace(
            libc::PTRACE_POKETEXT,
            self.thread,
            place,
            usize::try_from((old & !0xffff_ffff | INSTRUCTIONS).cast_unsigned())?,
        )
        .context("writing an instruction")?;
        registers.rax = call.cast_unsigned();
        // No call is under way any more that the kernel would restart.
        registers.orig_rax = u64::MAX;
        for argument in [
            &mut registers.rdi,
            &mut registers.rsi,
            &mut registers.rdx,
            &mut registers.r10,
        ] {
            *argument = 0;
        }
        ptrace(libc::PTRACE_SETREGS, self.thread, 0, (&raw mut registers) as usize).context("writing registers")?;
        ptrace(libc::PTRACE_DETACH, self.thread, 0, 0).context("letting the thread go")
    }
}

fn peek(thread: i32, place: usize) -> Result<libc::c_long> {
    let mut word: libc::c_long = 0;
    // The system call itself, unlike the library's function, writes the word where `data` points (ptrace(2), notes).
    let place_of_word = (&raw mut word) as usize;
    // SAFETY: the word lives through the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_ptrace,
            libc::PTRACE_PEEKTEXT as libc::c_long,
            thread,
            place,
            place_of_word,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error()).context("reading an instruction");
    }
    Ok(word)
}

fn ptrace(request: impl TryInto<i64>, thread: i32, address: usize, data: usize) -> io::Result<()> {
    let request = request
        .try_into()
        .map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    // SAFETY: `data` is a number, or points to what the request reads or writes, and the caller keeps that.
    let result = unsafe { libc::syscall(libc::SYS_ptrace, request, thread, address, data) };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
