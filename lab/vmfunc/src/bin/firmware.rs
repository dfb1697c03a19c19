//! The machine's firmware: takes the processor from reset to 64-bit mode and enters the hypervisor, which the emulator has put into memory.
//! It knows nothing of what it enters but the address.

#![no_std]
#![no_main]

use core::arch::global_asm;

// The first 4 GiB are mapped at their own addresses, by four entries of 1 GiB; the tables are at 0x8000, the stack below 0x80000.
global_asm!(
    r#"
    .section .firmware, "ax"
    .code16
    .globl _start
begin:
    cli
    .byte 0x2e, 0x66, 0x0f, 0x01, 0x16  # lgdt cs:[gdt_pointer]
    .word gdt_pointer - begin
    mov eax, cr0
    or al, 1
    mov cr0, eax
    .byte 0x66, 0xea                    # far jump into 32-bit code
    .long flat
    .word 8
    .code32
flat:
    mov ax, 16
    mov ds, ax
    mov es, ax
    mov ss, ax
    mov dword ptr [0x8000], 0x9003
    mov dword ptr [0x8004], 0
    mov edi, 0x9000
    mov eax, 0x83
    mov ecx, 4
1:  mov [edi], eax
    mov dword ptr [edi + 4], 0
    add eax, 0x40000000
    add edi, 8
    loop 1b
    mov eax, 0x8000
    mov cr3, eax
    mov eax, 0x20                       # CR4.PAE
    mov cr4, eax
    mov ecx, 0xc0000080                 # EFER: SCE, LME, NXE
    mov eax, 0x901
    xor edx, edx
    wrmsr
    mov eax, 0x80010021                 # CR0: PG, WP, NE, PE
    mov cr0, eax
    .byte 0xea
    .long long
    .word 24
    .code64
long:
    mov esp, 0x80000
    mov eax, 0x100000
    jmp rax
    .balign 8
gdt:
    .quad 0
    .quad 0x00cf9a000000ffff            # 8: 32-bit code
    .quad 0x00cf92000000ffff            # 16: data
    .quad 0x00af9a000000ffff            # 24: 64-bit code
gdt_pointer:
    .word 31
    .long gdt
    # Where a processor starts, with its code segment at 0xffff0000.
    .org begin + 0xfff0
_start:
    .byte 0xe9                          # jmp begin: the displacement is from the end of this instruction
    .word 0x000d
    .org begin + 0x10000
"#
);

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    loop {}
}
