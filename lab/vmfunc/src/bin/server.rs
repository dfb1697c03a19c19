//! The server's program: makes its state, tells the hypervisor its handlers and is frozen. From then on only clients run it, through the
//! trampoline, on the stack of their link.
//!
//! A handler trusts its arguments as little as it would a stranger's on a network: a client chooses them.

#![no_std]
#![no_main]

use core::arch::{asm, global_asm};
use core::hint::black_box;

use basalt_vmfunc::abi::{self, PAGE, handler, status};
use basalt_vmfunc::cpu::vmcall;

/// What a handler answers, in RAX and RDX.
#[repr(C)]
struct Reply {
    status: u64,
    value: u64,
}

type Handler = extern "C" fn(u64, u64, u64) -> Reply;

static mut FS_AREA: [u64; 8] = [abi::FS_MARK; 8];
static mut GS_AREA: [u64; 8] = [abi::GS_MARK; 8];

global_asm!(
    r#"
    .section .text.first, "ax"
    .globl _start
_start:
    call server
    ud2
"#
);

#[unsafe(no_mangle)]
extern "C" fn server(seed: u64) -> ! {
    // SAFETY: the heap's first page is this program's, and has these words; the areas live as long as the program.
    unsafe {
        let mut word = seed | 1;
        for at in 0..abi::SECRET_WORDS {
            word = word
                .wrapping_mul(0x5851_f42d_4c95_7f2d)
                .wrapping_add(0x1405_7b7e_f767_814f);
            (abi::SECRET as *mut u64).add(at).write_volatile(word);
        }
        asm!("wrfsbase {}", in(reg) &raw const FS_AREA);
        asm!("wrgsbase {}", in(reg) &raw const GS_AREA);
    }
    let handlers: [Handler; handler::COUNT as usize] = [
        null, keyed, sum, system, heap, demand, crash, forever, bases, long, deep, flags,
    ];
    vmcall(abi::call::REGISTER, handlers.as_ptr() as u64, handler::COUNT, 0, 0);
    syscall(0, 0);
    vmcall(abi::call::FREEZE, 0, 0, 0, 0);
    panic!("a frozen server ran")
}

fn ok(value: u64) -> Reply {
    Reply {
        status: status::OK,
        value,
    }
}

fn syscall(number: u64, argument: u64) -> u64 {
    let answer;
    // SAFETY: the kernel changes what SYSCALL does, and clears what else it may.
    unsafe {
        asm!("syscall", inlateout("rax") number => answer, inlateout("rdi") argument => _, out("rsi") _, out("rdx") _,
            out("rcx") _, out("r8") _, out("r9") _, out("r10") _, out("r11") _, options(nostack));
    }
    answer
}

fn secret() -> &'static [u64] {
    // SAFETY: written at the start, never changed since.
    unsafe { core::slice::from_raw_parts(abi::SECRET as *const u64, abi::SECRET_WORDS) }
}

extern "C" fn null(_: u64, _: u64, _: u64) -> Reply {
    ok(0)
}

extern "C" fn keyed(argument: u64, _: u64, _: u64) -> Reply {
    ok(abi::keyed(secret(), argument))
}

/// The range is compared with the window before anything is read, without a sum that could wrap; what is read may change meanwhile, so each
/// byte is read once.
extern "C" fn sum(pointer: u64, length: u64, _: u64) -> Reply {
    let offset = pointer.wrapping_sub(abi::WINDOW);
    if offset > abi::WINDOW_SIZE || length > abi::WINDOW_SIZE - offset {
        return Reply {
            status: status::POINTER,
            value: 0,
        };
    }
    // SAFETY: the bytes lie in the window, which is mapped as long as a call runs.
    let byte = |at| u64::from(unsafe { (pointer as *const u8).add(at as usize).read_volatile() });
    ok((0..length).map(byte).sum())
}

extern "C" fn system(argument: u64, _: u64, _: u64) -> Reply {
    ok(syscall(1, argument))
}

fn touch(start: u64, pages: u64, page: u64) -> Reply {
    if page >= pages {
        return Reply {
            status: status::POINTER,
            value: 0,
        };
    }
    let at = (start + page * PAGE) as *mut u64;
    // SAFETY: a page of this program's alone.
    unsafe {
        at.write_volatile(at.read_volatile() + 1);
        ok(at.read_volatile())
    }
}

/// Not the first page, which is the state.
extern "C" fn heap(page: u64, _: u64, _: u64) -> Reply {
    touch(abi::SERVER_HEAP + PAGE, abi::SERVER_HEAP_PAGES - 1, page)
}

extern "C" fn demand(page: u64, _: u64, _: u64) -> Reply {
    touch(abi::SERVER_DEMAND, abi::SERVER_DEMAND_PAGES, page)
}

extern "C" fn crash(_: u64, _: u64, _: u64) -> Reply {
    let value;
    // SAFETY: it is not: nothing is mapped there. That is what this handler is for.
    unsafe { asm!("mov {}, [8]", out(reg) value) };
    ok(value)
}

extern "C" fn forever(_: u64, _: u64, _: u64) -> Reply {
    loop {
        core::hint::spin_loop();
    }
}

extern "C" fn bases(_: u64, _: u64, _: u64) -> Reply {
    let (fs, gs): (u64, u64);
    // SAFETY: the bases are of areas of this program's.
    unsafe { asm!("mov {}, fs:[0]", "mov {}, gs:[0]", out(reg) fs, out(reg) gs) };
    ok(fs ^ gs)
}

extern "C" fn long(argument: u64, rounds: u64, _: u64) -> Reply {
    for round in 0..rounds.min(1 << 32) {
        black_box(round);
    }
    keyed(argument, 0, 0)
}

extern "C" fn flags(_: u64, _: u64, _: u64) -> Reply {
    let flags: u64;
    // SAFETY: a copy of the flags, on this stack.
    unsafe { asm!("pushfq", "pop {}", out(reg) flags) };
    ok(flags & (1 << 8 | 1 << 10 | 3 << 12 | 1 << 14 | 1 << 18 | 1 << 21))
}

extern "C" fn deep(depth: u64, _: u64, _: u64) -> Reply {
    let frame = black_box([depth; 64]);
    if depth == 0 {
        return ok(frame[0]);
    }
    let below = deep(depth - 1, 0, 0);
    ok(black_box(below.value).wrapping_add(frame[1]))
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    loop {
        vmcall(abi::call::FAULT, u64::MAX, 0, 0, 0);
    }
}
