//! Endpoints of the tag `lifecycle`: how long a sandbox runs, pause, resume, connect, fork.

use std::sync::Arc;

use axum::Json;
use axum::extract::State as Shared;
use http::StatusCode;
use node_api::{OnTimeout, Request, Sandbox, TimeLimit};

use super::extract::{Body, Id};
use super::failures::Failures;
use super::models::{Connect, Fork, Forked, Pause, Refresh, Resume, Sandbox as SandboxModel, Timeout};
use crate::Error;
use crate::auth::Principal;
use crate::gateway::Gateway;
use crate::launch::is_paused;
use crate::plan::{milliseconds, require_memory};
use crate::time_text;

/// Seconds where nobody says how many.
const TIMEOUT: u64 = 15;
const CONNECT_TIMEOUT: u64 = 300;

/// The most copies of a fork.
const MOST_FORKS: u64 = 100;

/// A limit of so many seconds, with what is done then as it was.
fn limit(sandbox: &Sandbox, seconds: u64) -> Result<TimeLimit, Error> {
    Ok(TimeLimit {
        ms: milliseconds(seconds)?,
        then: sandbox.config.time_limit.map(|limit| limit.then).unwrap_or_default(),
    })
}

/// Has a sandbox run for so long from now on, if that is longer than it has anyway.
async fn extend(gateway: &Gateway, principal: &Principal, sandbox: Sandbox, seconds: u64) -> Result<Sandbox, Error> {
    let limit = limit(&sandbox, seconds)?;
    match sandbox.ends_ns {
        Some(end) if limit.end(time_text::now_ns()) > end => {
            gateway.limit(&principal.owner(), &sandbox.id, limit).await
        }
        _ => Ok(sandbox),
    }
}

/// Have a sandbox run for so long from now on, also if that is less than it had.
#[utoipa::path(post, path = "/sandboxes/{sandboxID}/timeout", tag = "lifecycle", params(("sandboxID" = String, Path)),
    request_body = Timeout, responses((status = 204), Failures))]
pub(crate) async fn timeout(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Id(id): Id,
    Body(asked): Body<Timeout>,
) -> Result<StatusCode, Error> {
    let sandbox = gateway.sandbox(&principal, &id).await?;
    gateway
        .limit(&principal.owner(), &id, limit(&sandbox, asked.timeout)?)
        .await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Have a sandbox run for so long from now on, at least.
#[utoipa::path(post, path = "/sandboxes/{sandboxID}/refreshes", tag = "lifecycle", params(("sandboxID" = String, Path)),
    request_body = Refresh, responses((status = 204), Failures))]
pub(crate) async fn refresh(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Id(id): Id,
    Body(asked): Body<Refresh>,
) -> Result<StatusCode, Error> {
    let sandbox = gateway.sandbox(&principal, &id).await?;
    extend(&gateway, &principal, sandbox, asked.duration.unwrap_or(TIMEOUT)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Save a sandbox with its memory and end its machine, until it is resumed or connected to.
#[utoipa::path(post, path = "/sandboxes/{sandboxID}/pause", tag = "lifecycle", params(("sandboxID" = String, Path)),
    request_body = Option<Pause>, responses((status = 204), Failures))]
pub(crate) async fn pause(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Id(id): Id,
    Body(asked): Body<Pause>,
) -> Result<StatusCode, Error> {
    require_memory(asked.memory, "a pause")?;
    let sandbox = gateway.sandbox(&principal, &id).await?;
    if is_paused(sandbox.state) {
        return Err(Error::Conflict(format!("sandbox {id} is paused already")));
    }
    let request = Request::Suspend { sandbox: id.clone() };
    gateway.nodes.done(&principal.owner(), request).await?;
    // What was claimed for its machine is free.
    gateway.store.with(move |store| store.release(&id)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Let a paused sandbox go on.
#[utoipa::path(post, path = "/sandboxes/{sandboxID}/resume", tag = "lifecycle", params(("sandboxID" = String, Path)),
    request_body = Option<Resume>, responses((status = 201, body = SandboxModel), Failures))]
pub(crate) async fn resume(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Id(id): Id,
    Body(asked): Body<Resume>,
) -> Result<(StatusCode, Json<SandboxModel>), Error> {
    require_memory(asked.memory, "a resume")?;
    let sandbox = gateway.sandbox(&principal, &id).await?;
    let mut limit = limit(&sandbox, asked.timeout.unwrap_or(TIMEOUT))?;
    match asked.auto_pause {
        Some(true) => limit.then = OnTimeout::Suspend,
        Some(false) => limit.then = OnTimeout::Stop,
        None => (),
    }
    let (sandbox, was_paused) = gateway.resume(&principal.owner(), &id, Some(limit)).await?;
    match was_paused {
        true => Ok((StatusCode::CREATED, Json(gateway.show(&sandbox)))),
        false => Err(Error::Conflict(format!("sandbox {id} runs already"))),
    }
}

/// Have a sandbox run, whether it is paused or not.
#[utoipa::path(post, path = "/sandboxes/{sandboxID}/connect", tag = "lifecycle", params(("sandboxID" = String, Path)),
    request_body = Option<Connect>,
    responses((status = 200, description = "It ran", body = SandboxModel), (status = 201, description = "It was paused", body = SandboxModel), Failures))]
pub(crate) async fn connect(
    gateway: Shared<Arc<Gateway>>,
    principal: Principal,
    id: Id,
    asked: Body<Connect>,
) -> Result<(StatusCode, Json<SandboxModel>), Error> {
    connect_v2(gateway, principal, id, asked).await
}

/// Have a sandbox run, whether it is paused or not.
#[utoipa::path(post, path = "/v2/sandboxes/{sandboxID}/connect", tag = "lifecycle", params(("sandboxID" = String, Path)),
    request_body = Option<Connect>,
    responses((status = 200, description = "It ran", body = SandboxModel), (status = 201, description = "It was paused", body = SandboxModel), Failures))]
pub(crate) async fn connect_v2(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Id(id): Id,
    Body(asked): Body<Connect>,
) -> Result<(StatusCode, Json<SandboxModel>), Error> {
    let seconds = asked.timeout.unwrap_or(CONNECT_TIMEOUT);
    let sandbox = gateway.sandbox(&principal, &id).await?;
    if is_paused(sandbox.state) {
        // Of one that runs nothing is restored.
        require_memory(asked.memory, "a resume")?;
    }
    let limit = limit(&sandbox, seconds)?;
    let (sandbox, was_paused) = gateway.resume(&principal.owner(), &id, Some(limit)).await?;
    if was_paused {
        return Ok((StatusCode::CREATED, Json(gateway.show(&sandbox))));
    }
    let sandbox = extend(&gateway, &principal, sandbox, seconds).await?;
    Ok((StatusCode::OK, Json(gateway.show(&sandbox))))
}

/// Make copies of a sandbox that go on from where it is.
#[utoipa::path(post, path = "/sandboxes/{sandboxID}/fork", tag = "lifecycle", params(("sandboxID" = String, Path)),
    request_body = Option<Fork>, responses((status = 201, body = [Forked]), Failures))]
pub(crate) async fn fork(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Id(id): Id,
    Body(asked): Body<Fork>,
) -> Result<(StatusCode, Json<Vec<Forked>>), Error> {
    let count = asked.count.unwrap_or(1);
    if !(1..=MOST_FORKS).contains(&count) {
        return Err(Error::invalid(format!(
            "{count} copies cannot be made: ask for 1 to {MOST_FORKS}"
        )));
    }
    let sandbox = gateway.sandbox(&principal, &id).await?;
    if is_paused(sandbox.state) {
        return Err(Error::Conflict(format!(
            "sandbox {id} is paused: connect to it before it is forked"
        )));
    }
    let limit = limit(&sandbox, asked.timeout.unwrap_or(TIMEOUT))?;
    let count = usize::try_from(count).unwrap_or(1);
    let made = gateway.fork(&principal, &sandbox, count, limit).await?;
    let shown = made.into_iter().map(|one| match one {
        Ok(sandbox) => Forked {
            sandbox: Some(gateway.show(&sandbox)),
            error: None,
        },
        Err(error) => Forked {
            sandbox: None,
            error: Some(error.told()),
        },
    });
    Ok((StatusCode::CREATED, Json(shown.collect())))
}
