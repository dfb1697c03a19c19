//! Endpoints of the tag `volumes`: make, list, look at and remove. A volume's id is its name.

use std::sync::Arc;

use axum::Json;
use axum::extract::State as Shared;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use node_api::tenant_volume::TenantVolume;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Object;
use super::extract::{Body, Name};
use super::failures::Failures;
use crate::Error;
use crate::auth::Principal;
use crate::gateway::Gateway;
use crate::volumes::token;

/// A volume that is asked for.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct NewVolume {
    /// Its name: a letter or digit, then letters, digits, `_`, `.` and `-`, 64 at most.
    name: String,
}

/// A volume.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Volume {
    /// Its id, which is its name.
    #[serde(rename = "volumeID")]
    volume_id: String,
    /// Its name.
    name: String,
}

/// A volume with what its files are reached by.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct VolumeAndToken {
    /// The volume.
    #[serde(flatten)]
    volume: Volume,
    /// To be sent as `Authorization: Bearer` with requests about its content.
    token: String,
}

fn show(volume: &TenantVolume) -> Volume {
    Volume {
        volume_id: volume.name.clone(),
        name: volume.name.clone(),
    }
}

fn show_with_token(gateway: &Gateway, principal: &Principal, volume: &TenantVolume) -> VolumeAndToken {
    VolumeAndToken {
        volume: show(volume),
        token: token(&gateway.tokens, &principal.tenant, volume),
    }
}

/// Make a volume.
#[utoipa::path(post, path = "/volumes", tag = "volumes", request_body = NewVolume,
    responses((status = 201, body = VolumeAndToken), Failures))]
pub(crate) async fn create(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Body(asked): Body<NewVolume>,
) -> Result<Response, Error> {
    let volume = gateway.make_volume(&principal.tenant, asked.name).await?;
    let shown = show_with_token(&gateway, &principal, &volume);
    let mut response = (StatusCode::CREATED, Json(shown)).into_response();
    response.extensions_mut().insert(Object(volume.name));
    Ok(response)
}

/// List volumes, by name.
#[utoipa::path(get, path = "/volumes", tag = "volumes", responses((status = 200, body = [Volume]), Failures))]
pub(crate) async fn list(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
) -> Result<Json<Vec<Volume>>, Error> {
    let all = gateway.volumes(&principal.owner()).await?;
    Ok(Json(all.iter().map(show).collect()))
}

/// Look at a volume.
#[utoipa::path(get, path = "/volumes/{volumeID}", tag = "volumes", params(("volumeID" = String, Path)),
    responses((status = 200, body = VolumeAndToken), Failures))]
pub(crate) async fn get(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Name(name): Name,
) -> Result<Json<VolumeAndToken>, Error> {
    let volume = gateway.find_volume(&principal.owner(), name).await?;
    Ok(Json(show_with_token(&gateway, &principal, &volume)))
}

/// Remove a volume with its files; refused while a sandbox has it, a paused one too.
#[utoipa::path(delete, path = "/volumes/{volumeID}", tag = "volumes", params(("volumeID" = String, Path)),
    responses((status = 204, description = "It is gone"), Failures))]
pub(crate) async fn remove(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Name(name): Name,
) -> Result<StatusCode, Error> {
    gateway.remove_volume(&principal.owner(), name).await?;
    Ok(StatusCode::NO_CONTENT)
}
