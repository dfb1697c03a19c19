//! Numbers of the processor's manual (Intel SDM) that more than one program needs: selectors and flags that the guests have chosen, bits of
//! page table entries, MSRs.

/// Selectors. STAR is made of them, so their order is the processor's.
pub const KERNEL_CODE: u16 = 0x08;
/// As above.
pub const KERNEL_DATA: u16 = 0x10;
/// As above.
pub const USER_DATA: u16 = 0x20 | 3;
/// As above.
pub const USER_CODE: u16 = 0x28 | 3;
/// The task state segment.
pub const TASK: u16 = 0x30;
/// STAR: SYSCALL has KERNEL_CODE and the one behind, SYSRET the one 8 and the one 16 above 0x18.
pub const STAR: u64 = 0x1b << 48 | 0x08 << 32;
/// Flags that SYSCALL clears: TF, IF, DF, IOPL, NT, AC.
pub const FMASK: u64 = 0x4_7700;
/// MSRs of SYSCALL.
pub const MSR_STAR: u32 = 0xc000_0081;
/// As above.
pub const MSR_LSTAR: u32 = 0xc000_0082;
/// As above.
pub const MSR_FMASK: u32 = 0xc000_0084;
/// The vector of external interrupts.
pub const TIMER: u64 = 0x40;

/// Page table bits.
pub mod pte {
    /// Present.
    pub const P: u64 = 1;
    /// Writable.
    pub const W: u64 = 2;
    /// For user mode.
    pub const U: u64 = 4;
    /// Accessed and dirty: set by whoever makes an entry, so that the processor never has to.
    pub const AD: u64 = 0x60;
    /// Not to be executed.
    pub const NX: u64 = 1 << 63;
    /// The address in an entry.
    pub const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
}
