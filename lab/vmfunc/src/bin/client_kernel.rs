//! The client's kernel: one that does whatever its program asks for, in ring 0, because a tenant's kernel is the tenant's.
//!
//! What the hypervisor has to withstand is here and in the client's program; neither is written with any care for the server.

#![no_std]
#![no_main]

use core::arch::{asm, global_asm};

use basalt_vmfunc::abi::{self, PAGE, call, change};
use basalt_vmfunc::arch::{MSR_FMASK, MSR_LSTAR, TIMER, pte};
use basalt_vmfunc::cpu::{cr2, forget, rdmsr, vmcall, wrmsr};
use kernel::{Frame, boot, leaf, map, spare};

#[path = "../kernel.rs"]
mod kernel;

static mut INTERRUPTS: u64 = 0;
static mut DIVERT: u64 = 0;
static mut RECOVER: u64 = 0;
/// What was where LAND has put a page of its own: the entry and its contents.
static mut REPLACED: (u64, u64) = (0, 0);
/// The page of LAND's own, and where it was put.
static mut LANDING: u64 = 0;
static mut LANDED: u64 = 0;

#[unsafe(no_mangle)]
extern "C" fn on_syscall(a: u64, b: u64, _: u64, number: u64) -> u64 {
    match number {
        abi::kernel::LINK => return vmcall(call::LINK, 0, 0, 0, 0),
        // SAFETY: one processor, and interrupts are off in the kernel.
        abi::kernel::INTERRUPTS => return unsafe { INTERRUPTS },
        // SAFETY: as above.
        abi::kernel::DIVERT => unsafe { DIVERT = a },
        // SAFETY: as above.
        abi::kernel::RECOVER => unsafe { RECOVER = a },
        abi::kernel::MAP => map(a, b & pte::ADDRESS, b & 7),
        abi::kernel::PHYSICAL => return physical(a),
        abi::kernel::ENTRY => return leaf(a) as u64 - boot().direct + boot().memory,
        // SAFETY: the program wants it.
        abi::kernel::WRITE => unsafe { direct(a).cast::<u64>().write_volatile(b) },
        abi::kernel::CHANGE => change(a),
        abi::kernel::LAND => land(a),
        // SAFETY: the program wants it.
        abi::kernel::JUMP => unsafe { jump(a) },
        _ => return u64::MAX,
    }
    0
}

#[unsafe(no_mangle)]
extern "C" fn on_exception(frame: &mut Frame) {
    // SAFETY: one processor, and interrupts are off in the kernel.
    unsafe {
        if frame.vector == TIMER {
            INTERRUPTS += 1;
            if DIVERT != 0 && frame.cs & 3 == 3 {
                frame.registers[0] = frame.rip;
                frame.rip = DIVERT;
                DIVERT = 0;
            }
            return;
        }
        // Single steps go on: the next one may be on the other side.
        if frame.vector == 1 && frame.cs & 3 == 3 {
            return;
        }
        // By UD2 the program says that a landing is over, or wants other flags.
        if frame.vector == 6 && frame.cs & 3 == 3 {
            frame.rip += 2;
            if REPLACED.0 != 0 {
                *(REPLACED.0 as *mut u64) = REPLACED.1;
                forget(LANDED);
                REPLACED.0 = 0;
                return;
            }
            if frame.registers[14] == change::IOPL {
                frame.rflags |= 3 << 12;
                return;
            }
            frame.rip -= 2;
        }
        if RECOVER != 0 && frame.cs & 3 == 3 {
            frame.rip = RECOVER;
            frame.rflags = 0x202;
            RECOVER = 0;
            return;
        }
    }
    vmcall(call::FAULT, frame.vector, frame.rip, cr2(), frame.cs);
}

fn physical(address: u64) -> u64 {
    // SAFETY: an entry of this guest's tables.
    unsafe { *leaf(address) & pte::ADDRESS | address & (PAGE - 1) }
}

/// Memory by its physical address.
fn direct(physical: u64) -> *mut u8 {
    (boot().direct + physical - boot().memory) as *mut u8
}

const VMFUNC: [u8; 3] = [0x0f, 0x01, 0xd4];

/// Puts a page of its own where VMFUNC has to be for `next` to be the next instruction, and runs it.
fn land(next: u64) {
    // SAFETY: pages of this kernel's; the program is told by the hypervisor how it ended, and then puts the page back by UD2.
    unsafe {
        if LANDING == 0 {
            LANDING = spare();
        }
        let (page, at) = (direct(LANDING), next - 3);
        page.write_bytes(0xf4, PAGE as usize);
        page.add((at & (PAGE - 1)) as usize)
            .copy_from_nonoverlapping(VMFUNC.as_ptr(), 3);
        let entry = leaf(at);
        REPLACED = (entry as u64, *entry);
        LANDED = at;
        map(at & !(PAGE - 1), LANDING, pte::W);
        jump(at);
    }
}

unsafe extern "C" {
    /// Ring 0, every register an address of the server's state, SMAP off by AC; EAX 0 and ECX 1, as VMFUNC takes them.
    fn jump(to: u64) -> !;
}

global_asm!(
    r#"
    .text
    .globl jump
jump:
    push 0x40002
    popfq
    movabs rax, {secret}
    lea rsp, [rax + 2048]
    mov rbx, rax
    mov rdx, rax
    mov rsi, rax
    mov rbp, rax
    mov r8, rax
    mov r9, rax
    mov r10, rax
    mov r11, rax
    mov r12, rax
    mov r13, rax
    mov r14, rax
    mov r15, rax
    xor eax, eax
    mov ecx, 1
    jmp rdi
"#,
    secret = const abi::SECRET
);

fn change(what: u64) {
    // SAFETY: the kernel goes on with each of them; that the link does not is what is tested.
    unsafe {
        match what {
            change::PROCESS | change::CR3 => {
                let (here, other) = (boot().root, spare());
                let (from, to) = (direct(here), direct(other));
                core::ptr::copy_nonoverlapping(from, to, PAGE as usize);
                asm!("mov cr3, {}", in(reg) other);
                if what == change::PROCESS {
                    asm!("mov cr3, {}", in(reg) here);
                }
            }
            change::IDT => load_idt(0xfff, abi::STACK),
            change::LSTAR => wrmsr(MSR_LSTAR, rdmsr(MSR_LSTAR) + 1),
            change::FMASK => wrmsr(MSR_FMASK, 0),
            change::CR4 => {
                asm!("mov {0}, cr4", "and {0}, {1}", "mov cr4, {0}", out(reg) _, const 0xffcf_ffffu32 as i32)
            }
            change::DEBUG => {
                // Reads and writes of eight bytes.
                asm!("mov dr0, {}", "mov dr7, {}", in(reg) abi::SECRET, in(reg) 0xb_0401u64);
            }
            change::SLOT => {
                let page = spare();
                core::ptr::copy_nonoverlapping(VMFUNC.as_ptr(), direct(page), 3);
                // RET, for who wants to have been there.
                direct(page).add(3).write(0xc3);
                map(abi::OWN_AT_SERVER, page, pte::U);
            }
            // Without INVLPG, so that the processor may still know the page.
            change::NO_SLOT => direct(boot().root)
                .cast::<u64>()
                .add(abi::SERVER_SLOT)
                .write_volatile(0),
            _ => {}
        }
    }
}

/// LIDT.
unsafe fn load_idt(limit: u16, base: u64) {
    let mut bytes = [0u8; 10];
    bytes[..2].copy_from_slice(&limit.to_le_bytes());
    bytes[2..].copy_from_slice(&base.to_le_bytes());
    // SAFETY: as the caller wants it.
    unsafe { asm!("lidt [{}]", in(reg) bytes.as_ptr()) };
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    loop {
        vmcall(call::FAULT, u64::MAX, 0, 0, 0);
    }
}
