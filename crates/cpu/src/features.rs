//! The names of CPUID's feature bits, as Linux shows them in `/proc/cpuinfo`, and which model has which. A bit without a name is
//! in no model. Knows nothing of leaves that are no sets of features.

use crate::{CpuModel, EAX, EBX, ECX, EDX, Vendor};

/// A register that is a set of features.
pub(crate) struct Register {
    pub(crate) function: u32,
    pub(crate) index: u32,
    pub(crate) register: usize,
    /// The names of its bits from 0 on; `-` for one of which no model makes use.
    names: &'static str,
    /// Bits that tell of this VM or of this moment, and not of the host: topology, what KVM emulates on every host, what a
    /// control register has switched on.
    pub(crate) own: u32,
}

const fn set(function: u32, index: u32, register: usize, names: &'static str, own: u32) -> Register {
    Register {
        function,
        index,
        register,
        names,
        own,
    }
}

/// CPUID.1:ECX: x2APIC, TSC deadline timer, OSXSAVE, hypervisor.
const OWN_1_ECX: u32 = 1 << 21 | 1 << 24 | 1 << 27 | 1 << 31;
/// CPUID.1:EDX: local APIC, more than one logical processor.
const OWN_1_EDX: u32 = 1 << 9 | 1 << 28;
/// CPUID.7:ECX: OSPKE.
const OWN_7_ECX: u32 = 1 << 4;
/// CPUID.8000_0001:ECX: multi-processor style.
const OWN_EXTENDED_ECX: u32 = 1 << 1;

pub(crate) const REGISTERS: [Register; 11] = [
    set(
        0x1,
        0,
        ECX,
        "sse3 pclmulqdq - - - - - - - ssse3 - - fma cx16 - - - pcid - sse4_1 sse4_2 x2apic movbe popcnt tsc_deadline_timer \
         aes xsave - avx f16c rdrand hypervisor",
        OWN_1_ECX,
    ),
    set(
        0x1,
        0,
        EDX,
        "fpu - de pse tsc msr pae mce cx8 apic - sep mtrr pge mca cmov pat pse36 - clflush - - - mmx fxsr sse sse2",
        OWN_1_EDX,
    ),
    set(0x6, 0, EAX, "- - arat", 0),
    set(
        0x7,
        0,
        EBX,
        "fsgsbase - - bmi1 - avx2 - smep bmi2 erms invpcid - - - - - avx512f avx512dq rdseed adx smap - - clflushopt clwb \
         - - - avx512cd - avx512bw avx512vl",
        0,
    ),
    set(0x7, 0, ECX, "", OWN_7_ECX),
    set(
        0x7,
        0,
        EDX,
        "- - - - - - - - - - md_clear - - - - - - - - - - - - - - - spec_ctrl intel_stibp flush_l1d - - spec_ctrl_ssbd",
        0,
    ),
    set(0xd, 1, EAX, "xsaveopt xsavec xgetbv1", 0),
    set(
        0x8000_0001,
        0,
        ECX,
        "lahf_lm - - - - abm - - - - - - - - - - - - - - - - topoext",
        OWN_EXTENDED_ECX,
    ),
    set(
        0x8000_0001,
        0,
        EDX,
        // Bits 0 to 24 are those of leaf 1 once more, on AMD only.
        "fpu - de pse tsc msr pae mce cx8 apic - syscall mtrr pge mca cmov pat pse36 - - nx - - mmx fxsr - - rdtscp - lm",
        OWN_1_EDX,
    ),
    set(0x8000_0007, 0, EDX, "- - - - - - - - nonstop_tsc", 0),
    set(
        0x8000_0008,
        0,
        EBX,
        "- - - - - - - - - - - - ibpb - ibrs stibp - - - - - - - - amd_ssbd virt_ssbd",
        0,
    ),
];

/// What every processor of 64 bits has, and v2 of the psABI. Without VME, which is of no use to a kernel of 64 bits and which not
/// every emulated processor has.
const V2: &str = "fpu de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov pat pse36 clflush mmx fxsr sse sse2 syscall nx \
                  lm cx16 lahf_lm popcnt sse3 sse4_1 sse4_2 ssse3";
/// v3 of the psABI, and what the processors with all of that have besides.
const V3: &str = "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave xsaveopt aes pclmulqdq rdrand rdtscp fsgsbase";
/// The same of Intel's alone: AMD has these later than AVX2.
const V3_INTEL: &str = "pcid invpcid erms";
/// v4 of the psABI, and what the processors with all of that have besides.
const V4: &str = "avx512f avx512bw avx512cd avx512dq avx512vl rdseed adx clflushopt clwb xsavec xgetbv1";
/// In every model, but only as far as the host has it: what protects a guest, or what KVM and the board add.
/// Without `virt_ssbd`, which KVM offers on AMD's older processors and not on each newer one.
const WHERE_OFFERED: &str = "smep smap md_clear spec_ctrl intel_stibp flush_l1d spec_ctrl_ssbd ibpb ibrs stibp amd_ssbd \
                             x2apic tsc_deadline_timer hypervisor arat topoext nonstop_tsc";

fn has(list: &str, name: &str) -> bool {
    list.split_ascii_whitespace().any(|listed| listed == name)
}

impl Register {
    fn names(&self) -> impl Iterator<Item = (u32, &'static str)> {
        (0..32).zip(self.names.split_ascii_whitespace())
    }

    fn bits(&self, wanted: impl Fn(&str) -> bool) -> u32 {
        let bits = self.names().filter(|(_, name)| wanted(name));
        bits.fold(0, |bits, (bit, _)| bits | 1 << bit)
    }

    /// What a host must have for a model. AMD alone repeats leaf 1 in the extended leaf.
    pub(crate) fn required(&self, model: CpuModel, vendor: Vendor) -> u32 {
        let bits = self.bits(|name| match model {
            CpuModel::Host | CpuModel::Common => false,
            CpuModel::V2 => has(V2, name),
            CpuModel::V3 => has(V2, name) || in_v3(name, vendor),
            CpuModel::V4 => has(V2, name) || in_v3(name, vendor) || has(V4, name),
        });
        match (self.function, self.register, vendor) {
            (0x8000_0001, EDX, Vendor::Intel) => bits & !self.bits(|name| REGISTERS[1].bits(|one| one == name) != 0),
            _ => bits,
        }
    }

    /// What a guest of a model is shown besides, where the host has it.
    pub(crate) fn optional(&self) -> u32 {
        self.bits(|name| has(WHERE_OFFERED, name))
    }

    /// Adds the names of bits to those that are there; those that have none by their place. AMD has some bits twice.
    pub(crate) fn add_names(&self, bits: u32, names: &mut Vec<String>) {
        let place = |bit| {
            let register = ["EAX", "EBX", "ECX", "EDX"][self.register];
            format!("CPUID.{:X}H.{:X}:{register}[{bit}]", self.function, self.index)
        };
        let named = |bit| self.names().find(|(at, name)| *at == bit && *name != "-");
        for bit in (0..32_u32).filter(|bit| bits & (1 << bit) != 0) {
            let name = named(bit).map_or_else(|| place(bit), |(_, name)| name.to_owned());
            if !names.contains(&name) {
                names.push(name);
            }
        }
    }
}

fn in_v3(name: &str, vendor: Vendor) -> bool {
    has(V3, name) || vendor == Vendor::Intel && has(V3_INTEL, name)
}

/// The states of XCR0 that a model has: x87 and SSE; AVX; opmasks and the two halves of AVX-512 (Intel SDM 1, 13.1).
pub(crate) fn states(model: CpuModel) -> u32 {
    match model {
        CpuModel::Host | CpuModel::Common => u32::MAX,
        CpuModel::V2 => 0,
        CpuModel::V3 => 0b111,
        CpuModel::V4 => 0b1110_0111,
    }
}
