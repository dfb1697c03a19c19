//! A hypervisor for one test: a server that is frozen after its start, and clients that run it by VMFUNC without leaving guest mode.
//!
//! It runs on the bare processor that Bochs emulates, one guest at a time, and prints what happens on the emulator's debug port. It judges
//! nothing: what has to happen is in xtask/src/steps/vmfunc.rs.

#![no_std]
#![no_main]

mod apic;
mod ept;
mod gate;
mod guest;
mod link;
mod memory;
mod run;
mod vmcs;

use core::arch::global_asm;
use core::fmt::{self, Write};

use basalt_vmfunc::abi;
use basalt_vmfunc::cpu::out;
use basalt_vmfunc::scenario::ALL;

use guest::{Layout, Space};
use link::Server;
use memory::{Life, page, write};
use run::{End, Guest};

const SERVER_KERNEL: &[u8] = include_bytes!(concat!(env!("VMFUNC_GUESTS"), "/server_kernel"));
const SERVER: &[u8] = include_bytes!(concat!(env!("VMFUNC_GUESTS"), "/server"));
const CLIENT_KERNEL: &[u8] = include_bytes!(concat!(env!("VMFUNC_GUESTS"), "/client_kernel"));
const CLIENT: &[u8] = include_bytes!(concat!(env!("VMFUNC_GUESTS"), "/client"));

/// Above all that a client's CR3 can be.
const SERVER_LAYOUT: Layout = Layout {
    life: Life::Machine,
    memory: 1 << 39,
    bytes: 4 << 20,
    behind: 0,
    direct: 0xffff_9a80_0000_0000,
    stack: ((abi::SERVER_SLOT as u64) << 39) + 0x800_0000,
};
const CLIENT_LAYOUT: Layout = Layout {
    life: Life::Client,
    memory: 0,
    bytes: 4 << 20,
    behind: 1 << 20,
    direct: 0xffff_ff80_0000_0000,
    stack: 0x7fff_0000_0000,
};

/// Where the server's state comes from.
const SEED: u64 = 0x0be5_a175_ecef_0001;

global_asm!(
    r#"
    .section .text.first, "ax"
    .globl _start
_start:
    lea rsp, [rip + own_stack]
    call hypervisor
    ud2
    .bss
    .balign 16
    .skip 65536
own_stack:
"#
);

/// The emulator's debug port.
struct Port;

impl Write for Port {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.bytes().for_each(|byte| out(0xe9, byte));
        Ok(())
    }
}

/// Prints a line.
macro_rules! say {
    ($($words:tt)*) => { $crate::print(format_args!($($words)*)) };
}
pub(crate) use say;

pub(crate) fn print(words: fmt::Arguments) {
    let _ = writeln!(Port, "vmfunc:{words}");
}

#[unsafe(no_mangle)]
extern "C" fn hypervisor() -> ! {
    vmcs::on();
    apic::init();
    say!("vmfuncs {} first {}", gate::vmfuncs().0, gate::vmfuncs().1);
    let mut server = start_server();
    let entries = vmcs::entries(vmcs::SERVER);
    let before = sum_of(&mut server.space);
    for (number, (_, name)) in (0u64..).zip(ALL) {
        say!("scenario {name}");
        run_client(&server, number);
        say!(
            "  server {}",
            if sum_of(&mut server.space) == before {
                "unchanged"
            } else {
                "CHANGED"
            }
        );
        memory::client_ends();
    }
    say!("scenario end");
    let more = vmcs::entries(vmcs::SERVER) - entries;
    say!("  figure entries of the server's virtual processor since it was frozen: {more}");
    say!(
        "  figure entries of clients' virtual processors: {}",
        vmcs::entries(vmcs::CLIENT)
    );
    power_off()
}

fn start_server() -> Server {
    let (mut space, start) = guest::make(&SERVER_LAYOUT, SERVER_KERNEL, SERVER, SEED);
    for at in 0..abi::SERVER_HEAP_PAGES {
        let page = space.take();
        space.map(abi::SERVER_HEAP + at * abi::PAGE, page, 2 | 4 | 1 << 63);
    }
    vmcs::make(space.ept, &start, 0, link::msr_bitmap(false), vmcs::SERVER);
    let mut server = Guest::new(space, start.boot, 0, 0, None);
    match server.run() {
        End::Frozen => {}
        _ => panic!("the server ended before it was frozen"),
    }
    let (handlers, count) = server.registered;
    let server = Server::freeze(server.space, handlers, count);
    say!("server frozen, {count} handlers");
    memory::client_ends();
    server
}

fn run_client(server: &Server, number: u64) {
    let (space, start) = guest::make(&CLIENT_LAYOUT, CLIENT_KERNEL, CLIENT, number);
    let list = page(Life::Client);
    write(list, space.ept.pointer());
    let msr_bitmap = link::msr_bitmap(false);
    vmcs::make(space.ept, &start, list, msr_bitmap, vmcs::CLIENT);
    vmcs::forget();
    let mut client = Guest::new(space, start.boot, list, msr_bitmap, Some(server));
    let end = client.run();
    apic::every(0);
    if client.suspensions != [0; 2] {
        say!("  figure interrupts in the server's program: {}", client.suspensions[0]);
        say!("  figure interrupts in the server's kernel: {}", client.suspensions[1]);
    }
    match end {
        End::Done(value) => say!("  end done {value}, {} events", client.events),
        _ => say!("  end by the hypervisor, {} events", client.events),
    }
}

/// A sum over what no call changes: the server's state, and its program and kernel as they were loaded.
fn sum_of(space: &mut Space) -> u64 {
    let code = [abi::SERVER_ENTRY, ((abi::SERVER_SLOT as u64) << 39) + 0x1000];
    let state = space.physical(abi::SECRET).expect("the server has its state");
    let mut sum = words(state);
    for start in code {
        let mut address = start & !(abi::PAGE - 1);
        while let Some(physical) = space.physical(address) {
            // Behind code come data, which are not executable.
            if space.is_data(address) {
                break;
            }
            sum = sum.rotate_left(1) ^ words(physical);
            address += abi::PAGE;
        }
    }
    sum
}

fn words(physical: u64) -> u64 {
    (0..abi::PAGE).step_by(8).fold(0, |sum: u64, at| {
        sum.rotate_left(5).wrapping_add(memory::read(physical + at))
    })
}

/// Bochs ends when it reads this at this port.
fn power_off() -> ! {
    loop {
        b"Shutdown".iter().for_each(|byte| out(0x8900, *byte));
    }
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo) -> ! {
    say!("panic: {info}");
    power_off()
}
