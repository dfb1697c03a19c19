//! Endpoints of the tag `snapshots`: make and list. A snapshot has a name of its own on the node, which is its id here; what a tenant calls
//! it is an alias of that tenant's. It is removed as a template is.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State as Shared;
use axum::response::{IntoResponse, Response};
use control::Alias;
use http::StatusCode;
use node_api::list::Place;
use node_api::{Snapshot, SnapshotConfig};

use super::Object;
use super::extract::{Body, Id, Query};
use super::failures::Failures;
use super::models::{NewSnapshot, SnapshotInfo, SnapshotQuery};
use super::page;
use crate::Error;
use crate::auth::Principal;
use crate::builds::is_build;
use crate::gateway::Gateway;
use crate::launch::{SNAPSHOT, is_paused};
use crate::origin::{named, split};
use crate::plan::require_memory;
use crate::time_text;

/// Keep a sandbox as it is now; it goes on.
#[utoipa::path(post, path = "/sandboxes/{sandboxID}/snapshots", tag = "snapshots", params(("sandboxID" = String, Path)),
    request_body = Option<NewSnapshot>, responses((status = 201, body = SnapshotInfo), Failures))]
pub(crate) async fn create(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Id(id): Id,
    Body(asked): Body<NewSnapshot>,
) -> Result<Response, Error> {
    require_memory(asked.memory, "a snapshot")?;
    let name = asked.name.as_deref().filter(|name| !name.is_empty());
    if let Some(name) = name {
        check_name(name)?;
    }
    if let Some((name, _)) = name.map(split)
        && gateway.own_template(&principal.tenant, name).await?.is_some()
    {
        return Err(Error::Conflict(format!(
            "`{name}` is the name of a template: give the snapshot another one"
        )));
    }
    let sandbox = gateway.sandbox(&principal, &id).await?;
    if is_paused(sandbox.state) {
        return Err(Error::Conflict(format!(
            "sandbox {id} is paused: connect to it before a snapshot is made"
        )));
    }
    let config = SnapshotConfig {
        sandbox: id,
        name: Some(format!("{SNAPSHOT}{}", control::random_hex::<6>()?)),
        detach_devices: false,
    };
    let snapshot = gateway.nodes.snapshot(&principal.owner(), config).await?;
    if let Some(name) = name {
        let (name, tag) = split(name);
        let alias = Alias {
            name: name.to_owned(),
            tag: tag.to_owned(),
            target: snapshot.name.clone(),
            assigned: time_text::now(),
        };
        let tenant = Arc::clone(&principal.tenant);
        gateway
            .store
            .with(move |store| store.set_alias(&tenant, &alias))
            .await?;
    }
    let info = SnapshotInfo {
        snapshot_id: snapshot.name.clone(),
        names: name.map(str::to_owned).into_iter().collect(),
    };
    let mut response = (StatusCode::CREATED, Json(info)).into_response();
    response.extensions_mut().insert(Object(snapshot.name));
    Ok(response)
}

/// A tenant's name of something, maybe with a tag.
fn check_name(text: &str) -> Result<(), Error> {
    let (name, tag) = split(text);
    let is_word = |word: &str| node_api::check_name(word).is_ok();
    match is_word(name) && is_word(tag) {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "`{text}` cannot be a snapshot's name: begin with a letter or digit, then letters, digits, `_`, `.` and `-`, 64 at most; a tag may follow after a colon"
        ))),
    }
}

/// What a tenant calls things.
pub(super) async fn names(gateway: &Gateway, principal: &Principal) -> Result<BTreeMap<String, Vec<String>>, Error> {
    let tenant = Arc::clone(&principal.tenant);
    let aliases = gateway.store.with(move |store| store.aliases(&tenant)).await?;
    let mut names: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for alias in aliases {
        let name = named(&alias.name, &alias.tag);
        names.entry(alias.target).or_default().push(name);
    }
    Ok(names)
}

/// List snapshots, the newest first.
#[utoipa::path(get, path = "/snapshots", tag = "snapshots", params(SnapshotQuery),
    responses((status = 200, body = [SnapshotInfo], headers(("x-next-token" = String, description = "Of the next page, if there is one"))), Failures))]
pub(crate) async fn list(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Query(query): Query<SnapshotQuery>,
) -> Result<Response, Error> {
    let limit = page::limit(query.limit)?;
    let after = page::parse(query.next_token.as_deref())?;
    let mut names = names(&gateway, &principal).await?;
    let mut all = gateway.nodes.snapshots(&principal.owner()).await?;
    let is_called = |snapshot: &Snapshot, name: &str| {
        let its = names.get(&snapshot.name).map(Vec::as_slice).unwrap_or_default();
        let matches = |one: &String| one == name || one.split_once(':').is_some_and(|(word, _)| word == name);
        snapshot.name == name || its.iter().any(matches)
    };
    all.retain(|snapshot| {
        // Those of builds are part of templates.
        !is_build(&snapshot.name)
            && query.sandbox_id.as_ref().is_none_or(|id| snapshot.sandbox == *id)
            && query.name.as_ref().is_none_or(|name| is_called(snapshot, name))
            && after.as_ref().is_none_or(|after| place(snapshot) < *after)
    });
    all.sort_by_key(|snapshot| std::cmp::Reverse(place(snapshot)));
    let is_cut = all.len() > limit;
    all.truncate(limit);
    let next = all.last().map(place).filter(|_| is_cut);
    let shown = all.into_iter().map(|snapshot| SnapshotInfo {
        names: names.remove(&snapshot.name).unwrap_or_default(),
        snapshot_id: snapshot.name,
    });
    let mut response = Json(shown.collect::<Vec<_>>()).into_response();
    if let Some(token) = next.as_ref().and_then(page::header) {
        response.headers_mut().insert(page::NEXT_TOKEN, token);
    }
    Ok(response)
}

fn place(snapshot: &Snapshot) -> Place {
    Place {
        created_ns: snapshot.created_ns,
        id: snapshot.name.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_may_have_a_tag() {
        for name in ["web", "web:v1", "Web_1.x-y:z"] {
            assert!(check_name(name).is_ok(), "{name}");
        }
        for name in ["", ":", "a:", ":v1", "a/b", "a:b:c", "-a", "ü"] {
            assert!(check_name(name).is_err(), "{name}");
        }
    }
}
