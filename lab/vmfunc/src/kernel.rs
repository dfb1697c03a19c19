//! The kernel that both guests have: descriptor tables, SYSCALL entry, exceptions on a stack of their own, one program in user mode.
//!
//! Each kernel has this file as a module of its own. It knows one processor and one program, and not whether it is the server's or a client's: that is `on_syscall` and `on_exception`, which
//! the two kernels define. In the server the same code runs during calls of clients, on a client's virtual processor, whose registers
//! (CR3, descriptor tables, LSTAR) it must not look at.

use core::arch::{asm, global_asm};
use core::ptr::{addr_of, addr_of_mut};

use basalt_vmfunc::abi::{self, Boot};
use basalt_vmfunc::arch::{FMASK, KERNEL_CODE, MSR_FMASK, MSR_LSTAR, MSR_STAR, STAR, TASK, pte};
use basalt_vmfunc::cpu::{forget, wrmsr};

#[repr(C, align(4096))]
struct Tables<const N: usize>([u64; N]);

/// Each in pages of its own: in the server's view of a link they stand where a client's are.
static mut GDT: Tables<512> = Tables([0; 512]);
static mut IDT: Tables<512> = Tables([0; 512]);
static mut TSS: Tables<512> = Tables([0; 512]);
static mut BOOT: Option<Boot> = None;
static mut SPARE: [Tables<512>; 16] = [const { Tables([0; 512]) }; 16];
static mut SPARE_USED: usize = 0;

/// Registers at an exception, as the entry has pushed them.
#[repr(C)]
pub(crate) struct Frame {
    /// R15 to RAX.
    pub(crate) registers: [u64; 15],
    /// Which exception.
    pub(crate) vector: u64,
    /// Its error code, or 0.
    pub(crate) error: u64,
    /// Where.
    pub(crate) rip: u64,
    /// In which code segment.
    pub(crate) cs: u64,
    /// With which flags.
    pub(crate) rflags: u64,
    /// On which stack.
    pub(crate) rsp: u64,
    /// As above.
    pub(crate) ss: u64,
}

// The entry of system calls is the first of a kernel's program, so that its address is the linker script's. The server's is entered from a
// stub in the page of a client's LSTAR (hypervisor, link.rs). Somebody may jump there without SYSCALL, in ring 0 and with registers of his
// choice: `delegated` is set when the server has been frozen, and then an entry counts only while a call is being served, which only the
// trampoline says, in a page that no client has. GS is not used.
global_asm!(
    r#"
    .section .text.first, "ax"
    .globl syscall_entry
syscall_entry:
    mov [rip + user_stack], rsp
    lea rsp, [rip + syscall_stack_top]
    cld
    push rcx
    push r11
    cmp qword ptr [rip + delegated], 0
    je 1f
    movabs rcx, {in_call}
    stac
    cmp qword ptr [rcx], 1
    clac
    je 1f
    mov eax, {no_call}
    vmcall
    ud2
1:  mov rcx, rax
    call on_syscall
    pop r11
    pop rcx
    xor edi, edi
    xor esi, esi
    xor edx, edx
    xor r8d, r8d
    xor r9d, r9d
    xor r10d, r10d
    mov rsp, [rip + user_stack]
    sysretq

    .text
    .globl _start
_start:
    lea rsp, [rip + syscall_stack_top]
    call kernel_start
    ud2

    .balign 16
vectors:
    .set vector, 0
    .rept 65
    .balign 16
    .if (vector == 8) || (vector >= 10 && vector <= 14) || (vector == 17) || (vector == 21)
    .else
    push 0
    .endif
    push vector
    jmp exception
    .set vector, vector + 1
    .endr
exception:
    cld
    clac
    push rax
    push rbx
    push rcx
    push rdx
    push rsi
    push rdi
    push rbp
    push r8
    push r9
    push r10
    push r11
    push r12
    push r13
    push r14
    push r15
    mov rdi, rsp
    call on_exception
    pop r15
    pop r14
    pop r13
    pop r12
    pop r11
    pop r10
    pop r9
    pop r8
    pop rbp
    pop rdi
    pop rsi
    pop rdx
    pop rcx
    pop rbx
    pop rax
    add rsp, 16
    iretq

    .bss
    .balign 16
user_stack:
    .skip 8
    .globl delegated
delegated:
    .skip 8
    .balign 4096
    .skip 16384
syscall_stack_top:
    .skip 16384
exception_stack_top:
"#,
    in_call = const abi::LINK + 16,
    no_call = const abi::call::NO_CALL,
);

unsafe extern "C" {
    fn syscall_entry();
    static vectors: u8;
    static exception_stack_top: u8;
}

#[unsafe(no_mangle)]
extern "C" fn kernel_start(boot: &Boot) -> ! {
    // SAFETY: nothing else runs yet, so the tables are this function's; they are valid before they are loaded.
    unsafe {
        BOOT = Some(*boot);
        let gdt = &mut *addr_of_mut!(GDT.0);
        let task = addr_of!(TSS) as u64;
        gdt[..8].copy_from_slice(&[
            0,
            0x00af_9b00_0000_ffff,
            0x00cf_9300_0000_ffff,
            0,
            0x00cf_f300_0000_ffff,
            0x00af_fb00_0000_ffff,
            0x67 | (task & 0xff_ffff) << 16 | 0x89 << 40 | (task >> 24 & 0xff) << 56,
            task >> 32,
        ]);
        let stack = addr_of!(exception_stack_top) as u64;
        let bytes = addr_of_mut!(TSS).cast::<u8>();
        // RSP0 and IST1 are the same stack; every gate names IST1, because somebody in ring 0 may have chosen RSP.
        bytes.add(4).cast::<u64>().write_unaligned(stack);
        bytes.add(36).cast::<u64>().write_unaligned(stack);
        bytes.add(102).cast::<u16>().write_unaligned(104);
        let idt = &mut *addr_of_mut!(IDT.0);
        for vector in 0..65 {
            let to = addr_of!(vectors) as u64 + vector as u64 * 16;
            idt[vector * 2] =
                to & 0xffff | u64::from(KERNEL_CODE) << 16 | 1 << 32 | 0x8e << 40 | (to >> 16 & 0xffff) << 48;
            idt[vector * 2 + 1] = to >> 32;
        }
        load(8 * 8 - 1, addr_of!(GDT) as u64, 65 * 16 - 1, addr_of!(IDT) as u64);
        wrmsr(MSR_STAR, STAR);
        wrmsr(MSR_LSTAR, syscall_entry as *const () as u64);
        wrmsr(MSR_FMASK, FMASK);
        asm!(
            "mov rsp, {stack}", "xor eax, eax", "sysretq",
            stack = in(reg) boot.stack, in("rdi") boot.argument, in("rcx") boot.entry, in("r11") 0x202u64,
            options(noreturn)
        );
    }
}

/// LGDT, LIDT, LTR.
///
/// # Safety
///
/// The tables must be valid and stay so.
unsafe fn load(gdt_limit: u16, gdt: u64, idt_limit: u16, idt: u64) {
    let pointer = |limit: u16, base: u64| {
        let mut bytes = [0u8; 10];
        bytes[..2].copy_from_slice(&limit.to_le_bytes());
        bytes[2..].copy_from_slice(&base.to_le_bytes());
        bytes
    };
    let (gdt, idt) = (pointer(gdt_limit, gdt), pointer(idt_limit, idt));
    // SAFETY: the caller's.
    unsafe {
        asm!("lgdt [{}]", "lidt [{}]", "ltr {:x}", in(reg) gdt.as_ptr(), in(reg) idt.as_ptr(), in(reg) TASK);
    }
}

/// What the kernel was told at its start.
pub(crate) fn boot() -> Boot {
    // SAFETY: written once, before anything that calls this.
    unsafe { (*addr_of!(BOOT)).expect("the kernel has started") }
}

/// One entry of a page table, through the kernel's view of all memory.
fn entry(table: u64, slot: u64) -> *mut u64 {
    let boot = boot();
    (boot.direct + (table & pte::ADDRESS) - boot.memory + slot * 8) as *mut u64
}

/// The entry of the lowest table for an address; tables that are missing are made.
pub(crate) fn leaf(address: u64) -> *mut u64 {
    let mut table = boot().root;
    for shift in [39, 30, 21] {
        let at = entry(table, address >> shift & 511);
        // SAFETY: a table of this guest's, in its memory; one processor, and nobody else changes tables.
        unsafe {
            if *at & pte::P == 0 {
                *at = spare() | pte::P | pte::W | pte::U | pte::AD;
            }
            table = *at;
        }
    }
    entry(table, address >> 12 & 511)
}

/// Maps a page.
pub(crate) fn map(address: u64, physical: u64, flags: u64) {
    // SAFETY: as in `leaf`.
    unsafe { *leaf(address) = physical | flags | pte::P | pte::AD };
    forget(address);
}

/// A page of the kernel's own that nobody uses: its physical address. Zero, as pages of .bss are.
pub(crate) fn spare() -> u64 {
    // SAFETY: one processor, and no interrupt in kernel mode.
    unsafe {
        let page = addr_of!(SPARE[SPARE_USED]) as u64;
        SPARE_USED += 1;
        // Not `physical`, which may want a spare page.
        let mut table = boot().root;
        for shift in [39, 30, 21, 12] {
            table = *entry(table, page >> shift & 511);
        }
        table & pte::ADDRESS
    }
}
