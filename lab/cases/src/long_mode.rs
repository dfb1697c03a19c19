//! How a vCPU begins whose guest is a few instructions: in long mode, at privilege level 0.

use engine::BootState;
use engine::state::{GeneralRegisters, Segment, SystemRegisters, Table};

/// At `code`, with a table of two descriptors (none, and code) and page tables at these guest physical addresses.
pub(crate) fn at(code: u64, descriptors: u64, tables: u64) -> BootState {
    let segment = |rights, selector| Segment {
        limit: u32::MAX,
        rights,
        selector,
        ..Segment::default()
    };
    let (code_segment, data) = (segment(0xa9b, 8), segment(0xc93, 0));
    BootState {
        general: GeneralRegisters {
            rip: code,
            rflags: 2,
            ..GeneralRegisters::default()
        },
        system: SystemRegisters {
            segments: [code_segment, data, data, data, data, data],
            tr: segment(0x8b, 0),
            ldtr: segment(0x82, 0),
            gdt: Table {
                base: descriptors,
                limit: 15,
            },
            // PG, NE, ET, PE; PAE; LMA, LME.
            cr: [0x8000_0031, 0, tables, 0x20, 0],
            efer: 0x500,
            ..SystemRegisters::default()
        },
    }
}
