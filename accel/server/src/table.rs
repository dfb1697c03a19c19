//! Tables of objects by name: which object a client means, or that it has none under a name any more. Knows no call.

use std::sync::{Arc, Weak};

use accel_proto::Handle;
use accel_proto::opencl::Mem;
use serde::{Deserialize, Serialize};

use crate::api::{Code, P};
use crate::objects::{Held, Object, Sort};

/// A place in a table.
#[derive(Debug)]
enum Slot {
    /// Its last name was of this generation; zero if it had none.
    Free(u32),
    /// The client holds it.
    Live(u32, Arc<Object>),
    /// The client has released it; others may still need it, and then it is found.
    Released(u32, Weak<Object>),
    /// It was never made, and nobody has waited to hear why.
    Failed(u32, Code),
}

impl Slot {
    fn generation(&self) -> u32 {
        match self {
            Self::Free(generation)
            | Self::Live(generation, _)
            | Self::Released(generation, _)
            | Self::Failed(generation, _) => *generation,
        }
    }

    fn object(&self) -> Option<Arc<Object>> {
        match self {
            Self::Live(_, object) => Some(Arc::clone(object)),
            Self::Released(_, object) => object.upgrade(),
            Self::Free(_) | Self::Failed(..) => None,
        }
    }
}

/// What a place in a table was when it was saved: the generation of its last name, and whether there is an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum SavedPlace {
    Free(u32),
    Live(u32),
    Released(u32),
    Failed(u32, i32),
}

/// Objects of one sort.
#[derive(Debug)]
pub(crate) struct Table {
    sort: Sort,
    /// What the client names.
    own: Vec<Slot>,
    /// What it is told of, from [`Handle::FIRST_TOLD`] on.
    told: Vec<Arc<Object>>,
}

impl Table {
    pub(crate) fn new(sort: Sort) -> Self {
        Self {
            sort,
            own: Vec::new(),
            told: Vec::new(),
        }
    }

    /// The object with that name.
    pub(crate) fn find(&self, name: u32) -> Result<Held, Code> {
        let handle = Handle::<Mem>::from_raw(name);
        let index = handle.index() as usize;
        if let Some(told) = index.checked_sub(Handle::<Mem>::FIRST_TOLD as usize) {
            let found = self.told.get(told).filter(|_| handle.generation() == 1);
            return found
                .map(|object| Held(Arc::clone(object)))
                .ok_or(Code(self.sort.invalid()));
        }
        let slot = self
            .own
            .get(index)
            .filter(|slot| slot.generation() == handle.generation());
        match slot {
            Some(Slot::Failed(_, code)) => Err(*code),
            // Nothing puts commands into one that was released, though events need it, or the work that it still has.
            Some(Slot::Released(..)) if self.sort == Sort::CommandQueue => Err(Code(self.sort.invalid())),
            slot => slot.and_then(Slot::object).map(Held).ok_or(Code(self.sort.invalid())),
        }
    }

    /// Gives an object the name that the client chose.
    pub(crate) fn insert(&mut self, name: u32, object: Arc<Object>) -> Result<(), Code> {
        let generation = Handle::<Mem>::from_raw(name).generation();
        *self.free(name)? = Slot::Live(generation, object);
        Ok(())
    }

    /// Under that name nothing was made.
    pub(crate) fn fail(&mut self, name: u32, code: Code) {
        let generation = Handle::<Mem>::from_raw(name).generation();
        if let Ok(slot) = self.free(name) {
            *slot = Slot::Failed(generation, code);
        }
    }

    /// A place that has no object, for a name that it did not have before.
    fn free(&mut self, name: u32) -> Result<&mut Slot, Code> {
        let handle = Handle::<Mem>::from_raw(name);
        let (index, generation) = (handle.index() as usize, handle.generation());
        if generation == 0 || handle.index() >= Handle::<Mem>::FIRST_TOLD {
            return Err(Code::INVALID_VALUE);
        }
        if index >= self.own.len() {
            self.own.resize_with(index + 1, || Slot::Free(0));
        }
        match self.own.get_mut(index) {
            Some(Slot::Live(..)) | None => Err(Code::INVALID_VALUE),
            Some(slot) if slot.generation() == generation => Err(Code::INVALID_VALUE),
            Some(slot) => Ok(slot),
        }
    }

    /// The client lets go: what it has held, which the caller drops when the table is no longer locked.
    pub(crate) fn release(&mut self, name: u32) -> Result<Option<Arc<Object>>, Code> {
        let handle = Handle::<Mem>::from_raw(name);
        if handle.index() >= Handle::<Mem>::FIRST_TOLD {
            // What was told stays.
            return self.find(name).map(|_| None);
        }
        let slot = self.own.get_mut(handle.index() as usize);
        let slot = slot.filter(|slot| slot.generation() == handle.generation());
        match slot {
            Some(slot @ Slot::Live(..)) => {
                let released = slot.object();
                let weak = released.as_ref().map(Arc::downgrade).unwrap_or_default();
                *slot = Slot::Released(handle.generation(), weak);
                Ok(released)
            }
            Some(slot @ Slot::Failed(..)) => {
                *slot = Slot::Free(handle.generation());
                Ok(None)
            }
            _ => Err(Code(self.sort.invalid())),
        }
    }

    /// The name of something that the client is told of.
    pub(crate) fn tell(&mut self, raw: P, object: impl FnOnce() -> Object) -> u32 {
        if let Some(name) = self.name_of(raw) {
            return name;
        }
        self.told.push(Arc::new(object()));
        Self::told_name(self.told.len() - 1)
    }

    fn told_name(place: usize) -> u32 {
        let index = u32::try_from(place)
            .ok()
            .and_then(|place| place.checked_add(Handle::<Mem>::FIRST_TOLD));
        index
            .and_then(|index| Handle::<Mem>::new(index, 1))
            .map_or(0, Handle::raw)
    }

    /// The name of an object of the back end's; asked for by few queries, whose answers clients keep.
    pub(crate) fn name_of(&self, raw: P) -> Option<u32> {
        let told = self.told.iter().position(|object| object.raw() == raw);
        told.map(Self::told_name).or_else(|| {
            let found = (0..)
                .zip(&self.own)
                .find(|(_, slot)| slot.object().is_some_and(|object| object.raw() == raw));
            let (index, slot) = found?;
            Handle::<Mem>::new(index, slot.generation()).map(Handle::raw)
        })
    }

    /// The place of each name that the client has chosen.
    pub(crate) fn places(&self) -> Vec<SavedPlace> {
        let place = |slot: &Slot| match slot {
            Slot::Free(generation) => SavedPlace::Free(*generation),
            Slot::Live(generation, _) => SavedPlace::Live(*generation),
            // Where nobody needs it any more, its name is not found any more.
            Slot::Released(generation, object) if object.strong_count() == 0 => SavedPlace::Free(*generation),
            Slot::Released(generation, _) => SavedPlace::Released(*generation),
            Slot::Failed(generation, code) => SavedPlace::Failed(*generation, code.0),
        };
        self.own.iter().map(place).collect()
    }

    /// Objects that the client was told of, in the order of their names.
    pub(crate) fn told(&self) -> &[Arc<Object>] {
        &self.told
    }

    /// Makes room for an object with that name, as there was when it was made: what has the place under another name is released.
    pub(crate) fn make_room(&mut self, name: u32) -> Option<Arc<Object>> {
        let handle = Handle::<Mem>::from_raw(name);
        let slot = self.own.get(handle.index() as usize)?;
        match slot {
            Slot::Live(generation, _) if *generation != handle.generation() => {
                let before = Handle::<Mem>::new(handle.index(), *generation).map_or(0, Handle::raw);
                self.release(before).ok().flatten()
            }
            _ => None,
        }
    }

    /// Brings all places to what they were, once the objects are there: those that were released are. What is dropped thereby is to be
    /// dropped when the table is no longer locked. False if an object is missing.
    pub(crate) fn settle(&mut self, places: &[SavedPlace]) -> (bool, Vec<Arc<Object>>) {
        let mut complete = true;
        let mut dropped = Vec::new();
        if self.own.len() < places.len() {
            self.own.resize_with(places.len(), || Slot::Free(0));
        }
        for (slot, place) in self.own.iter_mut().zip(places) {
            let there = match slot {
                Slot::Live(generation, object) => Some((*generation, Arc::clone(object))),
                _ => None,
            };
            *slot = match (*place, there) {
                (SavedPlace::Live(wanted), Some((generation, object))) if wanted == generation => {
                    Slot::Live(generation, object)
                }
                (SavedPlace::Released(wanted), Some((generation, object))) if wanted == generation => {
                    let weak = Arc::downgrade(&object);
                    dropped.push(object);
                    Slot::Released(generation, weak)
                }
                (SavedPlace::Live(_) | SavedPlace::Released(_), _) => {
                    complete = false;
                    continue;
                }
                (SavedPlace::Free(generation), there) => {
                    dropped.extend(there.map(|(_, object)| object));
                    Slot::Free(generation)
                }
                (SavedPlace::Failed(generation, code), there) => {
                    dropped.extend(there.map(|(_, object)| object));
                    Slot::Failed(generation, Code(code))
                }
            };
        }
        (complete, dropped)
    }

    /// Takes an object away from its name, as if it had never had it.
    pub(crate) fn vacate(&mut self, name: u32) -> Option<Arc<Object>> {
        let handle = Handle::<Mem>::from_raw(name);
        let slot = self.own.get_mut(handle.index() as usize)?;
        match std::mem::replace(slot, Slot::Free(0)) {
            Slot::Live(generation, object) if generation == handle.generation() => Some(object),
            before => {
                *slot = before;
                None
            }
        }
    }

    /// All that are there.
    pub(crate) fn all(&self) -> impl Iterator<Item = Held> {
        self.own.iter().filter_map(Slot::object).map(Held)
    }

    /// Lets all go that the client holds: what it has held, to be dropped when the table is no longer locked.
    pub(crate) fn clear(&mut self) -> Vec<Arc<Object>> {
        let held = std::mem::take(&mut self.own).into_iter().filter_map(|slot| match slot {
            Slot::Live(_, object) => Some(object),
            Slot::Free(_) | Slot::Released(..) | Slot::Failed(..) => None,
        });
        held.collect()
    }
}
