//! Endpoint of the tag `pools`: what the node has ready for sandboxes to come. The node tells it by ids of its own; here it has the names
//! that the tenant knows, and what the tenant can make no sandbox of is left out.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State as Shared;
use node_api::Pool;
use node_api::transfer::Kind;
use serde::Serialize;
use utoipa::ToSchema;

use super::failures::Failures;
use super::{snapshots, templates};
use crate::Error;
use crate::auth::Principal;
use crate::builds::{is_build, snapshot_name};
use crate::gateway::Gateway;
use crate::launch::FORK;
use crate::origin::named;

/// What is ready.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Pools {
    /// Interfaces of the node's network; `null` as long as no sandbox of the node has needed one.
    #[schema(required)]
    interfaces: Option<Interfaces>,
    /// The memory that sandboxes of templates and snapshots begin with, the newest first.
    memory: Vec<Memory>,
}

/// Interfaces that were made ahead.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Interfaces {
    /// So many are ready.
    ready: u64,
    /// So many are to be.
    size: u64,
}

/// The memory of a template or a snapshot, as the node has it.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Memory {
    /// `template` or `snapshot`.
    kind: &'static str,
    /// Of what a sandbox is made: a name, or a snapshot's id.
    name: String,
    /// Bytes.
    size: u64,
    /// So many of them are in the host's memory already; `null` if that is not known.
    #[schema(required)]
    cached: Option<u64>,
}

/// What the node has ready for sandboxes to come.
#[utoipa::path(get, path = "/pools", tag = "pools", responses((status = 200, body = Pools), Failures))]
pub(crate) async fn pools(Shared(gateway): Shared<Arc<Gateway>>, principal: Principal) -> Result<Json<Pools>, Error> {
    let told = gateway.nodes.pools(&principal.owner()).await?;
    let names = Names::find(&gateway, &principal).await?;
    let mut found = Pools {
        interfaces: None,
        memory: Vec::new(),
    };
    for pool in told {
        match pool {
            Pool::Interfaces { ready, size } => found.interfaces = Some(Interfaces { ready, size }),
            Pool::Memory {
                kind,
                name,
                size,
                cached,
            } => found.memory.extend(names.of(kind, &name).map(|(kind, name)| Memory {
                kind,
                name,
                size,
                cached,
            })),
        }
    }
    Ok(Json(found))
}

/// By what a tenant asks for what the node has.
struct Names {
    /// Of the node's templates, by id.
    templates: BTreeMap<String, String>,
    /// Of the tenant's builds, by the name of their snapshots.
    builds: BTreeMap<String, String>,
    /// Of the tenant's snapshots.
    snapshots: BTreeMap<String, Vec<String>>,
}

impl Names {
    async fn find(gateway: &Gateway, principal: &Principal) -> Result<Self, Error> {
        let templates = templates::built(gateway, principal).await?.into_iter();
        let tenant = Arc::clone(&principal.tenant);
        let builds = gateway.store.with(move |store| store.build_names(&tenant)).await?;
        let mut named_builds = BTreeMap::new();
        for one in builds {
            let name = named(&one.template, &one.tag);
            named_builds.entry(snapshot_name(&one.build)).or_insert(name);
        }
        Ok(Self {
            templates: templates.map(|one| (one.id.clone(), one.name().to_owned())).collect(),
            builds: named_builds,
            snapshots: snapshots::names(gateway, principal).await?,
        })
    }

    /// What something is, and its name; nothing of what is not a tenant's to ask for.
    fn of(&self, kind: Kind, name: &str) -> Option<(&'static str, String)> {
        match kind {
            Kind::Template => Some(("template", self.templates.get(name)?.clone())),
            Kind::Snapshot if is_build(name) => Some(("template", self.builds.get(name)?.clone())),
            // Between the parts of a fork, which goes by itself.
            Kind::Snapshot if name.starts_with(FORK) => None,
            Kind::Snapshot => {
                let own = self.snapshots.get(name).and_then(|names| names.first());
                Some(("snapshot", own.map_or(name, String::as_str).to_owned()))
            }
        }
    }
}
