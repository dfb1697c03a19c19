//! What can be wrong with a module and with a launch, as a person reads it and as CUDA numbers it. Knows no instruction.

use thiserror::Error;

/// Why a module's text is not accepted, or a function of it cannot be run.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("PTX line {line}: {what}; {advice}")]
pub struct Refused {
    /// The line of the text, from 1.
    pub line: u32,
    /// What is not accepted.
    pub what: String,
    /// What to do about it.
    pub advice: String,
}

impl Refused {
    pub(crate) fn new(line: u32, what: impl Into<String>, advice: impl Into<String>) -> Self {
        Self {
            line,
            what: what.into(),
            advice: advice.into(),
        }
    }
}

/// Which thread of a grid: the block's index and the thread's in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThreadId {
    /// `blockIdx`.
    pub block: [u32; 3],
    /// `threadIdx`.
    pub thread: [u32; 3],
}

impl std::fmt::Display for ThreadId {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ([x, y, z], [a, b, c]) = (self.thread, self.block);
        write!(formatter, "thread ({x},{y},{z}) of block ({a},{b},{c})")
    }
}

/// Why a launch ended without its kernel's end.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LaunchError {
    /// The module has no such kernel.
    #[error("the module has no kernel '{0}'; its kernels are what `Program::kernels` lists")]
    NoKernel(String),
    /// The kernel has, or calls, what is not interpreted.
    #[error("kernel '{kernel}' cannot be interpreted: {refused}")]
    NotInterpreted {
        /// The kernel.
        kernel: String,
        /// What is in its way.
        #[source]
        refused: Refused,
    },
    /// Grid, block, shared memory or parameters are not what the kernel and the limits allow.
    #[error("the launch's {what}: {given} given, {allowed} allowed; change the launch")]
    Configuration {
        /// What is wrong.
        what: &'static str,
        /// How much was given.
        given: u64,
        /// How much may be.
        allowed: u64,
    },
    /// An access outside of what the space has.
    #[error(
        "illegal address {address:#x} ({bytes} bytes, {space}) by {thread}, PTX line {line}; check the kernel's bounds"
    )]
    IllegalAddress {
        /// The address, as the thread used it.
        address: u64,
        /// How many bytes from there.
        bytes: u32,
        /// The state space.
        space: &'static str,
        /// Who.
        thread: ThreadId,
        /// The line of the instruction.
        line: u32,
    },
    /// An access whose address is no multiple of its size.
    #[error(
        "address {address:#x} is no multiple of {bytes}, by {thread}, PTX line {line}; align what the kernel is given"
    )]
    Misaligned {
        /// The address.
        address: u64,
        /// The size of the access.
        bytes: u32,
        /// Who.
        thread: ThreadId,
        /// The line of the instruction.
        line: u32,
    },
    /// All threads that are left wait for others that do not come.
    #[error(
        "{waiting} threads wait for ever, the first is {thread} at PTX line {line} ({what}); let all threads reach it"
    )]
    Deadlock {
        /// How many wait.
        waiting: u32,
        /// One of them.
        thread: ThreadId,
        /// Where it waits.
        line: u32,
        /// For what.
        what: &'static str,
    },
    /// More instructions than the launch may take.
    #[error("the kernel did not end within {budget} instructions; give it less to do, or raise the budget")]
    Timeout {
        /// The budget.
        budget: u64,
    },
    /// Whoever launched it wanted no more of it.
    #[error("the launch was stopped before the kernel's end; nobody waits for it")]
    Stopped,
    /// The kernel executed `trap`.
    #[error("the kernel trapped: {thread}, PTX line {line}; see what the kernel traps on")]
    Trap {
        /// Who.
        thread: ThreadId,
        /// Where.
        line: u32,
    },
    /// An assertion of the kernel failed.
    #[error("an assertion of the kernel failed: {thread}, PTX line {line}; see the kernel's assertions")]
    Assert {
        /// Who.
        thread: ThreadId,
        /// Where.
        line: u32,
    },
    /// Calls within calls beyond what a thread's stack may hold.
    #[error("{thread} calls too deeply at PTX line {line}; bound the kernel's recursion")]
    StackOverflow {
        /// Who.
        thread: ThreadId,
        /// Where.
        line: u32,
    },
    /// An instruction whose operands are not what PTX allows, such as a warp-wide one by a thread that its mask does not have.
    #[error("{what}: {thread}, PTX line {line}; mend the kernel")]
    Illegal {
        /// What is wrong.
        what: &'static str,
        /// Who.
        thread: ThreadId,
        /// Where.
        line: u32,
    },
}

impl LaunchError {
    /// The name and the value of the CUDA runtime's error that a program gets, as its public documentation lists them.
    #[must_use]
    pub const fn cuda(&self) -> (&'static str, u32) {
        match self {
            Self::NoKernel(_) => ("cudaErrorInvalidDeviceFunction", 98),
            Self::NotInterpreted { .. } => ("cudaErrorNotSupported", 801),
            Self::Configuration { .. } => ("cudaErrorInvalidConfiguration", 9),
            Self::IllegalAddress { .. } => ("cudaErrorIllegalAddress", 700),
            Self::Misaligned { .. } => ("cudaErrorMisalignedAddress", 716),
            Self::Deadlock { .. } | Self::Timeout { .. } | Self::Stopped => ("cudaErrorLaunchTimeout", 702),
            Self::Trap { .. } => ("cudaErrorLaunchFailure", 719),
            Self::Assert { .. } => ("cudaErrorAssert", 710),
            Self::StackOverflow { .. } => ("cudaErrorHardwareStackError", 714),
            Self::Illegal { .. } => ("cudaErrorIllegalInstruction", 715),
        }
    }
}
