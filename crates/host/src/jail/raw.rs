//! System calls without the C library, for a child that shares its parent's memory: the library's wrappers write the
//! parent's `errno`, and a fork behind its back is none of its business.
//!
//! x86-64 only, as all of Basalt. Knows calling conventions (x86-64 psABI A.2.1), not what is called.

use std::arch::asm;

/// What the kernel returned: a value, or an error number.
pub(super) type Returned = Result<usize, i32>;

fn returned(value: i64) -> Returned {
    // The kernel's errors are -4095 to -1.
    usize::try_from(value).map_err(|_| i32::try_from(-value).unwrap_or(libc::EIO))
}

/// One system call with up to five arguments.
///
/// # Safety
/// The call's own rules: pointers among the arguments are valid for what the kernel does with them.
pub(super) unsafe fn call(number: libc::c_long, arguments: [usize; 5]) -> Returned {
    let [a, b, c, d, e] = arguments;
    let value: i64;
    // SAFETY: 1. the instruction changes rax, rcx and r11 only, and all three are declared; 2. what the kernel does to
    // memory is the caller's promise.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number => value,
            in("rdi") a,
            in("rsi") b,
            in("rdx") c,
            in("r10") d,
            in("r8") e,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    returned(value)
}

/// Ends this process, and only this.
pub(super) fn exit(code: usize) -> ! {
    loop {
        // SAFETY: exit_group takes a number and does not return.
        let _ = unsafe { call(libc::SYS_exit_group, [code, 0, 0, 0, 0]) };
    }
}

/// `struct clone_args` (clone(2)), as of Linux 5.7.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CloneArgs {
    pub(super) flags: u64,
    pub(super) pidfd: u64,
    pub(super) child_tid: u64,
    pub(super) parent_tid: u64,
    pub(super) exit_signal: u64,
    pub(super) stack: u64,
    pub(super) stack_size: u64,
    pub(super) tls: u64,
    pub(super) set_tid: u64,
    pub(super) set_tid_size: u64,
    pub(super) cgroup: u64,
}

/// clone3(2) with memory shared: the child runs `body(argument)` on the stack in `arguments`; here the child's number is
/// returned.
///
/// # Safety
/// 1. `arguments` describes a stack, aligned to 16 bytes, that is the child's alone until it has executed a program or
///    ended; 2. so long, everything that `body` reaches through `argument` is valid; 3. `body` makes no call into the
///    C library and touches nothing that another thread writes.
pub(super) unsafe fn clone3(
    arguments: &CloneArgs,
    body: unsafe extern "C" fn(*mut libc::c_void) -> !,
    argument: *mut libc::c_void,
) -> Returned {
    let value: i64;
    // SAFETY: 1. in the parent the instruction changes what is declared; 2. the child has the same registers but rax and
    // rsp, so r12 and r13 are `body` and its argument; its stack is aligned as a call wants it, and it never comes back
    // here; 3. `arguments` and what it points to are the caller's promise.
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r13",
            "call r12",
            "ud2",
            "2:",
            inlateout("rax") libc::SYS_clone3 => value,
            in("rdi") std::ptr::from_ref(arguments),
            in("rsi") size_of::<CloneArgs>(),
            in("r12") body,
            in("r13") argument,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    returned(value)
}
