//! Memory that another process may write at any time. All `unsafe` of rings is in here, and no reference to such memory leaves it: what
//! is read is a value, copied once.
//!
//! Obligations, and who discharges each:
//!
//! 1. *What is accessed is mapped for reading and writing.* [`Region`] is a part of a [`Mapping`] within its length, a [`Word`] and
//!    [`Slots`] are parts of a region, each checked when it is made and never changed; each holds the mapping by an `Arc`.
//! 2. *Atomics are aligned.* A mapping begins on a page; a word's or slot's place is checked when it is made, and copies split off what
//!    is not aligned.
//! 3. *No data race.* This process accesses a region by atomics, through this module, and what is long by one instruction for all of it,
//!    which to the language is none of its own accesses. What other processes do is outside of what
//!    the language speaks of: to this one it is a value that was read, whatever it is.
//! 4. *Pages stay.* A file that shrinks beneath its mapping ends this process by SIGBUS, which is no undefined behaviour; who takes a
//!    descriptor from a stranger asks for its seals first (`F_SEAL_SHRINK`).
#![allow(
    unsafe_code,
    reason = "shared memory has addresses and no types; each block says which obligations it rests on"
)]

use std::arch::asm;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use base::Mapping;
use rustix::io::Errno;
use rustix::thread::futex;

use super::{Error, RECORD_LEN, WORDS};

/// A part of memory that is shared with another process.
#[derive(Clone, Debug)]
pub struct Region {
    mapping: Arc<Mapping<u8>>,
    start: usize,
    length: usize,
}

impl Region {
    /// All of a mapping.
    pub fn new(mapping: Mapping<u8>) -> Self {
        let length = mapping.length();
        Self {
            mapping: Arc::new(mapping),
            start: 0,
            length,
        }
    }

    /// Its bytes.
    pub fn length(&self) -> u64 {
        self.length as u64
    }

    /// A part of it. Both numbers may be anything: they are compared without a sum that could wrap.
    ///
    /// # Errors
    /// [`Error::Bounds`].
    pub fn part(&self, offset: u64, length: u64) -> Result<Self, Error> {
        let bounds = || Error::Bounds {
            offset,
            length,
            available: self.length(),
        };
        let end = offset.checked_add(length).filter(|end| *end <= self.length());
        end.ok_or_else(bounds)?;
        let number = |value: u64| usize::try_from(value).map_err(|_| bounds());
        Ok(Self {
            mapping: Arc::clone(&self.mapping),
            start: self.start + number(offset)?,
            length: number(length)?,
        })
    }

    /// A word in it.
    ///
    /// # Errors
    /// [`Error::Bounds`], [`Error::Alignment`].
    pub fn word(&self, offset: u64) -> Result<Word, Error> {
        let part = self.part(offset, size_of::<u32>() as u64)?;
        Ok(Word {
            at: part.aligned(align_of::<AtomicU32>())?.cast(),
            _keeps: part.mapping,
        })
    }

    /// A power of two of slots in it.
    ///
    /// # Errors
    /// [`Error::Capacity`], [`Error::Bounds`], [`Error::Alignment`].
    pub fn slots(&self, offset: u64, count: u32) -> Result<Slots, Error> {
        if !count.is_power_of_two() {
            return Err(Error::Capacity(count));
        }
        let part = self.part(offset, u64::from(count) * RECORD_LEN as u64)?;
        Ok(Slots {
            at: part.aligned(RECORD_LEN)?.cast(),
            count,
            _keeps: part.mapping,
        })
    }

    /// Its address, for who hands it on (to a driver, or a library that works in place). It is good as long as a clone of this lives,
    /// and what is there may change at any time.
    pub fn as_ptr(&self) -> *mut u8 {
        self.mapping.as_ptr().wrapping_add(self.start)
    }

    /// Where it begins, if that is aligned.
    fn aligned(&self, alignment: usize) -> Result<NonNull<u8>, Error> {
        let at = NonNull::new(self.as_ptr()).filter(|_| self.start.is_multiple_of(alignment));
        at.ok_or(Error::Alignment {
            offset: self.start as u64,
            alignment: alignment as u64,
        })
    }

    /// Copies bytes out, each once.
    ///
    /// # Errors
    /// [`Error::Bounds`]; nothing is copied then.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        let part = self.part(offset, into.len() as u64)?;
        if into.len() >= LONG {
            // SAFETY: 1. `part` has as many bytes, and `self` keeps it mapped; 2. bytes are aligned anywhere; 3. by one instruction; 4. `into`
            // is this process' own, and its length is the count.
            unsafe { copy_long(part.as_ptr(), into.as_mut_ptr(), into.len()) };
            return Ok(());
        }
        let (before, rest) = into.split_at_mut(part.unaligned());
        let (words, after) = rest.as_chunks_mut::<8>();
        let mut at = part.as_ptr();
        for byte in before {
            *byte = load_byte(at);
            at = at.wrapping_add(1);
        }
        for word in words {
            // SAFETY: 1. within `part`, which `self` keeps mapped; 2. the bytes before were split off; 3. by atomics.
            let value = unsafe { AtomicU64::from_ptr(at.cast()) }.load(Ordering::Relaxed);
            *word = value.to_ne_bytes();
            at = at.wrapping_add(8);
        }
        for byte in after {
            *byte = load_byte(at);
            at = at.wrapping_add(1);
        }
        Ok(())
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// [`Error::Bounds`]; nothing is copied then.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), Error> {
        let part = self.part(offset, from.len() as u64)?;
        if from.len() >= LONG {
            // SAFETY: 1. `part` has as many bytes, and `self` keeps it mapped; 2. bytes are aligned anywhere; 3. by one instruction; 4. `from`
            // is this process' own, and its length is the count.
            unsafe { copy_long(from.as_ptr(), part.as_ptr(), from.len()) };
            return Ok(());
        }
        let (before, rest) = from.split_at(part.unaligned().min(from.len()));
        let (words, after) = rest.as_chunks::<8>();
        let mut at = part.as_ptr();
        for byte in before {
            store_byte(at, *byte);
            at = at.wrapping_add(1);
        }
        for word in words {
            let value = u64::from_ne_bytes(*word);
            // SAFETY: 1. within `part`, which `self` keeps mapped; 2. the bytes before were split off; 3. by atomics.
            unsafe { AtomicU64::from_ptr(at.cast()) }.store(value, Ordering::Relaxed);
            at = at.wrapping_add(8);
        }
        for byte in after {
            store_byte(at, *byte);
            at = at.wrapping_add(1);
        }
        Ok(())
    }

    /// Writes so many zeroes.
    ///
    /// # Errors
    /// [`Error::Bounds`]; nothing is written then.
    pub fn zero(&self, offset: u64, length: u64) -> Result<(), Error> {
        let part = self.part(offset, length)?;
        // SAFETY: 1. `part` has as many bytes, and `self` keeps it mapped; 2. bytes are aligned anywhere; 3. by one instruction.
        unsafe {
            asm!("rep stosb", inout("rdi") part.as_ptr() => _, inout("rcx") part.length => _, in("al") 0_u8,
                options(nostack, preserves_flags));
        }
        Ok(())
    }

    /// Bytes of this part before the first multiple of 8.
    fn unaligned(&self) -> usize {
        (self.start.next_multiple_of(8) - self.start).min(self.length)
    }
}

/// What is at least as long is copied by the processor's own loop, which takes three fifths of the time of words one by one (384 KiB).
const LONG: usize = 512;

/// Copies bytes of which one side is shared memory. For the language that is, as an atomic access is not, nothing but what the instruction
/// does: bytes, each once, whatever another process writes meanwhile.
///
/// # Safety
///
/// Both sides are mapped for so many bytes, do not overlap, and are nobody's reference in this process but the caller's.
unsafe fn copy_long(from: *const u8, to: *mut u8, length: usize) {
    // SAFETY: 1. and 4. by the caller; the direction flag is clear, as the ABI has it.
    unsafe {
        asm!("rep movsb", inout("rdi") to => _, inout("rsi") from => _, inout("rcx") length => _,
            options(nostack, preserves_flags));
    }
}

/// A byte of a part that was checked.
fn load_byte(at: *mut u8) -> u8 {
    // SAFETY: 1. the two callers are within a checked part; 2. a byte is aligned anywhere; 3. by atomics.
    unsafe { AtomicU8::from_ptr(at) }.load(Ordering::Relaxed)
}

/// As [`load_byte`].
fn store_byte(at: *mut u8, value: u8) {
    // SAFETY: 1. the two callers are within a checked part; 2. a byte is aligned anywhere; 3. by atomics.
    unsafe { AtomicU8::from_ptr(at) }.store(value, Ordering::Relaxed);
}

/// A word of 32 bits in shared memory, which may also be waited for (futex(2)).
#[derive(Clone, Debug)]
pub struct Word {
    at: NonNull<u32>,
    _keeps: Arc<Mapping<u8>>,
}

// SAFETY: the address is of no thread: obligations 1 to 3 hold wherever it is accessed.
unsafe impl Send for Word {}
// SAFETY: as for Send; all access is by atomics.
unsafe impl Sync for Word {}

impl Word {
    fn atomic(&self) -> &AtomicU32 {
        // SAFETY: 1. and 2. were checked by `Region::word`, and `_keeps` has the mapping for as long as the reference lives, which does not
        // leave this module; 3. by atomics.
        unsafe { AtomicU32::from_ptr(self.at.as_ptr()) }
    }

    /// Its value.
    pub fn load(&self, order: Ordering) -> u32 {
        self.atomic().load(order)
    }

    /// Another value.
    pub fn store(&self, value: u32, order: Ordering) {
        self.atomic().store(value, order);
    }

    /// Adds, and tells what was there; wraps.
    pub fn add(&self, value: u32, order: Ordering) -> u32 {
        self.atomic().fetch_add(value, order)
    }

    /// Its address, for system calls that take one. It is good as long as a clone of this lives.
    pub fn as_ptr(&self) -> *mut u32 {
        self.at.as_ptr()
    }

    /// Waits until somebody wakes who waits for it, unless it is another value already; no longer than that. May also return before.
    ///
    /// # Errors
    /// Those of futex(2) that are no end of a wait.
    pub fn wait(&self, value: u32, most: Duration) -> io::Result<()> {
        let most = rustix::event::Timespec::try_from(most).map_err(|_| Errno::INVAL)?;
        match futex::wait(self.atomic(), futex::Flags::empty(), value, Some(&most)) {
            Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Wakes one who waits for it, in whatever process. True if there was one.
    ///
    /// # Errors
    /// Those of futex(2).
    pub fn wake(&self) -> io::Result<bool> {
        Ok(futex::wake(self.atomic(), futex::Flags::empty(), 1)? != 0)
    }
}

/// Slots of records in shared memory, a power of two.
#[derive(Clone, Debug)]
pub struct Slots {
    at: NonNull<u64>,
    count: u32,
    _keeps: Arc<Mapping<u8>>,
}

// SAFETY: the address is of no thread: obligations 1 to 3 hold wherever it is accessed.
unsafe impl Send for Slots {}
// SAFETY: as for Send; all access is by atomics.
unsafe impl Sync for Slots {}

impl Slots {
    /// How many there are.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// A word of a slot; numbers go round.
    pub fn load(&self, slot: u32, word: usize, order: Ordering) -> u64 {
        self.atomic(slot, word).load(order)
    }

    /// Another value for it.
    pub fn store(&self, slot: u32, word: usize, value: u64, order: Ordering) {
        self.atomic(slot, word).store(value, order);
    }

    fn atomic(&self, slot: u32, word: usize) -> &AtomicU64 {
        let slot = (slot & (self.count - 1)) as usize;
        let at = self.at.as_ptr().wrapping_add(slot * WORDS + word % WORDS);
        // SAFETY: 1. `Region::slots` checked `count` slots, and both numbers go round within them; `_keeps` has the mapping for as long as
        // the reference lives, which does not leave this module; 2. by the same check; 3. by atomics.
        unsafe { AtomicU64::from_ptr(at) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_copied_from_where_they_are_aligned() {
        let file = base::memfd::sized("region", 4096).unwrap();
        let region = Region::new(Mapping::new(&file, 4096).unwrap());
        for (offset, length, unaligned) in [(0, 64, 0), (1, 64, 7), (7, 64, 1), (8, 64, 0), (1, 3, 3), (9, 0, 0)] {
            assert_eq!(region.part(offset, length).unwrap().unaligned(), unaligned, "{offset}");
        }
    }
}
