//! What clients do: each scenario is a client of its own, whose program is told the number. How each has to end is in
//! xtask/src/steps/vmfunc.rs.

macro_rules! scenarios {
    ($($name:ident $text:literal $does:literal,)*) => {
        /// One client's doings.
        #[derive(Clone, Copy, PartialEq, Eq)]
        #[repr(u64)]
        pub enum Scenario { $(#[doc = $does] $name,)* }

        /// All, in the order in which they are run, with what they are called.
        pub const ALL: &[(Scenario, &str)] = &[$((Scenario::$name, $text),)*];
    };
}

scenarios! {
    Count "count" "10 000 calls and 10 000 VMCALLs, with their exits and ticks.",
    Answers "answers" "Every handler once or more, with its answers.",
    Registers "registers" "What a call leaves in the client's registers.",
    Interrupts "interrupts" "Interrupts while a handler runs.",
    Busy "busy" "A call while an interrupt has suspended another.",
    Process "process" "A switch of processes between two calls.",
    Crash "handler-crashes" "A handler that reads where nothing is.",
    Deep "handler-overflows-stack" "A handler that calls itself until its stack ends.",
    Forever "handler-never-returns" "A handler that does not return.",
    ForeverInterrupted "handler-never-returns-under-interrupts" "The same, with an interrupt every few thousand ticks.",
    Handler "handler-out-of-table" "Numbers of handlers that do not exist.",
    Pointer "pointer-out-of-window" "Ranges that are not, or not wholly, in the window.",
    Entry2 "list-entry-2" "VMFUNC with entry 2 of the list.",
    Entry3 "list-entry-3" "VMFUNC with entry 3.",
    Entry511 "list-entry-511" "VMFUNC with entry 511.",
    Entry512 "list-entry-512" "VMFUNC with entry 512, which no list has.",
    Function1 "function-1" "VMFUNC with function 1.",
    Function64 "function-64" "VMFUNC with function 64.",
    OwnPage "vmfunc-in-own-page" "VMFUNC in a page of the client's program.",
    OwnSyscall "syscall-behind-own-vmfunc" "The same with SYSCALL behind it.",
    Middle "into-the-trampoline" "Jumps to every byte of the trampoline, with registers of the client's choice.",
    BeforeSlots "vmfunc-before-server-addresses" "In ring 0, VMFUNC whose next instruction begins a range of the server's.",
    Stack "own-stack-pointer" "A stack pointer of the client's choice.",
    Flags "strange-flags" "AC, DF, NT, ID and IOPL set.",
    Trap "single-step" "TF set.",
    Bases "wrong-bases" "FS and GS bases of the client's choice.",
    WriteTable "write-handler-table" "A write to the handler table.",
    WriteTableMemory "write-handler-table-by-its-memory" "A write to the handler table's page, by the kernel.",
    WriteGate "write-trampoline" "A write to the trampoline, by the kernel.",
    WriteGateTables "write-page-tables-of-the-gate" "A write to the page table of the gate's pages, by the kernel.",
    ReadServer "read-server-by-address" "A read at an address of the server's state, without a switch.",
    ReadServerMemory "read-server-by-page-table" "A read through a page table entry that names the server's memory.",
    WriteServerMemory "write-server-by-page-table" "A write through one.",
    ReadLink "read-link-page" "What the client finds in its own link page, stack and window after calls.",
    Supervisor "trampoline-in-ring-0" "The trampoline's VMFUNC run in ring 0, at another address.",
    LandEntry "system-call-entry-in-ring-0" "In ring 0, VMFUNC right before every byte of the page with the entry of system calls.",
    LandSyscall "system-call-without-a-call-in-ring-0" "In ring 0, VMFUNC right before the entry of system calls itself.",
    LandKernel "server-kernel-in-ring-0" "In ring 0, VMFUNC right before the server's own entry.",
    LandTables "descriptor-tables-in-ring-0" "In ring 0, VMFUNC in the page of the interrupt descriptors.",
    Cr3 "other-page-table" "VMFUNC under another page table.",
    Idt "other-interrupt-table" "Interrupt descriptors in the link's stack.",
    Lstar "other-system-call-entry" "Another LSTAR.",
    Fmask "other-system-call-flags" "SYSCALL that clears no flags.",
    Cr4 "no-smep" "SMEP and SMAP off.",
    Debug "breakpoint" "A breakpoint at the trampoline.",
    Slot "own-page-at-server-address" "A page of the client's with VMFUNC, at addresses of the server's.",
    StaleSlot "own-page-at-server-address-remembered" "The same page, taken out of the tables, but not out of the TLB.",
    Continue "continue-nothing" "To go on with a call that is not suspended.",
    ContinueElsewhere "continue-under-other-page-table" "To go on with a suspended call under another page table.",
    Unlinked "unlinked" "VMFUNC by a client that has asked for no link.",
}

macro_rules! figures {
    ($($name:ident $text:literal,)*) => {
        /// What a client counts.
        #[derive(Clone, Copy, PartialEq, Eq)]
        #[repr(u64)]
        pub enum Figure { $(#[doc = $text] $name,)* }

        /// Their names.
        pub const FIGURES: &[&str] = &[$($text,)*];
    };
}

figures! {
    CallExits "exits of 10000 calls",
    CallTicks "instructions of a null call with the loop around it",
    VmcallExits "exits of 10000 VMCALLs",
    VmcallTicks "instructions of a VMCALL with the hypervisor's and the loop around it",
    LoopExits "exits of 10000 turns of the loop alone",
    LoopTicks "instructions of the loop alone",
    HeapFirst "exits of a call that touches memory for the first time",
    HeapSecond "exits of a call that touches it again",
    DemandFirst "exits of a call that has the server's kernel map a page",
    DemandSecond "exits of a call that touches it again (2)",
    BasesKept "FS and GS bases are the client's after a call",
    RegistersKept "registers that a function keeps are kept",
    RegistersLeft "bits in registers that a function may change",
    Interrupts "interrupts during one call",
    WrongUnderInterrupts "wrong answers of 5000 calls under interrupts",
    ProcessExits "exits of a process switch and a call",
    ContinueAnswer "answer to a continuation without a call",
    MiddleAnswers "jumps into the trampoline that were calls",
    MiddleOthers "jumps into the trampoline with any other answer",
    Read "a word that was read",
    LeftOver "words left in the client's stack and window",
    LeftOwn "words in the client's link page",
    EntryFaults "landings in the page of the system call entry that were faults",
}
