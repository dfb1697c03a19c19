//! What reads a guest's own bytes in the VMM: the instruction that a vCPU is at, and the guest's page tables, each with bytes in and a
//! verdict out, for whoever feeds them more than tests do (`basalt-fuzz`). A vCPU itself calls them where they are.

use std::sync::Arc;

use vm_memory::GuestRegionMmap;

use crate::memory::GuestMemory;
use crate::module::uapi::State;
use crate::state::registers;
use crate::vcpu::instruction::{self, LONGEST, Mode, What};
use crate::vcpu::paging;

/// An instruction that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instruction {
    /// Its bytes.
    pub length: usize,
    /// Bytes of what it accesses.
    pub size: usize,
    /// Whether it stores.
    pub stores: bool,
}

/// The instruction with which `bytes` begin, in code of 16, 32 or 64 bits. The registers that it names are read or written.
pub fn instruction(bytes: &[u8], bits: u8) -> Option<Instruction> {
    let mode = match bits {
        16 => Mode::Bits16,
        32 => Mode::Bits32,
        _ => Mode::Bits64,
    };
    let access = instruction::decode(bytes, mode)?;
    let mut state = State::default();
    let stores = match access.what {
        What::Load { to, width, signed } => {
            let value = match signed {
                true => instruction::extend(u64::MAX, access.size),
                false => u64::MAX,
            };
            registers::set(&mut state.regs, to, width, value);
            false
        }
        What::Store(register) => {
            registers::get(&mut state.regs, register);
            true
        }
        What::StoreValue(_) => true,
    };
    Some(Instruction {
        length: access.length,
        size: access.size,
        stores,
    })
}

/// The registers that say where a guest's page tables are, and of what kind.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tables {
    /// Whether there is paging at all.
    pub cr0: u64,
    /// Where the first table is.
    pub cr3: u64,
    /// How wide entries are, and whether there are five levels.
    pub cr4: u64,
    /// Whether the guest is in long mode.
    pub efer: u64,
}

/// Where a linear address lies by the tables in `memory`, and as much of an instruction there as can be read.
pub fn page_walk(memory: Arc<GuestRegionMmap<()>>, tables: Tables, linear: u64) -> (Option<u64>, Vec<u8>) {
    let guest = GuestMemory::default();
    guest.add(0, memory);
    let state = State {
        cr0: tables.cr0,
        cr3: tables.cr3,
        cr4: tables.cr4,
        efer: tables.efer,
        ..State::default()
    };
    let mut bytes = vec![0; LONGEST];
    let length = paging::read(&guest, &state, linear, &mut bytes);
    bytes.truncate(length);
    (paging::translate(&guest, &state, linear), bytes)
}
