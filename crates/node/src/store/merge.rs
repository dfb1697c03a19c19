//! What the sandboxes are, where the database and their own records do not say the same. Pure: looks at no file.
//!
//! ```text
//!  database   record          the sandbox
//!  ────────   ──────────────  ─────────────────────────────────────────────
//!  a row      of generation   the one of the higher generation; the row if they are equal
//!  a row      none, damaged   the row
//!  a row      no directory    forgotten, unless a VMM of it runs: a removal takes the directory's name away first
//!  none       a record        the record
//!  none       none, damaged   an orphan
//! ```
//! Whichever copy was older is written again. Two that have one slot or one name cannot both have it.

use std::collections::{BTreeMap, BTreeSet};

use node_api::State;
use node_api::recovery::{Finding, Outcome, Subject};

use crate::store::database::Stored;
use crate::store::records::Directory;

/// What a database and all records come to.
#[derive(Debug, Default)]
pub(crate) struct Merged {
    /// Every sandbox that has a directory.
    pub(crate) known: Vec<Stored>,
    /// Every one that has none.
    pub(crate) homeless: Vec<Stored>,
    /// Of these, among `known`, both copies are to be written.
    pub(crate) to_write: BTreeSet<String>,
    /// Directories that are no sandbox's, by name, with the reason.
    pub(crate) orphans: BTreeMap<String, String>,
    /// What was wrong.
    pub(crate) findings: Vec<Finding>,
}

/// Makes a name for the sandbox of an id that is not taken.
pub(crate) type Rename<'a> = &'a dyn Fn(&str, &dyn Fn(&str) -> bool) -> String;

/// What was wrong with a sandbox.
pub(crate) fn of_sandbox(name: &str, outcome: Outcome, why: impl Into<String>) -> Finding {
    Finding {
        subject: Subject::Sandbox,
        name: name.to_owned(),
        outcome,
        why: why.into(),
    }
}

/// Puts both together.
pub(crate) fn merge(rows: Vec<Stored>, directories: Vec<Directory>) -> Merged {
    let mut rows: BTreeMap<String, Stored> = rows.into_iter().map(|row| (row.sandbox.id.clone(), row)).collect();
    let mut merged = Merged::default();
    for directory in directories {
        match (rows.remove(&directory.id), directory.record) {
            (Some(row), Ok(record)) => merged.newer_of(row, record),
            (Some(row), Err(why)) => merged.by_row(row, &why, directory.has_files),
            (None, Ok(record)) => merged.by_record(record),
            (None, Err(why)) => {
                merged.orphans.insert(directory.id, why);
            }
        }
    }
    merged.homeless = rows.into_values().collect();
    merged
}

impl Merged {
    fn newer_of(&mut self, row: Stored, record: Stored) {
        let (of_row, of_record) = (row.generation, record.generation);
        if of_record > of_row {
            let why = format!("the database has its state number {of_row}, its record the later number {of_record}");
            self.findings
                .push(of_sandbox(&record.sandbox.name, Outcome::Repaired, why));
            self.write(record);
        } else if of_record < of_row || of_row == 0 {
            // A daemon was killed between the two, or wrote records only of new sandboxes.
            self.write(row);
        } else {
            self.known.push(row);
        }
    }

    fn by_row(&mut self, mut row: Stored, why: &str, has_files: bool) {
        if !row.is_acknowledged() && has_files {
            // The first record is written before any other file: this row is old, and what has become of the sandbox since is not
            // known.
            (row.sandbox.state, row.acknowledged) = (State::Running, true);
        } else if row.is_acknowledged() {
            let why = format!("{why}; it is written again from the database");
            self.findings
                .push(of_sandbox(&row.sandbox.name, Outcome::Repaired, why));
        }
        self.write(row);
    }

    fn by_record(&mut self, mut record: Stored) {
        if record.generation == 0 {
            // Earlier daemons wrote it when the sandbox was made and never again: whether it has a VMM is found out next.
            record.sandbox.state = State::Running;
        }
        if record.is_acknowledged() {
            let why = "the database did not know it; its record did";
            self.findings
                .push(of_sandbox(&record.sandbox.name, Outcome::Adopted, why));
        }
        self.write(record);
    }

    fn write(&mut self, mut stored: Stored) {
        // As it is told of one that nobody has counted yet.
        stored.acknowledged = stored.is_acknowledged();
        stored.generation += 1;
        self.to_write.insert(stored.sandbox.id.clone());
        self.known.push(stored);
    }

    /// Gives each slot and each name to one sandbox. Of those that share a slot one that runs keeps it, and of several the one that
    /// was started last; the others are orphans from here on, with their directories as they are. `rename` makes a name that is not
    /// taken.
    pub(crate) fn settle_clashes(&mut self, runs: impl Fn(&Stored) -> bool, rename: Rename<'_>) {
        let rank = |stored: &Stored| {
            let since = stored.sandbox.started_ns.unwrap_or(stored.sandbox.created_ns);
            std::cmp::Reverse((runs(stored), since))
        };
        self.known.sort_by_cached_key(rank);
        let mut slots: BTreeMap<u32, String> = BTreeMap::new();
        let mut taken = BTreeSet::new();
        for mut stored in std::mem::take(&mut self.known) {
            let (id, name) = (stored.sandbox.id.clone(), stored.sandbox.name.clone());
            if let Some(other) = slots.get(&stored.slot) {
                let why = format!("its slot {} is that of the sandbox {other}", stored.slot);
                self.to_write.remove(&id);
                self.orphans.insert(id, why);
                continue;
            }
            slots.insert(stored.slot, name.clone());
            if !taken.insert(name.clone()) {
                stored.sandbox.name = rename(&id, &|name| taken.contains(name));
                taken.insert(stored.sandbox.name.clone());
                let why = format!(
                    "another sandbox is called so, too; sandbox {id} is called {} from now on",
                    stored.sandbox.name
                );
                self.findings.push(of_sandbox(&name, Outcome::Repaired, why));
                if self.to_write.insert(id) {
                    stored.generation += 1;
                }
            }
            self.known.push(stored);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::stored;

    const ID: &str = "aaaaaaaaaaaa";

    fn at(generation: u64, state: State) -> Stored {
        let mut stored = stored(ID, "one");
        (stored.generation, stored.sandbox.state) = (generation, state);
        stored.acknowledged = generation > 0 && state != State::Creating;
        stored
    }

    fn directory(record: Result<Stored, &str>, has_files: bool) -> Directory {
        Directory {
            id: ID.into(),
            record: record.map_err(str::to_owned),
            has_files,
        }
    }

    /// Generation and state of what is known, and whether it is written.
    fn known(merged: &Merged) -> Vec<(u64, State, bool)> {
        let all = merged.known.iter();
        all.map(|it| {
            let written = merged.to_write.contains(&it.sandbox.id);
            (it.generation, it.sandbox.state, written)
        })
        .collect()
    }

    #[test]
    fn the_higher_generation_counts() {
        use State::{Creating, Exited, Removing, Running};
        let merge_one = |row, record| merge(vec![row], vec![directory(Ok(record), true)]);
        let same = merge_one(at(5, Exited), at(5, Exited));
        assert_eq!(known(&same), [(5, Exited, false)]);
        assert!(same.findings.is_empty());
        let row = merge_one(at(6, Running), at(5, Exited));
        assert_eq!(known(&row), [(7, Running, true)]);
        assert!(row.findings.is_empty(), "a daemon was killed between the two");
        let record = merge_one(at(2, Running), at(5, Removing));
        assert_eq!(known(&record), [(6, Removing, true)]);
        assert_eq!(record.findings[0].outcome, Outcome::Repaired);
        // Of an earlier daemon, which wrote records once.
        let old = merge_one(at(0, Running), at(0, Creating));
        assert_eq!(known(&old), [(1, Running, true)]);
        assert!(old.findings.is_empty());
    }

    #[test]
    fn one_copy_is_enough() {
        use State::{Creating, Exited, Removing, Running};
        let record = |generation, state| merge(vec![], vec![directory(Ok(at(generation, state)), true)]);
        assert_eq!(known(&record(5, Exited)), [(6, Exited, true)]);
        assert_eq!(record(5, Exited).findings[0].outcome, Outcome::Adopted);
        assert_eq!(
            known(&record(5, Removing)),
            [(6, Removing, true)],
            "its removal is finished"
        );
        assert_eq!(known(&record(0, Creating)), [(1, Running, true)]);
        let row = |state, has_files| merge(vec![at(5, state)], vec![directory(Err("gone"), has_files)]);
        assert_eq!(known(&row(Exited, true)), [(6, Exited, true)]);
        assert_eq!(row(Exited, true).findings[0].outcome, Outcome::Repaired);
        // Nothing was made yet: there is nothing to lose.
        assert_eq!(known(&row(Creating, false)), [(6, Creating, true)]);
        assert!(row(Creating, false).findings.is_empty());
        // This row is from before the sandbox had files.
        assert_eq!(known(&row(Creating, true)), [(6, Running, true)]);
    }

    #[test]
    fn what_has_neither_is_an_orphan_and_what_has_no_directory_is_homeless() {
        let orphan = merge(vec![], vec![directory(Err("it has no record.json"), true)]);
        assert_eq!(
            orphan.orphans,
            BTreeMap::from([(ID.into(), "it has no record.json".into())])
        );
        assert!(orphan.known.is_empty());
        let homeless = merge(vec![at(5, State::Exited)], vec![]);
        assert!(homeless.known.is_empty() && homeless.homeless.len() == 1);
    }

    #[test]
    fn a_slot_is_the_one_that_runs_or_was_started_last() {
        let one = |id: &str, name: &str, slot, started| {
            let mut one = stored(id, name);
            (one.slot, one.sandbox.started_ns, one.generation) = (slot, Some(started), 3);
            one
        };
        let ids = |merged: &Merged| {
            let mut ids: Vec<_> = merged.known.iter().map(|it| it.sandbox.id.clone()).collect();
            ids.sort();
            ids
        };
        let three = || Merged {
            known: vec![one("a", "x", 1, 10), one("b", "y", 1, 20), one("c", "z", 2, 5)],
            ..Merged::default()
        };
        let mut merged = three();
        merged.settle_clashes(|_| false, &|id, _| format!("of-{id}"));
        assert_eq!(ids(&merged), ["b", "c"]);
        assert!(merged.orphans["a"].contains("slot 1"), "{:?}", merged.orphans);
        let mut merged = three();
        merged.settle_clashes(|it| it.sandbox.id == "a", &|id, _| format!("of-{id}"));
        assert_eq!(ids(&merged), ["a", "c"]);
        // A name is given to the last one, and the other gets another.
        let mut merged = Merged {
            known: vec![one("a", "x", 1, 10), one("b", "x", 2, 20)],
            ..Merged::default()
        };
        merged.settle_clashes(|_| false, &|id, _| format!("of-{id}"));
        let names: BTreeMap<_, _> = merged.known.iter().map(|it| (&it.sandbox.id[..], it)).collect();
        assert_eq!(names["b"].sandbox.name, "x");
        assert!(names["a"].sandbox.name == "of-a" && names["a"].generation == 4);
        assert_eq!(merged.to_write, BTreeSet::from(["a".to_owned()]));
    }
}
