//! Where the values of a call or a reply come from: the trait that generated code reads by, and the one that reads bytes of the other
//! side. Every length is compared with what is there before anything is read; nothing is allocated, and nothing panics.
//!
//! Knows no call.

use core::ffi::CStr;

use crate::handle::AnyHandle;
use crate::plain::{List, Plain};
use crate::refused::Refused;
use crate::values::{Memory, Pieces, Span, SvmAddress, Value};

/// Something that values can be read from, one after the other. Each method's `what` is the parameter's name, for errors; a length of
/// `None` is one that no number holds.
pub trait Source<'a> {
    /// Which of the parameters that can be NULL are there, or are asked for; a bit outside of `known` is refused.
    ///
    /// # Errors
    ///
    /// Like all others here: the bytes end too early, or are none of this parameter.
    fn present(&mut self, known: u32) -> Result<u32, Refused>;

    /// A value.
    fn value<T: Plain>(&mut self, what: &'static str) -> Result<T, Refused>;

    /// A number that lengths are computed from.
    fn count<T: Plain>(&mut self, what: &'static str) -> Result<T, Refused>;

    /// So many elements.
    fn list<T: Plain>(&mut self, length: Option<u64>, what: &'static str) -> Result<List<'a, T>, Refused>;

    /// Elements that come with their number, which is at most `most`.
    fn counted<T: Plain>(&mut self, most: Option<u64>, what: &'static str) -> Result<List<'a, T>, Refused>;

    /// A string.
    fn text(&mut self, what: &'static str) -> Result<&'a CStr, Refused>;

    /// So many bytes of the arena.
    fn span(&mut self, length: Option<u64>, what: &'static str) -> Result<Span, Refused>;

    /// Bytes of the arena that come with their number.
    fn area(&mut self, what: &'static str) -> Result<Span, Refused>;

    /// So many pieces of the arena.
    fn pieces(&mut self, count: Option<u64>, what: &'static str) -> Result<Pieces<'a>, Refused>;

    /// So many bytes, or an object of one of these C types.
    fn choice(
        &mut self,
        length: Option<u64>,
        c_types: &[&'static str],
        what: &'static str,
    ) -> Result<Value<'a>, Refused>;

    /// So many bytes of the arena, or a place in shared virtual memory.
    fn memory(&mut self, length: Option<u64>, what: &'static str) -> Result<Memory, Refused>;
}

/// What bounds the other side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The arena's size in bytes.
    pub arena: u64,
}

impl Limits {
    /// A part of the arena, or why it is none.
    pub(crate) fn span(self, offset: u64, length: u64, what: &'static str) -> Result<Span, Refused> {
        if offset.checked_add(length).is_some_and(|end| end <= self.arena) {
            return Ok(Span { offset, length });
        }
        Err(Refused::Arena {
            what,
            offset,
            length,
            arena: self.arena,
        })
    }
}

/// Reads bytes that the other side wrote. They have to be the reader's own copy: what is in shared memory changes while it is looked at.
#[derive(Debug, Clone)]
pub struct Reader<'a> {
    bytes: &'a [u8],
    limits: Limits,
}

impl<'a> Reader<'a> {
    /// Of a record's or a message's arguments.
    #[must_use]
    pub const fn new(bytes: &'a [u8], limits: Limits) -> Self {
        Self { bytes, limits }
    }

    /// Everything has been read.
    ///
    /// # Errors
    ///
    /// Bytes are left over.
    pub const fn finish(self) -> Result<(), Refused> {
        if self.bytes.is_empty() {
            Ok(())
        } else {
            Err(Refused::Trailing(self.bytes.len()))
        }
    }

    fn take(&mut self, length: Option<u64>, what: &'static str) -> Result<&'a [u8], Refused> {
        let needs = length.ok_or(Refused::Overflow { what })?;
        let has = self.bytes.len();
        let taken = usize::try_from(needs)
            .ok()
            .and_then(|needs| self.bytes.split_at_checked(needs));
        let (taken, rest) = taken.ok_or(Refused::Short { what, needs, has })?;
        self.bytes = rest;
        Ok(taken)
    }
}

/// Bytes of so many elements.
fn size_of_all<T: Plain>(length: Option<u64>) -> Option<u64> {
    length?.checked_mul(T::SIZE as u64)
}

impl<'a> Source<'a> for Reader<'a> {
    fn present(&mut self, known: u32) -> Result<u32, Refused> {
        let present: u32 = self.value("the parameters that are there")?;
        if present & !known == 0 {
            Ok(present)
        } else {
            Err(Refused::Present(present))
        }
    }

    fn value<T: Plain>(&mut self, what: &'static str) -> Result<T, Refused> {
        Ok(T::get(self.take(Some(T::SIZE as u64), what)?))
    }

    fn count<T: Plain>(&mut self, what: &'static str) -> Result<T, Refused> {
        self.value(what)
    }

    fn list<T: Plain>(&mut self, length: Option<u64>, what: &'static str) -> Result<List<'a, T>, Refused> {
        Ok(List::wire(self.take(size_of_all::<T>(length), what)?))
    }

    fn counted<T: Plain>(&mut self, most: Option<u64>, what: &'static str) -> Result<List<'a, T>, Refused> {
        let count = u64::from(self.value::<u32>(what)?);
        // A capacity that no number holds is more than any message has.
        if let Some(most) = most.filter(|most| count > *most) {
            return Err(Refused::Capacity { what, count, most });
        }
        self.list(Some(count), what)
    }

    fn text(&mut self, what: &'static str) -> Result<&'a CStr, Refused> {
        let length = self.value::<u32>(what)?;
        let bytes = self.take(Some(length.into()), what)?;
        CStr::from_bytes_with_nul(bytes).map_err(|_| Refused::Text { what })
    }

    fn span(&mut self, length: Option<u64>, what: &'static str) -> Result<Span, Refused> {
        let offset = self.value(what)?;
        self.limits
            .span(offset, length.ok_or(Refused::Overflow { what })?, what)
    }

    fn area(&mut self, what: &'static str) -> Result<Span, Refused> {
        let length = self.value(what)?;
        self.span(Some(length), what)
    }

    fn pieces(&mut self, count: Option<u64>, what: &'static str) -> Result<Pieces<'a>, Refused> {
        let lengths: List<'a, u64> = self.list(count, what)?;
        let length = lengths.iter().try_fold(0_u64, u64::checked_add);
        let data = self.span(length, what)?;
        Ok(Pieces { lengths, data })
    }

    fn choice(
        &mut self,
        length: Option<u64>,
        c_types: &[&'static str],
        what: &'static str,
    ) -> Result<Value<'a>, Refused> {
        let tag: u32 = self.value(what)?;
        let Some(index) = tag.checked_sub(1) else {
            return Ok(Value::Bytes(self.take(length, what)?));
        };
        let c_type = usize::try_from(index).ok().and_then(|index| c_types.get(index));
        let c_type = *c_type.ok_or(Refused::Form { what, tag })?;
        let raw = self.value(what)?;
        Ok(Value::Object(AnyHandle { c_type, raw }))
    }

    fn memory(&mut self, length: Option<u64>, what: &'static str) -> Result<Memory, Refused> {
        match self.value::<u32>(what)? {
            0 => Ok(Memory::Svm(SvmAddress(self.value(what)?))),
            1 => Ok(Memory::Arena(self.span(length, what)?)),
            tag => Err(Refused::Form { what, tag }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reader(bytes: &[u8]) -> Reader<'_> {
        Reader::new(bytes, Limits { arena: 100 })
    }

    #[test]
    fn nothing_is_read_beyond_the_bytes() {
        let short = |needs, has| Refused::Short { what: "x", needs, has };
        assert_eq!(reader(&[1, 2, 3]).value::<u32>("x"), Err(short(4, 3)));
        assert_eq!(reader(&[0; 8]).list::<u32>(Some(3), "x"), Err(short(12, 8)));
        assert_eq!(
            reader(&[0; 8]).list::<u64>(Some(u64::MAX), "x"),
            Err(Refused::Overflow { what: "x" })
        );
        assert_eq!(
            reader(&[0; 8]).list::<u8>(None, "x"),
            Err(Refused::Overflow { what: "x" })
        );
        assert_eq!(reader(&[9, 0, 0, 0, b'a']).text("x"), Err(short(9, 1)));
        assert_eq!(reader(&[0; 3]).finish(), Err(Refused::Trailing(3)));
    }

    #[test]
    fn what_is_outside_of_the_arena_is_refused() {
        let at = |offset: u64, length: u64| {
            let bytes: Vec<u8> = [length, offset]
                .iter()
                .flat_map(|number| number.to_le_bytes())
                .collect();
            reader(&bytes).area("x").is_ok()
        };
        assert!(at(0, 100) && at(100, 0) && at(40, 60));
        assert!(!at(0, 101) && !at(41, 60) && !at(u64::MAX, 1) && !at(1, u64::MAX));
    }

    #[test]
    fn forms_strings_and_bits_that_are_none_are_refused() {
        assert_eq!(reader(&[4, 0, 0, 0]).present(3), Err(Refused::Present(4)));
        assert_eq!(reader(&[2, 0, 0, 0, 0, 0]).text("x"), Err(Refused::Text { what: "x" }));
        assert_eq!(reader(&[1, 0, 0, 0, b'a']).text("x"), Err(Refused::Text { what: "x" }));
        let form = Err(Refused::Form { what: "x", tag: 2 });
        assert_eq!(reader(&[2, 0, 0, 0, 0, 0, 0, 0]).choice(Some(0), &["a"], "x"), form);
        assert_eq!(
            reader(&[2, 0, 0, 0]).memory(Some(0), "x"),
            Err(Refused::Form { what: "x", tag: 2 })
        );
        let capacity = Refused::Capacity {
            what: "x",
            count: 3,
            most: 2,
        };
        assert_eq!(
            reader(&[3, 0, 0, 0, 0, 0, 0]).counted::<u8>(Some(2), "x"),
            Err(capacity)
        );
    }
}
