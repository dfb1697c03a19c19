//! The names of templates: each is of one at a time, and goes to whoever got it last.
//!
//! In memory a name goes from one template to the other at once; on the disk the new owner has it before the old one
//! loses it. After a crash between the two both have it, and it is the later one's. Whoever gives or takes names holds
//! `naming` meanwhile. Knows nothing of how a template comes to be.

use std::collections::BTreeSet;
use std::fs::{self, File};

use node_api::TakenName;

use crate::Error;
use crate::saved::templates::Templates;
use crate::saved::templates::record::Record;

impl Templates {
    /// One of them, by a name, an id or the beginning of one.
    pub(crate) fn find(&self, wanted: &str) -> Result<Record, Error> {
        let known = self.records();
        if let Some(named) = known
            .iter()
            .find(|record| record.template.names.iter().any(|name| name == wanted))
        {
            return Ok(named.clone());
        }
        let mut found = known
            .into_iter()
            .filter(|record| record.template.id.starts_with(wanted));
        match (found.next(), found.next()) {
            (Some(record), None) if !wanted.is_empty() => Ok(record),
            (Some(_), Some(_)) if !wanted.is_empty() => Err(Error::AmbiguousTemplate(wanted.to_owned())),
            _ => Err(Error::NoTemplate(wanted.to_owned())),
        }
    }

    /// The names of the one of this id.
    pub(crate) fn names_of(&self, id: &str) -> BTreeSet<String> {
        let known = self.records();
        let same = known.into_iter().filter(|record| record.template.id == id);
        same.flat_map(|record| record.template.names).collect()
    }

    /// This one is the newest of its names: from here on others find it by them, and only then those that had them lose
    /// them on the disk. One that has no name left goes. What was taken from whom.
    pub(crate) fn take_names(&self, record: Record, replaced: Option<&str>) -> Result<Vec<TakenName>, Error> {
        let id = record.template.id.clone();
        let (taken, losers) = {
            let mut known = self.lock();
            known.records.retain(|known| known.template.id != id);
            let taken = to_be_taken(&known.records, &record.template.names);
            let losers = lose(&mut known.records, &record.template.names);
            known.records.push(record);
            (taken, losers)
        };
        self.write_losers(losers)?;
        if let Some(replaced) = replaced.filter(|replaced| *replaced != id) {
            self.remove(replaced)?;
        }
        self.remove_sizes_of_none()?;
        Ok(taken)
    }

    fn write_losers(&self, losers: Vec<Record>) -> Result<(), Error> {
        for loser in losers {
            if loser.template.names.is_empty() {
                self.remove(&loser.template.id)?;
            } else if let Err(error) = self.describe_anew(&loser)
                // Somebody may have removed it meanwhile.
                && self.place(&loser).record().exists()
            {
                return Err(error);
            }
        }
        Ok(())
    }

    /// After a crash two may have the same name: the one that got it last keeps it.
    pub(crate) fn settle_names(&self) {
        let losers = lose_to_later(&mut self.lock().records);
        if let Err(error) = self.write_losers(losers) {
            // The next daemon finds the same, and does the same.
            log::warn!("cannot record that a template has lost its name: {error}");
        }
    }

    /// Takes a name away, or removes the template.
    pub(crate) fn remove_named(&self, wanted: &str) -> Result<(), Error> {
        let _naming = self.naming();
        let record = self.find(wanted)?;
        let named = record.template.names.iter().any(|name| name == wanted);
        if !named || record.template.names.len() == 1 {
            self.remove(&record.template.id)?;
            return self.remove_sizes_of_none();
        }
        let losers = lose(&mut self.lock().records, &[wanted.to_owned()]);
        self.write_losers(losers)
    }

    /// Writes the record of one once more: whoever reads it gets the one or the other.
    pub(crate) fn describe_anew(&self, record: &Record) -> Result<(), Error> {
        let place = self.place(record);
        let path = place.record();
        let beside = path.with_extension("new");
        let text = serde_json::to_vec_pretty(record).map_err(|error| Error::Invalid(error.to_string()))?;
        let write = || {
            // What a crash has left goes.
            fs::write(&beside, &text)?;
            File::open(&beside)?.sync_all()?;
            fs::rename(&beside, &path)?;
            File::open(place.directory())?.sync_all()
        };
        write().map_err(Error::file("write", &path))
    }
}

/// The record with these names, too: those that the template of its id has already, and those that are asked for.
pub(crate) fn with_names(mut record: Record, own: &BTreeSet<String>, asked: &[String]) -> Record {
    let all: BTreeSet<String> = record.template.names.iter().chain(own).chain(asked).cloned().collect();
    record.template.names = all.into_iter().collect();
    record
}

/// Which of these names have an owner, who is about to lose them.
fn to_be_taken(records: &[Record], names: &[String]) -> Vec<TakenName> {
    let of_one = |record: &Record| {
        let own = &record.template.names;
        let (from, gone) = (record.template.id.clone(), own.iter().all(|name| names.contains(name)));
        let lost: Vec<String> = own.iter().filter(|name| names.contains(name)).cloned().collect();
        lost.into_iter().map(move |name| TakenName {
            name,
            from: from.clone(),
            gone,
        })
    };
    records.iter().flat_map(of_one).collect()
}

/// These names are somebody else's from now on; those that have lost one.
fn lose(records: &mut [Record], names: &[String]) -> Vec<Record> {
    let mut losers = Vec::new();
    for record in records {
        let own = &mut record.template.names;
        let before = own.len();
        own.retain(|name| !names.contains(name));
        if own.len() < before {
            losers.push(record.clone());
        }
    }
    losers
}

/// Each name is the last one's that got it; those that have lost one.
fn lose_to_later(records: &mut [Record]) -> Vec<Record> {
    records.sort_by_key(|record| record.named_ns);
    let mut ids = BTreeSet::new();
    for at in 0..records.len() {
        let (before, rest) = records.split_at_mut(at);
        let names = rest.first().map(|record| record.template.names.clone());
        let losers = lose(before, &names.unwrap_or_default());
        ids.extend(losers.into_iter().map(|loser| loser.template.id));
    }
    let lost = records.iter().filter(|record| ids.contains(&record.template.id));
    lost.cloned().collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::saved::templates::record::tests::record;

    fn described(records: &[Record]) -> Vec<String> {
        let of = |record: &Record| format!("{} {}", record.template.id, record.template.names.join(","));
        records.iter().map(of).collect()
    }

    #[test]
    fn a_name_is_of_one_and_goes_to_whoever_is_built_last() {
        let mut records = [record("a", &["web"], 1), record("b", &["db", "web2"], 2)];
        assert!(lose(&mut records, &["other".into()]).is_empty());
        let names = ["web".into(), "db".into(), "nobodys".into()];
        let taken = to_be_taken(&records, &names);
        let taken: Vec<_> = taken
            .iter()
            .map(|taken| (&taken.name[..], &taken.from[..], taken.gone))
            .collect();
        assert_eq!(taken, [("web", "a", true), ("db", "b", false)]);
        let losers = lose(&mut records, &names);
        assert_eq!(described(&losers), ["a ", "b web2"]);
        assert_eq!(to_be_taken(&records, &names), []);
        assert_eq!(described(&records), described(&losers));
        assert!(lose(&mut records, &["web".into()]).is_empty(), "it has lost it already");
    }

    #[test]
    fn after_a_crash_the_last_one_keeps_the_name() {
        let mut records = [
            record("new", &["web"], 9),
            record("old", &["web", "kept"], 1),
            record("middle", &["web"], 5),
            record("other", &["db"], 7),
        ];
        let losers = lose_to_later(&mut records);
        assert_eq!(described(&losers), ["old kept", "middle "]);
        assert_eq!(described(&records), ["old kept", "middle ", "other db", "new web"]);
        assert!(lose_to_later(&mut records).is_empty());
    }

    #[test]
    fn a_record_is_written_again_as_a_whole() {
        let directory = tempfile::tempdir().unwrap();
        let templates = Templates::new(directory.path().to_owned());
        let record = record("a", &["web"], 1);
        let place = templates.place(&record);
        fs::create_dir(place.directory()).unwrap();
        fs::write(place.record(), "older").unwrap();
        fs::write(
            place.record().with_extension("new"),
            "what a crash has left, and is longer",
        )
        .unwrap();
        templates.describe_anew(&record).unwrap();
        let found: Record = place.read().unwrap().unwrap();
        assert_eq!(found.template.names, ["web"]);
        assert_eq!(fs::read_dir(place.directory()).unwrap().count(), 1);
    }

    /// Templates with these, which are on the disk, too.
    fn templates(directory: &Path, records: &[Record]) -> Templates {
        let templates = Templates::new(directory.to_owned());
        for record in records {
            fs::create_dir(templates.place(record).directory()).unwrap();
            templates.describe_anew(record).unwrap();
            templates.lock().records.push(record.clone());
        }
        templates
    }

    /// What is in memory, and on the disk.
    fn names(templates: &Templates) -> (Vec<String>, Vec<String>) {
        let mut known = templates.records();
        known.sort_by(|one, other| one.template.id.cmp(&other.template.id));
        let read = |record: &Record| templates.place(record).read::<Record>().unwrap();
        let there: Vec<Record> = known.iter().filter_map(read).collect();
        (described(&known), described(&there))
    }

    #[test]
    fn one_is_found_by_a_name_an_id_or_the_beginning_of_one() {
        let directory = tempfile::tempdir().unwrap();
        let all = [record("aa", &["web"], 1), record("ab", &["db"], 1)];
        let templates = templates(directory.path(), &all);
        for (wanted, id) in [("web", "aa"), ("ab", "ab"), ("db", "ab")] {
            assert_eq!(templates.find(wanted).unwrap().template.id, id);
        }
        assert!(matches!(templates.find("a"), Err(Error::AmbiguousTemplate(_))));
        for wanted in ["", "b"] {
            assert!(matches!(templates.find(wanted), Err(Error::NoTemplate(_))));
        }
        assert_eq!(templates.names_of("aa"), BTreeSet::from(["web".to_owned()]));
    }

    #[test]
    fn names_go_in_memory_and_on_the_disk_and_whoever_has_none_left_goes() {
        let directory = tempfile::tempdir().unwrap();
        let all = [record("a", &["web"], 1), record("b", &["db", "web2"], 2)];
        let templates = templates(directory.path(), &all);
        let newest = record("c", &["db", "web"], 3);
        fs::create_dir(templates.place(&newest).directory()).unwrap();
        templates.describe_anew(&newest).unwrap();
        let naming = templates.naming();
        assert_eq!(templates.take_names(newest, None).unwrap().len(), 2);
        drop(naming);
        let left = || vec!["b web2".to_owned(), "c db,web".to_owned()];
        assert_eq!(names(&templates), (left(), left()));
        assert!(!directory.path().join("a").exists());
        templates.remove_named("db").unwrap();
        templates.remove_named("web2").unwrap();
        let left = || vec!["c web".to_owned()];
        assert_eq!(names(&templates), (left(), left()));
        assert!(matches!(templates.remove_named("db"), Err(Error::NoTemplate(_))));
        templates.remove_named("c").unwrap();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
