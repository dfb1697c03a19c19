//! What the programs of the VMFUNC test system share: what they have agreed on (`abi`), instructions that the compiler does not write by
//! itself (`cpu`), numbers of the processor's manual (`arch`) and what clients do (`scenario`). Nothing here knows the hypervisor or a particular guest.

#![no_std]

pub mod abi;
pub mod arch;
pub mod cpu;
pub mod scenario;
