//! Between a vCPU's whole state, as every engine has it, and the module's structures. Numbers only; no system calls here.

use engine::state::{Activity, Msr, PendingEvents};
use engine::{APIC_BYTES, EngineError, MSRS_OF_HOST, Result, VcpuState, same_timer_rate, same_tsc_rate};

use crate::module::uapi::{APIC_REGISTERS, Context, IN_NMI, NMI_WAITS, NO_NMI, SHADOW, State};
use crate::state::msr::{self, Msrs};
use crate::state::registers;

/// Bytes from one register of an APIC's page to the next (Intel SDM 3A, 11.4.1).
const APIC_STEP: usize = 16;

/// Registers of an APIC, by their places in its page divided by 16.
mod apic {
    pub(super) const PRIORITY: usize = 0x8;
    pub(super) const DESTINATION_FORMAT: usize = 0xe;
    pub(super) const TIMER: usize = 0x32;
    pub(super) const INITIAL: usize = 0x38;
    pub(super) const CURRENT: usize = 0x39;
    /// Of the timer: which mode it is in, and those that there are here, once and periodic.
    pub(super) const MODE: u32 = 3 << 17;
    pub(super) const PERIODIC: u32 = 1 << 17;
}

/// `IA32_APIC_BASE`: that there is an x2APIC.
const X2APIC: u64 = 3 << 10;

/// An event that waits for the next entry (AMD64 APM 2, 15.20).
const VALID: u64 = 1 << 31;
const HAS_CODE: u64 = 1 << 11;
const INTERRUPT: u64 = 0;
const NMI: u64 = 2;
const EXCEPTION: u64 = 3;
const SOFTWARE: u64 = 4;
const NMI_VECTOR: u64 = 2;

/// What of a vCPU nobody but this engine knows.
pub(crate) struct Own {
    /// Its number, which is its APIC's id.
    pub(crate) id: u32,
    /// What CPUID says to it.
    pub(crate) cpuid: Vec<engine::CpuidEntry>,
    /// Whether it executes anything.
    pub(crate) activity: Activity,
    /// The page at which it begins, if one waits for it.
    pub(crate) start: u8,
    /// What its TSC says now.
    pub(crate) tsc: u64,
    /// How fast it counts.
    pub(crate) tsc_khz: u32,
}

/// Whether the module has a register of this number in its state.
pub(crate) fn is_in_state(index: u32) -> bool {
    STATE_REGISTERS.iter().any(|(known, _)| *known == index)
}

/// A vCPU's whole state.
pub(crate) fn to_engine(state: &State, context: &Context, msrs: &Msrs, own: Own) -> VcpuState {
    let priority = u64::from(context.apic[apic::PRIORITY]) >> 4;
    let registers = registers::boot_to_engine(state, priority, msrs.apic_base());
    let [db0, db1, db2, db3] = context.dr;
    VcpuState {
        id: own.id,
        cpuid: own.cpuid,
        general: registers.general,
        system: registers.system,
        xsave: context.xsave.to_vec(),
        xcr0: context.xcr0,
        debug: [db0, db1, db2, db3, state.dr6, state.dr7],
        msrs: msrs_of(state, context, msrs, own.tsc),
        lapic: page(&context.apic).to_vec(),
        events: PendingEvents {
            sipi_vector: own.start.into(),
            ..events(state)
        },
        activity: own.activity,
        tsc_khz: own.tsc_khz,
        apic_timer_khz: context.timer_khz,
    }
}

/// The APIC's registers where an xAPIC has them in memory.
fn page(registers: &[u32; APIC_REGISTERS]) -> [u8; APIC_BYTES] {
    let mut registers = *registers;
    // An x2APIC has none; as KVM says it.
    registers[apic::DESTINATION_FORMAT] = u32::MAX;
    // One that has come to its end stands: a count that it began with would begin again elsewhere.
    if registers[apic::TIMER] & apic::PERIODIC == 0 && registers[apic::CURRENT] == 0 {
        registers[apic::INITIAL] = 0;
    }
    let mut page = [0; APIC_BYTES];
    for (to, from) in page.as_chunks_mut::<APIC_STEP>().0.iter_mut().zip(registers) {
        to[..4].copy_from_slice(&from.to_le_bytes());
    }
    page
}

fn msrs_of(state: &State, context: &Context, msrs: &Msrs, tsc: u64) -> Vec<Msr> {
    let mut all = msrs.changed();
    let mut kept = |index, value| all.push(Msr { index, value });
    MSRS_OF_HOST.into_iter().for_each(|index| kept(index, 0));
    kept(msr::TSC, tsc);
    kept(msr::TSC_AUX, context.tsc_aux);
    let mut state = *state;
    for (index, of) in STATE_REGISTERS {
        kept(index, *of(&mut state));
    }
    all
}

/// Registers that the module has in its state.
type OfState = fn(&mut State) -> &mut u64;
const STATE_REGISTERS: [(u32, OfState); 9] = [
    (0x174, |state| &mut state.sysenter_cs),
    (0x175, |state| &mut state.sysenter_esp),
    (0x176, |state| &mut state.sysenter_eip),
    (0x277, |state| &mut state.pat),
    (0xc000_0081, |state| &mut state.star),
    (0xc000_0082, |state| &mut state.lstar),
    (0xc000_0083, |state| &mut state.cstar),
    (0xc000_0084, |state| &mut state.sfmask),
    (0xc000_0102, |state| &mut state.kernel_gs_base),
];

fn events(state: &State) -> PendingEvents {
    let mut events = PendingEvents {
        // It is not known which of the two; whoever asks wants to know whether (KVM's bits, and both have the same effect).
        interrupt_shadow: if state.interruptibility & SHADOW != 0 { 2 } else { 0 },
        nmi_pending: state.interruptibility & NMI_WAITS != 0,
        nmi_masked: state.interruptibility & IN_NMI != 0,
        ..PendingEvents::default()
    };
    if state.event & VALID == 0 {
        return events;
    }
    let vector = u8::try_from(state.event & 0xff).unwrap_or(0);
    let code = u32::try_from(state.event >> 32).unwrap_or(0);
    match state.event >> 8 & 7 {
        INTERRUPT => events.interrupt = Some((vector, false)),
        SOFTWARE => events.interrupt = Some((vector, true)),
        NMI => events.nmi_injected = true,
        _ => events.exception = Some((vector, (state.event & HAS_CODE != 0).then_some(code))),
    }
    events
}

fn event(events: &PendingEvents) -> u64 {
    if let Some((vector, code)) = events.exception {
        let code = code.map_or(0, |code| HAS_CODE | u64::from(code) << 32);
        return VALID | EXCEPTION << 8 | u64::from(vector) | code;
    }
    if events.nmi_injected {
        return VALID | NMI << 8 | NMI_VECTOR;
    }
    let interrupt = |(vector, software)| {
        let kind = if software { SOFTWARE } else { INTERRUPT };
        VALID | kind << 8 | u64::from(vector)
    };
    events.interrupt.map_or(0, interrupt)
}

fn refused(why: impl Into<String>) -> EngineError {
    EngineError::State(why.into())
}

/// What the module is told of a saved vCPU, on a processor whose APIC and TSC count so fast.
///
/// # Errors
/// It cannot go on as one that owns its CPU; why.
pub(crate) fn from_engine(
    saved: &VcpuState,
    after_power_on: &State,
    (timer_khz, tsc_khz): (u32, u32),
) -> Result<(State, Box<Context>)> {
    let system = &saved.system;
    if system.apic_base & X2APIC != X2APIC {
        return Err(refused(
            "its local APIC is not in the mode of an x2APIC, in which that of an owned CPU always is",
        ));
    }
    if saved.events.smm[0] {
        return Err(refused("it is in system management mode"));
    }
    counts_alike(same_tsc_rate, (saved.tsc_khz, tsc_khz), "TSC")?;
    counts_alike(same_timer_rate, (saved.apic_timer_khz, timer_khz), "APIC's timer")?;
    let boot = engine::BootState {
        general: saved.general,
        system: saved.system,
    };
    let mut state = registers::boot(&boot, after_power_on);
    let events = &saved.events;
    state.event = event(events);
    state.interruptibility = if events.interrupt_shadow != 0 { SHADOW } else { 0 }
        | if events.nmi_masked { IN_NMI } else { 0 }
        | if events.nmi_pending { NMI_WAITS } else { NO_NMI };
    let [db0, db1, db2, db3, dr6, dr7] = saved.debug;
    (state.dr6, state.dr7) = (dr6, dr7);
    let mut context = Context::empty();
    context.dr = [db0, db1, db2, db3];
    context.xcr0 = saved.xcr0;
    context.xsave = saved.xsave_area()?;
    context.apic = registers_of(saved.apic_registers()?)?;
    for msr in &saved.msrs {
        if msr.index == msr::TSC_AUX {
            context.tsc_aux = msr.value;
        }
        if let Some((_, of)) = STATE_REGISTERS.iter().find(|(index, _)| *index == msr.index) {
            *of(&mut state) = msr.value;
        }
    }
    Ok((state, context))
}

fn counts_alike(same: fn(u32, u32) -> bool, (saved, here): (u32, u32), what: &str) -> Result<()> {
    if same(saved, here) {
        return Ok(());
    }
    Err(refused(format!(
        "its {what} counted at {saved} kHz, and that of this host's processor counts at {here} kHz: a guest that owns its CPUs has theirs"
    )))
}

fn registers_of(page: &[u8; APIC_BYTES]) -> Result<[u32; APIC_REGISTERS]> {
    let steps = page.as_chunks::<APIC_STEP>().0;
    let mut registers = [0; APIC_REGISTERS];
    for (to, from) in registers.iter_mut().zip(steps) {
        *to = u32::from_le_bytes([from[0], from[1], from[2], from[3]]);
    }
    if registers[apic::TIMER] & apic::MODE & !apic::PERIODIC != 0 {
        return Err(refused(
            "its APIC's timer waits for a time (TSC deadline), which AMD's processors do not have: run it with --cpu-model common",
        ));
    }
    // KVM does not save that a timer has come to its end and nobody was told; it has one that stands end once more, and so do we.
    let once = registers[apic::TIMER] & apic::PERIODIC == 0;
    if once && registers[apic::INITIAL] != 0 && registers[apic::CURRENT] == 0 {
        registers[apic::CURRENT] = 1;
    }
    Ok(registers)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> Own {
        Own {
            id: 1,
            cpuid: Vec::new(),
            activity: Activity::Runnable,
            start: 0,
            tsc: 77,
            tsc_khz: 2_000_000,
        }
    }

    fn example() -> (State, Box<Context>, VcpuState) {
        let mut state = State {
            cr3: 0x1000,
            efer: 0xd01,
            star: 5,
            kernel_gs_base: 6,
            dr7: 0x400,
            interruptibility: IN_NMI | NMI_WAITS,
            event: VALID | EXCEPTION << 8 | HAS_CODE | 14 | 2 << 32,
            ..State::default()
        };
        state.regs.rbx = 3;
        state.regs.r8_to_r15[7] = 15;
        state.cs.attributes = 0xa9b;
        state.ds.attributes = 0;
        state.gdtr.limit = 31;
        let mut context = Context::empty();
        (context.xcr0, context.tsc_aux, context.timer_khz) = (7, 9, 1_000_000);
        context.dr = [1, 2, 3, 4];
        context.apic[0x21] = 1 << 5;
        context.apic[apic::PRIORITY] = 0x20;
        context.apic[apic::INITIAL] = 500;
        context.apic[apic::CURRENT] = 100;
        let saved = to_engine(&state, &context, &Msrs::new(false), own());
        (state, context, saved)
    }

    #[test]
    fn a_vcpu_survives_the_way_there_and_back() {
        let (state, context, saved) = example();
        assert_eq!(saved.system.cr[4], 2);
        assert_eq!(saved.events.exception, Some((14, Some(2))));
        let (again, and) = from_engine(&saved, &State::default(), (1_020_000, 2_000_100)).unwrap();
        assert_eq!(again, state);
        assert_eq!((and.xcr0, and.dr, and.tsc_aux), (7, [1, 2, 3, 4], 9));
        assert_eq!(and.apic[0x21], 1 << 5);
        assert_eq!((and.apic[apic::INITIAL], and.apic[apic::CURRENT]), (500, 100));
        assert_eq!(context.apic[apic::CURRENT], 100);
    }

    #[test]
    fn a_timer_at_its_end_does_not_begin_again() {
        let mut registers = [0; APIC_REGISTERS];
        registers[apic::INITIAL] = 500;
        assert_eq!(registers_of(&page(&registers)).unwrap()[apic::INITIAL], 0);
        let mut of_kvm = page(&registers);
        of_kvm[apic::INITIAL * APIC_STEP] = 7;
        assert_eq!(
            registers_of(&of_kvm).unwrap()[apic::CURRENT],
            1,
            "it may have ended just then"
        );
        registers[apic::TIMER] = apic::PERIODIC;
        assert_eq!(registers_of(&page(&registers)).unwrap()[apic::INITIAL], 500);
    }

    #[test]
    fn events_are_those_that_they_were() {
        for (events, word) in [
            (PendingEvents::default(), 0),
            (
                PendingEvents {
                    interrupt: Some((0x30, false)),
                    ..PendingEvents::default()
                },
                VALID | 0x30,
            ),
            (
                PendingEvents {
                    nmi_injected: true,
                    ..PendingEvents::default()
                },
                VALID | NMI << 8 | 2,
            ),
        ] {
            assert_eq!(event(&events), word);
            let state = State {
                event: word,
                ..State::default()
            };
            assert_eq!(super::events(&state), events);
        }
    }

    #[test]
    fn what_no_owned_cpu_can_be_is_refused_with_the_reason() {
        let refusal = |change: fn(&mut VcpuState), here| {
            let (_, _, mut saved) = example();
            change(&mut saved);
            let refused = from_engine(&saved, &State::default(), here).err();
            refused.map(|error| error.to_string()).unwrap_or_default()
        };
        let here = (1_000_000, 2_000_000);
        assert_eq!(refusal(|_| (), here), "");
        assert!(refusal(|saved| saved.system.apic_base = 0xfee0_0900, here).contains("x2APIC"));
        assert!(refusal(|_| (), (100_000, 2_000_000)).contains("1000000 kHz"));
        assert!(refusal(|_| (), (0, 2_000_000)).contains("APIC's timer"));
        assert!(refusal(|_| (), (1_000_000, 2_100_000)).contains("TSC"));
        assert!(refusal(|saved| saved.lapic[0x322] = 4, here).contains("--cpu-model common"));
        assert!(refusal(|saved| saved.lapic.truncate(5), here).contains("5 bytes"));
        assert!(refusal(|saved| saved.xsave.truncate(5), here).contains("5 bytes"));
        assert!(refusal(|saved| saved.events.smm[0] = true, here).contains("system management"));
    }
}
