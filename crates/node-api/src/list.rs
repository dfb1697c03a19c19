//! Which sandboxes are listed, in which order, and how many at a time.

use std::borrow::Borrow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::sandbox::{Sandbox, State};

/// What is asked for of a list of sandboxes. Nothing of it, and the list has those that have a VM or are suspended, the oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ListConfig {
    /// Also those that have ended. Of no effect with `states`.
    pub all: bool,
    /// Only those in one of these states, if there is any.
    pub states: Vec<State>,
    /// Only those that have all of these labels.
    pub labels: BTreeMap<String, String>,
    /// Only clones of the template with this id.
    pub template: Option<String>,
    /// The newest first.
    pub newest_first: bool,
    /// Only those behind this one in the list's order: the last of a page, for the next one. It need not be there any more.
    pub after: Option<Place>,
    /// No more than so many.
    pub limit: Option<usize>,
}

/// Where a sandbox is in a list.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Place {
    /// When it was made: nanoseconds since 1970.
    pub created_ns: u64,
    /// Which, of those that were made at that moment.
    pub id: String,
}

impl Place {
    /// Of this one.
    pub fn of(sandbox: &Sandbox) -> Self {
        Self {
            created_ns: sandbox.created_ns,
            id: sandbox.id.clone(),
        }
    }
}

impl ListConfig {
    /// All sandboxes.
    pub fn all() -> Self {
        Self {
            all: true,
            ..Self::default()
        }
    }

    /// What is asked for of `sandboxes`, in order. They may be borrowed: most of many are not asked for, and need not be copied.
    pub fn of<S: Borrow<Sandbox>>(&self, sandboxes: impl IntoIterator<Item = S>) -> Vec<S> {
        let found = sandboxes.into_iter().filter(|sandbox| self.has(sandbox.borrow()));
        let found = found.map(|sandbox| (Place::of(sandbox.borrow()), sandbox)).collect();
        let in_order = self.in_order(found);
        in_order.take(self.limit.unwrap_or(usize::MAX)).collect()
    }

    /// Those that are asked for ([`Self::has`]) in the list's order, more than [`Self::limit`] too.
    pub fn in_order<T>(&self, mut found: Vec<(Place, T)>) -> impl Iterator<Item = T> {
        found.sort_by(|(one, _), (other, _)| match self.newest_first {
            true => other.cmp(one),
            false => one.cmp(other),
        });
        found.into_iter().map(|(_, one)| one)
    }

    /// Whether this one is asked for.
    pub fn has(&self, sandbox: &Sandbox) -> bool {
        let state = match self.states.is_empty() {
            true => self.all || sandbox.state.has_vm() || sandbox.state == State::Suspended,
            false => self.states.contains(&sandbox.state),
        };
        let template = self.template.as_ref();
        let behind = self.after.as_ref().is_none_or(|after| match self.newest_first {
            true => Place::of(sandbox) < *after,
            false => Place::of(sandbox) > *after,
        });
        let labels = &sandbox.config.labels;
        state
            && behind
            && template.is_none_or(|template| sandbox.template.as_ref() == Some(template))
            && self.labels.iter().all(|(key, value)| labels.get(key) == Some(value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::config;

    fn sandbox(created_ns: u64, id: &str, state: State) -> Sandbox {
        let json = serde_json::json!({
            "id": id, "name": id, "state": state, "config": config(), "digest": "00", "created_ns": created_ns, "started_ns": null,
            "ended_ns": null, "ended": null, "vmm": null, "restarts": 0,
        });
        serde_json::from_value(json).unwrap()
    }

    fn ids(list: &ListConfig, all: &[Sandbox]) -> String {
        list.of(all.to_vec()).into_iter().map(|sandbox| sandbox.id).collect()
    }

    /// Two of one moment, and one of each state of rest.
    fn some() -> Vec<Sandbox> {
        let mut all = vec![
            sandbox(3, "d", State::Running),
            sandbox(2, "c", State::Exited),
            sandbox(2, "b", State::Suspended),
            sandbox(1, "a", State::Paused),
        ];
        all[0].config.labels = [("k", "v"), ("l", "w")].map(|(k, v)| (k.into(), v.into())).into();
        all[1].config.labels = [("k".into(), "v".into())].into();
        all[0].template = Some("t".into());
        all
    }

    #[test]
    fn those_that_have_ended_are_listed_if_somebody_asks_for_them() {
        let all = some();
        assert_eq!(ids(&ListConfig::default(), &all), "abd");
        assert_eq!(ids(&ListConfig::all(), &all), "abcd");
        let of = |states: &[State]| ListConfig {
            states: states.to_vec(),
            ..ListConfig::default()
        };
        assert_eq!(ids(&of(&[State::Exited]), &all), "c");
        assert_eq!(ids(&of(&[State::Exited, State::Paused]), &all), "ac");
    }

    #[test]
    fn only_those_are_listed_that_have_all_that_is_asked_for() {
        let all = some();
        let with = |labels: &[(&str, &str)]| ListConfig {
            labels: labels.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect(),
            ..ListConfig::all()
        };
        assert_eq!(ids(&with(&[("k", "v")]), &all), "cd");
        assert_eq!(ids(&with(&[("k", "v"), ("l", "w")]), &all), "d");
        assert_eq!(ids(&with(&[("k", "w")]), &all), "");
        let template = Some("t".to_owned());
        assert_eq!(
            ids(
                &ListConfig {
                    template,
                    ..ListConfig::all()
                },
                &all
            ),
            "d"
        );
    }

    #[test]
    fn pages_have_each_once_whatever_goes_meanwhile() {
        for newest_first in [false, true] {
            let mut all = some();
            let mut list = ListConfig {
                newest_first,
                limit: Some(1),
                ..ListConfig::all()
            };
            let mut seen = String::new();
            while let Some(one) = list.of(all.clone()).pop() {
                seen.push_str(&one.id);
                list.after = Some(Place::of(&one));
                // The last of a page is gone when the next one is asked for.
                all.retain(|other| other.id != one.id);
            }
            assert_eq!(seen, if newest_first { "dcba" } else { "abcd" });
        }
    }
}
