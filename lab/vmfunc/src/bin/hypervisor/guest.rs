//! A guest's memory: what is behind it, its own page tables, and its programs, put there before it runs.
//!
//! It knows ELF and x86-64 page tables, and no virtual processor.

use basalt_vmfunc::abi::{Boot, PAGE};
use basalt_vmfunc::arch::pte;

use crate::ept::{Ept, R, RWX};
use crate::memory::{Life, copy, page, read, write};

/// A range of guest-physical memory, given out from its beginning, and the page tables that are made in it.
pub(crate) struct Space {
    pub(crate) ept: Ept,
    /// The guest-physical address of the top-level page table.
    pub(crate) root: u64,
    /// What has been given out ends here.
    pub(crate) next: u64,
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// What the guest may do with the tables.
    pub(crate) tables: u64,
}

impl Space {
    /// A guest-physical page, with nothing behind it yet.
    pub(crate) fn take(&mut self) -> u64 {
        assert!(self.next < self.end, "the guest's memory is used up");
        self.next += PAGE;
        self.next - PAGE
    }

    /// A guest-physical page and the page behind it.
    pub(crate) fn take_backed(&mut self, rights: u64) -> (u64, u64) {
        let (guest, physical) = (self.take(), page(self.ept.life));
        self.ept.map(guest, physical, rights);
        (guest, physical)
    }

    /// A guest-physical page with a certain page behind it.
    pub(crate) fn take_for(&mut self, physical: u64, rights: u64) -> u64 {
        let guest = self.take();
        self.ept.map(guest, physical, rights);
        guest
    }

    /// Where the entry of the lowest page table for an address is in physical memory.
    fn entry(&mut self, address: u64) -> u64 {
        let mut table = self.ept.get(self.root).expect("the top-level table has a page");
        for shift in [39, 30, 21] {
            let at = table + (address >> shift & 511) * 8;
            if read(at) & pte::P == 0 {
                let (guest, _) = self.take_backed(self.tables);
                write(at, guest | pte::P | pte::W | pte::U | pte::AD);
            }
            table = self
                .ept
                .get(read(at) & pte::ADDRESS)
                .expect("a table that was made here");
        }
        table + (address >> 12 & 511) * 8
    }

    /// Has the guest's own tables map a page.
    pub(crate) fn map(&mut self, address: u64, guest: u64, flags: u64) {
        let at = self.entry(address);
        write(at, guest | flags | pte::P | pte::AD);
    }

    /// The guest-physical page of an address, by the guest's own tables.
    pub(crate) fn translate(&self, address: u64) -> Option<u64> {
        let mut table = self.root;
        for shift in [39, 30, 21, 12] {
            let entry = read(self.ept.get(table & pte::ADDRESS)? + (address >> shift & 511) * 8);
            if entry & pte::P == 0 {
                return None;
            }
            table = entry;
        }
        Some(table & pte::ADDRESS)
    }

    /// Whether an address is mapped not to be executed.
    pub(crate) fn is_data(&mut self, address: u64) -> bool {
        let at = self.entry(address);
        read(at) & pte::NX != 0
    }

    /// The physical page of an address.
    pub(crate) fn physical(&self, address: u64) -> Option<u64> {
        self.ept.get(self.translate(address)?)
    }
}

/// What differs between guests.
pub(crate) struct Layout {
    pub(crate) life: Life,
    /// Guest-physical memory.
    pub(crate) memory: u64,
    pub(crate) bytes: u64,
    /// Guest-physical addresses behind the memory, of which the kernel's view of all memory has room.
    pub(crate) behind: u64,
    /// Where the kernel has all memory.
    pub(crate) direct: u64,
    /// The end of the program's stack.
    pub(crate) stack: u64,
}

/// Where a guest begins: the kernel's first instruction, what it is told, and the top-level table.
pub(crate) struct Start {
    pub(crate) rip: u64,
    pub(crate) boot: u64,
    pub(crate) root: u64,
}

const STACK_PAGES: u64 = 8;

/// A guest with a kernel and a program.
pub(crate) fn make(layout: &Layout, kernel: &[u8], program: &[u8], argument: u64) -> (Space, Start) {
    let mut space = Space {
        ept: Ept::new(layout.life),
        root: 0,
        next: layout.memory,
        start: layout.memory,
        end: layout.memory + layout.bytes,
        tables: RWX,
    };
    space.root = space.take_backed(RWX).0;
    for at in (0..layout.bytes + layout.behind).step_by(PAGE as usize) {
        space.map(layout.direct + at, layout.memory + at, pte::W | pte::NX);
    }
    let rip = load(&mut space, kernel, 0);
    let entry = load(&mut space, program, pte::U);
    for at in 1..=STACK_PAGES {
        let page = space.take();
        space.map(layout.stack - at * PAGE, page, pte::W | pte::U | pte::NX);
    }
    let (boot, physical) = space.take_backed(RWX);
    let told = Boot {
        entry,
        // As behind a CALL.
        stack: layout.stack - 16,
        argument,
        direct: layout.direct,
        memory: layout.memory,
        root: space.root,
    };
    let words: [u64; 6] = [
        told.entry,
        told.stack,
        told.argument,
        told.direct,
        told.memory,
        told.root,
    ];
    for (at, word) in (0u64..).zip(words) {
        write(physical + at * 8, word);
    }
    let start = Start {
        rip,
        boot: layout.direct + boot - layout.memory,
        root: space.root,
    };
    (space, start)
}

/// Puts an ELF program's segments where it wants them; its entry. The programs are this tree's own and are part of the image.
fn load(space: &mut Space, file: &[u8], user: u64) -> u64 {
    let word = |at: usize| u64::from_le_bytes(file[at..at + 8].try_into().expect("eight bytes"));
    let half = |at: usize| u16::from_le_bytes([file[at], file[at + 1]]) as usize;
    assert!(file.starts_with(b"\x7fELF"));
    for header in 0..half(56) {
        let at = word(32) as usize + header * half(54);
        let (kind, flags) = (word(at) & 0xffff_ffff, word(at) >> 32);
        if kind != 1 {
            continue;
        }
        let (offset, start, in_file, in_memory) = (word(at + 8), word(at + 16), word(at + 32), word(at + 40));
        let mut page = start & !(PAGE - 1);
        while page < start + in_memory {
            let (guest, physical) = space.take_backed(RWX);
            let (from, to) = (page.max(start), (page + PAGE).min(start + in_file));
            if from < to {
                let bytes = &file[(offset + from - start) as usize..(offset + to - start) as usize];
                let mut whole = [0u8; PAGE as usize];
                whole[(from - page) as usize..][..bytes.len()].copy_from_slice(bytes);
                copy(physical, &whole);
            }
            let write = if flags & 2 != 0 { pte::W } else { 0 };
            let execute = if flags & 1 != 0 { 0 } else { pte::NX };
            space.map(page, guest, write | execute | user);
            page += PAGE;
        }
    }
    word(24)
}

/// Rights of pages that only the hypervisor writes.
pub(crate) const READ_ONLY: u64 = R;
