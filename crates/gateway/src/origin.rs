//! What a sandbox is made of: what somebody writes as a `templateID` looked up. A tenant's own names come first, then the node's templates,
//! by name or id, then the tenant's snapshots. Makes nothing.

use control::DEFAULT_TAG;
use node_api::{Snapshot, Template};

use crate::Error;
use crate::auth::Principal;
use crate::gateway::Gateway;

/// The longest thing that is looked up.
const MAX_NAME: usize = 256;

/// What a sandbox is made of.
#[derive(Clone, Debug)]
pub(crate) enum Origin {
    /// A machine that has booted.
    Template(Box<Template>),
    /// A sandbox as it was.
    Snapshot(Box<Snapshot>),
}

/// What was found, and by what.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    /// What it is.
    pub(crate) origin: Origin,
    /// The name that was asked for, if it is one and no id.
    pub(crate) alias: Option<String>,
}

impl Origin {
    /// By which it is told to its user.
    pub(crate) fn id(&self) -> &str {
        match self {
            Self::Template(template) => &template.id,
            Self::Snapshot(snapshot) => &snapshot.name,
        }
    }
}

/// A name and its tag.
pub(crate) fn split(text: &str) -> (&str, &str) {
    text.split_once(':').unwrap_or((text, DEFAULT_TAG))
}

impl Gateway {
    /// What `text` stands for.
    pub(crate) async fn find(&self, principal: &Principal, text: &str) -> Result<Found, Error> {
        let missing = || Error::NotFound {
            what: "template",
            name: text.chars().take(MAX_NAME).collect(),
        };
        if text.is_empty() || text.len() > MAX_NAME {
            return Err(missing());
        }
        let (name, tag) = split(text);
        let (tenant, owned) = (principal.tenant.clone(), (name.to_owned(), tag.to_owned()));
        let alias = self.store.with(move |store| store.alias(&tenant, &owned.0, &owned.1));
        let target = match alias.await? {
            Some(alias) => alias.target,
            None if tag != DEFAULT_TAG => return Err(missing()),
            None => name.to_owned(),
        };
        let owner = principal.owner();
        let origin = match self.nodes.find_template(&owner, &target).await? {
            Some(template) => Origin::Template(Box::new(template)),
            None => match self.nodes.find_snapshot(&owner, &target).await? {
                Some(snapshot) => Origin::Snapshot(Box::new(snapshot)),
                None => return Err(missing()),
            },
        };
        // The beginning of an id is no name.
        let is_name = !origin.id().starts_with(name);
        Ok(Found {
            alias: is_name.then(|| name.to_owned()),
            origin,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_stands_after_a_colon() {
        assert_eq!(split("web"), ("web", "default"));
        assert_eq!(split("web:v1"), ("web", "v1"));
        assert_eq!(split("a/web:v1:x"), ("a/web", "v1:x"));
    }
}
