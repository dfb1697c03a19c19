//! The machine's memory, and the pages that are given out of it. Everything is mapped at its physical address.
//!
//! Pages of clients come from below and are all given back when a client ends; what lives longer comes from above.

use core::ptr::addr_of_mut;

use basalt_vmfunc::abi::PAGE;

/// Behind the hypervisor's image, which ends far below.
const LOW: u64 = 4 << 20;
/// The end of what the emulated machine has (xtask/src/steps/vmfunc.rs).
const HIGH: u64 = 64 << 20;

struct Pages {
    low: u64,
    high: u64,
}

static mut PAGES: Pages = Pages { low: LOW, high: HIGH };

/// How long a page is needed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Life {
    /// As long as the client.
    Client,
    /// As long as the machine runs.
    Machine,
}

/// A page of zeros; its physical address.
pub(crate) fn page(life: Life) -> u64 {
    // SAFETY: one processor, and no interrupt in the hypervisor; the page is nobody else's.
    unsafe {
        let pages = &mut *addr_of_mut!(PAGES);
        assert!(pages.low < pages.high, "the machine's memory is used up");
        let page = match life {
            Life::Client => {
                pages.low += PAGE;
                pages.low - PAGE
            }
            Life::Machine => {
                pages.high -= PAGE;
                pages.high
            }
        };
        (page as *mut u8).write_bytes(0, PAGE as usize);
        page
    }
}

/// All pages of the client's are free.
pub(crate) fn client_ends() {
    // SAFETY: as above; the caller has dropped what pointed there.
    unsafe { (*addr_of_mut!(PAGES)).low = LOW };
}

/// A word of physical memory.
pub(crate) fn read(physical: u64) -> u64 {
    assert!(physical < HIGH);
    // SAFETY: memory that exists; guests change theirs only while they run.
    unsafe { (physical as *const u64).read_volatile() }
}

/// As above.
pub(crate) fn write(physical: u64, value: u64) {
    assert!((LOW..HIGH).contains(&physical), "not a page that was given out");
    // SAFETY: as above, and not the hypervisor's own.
    unsafe { (physical as *mut u64).write_volatile(value) };
}

/// Bytes into a page.
pub(crate) fn copy(physical: u64, bytes: &[u8]) {
    assert!((LOW..HIGH).contains(&physical) && bytes.len() as u64 <= PAGE);
    // SAFETY: as above.
    unsafe { (physical as *mut u8).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
}
