//! Templates of another size: what somebody has built is built once more, by its recipe, for sandboxes that are larger
//! or smaller. They have no names, and stay for as long as there is one of that recipe that somebody wants. Knows
//! nothing of how one is built.

use crate::Error;
use crate::saved::templates::Templates;
use crate::saved::templates::record::Record;

/// The same was done in both, of the same image.
fn are_akin(one: &Record, other: &Record) -> bool {
    let (one, other) = (&one.template, &other.template);
    let essence = |recipe: &Option<node_api::Recipe>| recipe.as_ref().map(node_api::Recipe::essence);
    one.recipe.is_some()
        && one.digest == other.digest
        && one.networked == other.networked
        && essence(&one.recipe) == essence(&other.recipe)
}

/// Those of another size than none has that anybody wants.
fn of_none(records: &[Record]) -> Vec<String> {
    let wanted = |record: &Record| {
        let mut others = records.iter().filter(|other| !other.template.sized);
        others.any(|other| are_akin(record, other))
    };
    let sized = records.iter().filter(|record| record.template.sized);
    sized
        .filter(|record| !wanted(record))
        .map(|record| record.template.id.clone())
        .collect()
}

/// Those that the one of this id takes the place of: of its size, made with other programs or on another host.
fn older(records: &[Record], id: &str) -> Vec<String> {
    let Some(new) = records.iter().find(|record| record.template.id == id) else {
        return Vec::new();
    };
    let older = records.iter().filter(|record| {
        let template = &record.template;
        template.sized && template.id != id && template.resources == new.template.resources && are_akin(record, new)
    });
    older.map(|record| record.template.id.clone()).collect()
}

impl Templates {
    /// Removes those that are of no use any more, as what they were another size of is gone.
    pub(crate) fn remove_sizes_of_none(&self) -> Result<(), Error> {
        let all = of_none(&self.records());
        all.iter().try_for_each(|id| self.remove(id).map(drop))
    }

    /// Removes those that the one of this id takes the place of.
    pub(crate) fn remove_older_sizes(&self, id: &str) -> Result<(), Error> {
        let all = older(&self.records(), id);
        all.iter().try_for_each(|id| self.remove(id).map(drop))
    }
}

#[cfg(test)]
mod tests {
    use node_api::Recipe;

    use super::*;
    use crate::saved::templates::record::tests::record;

    fn sized(id: &str, cpus: u32) -> Record {
        let mut record = record(id, &[], 1);
        record.template.sized = true;
        record.template.resources.cpus = cpus;
        record
    }

    #[test]
    fn another_size_goes_with_the_last_one_that_is_wanted() {
        let mut records = vec![record("a", &["web"], 1), sized("b", 2), sized("c", 4)];
        assert!(of_none(&records).is_empty());
        // One that waits longer for the same is the same.
        if let Some(recipe) = &mut records[1].template.recipe {
            recipe.ready_ms = 7;
        }
        assert!(of_none(&records).is_empty());
        records[2].template.recipe = Some(Recipe {
            commands: vec!["other".into()],
            ..Recipe::default()
        });
        assert_eq!(of_none(&records), ["c"]);
        records[0].template.digest = "11".into();
        assert_eq!(of_none(&records), ["b", "c"]);
    }

    #[test]
    fn a_newer_one_takes_the_place_of_an_older_one_of_its_size() {
        let mut large = record("e", &["large"], 1);
        large.template.resources.cpus = 2;
        let records = [
            record("a", &["web"], 1),
            sized("b", 2),
            sized("c", 4),
            sized("d", 2),
            large,
        ];
        assert_eq!(older(&records, "d"), ["b"]);
        assert!(older(&records, "c").is_empty() && older(&records, "x").is_empty());
    }
}
