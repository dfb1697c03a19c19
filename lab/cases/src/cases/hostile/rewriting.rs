//! A guest that writes its own code and its own page tables while it executes by them: it sees what it has written, and nobody else notices.

use anyhow::Result;
use engine::state::gpr;

use super::{Attacker, CODE, DIRECTORIES, Outcome, TABLES};

/// How often it writes.
const CODE_WRITES: u64 = 20_000;
const TABLE_WRITES: u64 = 200_000;

/// A table of pages of 4 KiB, at 1 GiB, and the pages.
const TABLE: u64 = 0x1_0000;
const THERE: u64 = 1 << 30;
const PAGES: u64 = 0x2_0000;
const PAGE: u64 = 0x1000;

/// Present, writable, user.
const RIGHTS: u64 = 7;

/// Writes an instruction by another address of its page, and executes it.
pub(super) fn code(guest: &mut Attacker, _: u32) -> Result<()> {
    // The lowest 512 GiB once more.
    let alias = 1 << 39;
    guest.write_words([(TABLES + 0x1000) | RIGHTS], TABLES + 8)?;
    // again: mov [rdi], ecx; mov cr2, rcx, which waits for the write; mov eax, what was written; cmp eax, ecx; jne bad; dec ecx; jnz
    // again; jmp good; bad: ud2; good:
    let code = [
        0x89, 0x0f, 0x0f, 0x22, 0xd1, 0xb8, 0, 0, 0, 0, 0x39, 0xc8, 0x75, 6, 0xff, 0xc9, 0x75, 0xee, 0xeb, 2, 0x0f,
        0x0b,
    ];
    let registers = [(gpr::RDI, alias + CODE + 6), (gpr::RCX, CODE_WRITES)];
    guest.patiently("code by another address", &code, &registers)
}

/// Changes where its own code is, and what is behind hundreds of addresses, with INVLPG and without.
pub(super) fn page_tables(guest: &mut Attacker, _: u32) -> Result<()> {
    // The first two MiB from 1 GiB on are by that table.
    guest.write_words([TABLE | RIGHTS], DIRECTORIES + PAGE)?;
    // Two pages of code, each adding something of its own to ebx. again: xchg r8, r9; mov [r10], r8; invlpg [r11]; add ebx, N; dec ecx; jnz
    // again; cmp ebx, r12d; je good; ud2; good: out 0x10, al; hlt
    for (page, adds) in [(PAGES, 1), (PAGES + PAGE, 0x10)] {
        let code = [
            0x4d, 0x87, 0xc8, 0x4d, 0x89, 0x02, 0x41, 0x0f, 0x01, 0x3b, 0x81, 0xc3, adds, 0, 0, 0, 0xff, 0xc9, 0x75,
            0xec, 0x44, 0x39, 0xe3, 0x74, 2, 0x0f, 0x0b, 0xe6, 0x10, 0xf4,
        ];
        guest.write(&code, page)?;
    }
    guest.write_words([PAGES | RIGHTS], TABLE)?;
    let registers = [
        (8, PAGES | RIGHTS),
        (9, (PAGES + PAGE) | RIGHTS),
        (10, TABLE),
        (11, THERE),
        (12, CODE_WRITES / 2 * 0x11),
        (gpr::RCX, CODE_WRITES),
        (gpr::RAX, THERE),
    ];
    // jmp rax
    guest.patiently("the page under its own code", &[0xff, 0xe0], &registers)?;
    // Sixteen pages that say which they are.
    for page in 0..16 {
        guest.write_words([page], PAGES + page * PAGE)?;
    }
    let registers = [(8, PAGES | RIGHTS), (9, TABLE), (10, THERE), (gpr::RCX, TABLE_WRITES)];
    // again: the entry of ecx % 512 becomes page ecx * 7 % 16; invlpg [rax]; mov ebx, [rax]; cmp ebx, edx; jne bad; dec ecx; jnz again; jmp
    // good; bad: ud2; good:
    let told = [
        0x89, 0xc8, 0x25, 0xff, 1, 0, 0, 0x6b, 0xd1, 7, 0x83, 0xe2, 0x0f, 0x89, 0xd3, 0xc1, 0xe3, 0x0c, 0x44, 0x01,
        0xc3, 0x49, 0x89, 0x1c, 0xc1, 0xc1, 0xe0, 0x0c, 0x4c, 0x01, 0xd0, 0x0f, 0x01, 0x38, 0x8b, 0x18, 0x39, 0xd3,
        0x75, 6, 0xff, 0xc9, 0x75, 0xd4, 0xeb, 2, 0x0f, 0x0b,
    ];
    guest.patiently("entries with INVLPG", &told, &registers)?;
    // The same without; what is read is any of the sixteen: cmp ebx, 16; jae bad.
    let untold = [
        0x89, 0xc8, 0x25, 0xff, 1, 0, 0, 0x6b, 0xd1, 7, 0x83, 0xe2, 0x0f, 0x89, 0xd3, 0xc1, 0xe3, 0x0c, 0x44, 0x01,
        0xc3, 0x49, 0x89, 0x1c, 0xc1, 0xc1, 0xe0, 0x0c, 0x4c, 0x01, 0xd0, 0x8b, 0x18, 0x83, 0xfb, 0x10, 0x73, 6, 0xff,
        0xc9, 0x75, 0xd6, 0xeb, 2, 0x0f, 0x0b,
    ];
    guest.patiently("entries without INVLPG", &untold, &registers)?;
    guest.expect("nothing", &[0x90], &[], Outcome::WentOn)
}
