//! Endpoints of the tag `sandboxes`: make, list, look at, kill.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State as Shared;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, StatusCode};
use node_api::list::{ListConfig, Place};
use node_api::{Sandbox, State as NodeState};
use percent_encoding::percent_decode_str;

use super::Object;
use super::extract::{Id, Query, RawBody};
use super::failures::Failures;
use super::models::{ListQuery, ListedSandbox, NewSandbox, Sandbox as SandboxModel, SandboxDetail};
use super::page;
use crate::Error;
use crate::auth::Principal;
use crate::gateway::Gateway;
use crate::idempotency::Turn;
use crate::labels;
use crate::launch::is_for_build;
use crate::plan::Plan;
use crate::time_text;

/// Seconds that a sandbox runs of which nobody says it, by the older endpoint and by the newer one.
const TIMEOUT: u64 = 15;
const TIMEOUT_V2: u64 = 300;

/// The header of a key for requests that are sent twice.
const IDEMPOTENCY_KEY: &str = "idempotency-key";

/// The most conditions on metadata.
const MAX_CONDITIONS: usize = 64;

/// Make a sandbox.
#[utoipa::path(post, path = "/sandboxes", tag = "sandboxes", request_body = NewSandbox,
    params(("Idempotency-Key" = Option<String>, Header, description = "The same request with the same key is carried out once")),
    responses((status = 201, body = SandboxModel), Failures))]
pub(crate) async fn create(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    headers: HeaderMap,
    asked: RawBody<NewSandbox>,
) -> Result<Response, Error> {
    make(&gateway, &principal, &headers, asked, TIMEOUT).await
}

/// Make a sandbox.
#[utoipa::path(post, path = "/v2/sandboxes", tag = "sandboxes", request_body = NewSandbox,
    params(("Idempotency-Key" = Option<String>, Header, description = "The same request with the same key is carried out once")),
    responses((status = 201, body = SandboxModel), Failures))]
pub(crate) async fn create_v2(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    headers: HeaderMap,
    asked: RawBody<NewSandbox>,
) -> Result<Response, Error> {
    make(&gateway, &principal, &headers, asked, TIMEOUT_V2).await
}

async fn make(
    gateway: &Gateway,
    principal: &Principal,
    headers: &HeaderMap,
    asked: RawBody<NewSandbox>,
    timeout: u64,
) -> Result<Response, Error> {
    let key = match headers.get(IDEMPOTENCY_KEY) {
        Some(key) => Some(
            key.to_str()
                .map_err(|_| Error::invalid("the Idempotency-Key is no text"))?,
        ),
        None => None,
    };
    let sandbox = match gateway.idempotency.begin(&principal.tenant, key, &asked.bytes)? {
        Turn::Again(id) => gateway.sandbox(principal, &id).await?,
        Turn::First(begun) => {
            let plan = Plan::of(&asked.value, timeout)?;
            let sandbox = gateway.launch_named(principal, &asked.value.template_id, plan).await?;
            begun.made(&sandbox.id);
            sandbox
        }
    };
    let mut response = (StatusCode::CREATED, Json(gateway.show(&sandbox))).into_response();
    response.extensions_mut().insert(Object(sandbox.id));
    Ok(response)
}

/// List the sandboxes that run.
#[utoipa::path(get, path = "/sandboxes", tag = "sandboxes", params(ListQuery), responses((status = 200, body = [ListedSandbox]), Failures))]
pub(crate) async fn list(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Query(query): Query<ListQuery>,
) -> Result<Response, Error> {
    let state = query.state.clone().or_else(|| Some("running".into()));
    // It has no pages.
    let query = ListQuery {
        state,
        limit: None,
        next_token: None,
        ..query
    };
    let wanted = Wanted::of(&gateway, &principal, &query).await?;
    let mut list = wanted.list;
    list.limit = None;
    let mut found = gateway.nodes.list(&principal.owner(), list).await?;
    found.retain(|sandbox| !is_for_build(sandbox));
    let shown: Vec<ListedSandbox> = found.iter().map(|sandbox| gateway.show_listed(sandbox)).collect();
    Ok(Json(shown).into_response())
}

/// List sandboxes, those that are paused too, by pages.
#[utoipa::path(get, path = "/v2/sandboxes", tag = "sandboxes", params(ListQuery),
    responses((status = 200, body = [ListedSandbox], headers(("x-next-token" = String, description = "Of the next page, if there is one"))), Failures))]
pub(crate) async fn list_v2(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Query(query): Query<ListQuery>,
) -> Result<Response, Error> {
    let mut wanted = Wanted::of(&gateway, &principal, &query).await?;
    let limit = wanted.list.limit.unwrap_or_default();
    // One more than a page says whether there is another one.
    wanted.list.limit = Some(limit + 1);
    let mut found = gateway.nodes.list(&principal.owner(), wanted.list).await?;
    let is_cut = found.len() > limit;
    found.truncate(limit);
    let last = found.last().map(Place::of).filter(|_| is_cut);
    let count = found.len();
    found.retain(|sandbox| sandbox.created_ns >= wanted.started_after);
    // The newest come first there: behind one that is too old there are only older ones.
    let next = last.filter(|_| found.len() == count);
    found.retain(|sandbox| !is_for_build(sandbox));
    let shown: Vec<ListedSandbox> = found.iter().map(|sandbox| gateway.show_listed(sandbox)).collect();
    let mut response = Json(shown).into_response();
    if let Some(token) = next.as_ref().and_then(page::header) {
        response.headers_mut().insert(page::NEXT_TOKEN, token);
    }
    Ok(response)
}

/// What is asked for of a list.
struct Wanted {
    list: ListConfig,
    /// Made at this moment or later.
    started_after: u64,
}

impl Wanted {
    async fn of(gateway: &Gateway, principal: &Principal, query: &ListQuery) -> Result<Self, Error> {
        let mut labels = conditions(query.metadata.as_deref().unwrap_or_default())?;
        if let Some(template) = &query.template {
            // What is not there any more may still be what sandboxes were made of.
            let id = match gateway.find(principal, template).await {
                Ok(found) => found.origin.id().to_owned(),
                Err(Error::NotFound { .. }) => template.clone(),
                Err(error) => return Err(error),
            };
            labels.insert(labels::TEMPLATE.to_owned(), id);
        }
        let newest_first = match query.order.as_deref() {
            None | Some("desc") => true,
            Some("asc") => false,
            Some(other) => return Err(Error::invalid(format!("order `{other}` is neither asc nor desc"))),
        };
        let started_after = match &query.started_after {
            // A plus sign that was not escaped has become a blank.
            Some(text) => time_text::parse(&text.replace(' ', "+"))
                .ok_or_else(|| Error::invalid(format!("startedAfter `{text}` is no date and time (RFC 3339)")))?,
            None => 0,
        };
        let mut after = page::parse(query.next_token.as_deref())?;
        if !newest_first && after.as_ref().is_none_or(|after| after.created_ns < started_after) {
            after = Some(Place {
                created_ns: started_after,
                id: String::new(),
            });
        }
        Ok(Self {
            list: ListConfig {
                states: states(query.state.as_deref())?,
                labels,
                newest_first,
                after,
                limit: Some(page::limit(query.limit)?),
                ..ListConfig::default()
            },
            started_after,
        })
    }
}

fn states(text: Option<&str>) -> Result<Vec<NodeState>, Error> {
    let mut states = Vec::new();
    for word in text.unwrap_or("running,paused").split(',') {
        match word {
            "running" => states.extend([NodeState::Creating, NodeState::Starting, NodeState::Running]),
            "paused" => states.extend([NodeState::Paused, NodeState::Suspended]),
            other => return Err(Error::invalid(format!("state `{other}` is neither running nor paused"))),
        }
    }
    Ok(states)
}

/// Conditions on metadata: clients escape keys and values, put pairs together as a query, and escape that as one parameter, so that two
/// layers of it are left here.
fn conditions(text: &str) -> Result<BTreeMap<String, String>, Error> {
    let text = unescape(text)?;
    let mut labels = BTreeMap::new();
    for pair in text.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let (key, value) = (unescape(key)?, unescape(value)?);
        if labels.len() == MAX_CONDITIONS {
            return Err(Error::invalid(format!(
                "there are more than {MAX_CONDITIONS} conditions on metadata"
            )));
        }
        if !labels::is_text(&key) || !labels::is_text(&value) {
            return Err(Error::invalid("metadata has no zero characters"));
        }
        labels.insert(labels::metadata_key(&key), value);
    }
    Ok(labels)
}

fn unescape(text: &str) -> Result<String, Error> {
    let text = text.replace('+', " ");
    let bytes = percent_decode_str(&text).decode_utf8();
    bytes
        .map(std::borrow::Cow::into_owned)
        .map_err(|_| Error::invalid("a condition on metadata is no UTF-8"))
}

/// Look at a sandbox.
#[utoipa::path(get, path = "/sandboxes/{sandboxID}", tag = "sandboxes", params(("sandboxID" = String, Path)),
    responses((status = 200, body = SandboxDetail), Failures))]
pub(crate) async fn get(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Id(id): Id,
) -> Result<Json<SandboxDetail>, Error> {
    let sandbox: Sandbox = gateway.sandbox(&principal, &id).await?;
    Ok(Json(gateway.show_detail(&sandbox)))
}

/// Kill a sandbox, whether it runs or is paused.
#[utoipa::path(delete, path = "/sandboxes/{sandboxID}", tag = "sandboxes", params(("sandboxID" = String, Path)),
    responses((status = 204), Failures))]
pub(crate) async fn kill(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Id(id): Id,
) -> Result<StatusCode, Error> {
    gateway.sandbox(&principal, &id).await?;
    match gateway.remove(&principal.owner(), &id).await {
        // It has ended just now.
        Err(error) if crate::node::is_missing(&error) => Err(Error::NoSandbox(id)),
        done => done.map(|()| StatusCode::NO_CONTENT),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_are_escaped_twice() {
        let is = |text: &str, pairs: &[(&str, &str)]| {
            let expected = pairs
                .iter()
                .map(|(key, value)| (labels::metadata_key(key), (*value).to_owned()));
            assert_eq!(conditions(text).unwrap(), expected.collect(), "{text}");
        };
        is("", &[]);
        is("user=a&team=b", &[("user", "a"), ("team", "b")]);
        // As Python makes it of {"a b": "x&y=z+%"}: quote, then urlencode.
        is("a%2520b=x%2526y%253Dz%252B%2525", &[("a b", "x&y=z+%")]);
        is("user%3Da", &[("user", "a")]);
        is("k", &[("k", "")]);
        assert!(conditions("a=%25ff").is_err());
        assert!(conditions("a=%2500").is_err());
        let many: Vec<String> = (0..=MAX_CONDITIONS).map(|n| format!("k{n}=v")).collect();
        assert!(conditions(&many.join("&")).is_err());
    }

    #[test]
    fn states_are_the_apis() {
        assert_eq!(
            states(Some("paused")).unwrap(),
            [NodeState::Paused, NodeState::Suspended]
        );
        assert_eq!(states(None).unwrap().len(), 5);
        assert!(states(Some("exited")).is_err());
        assert!(states(Some("")).is_err());
    }
}
