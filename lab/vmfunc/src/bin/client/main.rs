//! The client's program: calls the server, and attacks it. Which of both, it is told as a number (`scenario`).
//!
//! It knows the trampoline's address and nothing of how the hypervisor defends the server; how each attack ends is judged by what the
//! hypervisor prints.

#![no_std]
#![no_main]

mod attacks;
mod calls;

use core::arch::{asm, global_asm};

use basalt_vmfunc::abi::{self, call, kernel};
use basalt_vmfunc::cpu::vmcall;
use basalt_vmfunc::scenario::{ALL, Figure, Scenario};

/// What a call answers.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reply {
    pub(crate) status: u64,
    pub(crate) value: u64,
}

/// Calls a handler through the trampoline.
pub(crate) fn delegate(handler: u64, a: u64, b: u64) -> Reply {
    // SAFETY: the link has put a function of this type there.
    let gate: extern "C" fn(u64, u64, u64, u64) -> Reply = unsafe { core::mem::transmute(abi::GATE) };
    gate(handler, a, b, 0)
}

/// A call of the kernel.
pub(crate) fn syscall(number: u64, a: u64, b: u64) -> u64 {
    let answer;
    // SAFETY: the kernel changes what SYSCALL does, and clears what else it may.
    unsafe {
        asm!("syscall", inlateout("rax") number => answer, inlateout("rdi") a => _, inlateout("rsi") b => _, out("rdx") _,
            out("rcx") _, out("r8") _, out("r9") _, out("r10") _, out("r11") _, options(nostack));
    }
    answer
}

/// A figure, for the hypervisor to print.
pub(crate) fn figure(which: Figure, value: u64) {
    vmcall(call::FIGURE, which as u64, value, 0, 0);
}

/// What a call has answered, for the hypervisor to compare and print.
pub(crate) fn answer(handler: u64, reply: Reply, argument: u64) {
    vmcall(call::ANSWER, handler, reply.status, reply.value, argument);
}

/// A jump with registers of one's own choice, from which the trampoline's way back leads to the caller.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Jump {
    pub(crate) to: u64,
    pub(crate) flags: u64,
    pub(crate) rax: u64,
    pub(crate) rcx: u64,
    pub(crate) rdi: u64,
    pub(crate) rsi: u64,
    pub(crate) rdx: u64,
    pub(crate) r8: u64,
    pub(crate) rsp: u64,
    /// All other registers.
    pub(crate) rest: u64,
    pub(crate) fs: u64,
    pub(crate) gs: u64,
}

/// What a jump has answered that ended in an exception of this program's own.
pub(crate) const RECOVERED: u64 = 99;

unsafe extern "C" {
    /// Where the kernel lets this program continue after an exception: the end of a jump.
    pub(crate) static recovered: u8;
    /// Saves what the trampoline's beginning saves, then jumps.
    pub(crate) fn jump(jump: &Jump) -> Reply;
    /// VMFUNC in a page of this program, and what an attacker would like to run behind it.
    pub(crate) static own_vmfunc: u8;
    /// The same with SYSCALL.
    pub(crate) static own_syscall: u8;
    /// SYSCALL, for a jump: with RAX and RDI.
    pub(crate) static kernel_call: u8;
    /// Where an interrupt diverts this program: makes a call, then goes on where it was.
    pub(crate) static diverted: u8;
}

global_asm!(
    r#"
    .section .text.first, "ax"
    .globl _start
_start:
    call client
    ud2

    .globl jump
jump:
    push rbx
    push rbp
    push r12
    push r13
    push r14
    push r15
    rdfsbase rax
    push rax
    rdgsbase rax
    push rax
    movabs rax, {stack}
    mov [rax], rsp
    mov [rip + jump_stack], rsp
    mov r15, rdi
    mov rax, [r15 + 80]
    wrfsbase rax
    mov rax, [r15 + 88]
    wrgsbase rax
    mov rcx, [r15 + 24]
    mov rdi, [r15 + 32]
    mov rsi, [r15 + 40]
    mov rdx, [r15 + 48]
    mov r8, [r15 + 56]
    mov rbx, [r15 + 72]
    mov rbp, rbx
    mov r9, rbx
    mov r10, rbx
    mov r12, rbx
    mov r13, rbx
    mov r14, rbx
    mov r11, [r15]
    push qword ptr [r15 + 8]
    mov rax, [r15 + 16]
    popfq
    mov rsp, [r15 + 64]
    mov r15, rbx
    jmp r11

    .globl kernel_call
kernel_call:
    syscall
    ud2

    .globl recovered
recovered:
    mov rsp, [rip + jump_stack]
    pop rax
    wrgsbase rax
    pop rax
    wrfsbase rax
    pop r15
    pop r14
    pop r13
    pop r12
    pop rbp
    pop rbx
    cld
    mov rax, {recovered}
    xor edx, edx
    ret

    .globl own_vmfunc
own_vmfunc:
    vmfunc
    mov edi, 0
    mov rax, [rdi]
    ud2

    .globl own_syscall
own_syscall:
    vmfunc
    syscall
    ud2

    .globl diverted
diverted:
    mov rbx, r15
    call busy
    jmp rbx

    .bss
    .balign 8
jump_stack:
    .skip 8
"#,
    stack = const abi::LINK + 8,
    recovered = const RECOVERED,
);

#[unsafe(no_mangle)]
extern "C" fn client(number: u64) -> ! {
    let scenario = ALL[number as usize].0;
    if scenario != Scenario::Unlinked {
        let refused = syscall(kernel::LINK, 0, 0);
        if refused != 0 {
            done(refused);
        }
    }
    match scenario {
        Scenario::Count => calls::count(),
        Scenario::Answers => calls::answers(),
        Scenario::Registers => calls::registers(),
        Scenario::Interrupts => calls::interrupts(),
        Scenario::Busy => calls::busy_call(),
        Scenario::Process => calls::process(),
        attack => attacks::run(attack),
    }
    done(0)
}

/// The end of this client.
fn done(value: u64) -> ! {
    loop {
        vmcall(call::DONE, value, 0, 0, 0);
    }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    loop {
        vmcall(call::FAULT, u64::MAX, 0, 0, 0);
    }
}
