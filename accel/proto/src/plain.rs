//! Values of a fixed size as little-endian bytes, and lists of them that are read where they are.
//!
//! Total: bytes that are missing count as zeroes. Whoever calls has counted them (`reader`).

use core::fmt;
use core::marker::PhantomData;

/// A value of a fixed size.
pub trait Plain: Copy {
    /// How many bytes it has on the wire.
    const SIZE: usize;

    /// From its bytes.
    fn get(bytes: &[u8]) -> Self;

    /// To its bytes.
    fn put(&self, bytes: &mut [u8]);
}

macro_rules! number {
    ($($type:ty),*) => {$(
        impl Plain for $type {
            const SIZE: usize = size_of::<$type>();

            fn get(bytes: &[u8]) -> Self {
                bytes.first_chunk().map_or(0, |bytes| <$type>::from_le_bytes(*bytes))
            }

            fn put(&self, bytes: &mut [u8]) {
                if let Some(place) = bytes.first_chunk_mut() {
                    *place = self.to_le_bytes();
                }
            }
        }
    )*};
}

number!(u8, i32, u32, i64, u64);

/// Members of a structure, one behind the other.
pub(crate) struct Members<'a>(pub(crate) &'a [u8]);

impl Members<'_> {
    pub(crate) fn next<T: Plain>(&mut self) -> T {
        let (member, rest) = self.0.split_at_checked(T::SIZE).unwrap_or((self.0, &[]));
        self.0 = rest;
        T::get(member)
    }
}

/// The same, to be written.
pub(crate) struct MembersMut<'a>(pub(crate) &'a mut [u8]);

impl MembersMut<'_> {
    pub(crate) fn next<T: Plain>(&mut self, value: T) {
        let bytes = core::mem::take(&mut self.0);
        let at = T::SIZE.min(bytes.len());
        let (member, rest) = bytes.split_at_mut(at);
        self.0 = rest;
        value.put(member);
    }
}

/// Several values: a slice of the client's that is to be sent, or bytes that have come. Elements are read when they are asked for, so
/// that a list costs no allocation.
#[derive(Clone, Copy)]
pub struct List<'a, T> {
    form: Form<'a, T>,
    kind: PhantomData<T>,
}

#[derive(Clone, Copy)]
enum Form<'a, T> {
    Values(&'a [T]),
    Wire(&'a [u8]),
}

impl<'a, T: Plain> List<'a, T> {
    /// Values that are to be sent.
    #[must_use]
    pub const fn new(values: &'a [T]) -> Self {
        Self {
            form: Form::Values(values),
            kind: PhantomData,
        }
    }

    /// Bytes of whole elements.
    pub(crate) const fn wire(bytes: &'a [u8]) -> Self {
        Self {
            form: Form::Wire(bytes),
            kind: PhantomData,
        }
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        match self.form {
            Form::Values(values) => values.len(),
            Form::Wire(bytes) => bytes.len() / T::SIZE,
        }
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The element with that index.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<T> {
        match self.form {
            Form::Values(values) => values.get(index).copied(),
            Form::Wire(bytes) => bytes.chunks_exact(T::SIZE).nth(index).map(T::get),
        }
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = T> + use<'a, T> {
        let form = self.form;
        (0..self.len()).filter_map(move |index| match form {
            Form::Values(values) => values.get(index).copied(),
            Form::Wire(bytes) => bytes.get(index * T::SIZE..).map(T::get),
        })
    }
}

impl<T: Plain> List<'_, T> {
    /// All of them as bytes; nothing where there is no room for all.
    pub(crate) fn put_all(&self, place: &mut [u8]) {
        match self.form {
            Form::Values(values) if place.len() == values.len() * T::SIZE => {
                for (value, place) in values.iter().zip(place.chunks_exact_mut(T::SIZE)) {
                    value.put(place);
                }
            }
            Form::Wire(bytes) if place.len() == bytes.len() => place.copy_from_slice(bytes),
            Form::Values(_) | Form::Wire(_) => {}
        }
    }
}

impl<'a> List<'a, u8> {
    /// Bytes as they are.
    #[must_use]
    pub fn bytes(&self) -> &'a [u8] {
        match self.form {
            Form::Values(bytes) | Form::Wire(bytes) => bytes,
        }
    }
}

impl<T: Plain + PartialEq> PartialEq for List<'_, T> {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl<T: Plain + fmt::Debug> fmt::Debug for List<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // What a guest sends may be long; a log line is not.
        f.debug_list().entries(self.iter().take(16)).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_values_is_equal_to_its_bytes() {
        let values = [1_u32, 0x0203_0405, u32::MAX];
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let (sent, came) = (List::new(&values), List::<u32>::wire(&bytes));
        assert_eq!(sent, came);
        assert_eq!(came.get(1), Some(0x0203_0405));
        assert_eq!((came.get(3), came.len(), sent.len()), (None, 3, 3));
        assert_ne!(came, List::new(&values[1..]));
    }

    #[test]
    fn missing_bytes_are_zeroes_and_never_a_panic() {
        assert_eq!(u64::get(&[1, 2, 3]), 0);
        5_u32.put(&mut [0; 2]);
        let mut members = Members(&[1, 0, 0, 0, 9]);
        assert_eq!(
            (members.next::<u32>(), members.next::<u64>(), members.next::<u8>()),
            (1, 0, 0)
        );
        let mut short = [7; 5];
        let mut members = MembersMut(&mut short);
        members.next(1_u32);
        members.next(2_u64);
        assert_eq!(short, [1, 0, 0, 0, 7]);
    }
}
