//! Puts values where the other side reads them, in the order and form in which `reader` has them.
//!
//! Knows no call, and no more of the place than its length.

use core::ffi::CStr;

use crate::plain::{List, Plain};
use crate::refused::NoRoom;
use crate::values::{Memory, Pieces, Span, Value};

/// Writes into bytes, and counts what does not fit.
#[derive(Debug)]
pub struct Writer<'b> {
    bytes: &'b mut [u8],
    at: usize,
}

impl<'b> Writer<'b> {
    /// At the beginning of a record's arguments or of a message.
    pub fn new(bytes: &'b mut [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// How many bytes were written.
    ///
    /// # Errors
    ///
    /// Not all did fit; the bytes are of no use then.
    pub fn finish(self) -> Result<usize, NoRoom> {
        if self.at <= self.bytes.len() {
            Ok(self.at)
        } else {
            Err(NoRoom { needs: self.at })
        }
    }

    fn place(&mut self, length: usize) -> &mut [u8] {
        let begin = self.at;
        self.at = self.at.saturating_add(length);
        self.bytes.get_mut(begin..self.at).unwrap_or_default()
    }

    fn put(&mut self, bytes: &[u8]) {
        let place = self.place(bytes.len());
        if place.len() == bytes.len() {
            place.copy_from_slice(bytes);
        }
    }

    /// A number of elements. More than 32 bits of them are in no memory that is sent; the reader refuses what is missing then.
    fn count(&mut self, count: usize) {
        self.value(u32::try_from(count).unwrap_or(u32::MAX));
    }

    /// Which parameters are there: bit 0 for the first.
    pub(crate) fn present(&mut self, there: &[bool]) {
        let bits = (0_u32..).zip(there).filter(|(_, there)| **there);
        self.value(bits.fold(0_u32, |bits, (index, _)| bits | 1 << index));
    }

    pub(crate) fn value<T: Plain>(&mut self, value: T) {
        value.put(self.place(T::SIZE));
    }

    pub(crate) fn list<T: Plain>(&mut self, list: &List<'_, T>) {
        list.put_all(self.place(list.len().saturating_mul(T::SIZE)));
    }

    pub(crate) fn counted<T: Plain>(&mut self, list: &List<'_, T>) {
        self.count(list.len());
        self.list(list);
    }

    pub(crate) fn text(&mut self, text: &CStr) {
        self.count(text.count_bytes() + 1);
        self.put(text.to_bytes_with_nul());
    }

    pub(crate) fn span(&mut self, span: Span) {
        self.value(span.offset);
    }

    pub(crate) fn area(&mut self, span: Span) {
        self.value(span.length);
        self.value(span.offset);
    }

    pub(crate) fn pieces(&mut self, pieces: &Pieces<'_>) {
        self.list(&pieces.lengths);
        self.span(pieces.data);
    }

    /// An object whose C type is not in the list is written as a form that the reader refuses.
    pub(crate) fn choice(&mut self, value: &Value<'_>, c_types: &[&'static str]) {
        match value {
            Value::Bytes(bytes) => {
                self.value(0_u32);
                self.put(bytes);
            }
            Value::Object(object) => {
                self.count(c_types.iter().take_while(|c_type| **c_type != object.c_type).count() + 1);
                self.value(object.raw);
            }
        }
    }

    pub(crate) fn memory(&mut self, memory: Memory) {
        match memory {
            Memory::Svm(offset) => {
                self.value(0_u32);
                self.value(offset);
            }
            Memory::Arena(span) => {
                self.value(1_u32);
                self.span(span);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_counted() {
        let mut bytes = [0; 6];
        let mut writer = Writer::new(&mut bytes);
        writer.value(7_u32);
        writer.text(c"abc");
        assert_eq!(writer.finish(), Err(NoRoom { needs: 12 }));
        let mut bytes = [0; 12];
        let mut writer = Writer::new(&mut bytes);
        writer.value(7_u32);
        writer.text(c"abc");
        assert_eq!(writer.finish(), Ok(12));
        assert_eq!(&bytes, b"\x07\0\0\0\x04\0\0\0abc\0");
    }
}
