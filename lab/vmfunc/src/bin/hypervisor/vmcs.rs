//! Virtual processors: the fields of a VMCS by the names of Intel's manual (SDM 3C, appendix B), how one is made, and how it is entered.
//!
//! It knows 64-bit guests that begin in their kernel, and nothing of links.

use core::arch::{asm, global_asm};

use basalt_vmfunc::arch::{KERNEL_CODE, KERNEL_DATA, USER_CODE, USER_DATA};
use basalt_vmfunc::cpu::{rdmsr, wrmsr};

use crate::ept::Ept;
use crate::guest::Start;
use crate::memory::{Life, page, write as store};

/// Fields.
pub(crate) mod field {
    pub(crate) const VPID: u64 = 0x0000;
    pub(crate) const MSR_BITMAP: u64 = 0x2004;
    pub(crate) const VM_FUNCTIONS: u64 = 0x2018;
    pub(crate) const EPT_POINTER: u64 = 0x201a;
    pub(crate) const EPTP_LIST: u64 = 0x2024;
    pub(crate) const GUEST_PHYSICAL: u64 = 0x2400;
    pub(crate) const LINK_POINTER: u64 = 0x2800;
    pub(crate) const GUEST_DEBUGCTL: u64 = 0x2802;
    pub(crate) const GUEST_EFER: u64 = 0x2806;
    pub(crate) const HOST_EFER: u64 = 0x2c02;
    pub(crate) const PIN: u64 = 0x4000;
    pub(crate) const PRIMARY: u64 = 0x4002;
    pub(crate) const EXCEPTIONS: u64 = 0x4004;
    pub(crate) const CR3_TARGETS: u64 = 0x400a;
    pub(crate) const EXIT: u64 = 0x400c;
    pub(crate) const ENTRY: u64 = 0x4012;
    pub(crate) const ENTRY_EVENT: u64 = 0x4016;
    pub(crate) const ENTRY_ERROR: u64 = 0x4018;
    pub(crate) const ENTRY_LENGTH: u64 = 0x401a;
    pub(crate) const SECONDARY: u64 = 0x401e;
    pub(crate) const INSTRUCTION_ERROR: u64 = 0x4400;
    pub(crate) const REASON: u64 = 0x4402;
    pub(crate) const EXIT_EVENT: u64 = 0x4404;
    pub(crate) const VECTORING: u64 = 0x4408;
    pub(crate) const VECTORING_ERROR: u64 = 0x440a;
    pub(crate) const INSTRUCTION_LENGTH: u64 = 0x440c;
    pub(crate) const INTERRUPTIBILITY: u64 = 0x4824;
    pub(crate) const TIMER: u64 = 0x482e;
    pub(crate) const CR0_MASK: u64 = 0x6000;
    pub(crate) const CR4_MASK: u64 = 0x6002;
    pub(crate) const CR0_SHADOW: u64 = 0x6004;
    pub(crate) const CR4_SHADOW: u64 = 0x6006;
    pub(crate) const QUALIFICATION: u64 = 0x6400;
    pub(crate) const CR0: u64 = 0x6800;
    pub(crate) const CR3: u64 = 0x6802;
    pub(crate) const CR4: u64 = 0x6804;
    pub(crate) const FS_BASE: u64 = 0x680e;
    pub(crate) const GS_BASE: u64 = 0x6810;
    pub(crate) const TR_BASE: u64 = 0x6814;
    pub(crate) const GDTR_BASE: u64 = 0x6816;
    pub(crate) const IDTR_BASE: u64 = 0x6818;
    pub(crate) const DR7: u64 = 0x681a;
    pub(crate) const RSP: u64 = 0x681c;
    pub(crate) const RIP: u64 = 0x681e;
    pub(crate) const RFLAGS: u64 = 0x6820;
    pub(crate) const PENDING_DEBUG: u64 = 0x6822;
    pub(crate) const TR_LIMIT: u64 = 0x480e;
    pub(crate) const GDTR_LIMIT: u64 = 0x4810;
    pub(crate) const IDTR_LIMIT: u64 = 0x4812;
    pub(crate) const LDTR_RIGHTS: u64 = 0x4820;
    pub(crate) const CS: u64 = 0x0802;
    pub(crate) const SS: u64 = 0x0804;
    pub(crate) const CS_RIGHTS: u64 = 0x4816;
    pub(crate) const SS_RIGHTS: u64 = 0x4818;
}

/// Bits of the primary controls that change while a guest runs.
pub(crate) mod primary {
    /// Exit when the guest can take an interrupt.
    pub(crate) const INTERRUPT_WINDOW: u64 = 1 << 2;
    /// Exit on writes of CR3.
    pub(crate) const CR3_LOAD: u64 = 1 << 15;
    /// Exit on accesses of debug registers.
    pub(crate) const DEBUG_REGISTERS: u64 = 1 << 23;
}

/// Of the secondary ones: exit on LGDT, LIDT, LLDT, LTR and what reads them.
pub(crate) const DESCRIPTOR_TABLES: u64 = 1 << 2;

/// CR4 bits.
pub(crate) mod cr4 {
    pub(crate) const PAE: u64 = 1 << 5;
    pub(crate) const LA57: u64 = 1 << 12;
    pub(crate) const VMXE: u64 = 1 << 13;
    pub(crate) const FSGSBASE: u64 = 1 << 16;
    pub(crate) const PCIDE: u64 = 1 << 17;
    pub(crate) const SMEP: u64 = 1 << 20;
    pub(crate) const SMAP: u64 = 1 << 21;
}

/// Registers that a VMCS has not.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Registers {
    pub(crate) rax: u64,
    pub(crate) rbx: u64,
    pub(crate) rcx: u64,
    pub(crate) rdx: u64,
    pub(crate) rsi: u64,
    pub(crate) rdi: u64,
    pub(crate) rbp: u64,
    pub(crate) r8: u64,
    pub(crate) others: [u64; 7],
}

/// Reads a field of the current VMCS.
pub(crate) fn get(field: u64) -> u64 {
    let value;
    // SAFETY: reads a field that exists.
    unsafe { asm!("vmread {}, {}", out(reg) value, in(reg) field, options(nostack, nomem)) };
    value
}

/// Writes one.
pub(crate) fn set(field: u64, value: u64) {
    let failed: u8;
    // SAFETY: what is written takes effect when the guest is entered, and is checked then.
    unsafe { asm!("vmwrite {}, {}", "setbe {}", in(reg) field, in(reg) value, out(reg_byte) failed, options(nostack)) };
    assert!(failed == 0, "a field of the VMCS that cannot be written");
}

/// Sets bits of a field, or clears them.
pub(crate) fn flip(field: u64, bits: u64, on: bool) {
    let old = get(field);
    set(field, if on { old | bits } else { old & !bits });
}

/// Has the processor forget what it knows of extended page tables (INVEPT, all contexts).
pub(crate) fn forget() {
    let descriptor = [0u64; 2];
    // SAFETY: what is forgotten is read anew.
    unsafe { asm!("invept {}, [{}]", in(reg) 2u64, in(reg) &descriptor) };
}

/// Segment registers of user mode.
pub(crate) fn set_user_segments() {
    set(field::CS, u64::from(USER_CODE));
    set(field::CS_RIGHTS, 0xa0fb);
    set(field::SS, u64::from(USER_DATA));
    set(field::SS_RIGHTS, 0xc0f3);
    for limit in [0x4802, 0x4804] {
        set(limit, 0xffff_ffff);
    }
}

/// VMX on (SDM 3C, 24.7). The firmware has to permit it, and this machine's does nothing.
pub(crate) fn on() {
    const FEATURE_CONTROL: u32 = 0x3a;
    const BASIC: u32 = 0x480;
    let region = page(Life::Machine);
    store(region, rdmsr(BASIC) & 0x7fff_ffff);
    let failed: u8;
    // SAFETY: the bits that VMX, FSGSBASE, SMEP and SMAP need, in registers that are the hypervisor's.
    unsafe {
        if rdmsr(FEATURE_CONTROL) & 1 == 0 {
            wrmsr(FEATURE_CONTROL, 5);
        }
        asm!("mov {0}, cr4", "or {0}, {1}", "mov cr4, {0}", out(reg) _, const (cr4::VMXE | cr4::FSGSBASE) as i32);
        asm!("vmxon [{}]", "setbe {}", in(reg) &region, out(reg_byte) failed);
    }
    assert!(failed == 0, "VMXON failed");
}

/// Control bits, with those that have to be set or clear by the processor's MSR.
fn controls(msr: u32, wanted: u64) -> u64 {
    let allowed = rdmsr(msr);
    let value = (wanted | allowed & 0xffff_ffff) & allowed >> 32;
    assert!(value & wanted == wanted, "this processor does not have all controls");
    value
}

/// A virtual processor that begins in a kernel. It becomes the current one.
pub(crate) fn make(ept: Ept, start: &Start, list: u64, msr_bitmap: u64, vpid: u64) {
    const BASIC: u32 = 0x480;
    let region = page(Life::Client);
    store(region, rdmsr(BASIC) & 0x7fff_ffff);
    // SAFETY: the region is this VMCS's alone.
    unsafe { asm!("vmclear [{0}]", "vmptrld [{0}]", in(reg) &region) };
    // External interrupts and NMIs exit; the preemption timer runs.
    set(field::PIN, controls(0x48d, 1 | 1 << 3 | 1 << 6));
    // HLT and I/O exit, MSRs by the bitmap, secondary controls; what else the manual has set by default is not wanted (TRUE controls).
    set(field::PRIMARY, controls(0x48e, 1 << 7 | 1 << 24 | 1 << 28 | 1 << 31));
    // EPT, RDTSCP, VPID, INVPCID, VM functions.
    set(
        field::SECONDARY,
        controls(0x48b, 1 << 1 | 1 << 3 | 1 << 5 | 1 << 12 | 1 << 13),
    );
    // Debug registers and EFER are saved and loaded, interrupts acknowledged, the timer's rest saved; both sides are 64-bit.
    set(
        field::EXIT,
        controls(0x48f, 1 << 2 | 1 << 9 | 1 << 15 | 1 << 20 | 1 << 21 | 1 << 22),
    );
    set(field::ENTRY, controls(0x490, 1 << 2 | 1 << 9 | 1 << 15));
    set(field::VPID, vpid);
    set(field::EPT_POINTER, ept.pointer());
    set(field::MSR_BITMAP, msr_bitmap);
    // EPTP switching is function 0.
    set(field::VM_FUNCTIONS, u64::from(list != 0));
    set(field::EPTP_LIST, list);
    set(field::LINK_POINTER, u64::MAX);
    for zero in [
        field::EXCEPTIONS,
        field::CR3_TARGETS,
        field::ENTRY_EVENT,
        field::GUEST_DEBUGCTL,
        field::PENDING_DEBUG,
    ] {
        set(zero, 0);
    }
    guest_state(start);
    host_state();
}

fn guest_state(start: &Start) {
    let (mut cr0, mut cr4, efer): (u64, u64, u64);
    // SAFETY: reads registers.
    unsafe { asm!("mov {}, cr0", "mov {}, cr4", out(reg) cr0, out(reg) cr4) };
    efer = rdmsr(0xc000_0080);
    cr0 |= 1 << 5;
    cr4 |= cr4::VMXE | cr4::FSGSBASE | cr4::SMEP | cr4::SMAP;
    set(field::CR0, cr0);
    set(field::CR4, cr4);
    // The bits of VMX's own are not the guest's to see.
    set(field::CR0_MASK, 1 << 5);
    set(field::CR0_SHADOW, cr0);
    set(field::CR4_MASK, cr4::VMXE);
    set(field::CR4_SHADOW, cr4 & !cr4::VMXE);
    set(field::CR3, start.root);
    set(field::GUEST_EFER, efer);
    // ES, CS, SS, DS, FS, GS, LDTR, TR: selector, base, limit, rights.
    for segment in 0..8 {
        let (selector, limit, rights) = match segment {
            1 => (KERNEL_CODE, 0xffff_ffff, 0xa09b),
            6 => (0, 0, 0x1_0000),
            7 => (0, 0x67, 0x8b),
            _ => (KERNEL_DATA, 0xffff_ffff, 0xc093),
        };
        set(0x0800 + segment * 2, u64::from(selector));
        set(0x6806 + segment * 2, 0);
        set(0x4800 + segment * 2, limit);
        set(0x4814 + segment * 2, rights);
    }
    for zero in [
        field::GDTR_BASE,
        field::IDTR_BASE,
        field::GDTR_LIMIT,
        field::IDTR_LIMIT,
        field::INTERRUPTIBILITY,
        0x4826,
        0x482a,
        0x6824,
        0x6826,
    ] {
        set(zero, 0);
    }
    set(field::DR7, 0x400);
    set(field::RFLAGS, 2);
    set(field::RIP, start.rip);
    // The kernel sets its own at once.
    set(field::RSP, 0);
}

fn host_state() {
    let (cr0, cr3, cr4): (u64, u64, u64);
    // SAFETY: reads registers.
    unsafe { asm!("mov {}, cr0", "mov {}, cr3", "mov {}, cr4", out(reg) cr0, out(reg) cr3, out(reg) cr4) };
    set(0x6c00, cr0);
    set(0x6c02, cr3);
    set(0x6c04, cr4);
    set(field::HOST_EFER, rdmsr(0xc000_0080));
    // ES, CS, SS, DS, FS, GS as the firmware has left them; TR must not be null, and is not used.
    for (segment, selector) in (0u64..).zip([16, 24, 16, 16, 16, 16, 32]) {
        set(0x0c00 + segment * 2, selector);
    }
    // Bases of FS, GS, TR, GDTR, IDTR, and SYSENTER: none.
    for zero in [0x4c00, 0x6c06, 0x6c08, 0x6c0a, 0x6c0c, 0x6c0e, 0x6c10, 0x6c12] {
        set(zero, 0);
    }
}

unsafe extern "C" {
    fn vmx_enter(registers: &mut Registers, again: u64) -> u64;
}

/// Virtual processors have numbers; by them entries are counted.
pub(crate) const SERVER: u64 = 1;
/// As above: clients have one after another the same.
pub(crate) const CLIENT: u64 = 2;

static mut ENTRIES: [u64; 3] = [0; 3];

/// How often a virtual processor was entered.
pub(crate) fn entries(vpid: u64) -> u64 {
    // SAFETY: one processor.
    unsafe { ENTRIES[vpid as usize] }
}

/// Runs the guest of the current VMCS until its next exit.
pub(crate) fn enter(registers: &mut Registers, again: bool) {
    // SAFETY: the VMCS is complete; the guest has no memory of the hypervisor's.
    let failed = unsafe {
        ENTRIES[get(field::VPID) as usize] += 1;
        vmx_enter(registers, u64::from(again))
    };
    assert!(failed == 0, "VM entry failed, error {}", get(field::INSTRUCTION_ERROR));
    assert!(
        get(field::REASON) >> 31 == 0,
        "VM entry failed, reason {:#x}",
        get(field::REASON)
    );
}

global_asm!(
    r#"
    .text
    .globl vmx_enter
vmx_enter:
    push rbx
    push rbp
    push r12
    push r13
    push r14
    push r15
    push rdi
    mov eax, 0x6c14                     # host RSP
    vmwrite rax, rsp
    lea rdx, [rip + vmx_exited]
    mov eax, 0x6c16                     # host RIP
    vmwrite rax, rdx
    test rsi, rsi
    mov rax, [rdi]
    mov rbx, [rdi + 8]
    mov rcx, [rdi + 16]
    mov rdx, [rdi + 24]
    mov rsi, [rdi + 32]
    mov rbp, [rdi + 48]
    mov r8, [rdi + 56]
    mov r9, [rdi + 64]
    mov r10, [rdi + 72]
    mov r11, [rdi + 80]
    mov r12, [rdi + 88]
    mov r13, [rdi + 96]
    mov r14, [rdi + 104]
    mov r15, [rdi + 112]
    mov rdi, [rdi + 40]
    jnz 1f
    vmlaunch
    jmp 2f
1:  vmresume
2:  pop rdi
    mov eax, 1
    jmp 3f
vmx_exited:
    xchg rdi, [rsp]
    mov [rdi], rax
    mov [rdi + 8], rbx
    mov [rdi + 16], rcx
    mov [rdi + 24], rdx
    mov [rdi + 32], rsi
    mov [rdi + 48], rbp
    mov [rdi + 56], r8
    mov [rdi + 64], r9
    mov [rdi + 72], r10
    mov [rdi + 80], r11
    mov [rdi + 88], r12
    mov [rdi + 96], r13
    mov [rdi + 104], r14
    mov [rdi + 112], r15
    pop rax
    mov [rdi + 40], rax
    xor eax, eax
3:  pop r15
    pop r14
    pop r13
    pop r12
    pop rbp
    pop rbx
    cld
    ret
"#
);
