//! Parts of this process' address space where a server has put memory of its device: they are reserved, so that nothing of the process comes
//! to lie there and each address is one or the other.
//!
//! ```text
//!   told an address ── is something of the process there? ── no ──▶ reserved for good: the server gives the same addresses again
//!                                                           └── yes ──▶ another one is asked for
//! ```
//!
//! Knows no call.
#![allow(unsafe_code, reason = "a part of the address space is reserved by mmap(2)")]

use std::collections::BTreeMap;
use std::sync::Mutex;

use crate::lock;

/// What is reserved at once where nothing is in the way: a driver gives out parts of pieces of this size.
const PIECE: u64 = 2 << 20;
const PAGE: u64 = 4096;

/// Ends by beginnings.
type Ranges = BTreeMap<u64, u64>;

static RESERVED: Mutex<Ranges> = Mutex::new(Ranges::new());

/// Reserves so many bytes from there on, if nothing of the process is there.
pub(crate) fn reserve(begin: u64, length: u64) -> bool {
    let Some(end) = begin.checked_add(length).filter(|_| begin > 0) else {
        return false;
    };
    let mut reserved = lock(&RESERVED);
    [PIECE, PAGE].into_iter().any(|unit| {
        let whole = end.checked_next_multiple_of(unit);
        whole.is_some_and(|end| take(&mut reserved, begin / unit * unit, end))
    })
}

/// What is not reserved of a range; all of it, or nothing.
fn take(reserved: &mut Ranges, begin: u64, end: u64) -> bool {
    let missing = missing(reserved, begin, end);
    let mut taken = Vec::new();
    for (begin, end) in missing {
        if !map(begin, end - begin) {
            taken.into_iter().for_each(|(begin, end)| unmap(begin, end - begin));
            return false;
        }
        taken.push((begin, end));
    }
    for (begin, end) in taken {
        add(reserved, begin, end);
    }
    true
}

fn missing(reserved: &Ranges, begin: u64, end: u64) -> Vec<(u64, u64)> {
    let mut missing = Vec::new();
    let mut at = begin;
    let before = reserved.range(..begin).next_back();
    for (from, to) in before.into_iter().chain(reserved.range(begin..end)) {
        if *from > at {
            missing.push((at, *from));
        }
        at = at.max(*to);
    }
    if at < end {
        missing.push((at, end));
    }
    missing
}

/// Neighbours grow together.
fn add(reserved: &mut Ranges, mut begin: u64, mut end: u64) {
    if let Some((&before, &to)) = reserved.range(..begin).next_back()
        && to == begin
    {
        begin = before;
    }
    if let Some(to) = reserved.remove(&end) {
        end = to;
    }
    reserved.insert(begin, end);
}

fn map(begin: u64, length: u64) -> bool {
    let (Ok(begin), Ok(length)) = (usize::try_from(begin), usize::try_from(length)) else {
        return false;
    };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    let wanted = std::ptr::without_provenance_mut(begin);
    // SAFETY: 1. nothing is replaced; 2. nobody may look there.
    let place = unsafe { libc::mmap64(wanted, length, libc::PROT_NONE, flags, -1, 0) };
    if place == libc::MAP_FAILED {
        return false;
    }
    if place != wanted {
        // A kernel that does not know the flag takes the address for a hint.
        unmap(place.addr() as u64, length as u64);
        return false;
    }
    true
}

fn unmap(begin: u64, length: u64) {
    let place = std::ptr::without_provenance_mut(usize::try_from(begin).unwrap_or_default());
    // SAFETY: 1. it was mapped by `map`, and nobody knows of it.
    unsafe { libc::munmap(place, usize::try_from(length).unwrap_or_default()) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_process_has_is_not_taken() {
        let own = Box::new([0_u8; 64]);
        let at = own.as_ptr().addr() as u64;
        assert!(!reserve(at, 64));
        assert!(!reserve(at - 8 * PIECE, 16 * PIECE), "it is in the middle");
        assert!(!reserve(0, 1) && !reserve(u64::MAX, 2));
    }

    #[test]
    fn parts_of_one_piece_are_reserved_once() {
        // Far below where Linux puts anything of a process.
        let at = 0x0123_4567_0000;
        assert!(reserve(at, 100) && reserve(at + 512, 100));
        assert!(!map(at / PIECE * PIECE, PAGE), "all of the piece is taken");
        assert!(reserve(at, 3 * PIECE), "what is missing is added");
        let all = lock(&RESERVED).clone();
        let begin = at / PIECE * PIECE;
        assert_eq!(all.get(&begin), Some(&(begin + 4 * PIECE)));
        // Beside memory of the process its pages alone are taken.
        let beside = begin + 8 * PIECE;
        assert!(map(beside, PAGE));
        assert!(reserve(beside + PAGE, PAGE) && !reserve(beside, 2 * PAGE));
        // What is free on one side of a reserved page is given back where the other side is not.
        let around = begin + 16 * PIECE;
        assert!(map(around + 2 * PAGE, PAGE) && reserve(around + PAGE, PAGE));
        assert!(!reserve(around, 3 * PAGE));
        assert!(map(around, PAGE));
        assert_eq!(lock(&RESERVED).get(&(beside + PAGE)), Some(&(beside + 2 * PAGE)));
    }
}
