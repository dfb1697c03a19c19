//! Endpoints of the tag `network`: what a sandbox may reach.

use std::sync::Arc;

use axum::extract::State as Shared;
use http::StatusCode;
use node_api::Request;

use super::extract::{Body, Id};
use super::failures::Failures;
use super::models::NetworkUpdate;
use crate::Error;
use crate::auth::Principal;
use crate::egress;
use crate::gateway::Gateway;

/// Have a sandbox reach what these rules let it, in place of those that it has; of a paused one, when it goes on. Open connections to what it
/// may not reach any more end.
#[utoipa::path(put, path = "/sandboxes/{sandboxID}/network", tag = "network", params(("sandboxID" = String, Path)),
    request_body = NetworkUpdate, responses((status = 204), Failures))]
pub(crate) async fn update(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Id(id): Id,
    Body(asked): Body<NetworkUpdate>,
) -> Result<StatusCode, Error> {
    let egress = egress::of_update(&asked)?;
    gateway.sandbox(&principal, &id).await?;
    let request = Request::UpdateNetwork { sandbox: id, egress };
    gateway.nodes.changed(&principal.owner(), request).await?;
    Ok(StatusCode::NO_CONTENT)
}
