//! Instructions that have no name in Rust. Each is one instruction; what it may be used for is in the processor's manual (Intel SDM).

use core::arch::asm;

/// RDMSR.
pub fn rdmsr(number: u32) -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: reading a register changes no memory; a number that does not exist ends the program by #GP.
    unsafe { asm!("rdmsr", in("ecx") number, out("eax") low, out("edx") high, options(nostack, nomem)) };
    u64::from(high) << 32 | u64::from(low)
}

/// WRMSR.
///
/// # Safety
///
/// The register's new value must keep the running program valid.
pub unsafe fn wrmsr(number: u32, value: u64) {
    let (low, high) = (value & 0xffff_ffff, value >> 32);
    // SAFETY: the caller's.
    unsafe { asm!("wrmsr", in("ecx") number, in("rax") low, in("rdx") high, options(nostack)) };
}

/// VMCALL with the hypervisor's calling convention (`abi::call`).
pub fn vmcall(number: u64, a: u64, b: u64, c: u64, d: u64) -> u64 {
    let answer;
    // SAFETY: the hypervisor changes no register but RAX, and no memory of the caller's but what it was given.
    unsafe {
        asm!("vmcall", inlateout("rax") number => answer, in("rdi") a, in("rsi") b, in("rdx") c, in("r8") d);
    }
    answer
}

/// RDTSC. In Bochs with one processor a tick is an instruction.
pub fn ticks() -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: reads a counter.
    unsafe { asm!("lfence", "rdtsc", out("eax") low, out("edx") high, options(nostack, nomem)) };
    u64::from(high) << 32 | u64::from(low)
}

/// CR2: the address of the last page fault.
pub fn cr2() -> u64 {
    let value;
    // SAFETY: reads a register.
    unsafe { asm!("mov {}, cr2", out(reg) value, options(nostack, nomem)) };
    value
}

/// OUT, a byte.
pub fn out(port: u16, byte: u8) {
    // SAFETY: the ports that are used print, mask interrupt controllers, or end the machine.
    unsafe { asm!("out dx, al", in("dx") port, in("al") byte, options(nostack, nomem)) };
}

/// INVLPG of one address.
pub fn forget(address: u64) {
    // SAFETY: what is read anew from the tables is what they say.
    unsafe { asm!("invlpg [{}]", in(reg) address, options(nostack)) };
}
