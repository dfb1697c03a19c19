//! A template's record: what machine it is of, what it was made with, and how it is called. Knows nothing of other
//! templates.

use std::fs::{self, File};
use std::time::SystemTime;

use agent_api::GuestNetwork;
use node_api::{HostTraits, Programs, Recipe, Resources, Template};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::clock;
use crate::saved::host_traits;
use crate::saved::programs::Files;
use crate::saved::snapshots::Place;
use crate::store::database::Stored;

/// What can be told of a machine before anything runs in it. Machines of one shape differ in their names alone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Shape {
    digest: String,
    resources: Resources,
    network: Option<GuestNetwork>,
    command_line: String,
    /// Devices for shared directories.
    #[serde(default)]
    pub(crate) share_slots: usize,
}

impl Shape {
    pub(crate) fn new(
        digest: &str,
        resources: &Resources,
        network: Option<GuestNetwork>,
        command_line: String,
        share_slots: usize,
    ) -> Self {
        Self {
            digest: digest.to_owned(),
            resources: resources.of_machine(),
            network,
            command_line,
            share_slots,
        }
    }

    /// Guests of both are told the same of their network.
    pub(crate) fn has_network_of(&self, other: &Self) -> bool {
        self.network == other.network
    }
}

/// A template's `record.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) template: Template,
    pub(crate) shape: Shape,
    /// The programs' files, which tell sooner than their hashes that nothing has changed.
    pub(crate) files: Files,
    /// When it got a name last.
    #[serde(default)]
    pub(crate) named_ns: u64,
}

impl Record {
    /// One that is made now of a sandbox, without a name yet.
    pub(crate) fn of(stored: &Stored, shape: Shape, files: Files, programs: Programs, recipe: Option<Recipe>) -> Self {
        let (sandbox, now) = (&stored.sandbox, clock::now_ns());
        Self {
            template: Template {
                id: id(&shape, &programs, recipe.as_ref()),
                names: Vec::new(),
                created_ns: now,
                used_ns: now,
                digest: sandbox.digest.clone(),
                resources: sandbox.config.resources.of_machine(),
                networked: stored.networked,
                programs,
                bytes: 0,
                recipe,
                sized: false,
                host: Some(host_traits::here().clone()),
                brought: false,
                outdated: None,
            },
            shape,
            files,
            named_ns: now,
        }
    }

    /// Somebody has built it, and it stays until somebody removes it.
    pub(super) fn is_wanted(&self) -> bool {
        self.is_built() && !self.template.sized
    }

    /// What host it is of, where that is not like the one here.
    pub(crate) fn other_host(&self, here: &HostTraits) -> Option<String> {
        let model = self.template.resources.cpu_model.unwrap_or_default();
        let made_on = self.template.host.as_ref()?;
        host_traits::difference(made_on, here, model)
    }

    /// It was made by commands: what is made without being asked for is of another kind.
    pub(super) fn is_built(&self) -> bool {
        self.template.recipe.is_some()
    }
}

/// The name of what was made of this.
pub(crate) fn id(shape: &Shape, programs: &Programs, recipe: Option<&Recipe>) -> String {
    let mut parts = serde_json::json!({ "shape": shape, "programs": programs });
    if let Some(recipe) = recipe {
        parts["recipe"] = serde_json::json!(recipe.essence());
    }
    let text = parts.to_string();
    let hash = Sha256::digest(text.as_bytes());
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Notes that it is used: by the time of its record's file, which needs no other to be written.
pub(crate) fn touch(place: &Place) {
    let touched = File::open(place.record()).and_then(|file| file.set_modified(SystemTime::now()));
    if let Err(error) = touched {
        log::info!("that a template is used cannot be noted: {error}");
    }
}

/// When a sandbox was cloned of it last, or when it was made.
pub(super) fn last_used(record: &Record, place: &Place) -> u64 {
    let modified = fs::metadata(place.record())
        .and_then(|metadata| metadata.modified())
        .ok();
    let since = modified.and_then(|modified| modified.duration_since(SystemTime::UNIX_EPOCH).ok());
    let used_ns = since.and_then(|since| u64::try_from(since.as_nanos()).ok());
    used_ns.unwrap_or(record.template.created_ns)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeSet;

    use super::*;

    pub(crate) fn record(id: &str, names: &[&str], named_ns: u64) -> Record {
        let resources = crate::testing::resources();
        Record {
            shape: Shape::new("00", &resources, None, String::new(), 0),
            files: Files::default(),
            named_ns,
            template: Template {
                id: id.into(),
                names: names.iter().map(|&name| name.to_owned()).collect(),
                created_ns: 1,
                used_ns: 1,
                digest: "00".into(),
                resources,
                networked: false,
                programs: Programs::default(),
                bytes: 0,
                recipe: Some(Recipe::default()),
                sized: false,
                host: None,
                brought: false,
                outdated: None,
            },
        }
    }

    #[test]
    fn what_is_done_in_it_makes_another_and_names_do_not() {
        let one = record("a", &["web"], 1);
        let programs = Programs::default();
        let with = |commands: &[&str]| Recipe {
            commands: commands.iter().map(|&command| command.to_owned()).collect(),
            ..Recipe::default()
        };
        let ids: BTreeSet<String> = [None, Some(with(&[])), Some(with(&["a", "b"])), Some(with(&["a b"]))]
            .iter()
            .map(|recipe| id(&one.shape, &programs, recipe.as_ref()))
            .collect();
        assert_eq!(ids.len(), 4);
        let patient = Recipe {
            ready_ms: 5,
            ..with(&["a b"])
        };
        assert!(ids.contains(&id(&one.shape, &programs, Some(&patient))));
    }
}
