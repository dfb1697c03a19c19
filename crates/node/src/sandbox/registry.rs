//! All sandboxes of the node, by id, and which slot the next one gets. Writes no record, and knows not what sandboxes hold of the host.
//!
//! Two locks. `entries` comes first; `slots` and what entries hold are locked while that is held. It is held for moments, or for as
//! long as a record is written, or a volume hidden, of which nobody may become a user meanwhile.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use node_api::list::Place;
use node_api::{ListConfig, Sandbox};

use crate::Error;
use crate::sandbox::entry::Entry;
use crate::sandbox::names;
use crate::sandbox::slots::Slots;
use crate::store::database::{MAX_SANDBOXES, Stored};

/// The sandboxes that are known.
#[derive(Debug, Default)]
pub(crate) struct Sandboxes {
    entries: Mutex<BTreeMap<String, Arc<Entry>>>,
    /// Taken while `entries` is held.
    slots: Mutex<Slots>,
}

impl Sandboxes {
    /// None yet; the slots go on behind `last`, the newest that was taken.
    pub(crate) fn behind(last: Option<u32>) -> Self {
        Self {
            entries: Mutex::default(),
            slots: Mutex::new(Slots::behind(last)),
        }
    }

    /// The table. As long as this is held no sandbox comes or goes.
    pub(crate) fn entries(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Entry>>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All, the oldest first.
    pub(crate) fn list(&self) -> Vec<Sandbox> {
        let mut all: Vec<Sandbox> = self.entries().values().map(|entry| entry.stored().sandbox).collect();
        all.sort_by(|a, b| (a.created_ns, &a.id).cmp(&(b.created_ns, &b.id)));
        all
    }

    /// Those of a list that somebody may see, and what each is. Of many only those are copied that are told.
    pub(crate) fn asked_for(
        &self,
        wanted: &ListConfig,
        is_seen: impl Fn(&Sandbox) -> bool,
    ) -> Vec<(Arc<Entry>, Sandbox)> {
        let is_asked_for = |entry: &Arc<Entry>| {
            let inner = entry.lock();
            let sandbox = &inner.stored.sandbox;
            (is_seen(sandbox) && wanted.has(sandbox)).then(|| (Place::of(sandbox), Arc::clone(entry)))
        };
        let found = self.entries().values().filter_map(is_asked_for).collect();
        let told = wanted.in_order(found).filter_map(|entry| {
            let sandbox = entry.stored().sandbox;
            // It may be in another state by now: the next one takes its place, as a page that is not full is the last.
            wanted.has(&sandbox).then_some((entry, sandbox))
        });
        told.take(wanted.limit.unwrap_or(usize::MAX)).collect()
    }

    /// The one of this id or this name, or whose id begins so. Whoever writes a whole id means that, whatever others are called.
    pub(crate) fn find(&self, wanted: &str) -> Result<Arc<Entry>, Error> {
        let entries = self.entries();
        let is_called = |entry: &&Arc<Entry>| entry.lock().stored.sandbox.name == wanted;
        if let Some(entry) = entries.get(wanted).or_else(|| entries.values().find(is_called)) {
            return Ok(Arc::clone(entry));
        }
        let mut found = entries.values().filter(|entry| entry.id.starts_with(wanted));
        match (found.next(), found.next()) {
            (Some(entry), None) if !wanted.is_empty() => Ok(Arc::clone(entry)),
            (Some(_), Some(_)) if !wanted.is_empty() => Err(Error::Ambiguous(wanted.to_owned())),
            _ => Err(Error::NotFound(wanted.to_owned())),
        }
    }

    /// How many have a VM.
    pub(crate) fn running(&self) -> usize {
        self.entries().values().filter(|entry| entry.state().has_vm()).count()
    }

    /// The slots of the next ones.
    pub(crate) fn coming_slots(&self, count: usize) -> Vec<u32> {
        let entries = self.entries();
        let taken = entries.values().map(|entry| entry.lock().stored.slot).collect();
        let slots = *self.slots();
        slots.coming(taken, MAX_SANDBOXES, count)
    }

    /// Gives one a name and a slot, has its record written, and enters it: from here on it is known. `name` is made up where it is not
    /// given. The table is held meanwhile, so that nobody else gets the same; one whose record cannot be written is not entered.
    pub(crate) fn register(
        &self,
        mut stored: Stored,
        name: Option<&str>,
        write: impl FnOnce(&Stored) -> Result<(), Error>,
    ) -> Result<Arc<Entry>, Error> {
        let mut entries = self.entries();
        let taken: Vec<(String, String, u32)> = entries
            .values()
            .map(|entry| {
                let inner = entry.lock();
                (inner.stored.sandbox.name.clone(), entry.id.clone(), inner.stored.slot)
            })
            .collect();
        stored.sandbox.name = match name {
            Some(name) => match taken.iter().find(|(other, ..)| other == name) {
                Some((name, id, _)) => {
                    return Err(Error::NameTaken {
                        name: name.clone(),
                        id: id.clone(),
                    });
                }
                None => name.to_owned(),
            },
            None => names::make(&stored.sandbox.id, |name| taken.iter().any(|(other, ..)| other == name)),
        };
        let slots = taken.iter().map(|(.., slot)| *slot).collect();
        stored.slot = self
            .slots()
            .take(&slots, MAX_SANDBOXES)
            .ok_or(Error::Full(MAX_SANDBOXES))?;
        stored.generation = 1;
        write(&stored)?;
        let entry = Entry::new(stored);
        entries.insert(entry.id.clone(), Arc::clone(&entry));
        Ok(entry)
    }

    /// Takes one out of the table; it is fine if it is not there.
    pub(crate) fn remove(&self, entry: &Entry) {
        self.entries().remove(&entry.id);
    }
}

#[cfg(test)]
mod tests {
    use node_api::State;

    use super::*;
    use crate::testing::stored;

    fn register(sandboxes: &Sandboxes, id: &str, name: Option<&str>) -> Result<Arc<Entry>, Error> {
        sandboxes.register(stored(id, ""), name, |_| Ok(()))
    }

    #[test]
    fn a_sandbox_is_found_by_its_name_its_id_or_what_that_begins_with() {
        let sandboxes = Sandboxes::default();
        let web = register(&sandboxes, "aaaa00000000", Some("web")).unwrap();
        register(&sandboxes, "aabb00000000", Some("aaaa")).unwrap();
        let found = |wanted: &str| sandboxes.find(wanted).map(|entry| entry.id.clone());
        assert_eq!(found("web").unwrap(), web.id);
        assert_eq!(found(&web.id).unwrap(), web.id);
        assert_eq!(found("aaaa0").unwrap(), web.id);
        assert_eq!(found("aaaa").unwrap(), "aabb00000000", "a name comes before an id");
        assert!(matches!(found("aa"), Err(Error::Ambiguous(_))));
        register(&sandboxes, "cccc00000000", Some(&web.id)).unwrap();
        assert_eq!(found(&web.id).unwrap(), web.id, "a whole id comes before a name");
        for none in ["", "b", "we"] {
            assert!(matches!(found(none), Err(Error::NotFound(_))), "{none}");
        }
        sandboxes.remove(&web);
        sandboxes.remove(&web);
        assert!(matches!(found("web"), Err(Error::NotFound(_))));
    }

    #[test]
    fn names_and_slots_are_nobody_elses_and_what_is_written_has_them() {
        let sandboxes = Sandboxes::behind(Some(6));
        let one = register(&sandboxes, "aaaaaaaaaaaa", Some("web")).unwrap().stored();
        assert_eq!((one.sandbox.name.as_str(), one.slot, one.generation), ("web", 7, 1));
        let refused = register(&sandboxes, "bbbbbbbbbbbb", Some("web")).unwrap_err();
        assert!(matches!(refused, Error::NameTaken { id, .. } if id == one.sandbox.id));
        // Which name follows from the id, unless somebody has that.
        let made_up = names::make("cccccccccccc", |_| false);
        register(&sandboxes, "dddddddddddd", Some(&made_up)).unwrap();
        let mut written = None;
        let write = |stored: &Stored| {
            written = Some(stored.clone());
            Ok(())
        };
        let other = sandboxes.register(stored("cccccccccccc", ""), None, write).unwrap();
        assert_eq!(written, Some(other.stored()));
        assert_eq!(other.stored().sandbox.name, format!("{made_up}-cccc"));
        assert_eq!(other.stored().slot, 9);
        assert_eq!(sandboxes.coming_slots(2), [10, 11]);
    }

    #[test]
    fn one_whose_record_cannot_be_written_is_not_known_and_its_name_is_free() {
        let sandboxes = Sandboxes::default();
        let failed = sandboxes.register(stored("aaaaaaaaaaaa", ""), Some("web"), |_| Err(Error::NoCgroups));
        assert!(matches!(failed, Err(Error::NoCgroups)));
        assert!(sandboxes.entries().is_empty());
        register(&sandboxes, "bbbbbbbbbbbb", Some("web")).unwrap();
    }

    #[test]
    fn the_oldest_are_listed_first_and_those_with_a_vm_are_counted() {
        let sandboxes = Sandboxes::default();
        for (id, created_ns, state) in [
            ("cccccccccccc", 1, State::Running),
            ("bbbbbbbbbbbb", 2, State::Exited),
            ("aaaaaaaaaaaa", 2, State::Paused),
        ] {
            let mut stored = stored(id, "");
            (stored.sandbox.created_ns, stored.sandbox.state) = (created_ns, state);
            sandboxes.register(stored, Some(id), |_| Ok(())).unwrap();
        }
        let ids: Vec<String> = sandboxes.list().into_iter().map(|sandbox| sandbox.id).collect();
        assert_eq!(ids, ["cccccccccccc", "aaaaaaaaaaaa", "bbbbbbbbbbbb"]);
        assert_eq!(sandboxes.running(), 2);
    }

    #[test]
    fn one_that_is_told_is_in_a_state_that_was_asked_for_and_a_page_is_full() {
        let sandboxes = Sandboxes::default();
        for (id, created_ns) in [("aaaaaaaaaaaa", 1), ("bbbbbbbbbbbb", 2), ("cccccccccccc", 3)] {
            let mut stored = stored(id, "");
            (stored.sandbox.created_ns, stored.sandbox.state) = (created_ns, State::Running);
            sandboxes.register(stored, Some(id), |_| Ok(())).unwrap();
        }
        let first = sandboxes.find("aaaaaaaaaaaa").unwrap();
        // The first one ends while the others are looked at.
        let is_seen = |sandbox: &Sandbox| {
            if sandbox.id != first.id {
                first.lock().stored.sandbox.state = State::Exited;
            }
            true
        };
        let wanted = ListConfig {
            states: vec![State::Running],
            limit: Some(2),
            ..ListConfig::default()
        };
        let told = sandboxes.asked_for(&wanted, is_seen);
        let ids: Vec<&str> = told.iter().map(|(_, sandbox)| sandbox.id.as_str()).collect();
        assert_eq!(ids, ["bbbbbbbbbbbb", "cccccccccccc"]);
    }
}
