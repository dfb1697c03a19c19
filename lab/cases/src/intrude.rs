//! Makes a thread of another process execute a system call of our choice, by ptrace(2): so that filters can be tried where
//! they are, in the program as it is delivered, which has no way to be asked for it.
#![allow(unsafe_code, reason = "ptrace has no safe form")]

use std::io;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// `syscall` (Intel SDM volume 2), as the two lowest bytes of a word, and its length.
const SYSCALL: libc::c_long = 0x050f;
const LENGTH: u64 = 2;

/// A thread that stands still for us.
pub(crate) struct Intruder {
    process: u32,
    thread: i32,
}

impl Intruder {
    /// Stops the thread, wherever it is.
    pub(crate) fn seize(process: u32, thread: i32) -> Result<Self> {
        ptrace(libc::PTRACE_SEIZE, thread, 0, 0).context("the thread cannot be traced")?;
        ptrace(libc::PTRACE_INTERRUPT, thread, 0, 0).context("the thread cannot be interrupted")?;
        if !stopped(process, thread)? {
            bail!("the thread ended in place of stopping");
        }
        Ok(Self { process, thread })
    }

    /// Lets it make this call, all arguments zero. If it lives, it goes on where it was, as if a signal had come.
    ///
    /// The instruction is one that is there: the thread's own system call, behind which it waits. To write one would
    /// change the code of all threads, of which many wait in the same place.
    pub(crate) fn make(self, call: libc::c_long) -> Result<()> {
        let before = self.wait_for_call()?;
        let mut registers = before;
        registers.rip -= LENGTH;
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
        set_registers(self.thread, &mut registers)?;
        ptrace(libc::PTRACE_SINGLESTEP, self.thread, 0, 0).context("letting it make the call")?;
        if !stopped(self.process, self.thread)? {
            // It has died of the call.
            return Ok(());
        }
        let mut after = before;
        after.orig_rax = u64::MAX;
        after.rax = i64::from(-libc::EINTR).cast_unsigned();
        set_registers(self.thread, &mut after)?;
        ptrace(libc::PTRACE_DETACH, self.thread, 0, 0).context("letting the thread go")
    }

    /// Lets the thread run on until it stops right behind a system call; its registers then.
    fn wait_for_call(&self) -> Result<libc::user_regs_struct> {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let registers = registers(self.thread)?;
            let place = usize::try_from(registers.rip - LENGTH)?;
            if peek(self.thread, place)? & 0xffff == SYSCALL {
                return Ok(registers);
            }
            if Instant::now() > deadline {
                bail!("the thread was not seen in a system call for 20 s");
            }
            ptrace(libc::PTRACE_CONT, self.thread, 0, 0).context("letting the thread run on")?;
            std::thread::sleep(Duration::from_millis(1));
            ptrace(libc::PTRACE_INTERRUPT, self.thread, 0, 0).context("the thread cannot be interrupted again")?;
            if !stopped(self.process, self.thread)? {
                bail!("the thread ended before it made a system call");
            }
        }
    }
}

/// Waits until the thread stops; `false` when it ended. The end of a process's first thread is that of the process, and is
/// left for whoever started it; that of another is ours to take note of, or the process could not end.
fn stopped(process: u32, thread: i32) -> Result<bool> {
    let thread_id = libc::id_t::try_from(thread)?;
    // SAFETY: it is numbers, for which zero is a value.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let flags = libc::WSTOPPED | libc::WEXITED | libc::__WALL;
    let mut ended = false;
    for flags in [flags | libc::WNOWAIT, flags] {
        // SAFETY: the structure lives through the call.
        while unsafe { libc::waitid(libc::P_PID, thread_id, &raw mut info, flags) } != 0 {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error).context("the thread cannot be waited for");
            }
        }
        if matches!(info.si_code, libc::CLD_EXITED | libc::CLD_KILLED | libc::CLD_DUMPED) {
            ended = true;
            if thread_id == process {
                break;
            }
        }
    }
    Ok(!ended)
}

fn registers(thread: i32) -> Result<libc::user_regs_struct> {
    // SAFETY: registers are numbers, for which zero is a value.
    let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
    ptrace(libc::PTRACE_GETREGS, thread, 0, (&raw mut registers) as usize).context("reading registers")?;
    Ok(registers)
}

fn set_registers(thread: i32, registers: &mut libc::user_regs_struct) -> Result<()> {
    ptrace(libc::PTRACE_SETREGS, thread, 0, std::ptr::from_mut(registers) as usize).context("writing registers")
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
