//! The table of kept commands: bounded in number and size, in the order of their starts, found by process id or tag. Does not
//! know what a command is. Each has a thread and a handful of descriptors, and an agent's memory counts in every guest: hence the
//! bounds.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use agent_api::message::{MAX_KEPT, MAX_KEPT_TEXT};
use agent_api::{Kept, KeptCommand, Which};

/// The table; clones are the same one.
pub(crate) struct Table<C>(Arc<Mutex<State<C>>>);

struct State<C> {
    rows: Vec<Row<C>>,
    next: u64,
    /// Those in `rows`, and those that are being started.
    count: usize,
    text: usize,
}

struct Row<C> {
    number: u64,
    listed: KeptCommand,
    command: Arc<C>,
}

/// Room for one command that is being started. Dropping gives it back.
pub(crate) struct Reservation<C> {
    table: Table<C>,
    text: usize,
}

/// A command in the table. Dropping takes it out.
pub(crate) struct Registered<C> {
    number: u64,
    reservation: Reservation<C>,
}

impl<C> Clone for Table<C> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<C> Default for Table<C> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(State {
            rows: Vec::new(),
            next: 0,
            count: 0,
            text: 0,
        })))
    }
}

impl<C> Table<C> {
    fn lock(&self) -> MutexGuard<'_, State<C>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Room for a command with these words about it, or one sentence that says why there is none.
    pub(crate) fn reserve(&self, kept: &Kept) -> Result<Reservation<C>, String> {
        let tag = kept.tag.as_ref().map_or(0, String::len);
        for (what, length, limit) in [("note", kept.note.len(), Kept::MAX_NOTE), ("tag", tag, Kept::MAX_TAG)] {
            if length > limit {
                return Err(format!(
                    "the command's {what} has {length} bytes, the most is {limit}: shorten it"
                ));
            }
        }
        let text = kept.text_len();
        let mut state = self.lock();
        if state.count >= MAX_KEPT {
            return Err(format!(
                "{MAX_KEPT} kept commands run already: end some, or start this one without being kept"
            ));
        }
        if state.text + text > MAX_KEPT_TEXT {
            return Err(format!(
                "the kept commands that run have notes and tags of {} bytes, with this one it would be more than {MAX_KEPT_TEXT}: shorten it, \
                 or end some",
                state.text
            ));
        }
        state.count += 1;
        state.text += text;
        drop(state);
        Ok(Reservation {
            table: self.clone(),
            text,
        })
    }

    /// All that run, in the order of their starts.
    pub(crate) fn list(&self) -> Vec<KeptCommand> {
        self.lock().rows.iter().map(|row| row.listed.clone()).collect()
    }

    /// The one that is meant, and its process id. Of several the last: a process id is used again only when its process is gone.
    pub(crate) fn find(&self, which: &Which) -> Option<(u32, Arc<C>)> {
        let state = self.lock();
        let mut rows = state.rows.iter().rev();
        let row = rows.find(|row| match which {
            Which::Pid(pid) => row.listed.pid == *pid,
            Which::Tag(tag) => row.listed.kept.tag.as_ref() == Some(tag),
        });
        row.map(|row| (row.listed.pid, Arc::clone(&row.command)))
    }
}

impl<C> Reservation<C> {
    /// The command runs.
    pub(crate) fn register(self, pid: u32, kept: Kept, command: Arc<C>) -> Registered<C> {
        let mut state = self.table.lock();
        let number = state.next;
        state.next += 1;
        state.rows.push(Row {
            number,
            listed: KeptCommand { pid, kept },
            command,
        });
        drop(state);
        Registered {
            number,
            reservation: self,
        }
    }
}

impl<C> Drop for Reservation<C> {
    fn drop(&mut self) {
        let mut state = self.table.lock();
        state.count -= 1;
        state.text -= self.text;
    }
}

impl<C> Registered<C> {
    /// From here on it is not found. Doing so again changes nothing.
    pub(crate) fn remove(&self) {
        let mut state = self.reservation.table.lock();
        let rows = &mut state.rows;
        let place = rows.binary_search_by_key(&self.number, |row| row.number);
        let row = place.ok().map(|place| rows.remove(place));
        drop(state);
        // Outside of the lock: what it holds may be large.
        drop(row);
    }
}

impl<C> Drop for Registered<C> {
    fn drop(&mut self) {
        self.remove();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(tag: Option<&str>, note: usize) -> Kept {
        Kept {
            tag: tag.map(str::to_owned),
            note: "n".repeat(note),
            ..Kept::default()
        }
    }

    fn register(table: &Table<u32>, pid: u32, tag: Option<&str>) -> Registered<u32> {
        let kept = kept(tag, 0);
        let reservation = table.reserve(&kept).unwrap();
        reservation.register(pid, kept, Arc::new(pid))
    }

    #[test]
    fn long_words_are_refused() {
        let table = Table::<u32>::default();
        let refused = |kept| table.reserve(&kept).map(drop).unwrap_err();
        let message = refused(kept(None, Kept::MAX_NOTE + 1));
        assert!(message.contains("note has 65537 bytes, the most is 65536"), "{message}");
        let message = refused(kept(Some(&"t".repeat(Kept::MAX_TAG + 1)), 0));
        assert!(message.contains("tag has 4097 bytes"), "{message}");
        drop(
            table
                .reserve(&kept(Some(&"t".repeat(Kept::MAX_TAG)), Kept::MAX_NOTE))
                .unwrap(),
        );
    }

    #[test]
    fn number_and_size_are_bounded_and_given_back() {
        let table = Table::<u32>::default();
        let mut all: Vec<_> = (0..MAX_KEPT).map(|_| table.reserve(&kept(None, 0)).unwrap()).collect();
        let message = table.reserve(&kept(None, 0)).map(drop).unwrap_err();
        assert!(message.starts_with("4096 kept commands run already"), "{message}");
        // One that starts and ends gives its room back once.
        let one = all.pop().unwrap().register(1, kept(None, 0), Arc::new(1));
        one.remove();
        one.remove();
        assert!(table.reserve(&kept(None, 0)).is_err());
        drop(one);
        all.push(table.reserve(&kept(None, 0)).unwrap());
        assert!(table.reserve(&kept(None, 0)).is_err());
        all.clear();
        let large: Vec<_> = (0..MAX_KEPT_TEXT / Kept::MAX_NOTE)
            .map(|_| table.reserve(&kept(None, Kept::MAX_NOTE)).unwrap())
            .collect();
        let message = table.reserve(&kept(None, 1)).map(drop).unwrap_err();
        assert!(message.contains("more than 16777216"), "{message}");
        drop(table.reserve(&kept(None, 0)).unwrap());
        drop(large);
        drop(table.reserve(&kept(None, 1)).unwrap());
    }

    /// Against a list that is searched from its end, whatever comes and goes.
    #[test]
    fn any_order_of_starts_and_ends_keeps_what_is_found() {
        const TAGS: [Option<&str>; 4] = [None, Some("a"), Some("b"), Some("")];
        let table = Table::<u32>::default();
        let mut model: Vec<(u32, Option<&str>, Registered<u32>)> = Vec::new();
        let mut random = 1_u64;
        for _ in 0..3000 {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let draw = |shift: u32, limit: usize| usize::try_from(random >> shift & 0xffff).unwrap() % limit;
            let pid = u32::try_from(draw(16, 8)).unwrap();
            if model.is_empty() || (model.len() < 12 && draw(32, 2) == 0) {
                let tag = TAGS[draw(24, 4)];
                model.push((pid, tag, register(&table, pid, tag)));
            } else {
                drop(model.remove(draw(40, model.len())));
            }
            let listed: Vec<_> = table.list().into_iter().map(|row| (row.pid, row.kept.tag)).collect();
            let expected: Vec<_> = model
                .iter()
                .map(|(pid, tag, _)| (*pid, tag.map(str::to_owned)))
                .collect();
            assert_eq!(listed, expected);
            for tag in TAGS.into_iter().flatten() {
                let expected = model.iter().rfind(|row| row.1 == Some(tag)).map(|row| row.0);
                let found = table.find(&Which::Tag(tag.to_owned()));
                assert_eq!(
                    found.map(|(pid, command)| (pid, *command)),
                    expected.map(|pid| (pid, pid))
                );
            }
            let exists = model.iter().any(|row| row.0 == pid);
            assert_eq!(table.find(&Which::Pid(pid)).is_some(), exists);
        }
        model.clear();
        assert!(table.list().is_empty() && table.lock().count == 0 && table.lock().text == 0);
    }
}
