//! What the gateway keeps of a sandbox in the node's labels, as it keeps nothing itself: a user's metadata under one prefix, and what the
//! node has no field for under another. No user can write the second. Knows no request, and not whose a sandbox is: the node does.

use std::collections::BTreeMap;

use node_api::Sandbox;

/// Before the keys of a user's metadata.
const METADATA: &str = "e2b.metadata/";

/// What it was made of, as its user is told.
pub(crate) const TEMPLATE: &str = "basalt.e2b/template";

/// By which name it was asked for.
pub(crate) const ALIAS: &str = "basalt.e2b/alias";

/// Traffic lets it go on when it is suspended.
const AUTO_RESUME: &str = "basalt.e2b/auto-resume";

/// Its ports want a token.
const PRIVATE: &str = "basalt.e2b/private-traffic";

/// Which build is made in it, of one that is for nothing else and nobody's to see.
pub(crate) const BUILD: &str = "basalt.e2b/build";

/// Whether its user asked for the internet, or for none.
const INTERNET: &str = "basalt.e2b/internet";

/// What is said of a sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Said {
    pub(crate) template: String,
    pub(crate) alias: Option<String>,
    pub(crate) build: Option<String>,
    pub(crate) auto_resume: bool,
    pub(crate) private_traffic: bool,
    pub(crate) internet: Option<bool>,
    pub(crate) metadata: BTreeMap<String, String>,
}

/// The label of a key of metadata.
pub(crate) fn metadata_key(key: &str) -> String {
    format!("{METADATA}{key}")
}

/// It can be a key or a value.
pub(crate) fn is_text(text: &str) -> bool {
    !text.contains('\0')
}

impl Said {
    /// What is said of this one.
    pub(crate) fn of(sandbox: &Sandbox) -> Self {
        Self::read(&sandbox.config.labels)
    }

    /// The same of labels.
    pub(crate) fn read(labels: &BTreeMap<String, String>) -> Self {
        let value = |key: &str| labels.get(key);
        let is_yes = |key: &str| value(key).is_some_and(|value| value == "yes");
        let metadata = labels.iter();
        Self {
            template: value(TEMPLATE).cloned().unwrap_or_default(),
            alias: value(ALIAS).cloned(),
            build: value(BUILD).cloned(),
            auto_resume: is_yes(AUTO_RESUME),
            private_traffic: is_yes(PRIVATE),
            internet: value(INTERNET).map(|value| value == "yes"),
            metadata: metadata
                .filter_map(|(key, value)| Some((key.strip_prefix(METADATA)?.to_owned(), value.clone())))
                .collect(),
        }
    }

    /// The labels that say this.
    pub(crate) fn write(&self) -> BTreeMap<String, String> {
        let yes = |is: bool| if is { "yes" } else { "no" }.to_owned();
        let own = [
            (TEMPLATE, Some(self.template.clone())),
            (ALIAS, self.alias.clone()),
            (BUILD, self.build.clone()),
            (AUTO_RESUME, Some(yes(self.auto_resume))),
            (PRIVATE, Some(yes(self.private_traffic))),
            (INTERNET, self.internet.map(yes)),
        ];
        let metadata = self.metadata.iter();
        own.into_iter()
            .filter_map(|(key, value)| Some((key.to_owned(), value?)))
            .chain(metadata.map(|(key, value)| (metadata_key(key), value.clone())))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said() -> Said {
        Said {
            template: "t".into(),
            alias: Some("web".into()),
            build: Some("b".into()),
            auto_resume: true,
            private_traffic: true,
            internet: Some(false),
            metadata: BTreeMap::from([("k".into(), "v".into()), ("l".into(), String::new())]),
        }
    }

    #[test]
    fn what_is_written_is_read() {
        for one in [Said::default(), said()] {
            assert_eq!(Said::read(&one.write()), one);
        }
    }

    #[test]
    fn metadata_is_never_taken_for_the_gateways_own() {
        let mut evil = said();
        evil.metadata.insert("../basalt.e2b/template".into(), "b".into());
        evil.metadata.insert(TEMPLATE.into(), "b".into());
        assert_eq!(Said::read(&evil.write()).template, "t");
        assert!(!is_text("a\0b") && is_text("a\nb"));
    }
}
