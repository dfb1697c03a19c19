//! Endpoints of the E2B API that are not there, by name: a client is told so, and not that there is no such path.

use std::sync::Arc;

use axum::Router;
use axum::routing::{MethodFilter, on};

use crate::Error;
use crate::gateway::Gateway;

const DELETE: MethodFilter = MethodFilter::DELETE;
const GET: MethodFilter = MethodFilter::GET;
const PATCH: MethodFilter = MethodFilter::PATCH;
const POST: MethodFilter = MethodFilter::POST;

/// Method, path, and what it is.
const UNSERVED: &[(MethodFilter, &str, &str)] = &[
    (GET, "/secrets", "a list of secrets"),
    (POST, "/secrets", "a secret"),
    (GET, "/secrets/{secret}", "a secret"),
    (POST, "/secrets/{secret}", "a secret"),
    (DELETE, "/secrets/{secret}", "a secret"),
    (GET, "/teams", "a list of teams"),
    (GET, "/teams/{team}/metrics", "metrics of a team"),
    (GET, "/volumes", "a list of volumes"),
    (POST, "/volumes", "a volume"),
    (GET, "/volumes/{volume}", "a volume"),
    (DELETE, "/volumes/{volume}", "a volume"),
    (GET, "/default-templates", "a list of default templates"),
    (POST, "/templates", "a template build"),
    (POST, "/v2/templates", "a template build"),
    (POST, "/v3/templates", "a template build"),
    (POST, "/templates/{template}", "a template build"),
    (PATCH, "/templates/{template}", "a change of a template"),
    (PATCH, "/v2/templates/{template}", "a change of a template"),
    (POST, "/templates/{template}/builds/{build}", "a template build"),
    (POST, "/v2/templates/{template}/builds/{build}", "a template build"),
    (
        GET,
        "/templates/{template}/builds/{build}/status",
        "the status of a template build",
    ),
    (
        GET,
        "/templates/{template}/builds/{build}/logs",
        "the log of a template build",
    ),
    (
        GET,
        "/templates/{template}/files/{hash}",
        "an upload of files for a template build",
    ),
    (POST, "/templates/tags", "a tag of a template"),
    (DELETE, "/templates/tags", "a tag of a template"),
    (GET, "/templates/{template}/tags", "a list of a template's tags"),
    (
        GET,
        "/templates/{template}/tags/count",
        "the number of a template's tags",
    ),
    (GET, "/templates/{template}/tags/exists", "a look for a template's tag"),
    (GET, "/templates/{template}/tags/groups", "groups of a template's tags"),
    (
        GET,
        "/templates/{template}/tags/{tag}/assignments",
        "assignments of a template's tag",
    ),
];

/// The routes of all of them.
pub(super) fn routes(mut router: Router<Arc<Gateway>>) -> Router<Arc<Gateway>> {
    for (method, path, what) in UNSERVED.iter().copied() {
        router = router.route(path, on(method, move || async move { Error::NotServed(what) }));
    }
    router
}
