//! Extended page tables (Intel SDM 3C, 29.3): which physical page is behind a guest-physical one, and what a guest may do with it.

use basalt_vmfunc::arch::pte;

use crate::memory::{Life, page, read, write};

/// To read.
pub(crate) const R: u64 = 1;
/// To read and write.
pub(crate) const RW: u64 = 3;
/// To read and execute.
pub(crate) const RX: u64 = 5;
/// All of it.
pub(crate) const RWX: u64 = 7;
/// Write-back memory, in an entry of the lowest level.
const WRITE_BACK: u64 = 6 << 3;

/// One guest's, or one view of one.
#[derive(Clone, Copy)]
pub(crate) struct Ept {
    pub(crate) root: u64,
    pub(crate) life: Life,
}

impl Ept {
    pub(crate) fn new(life: Life) -> Self {
        Self { root: page(life), life }
    }

    /// As the VMCS and the list have it: write-back, four levels, no accessed bits (with them every walk of the guest's tables would be
    /// a write to them).
    pub(crate) fn pointer(self) -> u64 {
        self.root | 6 | 3 << 3
    }

    fn entry(self, guest: u64, make: bool) -> Option<u64> {
        let mut table = self.root;
        for shift in [39, 30, 21] {
            let at = table + (guest >> shift & 511) * 8;
            if read(at) == 0 {
                if !make {
                    return None;
                }
                write(at, page(self.life) | RWX);
            }
            table = read(at) & pte::ADDRESS;
        }
        Some(table + (guest >> 12 & 511) * 8)
    }

    /// Puts a page behind a guest-physical one.
    pub(crate) fn map(self, guest: u64, physical: u64, rights: u64) {
        if let Some(at) = self.entry(guest, true) {
            write(at, physical | WRITE_BACK | rights);
        }
    }

    /// The page behind a guest-physical one, if there is one.
    pub(crate) fn get(self, guest: u64) -> Option<u64> {
        let entry = read(self.entry(guest, false)?);
        (entry != 0).then_some(entry & pte::ADDRESS)
    }

    /// Half a tebibyte of another's, with what will be added there.
    pub(crate) fn share(self, other: Self, guest: u64) {
        let slot = (guest >> 39 & 511) * 8;
        write(self.root + slot, read(other.root + slot));
    }
}
