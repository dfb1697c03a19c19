//! Which names a client's objects have: an index and a generation for each, chosen here so that nobody has to be asked.
//!
//! ```text
//!   never used ──take──▶ in use ──give back (it never existed)──▶ free ──take──▶ in use, next generation
//!                           └──released at a record──▶ waits until that record is done ──▶ free
//! ```
//!
//! A name that the server may still have is never taken again. Knows no kind and no ring: whether a record is done is asked for.

use std::collections::VecDeque;

use accel_proto::Handle;

/// Where a record was put: an end, and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) end: usize,
    pub(crate) number: u64,
}

/// Names of one kind.
#[derive(Debug, Default)]
pub(crate) struct Names {
    /// Indices from here on were never used.
    fresh: u32,
    /// Indices, and the generations that were used last.
    free: Vec<(u32, u32)>,
    /// The same, with the record that releases each.
    released: VecDeque<(u32, u32, Place)>,
}

impl Names {
    /// A name; nothing if all are in use.
    pub(crate) fn take<K>(&mut self, is_done: impl Fn(Place) -> bool) -> Option<Handle<K>> {
        if let Some(&(index, generation, place)) = self.released.front()
            && is_done(place)
        {
            self.released.pop_front();
            self.free.push((index, generation));
        }
        let (index, before) = match self.free.pop() {
            Some(found) => found,
            None if self.fresh < Handle::<K>::FIRST_TOLD => {
                self.fresh += 1;
                (self.fresh - 1, 0)
            }
            None => return None,
        };
        let generation = if before >= Handle::<K>::LAST_GENERATION {
            1
        } else {
            before + 1
        };
        Handle::new(index, generation)
    }

    /// The server has never heard of it.
    pub(crate) fn give_back<K>(&mut self, name: Handle<K>) {
        self.free.push((name.index(), name.generation()));
    }

    /// The server lets go of it with that record.
    pub(crate) fn release<K>(&mut self, name: Handle<K>, place: Place) {
        self.released.push_back((name.index(), name.generation(), place));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    enum Lamp {}

    #[test]
    fn a_name_is_not_taken_again_before_its_release_is_done() {
        let mut names = Names::default();
        let first = names.take::<Lamp>(|_| true).unwrap();
        let place = Place { end: 1, number: 5 };
        names.release(first, place);
        let second = names.take::<Lamp>(|asked| asked != place).unwrap();
        assert_ne!(second.index(), first.index());
        let third = names.take::<Lamp>(|asked| asked == place).unwrap();
        assert_eq!(
            (third.index(), third.generation()),
            (first.index(), first.generation() + 1)
        );
        names.give_back(third);
        assert_eq!(names.take::<Lamp>(|_| true).unwrap().index(), third.index());
    }

    #[test]
    fn generations_go_round_and_indices_end_where_the_servers_begin() {
        let mut names = Names::default();
        let mut last = names.take::<Lamp>(|_| true).unwrap();
        for _ in 0..Handle::<Lamp>::LAST_GENERATION {
            names.give_back(last);
            last = names.take(|_| true).unwrap();
            assert_eq!(last.index(), 0);
        }
        assert_eq!(last.generation(), 1);
        let most = Handle::<Lamp>::FIRST_TOLD;
        for _ in 1..most {
            assert!(names.take::<Lamp>(|_| true).unwrap().index() < most);
        }
        assert_eq!(names.take::<Lamp>(|_| true), None);
    }
}
