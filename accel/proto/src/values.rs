//! What parameters are that are neither numbers, nor lists, nor one kind of objects.
//!
//! Knows no call; where their bytes are, `reader` and `writer` know.

use crate::handle::AnyHandle;
use crate::plain::{List, Plain};

/// Bytes of the arena. What the decoder has let through is inside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Where they begin, from the arena's beginning.
    pub offset: u64,
    /// How many there are.
    pub length: u64,
}

/// Several pieces of bytes, one behind the other in the arena.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pieces<'a> {
    /// How long each is.
    pub lengths: List<'a, u64>,
    /// All of them.
    pub data: Span,
}

impl Pieces<'_> {
    /// Each of them.
    pub fn spans(&self) -> impl Iterator<Item = Span> {
        let begin = self.data.offset;
        self.lengths.iter().scan(begin, |offset, length| {
            let span = Span {
                offset: *offset,
                length,
            };
            *offset = offset.checked_add(length)?;
            Some(span)
        })
    }
}

/// Bytes of which one form is an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value<'a> {
    /// Bytes as they are.
    Bytes(&'a [u8]),
    /// An object.
    Object(AnyHandle),
}

/// An address in shared virtual memory, which is the same for the client and for kernels. The server looks it up among those that it has
/// given to the client; to nobody is it a pointer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SvmAddress(pub u64);

impl SvmAddress {
    /// The address NULL.
    pub const NULL: Self = Self(0);
}

impl Plain for SvmAddress {
    const SIZE: usize = 8;

    fn get(bytes: &[u8]) -> Self {
        Self(u64::get(bytes))
    }

    fn put(&self, bytes: &mut [u8]) {
        self.0.put(bytes);
    }
}

/// Bytes in shared virtual memory, or in the arena for the client's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// In shared virtual memory; the server knows how much of it there is.
    Svm(SvmAddress),
    /// In the arena.
    Arena(Span),
}

/// A function of the client's, by the number that the client gave it; zero is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Callback(pub u32);

impl Plain for Callback {
    const SIZE: usize = 4;

    fn get(bytes: &[u8]) -> Self {
        Self(u32::get(bytes))
    }

    fn put(&self, bytes: &mut [u8]) {
        self.0.put(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_lie_one_behind_the_other() {
        let pieces = Pieces {
            lengths: List::new(&[3, 0, 5]),
            data: Span { offset: 10, length: 8 },
        };
        let spans: Vec<_> = pieces.spans().map(|span| (span.offset, span.length)).collect();
        assert_eq!(spans, [(10, 3), (13, 0), (13, 5)]);
    }
}
