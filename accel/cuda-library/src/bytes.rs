//! Memory of this process for what functions of C read and write: numbers by a pointer, and lists.
//!
//! Knows no function.

use accel_proto::{List, MESSAGE, Plain};

use crate::failure::Failure;
use crate::table::P;

/// A number that the program has passed by a pointer, of at most 16 bytes; there are always so many, as its type is the library's to know.
#[derive(Debug)]
pub(crate) struct Scalar {
    words: [u64; 2],
}

impl Scalar {
    /// What a call carries. None is refused: libraries read it without looking.
    pub(crate) fn new(bytes: &List<'_, u8>) -> Result<Self, Failure> {
        let bytes = bytes.bytes();
        if bytes.is_empty() {
            return Err(Failure::InvalidValue);
        }
        let mut all = [0; 16];
        let place = all.get_mut(..bytes.len()).ok_or(Failure::InvalidValue)?;
        place.copy_from_slice(bytes);
        let half = |half: usize| all.iter().skip(8 * half).take(8).rev();
        let word = |which: usize| half(which).fold(0, |word, byte| (word << 8) | u64::from(*byte));
        Ok(Self {
            words: [word(0), word(1)],
        })
    }

    /// Where it is.
    pub(crate) fn address(&self) -> P {
        self.words.as_ptr().cast_mut().cast()
    }
}

/// A list, aligned for any type.
#[derive(Debug)]
pub(crate) struct Bytes {
    words: Vec<u64>,
    length: usize,
    is_there: bool,
}

impl Bytes {
    /// What a call carries; NULL if it has none.
    pub(crate) fn of<T: Plain>(list: Option<&List<'_, T>>) -> Self {
        let mut bytes = Vec::new();
        for element in list.iter().flat_map(|list| list.iter()) {
            let begin = bytes.len();
            bytes.resize(begin + T::SIZE, 0);
            element.put(bytes.get_mut(begin..).unwrap_or_default());
        }
        Self::from_bytes(&bytes, list.is_some())
    }

    pub(crate) fn from_bytes(bytes: &[u8], is_there: bool) -> Self {
        let words = bytes.chunks(8).map(|eight| {
            let mut word = [0; 8];
            word.iter_mut().zip(eight).for_each(|(place, byte)| *place = *byte);
            u64::from_ne_bytes(word)
        });
        Self {
            words: words.collect(),
            length: bytes.len(),
            is_there,
        }
    }

    /// Room for so many bytes, which is no more than an answer can have.
    pub(crate) fn zeroed(length: u64) -> Result<Self, Failure> {
        let length = usize::try_from(length).map_err(|_| Failure::InvalidValue)?;
        if length > MESSAGE {
            return Err(Failure::InvalidValue);
        }
        Ok(Self {
            words: vec![0; length.div_ceil(8)],
            length,
            is_there: true,
        })
    }

    /// Where they are, for who reads.
    pub(crate) fn address(&self) -> P {
        if self.is_there {
            self.words.as_ptr().cast_mut().cast()
        } else {
            std::ptr::null_mut()
        }
    }

    /// Where they are, for who writes.
    pub(crate) fn place(&mut self) -> P {
        self.words.as_mut_ptr().cast()
    }

    /// How many there are.
    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// Them.
    #[allow(unsafe_code, reason = "words are bytes")]
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: 1. the words have at least so many bytes, all of them written; 2. bytes have no alignment; 3. the result borrows them.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast(), self.length) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scalar_has_room_for_any_type() {
        let scalar = Scalar::new(&List::new(&[0, 0, 128, 63])).unwrap();
        assert_eq!(scalar.words, [u64::from(1.0_f32.to_bits()), 0]);
        assert!(!scalar.address().is_null());
        assert_eq!(Scalar::new(&List::new(&[])).unwrap_err(), Failure::InvalidValue);
        assert_eq!(Scalar::new(&List::new(&[0; 17])).unwrap_err(), Failure::InvalidValue);
    }

    #[test]
    fn lists_are_as_long_as_an_answer_at_most() {
        let list = Bytes::of(Some(&List::new(&[1_i32, -1, 7])));
        assert_eq!(list.bytes(), [1, 0, 0, 0, 255, 255, 255, 255, 7, 0, 0, 0]);
        assert!(Bytes::of::<i32>(None).address().is_null());
        assert_eq!(Bytes::zeroed(48).unwrap().bytes(), [0; 48]);
        assert_eq!(Bytes::zeroed(u64::MAX).unwrap_err(), Failure::InvalidValue);
        assert_eq!(Bytes::zeroed(MESSAGE as u64 + 1).unwrap_err(), Failure::InvalidValue);
    }
}
