//! Endpoints of the E2B API that are not there, by name: a client is told so, and not that there is no such path.

use std::sync::Arc;

use axum::Router;
use axum::routing::{MethodFilter, on};

use crate::Error;
use crate::gateway::Gateway;

const DELETE: MethodFilter = MethodFilter::DELETE;
const GET: MethodFilter = MethodFilter::GET;
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
    (POST, "/templates", "a build of a template by a Dockerfile"),
    (POST, "/v2/templates", "a build of a template by a Dockerfile"),
    (POST, "/templates/{template}", "a build of a template by a Dockerfile"),
    (
        POST,
        "/templates/{template}/builds/{build}",
        "a build of a template by a Dockerfile",
    ),
];

/// The routes of all of them.
pub(super) fn routes(mut router: Router<Arc<Gateway>>) -> Router<Arc<Gateway>> {
    for (method, path, what) in UNSERVED.iter().copied() {
        router = router.route(path, on(method, move || async move { Error::NotServed(what) }));
    }
    router
}
