//! What may differ between a native run and a forwarded one: `accel/clients/expected.toml`, each with its reason.
//!
//! Knows no client. An entry that nothing needs any more is as wrong as a difference that no entry explains.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use super::results::Results;

/// An entry. Texts may have `*` for anything.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Expectation {
    client: String,
    /// Of all back ends if there is none.
    backend: Option<String>,
    item: String,
    /// What is there natively; anything if it is not given.
    native: Option<String>,
    forwarded: Option<String>,
    reason: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    difference: Vec<Expectation>,
}

/// A value that is not the same on both sides. What a side has not is empty.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Difference {
    pub(super) item: String,
    pub(super) native: Option<String>,
    pub(super) forwarded: Option<String>,
    /// Why it has to be so, if it has.
    pub(super) reason: Option<String>,
}

/// All that is expected, with what was met so far.
pub(super) struct Expected {
    entries: Vec<(Expectation, bool)>,
}

impl Expected {
    pub(super) fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let file: File = toml::from_str(&text).with_context(|| format!("{} is not as it should be", path.display()))?;
        Ok(Self::of(file.difference))
    }

    fn of(entries: Vec<Expectation>) -> Self {
        Self {
            entries: entries.into_iter().map(|entry| (entry, false)).collect(),
        }
    }

    /// What differs, with the reason of what is expected.
    pub(super) fn compare(
        &mut self,
        client: &str,
        backend: &str,
        native: &Results,
        forwarded: &Results,
    ) -> Vec<Difference> {
        let all = native
            .keys()
            .chain(forwarded.keys().filter(|item| !native.contains_key(*item)));
        all.filter(|item| native.get(*item) != forwarded.get(*item))
            .map(|item| {
                let (native, forwarded) = (native.get(item).cloned(), forwarded.get(item).cloned());
                let entry = self.entries.iter_mut().find(|(entry, _)| {
                    entry.is_of(client, backend)
                        && matches(&entry.item, item)
                        && is_as(entry.native.as_deref(), native.as_deref())
                        && is_as(entry.forwarded.as_deref(), forwarded.as_deref())
                });
                let reason = entry.map(|(entry, met)| {
                    *met = true;
                    entry.reason.clone()
                });
                Difference {
                    item: item.clone(),
                    native,
                    forwarded,
                    reason,
                }
            })
            .collect()
    }

    /// Entries that are about one of these runs, each a client and a back end, and that nothing needed.
    pub(super) fn unmet(&self, runs: &[(&str, &str)]) -> Vec<String> {
        let all_of = |entry: &Expectation| match &entry.backend {
            Some(backend) => runs.contains(&(entry.client.as_str(), backend.as_str())),
            None => super::BACKENDS
                .iter()
                .all(|backend| runs.contains(&(entry.client.as_str(), backend))),
        };
        let unmet = self.entries.iter().filter(|(entry, met)| !met && all_of(entry));
        unmet
            .map(|(entry, _)| format!("{}: {}", entry.client, entry.item))
            .collect()
    }
}

impl Expectation {
    fn is_of(&self, client: &str, backend: &str) -> bool {
        self.client == client && self.backend.as_deref().is_none_or(|wanted| wanted == backend)
    }
}

fn is_as(wanted: Option<&str>, found: Option<&str>) -> bool {
    wanted.is_none_or(|wanted| matches(wanted, found.unwrap_or_default()))
}

/// Whether a text is as a pattern, in which `*` is anything.
fn matches(pattern: &str, text: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else {
        return pattern == text;
    };
    let Some(text) = text.strip_prefix(first) else {
        return false;
    };
    (0..=text.len())
        .filter(|at| text.is_char_boundary(*at))
        .any(|at| matches(rest, &text[at..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "
        [[difference]]
        client = 'a'
        item = 'svm *'
        native = 'y*s'
        reason = 'because'
        [[difference]]
        client = 'a'
        backend = 'oclgrind'
        item = 'other'
        reason = 'so'
    ";

    fn expected() -> Expected {
        Expected::of(toml::from_str::<File>(TABLE).unwrap().difference)
    }

    fn results(of: &[(&str, &str)]) -> Results {
        of.iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect()
    }

    fn reasons(differences: &[Difference]) -> Vec<(&str, Option<&str>)> {
        let reasons = differences.iter().map(|it| (it.item.as_str(), it.reason.as_deref()));
        reasons.collect()
    }

    #[test]
    fn what_is_not_expected_has_no_reason() {
        let native = results(&[("svm 1", "yes"), ("svm 2", "no"), ("same", "1"), ("gone", "1")]);
        let forwarded = results(&[("svm 1", "no"), ("svm 2", "yes"), ("same", "1"), ("new", "1")]);
        let found = expected().compare("a", "pocl", &native, &forwarded);
        let wanted = [
            ("gone", None),
            ("svm 1", Some("because")),
            ("svm 2", None),
            ("new", None),
        ];
        assert_eq!(reasons(&found), wanted);
        let of_another = expected().compare("b", "pocl", &native, &forwarded);
        assert!(of_another.iter().all(|it| it.reason.is_none()));
    }

    #[test]
    fn an_entry_that_nothing_needs_is_told_if_all_that_it_is_about_was_run() {
        let mut table = expected();
        let (native, forwarded) = (results(&[("other", "1")]), results(&[("other", "2")]));
        let found = table.compare("a", "oclgrind", &native, &forwarded);
        assert_eq!(reasons(&found), [("other", Some("so"))]);
        assert_eq!(table.unmet(&[("a", "oclgrind")]), [""; 0]);
        assert_eq!(table.unmet(&[("a", "oclgrind"), ("a", "pocl")]), ["a: svm *"]);
        assert_eq!(expected().unmet(&[("a", "oclgrind")]), ["a: other"]);
    }

    #[test]
    fn stars_are_anything() {
        for (pattern, text, wanted) in [
            ("a*c", "abbc", true),
            ("a*c", "ac", true),
            ("a*c", "acd", false),
            ("*", "", true),
            ("a", "ab", false),
            ("*é*", "xéy", true),
        ] {
            assert_eq!(matches(pattern, text), wanted, "{pattern} {text}");
        }
    }
}
