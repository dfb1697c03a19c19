//! The server's kernel: two system calls, and pages at the first access. During calls of clients it runs on their virtual processors.

#![no_std]
#![no_main]

use basalt_vmfunc::abi::{KERNEL_MARK, PAGE, SERVER_DEMAND, SERVER_DEMAND_PAGES, call};
use basalt_vmfunc::arch::pte;
use basalt_vmfunc::cpu::{cr2, vmcall};
use kernel::{Frame, map, spare};

#[path = "../kernel.rs"]
mod kernel;

unsafe extern "C" {
    /// Whether system calls count only while a call of a client is being served.
    static mut delegated: u64;
}

#[unsafe(no_mangle)]
extern "C" fn on_syscall(argument: u64, _: u64, _: u64, number: u64) -> u64 {
    match number {
        0 => {
            // SAFETY: one processor; the entry reads it.
            unsafe { delegated = 1 };
            0
        }
        1 => argument.wrapping_mul(3) ^ KERNEL_MARK,
        _ => u64::MAX,
    }
}

#[unsafe(no_mangle)]
extern "C" fn on_exception(frame: &mut Frame) {
    let address = cr2();
    let of_program = frame.cs & 3 == 3;
    let demand = SERVER_DEMAND..SERVER_DEMAND + SERVER_DEMAND_PAGES * PAGE;
    if frame.vector == 14 && frame.error & pte::P == 0 && of_program && demand.contains(&address) {
        map(address & !(PAGE - 1), spare(), pte::W | pte::U | pte::NX);
        return;
    }
    vmcall(call::FAULT, frame.vector, frame.rip, address, frame.cs);
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    loop {
        vmcall(call::FAULT, u64::MAX, 0, 0, 0);
    }
}
