//! Arguments as C has them, and places for what comes back: what generated code calls a back end's functions with.
//!
//! All of it is the server's own memory, copied from what a client has sent. Knows no call.

use std::ffi::CStr;

use accel_proto::{Handle, List, MESSAGE, Pieces, Plain, Sorted};

use crate::api::{Code, P};
use crate::objects::Held;

/// The most bytes of one answer: a reply is no longer than a message, and has more than this in it.
const MOST: usize = MESSAGE - 256;

/// NULL.
const NULL: P = std::ptr::null_mut();

/// Several objects.
#[derive(Debug, Default)]
pub(crate) struct Many {
    raws: Option<Vec<P>>,
    /// Until the call has returned.
    _held: Vec<Held>,
}

impl Many {
    pub(crate) fn new(held: Vec<Held>) -> Self {
        Self {
            raws: Some(held.iter().map(|held| held.raw()).collect()),
            _held: held,
        }
    }

    pub(crate) fn pointer(&self) -> P {
        self.raws.as_ref().map_or(NULL, |raws| raws.as_ptr().cast_mut().cast())
    }
}

/// Numbers or bytes, aligned as any type of the API.
#[derive(Debug)]
pub(crate) struct Bytes(Option<Vec<u128>>);

impl Bytes {
    pub(crate) fn new<T: Plain>(list: Option<&List<'_, T>>) -> Self {
        Self(list.map(|list| {
            let mut bytes = vec![0; list.len() * T::SIZE];
            for (place, value) in bytes.chunks_exact_mut(T::SIZE).zip(list.iter()) {
                value.put(place);
            }
            aligned(&bytes)
        }))
    }

    /// As they are.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self(Some(aligned(bytes)))
    }

    pub(crate) fn pointer(&self) -> P {
        self.0.as_ref().map_or(NULL, |words| words.as_ptr().cast_mut().cast())
    }
}

fn aligned(bytes: &[u8]) -> Vec<u128> {
    let words = bytes.chunks(size_of::<u128>()).map(|chunk| {
        let mut word = [0; size_of::<u128>()];
        word[..chunk.len()].copy_from_slice(chunk);
        u128::from_ne_bytes(word)
    });
    words.collect()
}

/// Pairs that end with a zero, with objects in the place of their names.
#[derive(Debug)]
pub(crate) struct Properties {
    pub(crate) words: Option<Vec<u64>>,
    /// Until the call has returned.
    pub(crate) _held: Vec<Held>,
}

impl Properties {
    pub(crate) fn pointer(&self) -> P {
        self.words
            .as_ref()
            .map_or(NULL, |words| words.as_ptr().cast_mut().cast())
    }
}

/// Pieces of bytes, each with a zero behind it, so that they are strings, too.
#[derive(Debug)]
pub(crate) struct Copies {
    pointers: Option<Vec<P>>,
    lengths: Vec<u64>,
    _bytes: Vec<Vec<u8>>,
}

impl Copies {
    /// Read by `read`, which knows the arena.
    pub(crate) fn new(
        pieces: Option<&Pieces<'_>>,
        read: impl Fn(accel_proto::Span) -> Result<Vec<u8>, Code>,
    ) -> Result<Self, Code> {
        let Some(pieces) = pieces else {
            return Ok(Self {
                pointers: None,
                lengths: Vec::new(),
                _bytes: Vec::new(),
            });
        };
        let copy = |span| {
            let mut bytes = read(span)?;
            bytes.push(0);
            Ok(bytes)
        };
        let bytes: Vec<Vec<u8>> = pieces.spans().map(copy).collect::<Result<_, _>>()?;
        // One whose length no sum can hold is missing.
        if bytes.len() != pieces.lengths.len() {
            return Err(Code::INVALID_VALUE);
        }
        Ok(Self {
            pointers: Some(bytes.iter().map(|bytes| bytes.as_ptr().cast_mut().cast()).collect()),
            lengths: pieces.lengths.iter().collect(),
            _bytes: bytes,
        })
    }

    pub(crate) fn pointer(&self) -> P {
        self.pointers
            .as_ref()
            .map_or(NULL, |pointers| pointers.as_ptr().cast_mut().cast())
    }

    pub(crate) fn lengths(&self) -> P {
        self.lengths.as_ptr().cast_mut().cast()
    }
}

/// A place for an object that the client has a name for, or that the server needs.
#[derive(Debug)]
pub(crate) struct Place {
    raw: P,
    asked: bool,
}

impl Place {
    pub(crate) fn new<K>(name: Handle<K>, is_needed: bool) -> Self {
        Self {
            raw: NULL,
            asked: is_needed || !name.is_null(),
        }
    }

    pub(crate) fn pointer(&mut self) -> P {
        if self.asked { (&raw mut self.raw).cast() } else { NULL }
    }

    pub(crate) fn raw(&self) -> P {
        self.raw
    }
}

/// Places for several.
#[derive(Debug)]
pub(crate) struct Places(pub(crate) Option<Vec<P>>);

impl Places {
    pub(crate) fn new<K: Sorted>(names: Option<&List<'_, Handle<K>>>) -> Result<Self, Code> {
        let named = names.is_none_or(|names| names.iter().all(|name| !name.is_null()));
        if !named {
            return Err(Code::INVALID_VALUE);
        }
        Ok(Self(names.map(|names| vec![NULL; names.len()])))
    }

    pub(crate) fn pointer(&mut self) -> P {
        self.0.as_mut().map_or(NULL, |raws| raws.as_mut_ptr().cast())
    }
}

/// A place for an answer of elements, no longer than a reply can be.
#[derive(Debug)]
pub(crate) struct Answer {
    store: Option<Vec<u64>>,
    /// How many elements there is room for.
    count: u64,
    /// Bytes of each.
    size: usize,
}

impl Answer {
    /// For up to so many elements of that size, if it is asked for.
    pub(crate) fn new(asked: bool, count: u64, size: usize) -> Self {
        let most = (MOST / size) as u64;
        let count = count.min(most);
        let bytes = usize::try_from(count).unwrap_or_default() * size;
        Self {
            store: asked.then(|| vec![0; bytes.div_ceil(size_of::<u64>())]),
            count,
            size,
        }
    }

    /// For exactly so many.
    pub(crate) fn whole(asked: bool, count: u64, size: usize) -> Result<Self, Code> {
        let answer = Self::new(asked, count, size);
        if answer.count == count {
            Ok(answer)
        } else {
            Err(Code::INVALID_VALUE)
        }
    }

    /// How many elements to ask for where the client asks for so many.
    pub(crate) fn limit<T: TryFrom<u64> + Copy>(&self, given: T) -> T {
        match &self.store {
            Some(_) => T::try_from(self.count).unwrap_or(given),
            None => given,
        }
    }

    pub(crate) fn pointer(&mut self) -> P {
        self.store.as_mut().map_or(NULL, |store| store.as_mut_ptr().cast())
    }

    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// What has come: so many elements as the back end says, and never more than there was room for.
    pub(crate) fn words(&self, count: u64) -> impl Iterator<Item = u64> {
        let store = self.store.as_deref().unwrap_or_default();
        store
            .iter()
            .copied()
            .take(usize::try_from(count.min(self.count)).unwrap_or_default())
    }

    /// Bytes, of elements of one byte.
    pub(crate) fn bytes(&self, count: u64) -> Vec<u8> {
        let store = self.store.as_deref().unwrap_or_default();
        let mut bytes: Vec<u8> = store.iter().flat_map(|word| word.to_ne_bytes()).collect();
        bytes.truncate(usize::try_from(count.min(self.count)).unwrap_or_default() * self.size);
        bytes
    }

    /// Objects of the back end's.
    pub(crate) fn objects(&self, count: u64) -> Vec<P> {
        self.words(count)
            .filter_map(|word| usize::try_from(word).ok())
            .map(std::ptr::with_exposed_provenance_mut)
            .collect()
    }

    /// Elements; numbers and members have their least significant byte first on this host, as on the wire.
    pub(crate) fn values<T: Plain>(&self, count: u64) -> Vec<T> {
        self.bytes(count).chunks_exact(T::SIZE).map(T::get).collect()
    }

    /// Changes the elements of eight bytes of an answer.
    pub(crate) fn replace(&mut self, count: u64, mut other: impl FnMut(u64) -> u64) {
        let count = usize::try_from(count.min(self.count)).unwrap_or_default() / size_of::<u64>();
        for word in self.store.iter_mut().flatten().take(count) {
            *word = other(*word);
        }
    }
}

/// A place for a number, if it is asked for.
pub(crate) fn ask<T>(place: &mut T, asked: bool) -> P {
    if asked { std::ptr::from_mut(place).cast() } else { NULL }
}

/// Whether a list is there of which there are so many; back ends may read it without a look.
pub(crate) fn there(is_there: bool, count: u64, code: Code) -> Result<(), Code> {
    if is_there || count == 0 { Ok(()) } else { Err(code) }
}

/// A string.
pub(crate) fn text(text: Option<&CStr>) -> P {
    text.map_or(NULL, |text| text.as_ptr().cast_mut().cast())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_never_longer_than_its_room() {
        let answer = Answer::new(true, u64::MAX, 1);
        assert!(answer.limit(u64::MAX) == MOST as u64 && answer.bytes(u64::MAX).len() == MOST);
        let three = Answer::new(true, 3, 1);
        assert_eq!(
            (three.bytes(9).len(), three.bytes(2).len(), three.limit(3_u32)),
            (3, 2, 3)
        );
        let unasked = Answer::new(false, 7, 1);
        assert_eq!((unasked.bytes(7).len(), unasked.limit(7_u64)), (0, 7));
        assert!(Answer::whole(true, u64::MAX, 8).is_err());
    }

    #[test]
    fn bytes_are_aligned_and_as_they_were() {
        let bytes = Bytes::of(&[1, 2, 3]);
        assert!(bytes.pointer().cast::<u128>().is_aligned());
        let numbers = Bytes::new(Some(&List::new(&[7_u64, 9])));
        assert_eq!(numbers.0, Some(vec![9 << 64 | 7]));
        assert!(Bytes::new::<u64>(None).pointer().is_null());
    }
}
