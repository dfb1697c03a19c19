//! Descriptors: values of the program's that say what a library's call works on. They are the client's alone; each call that has one carries
//! what was put into it, as `number of the function, how many words, words`, one behind the other (`accel/spec/ops.lock` has the numbers).
//!
//! Knows no function. An address that a program gives for a descriptor is one that it was given; anything else is the program's end, as
//! natively.
#![allow(unsafe_code, reason = "a descriptor is an address of this process for the program")]

use crate::abi::P;
use crate::stub::Failure;

/// Words of one descriptor; a call with several of them fits into a message.
const MOST: usize = 1024;

/// A function's arguments.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Words(Vec<i32>);

/// A number of C's as words.
pub(crate) trait Number: Copy {
    fn put(self, words: &mut Vec<i32>);
}

impl Number for i32 {
    fn put(self, words: &mut Vec<i32>) {
        words.push(self);
    }
}

impl Number for u32 {
    fn put(self, words: &mut Vec<i32>) {
        words.push(self.cast_signed());
    }
}

impl Number for u64 {
    fn put(self, words: &mut Vec<i32>) {
        let bytes = self.to_le_bytes();
        words.extend(
            bytes
                .chunks_exact(4)
                .map(|four| i32::from_le_bytes([four[0], four[1], four[2], four[3]])),
        );
    }
}

impl Number for i64 {
    fn put(self, words: &mut Vec<i32>) {
        self.cast_unsigned().put(words);
    }
}

/// What lists have: numbers as they are, bytes four to a word behind their count.
pub(crate) trait Element: Copy {
    fn put_all(list: &[Self], words: &mut Vec<i32>);
}

impl Element for i32 {
    fn put_all(list: &[Self], words: &mut Vec<i32>) {
        words.extend_from_slice(list);
    }
}

impl Element for u8 {
    fn put_all(list: &[Self], words: &mut Vec<i32>) {
        for bytes in list.chunks(4) {
            let mut word = [0; 4];
            word[..bytes.len()].copy_from_slice(bytes);
            words.push(i32::from_le_bytes(word));
        }
    }
}

impl Words {
    pub(crate) fn number(&mut self, number: impl Number) {
        number.put(&mut self.0);
    }

    pub(crate) fn list<E: Element>(&mut self, list: &[E]) {
        E::put_all(list, &mut self.0);
    }
}

/// A descriptor.
#[derive(Debug, Default)]
pub(crate) struct Descriptor {
    /// By function and key, where in the content its words are.
    parts: Vec<(u16, i32, usize, usize)>,
    content: Vec<i32>,
}

impl Descriptor {
    /// Puts arguments in place of those of the same function and key.
    fn set(&mut self, function: u16, key: i32, words: &Words) -> Result<(), Failure> {
        let Words(words) = words;
        if let Some(&(_, _, begin, length)) = self
            .parts
            .iter()
            .find(|(known, by, _, _)| (*known, *by) == (function, key))
            && length == words.len()
        {
            if let Some(place) = self.content.get_mut(begin..begin + length) {
                place.copy_from_slice(words);
            }
            return Ok(());
        }
        self.remove(function, key);
        if self.content.len() + words.len() + 2 > MOST {
            return Err(Failure::TooLong);
        }
        self.content.push(function.into());
        self.content.push(i32::try_from(words.len()).unwrap_or_default());
        self.parts.push((function, key, self.content.len(), words.len()));
        self.content.extend_from_slice(words);
        Ok(())
    }

    fn remove(&mut self, function: u16, key: i32) {
        let Some(place) = self
            .parts
            .iter()
            .position(|(known, by, _, _)| (*known, *by) == (function, key))
        else {
            return;
        };
        let (_, _, begin, length) = self.parts.remove(place);
        self.content.drain(begin - 2..begin + length);
        for (_, _, other, _) in &mut self.parts {
            if *other > begin {
                *other -= length + 2;
            }
        }
    }

    /// The arguments of one function, of those that no key keeps apart.
    pub(crate) fn part(&self, function: u16) -> Option<&[i32]> {
        let found = self
            .parts
            .iter()
            .find(|(known, key, _, _)| (*known, *key) == (function, 0));
        let &(_, _, begin, length) = found?;
        self.content.get(begin..begin + length)
    }

    /// The arguments that were put first.
    pub(crate) fn first(&self) -> Option<&[i32]> {
        let &(_, _, begin, length) = self.parts.first()?;
        self.content.get(begin..begin + length)
    }
}

/// A new one.
pub(crate) fn create(function: u16, words: Words) -> P {
    let mut descriptor = Descriptor::default();
    if !words.0.is_empty() {
        // There is room in an empty one for what a function of C has as numbers.
        _ = descriptor.set(function, 0, &words);
    }
    Box::into_raw(Box::new(descriptor)).cast()
}

/// It is gone; NULL is none.
///
/// # Safety
///
/// The address is of [`create`], and this is its last use.
pub(crate) unsafe fn destroy(descriptor: P) {
    if !descriptor.is_null() {
        // SAFETY: 1. the caller's address is that of a box, once.
        drop(unsafe { Box::from_raw(descriptor.cast::<Descriptor>()) });
    }
}

/// Puts a function's arguments into one.
///
/// # Safety
///
/// The address is NULL or of [`create`], and no other thread uses it.
pub(crate) unsafe fn set(descriptor: P, function: u16, key: i32, words: Words) -> Result<(), Failure> {
    // SAFETY: 1. the caller's address is a descriptor's, or NULL.
    let descriptor = unsafe { descriptor.cast::<Descriptor>().as_mut() };
    descriptor.ok_or(Failure::TooLong)?.set(function, key, &words)
}

/// One of a program's.
///
/// # Safety
///
/// The address is NULL or of [`create`], and the descriptor stays as it is meanwhile.
pub(crate) unsafe fn get(descriptor: &P) -> Option<&Descriptor> {
    // SAFETY: 1. the caller's address is a descriptor's, or NULL.
    unsafe { descriptor.cast::<Descriptor>().as_ref() }
}

/// What a call carries of one; nothing of NULL.
///
/// # Safety
///
/// Like [`get`].
pub(crate) unsafe fn content(descriptor: &P) -> &[i32] {
    // SAFETY: 1. the caller's.
    let descriptor = unsafe { get(descriptor) };
    descriptor.map_or(&[], |descriptor| &descriptor.content)
}

/// Bytes of the scalars of a call with this descriptor: eight where its data is of double precision.
pub(crate) fn scalar(descriptor: P) -> usize {
    // SAFETY: 1. it is the argument of a call, which has a descriptor there.
    let descriptor = unsafe { get(&descriptor) };
    // cudnnSetTensorNdDescriptor and others begin with the data type; cublasLtMatmulDescCreate has it behind the computation's.
    match descriptor.and_then(Descriptor::first) {
        Some([64 | 65, ..]) => 2,
        Some([1 | 70 | 71, ..] | [68..=77, 4, ..]) => 8,
        _ => 4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_that_is_called_again_takes_its_arguments_place() {
        let mut descriptor = Descriptor::default();
        let words = |numbers: &[i32]| Words(numbers.to_vec());
        descriptor.set(7, 0, &words(&[1, 2])).unwrap();
        descriptor.set(8, 3, &words(&[5])).unwrap();
        descriptor.set(8, 4, &words(&[6])).unwrap();
        assert_eq!(descriptor.content, [7, 2, 1, 2, 8, 1, 5, 8, 1, 6]);
        descriptor.set(7, 0, &words(&[9, 9])).unwrap();
        assert_eq!(descriptor.content, [7, 2, 9, 9, 8, 1, 5, 8, 1, 6]);
        descriptor.set(7, 0, &words(&[1, 2, 3])).unwrap();
        descriptor.set(8, 4, &words(&[0])).unwrap();
        assert_eq!(descriptor.content, [8, 1, 5, 8, 1, 0, 7, 3, 1, 2, 3]);
        assert_eq!(descriptor.first(), Some(&[5][..]));
        assert_eq!(descriptor.set(9, 0, &words(&[0; MOST])), Err(Failure::TooLong));
    }

    #[test]
    fn numbers_and_bytes_are_words() {
        let mut words = Words::default();
        words.number(0x1_0000_0002_u64);
        words.number(-1_i64);
        words.list(&[1_u8, 0, 0, 0, 5]);
        assert_eq!(words.0, [2, 1, -1, -1, 1, 5]);
    }
}
