//! The REST API: which path is which handler, and what is done around each of them. One file a tag; data as it travels in `models`. What is
//! the node's never becomes JSON here.

mod extract;
mod failures;
mod guard;
mod lifecycle;
mod logs;
mod metrics;
pub(crate) mod models;
mod page;
mod sandboxes;
mod snapshots;
mod templates;
mod unserved;

use std::sync::Arc;

use axum::extract::DefaultBodyLimit;
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};
use axum::{Json, Router};
use http::StatusCode;
use utoipa::openapi::security::{ApiKey, ApiKeyValue, SecurityScheme};
use utoipa::openapi::{OpenApi as Document, SecurityRequirement};
use utoipa::{Modify, OpenApi};

pub(crate) use extract::sandbox_id;

use crate::Error;
use crate::gateway::Gateway;
use crate::limits::MAX_BODY;

/// What a request was about, for the audit log, where its path does not say so.
#[derive(Clone, Debug)]
pub(crate) struct Object(pub(crate) String);

/// The API's document.
#[derive(OpenApi)]
#[openapi(
    info(title = "Basalt", description = "Sandboxes, by the API that the E2B SDKs speak"),
    paths(
        sandboxes::create, sandboxes::create_v2, sandboxes::list, sandboxes::list_v2, sandboxes::get, sandboxes::kill,
        lifecycle::timeout, lifecycle::refresh, lifecycle::pause, lifecycle::resume, lifecycle::connect, lifecycle::connect_v2,
        lifecycle::fork, snapshots::create, snapshots::list, templates::list, templates::list_v2, templates::get, templates::alias,
        templates::remove, metrics::one, metrics::several, logs::logs, logs::logs_v2, health
    ),
    modifiers(&Keyed)
)]
struct ApiDocument;

/// Every endpoint wants a key, unless it says otherwise.
struct Keyed;

impl Modify for Keyed {
    fn modify(&self, document: &mut Document) {
        let scheme = SecurityScheme::ApiKey(ApiKey::Header(ApiKeyValue::new("X-API-Key")));
        let components = document.components.get_or_insert_with(Default::default);
        components.add_security_scheme("ApiKeyAuth", scheme);
        document.security = Some(vec![SecurityRequirement::new("ApiKeyAuth", [""; 0])]);
    }
}

/// The API's document.
pub(crate) fn document() -> Document {
    let mut document = ApiDocument::openapi();
    unserved::describe(&mut document);
    document
}

/// The same as JSON, for who asks no gateway: what `GET /openapi.json` answers.
///
/// # Errors
/// It cannot be written as JSON.
pub fn openapi() -> Result<String, serde_json::Error> {
    serde_json::to_string_pretty(&document())
}

/// Whether the gateway answers. It says nothing of the node.
#[utoipa::path(get, path = "/health", tag = "health", security(()), responses((status = 200, description = "It does")))]
pub(crate) async fn health() -> StatusCode {
    StatusCode::OK
}

/// All of it.
pub(crate) fn router(gateway: &Arc<Gateway>) -> Router {
    let keyed = Router::new()
        .route("/sandboxes", get(sandboxes::list).post(sandboxes::create))
        .route("/v2/sandboxes", get(sandboxes::list_v2).post(sandboxes::create_v2))
        .route("/sandboxes/metrics", get(metrics::several))
        .route("/sandboxes/{id}", get(sandboxes::get).delete(sandboxes::kill))
        .route("/sandboxes/{id}/timeout", post(lifecycle::timeout))
        .route("/sandboxes/{id}/refreshes", post(lifecycle::refresh))
        .route("/sandboxes/{id}/pause", post(lifecycle::pause))
        .route("/sandboxes/{id}/resume", post(lifecycle::resume))
        .route("/sandboxes/{id}/connect", post(lifecycle::connect))
        .route("/v2/sandboxes/{id}/connect", post(lifecycle::connect_v2))
        .route("/sandboxes/{id}/fork", post(lifecycle::fork))
        .route("/sandboxes/{id}/snapshots", post(snapshots::create))
        .route("/sandboxes/{id}/metrics", get(metrics::one))
        .route("/sandboxes/{id}/logs", get(logs::logs))
        .route("/v2/sandboxes/{id}/logs", get(logs::logs_v2))
        .route("/snapshots", get(snapshots::list))
        .route("/templates", get(templates::list))
        .route("/v2/templates", get(templates::list_v2))
        .route("/templates/aliases/{alias}", get(templates::alias))
        .route("/templates/{template}", get(templates::get).delete(templates::remove));
    let keyed = unserved::routes(keyed).route_layer(from_fn_with_state(Arc::clone(gateway), guard::guard));
    let document = document();
    keyed
        .route("/health", get(health))
        .route("/openapi.json", get(move || async move { Json(document) }))
        .fallback(|| async { Error::NoEndpoint })
        .method_not_allowed_fallback(|| async { Error::NoMethod })
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(Arc::clone(gateway))
}
