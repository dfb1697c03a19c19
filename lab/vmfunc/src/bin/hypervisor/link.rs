//! A client's way into the server: what is mapped where in both, and what has to be true of the client's processor as long as entry 1 of its
//! list is the server.
//!
//! ```text
//!                        client's EPT (entry 0)              server's view (entry 1), one for each link
//!   guest-physical
//!     client's CR3       its top-level table, read-only      the server's top-level table, with what is below added     step 1
//!   address
//!     client's LSTAR     its kernel's entry                  a stub that jumps to the server kernel's entry             step 2
//!     client's GDTR,     its descriptor tables               the server's
//!     IDTR, TR
//!     GATE               trampoline, read and execute        the same page                                              step 3
//!     TABLE              handlers, read-only                 the same page                                              step 6
//!     LINK               pages of the client's own           pages of the server's own: FS and GS bases ...             step 4
//!     STACK              pages of the client's own           pages of the server's own                                  step 3
//!     WINDOW             shared pages                        the same pages
//!     all else           the client                          the server, and nothing of the client's
//! ```
//!
//! VMFUNC with entry 1 (step 5) changes the EPT and no register. So the instruction behind it is the server's at the same address, and there is
//! none but in the gate's slot and in the page of LSTAR: the slots of the server's program and kernel have to be empty in the client.
//! What would make that untrue (another page table, a new entry in the top-level one, descriptor tables, CR0, CR4, EFER, debug registers,
//! MSRs of SYSCALL) first closes the link: entry 1 becomes 0, and the client does what it wants, without further exits. VMFUNC with entry 1
//! then exits, and if all conditions hold, opens it again.

use basalt_vmfunc::abi::{self, PAGE};
use basalt_vmfunc::arch::{FMASK, MSR_FMASK, MSR_LSTAR, MSR_STAR, STAR, pte};
use basalt_vmfunc::cpu::rdmsr;

use crate::ept::{Ept, R, RW, RWX, RX};
use crate::gate;
use crate::guest::{READ_ONLY, Space};
use crate::memory::{Life, copy, page, read, write};
use crate::vmcs::{self, DESCRIPTOR_TABLES, cr4, field, get, primary, set};

/// The frozen server.
pub(crate) struct Server {
    pub(crate) space: Space,
    pub(crate) count: u64,
    pub(crate) fs: u64,
    pub(crate) gs: u64,
    /// Its GDTR, IDTR and TR bases.
    pub(crate) tables: [u64; 3],
    /// The page of its handlers' addresses, which links map.
    pub(crate) table: u64,
    /// The trampoline, which links map.
    pub(crate) gate: u64,
}

impl Server {
    /// What a frozen server leaves: its handlers go into a page of the hypervisor's.
    pub(crate) fn freeze(space: Space, handlers: u64, count: u64) -> Self {
        let (table, gate) = (page(Life::Machine), page(Life::Machine));
        copy(gate, gate::code());
        for at in 0..count {
            let from = handlers + at * 8;
            let physical = space.physical(from).expect("the server's table is mapped");
            write(table + at * 8, read(physical + from % PAGE));
        }
        let tables = [field::GDTR_BASE, field::IDTR_BASE, field::TR_BASE].map(get);
        Self {
            space,
            count,
            fs: get(field::FS_BASE),
            gs: get(field::GS_BASE),
            tables,
            table,
            gate,
        }
    }
}

/// A link, which is closed at first.
pub(crate) struct Link {
    pub(crate) view: Ept,
    pub(crate) open: bool,
    /// The client's top-level table.
    root: u64,
    list: u64,
    msr_bitmaps: [u64; 2],
    lstar: u64,
    tables: [u64; 3],
    /// The server's link page.
    pub(crate) page: u64,
}

/// The MSRs that guests have: FS and GS bases, and the one that SWAPGS exchanges; then those that a client changes only while its link is
/// closed: EFER, STAR, LSTAR, CSTAR, FMASK. All others end the guest.
const MSRS: [u32; 8] = [
    0xc000_0100,
    0xc000_0101,
    0xc000_0102,
    0xc000_0080,
    MSR_STAR,
    MSR_LSTAR,
    0xc000_0083,
    MSR_FMASK,
];
const BASES: usize = 3;

/// A bitmap of MSRs (SDM 3C, 25.6.9) by which a guest reads all of these, and writes all or, with an open link, the bases alone.
pub(crate) fn msr_bitmap(open: bool) -> u64 {
    let physical = page(Life::Client);
    copy(physical, &[0xff; PAGE as usize]);
    for (at, msr) in MSRS.into_iter().enumerate() {
        let bit = u64::from(msr & 0x1fff);
        // Of high MSRs: reads at 1024, writes at 3072.
        for start in [1024, 3072] {
            if start == 1024 || at < BASES || !open {
                let word = physical + start + bit / 64 * 8;
                write(word, read(word) & !(1 << (bit % 64)));
            }
        }
    }
    physical
}

/// Where the stub finds the address to jump to: before the entry. Read as code, these bytes are INT3, FF FF (which is no instruction) and a DEC of a
/// register, wherever one begins.
const POINTER_BEFORE: u64 = 46;

impl Link {
    /// Makes the mappings of the current VMCS's client, which has asked for it by its kernel.
    pub(crate) fn make(client: &mut Space, server: &Server, list: u64, closed_msrs: u64) -> Result<Self, &'static str> {
        let (lstar, root) = (rdmsr(MSR_LSTAR), get(field::CR3));
        let tables = [field::GDTR_BASE, field::IDTR_BASE, field::TR_BASE].map(get);
        check_addresses(client, lstar, root, tables)?;
        let top = client.ept.get(root).ok_or("the top-level page table has no memory")?;
        if read(top + abi::GATE_SLOT as u64 * 8) != 0 {
            return Err("the slot of the gate is in use");
        }
        let view = Ept::new(Life::Client);
        view.share(server.space.ept, server.space.start);
        let mut ours = Space {
            ept: client.ept,
            root,
            next: client.end,
            start: client.end,
            end: client.end + (1 << 20),
            tables: READ_ONLY,
        };
        let copy_of_root = page(Life::Client);
        let of_server = server
            .space
            .ept
            .get(server.space.root)
            .ok_or("the server has no page table")?;
        for slot in 0..512 {
            let entry = read(of_server + slot * 8);
            if entry != 0 && ![abi::SERVER_SLOT, abi::SERVER_KERNEL_SLOT].contains(&(slot as usize)) {
                return Err("the server uses other slots than its own");
            }
            write(copy_of_root + slot * 8, entry);
        }
        view.map(root, copy_of_root, R);
        let mut theirs = Space {
            ept: view,
            root,
            ..ours
        };
        theirs.next = client.end;
        let link_page = gate_pages(&mut ours, &mut theirs, server);
        let stub = theirs.take_for(entry_page(lstar), RX);
        theirs.map(lstar & !(PAGE - 1), stub, 0);
        for (client_base, server_base) in tables.into_iter().zip(server.tables) {
            let guest = server
                .space
                .translate(server_base)
                .ok_or("the server has no descriptor tables")?;
            theirs.map(client_base, guest, pte::NX);
        }
        Ok(Self {
            view,
            open: false,
            root,
            list,
            msr_bitmaps: [closed_msrs, msr_bitmap(true)],
            lstar,
            tables,
            page: link_page,
        })
    }

    /// Whether the processor is in the server's view.
    pub(crate) fn in_server(&self) -> bool {
        get(field::EPT_POINTER) == self.view.pointer()
    }

    /// Entry 1 becomes the server, if everything is as it has to be.
    pub(crate) fn open(&mut self, client: &Space) -> Result<(), &'static str> {
        self.check(client)?;
        self.guard(client, true);
        Ok(())
    }

    /// Entry 1 becomes 0, and the client may change everything.
    pub(crate) fn close(&mut self, client: &Space) {
        self.guard(client, false);
    }

    fn guard(&mut self, client: &Space, open: bool) {
        self.open = open;
        write(self.list + 8, if open { self.view.pointer() } else { 0 });
        vmcs::flip(field::PRIMARY, primary::CR3_LOAD | primary::DEBUG_REGISTERS, open);
        vmcs::flip(field::SECONDARY, DESCRIPTOR_TABLES, open);
        set(field::MSR_BITMAP, self.msr_bitmaps[usize::from(open)]);
        // Every bit, or the one that the guest never has.
        let (cr0, cr4) = (get(field::CR0), get(field::CR4));
        set(field::CR0_SHADOW, cr0);
        set(field::CR4_SHADOW, cr4 & !cr4::VMXE);
        set(field::CR0_MASK, if open { !8 } else { 1 << 5 });
        set(field::CR4_MASK, if open { u64::MAX } else { cr4::VMXE });
        let top = client.ept.get(self.root).expect("was there when the link was made");
        client.ept.map(self.root, top, if open { R } else { RWX });
        vmcs::forget();
    }

    fn check(&self, client: &Space) -> Result<(), &'static str> {
        let wanted = |condition: bool, otherwise: &'static str| if condition { Ok(()) } else { Err(otherwise) };
        wanted(get(field::CR3) == self.root, "another page table")?;
        let on = cr4::PAE | cr4::FSGSBASE | cr4::SMEP | cr4::SMAP;
        let bits = get(field::CR4) & (on | cr4::LA57 | cr4::PCIDE);
        wanted(bits == on, "CR4 without SMEP, SMAP or FSGSBASE, or with PCIDE or LA57")?;
        wanted(
            get(field::CR0) & 0x8001_0001 == 0x8001_0001,
            "CR0 without paging or write protection",
        )?;
        wanted(
            get(field::GUEST_EFER) & 0xd01 == 0xd01,
            "EFER without SCE, LME, LMA or NXE",
        )?;
        wanted(rdmsr(MSR_LSTAR) == self.lstar, "another LSTAR")?;
        wanted(rdmsr(MSR_STAR) == STAR, "another STAR")?;
        wanted(rdmsr(MSR_FMASK) & FMASK == FMASK, "an FMASK that leaves flags")?;
        let tables = [field::GDTR_BASE, field::IDTR_BASE, field::TR_BASE].map(get);
        wanted(tables == self.tables, "other descriptor tables")?;
        let limits = [field::GDTR_LIMIT, field::IDTR_LIMIT, field::TR_LIMIT].map(get);
        wanted(
            limits == [63, 65 * 16 - 1, 0x67],
            "descriptor tables of another length than the server's",
        )?;
        wanted(get(field::LDTR_RIGHTS) & 0x1_0000 != 0, "a local descriptor table")?;
        wanted(get(field::DR7) & 0xff == 0, "breakpoints")?;
        wanted(get(field::GUEST_DEBUGCTL) == 0, "a DEBUGCTL that is not 0")?;
        let top = client
            .ept
            .get(self.root)
            .ok_or("the top-level page table has no memory")?;
        let slots = [abi::SERVER_SLOT, abi::SERVER_KERNEL_SLOT];
        wanted(
            slots.iter().all(|slot| read(top + *slot as u64 * 8) == 0),
            "the server's slots are in use",
        )?;
        let gate = read(top + abi::GATE_SLOT as u64 * 8) & pte::ADDRESS;
        wanted(gate == client.end, "the gate's slot has been changed")
    }
}

/// What a link needs of the places that the client's kernel has chosen.
fn check_addresses(client: &Space, lstar: u64, root: u64, tables: [u64; 3]) -> Result<(), &'static str> {
    let taken = [abi::GATE_SLOT, abi::SERVER_SLOT, abi::SERVER_KERNEL_SLOT];
    let slot = |address: u64| (address >> 39 & 511) as usize;
    if !root.is_multiple_of(PAGE) || !(client.start..client.end).contains(&root) {
        return Err("CR3 is no page of the guest's memory");
    }
    let mut places = [lstar & !(PAGE - 1), tables[0], tables[1], tables[2]];
    if places
        .iter()
        .any(|place| !place.is_multiple_of(PAGE) || taken.contains(&slot(*place)) || place >> 63 == 0)
    {
        return Err("LSTAR or a descriptor table is where the server is, or does not begin a page of the kernel's");
    }
    places.sort_unstable();
    if places.windows(2).any(|two| two[0] == two[1]) {
        return Err("LSTAR and the descriptor tables share a page");
    }
    if !(POINTER_BEFORE..PAGE - 6).contains(&(lstar % PAGE)) {
        return Err("LSTAR is too near to its page's beginning or end");
    }
    Ok(())
}

/// The gate's pages in both; the server's link page.
fn gate_pages(ours: &mut Space, theirs: &mut Space, server: &Server) -> u64 {
    // The first table of either is the first page of its range: `check` knows it.
    for (address, physical, rights, flags) in [
        (abi::GATE, server.gate, RX, pte::U),
        (abi::TABLE, server.table, R, pte::U | pte::NX),
    ] {
        for side in [&mut *ours, &mut *theirs] {
            reserve(side, address);
            let guest = side.take_for(physical, rights);
            side.map(address, guest, flags);
        }
    }
    let own = pte::U | pte::W | pte::NX;
    for at in 0..abi::STACK_PAGES {
        for side in [&mut *ours, &mut *theirs] {
            let guest = side.take_backed(RW).0;
            side.map(abi::STACK + at * PAGE, guest, own);
        }
    }
    for at in 0..abi::WINDOW_PAGES {
        let shared = page(Life::Client);
        for side in [&mut *ours, &mut *theirs] {
            let guest = side.take_for(shared, RW);
            side.map(abi::WINDOW + at * PAGE, guest, own);
        }
    }
    let guest = ours.take_backed(RW).0;
    ours.map(abi::LINK, guest, own);
    let (guest, physical) = theirs.take_backed(RW);
    theirs.map(abi::LINK, guest, own);
    for (at, word) in (0u64..).zip([1, 0, 0, 0, server.count, server.fs, server.gs]) {
        write(physical + at * 8, word);
    }
    physical
}

/// Has the tables of an address before its page, so that they come first.
fn reserve(side: &mut Space, address: u64) {
    side.map(address, 0, 0);
}

/// The page at the client's LSTAR in the server's view: JMP [RIP - 52] to the server kernel's entry, and INT3.
///
/// A client in ring 0 can run VMFUNC in its own page at this address and so begin anywhere in it. The bytes (displacement 0xffffffcc, and
/// the address 0xffff9acccccccccc) have no beginning from which anything but INT3, an undefined instruction, a change of EAX or ESP, or the jump
/// itself is run; the entry that the jump leads to knows whether a call is being served. The scenario `system-call-entry-in-ring-0` tries all.
fn entry_page(lstar: u64) -> u64 {
    let physical = page(Life::Client);
    let mut bytes = [0xcc; PAGE as usize];
    let at = (lstar % PAGE) as usize;
    bytes[at..at + 6].copy_from_slice(&[0xff, 0x25, 0xcc, 0xff, 0xff, 0xff]);
    let pointer = at - POINTER_BEFORE as usize;
    bytes[pointer..pointer + 8].copy_from_slice(&abi::SERVER_ENTRY.to_le_bytes());
    copy(physical, &bytes);
    physical
}
