//! Registers that say how a processor works, bit by bit: what a processor refuses is refused, what it takes is the guest's own, and the
//! next guest finds none of it.

use std::arch::x86_64::__cpuid;

use anyhow::{Result, ensure};
use engine::state::gpr;
use reservation::Device;
use vm_memory::{Bytes, MemoryRegionAddress};

use super::{Attacker, EFER, INVALID_OPCODE, Outcome, PROTECTION, to_msr};

/// Vector 1.
const DEBUG: u8 = 1;

/// What a guest of this case begins with: LME and LMA, CR0, CR4.
const LONG_MODE: u64 = 0x500;
const CR0: u64 = 0x8000_0031;
const CR4: u64 = 0x20;

/// EFER's bits that every processor has, and those by CPUID.8000_0001 (AMD64 Architecture Programmer's Manual, volume 2, 3.1.7).
const SCE: u32 = 0;
const NXE: u32 = 11;
const FFXSR: u32 = 14;
const TCE: u32 = 15;

/// Each bit changed by itself: taken and read back, or refused and counted. Long mode stays, virtualization is nobody's.
pub(super) fn efer(guest: &mut Attacker, _: u32) -> Result<()> {
    // wrmsr; rdmsr; cmp eax, r8d; jne; cmp edx, r9d; je; ud2
    let changed = [
        0x0f, 0x30, 0x0f, 0x32, 0x44, 0x39, 0xc0, 0x75, 0x05, 0x44, 0x39, 0xca, 0x74, 0x02, 0x0f, 0x0b,
    ];
    let has = __cpuid(0x8000_0001);
    for bit in 0..64 {
        let taken = match bit {
            SCE | NXE => true,
            FFXSR => has.edx & 1 << 25 != 0,
            TCE => has.ecx & 1 << 17 != 0,
            _ => false,
        };
        let value = LONG_MODE ^ 1 << bit;
        let [index, low, high] = to_msr(EFER, value);
        let wanted = if taken {
            Outcome::WentOn
        } else {
            Outcome::Fault(PROTECTION)
        };
        let before = guest.refused()?;
        let registers = [index, low, high, (8, value & 0xffff_ffff), (9, value >> 32)];
        guest.expect(&format!("EFER {value:#x}"), &changed, &registers, wanted)?;
        let counted = guest.refused()? - before;
        ensure!(
            counted == u64::from(!taken),
            "EFER {value:#x} was counted {counted} times"
        );
    }
    Ok(())
}

/// CR0 and CR4, each bit changed by itself. An emulated processor takes some that another would refuse, and some end the guest, whose
/// pages are not such as it wants them then: each time it is over or goes on, and can be called out.
pub(super) fn control(guest: &mut Attacker, _: u32) -> Result<()> {
    // mov cr0, rax; mov cr4, rax
    for (name, code, base) in [("CR0", [0x0f, 0x22, 0xc0], CR0), ("CR4", [0x0f, 0x22, 0xe0], CR4)] {
        for bit in 0..64 {
            let value = base ^ 1 << bit;
            let outcome = guest.tries(&code, &[(gpr::RAX, value)])?;
            let known = matches!(
                outcome,
                Outcome::WentOn | Outcome::Fault(_) | Outcome::Ended | Outcome::Called
            );
            ensure!(known, "{name} {value:#x}: {outcome:?}");
            // Bits that no processor has.
            ensure!(
                bit < 32 || outcome != Outcome::Called,
                "{name} {value:#x} was taken, and the guest hangs"
            );
            guest.expect("nothing", &[0x90], &[], Outcome::WentOn)?;
        }
    }
    Ok(())
}

/// Each bit of XCR0 alone, with x87's, and with what is usual; and a register that there is not.
pub(super) fn xcr0(guest: &mut Attacker, _: u32) -> Result<()> {
    // mov rbx, cr4; or ebx, OSXSAVE; mov cr4, rbx; xsetbv
    let set = [
        0x0f, 0x20, 0xe3, 0x81, 0xcb, 0, 0, 4, 0, 0x0f, 0x22, 0xe3, 0x0f, 0x01, 0xd1,
    ];
    let has = std::arch::x86_64::__cpuid_count(0xd, 0);
    let supported = u64::from(has.eax) | u64::from(has.edx) << 32;
    let refused = || Outcome::Fault(PROTECTION);
    let mut attempt = |value: u64, index: u64| {
        let [_, low, high] = to_msr(0, value);
        guest.tries(&set, &[(gpr::RCX, index), low, high])
    };
    for bit in 0..64 {
        let alone = 1_u64 << bit;
        if bit > 0 {
            let outcome = attempt(alone, 0)?;
            ensure!(outcome == refused(), "XCR0 {alone:#x}, without x87: {outcome:?}");
        }
        for value in [alone | 1, alone | 7] {
            let outcome = attempt(value, 0)?;
            if value & !supported != 0 {
                ensure!(outcome == refused(), "XCR0 {value:#x}: {outcome:?}");
            } else if value & 7 == 7 || value == 1 {
                ensure!(outcome == Outcome::WentOn, "XCR0 {value:#x}: {outcome:?}");
            } else {
                // A processor wants SSE with AVX, an emulated one does not.
                ensure!(
                    outcome == refused() || outcome == Outcome::WentOn,
                    "XCR0 {value:#x}: {outcome:?}"
                );
            }
        }
    }
    let nothing = attempt(0, 0)?;
    ensure!(nothing == refused(), "XCR0 without anything: {nothing:?}");
    let other = attempt(7, 1)?;
    ensure!(other == refused(), "XCR1: {other:?}");
    Ok(())
}

/// DR6 and DR7 bit by bit, those that are not there, and breakpoints of its own.
pub(super) fn debug(guest: &mut Attacker, _: u32) -> Result<()> {
    for (name, code, base) in [
        ("DR6", [0x0f, 0x23, 0xf0], 0xffff_0ff0_u64),
        ("DR7", [0x0f, 0x23, 0xf8], 0x400),
    ] {
        for bit in 0..64 {
            let value = base ^ 1 << bit;
            let wanted = if bit < 32 {
                Outcome::WentOn
            } else {
                Outcome::Fault(PROTECTION)
            };
            guest.expect(&format!("{name} {value:#x}"), &code, &[(gpr::RAX, value)], wanted)?;
        }
    }
    // mov dr4, rax: another name of DR6; with CR4.DE none.
    guest.expect("DR4", &[0x0f, 0x23, 0xe0], &[], Outcome::WentOn)?;
    let extended = [0x0f, 0x20, 0xe3, 0x83, 0xcb, 8, 0x0f, 0x22, 0xe3, 0x0f, 0x23, 0xe8];
    guest.expect("DR5 with CR4.DE", &extended, &[], Outcome::Fault(INVALID_OPCODE))?;
    // mov dr7, rax; mov rbx, dr0: with DR7.GD.
    let detected = [0x0f, 0x23, 0xf8, 0x0f, 0x21, 0xc3];
    guest.expect("DR7.GD", &detected, &[(gpr::RAX, 0x2400)], Outcome::Fault(DEBUG))?;
    // mov dr0, rbx; mov dr7, rax; nop: at the nop.
    let stops = [0x0f, 0x23, 0xc3, 0x0f, 0x23, 0xf8, 0x90];
    let registers = [(gpr::RBX, super::CODE + 6), (gpr::RAX, 0x401)];
    guest.expect("a breakpoint", &stops, &registers, Outcome::Fault(DEBUG))
}

/// Fills what is not in a vCPU's control block: XCR0, YMM0, 7 and 15, x87, DR0 to DR3, TSC_AUX.
pub(super) fn everything(guest: &mut Attacker, _: u32) -> Result<()> {
    // CR4.OSXSAVE and both of SSE; xsetbv 7; pcmpeqd xmm0, xmm0; vinsertf128; vmovups ymm7 and ymm15, ymm0; fld1; mov dr0 to dr3; mov
    // dr7; wrmsr TSC_AUX.
    let fill = [
        0x0f, 0x20, 0xe3, 0x81, 0xcb, 0, 6, 4, 0, 0x0f, 0x22, 0xe3, 0x31, 0xc9, 0x31, 0xd2, 0xb8, 7, 0, 0, 0, 0x0f,
        0x01, 0xd1, 0x66, 0x0f, 0x76, 0xc0, 0xc4, 0xe3, 0x7d, 0x18, 0xc0, 1, 0xc5, 0xfc, 0x10, 0xf8, 0xc5, 0x7c, 0x10,
        0xf8, 0xd9, 0xe8, 0x48, 0xb8, 0xa0, 0x89, 0x67, 0x45, 0x23, 1, 0, 0, 0x0f, 0x23, 0xc0, 0x0f, 0x23, 0xc8, 0x0f,
        0x23, 0xd0, 0x0f, 0x23, 0xd8, 0xb8, 0x55, 4, 0, 0, 0x0f, 0x23, 0xf8, 0xb9, 3, 1, 0, 0xc0, 0x0f, 0x30,
    ];
    guest.expect("everything in use", &fill, &[], Outcome::WentOn)?;
    let found = guest.finds()?;
    ensure!(found != CLEAN, "what was filled is empty");
    Ok(())
}

/// What a guest writes down of a CPU that is as nobody had had it: DR0 to DR3, DR6, DR7, TSC_AUX, XCR0, three YMM registers, the status of
/// x87, EFER.
const CLEAN: [u64; 22] = [
    0,
    0,
    0,
    0,
    0xffff_0ff0,
    0x400,
    0,
    1,
    0,
    0,
    0,
    0,
    0,
    0,
    0,
    0,
    0,
    0,
    0,
    0,
    0,
    LONG_MODE,
];

/// Where it does.
const FOUND: u64 = 0xe000;

impl Attacker {
    fn finds(&mut self) -> Result<[u64; 22]> {
        let look = [
            0x0f, 0x21, 0xc0, 0x48, 0x89, 0x07, 0x0f, 0x21, 0xc8, 0x48, 0x89, 0x47, 0x08, 0x0f, 0x21, 0xd0, 0x48, 0x89,
            0x47, 0x10, 0x0f, 0x21, 0xd8, 0x48, 0x89, 0x47, 0x18, 0x0f, 0x21, 0xf0, 0x48, 0x89, 0x47, 0x20, 0x0f, 0x21,
            0xf8, 0x48, 0x89, 0x47, 0x28, 0xb9, 3, 1, 0, 0xc0, 0x0f, 0x32, 0x89, 0x47, 0x30, 0x89, 0x57, 0x34, 0x0f,
            0x20, 0xe3, 0x81, 0xcb, 0, 6, 4, 0, 0x0f, 0x22, 0xe3, 0x31, 0xc9, 0x0f, 0x01, 0xd0, 0x89, 0x47, 0x38, 0x89,
            0x57, 0x3c, 0x31, 0xd2, 0xb8, 7, 0, 0, 0, 0x0f, 0x01, 0xd1, 0xc5, 0xfc, 0x11, 0x47, 0x40, 0xc5, 0xfc, 0x11,
            0x7f, 0x60, 0xc5, 0x7c, 0x11, 0xbf, 0x80, 0, 0, 0, 0xdf, 0xe0, 0x0f, 0xb7, 0xc0, 0x48, 0x89, 0x87, 0xa0, 0,
            0, 0, 0xb9, 0x80, 0, 0, 0xc0, 0x0f, 0x32, 0x89, 0x87, 0xa8, 0, 0, 0, 0x89, 0x97, 0xac, 0, 0, 0,
        ];
        self.expect("looking", &look, &[(gpr::RDI, FOUND)], Outcome::WentOn)?;
        Ok(self.memory.read_obj(MemoryRegionAddress(FOUND))?)
    }
}

/// Another guest on the CPU.
pub(super) fn next_is_clean(device: &Device) -> Result<()> {
    let (mut guest, _) = Attacker::new(device)?;
    guest.prepare(false)?;
    let found = guest.finds()?;
    ensure!(found == CLEAN, "the next guest finds {found:x?}");
    Ok(())
}
