//! What calls carry of descriptors: for each function that put something into one, its number, how many words, and the words
//! (accel/client-cuda's `descriptor`; the numbers are `accel_proto::cuda::parts`).
//!
//! Knows no operation.

use accel_proto::List;

use crate::Error;

/// Words of a descriptor; a client's library lets no more in.
const MOST: usize = 4096;

/// A descriptor's content.
#[derive(Debug)]
pub(crate) struct Descriptor(Vec<i32>);

impl Descriptor {
    pub(crate) fn new(words: &List<'_, i32>) -> Result<Self, Error> {
        if words.len() > MOST {
            return Err(Error::Invalid("a descriptor that is longer than any is"));
        }
        let words: Vec<i32> = words.iter().collect();
        let descriptor = Self(words);
        let mut length = 0;
        for (_, words) in descriptor.all() {
            length += words.len() + 2;
        }
        match length == descriptor.0.len() {
            true => Ok(descriptor),
            false => Err(Error::Invalid("a descriptor whose parts are not as long as they say")),
        }
    }

    /// What each function put, in some order.
    pub(crate) fn all(&self) -> impl Iterator<Item = (i32, &[i32])> {
        let mut rest = &self.0[..];
        std::iter::from_fn(move || {
            let [function, count, words @ ..] = rest else {
                return None;
            };
            let (words, behind) = words.split_at_checked(usize::try_from(*count).ok()?)?;
            rest = behind;
            Some((*function, words))
        })
    }

    /// What a function put.
    pub(crate) fn find(&self, function: i32) -> Option<&[i32]> {
        self.all().find_map(|(by, words)| (by == function).then_some(words))
    }
}

/// Two words as a number of 64 bits.
pub(crate) fn long(low: i32, high: i32) -> u64 {
    u64::from(high.cast_unsigned()) << 32 | u64::from(low.cast_unsigned())
}

/// A size of a client's, which has to be one or more.
pub(crate) fn size(number: i32) -> Result<usize, Error> {
    usize::try_from(number)
        .ok()
        .filter(|size| *size > 0)
        .ok_or(Error::Invalid("a size that is zero or negative"))
}

/// A distance or a count of a client's.
pub(crate) fn count(number: i32) -> Result<usize, Error> {
    usize::try_from(number).map_err(|_| Error::Invalid("a count that is negative"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_found_and_what_is_cut_is_refused() {
        let words = [7, 2, 1, 2, 8, 0, 9, 1, -5];
        let descriptor = Descriptor::new(&List::new(&words)).unwrap();
        assert_eq!(descriptor.find(7), Some(&[1, 2][..]));
        assert_eq!(
            (descriptor.find(8), descriptor.find(9)),
            (Some(&[][..]), Some(&[-5][..]))
        );
        assert_eq!(descriptor.find(1), None);
        for cut in [1, 3, 5, 8] {
            assert!(Descriptor::new(&List::new(&words[..cut])).is_err(), "{cut}");
        }
        assert!(Descriptor::new(&List::new(&[7, -1, 0])).is_err());
        assert!(Descriptor::new(&List::new(&[0; 5000])).is_err());
        assert_eq!(long(-1, 1), 0x1_ffff_ffff);
    }
}
