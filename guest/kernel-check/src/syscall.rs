//! Raw system calls for what no library wraps, and the cycle counter: the one place with unsafe code. Knows no check.
#![allow(
    unsafe_code,
    reason = "system calls without a safe wrapper are what this program is about"
)]

use std::io;

/// One argument of a system call.
pub(crate) enum Arg<'a> {
    /// A number, flag set or file descriptor; `-1` as two's complement.
    Num(u64),
    /// A structure or string the kernel reads.
    In(&'a [u8]),
    /// A structure the kernel writes, at least as large as the call's documentation says.
    Out(&'a mut [u8]),
}

/// Makes system call `number`; unnamed arguments are 0.
pub(crate) fn call<const N: usize>(number: libc::c_long, args: [Arg<'_>; N]) -> io::Result<u64> {
    let mut words = [0_u64; 6];
    for (word, arg) in words.iter_mut().zip(args) {
        *word = match arg {
            Arg::Num(number) => number,
            Arg::In(bytes) => bytes.as_ptr() as u64,
            Arg::Out(bytes) => bytes.as_mut_ptr() as u64,
        };
    }
    // SAFETY: 1. The kernel reads and writes only the buffers given: each is borrowed for the whole of this function, and
    // `Out` is as large as the call's structure by its own contract. 2. No call made here changes this process's memory
    // map or its other threads: there is one thread, and no caller passes the numbers of mmap, munmap, brk or clone.
    let result = unsafe { libc::syscall(number, words[0], words[1], words[2], words[3], words[4], words[5]) };
    u64::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// The time-stamp counter: it starts from 0 with the machine, so it also counts what the kernel's own clock cannot see
/// (firmware, unpacking the kernel).
pub(crate) fn cycles() -> u64 {
    // SAFETY: 1. The instruction exists on every x86-64 CPU and changes no state; nothing here forbids it to user code.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// The address of `bytes`, for structures that hold pointers; the caller keeps `bytes` alive during the call.
pub(crate) fn address(bytes: &[u8]) -> [u8; 8] {
    (bytes.as_ptr() as u64).to_ne_bytes()
}

/// The same for a buffer that the kernel writes.
pub(crate) fn address_mut(bytes: &mut [u8]) -> [u8; 8] {
    (bytes.as_mut_ptr() as u64).to_ne_bytes()
}
