//! What of a client is saved, and how it gets that back. Knows no call.

use std::sync::{Arc, Mutex, PoisonError};

use super::{Image, Order};
use crate::api::{Code, P};
use crate::objects::{Held, Object, Sort};
use crate::session::Client;
use crate::table::{SavedPlace, Table};

/// A client's names, as they are saved.
#[derive(Debug)]
pub(crate) struct SavedTables {
    /// Of each sort.
    pub(crate) places: Vec<Vec<SavedPlace>>,
    /// Platforms and devices that it was told of.
    pub(crate) told: [Vec<P>; 2],
}

impl Client {
    /// One with so many threads that can be saved; one that was has memory out of the image of it.
    pub(crate) fn saved(mut self, threads: usize, image: Option<Arc<Image>>) -> Self {
        self.order = Some(Order::default());
        self.turns = (0..threads).map(|_| Mutex::default()).collect();
        self._image = image;
        self
    }

    /// There is something that nobody could make again.
    pub(crate) fn cannot_be_saved(&self, reason: &'static str) {
        // The first reason is as good as others.
        _ = self.unsaved.set(reason);
    }

    pub(crate) fn unsaved(&self) -> Option<&'static str> {
        self.unsaved.get().copied()
    }

    /// All queues that may have commands: the client's, those that others need, and those that it has released.
    pub(crate) fn queues(&self) -> Vec<Held> {
        let mut queues: Vec<Held> = match self.tables().get(Sort::CommandQueue as usize) {
            Some(table) => table.all().collect(),
            None => Vec::new(),
        };
        let retired = self.retired.lock().unwrap_or_else(PoisonError::into_inner);
        queues.extend(retired.iter().map(|(queue, _)| queue.clone()));
        queues
    }

    /// Queues that were released go: their commands are complete.
    pub(crate) fn forget_retired(&self) {
        let retired = std::mem::take(&mut *self.retired.lock().unwrap_or_else(PoisonError::into_inner));
        drop(retired);
    }

    /// All objects that the client has a name for.
    pub(crate) fn all_objects(&self) -> Vec<Held> {
        self.tables().iter().flat_map(Table::all).collect()
    }

    pub(crate) fn saved_tables(&self) -> SavedTables {
        let tables = self.tables();
        let told = |sort: Sort| {
            let table = tables.get(sort as usize);
            table.map_or_else(Vec::new, |table| {
                table.told().iter().map(|object| object.raw()).collect()
            })
        };
        SavedTables {
            places: tables.iter().map(Table::places).collect(),
            told: [told(Sort::Platform), told(Sort::Device)],
        }
    }

    /// The client's name of an object that the back end says the address of.
    pub(crate) fn name_of(&self, sort: Sort, address: u64) -> Option<u32> {
        let raw: P = std::ptr::with_exposed_provenance_mut(usize::try_from(address).ok()?);
        self.tables().get(sort as usize)?.name_of(raw)
    }

    /// A name is about to be an object's that is made again.
    pub(crate) fn make_room(&self, sort: Sort, name: u32) {
        let before = self
            .tables_mut()
            .get_mut(sort as usize)
            .and_then(|table| table.make_room(name));
        drop(before);
    }

    /// An object under the name that it had.
    pub(crate) fn insert_object(&self, sort: Sort, name: u32, mut object: Object) -> Result<(), Code> {
        object.name = name;
        let object = Arc::new(object);
        let inserted = match self.tables_mut().get_mut(sort as usize) {
            Some(table) => table.insert(name, Arc::clone(&object)),
            None => Err(Code::INVALID_VALUE),
        };
        drop(object);
        inserted
    }

    /// Takes an object away from its name, for another in its place.
    pub(crate) fn vacate(&self, sort: Sort, name: u32) -> Option<Arc<Object>> {
        self.tables_mut().get_mut(sort as usize)?.vacate(name)
    }

    /// The object that was taken away, in its place again.
    pub(crate) fn put_back(&self, sort: Sort, name: u32, object: Arc<Object>) {
        let mut tables = self.tables_mut();
        let table = tables.get_mut(sort as usize);
        let before = table.and_then(|table| {
            let before = table.vacate(name);
            // Its place is free.
            _ = table.insert(name, object);
            before
        });
        drop(tables);
        drop(before);
    }

    /// All names are what they were, once the objects are there. False if one is missing.
    pub(crate) fn settle(&self, places: &[Vec<SavedPlace>]) -> bool {
        let mut complete = places.len() == Sort::ALL.len();
        let mut dropped = Vec::new();
        for (table, places) in self.tables_mut().iter_mut().zip(places) {
            let (there, gone) = table.settle(places);
            complete &= there;
            dropped.extend(gone);
        }
        drop(dropped);
        complete
    }
}
