//! What hypervisor, server and clients have agreed on: where the gate is, what its pages hold, and the hypervisor's calls.
//!
//! A link is one client's way into the server. Its pages have one address in both, in a slot of the top-level page table (512 GiB) that
//! neither uses otherwise; the hypervisor makes the slot's tables.

/// A page.
pub const PAGE: u64 = 4096;

/// The slot of the top-level table that has the gate. Above 4 GiB, where no 32-bit code can run.
pub const GATE_SLOT: usize = 5;
/// The trampoline: the same page in both, to read and to execute. Not at the slot's beginning: the instruction behind a VMFUNC that ends the slot
/// below, which is the client's, would be the trampoline's first.
pub const GATE: u64 = ((GATE_SLOT as u64) << 39) + 0x20_0000;
/// The handler table: the same page in both, to read.
pub const TABLE: u64 = GATE + 0x1000;
/// The link page: the client has its own, and the server has its own.
pub const LINK: u64 = GATE + 0x2000;
/// The stack on which a call changes sides: 16 pages of the client's, 16 of the server's; nothing below and above.
pub const STACK: u64 = GATE + 0x1_0000;
/// Pages of it.
pub const STACK_PAGES: u64 = 16;
/// Where it begins.
pub const STACK_TOP: u64 = STACK + STACK_PAGES * PAGE;
/// The shared window: the same pages in both, to read and write.
pub const WINDOW: u64 = GATE + 0x10_0000;
/// Pages of it.
pub const WINDOW_PAGES: u64 = 16;
/// Its bytes.
pub const WINDOW_SIZE: u64 = WINDOW_PAGES * PAGE;

/// The slot of the server's program.
pub const SERVER_SLOT: usize = 3;
/// Addresses of the server's program at which a client puts a page of its own. In the server nothing is there; that this does not matter is
/// what the hypervisor has to see to.
pub const OWN_AT_SERVER: u64 = ((SERVER_SLOT as u64) << 39) + 0x15_5000;
/// The slot of the server's kernel.
pub const SERVER_KERNEL_SLOT: usize = 309;
/// Where the server's kernel is entered by SYSCALL. As bytes of code this address harms nobody who jumps into it: see `link::entry_page`.
pub const SERVER_ENTRY: u64 = 0xffff_9acc_cccc_cccc;
/// The slot of the client's kernel.
pub const CLIENT_KERNEL_SLOT: usize = 511;

/// Heap of the server's program: mapped by its kernel's tables, and without memory until it is touched.
pub const SERVER_HEAP: u64 = ((SERVER_SLOT as u64) << 39) + 0x1000_0000;
/// Pages of it.
pub const SERVER_HEAP_PAGES: u64 = 64;
/// Addresses of the server's program that its kernel maps at the first access.
pub const SERVER_DEMAND: u64 = SERVER_HEAP + SERVER_HEAP_PAGES * PAGE;
/// Pages of them.
pub const SERVER_DEMAND_PAGES: u64 = 16;

/// The server's own state, with which handlers compute: the first page of the heap.
pub const SECRET: u64 = SERVER_HEAP;
/// Words of it.
pub const SECRET_WORDS: usize = 512;
/// What the server's kernel makes of an argument.
pub const KERNEL_MARK: u64 = 0x006b_6572_6e65_6c00;

/// The link page of one side. The trampoline has the offsets as numbers.
#[repr(C)]
pub struct LinkPage {
    /// 1 in the server's, 0 in the client's: where the code behind the one VMFUNC instruction is.
    pub server: u64,
    /// The client's stack pointer during a call.
    pub stack: u64,
    /// Whether a call is being served.
    pub in_call: u64,
    /// Calls begun.
    pub calls: u64,
    /// Handlers in the table.
    pub handlers: u64,
    /// The server's FS base.
    pub fs: u64,
    /// The server's GS base.
    pub gs: u64,
}

/// What a kernel is told when it starts.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Boot {
    /// Where its program begins.
    pub entry: u64,
    /// The program's stack.
    pub stack: u64,
    /// What the program is told.
    pub argument: u64,
    /// All of the guest's memory, for its kernel.
    pub direct: u64,
    /// The guest-physical address at which that begins.
    pub memory: u64,
    /// The guest-physical address of the top-level page table.
    pub root: u64,
}

/// System calls of the client's kernel; but for the first two they are what an attacker's kernel would do for its program.
pub mod kernel {
    /// Ask for the link.
    pub const LINK: u64 = 0;
    /// How many interrupts there were.
    pub const INTERRUPTS: u64 = 1;
    /// Continue there after the next interrupt instead of where it came.
    pub const DIVERT: u64 = 2;
    /// Map a page: address, guest-physical address with the entry's lowest bits.
    pub const MAP: u64 = 3;
    /// Where an address is in physical memory.
    pub const PHYSICAL: u64 = 4;
    /// Where the entry of the lowest page table for an address is in physical memory.
    pub const ENTRY: u64 = 5;
    /// Write to physical memory: where, what.
    pub const WRITE: u64 = 6;
    /// Change something of the processor's that the link depends on: which (`change`).
    pub const CHANGE: u64 = 7;
    /// In ring 0, VMFUNC in a page of the kernel's own whose next instruction is at this address.
    pub const LAND: u64 = 8;
    /// In ring 0, jump to an address with EAX 0 and ECX 1.
    pub const JUMP: u64 = 9;
    /// Continue there after the next exception of the program's.
    pub const RECOVER: u64 = 10;
}

/// What `kernel::CHANGE` changes.
pub mod change {
    /// Another page table, and back: what a switch of processes does.
    pub const PROCESS: u64 = 0;
    /// Another page table, which stays.
    pub const CR3: u64 = 1;
    /// The interrupt descriptor table: to the stack of the link.
    pub const IDT: u64 = 2;
    /// Where SYSCALL enters.
    pub const LSTAR: u64 = 3;
    /// Which flags SYSCALL clears: none.
    pub const FMASK: u64 = 4;
    /// No SMEP and no SMAP.
    pub const CR4: u64 = 5;
    /// A breakpoint at the server's state.
    pub const DEBUG: u64 = 6;
    /// A page of the client's, which begins with VMFUNC, at addresses of the server's program (`OWN_AT_SERVER`).
    pub const SLOT: u64 = 7;
    /// Not that page any more, but for what the processor remembers.
    pub const NO_SLOT: u64 = 9;
    /// IOPL 3 in the program's flags: not by CHANGE, but by UD2 with this in RAX, as the flags are those of the program.
    pub const IOPL: u64 = 8;
}

/// How a call ended.
pub mod status {
    /// The handler has answered.
    pub const OK: u64 = 0;
    /// There is no such handler.
    pub const NO_HANDLER: u64 = 1;
    /// The flags register may not be as it is.
    pub const FLAGS: u64 = 2;
    /// A pointer does not lie in the window.
    pub const POINTER: u64 = 3;
    /// The server has failed under the call.
    pub const FAULT: u64 = 4;
    /// It took longer than is allowed.
    pub const TIME: u64 = 5;
    /// Another call of the link is not done.
    pub const BUSY: u64 = 6;
}

/// Calls to the hypervisor: the number in RAX, arguments in RDI, RSI and RDX, the answer in RAX.
pub mod call {
    /// A client's kernel wants the link; 0 if it has it.
    pub const LINK: u64 = 1;
    /// Begin to count exits.
    pub const COUNT: u64 = 2;
    /// The exits since, but for those of the two calls.
    pub const COUNTED: u64 = 3;
    /// Nothing, for comparison.
    pub const NOTHING: u64 = 4;
    /// The program is done.
    pub const DONE: u64 = 5;
    /// An external interrupt after RDI ticks of the APIC's timer, and then again and again; 0: none any more.
    pub const INTERRUPTS: u64 = 6;
    /// Go on with a call that an interrupt has suspended.
    pub const CONTINUE: u64 = 7;
    /// Print a figure: which one, and its value.
    pub const FIGURE: u64 = 8;
    /// Print what a call has answered: handler, status, value; and the argument in R8.
    pub const ANSWER: u64 = 9;
    /// A kernel has met a fault that it cannot serve: vector, where, and the address.
    pub const FAULT: u64 = 10;
    /// The server's program tells its handlers: where the table is, and how many.
    pub const REGISTER: u64 = 16;
    /// The server is initialised: its processor is not run any more. RDI: where its state is.
    pub const FREEZE: u64 = 17;
    /// The server's kernel was entered although no call is being served.
    pub const NO_CALL: u64 = 18;
}

/// Handlers of the server, by their place in the table.
pub mod handler {
    /// Answers 0.
    pub const NULL: u64 = 0;
    /// What the server's state makes of a number.
    pub const KEYED: u64 = 1;
    /// The sum of some bytes of the window.
    pub const SUM: u64 = 2;
    /// A system call of the server's.
    pub const SYSCALL: u64 = 3;
    /// Writes and reads a page of the server's heap, which has no memory before.
    pub const HEAP: u64 = 4;
    /// Writes and reads a page that the server's kernel maps at that moment.
    pub const DEMAND: u64 = 5;
    /// Reads address 8.
    pub const CRASH: u64 = 6;
    /// Does not return.
    pub const FOREVER: u64 = 7;
    /// What is at the beginnings of FS and GS.
    pub const BASES: u64 = 8;
    /// What KEYED answers, after some time: the argument says how many rounds.
    pub const LONG: u64 = 9;
    /// Calls itself as often as the argument says.
    pub const DEEP: u64 = 10;
    /// Flags that a client could have left: TF, DF, IOPL, NT, AC and ID.
    pub const FLAGS: u64 = 11;
    /// How many there are.
    pub const COUNT: u64 = 12;
}

/// What is at the beginning of the server's FS and GS areas.
pub const FS_MARK: u64 = 0x5e7f_5000_0000_0000;
/// As above.
pub const GS_MARK: u64 = 0x0000_0000_005e_7f65;

/// The answer of KEYED, by the server's state and the argument.
pub fn keyed(secret: &[u64], argument: u64) -> u64 {
    secret.iter().fold(argument, |sum, word| {
        (sum ^ word).rotate_left(7).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    })
}
