//! Names of objects: which of its client's objects of one kind is meant.
//!
//! The client chooses them, so that it can go on before an object exists; the server looks them up in a table for each
//! kind, so that one of another kind cannot be said. Knows no API's kinds.

use core::fmt;
use core::hash::{Hash, Hasher};
use core::marker::PhantomData;

use crate::plain::Plain;

/// Bits of the index; the rest is the generation.
const INDEX_BITS: u32 = 20;

/// A kind of objects of an API.
pub trait Kind {
    /// Its C type, such as `cl_mem`.
    const C_TYPE: &'static str;
}

/// An object's name: an index into the client's table of the kind, and how often that index was used, from one on. Zero is NULL. What
/// came over the wire may name nothing; the table finds out.
pub struct Handle<K> {
    raw: u32,
    kind: PhantomData<fn() -> K>,
}

impl<K> Handle<K> {
    /// No object.
    pub const NULL: Self = Self::from_raw(0);
    /// How many indices there are.
    pub const INDICES: u32 = 1 << INDEX_BITS;
    /// The first index of objects that the server names itself (`get` in the annotations: platforms and devices). A client names its own
    /// below it, so that the two never meet in one table, as devices and sub-devices would.
    pub const FIRST_TOLD: u32 = Self::INDICES / 2;
    /// The last generation, after which the first comes again.
    pub const LAST_GENERATION: u32 = u32::MAX >> INDEX_BITS;

    /// A name; `None` if the index or the generation is outside of what there is.
    #[must_use]
    pub const fn new(index: u32, generation: u32) -> Option<Self> {
        if index >= Self::INDICES || generation == 0 || generation > Self::LAST_GENERATION {
            return None;
        }
        Some(Self::from_raw(generation << INDEX_BITS | index))
    }

    /// As it came over the wire.
    #[must_use]
    pub const fn from_raw(raw: u32) -> Self {
        Self { raw, kind: PhantomData }
    }

    /// As it goes over the wire.
    #[must_use]
    pub const fn raw(self) -> u32 {
        self.raw
    }

    /// Whether it is NULL.
    #[must_use]
    pub const fn is_null(self) -> bool {
        self.raw == 0
    }

    /// The place in the table, below [`Self::INDICES`].
    #[must_use]
    pub const fn index(self) -> u32 {
        self.raw & (Self::INDICES - 1)
    }

    /// How often the index was used.
    #[must_use]
    pub const fn generation(self) -> u32 {
        self.raw >> INDEX_BITS
    }
}

impl<K: Kind> Handle<K> {
    /// Without its type, for logs and for values that can be of several kinds.
    #[must_use]
    pub const fn any(self) -> AnyHandle {
        AnyHandle {
            c_type: K::C_TYPE,
            raw: self.raw,
        }
    }
}

// By hand, because a derived one would ask the same of the kind.
impl<K> Clone for Handle<K> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<K> Copy for Handle<K> {}

impl<K> PartialEq for Handle<K> {
    fn eq(&self, other: &Self) -> bool {
        self.raw == other.raw
    }
}

impl<K> Eq for Handle<K> {}

impl<K> Hash for Handle<K> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.raw.hash(state);
    }
}

impl<K> fmt::Debug for Handle<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.index(), self.generation())
    }
}

impl<K> Plain for Handle<K> {
    const SIZE: usize = 4;

    fn get(bytes: &[u8]) -> Self {
        Self::from_raw(u32::get(bytes))
    }

    fn put(&self, bytes: &mut [u8]) {
        self.raw.put(bytes);
    }
}

/// A handle whose kind is a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AnyHandle {
    /// The kind's C type.
    pub c_type: &'static str,
    /// As it goes over the wire.
    pub raw: u32,
}

impl AnyHandle {
    /// With its type, if it is of that kind.
    #[must_use]
    pub fn typed<K: Kind>(self) -> Option<Handle<K>> {
        (self.c_type == K::C_TYPE).then(|| Handle::from_raw(self.raw))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    enum Lamp {}
    enum Shade {}

    impl Kind for Lamp {
        const C_TYPE: &'static str = "lamp";
    }

    impl Kind for Shade {
        const C_TYPE: &'static str = "shade";
    }

    #[test]
    fn index_and_generation_are_what_was_put_in() {
        let last = Handle::<Lamp>::INDICES - 1;
        for (index, generation) in [(0, 1), (7, 9), (last, Handle::<Lamp>::LAST_GENERATION)] {
            let handle = Handle::<Lamp>::new(index, generation).unwrap();
            assert_eq!((handle.index(), handle.generation()), (index, generation));
            assert!(!handle.is_null());
            assert_eq!(Handle::from_raw(handle.raw()), handle);
        }
        let told = Handle::<Lamp>::new(Handle::<Lamp>::FIRST_TOLD, 1).unwrap();
        assert_eq!(told.index(), Handle::<Lamp>::FIRST_TOLD);
        let outside = [(last + 1, 1), (0, 0), (0, Handle::<Lamp>::LAST_GENERATION + 1)];
        assert!(
            outside
                .iter()
                .all(|&(index, generation)| Handle::<Lamp>::new(index, generation).is_none())
        );
    }

    #[test]
    fn a_handle_is_of_its_kind_alone() {
        let any = Handle::<Lamp>::new(3, 1).unwrap().any();
        assert!(any.typed::<Lamp>().is_some() && any.typed::<Shade>().is_none());
    }
}
