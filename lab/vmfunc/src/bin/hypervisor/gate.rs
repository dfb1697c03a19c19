//! The trampoline: the one page of code that client and server both have, at the same address.
//!
//! Whoever runs VMFUNC in the client, from wherever, gets to the instruction behind the one here or to an address at which the server has
//! nothing (`link`). So nothing before that instruction counts, and everything that the server needs is made or checked behind it: stack,
//! flags, bases, number of the handler. The handlers check their arguments.

use core::arch::global_asm;

use basalt_vmfunc::abi::{GATE, LINK, PAGE, STACK_TOP, TABLE, call, status};

unsafe extern "C" {
    static gate_code: [u8; PAGE as usize];
    static gate_vmfunc: u8;
    static gate_back: u8;
    static gate_resume: u8;
}

/// The page's contents.
pub(crate) fn code() -> &'static [u8] {
    // SAFETY: a page of the image that nobody writes.
    unsafe { &gate_code }
}

/// Places in it, as both sides see them.
fn place(label: *const u8) -> u64 {
    GATE + (label as u64 - &raw const gate_code as u64)
}

/// Where a call comes back to the client: RSI is its status, RDX its value.
pub(crate) fn back() -> u64 {
    place(&raw const gate_back)
}

/// Where a client is that was interrupted in a call.
pub(crate) fn resume() -> u64 {
    place(&raw const gate_resume)
}

/// How many places in the page are a VMFUNC instruction, and whether the first is the one that is meant.
pub(crate) fn vmfuncs() -> (usize, bool) {
    let found = || {
        code()
            .windows(3)
            .enumerate()
            .filter(|(_, bytes)| *bytes == [0x0f, 0x01, 0xd4])
    };
    let first = found().next().map(|(at, _)| GATE + at as u64);
    (found().count(), first == Some(place(&raw const gate_vmfunc)))
}

// Offsets from `gate_code` are distances in the address space of both sides: the other pages of the link have the same distances there.
global_asm!(
    r#"
    .section .gate, "ax"
    .balign 4096
    .globl gate_code, gate_vmfunc, gate_back, gate_resume
    .set gate_link, gate_code + {link}
    .set gate_table, gate_code + {table}
    .set gate_stack, gate_code + {stack_top}

# In the client: delegate(handler, a, b, c), a function of the C ABI that answers (status, value).
gate_code:
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
    mov [rip + gate_link + 8], rsp
    lea rsp, [rip + gate_stack]
    mov r8, rcx
    xor eax, eax
    mov ecx, 1
gate_vmfunc:
    vmfunc

# On either side, with registers of anybody's choice. The server's link page says that this is the server.
    cmp qword ptr [rip + gate_link], 0
    je gate_back
    lea rsp, [rip + gate_stack]
    push 0x202                          # no TF, DF, NT, AC
    popfq
    pushfq
    pop r9
    mov r10d, {flags}
    test r9d, 0x3000                    # IOPL is the client's kernel's, and POPF leaves it
    jnz 2f
    mov r10d, {no_handler}
    cmp rdi, [rip + gate_link + 32]
    jae 2f
    sbb r9, r9                          # all ones: no other index, not even speculatively
    and rdi, r9
    mov r9, [rip + gate_link + 40]
    wrfsbase r9
    mov r9, [rip + gate_link + 48]
    wrgsbase r9
    lea r9, [rip + gate_table]
    mov rax, [r9 + rdi * 8]
    mov qword ptr [rip + gate_link + 16], 1
    inc qword ptr [rip + gate_link + 24]
    mov rdi, rsi
    mov rsi, rdx
    mov rdx, r8
    xor ebx, ebx
    xor ecx, ecx
    xor ebp, ebp
    xor r8d, r8d
    xor r9d, r9d
    xor r10d, r10d
    xor r11d, r11d
    xor r12d, r12d
    xor r13d, r13d
    xor r14d, r14d
    xor r15d, r15d
    call rax
    mov rsi, rax
    jmp 3f
2:  mov esi, r10d
    xor edx, edx
# Nothing of the server's leaves but RSI and RDX. There are no vector registers: no program here has any.
3:  mov qword ptr [rip + gate_link + 16], 0
    xor eax, eax
    wrfsbase rax
    wrgsbase rax
    xor ebx, ebx
    xor ecx, ecx
    xor edi, edi
    xor ebp, ebp
    xor r8d, r8d
    xor r9d, r9d
    xor r10d, r10d
    xor r11d, r11d
    xor r12d, r12d
    xor r13d, r13d
    xor r14d, r14d
    xor r15d, r15d
    jmp gate_vmfunc

# In the client again.
gate_back:
    mov rsp, [rip + gate_link + 8]
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
    mov rax, rsi
    ret

# In the client, whose call an interrupt has suspended in the server: the interrupt's handler returns here.
gate_resume:
    mov eax, {resume}
    vmcall
    ud2
    .balign 4096, 0xcc
"#,
    link = const LINK - GATE,
    table = const TABLE - GATE,
    stack_top = const STACK_TOP - GATE,
    flags = const status::FLAGS,
    no_handler = const status::NO_HANDLER,
    resume = const call::CONTINUE,
);
