//! The REST API: which path is which handler, and what is done around each of them. One file a tag; data as it travels in `models`. What is
//! the node's never becomes JSON here.

mod builds;
mod extract;
mod failures;
mod guard;
mod lifecycle;
mod logs;
mod metrics;
pub(crate) mod models;
mod network;
mod page;
mod pools;
mod sandboxes;
mod snapshots;
mod tags;
mod templates;
mod trace;
mod unserved;
mod uploads;
mod volume_content;
mod volumes;

use std::sync::Arc;

use axum::extract::DefaultBodyLimit;
use axum::middleware::from_fn_with_state;
use axum::routing::{get, patch, post, put};
use axum::{Json, Router};
use http::StatusCode;
use utoipa::openapi::security::{ApiKey, ApiKeyValue, Http, HttpAuthScheme, SecurityScheme};
use utoipa::openapi::{OpenApi as Document, SecurityRequirement};
use utoipa::{Modify, OpenApi};

pub(crate) use extract::sandbox_id;

use crate::Error;
use crate::gateway::Gateway;
use crate::limits::MAX_BODY;
use crate::ui;

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
        lifecycle::fork, network::update, snapshots::create, snapshots::list, templates::list, templates::list_v2, templates::get,
        templates::alias, templates::remove, templates::update, templates::update_v2, builds::request, builds::start, builds::status,
        builds::logs, uploads::link, uploads::put, tags::assign, tags::remove, tags::list, tags::count, tags::exists, tags::groups,
        tags::assignments, metrics::one, metrics::several, volumes::create, volumes::list, volumes::get, volumes::remove, volume_content::stat,
        volume_content::update, volume_content::remove, volume_content::list, volume_content::make_directory, volume_content::read,
        volume_content::write, logs::logs, logs::logs_v2, trace::trace, pools::pools, health
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
        components.add_security_scheme("VolumeToken", SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer)));
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
        .route("/sandboxes/{id}/network", put(network::update))
        .route("/sandboxes/{id}/snapshots", post(snapshots::create))
        .route("/sandboxes/{id}/metrics", get(metrics::one))
        .route("/sandboxes/{id}/logs", get(logs::logs))
        .route("/v2/sandboxes/{id}/logs", get(logs::logs_v2))
        .route("/sandboxes/{id}/trace", get(trace::trace))
        .route("/pools", get(pools::pools))
        .route("/snapshots", get(snapshots::list))
        .route("/templates", get(templates::list))
        .route("/v2/templates", get(templates::list_v2))
        .route("/templates/aliases/{alias}", get(templates::alias))
        .route(
            "/templates/{template}",
            get(templates::get).patch(templates::update).delete(templates::remove),
        )
        .route("/v2/templates/{template}", patch(templates::update_v2))
        .route("/v3/templates", post(builds::request))
        .route("/v2/templates/{template}/builds/{build}", post(builds::start))
        .route("/templates/{template}/builds/{build}/status", get(builds::status))
        .route("/templates/{template}/builds/{build}/logs", get(builds::logs))
        .route("/templates/{template}/files/{hash}", get(uploads::link))
        .route("/templates/tags", post(tags::assign).delete(tags::remove))
        .route("/templates/{template}/tags", get(tags::list))
        .route("/templates/{template}/tags/count", get(tags::count))
        .route("/templates/{template}/tags/exists", get(tags::exists))
        .route("/templates/{template}/tags/groups", get(tags::groups))
        .route("/templates/{template}/tags/{tag}/assignments", get(tags::assignments))
        .route("/volumes", get(volumes::list).post(volumes::create))
        .route("/volumes/{volume}", get(volumes::get).delete(volumes::remove));
    let keyed = unserved::routes(keyed).route_layer(from_fn_with_state(Arc::clone(gateway), guard::guard));
    let document = document();
    keyed
        .route("/health", get(health))
        .route("/uploads/{tenant}/{hash}", put(uploads::put))
        .route(
            "/volumecontent/{volume}/path",
            get(volume_content::stat)
                .patch(volume_content::update)
                .delete(volume_content::remove),
        )
        .route(
            "/volumecontent/{volume}/dir",
            get(volume_content::list).post(volume_content::make_directory),
        )
        .route(
            "/volumecontent/{volume}/file",
            get(volume_content::read).put(volume_content::write),
        )
        .route("/openapi.json", get(move || async move { Json(document) }))
        .merge(ui::routes())
        .fallback(|| async { Error::NoEndpoint })
        .method_not_allowed_fallback(|| async { Error::NoMethod })
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(Arc::clone(gateway))
}
