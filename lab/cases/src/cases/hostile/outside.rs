//! What reaches out of a guest: to virtualization, to registers, processors, ports and memory that are not its own.

use std::thread;

use anyhow::{Result, ensure};
use base::EventFd;
use engine::MsiMessage;
use engine::state::gpr;
use vm_memory::{Bytes, MemoryRegionAddress};

use super::{
    ALONE, APIC_BASE, Attacker, COUNT, EFER, HANDLERS, ICR, INVALID_OPCODE, MEMORY, NMI, Outcome, PROTECTION, SELF_IPI,
    SPIV, TABLES, WRMSR, to_msr,
};

/// What is for whoever has guests, and what would change the CPU under others.
pub(super) fn instructions(guest: &mut Attacker, _: u32) -> Result<()> {
    let undefined = Outcome::Fault(INVALID_OPCODE);
    let refused: [(&str, &[u8]); 7] = [
        ("vmrun", &[0x0f, 0x01, 0xd8]),
        ("vmload", &[0x0f, 0x01, 0xda]),
        ("vmsave", &[0x0f, 0x01, 0xdb]),
        ("stgi", &[0x0f, 0x01, 0xdc]),
        ("clgi", &[0x0f, 0x01, 0xdd]),
        ("skinit", &[0x0f, 0x01, 0xde]),
        ("invlpga", &[0x0f, 0x01, 0xdf]),
    ];
    for (name, code) in refused {
        let before = guest.refused()?;
        guest.expect(name, code, &[], Outcome::Fault(INVALID_OPCODE))?;
        ensure!(guest.refused()? == before + 1, "{name} was not counted");
    }
    guest.expect("rdpmc", &[0x0f, 0x33], &[], Outcome::Fault(PROTECTION))?;
    guest.expect("rsm", &[0x0f, 0xaa], &[], undefined)?;
    for (name, code) in [
        ("wbinvd", &[0x0f, 0x09][..]),
        ("invd", &[0x0f, 0x08]),
        ("vmmcall", &[0x0f, 0x01, 0xd9]),
    ] {
        guest.expect(name, code, &[], Outcome::WentOn)?;
    }
    // mov cr4, rax with what there is not: a processor refuses that, an emulated one not before it enters the guest again.
    let outcome = guest.tries(&[0x0f, 0x22, 0xe0], &[(gpr::RAX, 1 << 40)])?;
    ensure!(
        matches!(outcome, Outcome::Fault(PROTECTION) | Outcome::Ended),
        "cr4: {outcome:?}"
    );
    // lidt of nothing, and a fault.
    guest.write(&[0; 10], 0xe000)?;
    let triple = [0x0f, 0x01, 0x1c, 0x25, 0, 0xe0, 0, 0, 0x0f, 0x0b];
    guest.expect("a triple fault", &triple, &[], Outcome::Ended)?;
    // cli; hlt; jmp: what called it before may come late.
    guest.expect("cli; hlt", &[0xfa, 0xf4, 0xeb, 0xfd], &[], Outcome::Called)?;
    guest.expect("a loop with interrupts off", &[0xfa, 0xeb, 0xfe], &[], Outcome::Called)
}

/// Reads and writes all that there could be.
pub(super) fn registers(guest: &mut Attacker, _: u32) -> Result<()> {
    let refused = Outcome::Fault(PROTECTION);
    guest.expect("EFER.SVME", &WRMSR, &to_msr(EFER, 0x1500), refused)?;
    for (what, value) in [
        ("off", 0xfee0_0000),
        ("in the other mode", 0xfee0_0900),
        ("elsewhere", 0xd000_0d00),
    ] {
        let what = format!("an APIC that is {what}");
        guest.expect(&what, &WRMSR, &to_msr(APIC_BASE, value), Outcome::Fault(PROTECTION))?;
    }
    // VM_CR, VM_HSAVE_PA, PRED_CMD, the microcode's loader, the host's syscfg.
    for index in [0xc001_0114, 0xc001_0117, 0x49, 0xc001_0020, 0xc001_0061] {
        guest.expect(
            &format!("{index:#x}"),
            &WRMSR,
            &to_msr(index, 1),
            Outcome::Fault(PROTECTION),
        )?;
    }
    guest.prepare(true)?;
    let before = guest.refused()?;
    // rdmsr; inc ecx; cmp ecx, r8d; jne
    let read_all = [0x0f, 0x32, 0xff, 0xc1, 0x44, 0x39, 0xc1, 0x75, 0xf7];
    for (from, to) in [
        (0, 0x2000),
        (0x4000_0000, 0x4000_0100),
        (0xc000_0000, 0xc000_0400),
        (0xc001_0000, 0xc001_2000),
    ] {
        let range = format!("reading {from:#x} to {to:#x}");
        guest.patiently(&range, &read_all, &[(gpr::RCX, from), (8, to)])?;
    }
    ensure!(
        guest.refused()? > before + 0x3000,
        "registers that are not there were not refused"
    );
    // mov eax, r9d; mov edx, r9d; wrmsr; inc ecx; cmp ecx, r8d; jne
    let write_all = [
        0x44, 0x89, 0xc8, 0x44, 0x89, 0xca, 0x0f, 0x30, 0xff, 0xc1, 0x44, 0x39, 0xc1, 0x75, 0xf1,
    ];
    for value in [0, u64::from(u32::MAX)] {
        // But for the pages of the clock.
        for (from, to) in [
            (0x10, 0x800),
            (0x840, 0x1000),
            (0xc000_0080, 0xc000_0200),
            (0xc001_0000, 0xc001_0200),
        ] {
            let range = format!("writing {value:#x} to {from:#x} to {to:#x}");
            guest.patiently(&range, &write_all, &[(gpr::RCX, from), (8, to), (9, value)])?;
        }
    }
    guest.prepare(false)
}

/// Every kind of interrupt to everybody, the host's CPU above all.
pub(super) fn interrupts(guest: &mut Attacker, own: u32) -> Result<()> {
    // wrmsr; inc edx; cmp edx, r8d; jne
    let to_all = [0x0f, 0x30, 0xff, 0xc2, 0x44, 0x39, 0xc2, 0x75, 0xf7];
    let own = u64::from(own);
    // Fixed, lowest priority, SMI, one that there is not, NMI, INIT, startup, external; with a vector, and physical or logical.
    for mode in 0..8 {
        for logical in [0, 1 << 11] {
            for (from, to) in [(0, own), (own + 1, 0x200), (0xffff_ff00, 0xffff_ffff)] {
                // Logically it would name itself.
                if from == to || (logical != 0 && from < 0x200) {
                    continue;
                }
                let low = mode << 8 | logical | 0xd1;
                let what = format!("{low:#x} to {from:#x} up to {to:#x}");
                guest.patiently(
                    &what,
                    &to_all,
                    &[(gpr::RCX, ICR), (gpr::RAX, low), (gpr::RDX, from), (8, to)],
                )?;
            }
        }
    }
    let before = guest.refused()?;
    // To all but itself, in every mode; SMIs and what there is not to itself as well.
    for mode in 0..8_u64 {
        let low = 3 << 18 | mode << 8 | 0xd1;
        guest.expect(
            &format!("{low:#x}"),
            &WRMSR,
            &[(gpr::RCX, ICR), (gpr::RAX, low)],
            Outcome::WentOn,
        )?;
    }
    for mode in [2, 3, 7_u64] {
        let low = 1 << 18 | mode << 8 | 0xd1;
        guest.expect(
            &format!("{low:#x}"),
            &WRMSR,
            &[(gpr::RCX, ICR), (gpr::RAX, low)],
            Outcome::WentOn,
        )?;
    }
    ensure!(guest.refused()? >= before + 11, "not all of it was counted");
    // An NMI to itself is its own, whether by its id or among all.
    for low in [own << 32 | 0x400, 1 << 18 | 0x400, 2 << 18 | 0x400] {
        let registers = [(gpr::RCX, ICR), (gpr::RAX, low & 0xffff_ffff), (gpr::RDX, low >> 32)];
        guest.expect(&format!("an NMI by {low:#x}"), &WRMSR, &registers, Outcome::Fault(NMI))?;
    }
    // Vectors that are none.
    guest.expect("vector 3", &WRMSR, &[(gpr::RCX, ICR), (gpr::RAX, 3)], Outcome::WentOn)?;
    // INIT to itself resets its machine.
    let registers = [(gpr::RCX, ICR), (gpr::RAX, 1 << 18 | 0x500)];
    guest.expect("INIT to itself", &WRMSR, &registers, Outcome::Ended)
}

/// All of them come out, whatever is behind them on this host.
pub(super) fn ports(guest: &mut Attacker, _: u32) -> Result<()> {
    // in al, dx; inc dx; cmp edx, r8d; jne
    let read_all = [0xec, 0x66, 0xff, 0xc2, 0x44, 0x39, 0xc2, 0x75, 0xf7];
    for (from, to) in [(0, 0x1000), (0xff00, 0xffff)] {
        let what = format!("ports from {from:#x} to {to:#x}");
        guest.patiently(&what, &read_all, &[(gpr::RDX, from), (8, to)])?;
        let all = (from..to).all(|port| u16::try_from(port).is_ok_and(|port| guest.ports.contains(&port)));
        ensure!(all, "{what}: some did not come out");
    }
    // The host's reset, by its keyboard controller and by its chipset: out dx, al.
    for (port, value) in [(0x64_u16, 0xfe), (0xcf9, 0x06), (0x604, 0x34)] {
        guest.ports.clear();
        let registers = [(gpr::RDX, port.into()), (gpr::RAX, value)];
        guest.expect(&format!("port {port:#x}"), &[0xee], &registers, Outcome::WentOn)?;
        ensure!(guest.ports.contains(&port), "port {port:#x} did not come out");
    }
    // rep insb is for nobody here.
    guest.expect(
        "rep insb",
        &[0xf3, 0x6c],
        &[(gpr::RCX, 4), (gpr::RDI, 0xe000)],
        Outcome::Ended,
    )
}

/// What is not its own is not there.
pub(super) fn memory(guest: &mut Attacker, _: u32) -> Result<()> {
    // mov al, [rdi]; mov [rdi], al. The host's memory, its I/O APIC, its local APIC, the end.
    for address in [MEMORY as u64, 0x1000_0000, 0xfec0_0000, 0xfee0_0300, 0xffff_fff0] {
        for (what, code) in [("read", [0x8a, 0x07]), ("written", [0x88, 0x07])] {
            let what = format!("{address:#x} {what}");
            guest.expect(&what, &code, &[(gpr::RDI, address)], Outcome::Outside(address))?;
        }
    }
    // Page tables that point outside, and to themselves; where its code is they stay.
    guest.write_words([MEMORY as u64 | 7], TABLES + 0x1000 + 8)?;
    let outside = guest.tries(&[0x8a, 0x07], &[(gpr::RDI, 1 << 30)])?;
    ensure!(
        matches!(outside, Outcome::Ended | Outcome::Outside(_) | Outcome::Fault(_)),
        "tables outside of its memory: {outside:?}"
    );
    guest.prepare(false)?;
    guest.write_words([(TABLES + 0x1000) | 7], TABLES + 8)?;
    // mov rax, [rdi] through a directory that is its own page.
    let itself = guest.tries(&[0x48, 0x8b, 0x07], &[(gpr::RDI, 1 << 39)])?;
    ensure!(
        matches!(itself, Outcome::WentOn | Outcome::Fault(_) | Outcome::Outside(_)),
        "tables that are their own pages: {itself:?}"
    );
    Ok(())
}

/// It cannot be kept from being called out, nor keep others from anything.
pub(super) fn storms(guest: &mut Attacker, own: u32) -> Result<()> {
    // wrmsr; dec r8d; jne: commands to a CPU of the host's, by the id that it has there.
    let other = (gpr::RDX, u64::from(own) + 2);
    let flood = [0x0f, 0x30, 0x41, 0xff, 0xc8, 0x75, 0xf9];
    let registers = [(gpr::RCX, ICR), (gpr::RAX, 0xd1), other, (8, 200_000)];
    guest.patiently("a flood of interrupts to others", &flood, &registers)?;
    let nmis = [(gpr::RCX, ICR), (gpr::RAX, 0x4d1), other, (8, 2000)];
    guest.patiently("a flood of NMIs to others", &flood, &nmis)?;
    // mov eax, 0x1ff; wrmsr; mov ecx, ebx; mov eax, 0x50; wrmsr; sti; hlt; jmp: the APIC is switched on, and its handler sends itself the
    // next interrupt.
    let storm = [
        0xb8, 0xff, 1, 0, 0, 0x0f, 0x30, 0x89, 0xd9, 0xb8, 0x50, 0, 0, 0, 0x0f, 0x30, 0xfb, 0xf4, 0xeb, 0xfd,
    ];
    guest.write(&[0; 4], COUNT)?;
    let registers = [(gpr::RCX, SPIV), (gpr::RBX, SELF_IPI)];
    guest.expect("a storm of its own", &storm, &registers, Outcome::Called)?;
    let count: u32 = guest.memory.read_obj(MemoryRegionAddress(COUNT))?;
    ensure!(count > 100, "a storm of {count} interrupts is none");
    log::info!("a storm of {count} interrupts in {ALONE:?}");
    Ok(())
}

/// A device of the host's interrupts it by events: each is one interrupt, and none while nobody has said where it goes.
pub(super) fn events(guest: &mut Attacker, own: u32) -> Result<()> {
    // The handler counts and ends the interrupt, no more; mov eax, 0x1ff; wrmsr; sti; hlt; jmp.
    guest.write(&[0x48, 0xcf], HANDLERS + 32 * 32 + 18)?;
    let waits = [0xb8, 0xff, 1, 0, 0, 0x0f, 0x30, 0xfb, 0xf4, 0xeb, 0xfd];
    let (interrupt, event) = (guest.vm.create_interrupt(), EventFd::new()?);
    interrupt.attach(event.try_clone()?)?;
    ensure!(interrupt.attach(event.try_clone()?).is_err(), "it took two events");
    event.signal();
    ensure!(interrupt.is_pending(), "what nobody has taken does not wait");
    let address = 0xfee0_0000 | u64::from(own) << 12;
    let device = thread::spawn(move || {
        thread::sleep(ALONE / 3);
        // Vectors of exceptions are none for devices, and the event waits on.
        interrupt.route(Some(MsiMessage { address, data: 3 }));
        let waits = interrupt.is_pending();
        interrupt.route(Some(MsiMessage { address, data: 0x51 }));
        let taken = !interrupt.is_pending();
        thread::sleep(ALONE / 10);
        event.signal();
        interrupt.route(None);
        event.signal();
        waits && taken && interrupt.is_pending()
    });
    guest.expect("waiting for events", &waits, &[(gpr::RCX, SPIV)], Outcome::Called)?;
    ensure!(device.join().is_ok_and(|as_told| as_told), "an event was lost");
    let count: u32 = guest.memory.read_obj(MemoryRegionAddress(COUNT))?;
    ensure!(count == 2, "two events were {count} interrupts");
    Ok(())
}
