//! Calls and replies with random arguments, for tests, seeds of the fuzzer and back ends that check themselves.
//!
//! Another source for the same generated code that reads records. Knows no call.

use core::ffi::CStr;

use crate::handle::AnyHandle;
use crate::plain::{List, Plain};
use crate::reader::{Limits, Source};
use crate::refused::Refused;
use crate::values::{Memory, Pieces, Span, SvmAddress, Value};

const TEXTS: [&CStr; 4] = [c"", c"saxpy", c"-cl-std=CL1.2 -DN=4", c"\xff\x01"];

/// Bytes that lists are made of; some of them are small 64-bit numbers, of which sizes are made that fit into an arena.
#[derive(Debug, Clone)]
pub struct Pool {
    random: [u8; 4096],
    small: [u8; 512],
}

impl Pool {
    /// From a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let mut state = seed | 1;
        let mut pool = Self {
            random: [0; 4096],
            small: [0; 512],
        };
        for chunk in pool.random.as_chunks_mut::<8>().0 {
            *chunk = next(&mut state).to_le_bytes();
        }
        for chunk in pool.small.as_chunks_mut::<8>().0 {
            *chunk = (next(&mut state) & 7).to_le_bytes();
        }
        pool
    }
}

/// Values at random, the same for the same seed.
#[derive(Debug, Clone)]
pub struct Samples<'a> {
    state: u64,
    pool: &'a Pool,
    limits: Limits,
}

/// xorshift64* (Marsaglia 2003, Vigna 2016).
fn next(state: &mut u64) -> u64 {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    // The higher bits are the better ones.
    state.wrapping_mul(0x2545_f491_4f6c_dd1d).swap_bytes()
}

impl<'a> Samples<'a> {
    /// From a seed; spans are inside the arena of these limits.
    #[must_use]
    pub const fn new(seed: u64, pool: &'a Pool, limits: Limits) -> Self {
        // The generator stands still at zero, and seeds that differ in a few bits begin alike; the factor is that of splitmix64.
        let state = (seed ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9) | 1;
        Self { state, pool, limits }
    }

    fn below(&mut self, bound: u64) -> u64 {
        (next(&mut self.state) & (u64::MAX >> 16))
            .checked_rem(bound)
            .unwrap_or_default()
    }

    fn bytes(&mut self, from: &'a [u8], length: Option<u64>, what: &'static str) -> Result<&'a [u8], Refused> {
        let needs = length.ok_or(Refused::Overflow { what })?;
        let short = Refused::Short {
            what,
            needs,
            has: from.len(),
        };
        let spare = (from.len() as u64).checked_sub(needs).ok_or(short.clone())?;
        // Small numbers begin where one begins.
        let begin = self.below(spare + 1) / 8 * 8;
        let range = usize::try_from(begin)
            .ok()
            .zip(usize::try_from(needs).ok())
            .and_then(|(begin, needs)| from.get(begin..begin.checked_add(needs)?));
        range.ok_or(short)
    }
}

impl<'a> Source<'a> for Samples<'a> {
    fn present(&mut self, known: u32) -> Result<u32, Refused> {
        let bits: u32 = self.value("")?;
        Ok(bits & known)
    }

    fn value<T: Plain>(&mut self, _: &'static str) -> Result<T, Refused> {
        let mut bytes = [0; 128];
        for chunk in bytes.as_chunks_mut::<8>().0 {
            *chunk = next(&mut self.state).to_le_bytes();
        }
        Ok(T::get(&bytes))
    }

    fn count<T: Plain>(&mut self, _: &'static str) -> Result<T, Refused> {
        Ok(T::get(&self.below(5).to_le_bytes()))
    }

    fn list<T: Plain>(&mut self, length: Option<u64>, what: &'static str) -> Result<List<'a, T>, Refused> {
        let length = length.and_then(|length| length.checked_mul(T::SIZE as u64));
        let small = T::SIZE == 8 && self.below(8) != 0;
        let from: &[u8] = if small { &self.pool.small } else { &self.pool.random };
        Ok(List::wire(self.bytes(from, length, what)?))
    }

    fn counted<T: Plain>(&mut self, most: Option<u64>, what: &'static str) -> Result<List<'a, T>, Refused> {
        let count = self.below(9).min(most.unwrap_or(u64::MAX));
        self.list(Some(count), what)
    }

    fn text(&mut self, _: &'static str) -> Result<&'a CStr, Refused> {
        let index = self.below(TEXTS.len() as u64);
        Ok(usize::try_from(index)
            .ok()
            .and_then(|index| TEXTS.get(index))
            .copied()
            .unwrap_or_default())
    }

    fn span(&mut self, length: Option<u64>, what: &'static str) -> Result<Span, Refused> {
        let length = length.ok_or(Refused::Overflow { what })?;
        let spare = self.limits.arena.saturating_sub(length);
        let offset = self.below(spare.saturating_add(1));
        self.limits.span(offset, length, what)
    }

    fn area(&mut self, what: &'static str) -> Result<Span, Refused> {
        let length = self.below(4096);
        self.span(Some(length), what)
    }

    fn pieces(&mut self, count: Option<u64>, what: &'static str) -> Result<Pieces<'a>, Refused> {
        let lengths: List<'a, u64> = self.list(count, what)?;
        let data = self.span(lengths.iter().try_fold(0_u64, u64::checked_add), what)?;
        Ok(Pieces { lengths, data })
    }

    fn choice(
        &mut self,
        length: Option<u64>,
        c_types: &[&'static str],
        what: &'static str,
    ) -> Result<Value<'a>, Refused> {
        let index = usize::try_from(self.below(c_types.len() as u64 + 1)).unwrap_or_default();
        match c_types.get(index) {
            Some(c_type) => Ok(Value::Object(AnyHandle {
                c_type,
                raw: self.value(what)?,
            })),
            None => Ok(Value::Bytes(self.bytes(&self.pool.random, length, what)?)),
        }
    }

    fn memory(&mut self, length: Option<u64>, what: &'static str) -> Result<Memory, Refused> {
        if self.below(2) == 0 {
            return Ok(Memory::Svm(SvmAddress(self.value(what)?)));
        }
        Ok(Memory::Arena(self.span(length, what)?))
    }
}
