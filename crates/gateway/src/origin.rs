//! What a sandbox is made of: what somebody writes as a `templateID` looked up. Templates that the tenant has built come first, if a build
//! of them is ready, then its names of snapshots, then the node's templates, by name or id, then the tenant's snapshots. Makes nothing.

use control::{Build, DEFAULT_TAG};
use node_api::{Snapshot, Template};

use crate::Error;
use crate::auth::Principal;
use crate::builds::{is_build, snapshot_name};
use crate::gateway::Gateway;

/// The longest thing that is looked up.
const MAX_NAME: usize = 256;

/// What a sandbox is made of.
#[derive(Clone, Debug)]
pub(crate) enum Origin {
    /// A machine that has booted, which is the node's.
    Template(Box<Template>),
    /// What the tenant has built.
    Built(Box<Built>),
    /// A sandbox as it was.
    Snapshot(Box<Snapshot>),
}

/// A build of a tenant's, and its machine.
#[derive(Clone, Debug)]
pub(crate) struct Built {
    /// What it is called.
    pub(crate) template: control::Template,
    /// How it came to be.
    pub(crate) build: Build,
    /// As it was at the end.
    pub(crate) snapshot: Snapshot,
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
            Self::Built(built) => &built.template.id,
            Self::Snapshot(snapshot) => &snapshot.name,
        }
    }
}

/// A name and its tag.
pub(crate) fn split(text: &str) -> (&str, &str) {
    text.split_once(':').unwrap_or((text, DEFAULT_TAG))
}

/// The same as it is written: the usual tag is not.
pub(crate) fn named(name: &str, tag: &str) -> String {
    match tag == DEFAULT_TAG {
        true => name.to_owned(),
        false => format!("{name}:{tag}"),
    }
}

impl Gateway {
    /// The tenant's template of this name or id.
    pub(crate) async fn own_template(&self, tenant: &str, wanted: &str) -> Result<Option<control::Template>, Error> {
        let owned = (tenant.to_owned(), wanted.to_owned());
        self.store.with(move |store| store.template(&owned.0, &owned.1)).await
    }

    /// The same, where there has to be one.
    pub(crate) async fn need_template(&self, tenant: &str, wanted: &str) -> Result<control::Template, Error> {
        let found = self.own_template(tenant, wanted).await?;
        found.ok_or_else(|| Error::NotFound {
            what: "template",
            name: wanted.chars().take(64).collect(),
        })
    }

    /// The build of a template to which a tag leads.
    async fn find_build(
        &self,
        principal: &Principal,
        template: control::Template,
        tag: &str,
        asked: &str,
    ) -> Result<Option<Found>, Error> {
        let (tenant, id, tag) = (principal.tenant.clone(), template.id.clone(), tag.to_owned());
        let build = self.store.with(move |store| {
            let all = store.tags(&id)?;
            match all.into_iter().find(|one| one.tag == tag) {
                Some(tag) => store.build(&tenant, &tag.build),
                None => Ok(None),
            }
        });
        let Some(build) = build.await? else {
            return Ok(None);
        };
        let snapshot = self
            .nodes
            .find_snapshot(&principal.owner(), &snapshot_name(&build.id))
            .await?;
        let Some(snapshot) = snapshot else {
            return Ok(None);
        };
        Ok(Some(Found {
            alias: (asked == template.name).then(|| template.name.clone()),
            origin: Origin::Built(Box::new(Built {
                template,
                build,
                snapshot,
            })),
        }))
    }

    /// What `text` stands for.
    pub(crate) async fn find(&self, principal: &Principal, text: &str) -> Result<Found, Error> {
        let mut what = "template";
        let missing = |what| Error::NotFound {
            what,
            name: text.chars().take(MAX_NAME).collect(),
        };
        if text.is_empty() || text.len() > MAX_NAME {
            return Err(missing(what));
        }
        let (name, tag) = split(text);
        if let Some(template) = self.own_template(&principal.tenant, name).await? {
            match self.find_build(principal, template, tag, name).await? {
                Some(found) => return Ok(found),
                // One that is not built yet hides nothing of the node's.
                None => what = "a build of the template",
            }
        }
        let (tenant, owned) = (principal.tenant.clone(), (name.to_owned(), tag.to_owned()));
        let alias = self.store.with(move |store| store.alias(&tenant, &owned.0, &owned.1));
        let target = match alias.await? {
            Some(alias) => alias.target,
            None if tag != DEFAULT_TAG => return Err(missing(what)),
            None => name.to_owned(),
        };
        let owner = principal.owner();
        let origin = match self.nodes.find_template(&owner, &target).await? {
            Some(template) => Origin::Template(Box::new(template)),
            None => match self.nodes.find_snapshot(&owner, &target).await? {
                // That of a build is asked for by its template.
                Some(snapshot) if is_build(&snapshot.name) => return Err(missing(what)),
                Some(snapshot) => Origin::Snapshot(Box::new(snapshot)),
                None => return Err(missing(what)),
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
        for text in ["web", "web:v1"] {
            let (name, tag) = split(text);
            assert_eq!(named(name, tag), text);
        }
        assert_eq!(split("a/web:v1:x"), ("a/web", "v1:x"));
    }
}
