//! Calls as they are meant: their answers, their cost, and what interrupts do to them.

use core::arch::asm;
use core::hint::black_box;

use basalt_vmfunc::abi::{self, call, handler, kernel};
use basalt_vmfunc::cpu::{ticks, vmcall};
use basalt_vmfunc::scenario::Figure;

use crate::{answer, delegate, diverted, figure, syscall};

const CALLS: u64 = 10_000;

/// Exits and ticks of calls, of VMCALLs and of the loop around them.
pub(crate) fn count() {
    answer(handler::NULL, delegate(handler::NULL, 0, 0), 0);
    let loops: [(Figure, Figure, fn()); 3] = [
        (Figure::CallExits, Figure::CallTicks, || {
            black_box(delegate(handler::NULL, 0, 0).status);
        }),
        (Figure::VmcallExits, Figure::VmcallTicks, || {
            black_box(vmcall(call::NOTHING, 0, 0, 0, 0));
        }),
        (Figure::LoopExits, Figure::LoopTicks, || {
            black_box(0);
        }),
    ];
    for (exits, each, body) in loops {
        vmcall(call::COUNT, 0, 0, 0, 0);
        let start = ticks();
        for _ in 0..CALLS {
            body();
        }
        let taken = ticks() - start;
        figure(exits, vmcall(call::COUNTED, 0, 0, 0, 0));
        figure(each, taken / CALLS);
    }
}

/// Every handler, with what it has to answer; for those whose first call needs memory, the exits of a first and of a second call.
pub(crate) fn answers() {
    for argument in [0, 1, 0x1234_5678_9abc_def0, u64::MAX] {
        answer(handler::KEYED, delegate(handler::KEYED, argument, 0), argument);
        answer(handler::SYSCALL, delegate(handler::SYSCALL, argument, 0), argument);
    }
    answer(handler::BASES, delegate(handler::BASES, 0, 0), 0);
    answer(handler::LONG, delegate(handler::LONG, 7, 1000), 7);
    answer(handler::DEEP, delegate(handler::DEEP, 20, 0), 20);
    let mut sum = 0;
    for at in 0..abi::WINDOW_SIZE {
        let byte = (at * 7 + 3) as u8;
        sum += u64::from(byte);
        // SAFETY: the window is mapped for this program, which does not use it otherwise.
        unsafe { (abi::WINDOW as *mut u8).add(at as usize).write_volatile(byte) };
    }
    answer(handler::SUM, delegate(handler::SUM, abi::WINDOW, abi::WINDOW_SIZE), sum);
    answer(
        handler::SUM,
        delegate(handler::SUM, abi::WINDOW + abi::WINDOW_SIZE, 0),
        0,
    );
    for (which, figures) in [
        (handler::HEAP, [Figure::HeapFirst, Figure::HeapSecond]),
        (handler::DEMAND, [Figure::DemandFirst, Figure::DemandSecond]),
    ] {
        for (time, exits_of) in (1..).zip(figures) {
            vmcall(call::COUNT, 0, 0, 0, 0);
            let reply = delegate(which, 5, 0);
            let exits = vmcall(call::COUNTED, 0, 0, 0, 0);
            answer(which, reply, time);
            figure(exits_of, exits);
        }
    }
}

/// A call changes RAX and RDX; the bases, and what a function keeps, are as before; nothing of the server's is in what a function may change.
pub(crate) fn registers() {
    let before = [0x1111_1111_1111u64, 0x2222_2222_2222];
    let (mut fs, mut gs) = (before[0], before[1]);
    let mut rest: u64;
    let kept: u64;
    // SAFETY: this program uses neither base; the trampoline is a function.
    unsafe {
        asm!("wrfsbase {}", "wrgsbase {}", in(reg) fs, in(reg) gs);
        asm!(
            "push rbx", "push rbp",
            "mov rbx, 0x33", "mov rbp, 0x44", "mov r12, 0x55", "mov r13, 0x66", "mov r14, 0x77", "mov r15, 0x88",
            "call rax",
            "or rcx, rdi", "or rcx, r8", "or rcx, r9", "or rcx, r10", "or rcx, r11", "or rcx, rsi",
            "add rbx, rbp", "add rbx, r12", "add rbx, r13", "add rbx, r14", "add rbx, r15",
            "mov rax, rbx", "pop rbp", "pop rbx",
            inlateout("rax") abi::GATE => kept, inlateout("rdi") handler::SYSCALL => _, inlateout("rsi") 9u64 => _, out("rdx") _,
            inlateout("rcx") 0u64 => rest, out("r8") _, out("r9") _, out("r10") _, out("r11") _,
            out("r12") _, out("r13") _, out("r14") _, out("r15") _,
        );
        asm!("rdfsbase {}", "rdgsbase {}", out(reg) fs, out(reg) gs);
    }
    figure(Figure::BasesKept, u64::from(fs == before[0] && gs == before[1]));
    figure(
        Figure::RegistersKept,
        u64::from(kept == 0x33 + 0x44 + 0x55 + 0x66 + 0x77 + 0x88),
    );
    figure(Figure::RegistersLeft, rest);
}

/// A handler that takes long, while the APIC's timer interrupts.
pub(crate) fn interrupts() {
    vmcall(call::INTERRUPTS, 20_000, 0, 0, 0);
    let before = syscall(kernel::INTERRUPTS, 0, 0);
    answer(handler::LONG, delegate(handler::LONG, 11, 200_000), 11);
    let during = syscall(kernel::INTERRUPTS, 0, 0) - before;
    figure(Figure::Interrupts, during);
    // Short calls, with an interrupt every few of them: in the trampoline, in the server's program, in its kernel.
    let mut wrong = 0;
    for argument in 0..5_000 {
        if argument % 500 == 0 {
            vmcall(call::INTERRUPTS, 2_000 + argument / 10, 0, 0, 0);
        }
        let right = (argument * 3) ^ abi::KERNEL_MARK;
        wrong += u64::from(delegate(handler::SYSCALL, argument, 0).value != right);
    }
    vmcall(call::INTERRUPTS, 0, 0, 0, 0);
    figure(Figure::WrongUnderInterrupts, wrong);
}

/// Another call of the same link, out of the interrupt that has suspended the first.
pub(crate) fn busy_call() {
    interrupted(None);
}

/// What is done out of the next interrupt: a change of the processor's, or a call.
static mut MEANWHILE: Option<u64> = None;

/// A call that an interrupt suspends, and what the interrupted program does then before it goes on.
pub(crate) fn interrupted(meanwhile: Option<u64>) {
    // SAFETY: one thread; `busy` runs after this.
    unsafe { MEANWHILE = meanwhile };
    syscall(kernel::DIVERT, &raw const diverted as u64, 0);
    vmcall(call::INTERRUPTS, 20_000, 0, 0, 0);
    let reply = delegate(handler::LONG, 12, 200_000);
    vmcall(call::INTERRUPTS, 0, 0, 0, 0);
    answer(handler::LONG, reply, 12);
}

#[unsafe(no_mangle)]
extern "C" fn busy() {
    // SAFETY: as above.
    if let Some(what) = unsafe { MEANWHILE } {
        syscall(kernel::CHANGE, what, 0);
        return;
    }
    let saved = (abi::LINK + 8) as *mut u64;
    // SAFETY: this side's link page; the suspended call's stack pointer is put back.
    unsafe {
        let stack = saved.read_volatile();
        answer(handler::NULL, delegate(handler::NULL, 0, 0), 0);
        saved.write_volatile(stack);
    }
}

/// A kernel that runs another process for a while costs the link one exit when it goes away and one at the next call.
pub(crate) fn process() {
    answer(handler::KEYED, delegate(handler::KEYED, 1, 0), 1);
    vmcall(call::COUNT, 0, 0, 0, 0);
    syscall(kernel::CHANGE, abi::change::PROCESS, 0);
    let reply = delegate(handler::KEYED, 2, 0);
    figure(Figure::ProcessExits, vmcall(call::COUNTED, 0, 0, 0, 0));
    answer(handler::KEYED, reply, 2);
}
