//! What a vCPU is: its registers in the module's terms and in the engine's, and what the module leaves to us of them. No system calls here.

pub(crate) mod clock;
pub(crate) mod cpuid;
pub(crate) mod msr;
pub(crate) mod registers;
pub(crate) mod saved;
