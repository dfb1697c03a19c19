//! What is done around every endpoint that wants a key: who asks is found out, how often is bounded, and what was changed is written down.
//! Knows no endpoint.

use std::sync::Arc;

use axum::extract::{MatchedPath, RawPathParams, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use control::AuditEntry;
use http::{Method, StatusCode};

use super::Object;
use crate::Error;
use crate::auth::{Principal, authenticate};
use crate::error::with_causes;
use crate::gateway::Gateway;
use crate::time_text;

/// The longest object of an audit row.
pub(super) const MAX_OBJECT: usize = 128;

/// A request from somebody with a key to a handler.
pub(super) async fn guard(
    State(gateway): State<Arc<Gateway>>,
    path: MatchedPath,
    parameters: RawPathParams,
    mut request: Request,
    next: Next,
) -> Result<Response, Error> {
    let principal = authenticate(&gateway, request.headers()).await?;
    let seat = gateway.limits.request(&principal.key)?;
    request.extensions_mut().insert(principal.clone());
    if matches!(*request.method(), Method::GET | Method::HEAD) {
        let response = next.run(request).await;
        drop(seat);
        return Ok(response);
    }
    let action = format!("{} {}", request.method(), path.as_str());
    let first = parameters.iter().next().map(|(_, value)| value.to_owned());
    // What has begun is done to its end and written down, whether somebody still waits for it or not.
    let change = gateway.limits.change();
    let work = tokio::spawn(async move {
        let response = next.run(request).await;
        let object = response.extensions().get().map(|Object(name)| name.clone());
        // A body may have given it, which is longer than any name.
        let object: String = object.or(first).unwrap_or_default();
        let object = object.chars().take(MAX_OBJECT).collect();
        audit(&gateway, &principal, action, object, response.status()).await;
        drop((seat, change));
        response
    });
    work.await.map_err(|error| Error::Task(error.to_string()))
}

async fn audit(gateway: &Gateway, principal: &Principal, action: String, object: String, outcome: StatusCode) {
    let entry = AuditEntry {
        time_ns: time_text::now_ns(),
        tenant: principal.tenant.to_string(),
        key: principal.key.to_string(),
        action,
        object,
        outcome: outcome.as_u16(),
    };
    let line = format!("{} {} {}", entry.action, entry.object, entry.outcome);
    if let Err(error) = gateway.store.with(move |store| store.audit(&entry)).await {
        log::error!("the audit log lacks what was done ({line}): {}", with_causes(&error));
    }
}
