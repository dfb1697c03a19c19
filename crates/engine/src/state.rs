//! Register state, in the processor manuals' own terms, independent of any engine.

use ::state::Schema;
pub use cpu::CpuidEntry;
use serde::{Deserialize, Serialize, Serializer};

/// A segment register with its hidden part (Intel SDM 3A, 3.4.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// Base address.
    pub base: u64,
    /// Limit in bytes, granularity applied.
    pub limit: u32,
    /// Selector.
    pub selector: u16,
    /// Access rights: type (bits 0-3), S (4), DPL (5-6), P (7), AVL (8), L (9), D/B (10), G (11), unusable (16).
    pub rights: u32,
}

impl Segment {
    /// Of the rights: there is no segment.
    pub const UNUSABLE: u32 = 1 << 16;
}

/// GDTR or IDTR.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Table {
    /// Base address.
    pub base: u64,
    /// Limit.
    pub limit: u16,
}

/// General-purpose registers, instruction pointer and flags.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GeneralRegisters {
    /// RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15: the order of instruction encodings.
    pub gpr: [u64; 16],
    /// RIP.
    pub rip: u64,
    /// RFLAGS.
    pub rflags: u64,
}

/// Index of a general-purpose register in [`GeneralRegisters::gpr`].
pub mod gpr {
    #![allow(missing_docs, reason = "the names are the processor's")]
    pub const RAX: usize = 0;
    pub const RCX: usize = 1;
    pub const RDX: usize = 2;
    pub const RBX: usize = 3;
    pub const RSP: usize = 4;
    pub const RBP: usize = 5;
    pub const RSI: usize = 6;
    pub const RDI: usize = 7;
}

/// Segments, tables and control registers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SystemRegisters {
    /// CS, DS, ES, FS, GS, SS.
    pub segments: [Segment; 6],
    /// Task register.
    pub tr: Segment,
    /// Local descriptor table register.
    pub ldtr: Segment,
    /// GDTR.
    pub gdt: Table,
    /// IDTR.
    pub idt: Table,
    /// CR0, CR2, CR3, CR4, CR8.
    pub cr: [u64; 5],
    /// EFER.
    pub efer: u64,
    /// `IA32_APIC_BASE`.
    pub apic_base: u64,
}

/// What the boot protocol leaves in vCPU 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BootState {
    /// General registers.
    pub general: GeneralRegisters,
    /// System registers.
    pub system: SystemRegisters,
}

/// One model-specific register. It is written as a pair; one with names, as it was once, is read as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Msr {
    /// Its number.
    pub index: u32,
    /// Its value.
    pub value: u64,
}

impl Serialize for Msr {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        (self.index, self.value).serialize(serializer)
    }
}

/// Events in flight at an instruction boundary (Intel SDM 3C, 27.8; AMD APM 2, 15.20).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingEvents {
    /// Exception being delivered: vector, error code, payload; `None` when there is none.
    pub exception: Option<(u8, Option<u32>)>,
    /// The exception waits rather than being delivered.
    pub exception_pending: bool,
    /// External or software interrupt being delivered: vector, and whether it is a software one.
    pub interrupt: Option<(u8, bool)>,
    /// Interrupt shadow: 1 after MOV SS, 2 after STI.
    pub interrupt_shadow: u8,
    /// An NMI is being delivered.
    pub nmi_injected: bool,
    /// An NMI waits.
    pub nmi_pending: bool,
    /// NMIs are blocked until IRET.
    pub nmi_masked: bool,
    /// The vector of a pending SIPI.
    pub sipi_vector: u32,
    /// System management: in SMM, SMI pending, SMI while NMIs are blocked, latched INIT.
    pub smm: [bool; 4],
}

/// Whether a vCPU runs (Intel SDM 3A, 9.4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Activity {
    /// Runs.
    #[default]
    Runnable,
    /// Waits for INIT.
    Uninitialized,
    /// Has received INIT, waits for SIPI.
    InitReceived,
    /// Has received SIPI.
    SipiReceived,
    /// Waits in HLT.
    Halted,
}

/// A whole vCPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VcpuState {
    /// Its local APIC id.
    pub id: u32,
    /// What CPUID answers.
    pub cpuid: Vec<CpuidEntry>,
    /// General registers.
    pub general: GeneralRegisters,
    /// System registers.
    pub system: SystemRegisters,
    /// The XSAVE area in standard format (Intel SDM 1, 13.4).
    #[serde(with = "::state::bytes")]
    pub xsave: Vec<u8>,
    /// XCR0.
    pub xcr0: u64,
    /// DR0 to DR3, DR6, DR7.
    pub debug: [u64; 6],
    /// Every MSR that the engine can save.
    pub msrs: Vec<Msr>,
    /// The local APIC's registers: 1 KiB as laid out at its MMIO page (Intel SDM 3A, 11.4.1).
    #[serde(with = "::state::bytes")]
    pub lapic: Vec<u8>,
    /// Events in flight.
    pub events: PendingEvents,
    /// Whether it runs.
    pub activity: Activity,
    /// TSC frequency in kHz.
    pub tsc_khz: u32,
    /// How fast the local APIC's timer counts before it is divided, in kHz. Before version 3 it was KVM's.
    #[serde(default = "kvm_timer")]
    pub apic_timer_khz: u32,
}

/// What KVM's local APICs count at (Linux, `APIC_BUS_CYCLE_NS`).
pub const KVM_TIMER_KHZ: u32 = 1_000_000;

fn kvm_timer() -> u32 {
    KVM_TIMER_KHZ
}

/// The paravirtual clock shared by the vCPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Clock {
    /// Nanoseconds since the VM began, as its guests read them.
    pub nanoseconds: u64,
}

/// Everything of a VM that is neither memory nor a vCPU's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmState {
    /// The clock.
    pub clock: Clock,
}

impl Schema for VcpuState {
    const KIND: &'static str = "vcpu";
    const VERSION: u32 = 3;
    // 2: without the timer's rate. 1: the same, with names and numbers for what are tuples and bytes now.
    const OLDEST: u32 = 1;
}

impl Schema for VmState {
    const KIND: &'static str = "vm";
    const VERSION: u32 = 1;
}

#[cfg(test)]
mod tests {
    use super::*;
    use ::state::golden;

    #[test]
    fn a_vm_is_what_the_golden_file_says() {
        let clock = Clock {
            nanoseconds: 0x1234_5678_9abc,
        };
        golden::check(env!("CARGO_MANIFEST_DIR"), &VmState { clock });
    }

    #[test]
    fn a_vcpu_is_what_the_golden_file_says() {
        let segment = Segment {
            base: 0xffff_8880_0000_0000,
            limit: 0xf_ffff,
            selector: 8,
            rights: 0xa09b,
        };
        let mut state = VcpuState {
            id: 1,
            xsave: vec![1, 0, 255],
            xcr0: 7,
            debug: [1, 2, 3, 4, 0xffff_0ff0, 0x400],
            lapic: vec![0, 0x10],
            activity: Activity::Halted,
            tsc_khz: 2_000_000,
            apic_timer_khz: KVM_TIMER_KHZ,
            ..VcpuState::default()
        };
        state.cpuid.push(CpuidEntry {
            function: 0xb,
            index: 1,
            indexed: true,
            registers: [1, 2, 0x201, u32::MAX],
        });
        state.general.gpr[gpr::RDI] = u64::MAX;
        state.general.rflags = 0x246;
        state.system.segments[5] = segment;
        state.system.gdt = Table { base: 0x500, limit: 31 };
        state.system.cr = [0x8005_0033, 1, 2, 3, 4];
        state.msrs.push(Msr {
            index: 0xc000_0080,
            value: 0xd01,
        });
        state.events = PendingEvents {
            exception: Some((14, Some(2))),
            interrupt: Some((0x30, true)),
            nmi_pending: true,
            smm: [false, true, false, false],
            ..PendingEvents::default()
        };
        golden::check(env!("CARGO_MANIFEST_DIR"), &state);
        for older in [1, 2] {
            assert_eq!(golden::load::<VcpuState>(env!("CARGO_MANIFEST_DIR"), older), state);
        }
        assert!(VcpuState::load(4, b"{}").is_err());
    }
}
