//! From a guest's linear addresses to its physical ones, by its own page tables (AMD64 Architecture Programmer's Manual, volume 2,
//! chapter 5), to read the instruction that it is at. Rights are not looked at: the processor has just executed from there.

use crate::memory::GuestMemory;
use crate::module::uapi::State;

/// CR0: paging.
const PG: u64 = 1 << 31;
/// CR4: entries of 8 bytes; five levels of them.
const PAE: u64 = 1 << 5;
const LA57: u64 = 1 << 12;
/// EFER: long mode is active.
const LMA: u64 = 1 << 10;

/// Entries: there; a large page where a table could be.
const PRESENT: u64 = 1;
const LARGE: u64 = 1 << 7;
/// The address in an entry of 8 bytes.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

const PAGE: u64 = 4096;

/// Where a linear address lies; `None` where the tables do not say. Tables with entries of 4 bytes are not read: no kernel that
/// boots here uses them.
pub(crate) fn translate(memory: &GuestMemory, state: &State, linear: u64) -> Option<u64> {
    if state.cr0 & PG == 0 {
        return Some(linear & 0xffff_ffff);
    }
    if state.cr4 & PAE == 0 {
        return None;
    }
    let levels = match (state.efer & LMA != 0, state.cr4 & LA57 != 0) {
        (true, true) => 5,
        (true, false) => 4,
        (false, _) => 3,
    };
    // Three levels' first table has four entries and any address below 4 GiB that is a multiple of 32.
    let mut table = match levels {
        3 => state.cr3 & 0xffff_ffe0,
        _ => state.cr3 & ADDRESS,
    };
    for level in (1..=levels).rev() {
        let shift = 12 + 9 * (level - 1);
        let mask = if levels == 3 && level == 3 { 3 } else { 0x1ff };
        let entry = memory.read_u64(table + 8 * (linear >> shift & mask))?;
        if entry & PRESENT == 0 {
            return None;
        }
        let last = level == 1 || (level <= 3 && entry & LARGE != 0 && !(levels == 3 && level == 3));
        if last {
            let offset = (1_u64 << shift) - 1;
            return Some(entry & ADDRESS & !offset | linear & offset);
        }
        table = entry & ADDRESS;
    }
    None
}

/// Reads what lies at a linear address, as far as it can be read.
pub(crate) fn read(memory: &GuestMemory, state: &State, linear: u64, bytes: &mut [u8]) -> usize {
    let mut done = 0;
    while done < bytes.len() {
        let at = linear.wrapping_add(done as u64);
        let left = usize::try_from(PAGE - at % PAGE).unwrap_or(1);
        let end = bytes.len().min(done + left);
        let Some(physical) = translate(memory, state, at) else {
            break;
        };
        let Some(part) = bytes.get_mut(done..end) else { break };
        if memory.read(physical, part).is_none() {
            break;
        }
        done = end;
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::testing::memory_with;

    const RW: u64 = 3;

    fn long_mode(cr3: u64) -> State {
        State {
            cr0: PG | 1,
            cr3,
            cr4: PAE,
            efer: LMA,
            ..State::default()
        }
    }

    #[test]
    fn four_levels_and_large_pages_are_followed() {
        // 0x1000: level 4, 0x2000: level 3, 0x3000: level 2, 0x4000: level 1.
        let memory = memory_with(&[
            (0x1000, 0x2000 | RW),
            (0x2000, 0x3000 | RW),
            (0x2008, 0x4000_0000 | LARGE | RW),
            (0x3000, 0x4000 | RW),
            (0x3008, 0x20_0000 | LARGE | RW),
            (0x4000 + 8 * 5, 0x7000 | RW | 1 << 63),
        ]);
        let state = long_mode(0x1000);
        assert_eq!(translate(&memory, &state, 0x5123), Some(0x7123));
        assert_eq!(translate(&memory, &state, 0x6000), None, "not there");
        assert_eq!(translate(&memory, &state, 0x20_1234), Some(0x20_1234));
        assert_eq!(translate(&memory, &state, 0x4012_3456), Some(0x4012_3456));
        assert_eq!(translate(&memory, &state, 1 << 39), None);
    }

    #[test]
    fn without_paging_addresses_are_as_they_are() {
        let memory = memory_with(&[]);
        assert_eq!(translate(&memory, &State::default(), 0x1234), Some(0x1234));
        let old = State {
            cr0: PG,
            ..State::default()
        };
        assert_eq!(translate(&memory, &old, 0), None);
    }

    #[test]
    fn three_levels_begin_with_four_entries() {
        let memory = memory_with(&[(0x1020, 0x2000 | PRESENT), (0x2000, LARGE | RW)]);
        let state = State {
            cr0: PG,
            cr3: 0x1020,
            cr4: PAE,
            ..State::default()
        };
        assert_eq!(translate(&memory, &state, 0x1234), Some(0x1234));
    }

    #[test]
    fn an_instruction_over_two_pages_is_read_from_both() {
        let memory = memory_with(&[
            (0x1000, 0x2000 | RW),
            (0x2000, 0x3000 | RW),
            (0x3000, 0x4000 | RW),
            (0x4000, 0x8000 | RW),
            (0x4008, 0x6000 | RW),
            (0x8ff8, 0x0807_0605_0403_0201),
            (0x6000, 0x1817_1615_1413_1211),
        ]);
        let mut bytes = [0; 8];
        assert_eq!(read(&memory, &long_mode(0x1000), 0xffc, &mut bytes), 8);
        assert_eq!(bytes, [5, 6, 7, 8, 0x11, 0x12, 0x13, 0x14]);
        assert_eq!(
            read(&memory, &long_mode(0x1000), 0x1ffc, &mut bytes),
            4,
            "the next page is not there"
        );
    }
}
