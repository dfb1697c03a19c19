//! Descriptors: values of a client's, which come with each call that has one as what was put into them, and are made again here. What was
//! made is kept for the next call with the same content.
//!
//! ```text
//!   words of a call ──▶ kept? ── yes ──▶ the library's descriptor
//!                          └── no ──▶ made, filled by the functions that the words name, kept
//! ```
//!
//! Knows how words are read, and no function by name.

use std::collections::HashMap;

use accel_proto::List;

use crate::Libraries;
use crate::bytes::Bytes;
use crate::failure::Failure;
use crate::generated::descriptors::{kind, put};
use crate::table::P;

/// Descriptors of a client that are kept; when there are more, all are dropped and made again when they are used.
const MOST: usize = 4096;
/// The one type of which a descriptor without content is no NULL: nothing has to be put into a preference.
const PREFERENCE: &str = "cublasLtMatmulPreference_t";

/// A function that makes one.
pub(crate) type Makes = fn(&Libraries, &mut Words<'_>) -> Result<P, Failure>;
/// A function that puts something into one.
pub(crate) type Puts = fn(&Libraries, P, &mut Words<'_>) -> Result<(), Failure>;
/// A function by which one ends.
pub(crate) type Ends = fn(&Libraries, P) -> Result<(), Failure>;

/// What is known of a type of descriptors.
pub(crate) struct Kind {
    /// The number of the function that makes it.
    pub(crate) number: u16,
    /// Whether that takes words.
    pub(crate) has_words: bool,
    pub(crate) make: Makes,
    pub(crate) end: Ends,
}

/// Those of a client, by type and content.
#[derive(Debug, Default)]
pub(crate) struct Descriptors(HashMap<(&'static str, Vec<i32>), usize>);

impl Descriptors {
    /// The library's for this content; NULL for none.
    pub(crate) fn get(
        &mut self,
        libraries: &Libraries,
        c_type: &'static str,
        content: &List<'_, i32>,
    ) -> Result<P, Failure> {
        if content.is_empty() && c_type != PREFERENCE {
            return Ok(std::ptr::null_mut());
        }
        let key = (c_type, content.iter().collect::<Vec<_>>());
        if let Some(made) = self.0.get(&key) {
            return Ok(std::ptr::with_exposed_provenance_mut(*made));
        }
        let made = make(libraries, c_type, &key.1)?;
        self.0.insert(key, made.expose_provenance());
        Ok(made)
    }

    /// Before a call: so many are kept, and not more. In a call none goes, as it has several.
    pub(crate) fn trim(&mut self, libraries: &Libraries) {
        if self.0.len() > MOST {
            self.clear(libraries);
        }
    }

    /// All of them end.
    pub(crate) fn clear(&mut self, libraries: &Libraries) {
        for ((c_type, _), made) in self.0.drain() {
            let ended = kind(c_type)
                .ok_or(Failure::NotServed)
                .and_then(|kind| (kind.end)(libraries, std::ptr::with_exposed_provenance_mut(made)));
            if let Err(failure) = ended {
                log::warn!("a {c_type} cannot be given back: {failure:?}");
            }
        }
    }
}

/// A new one with that content.
fn make(libraries: &Libraries, c_type: &'static str, content: &[i32]) -> Result<P, Failure> {
    let kind = kind(c_type).ok_or(Failure::InvalidValue)?;
    let mut rest = content;
    let mut no_words = Words(&[]);
    let made = if kind.has_words {
        let (number, mut words) = part(&mut rest)?.ok_or(Failure::InvalidValue)?;
        if number != kind.number {
            return Err(Failure::InvalidValue);
        }
        (kind.make)(libraries, &mut words)?
    } else {
        (kind.make)(libraries, &mut no_words)?
    };
    let filled = fill(libraries, c_type, made, rest);
    if let Err(failure) = filled {
        if let Err(ended) = (kind.end)(libraries, made) {
            log::warn!("a {c_type} cannot be given back: {ended:?}");
        }
        return Err(failure);
    }
    Ok(made)
}

fn fill(libraries: &Libraries, c_type: &'static str, made: P, mut rest: &[i32]) -> Result<(), Failure> {
    while let Some((number, mut words)) = part(&mut rest)? {
        let put = put(c_type, number).ok_or(Failure::InvalidValue)?;
        put(libraries, made, &mut words)?;
    }
    Ok(())
}

/// The next function and its words.
fn part<'w>(rest: &mut &'w [i32]) -> Result<Option<(u16, Words<'w>)>, Failure> {
    let [number, count, words @ ..] = *rest else {
        return if rest.is_empty() {
            Ok(None)
        } else {
            Err(Failure::InvalidValue)
        };
    };
    let number = u16::try_from(*number).map_err(|_| Failure::InvalidValue)?;
    let count = usize::try_from(*count).map_err(|_| Failure::InvalidValue)?;
    let (words, behind) = words.split_at_checked(count).ok_or(Failure::InvalidValue)?;
    *rest = behind;
    Ok(Some((number, Words(words))))
}

/// Words of a function's arguments.
#[derive(Debug)]
pub(crate) struct Words<'w>(&'w [i32]);

impl Words<'_> {
    pub(crate) fn i32(&mut self) -> Result<i32, Failure> {
        let (first, rest) = self.0.split_first().ok_or(Failure::InvalidValue)?;
        self.0 = rest;
        Ok(*first)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Failure> {
        let (low, high) = (self.i32()?.cast_unsigned(), self.i32()?.cast_unsigned());
        Ok(u64::from(low) | (u64::from(high) << 32))
    }

    pub(crate) fn i64(&mut self) -> Result<i64, Failure> {
        self.u64().map(u64::cast_signed)
    }

    pub(crate) fn f64(&mut self) -> Result<f64, Failure> {
        self.u64().map(f64::from_bits)
    }

    pub(crate) fn usize(&mut self) -> Result<usize, Failure> {
        usize::try_from(self.u64()?).map_err(|_| Failure::InvalidValue)
    }

    /// So many numbers.
    pub(crate) fn list(&mut self, count: i32) -> Result<Bytes, Failure> {
        let count = usize::try_from(count).map_err(|_| Failure::InvalidValue)?;
        self.take(count)
    }

    /// Bytes, up to so many words from the end.
    pub(crate) fn bytes(&mut self, behind: usize) -> Result<Bytes, Failure> {
        let count = self.0.len().checked_sub(behind).ok_or(Failure::InvalidValue)?;
        self.take(count)
    }

    fn take(&mut self, count: usize) -> Result<Bytes, Failure> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(Failure::InvalidValue)?;
        self.0 = rest;
        Ok(Bytes::of(Some(&List::new(taken))))
    }

    /// Whether bytes of which so many are said are those that came, in whole words.
    pub(crate) fn covers(said: usize, came: usize) -> Result<(), Failure> {
        if said <= came && came - said < 4 {
            Ok(())
        } else {
            Err(Failure::InvalidValue)
        }
    }

    /// Nothing is left.
    pub(crate) fn finish(&self) -> Result<(), Failure> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(Failure::InvalidValue)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_as_they_are_written() {
        let mut words = Words(&[2, 1, -1, -1, 0, 0x3ff0_0000, 5, 7, 8, 9]);
        assert_eq!(words.u64(), Ok(0x1_0000_0002));
        assert_eq!(words.i64(), Ok(-1));
        assert_eq!(words.f64(), Ok(1.0));
        assert_eq!(words.i32(), Ok(5));
        assert_eq!(words.finish(), Err(Failure::InvalidValue));
        assert_eq!(words.list(3).unwrap().bytes(), [7, 0, 0, 0, 8, 0, 0, 0, 9, 0, 0, 0]);
        assert_eq!(words.finish(), Ok(()));
        assert_eq!(words.i32(), Err(Failure::InvalidValue));
    }

    #[test]
    fn lists_are_no_longer_than_what_came() {
        assert_eq!(Words(&[1, 2]).list(3).unwrap_err(), Failure::InvalidValue);
        assert_eq!(Words(&[1, 2]).list(-1).unwrap_err(), Failure::InvalidValue);
        assert_eq!(Words(&[1]).bytes(2).unwrap_err(), Failure::InvalidValue);
        assert_eq!(Words(&[1, 2, 3]).bytes(2).unwrap().length(), 4);
        for (said, came, fits) in [
            (5, 8, true),
            (8, 8, true),
            (4, 8, false),
            (9, 8, false),
            (usize::MAX, 8, false),
        ] {
            assert_eq!(Words::covers(said, came).is_ok(), fits, "{said} of {came}");
        }
    }

    #[test]
    fn content_that_is_cut_off_is_refused() {
        for content in [&[7][..], &[7, 2, 1], &[7, -1], &[-1, 0], &[0x1_0000, 0]] {
            let mut rest = content;
            assert_eq!(part(&mut rest).unwrap_err(), Failure::InvalidValue, "{content:?}");
        }
        let mut rest = &[7, 1, 9, 8, 0][..];
        let (number, words) = part(&mut rest).unwrap().unwrap();
        assert_eq!((number, words.0), (7, &[9][..]));
        assert_eq!(part(&mut rest).unwrap().unwrap().0, 8);
        assert!(part(&mut rest).unwrap().is_none());
    }
}
