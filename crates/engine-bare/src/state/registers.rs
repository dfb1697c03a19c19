//! Between the engine's register types and the module's. No system calls here.

use engine::BootState;
use engine::state::{GeneralRegisters, Segment as EngineSegment, SystemRegisters, Table};

use crate::module::uapi::{NO_NMI, Regs, Segment, State};
use crate::vcpu::instruction::Register;

/// Of a segment's attributes: it is present (AMD64 APM 2, 4.7.3).
const PRESENT: u16 = 1 << 7;

fn segment(from: &EngineSegment) -> Segment {
    Segment {
        base: from.base,
        limit: from.limit,
        selector: from.selector,
        // Both are a descriptor's bits 8 to 15 and 20 to 23 (AMD64 APM 2, 15.5.1).
        attributes: match from.rights & EngineSegment::UNUSABLE {
            0 => u16::try_from(from.rights & 0xfff).unwrap_or(0),
            _ => 0,
        },
    }
}

fn segment_to_engine(from: &Segment) -> EngineSegment {
    let unusable = match from.attributes & PRESENT {
        0 => EngineSegment::UNUSABLE,
        _ => 0,
    };
    EngineSegment {
        base: from.base,
        limit: from.limit,
        selector: from.selector,
        rights: u32::from(from.attributes) | unusable,
    }
}

fn table(from: Table) -> Segment {
    Segment {
        base: from.base,
        limit: from.limit.into(),
        ..Segment::default()
    }
}

fn table_to_engine(from: &Segment) -> Table {
    Table {
        base: from.base,
        limit: u16::try_from(from.limit).unwrap_or(u16::MAX),
    }
}

fn general(from: &GeneralRegisters) -> Regs {
    let mut regs = Regs {
        rip: from.rip,
        rflags: from.rflags,
        ..Regs::default()
    };
    for (number, value) in from.gpr.iter().enumerate() {
        *by_number(&mut regs, number) = *value;
    }
    regs
}

fn general_to_engine(from: &Regs) -> GeneralRegisters {
    let mut regs = *from;
    GeneralRegisters {
        gpr: std::array::from_fn(|number| *by_number(&mut regs, number)),
        rip: from.rip,
        rflags: from.rflags,
    }
}

/// What the boot protocol asks for, in a vCPU that is otherwise as after power on.
pub(crate) fn boot(from: &BootState, after_power_on: &State) -> State {
    let system = &from.system;
    let [cs, ds, es, fs, gs, ss] = system.segments.each_ref().map(segment);
    let [cr0, cr2, cr3, cr4, _] = system.cr;
    State {
        regs: general(&from.general),
        cs,
        ds,
        es,
        fs,
        gs,
        ss,
        tr: segment(&system.tr),
        ldtr: segment(&system.ldtr),
        gdtr: table(system.gdt),
        idtr: table(system.idt),
        cr0,
        cr2,
        cr3,
        cr4,
        efer: system.efer,
        ..*after_power_on
    }
}

/// The same registers in the engine's terms; CR8 and `IA32_APIC_BASE` the module has elsewhere.
pub(crate) fn boot_to_engine(from: &State, cr8: u64, apic_base: u64) -> BootState {
    let segments = [&from.cs, &from.ds, &from.es, &from.fs, &from.gs, &from.ss];
    BootState {
        general: general_to_engine(&from.regs),
        system: SystemRegisters {
            segments: segments.map(segment_to_engine),
            tr: segment_to_engine(&from.tr),
            ldtr: segment_to_engine(&from.ldtr),
            gdt: table_to_engine(&from.gdtr),
            idt: table_to_engine(&from.idtr),
            cr: [from.cr0, from.cr2, from.cr3, from.cr4, cr8],
            efer: from.efer,
            apic_base,
        },
    }
}

/// Where a startup interrupt makes a processor begin (AMD64 APM 2, 14.1.3 and 16.5): as after power on, at page `vector`.
pub(crate) fn start_at(vector: u8, after_power_on: &State) -> State {
    let mut state = *after_power_on;
    state.cs.selector = u16::from(vector) << 8;
    state.cs.base = u64::from(vector) << 12;
    state.regs.rip = 0;
    state.interruptibility = NO_NMI;
    state
}

/// A general register by its number in instruction encodings.
fn by_number(regs: &mut Regs, number: usize) -> &mut u64 {
    match number & 15 {
        0 => &mut regs.rax,
        1 => &mut regs.rcx,
        2 => &mut regs.rdx,
        3 => &mut regs.rbx,
        4 => &mut regs.rsp,
        5 => &mut regs.rbp,
        6 => &mut regs.rsi,
        7 => &mut regs.rdi,
        other => &mut regs.r8_to_r15[other - 8],
    }
}

/// What is in a register, or its second byte.
pub(crate) fn get(regs: &mut Regs, register: Register) -> u64 {
    let value = *by_number(regs, register.number);
    if register.high { value >> 8 } else { value }
}

/// Writes so many bytes of a register: four clear the upper half, fewer leave the rest (AMD64 APM 1, 3.1.2).
pub(crate) fn set(regs: &mut Regs, register: Register, width: usize, value: u64) {
    let to = by_number(regs, register.number);
    *to = match (width, register.high) {
        (1, true) => *to & !0xff00 | (value & 0xff) << 8,
        (1, false) => *to & !0xff | value & 0xff,
        (2, _) => *to & !0xffff | value & 0xffff,
        (4, _) => value & 0xffff_ffff,
        _ => value,
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::state::gpr;

    const fn register(number: usize, high: bool) -> Register {
        Register { number, high }
    }

    #[test]
    fn registers_are_found_by_their_numbers() {
        let mut regs = Regs::default();
        for number in 0..16 {
            set(&mut regs, register(number, false), 8, number as u64);
        }
        assert_eq!((regs.rcx, regs.rbx, regs.rsp, regs.rdi), (1, 3, 4, 7));
        assert_eq!(regs.r8_to_r15, [8, 9, 10, 11, 12, 13, 14, 15]);
    }

    #[test]
    fn parts_of_registers_leave_or_clear_the_rest() {
        let mut regs = Regs {
            rax: u64::MAX,
            ..Regs::default()
        };
        set(&mut regs, register(0, true), 1, 0x12);
        assert_eq!(
            (regs.rax, get(&mut regs, register(0, true)) & 0xff),
            (0xffff_ffff_ffff_12ff, 0x12)
        );
        set(&mut regs, register(0, false), 1, 0x1_34);
        assert_eq!(regs.rax, 0xffff_ffff_ffff_1234);
        set(&mut regs, register(0, false), 2, 0x5678);
        assert_eq!(regs.rax, 0xffff_ffff_ffff_5678);
        set(&mut regs, register(0, false), 4, 0x1_9abc_def0);
        assert_eq!(regs.rax, 0x9abc_def0);
    }

    #[test]
    fn a_startup_interrupt_begins_at_its_page() {
        let state = start_at(0x9a, &State::default());
        assert_eq!(
            (state.cs.base, state.cs.selector, state.regs.rip),
            (0x9_a000, 0x9a00, 0)
        );
    }

    #[test]
    fn a_boot_state_keeps_what_it_does_not_name() {
        let after = State {
            pat: 7,
            dr7: 0x400,
            ..State::default()
        };
        let mut from = BootState::default();
        from.general.gpr[gpr::RSI] = 5;
        from.system.segments[0].rights = 0xa09b;
        from.system.ldtr.rights = EngineSegment::UNUSABLE | 0x82;
        from.system.cr[3] = 9;
        let state = boot(&from, &after);
        assert_eq!((state.regs.rsi, state.cr4, state.pat, state.dr7), (5, 9, 7, 0x400));
        assert_eq!((state.cs.attributes, state.ldtr.attributes), (0x09b, 0));
        let again = boot_to_engine(&state, 4, 5);
        assert_eq!(again.general, from.general);
        assert_eq!((again.system.cr, again.system.apic_base), ([0, 0, 0, 9, 4], 5));
        assert_eq!(again.system.segments[0].rights, 0x09b);
        assert_eq!(again.system.ldtr.rights, EngineSegment::UNUSABLE);
    }
}
