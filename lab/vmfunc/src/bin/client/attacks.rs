//! Attacks. Each says what it has got by what it does last: an answer of the server's, a status, or its end by the hypervisor.

use basalt_vmfunc::abi::{self, PAGE, call, change, handler, kernel};
use basalt_vmfunc::cpu::vmcall;
use basalt_vmfunc::scenario::{Figure, Scenario};

use crate::calls;
use crate::{Jump, Reply, answer, delegate, figure, jump, kernel_call, own_syscall, own_vmfunc, recovered, syscall};

/// Where SYSCALL enters this client's kernel (build.rs).
const CLIENT_ENTRY: u64 = 0xffff_ffff_8000_0ccc;

/// Where VMFUNC is in the trampoline, found by its bytes.
fn vmfunc() -> u64 {
    let code = abi::GATE as *const u8;
    // SAFETY: the trampoline is mapped to be read, as whatever is executed is.
    let byte = |at: u64| unsafe { code.add(at as usize).read_volatile() };
    let at = (0..PAGE - 2).find(|at| [byte(*at), byte(at + 1), byte(at + 2)] == [0x0f, 0x01, 0xd4]);
    abi::GATE + at.unwrap_or(0)
}

/// A call whose registers are the caller's affair from the VMFUNC instruction on.
fn bare() -> Jump {
    Jump {
        to: vmfunc(),
        flags: 0x202,
        rcx: 1,
        rdi: handler::KEYED,
        rsi: 99,
        rsp: abi::STACK_TOP,
        rest: u64::MAX / 3,
        ..Jump::default()
    }
}

fn run_jump(wanted: &Jump) -> Reply {
    // SAFETY: comes back by the trampoline, or not at all.
    unsafe { jump(wanted) }
}

/// Runs one.
pub(crate) fn run(attack: Scenario) {
    use Scenario as S;
    match attack {
        S::Crash => failing(handler::CRASH, 0),
        S::Deep => failing(handler::DEEP, 1_000_000),
        S::Forever => failing(handler::FOREVER, 0),
        S::ForeverInterrupted => {
            vmcall(call::INTERRUPTS, 5_000, 0, 0, 0);
            answer(handler::FOREVER, delegate(handler::FOREVER, 0, 0), 0);
            vmcall(call::INTERRUPTS, 0, 0, 0, 0);
        }
        S::Handler => [handler::COUNT, 511, 512, 1 << 32, 1 << 61, u64::MAX]
            .iter()
            .for_each(|number| answer(*number, delegate(*number, 1, 2), 0)),
        S::Pointer => pointers(),
        S::Entry2 => list(0, 2),
        S::Entry3 => list(0, 3),
        S::Entry511 => list(0, 511),
        S::Entry512 => list(0, 512),
        S::Function1 => list(1, 1),
        S::Function64 => list(64, 1),
        S::OwnPage => land(&raw const own_vmfunc as u64),
        S::OwnSyscall => land(&raw const own_syscall as u64),
        S::Middle => middle(),
        S::Stack => [0, 8, abi::SECRET + 2048, abi::WINDOW + 4096, abi::TABLE, !7]
            .iter()
            .for_each(|rsp| answer(handler::KEYED, run_jump(&Jump { rsp: *rsp, ..bare() }), 99)),
        S::Flags => flags(),
        S::Trap => answer(handler::KEYED, run_jump(&Jump { flags: 0x302, ..bare() }), 99),
        S::Bases => bases(),
        S::WriteTable => write(abi::TABLE),
        S::WriteTableMemory => {
            syscall(kernel::WRITE, syscall(kernel::PHYSICAL, abi::TABLE, 0), 0);
        }
        S::BeforeSlots => before_slots(),
        S::WriteGate => {
            syscall(kernel::WRITE, syscall(kernel::PHYSICAL, abi::GATE, 0), 0);
        }
        S::WriteGateTables => {
            syscall(kernel::WRITE, syscall(kernel::ENTRY, abi::GATE, 0), 0);
        }
        S::ReadServer => read(abi::SECRET),
        S::ReadServerMemory => {
            syscall(kernel::MAP, 0x700_0000, 1 << 39 | 7);
            read(0x700_0000);
        }
        S::WriteServerMemory => {
            syscall(kernel::MAP, 0x700_0000, 1 << 39 | 7);
            write(0x700_0000);
        }
        S::ReadLink => leftovers(),
        S::Supervisor => supervisor(),
        S::LandEntry => entry_page(),
        S::LandSyscall => answer(handler::KEYED, land_in_ring_0(CLIENT_ENTRY), 99),
        S::LandKernel => answer(handler::KEYED, land_in_ring_0(abi::SERVER_ENTRY), 99),
        S::LandTables => answer(handler::KEYED, land_in_ring_0(interrupt_table() + 64), 99),
        S::Cr3 => changed(change::CR3),
        S::Idt => changed(change::IDT),
        S::Lstar => changed(change::LSTAR),
        S::Fmask => changed(change::FMASK),
        S::Cr4 => changed(change::CR4),
        S::Debug => changed(change::DEBUG),
        S::Slot => {
            answer(handler::KEYED, delegate(handler::KEYED, 99, 0), 99);
            syscall(kernel::CHANGE, change::SLOT, 0);
            land(abi::OWN_AT_SERVER);
        }
        S::StaleSlot => {
            syscall(kernel::CHANGE, change::SLOT, 0);
            let page = abi::OWN_AT_SERVER;
            // SAFETY: the kernel has put RET there.
            let there: extern "C" fn() = unsafe { core::mem::transmute(page + 3) };
            there();
            syscall(kernel::CHANGE, change::NO_SLOT, 0);
            land(page);
        }
        S::Continue => figure(Figure::ContinueAnswer, vmcall(call::CONTINUE, 0, 0, 0, 0)),
        S::ContinueElsewhere => calls::interrupted(Some(change::CR3)),
        // SAFETY: it is not, if it does anything.
        S::Unlinked => unsafe { core::arch::asm!("vmfunc", in("eax") 0, in("ecx") 1) },
        S::Count | S::Answers | S::Registers | S::Interrupts | S::Busy | S::Process => {}
    }
}

/// The server fails under a call, and serves the next one.
fn failing(which: u64, argument: u64) {
    answer(which, delegate(which, argument, 0), argument);
    answer(handler::KEYED, delegate(handler::KEYED, 99, 0), 99);
}

fn pointers() {
    let (window, size) = (abi::WINDOW, abi::WINDOW_SIZE);
    for (pointer, length) in [
        (abi::SECRET, 8),
        (window - 1, 2),
        (window, size + 1),
        (window + size, 1),
        (window + size - 1, 2),
        (window + 8, u64::MAX - 4),
        (0, 0),
        (u64::MAX, 1),
        (abi::LINK, 8),
        (abi::STACK_TOP - 8, 8),
    ] {
        answer(handler::SUM, delegate(handler::SUM, pointer, length), 0);
    }
}

fn list(function: u64, entry: u64) {
    answer(
        handler::KEYED,
        run_jump(&Jump {
            rax: function,
            rcx: entry,
            ..bare()
        }),
        99,
    );
}

/// VMFUNC at an address of the client's choice.
fn land(to: u64) {
    answer(handler::KEYED, run_jump(&Jump { to, ..bare() }), 99);
}

/// Jumps to every byte of the trampoline, in this side's EPT: most end in an exception of this program's; what the server answers is what
/// it would have answered to a call with these registers, or nothing.
fn middle() {
    let right = delegate(handler::KEYED, 99, 0);
    // A byte of the trampoline that clears RSI makes it a call with 0.
    let of_zero = delegate(handler::KEYED, 0, 0).value;
    let (mut answers, mut others) = (0, 0);
    for to in abi::GATE..abi::GATE + PAGE {
        for rdi in [handler::KEYED, abi::SECRET] {
            syscall(kernel::RECOVER, &raw const recovered as u64, 0);
            let reply = run_jump(&Jump {
                to,
                rdi,
                rest: abi::SECRET,
                r8: abi::SECRET,
                rdx: abi::SECRET,
                ..bare()
            });
            answers += u64::from(reply == right);
            others += u64::from(
                reply.status == abi::status::OK && ![right.value, of_zero, abi::SECRET, 0].contains(&reply.value),
            );
        }
    }
    figure(Figure::MiddleAnswers, answers);
    figure(Figure::MiddleOthers, others);
    syscall(kernel::RECOVER, 0, 0);
    answer(handler::KEYED, delegate(handler::KEYED, 99, 0), 99);
}

/// A page of this program's.
#[repr(align(4096))]
struct Page([u8; PAGE as usize]);

static mut OWN_PAGE: Page = Page([0xf4; PAGE as usize]);

fn ending_with_vmfunc() -> [u8; PAGE as usize] {
    let mut page = [0xf4; PAGE as usize];
    page[PAGE as usize - 3..].copy_from_slice(&[0x0f, 0x01, 0xd4]);
    page
}

/// VMFUNC at the end of what is this client's, before each range that is the server's: in user mode, with the server's state as stack, and in
/// ring 0 before the server's kernel.
fn before_slots() {
    let own = &raw mut OWN_PAGE;
    // SAFETY: this program's page, which nothing else uses.
    unsafe { (*own).0 = ending_with_vmfunc() };
    let page = syscall(kernel::PHYSICAL, own as u64, 0);
    for slot in [abi::GATE_SLOT as u64, abi::SERVER_SLOT as u64] {
        syscall(kernel::MAP, (slot << 39) - PAGE, page | 7);
        let to = (slot << 39) - 3;
        let rsp = abi::SECRET + 2048;
        answer(handler::KEYED, run_jump(&Jump { to, rsp, ..bare() }), 99);
    }
    // Addresses of a kernel have all high bits set.
    let next = (abi::SERVER_KERNEL_SLOT as u64) << 39 | 0xffff << 48;
    answer(handler::KEYED, land_in_ring_0(next), 99);
}

fn flags() {
    // AC, DF, NT, ID, and all at once.
    let each = [
        1 << 18,
        1 << 10,
        1 << 14,
        1 << 21,
        1 << 18 | 1 << 10 | 1 << 14 | 1 << 21,
    ];
    let wanted = Jump {
        rdi: handler::FLAGS,
        ..bare()
    };
    for set in each {
        answer(
            handler::FLAGS,
            run_jump(&Jump {
                flags: 0x202 | set,
                ..wanted
            }),
            0,
        );
    }
    // SAFETY: the kernel goes on behind it, with IOPL 3.
    unsafe { core::arch::asm!("ud2", in("rax") change::IOPL) };
    answer(handler::FLAGS, run_jump(&wanted), 0);
}

fn bases() {
    for base in [0, abi::SECRET, abi::LINK, 0xffff_8000_0000_0000] {
        let wanted = Jump {
            fs: base,
            gs: base,
            rdi: handler::BASES,
            ..bare()
        };
        answer(handler::BASES, run_jump(&wanted), 0);
    }
}

fn write(address: u64) {
    // SAFETY: it is not; that is the attack.
    unsafe { (address as *mut u64).write_volatile(abi::SECRET) };
}

fn read(address: u64) {
    // SAFETY: it is not; that is the attack.
    figure(Figure::Read, unsafe { (address as *const u64).read_volatile() });
}

/// Words that are not zero in what the client can read after calls, but for what it has put there itself.
fn leftovers() {
    answer(handler::KEYED, delegate(handler::KEYED, 99, 0), 99);
    answer(handler::BASES, delegate(handler::BASES, 0, 0), 0);
    let words = |start: u64, bytes: u64| {
        // SAFETY: pages of the link's, mapped for this program.
        (start..start + bytes)
            .step_by(8)
            .filter(|at| unsafe { (*at as *const u64).read_volatile() } != 0)
            .count() as u64
    };
    figure(
        Figure::LeftOver,
        words(abi::STACK, abi::STACK_PAGES * PAGE) + words(abi::WINDOW, abi::WINDOW_SIZE),
    );
    figure(Figure::LeftOwn, words(abi::LINK, PAGE));
}

/// A call of the kernel that ends by the hypervisor's way back into this program, if it ends.
fn in_ring_0(number: u64, argument: u64) -> Reply {
    run_jump(&Jump {
        to: &raw const kernel_call as u64,
        rax: number,
        rdi: argument,
        ..bare()
    })
}

/// The page of the trampoline, mapped for the kernel at another address, run in ring 0.
fn supervisor() {
    let (at, page) = (0xffff_ffff_c000_0000u64, syscall(kernel::PHYSICAL, abi::GATE, 0));
    syscall(kernel::MAP, at, page);
    answer(
        handler::KEYED,
        in_ring_0(kernel::JUMP, at + (vmfunc() & (PAGE - 1))),
        99,
    );
}

/// In ring 0, VMFUNC before each byte of the page in which SYSCALL enters, but for the first three, before which it would be in two pages.
fn entry_page() {
    let page = CLIENT_ENTRY & !(PAGE - 1);
    let mut failed = 0;
    for next in page + 3..page + PAGE {
        failed += u64::from(land_in_ring_0(next).status == abi::status::FAULT);
    }
    figure(Figure::EntryFaults, failed);
    answer(handler::KEYED, delegate(handler::KEYED, 99, 0), 99);
}

/// Where this side's interrupt descriptors are. Without a link that is open nobody notices that it is asked.
fn interrupt_table() -> u64 {
    let mut pointer = [0u8; 10];
    // SAFETY: stores ten bytes.
    unsafe { core::arch::asm!("sidt [{}]", in(reg) &mut pointer) };
    pointer[2..]
        .iter()
        .rev()
        .fold(0, |base, byte| base << 8 | u64::from(*byte))
}

fn land_in_ring_0(next: u64) -> Reply {
    let reply = in_ring_0(kernel::LAND, next);
    // SAFETY: the kernel puts its page back, and goes on behind it.
    unsafe { core::arch::asm!("ud2", in("rax") 0) };
    reply
}

/// The link, after something that it depends on has changed.
fn changed(what: u64) {
    answer(handler::KEYED, delegate(handler::KEYED, 99, 0), 99);
    syscall(kernel::CHANGE, what, 0);
    answer(handler::KEYED, delegate(handler::KEYED, 99, 0), 99);
}
