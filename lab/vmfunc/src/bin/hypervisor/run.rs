//! Runs guests and serves their exits.
//!
//! An exit belongs to the server when the processor is in the server's view: a call of the client's is being served, or somebody has
//! jumped there. What the server lacks is given to the server, and what goes wrong ends the call, not the client.

use basalt_vmfunc::abi::{self, call, handler, status};
use basalt_vmfunc::arch::TIMER as VECTOR;
use basalt_vmfunc::scenario::FIGURES;

use crate::apic;
use crate::ept::RWX;
use crate::gate;
use crate::guest::Space;
use crate::link::{Link, Server};
use crate::memory::{page, read, write};
use crate::say;
use crate::vmcs::{self, Registers, enter, field, get, primary, set};

/// Ticks of the preemption timer. A call that is still being served when it has expired twice is ended.
const BUDGET: u64 = 4_000_000;
/// A scenario prints so many of its events.
const EVENTS: u64 = 12;

/// Why a guest is not run any more.
pub(crate) enum End {
    /// It is done.
    Done(u64),
    /// The server is initialised.
    Frozen,
    /// It has done something that ends it.
    Ended,
}

/// What a call in the server had in its registers when an interrupt came.
struct Suspended {
    registers: Registers,
    fields: [u64; 9],
}

/// Fields that a suspended call has.
const SUSPENDED: [u64; 9] = [
    field::RIP,
    field::RSP,
    field::RFLAGS,
    field::CS,
    field::CS_RIGHTS,
    field::SS,
    field::SS_RIGHTS,
    field::FS_BASE,
    field::GS_BASE,
];

/// A guest and its virtual processor, which is the current one.
pub(crate) struct Guest<'a> {
    pub(crate) space: Space,
    pub(crate) registers: Registers,
    pub(crate) list: u64,
    pub(crate) msr_bitmap: u64,
    /// None while the server itself is run.
    pub(crate) server: Option<&'a Server>,
    pub(crate) link: Option<Link>,
    /// What the server's program has registered.
    pub(crate) registered: (u64, u64),
    pub(crate) events: u64,
    pub(crate) started: bool,
    suspended: Option<Suspended>,
    interrupt: bool,
    /// Interrupts that came in the server's program or the trampoline, and in its kernel.
    pub(crate) suspensions: [u64; 2],
    exits: u64,
    counted_from: u64,
    /// The call that was being served when the timer last expired.
    seen: Option<u64>,
    end: Option<End>,
}

impl<'a> Guest<'a> {
    pub(crate) fn new(space: Space, boot: u64, list: u64, msr_bitmap: u64, server: Option<&'a Server>) -> Self {
        Self {
            space,
            registers: Registers {
                rdi: boot,
                ..Registers::default()
            },
            list,
            msr_bitmap,
            server,
            link: None,
            registered: (0, 0),
            events: 0,
            started: false,
            suspended: None,
            interrupt: false,
            suspensions: [0; 2],
            exits: 0,
            counted_from: 0,
            seen: None,
            end: None,
        }
    }

    /// Runs it until it ends.
    pub(crate) fn run(&mut self) -> End {
        set(field::TIMER, BUDGET);
        loop {
            enter(&mut self.registers, self.started);
            self.started = true;
            self.exits += 1;
            self.serve();
            self.deliver();
            if let Some(end) = self.end.take() {
                return end;
            }
        }
    }

    fn in_server(&self) -> bool {
        self.link.as_ref().is_some_and(Link::in_server)
    }

    fn serve(&mut self) {
        match get(field::REASON) {
            1 => {
                assert!(
                    get(field::EXIT_EVENT) & 0xff == VECTOR,
                    "an interrupt that nobody wanted"
                );
                apic::done();
                self.interrupt = true;
            }
            2 => self.wrong("exit 2, triple fault"),
            7 => vmcs::flip(field::PRIMARY, primary::INTERRUPT_WINDOW, false),
            18 => self.call(),
            28 => self.closes("exit 28, control register"),
            29 => self.closes("exit 29, debug register"),
            31 => self.wrong("exit 31, MSR"),
            32 => self.closes("exit 32, MSR"),
            46 => self.closes("exit 46, GDTR or IDTR"),
            47 => self.closes("exit 47, LDTR or TR"),
            48 => self.violation(),
            52 => self.expired(),
            59 => self.vmfunc(),
            reason => {
                say!("  unexpected exit {reason} at {:#x}", get(field::RIP));
                self.end = Some(End::Ended);
            }
        }
    }

    /// Prints what has happened, if not too much has.
    fn event(&mut self, what: core::fmt::Arguments) {
        self.events += 1;
        if self.events <= EVENTS {
            let side = if self.in_server() { "server" } else { "client" };
            say!("  event {side}: {what}");
        }
    }

    fn advance(&self) {
        set(field::RIP, get(field::RIP) + get(field::INSTRUCTION_LENGTH));
    }

    /// Something that ends whoever has done it: a call in the server's view, else the client.
    fn wrong(&mut self, what: &str) {
        self.event(format_args!("{what}"));
        if self.in_server() {
            self.abort(status::FAULT);
        } else {
            self.end = Some(End::Ended);
        }
    }

    /// The client is about to change what an open link depends on.
    fn closes(&mut self, what: &str) {
        let open = self.link.as_ref().is_some_and(|link| link.open);
        if self.in_server() || !open {
            return self.wrong(what);
        }
        self.event(format_args!("{what}: link closed"));
        if let Some(link) = &mut self.link {
            link.close(&self.space);
        }
    }

    /// Back to the client, with an answer of the hypervisor's own. The server's memory is as the call has left it.
    fn abort(&mut self, status: u64) {
        let Some(link) = &self.link else { return };
        write(link.page + 16, 0);
        self.seen = None;
        self.enter_client(gate::back());
        self.registers = Registers {
            rsi: status,
            ..Registers::default()
        };
    }

    /// The client's program, in its own EPT, at a place of the trampoline.
    fn enter_client(&self, rip: u64) {
        set(field::EPT_POINTER, self.space.ept.pointer());
        vmcs::set_user_segments();
        for (field, value) in [
            (field::RIP, rip),
            (field::RSP, abi::STACK_TOP),
            (field::RFLAGS, 0x202),
            (field::FS_BASE, 0),
            (field::GS_BASE, 0),
            (field::ENTRY_EVENT, 0),
            (field::INTERRUPTIBILITY, 0),
            (field::PENDING_DEBUG, 0),
        ] {
            set(field, value);
        }
    }

    /// EPT violation: memory that is not there yet, or what the guest must not do.
    fn violation(&mut self) {
        let (guest, qualification) = (get(field::GUEST_PHYSICAL), get(field::QUALIFICATION));
        let in_server = self.in_server();
        let served = match (in_server, self.server) {
            (true, Some(server)) => back(&server.space, guest),
            _ => back(&self.space, guest),
        };
        // The event that was being delivered is delivered again.
        let vectoring = get(field::VECTORING);
        if served {
            if vectoring >> 31 != 0 {
                set(field::ENTRY_EVENT, vectoring & !(1 << 12));
                set(field::ENTRY_ERROR, get(field::VECTORING_ERROR));
                set(field::ENTRY_LENGTH, get(field::INSTRUCTION_LENGTH));
            }
            if in_server {
                self.event(format_args!("exit 48, EPT violation served"));
            }
            return;
        }
        let of_root = self.link.as_ref().is_some_and(|link| link.open) && guest & !0xfff == get(field::CR3);
        let kind = ["read", "write", "fetch"][(qualification & 7).trailing_zeros().min(2) as usize];
        if !in_server && of_root && kind == "write" {
            return self.closes("exit 48, write to the top-level page table");
        }
        let what = match guest {
            guest if guest >= 1 << 39 => "the server's memory",
            guest if guest >= self.space.end => "the link's pages",
            _ => "memory",
        };
        self.event(format_args!("exit 48, EPT violation, {kind} of {what}"));
        if in_server {
            self.abort(status::FAULT);
        } else {
            self.end = Some(End::Ended);
        }
    }

    /// The preemption timer. It runs on through exits, so no number of them makes a call's time longer.
    fn expired(&mut self) {
        set(field::TIMER, BUDGET);
        let now = match &self.link {
            Some(link) if link.in_server() => Some(read(link.page + 24)),
            _ => None,
        };
        if now.is_some() && now == self.seen {
            self.event(format_args!("exit 52, preemption timer: the call has used up its time"));
            return self.abort(status::TIME);
        }
        self.seen = now;
    }

    /// VMFUNC that the processor has not done: the link is closed, or there is no such entry or function.
    fn vmfunc(&mut self) {
        let (function, entry) = (self.registers.rax & 0xffff_ffff, self.registers.rcx & 0xffff_ffff);
        let in_server = self.in_server();
        if function == 0 && entry == 1 && !in_server {
            if self.suspended.is_some() {
                self.event(format_args!("exit 59, another call is suspended"));
                return self.abort(status::BUSY);
            }
            if let Some(link) = self.link.as_mut().filter(|link| !link.open) {
                match link.open(&self.space) {
                    Ok(()) => return self.event(format_args!("exit 59, link opened")),
                    Err(why) => self.event(format_args!("exit 59, link not opened: {why}")),
                }
                self.end = Some(End::Ended);
                return;
            }
        }
        self.event(format_args!(
            "exit 59, VMFUNC function {function} entry {entry} refused"
        ));
        if in_server {
            return self.abort(status::FAULT);
        }
        self.end = Some(End::Ended);
    }

    /// Gives the client its interrupt as soon as it can take it; out of a call at once.
    fn deliver(&mut self) {
        if !self.interrupt || self.end.is_some() {
            return;
        }
        let in_server = self.in_server();
        let takes = get(field::RFLAGS) & 0x200 != 0 && get(field::INTERRUPTIBILITY) & 3 == 0;
        // An event that is being delivered comes first.
        if get(field::ENTRY_EVENT) >> 31 != 0 || !(in_server || takes) {
            vmcs::flip(field::PRIMARY, primary::INTERRUPT_WINDOW, true);
            return;
        }
        if in_server {
            self.suspend();
        }
        self.interrupt = false;
        set(field::ENTRY_EVENT, 1 << 31 | VECTOR);
    }

    fn suspend(&mut self) {
        self.suspended = Some(Suspended {
            registers: self.registers,
            fields: SUSPENDED.map(get),
        });
        self.suspensions[usize::from(get(field::CS) & 3 == 0)] += 1;
        self.registers = Registers::default();
        self.enter_client(gate::resume());
        if let Some(link) = &mut self.link {
            link.close(&self.space);
        }
    }

    /// The client wants to go on with its call.
    fn resume(&mut self) {
        let (Some(link), Some(suspended)) = (&mut self.link, self.suspended.take()) else {
            self.advance();
            self.registers.rax = status::FAULT;
            return;
        };
        if let Err(why) = link.open(&self.space) {
            self.event(format_args!("a suspended call not resumed: {why}"));
            self.end = Some(End::Ended);
            return;
        }
        set(field::EPT_POINTER, link.view.pointer());
        self.registers = suspended.registers;
        for (field, value) in SUSPENDED.into_iter().zip(suspended.fields) {
            set(field, value);
        }
        set(field::INTERRUPTIBILITY, 0);
    }

    fn call(&mut self) {
        let Registers { rax, rdi, rsi, rdx, .. } = self.registers;
        match rax {
            call::CONTINUE if !self.in_server() => return self.resume(),
            call::NO_CALL if self.in_server() => {
                return self.wrong("the server's kernel was entered although no call is being served");
            }
            call::FAULT => {
                let (vector, cpl) = (rdi, self.registers.r8 & 3);
                self.event(format_args!("exception {vector} in ring {cpl}"));
                if self.in_server() {
                    return self.abort(status::FAULT);
                }
                self.end = Some(End::Ended);
                return;
            }
            // The server's own calls are over when it is frozen, and no client's may look like one.
            _ if self.in_server() => return self.wrong("a call that only clients have"),
            _ => {}
        }
        self.advance();
        self.registers.rax = match (rax, self.server) {
            (call::REGISTER, None) => {
                self.registered = (rdi, rsi);
                0
            }
            (call::FREEZE, None) => {
                self.end = Some(End::Frozen);
                0
            }
            (call::LINK, Some(server)) => self.make_link(server),
            (call::COUNT, _) => {
                // What the timer has left of its time must not end within the measurement.
                set(field::TIMER, BUDGET * 4);
                self.counted_from = self.exits;
                0
            }
            (call::COUNTED, _) => self.exits - self.counted_from - 1,
            (call::NOTHING, _) => 0,
            (call::DONE, _) => {
                self.end = Some(End::Done(rdi));
                0
            }
            (call::INTERRUPTS, _) => {
                apic::every(rdi);
                0
            }
            (call::FIGURE, _) => {
                say!("  figure {}: {rsi}", FIGURES.get(rdi as usize).unwrap_or(&"unknown"));
                0
            }
            (call::ANSWER, Some(server)) => {
                answered(server, rdi, rsi, rdx, self.registers.r8);
                0
            }
            _ => u64::MAX,
        };
    }

    fn make_link(&mut self, server: &Server) -> u64 {
        if self.link.is_some() {
            return u64::MAX;
        }
        match Link::make(&mut self.space, server, self.list, self.msr_bitmap) {
            Ok(link) => {
                self.link = Some(link);
                vmcs::forget();
                0
            }
            Err(why) => {
                self.event(format_args!("no link: {why}"));
                u64::MAX
            }
        }
    }
}

/// Puts memory behind a page that has none, if it is memory of this guest's.
fn back(space: &Space, guest: u64) -> bool {
    let there = (space.start..space.end).contains(&guest) && space.ept.get(guest).is_none();
    if there {
        space.ept.map(guest & !0xfff, page(space.ept.life), RWX);
    }
    there
}

/// Compares an answer with what the server's state, read here, makes of the argument; for some the argument is the answer.
fn answered(server: &Server, which: u64, status: u64, value: u64, argument: u64) {
    let right = match which {
        _ if status != status::OK => 0,
        handler::KEYED | handler::LONG => {
            let physical = server.space.physical(abi::SECRET).expect("the server has its state");
            let mut secret = [0; abi::SECRET_WORDS];
            for (at, word) in (0u64..).zip(&mut secret) {
                *word = read(physical + at * 8);
            }
            abi::keyed(&secret, argument)
        }
        handler::SYSCALL => argument.wrapping_mul(3) ^ abi::KERNEL_MARK,
        handler::BASES => abi::FS_MARK ^ abi::GS_MARK,
        handler::DEEP => argument.wrapping_mul(argument.wrapping_add(1)) / 2,
        handler::NULL | handler::CRASH | handler::FOREVER | handler::FLAGS => 0,
        _ => argument,
    };
    let status = ["ok", "no-handler", "flags", "pointer", "fault", "time", "busy"]
        .get(status as usize)
        .unwrap_or(&"unknown");
    let name = [
        "null", "keyed", "sum", "syscall", "heap", "demand", "crash", "forever", "bases", "long", "deep", "flags",
    ]
    .get(which as usize)
    .unwrap_or(&"none");
    say!(
        "  answer {name} {status} {}",
        if value == right { "right" } else { "wrong" }
    );
}
