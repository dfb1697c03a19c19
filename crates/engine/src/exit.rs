//! Why a vCPU came back.

/// What the guest did that has to be completed outside. Buffers of reads are filled before the next run.
#[derive(Debug)]
pub enum Exit<'a> {
    /// `in`, or several of them in one `rep ins`: fill `data`, each `width` bytes by an access of their own.
    PortRead {
        /// The port.
        port: u16,
        /// Bytes of one access: 1, 2 or 4.
        width: usize,
        /// What the guest will read: one access, or several.
        data: &'a mut [u8],
    },
    /// `out`, or several of them in one `rep outs`.
    PortWrite {
        /// The port.
        port: u16,
        /// Bytes of one access: 1, 2 or 4.
        width: usize,
        /// What the guest wrote: one access, or several.
        data: &'a [u8],
    },
    /// A load from an address without memory: fill `data` (1 to 8 bytes).
    MmioRead {
        /// Guest physical address.
        address: u64,
        /// What the guest will read.
        data: &'a mut [u8],
    },
    /// A store to an address without memory.
    MmioWrite {
        /// Guest physical address.
        address: u64,
        /// What the guest wrote.
        data: &'a [u8],
    },
    /// The guest ended a level-triggered interrupt of this vector, whose ends are to come out ([`crate::Interrupt::report_ends`]).
    IoapicEoi(u8),
    /// A kick or a signal; run again or stop.
    Interrupted,
    /// The guest serves others, and has nothing to do until one of them enters it: see [`crate::Vcpu::freeze`]. One that is run again
    /// is told that it is no server.
    Waiting,
    /// HLT with no interrupt controller in the engine to wake it.
    Halted,
    /// Triple fault.
    Shutdown,
    /// The guest asked the engine itself.
    System(SystemEvent),
    /// The engine cannot go on with this guest; its own words.
    Failed(String),
}

impl Exit<'_> {
    /// The metric label of this kind of exit.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::PortRead { .. } => "port-read",
            Self::PortWrite { .. } => "port-write",
            Self::MmioRead { .. } => "mmio-read",
            Self::MmioWrite { .. } => "mmio-write",
            Self::IoapicEoi(_) => "ioapic-eoi",
            Self::Interrupted => "interrupted",
            Self::Waiting => "waiting",
            Self::Halted => "halted",
            Self::Shutdown => "shutdown",
            Self::System(_) => "system-event",
            Self::Failed(_) => "failed",
        }
    }
}

/// Requests to the engine that concern the whole machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SystemEvent {
    /// Power off.
    PowerOff,
    /// Reset.
    Reset,
    /// The guest's kernel says that it crashed.
    Crash,
}
