//! The local APIC's timer, which is where external interrupts come from here.

use basalt_vmfunc::arch::TIMER;
use basalt_vmfunc::cpu::out;

const APIC: u64 = 0xfee0_0000;
const END: u64 = 0xb0;
const SPURIOUS: u64 = 0xf0;
const LVT_TIMER: u64 = 0x320;
const INITIAL: u64 = 0x380;
const DIVIDE: u64 = 0x3e0;

fn set(register: u64, value: u32) {
    // SAFETY: a register of the local APIC at its place after reset.
    unsafe { ((APIC + register) as *mut u32).write_volatile(value) };
}

/// No interrupts but of the timer, and none of it yet.
pub(crate) fn init() {
    out(0x21, 0xff);
    out(0xa1, 0xff);
    set(SPURIOUS, 0x1ff);
    set(DIVIDE, 0xb);
    every(0);
}

/// An interrupt every so many ticks; 0: none.
pub(crate) fn every(ticks: u64) {
    let masked = u32::from(ticks == 0) << 16;
    set(LVT_TIMER, masked | 1 << 17 | TIMER as u32);
    set(INITIAL, ticks.min(u64::from(u32::MAX)) as u32);
}

/// The interrupt has been seen.
pub(crate) fn done() {
    set(END, 0);
}
