//! Endpoints by which files come to a build: where they are to be sent, and what takes them there. That second one wants no key: its address
//! is signed, for one tenant, one hash and one hour.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path, Request, State as Shared};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use control::AuditEntry;
use http::{HeaderMap, StatusCode, header};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::extract::Query;
use super::failures::{Failures, Forbidden};
use crate::Error;
use crate::auth::Principal;
use crate::builds::check_hash;
use crate::gateway::Gateway;
use crate::server::ByTls;
use crate::time_text;
use crate::tokens::TokenKind;

/// How long an address is good for.
const GOOD: Duration = Duration::from_secs(3600);

/// Where files are to be sent.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = TemplateBuildFileUpload)]
pub(crate) struct FileUpload {
    /// They are there already.
    present: bool,
    /// Where a PUT takes them: a tar archive, which may be compressed by gzip.
    url: String,
}

/// What makes an address good.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(default)]
#[into_params(parameter_in = Query)]
pub(crate) struct UploadQuery {
    /// Until when, in seconds since 1970.
    expires: u64,
    /// A signature of the address.
    signature: String,
}

fn signed(tenant: &str, hash: &str, expires: u64) -> String {
    format!("{tenant}/{hash}/{expires}")
}

/// What the client has asked, as far as that says where the gateway is for it.
fn origin(headers: &HeaderMap, by_tls: bool) -> Result<String, Error> {
    let text = |name: header::HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let host = text(header::HOST).ok_or_else(|| Error::invalid("the header Host is missing"))?;
    // A proxy that speaks TLS for the gateway says so.
    let proto = text(header::HeaderName::from_static("x-forwarded-proto"));
    let scheme = if by_tls || proto == Some("https") {
        "https"
    } else {
        "http"
    };
    Ok(format!("{scheme}://{host}"))
}

/// Where files are to be sent that have this hash.
#[utoipa::path(get, path = "/templates/{templateID}/files/{hash}", tag = "templates",
    params(("templateID" = String, Path), ("hash" = String, Path)), responses((status = 201, body = FileUpload), Failures))]
pub(crate) async fn link(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Path((template, hash)): Path<(String, String)>,
    by_tls: Option<Extension<ByTls>>,
    headers: HeaderMap,
) -> Result<Response, Error> {
    check_hash(&hash)?;
    gateway.need_template(&principal.tenant, &template).await?;
    let present = gateway.builds.files.is_there(&principal.tenant, &hash).await?;
    let expires = time_text::now().saturating_add(GOOD.as_secs());
    let tenant = &principal.tenant;
    let signature = gateway.tokens.token(TokenKind::Upload, &signed(tenant, &hash, expires));
    let url = format!(
        "{}/uploads/{tenant}/{hash}?expires={expires}&signature={signature}",
        origin(&headers, by_tls.is_some())?
    );
    Ok((StatusCode::CREATED, Json(FileUpload { present, url })).into_response())
}

/// Takes files for a build. The address is one that was told before.
#[utoipa::path(put, path = "/uploads/{tenant}/{hash}", tag = "templates", security(()),
    params(("tenant" = String, Path), ("hash" = String, Path), UploadQuery),
    responses((status = 200, description = "They are there"), Forbidden,
        (status = 413, body = crate::error::ErrorBody), (status = 507, body = crate::error::ErrorBody), Failures))]
pub(crate) async fn put(
    Shared(gateway): Shared<Arc<Gateway>>,
    Path((tenant, hash)): Path<(String, String)>,
    Query(query): Query<UploadQuery>,
    request: Request,
) -> Result<StatusCode, Error> {
    let text = signed(&tenant, &hash, query.expires);
    let is_good = gateway
        .tokens
        .is_token(TokenKind::Upload, &text, query.signature.as_bytes());
    if !is_good || query.expires < time_text::now() {
        return Err(Error::Forbidden(
            "this address is not good, or not any more: ask for one at GET /templates/{templateID}/files/{hash}".into(),
        ));
    }
    let length = request.headers().get(header::CONTENT_LENGTH);
    let length = length.and_then(|value| value.to_str().ok()?.parse().ok());
    let length: u64 = length.ok_or_else(|| Error::invalid("the header Content-Length is missing"))?;
    let _seat = gateway
        .limits
        .to_uploads(&tenant)
        .ok_or(Error::Busy("too many uploads of this tenant are under way"))?;
    let _change = gateway.limits.change();
    let body: Body = request.into_body();
    let outcome = gateway.builds.receive(&tenant, &hash, length, body).await;
    let status = outcome.as_ref().map_or_else(Error::status, |()| StatusCode::OK);
    let entry = AuditEntry {
        time_ns: time_text::now_ns(),
        tenant,
        // Whoever has the address was given it for a key, which is not told.
        key: String::new(),
        action: "PUT /uploads/{tenant}/{hash}".into(),
        object: hash,
        outcome: status.as_u16(),
    };
    gateway.store.with(move |store| store.audit(&entry)).await?;
    outcome.map(|()| StatusCode::OK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_where_the_client_has_asked() {
        let of = |pairs: &[(&'static str, &str)]| {
            let headers = pairs.iter();
            let headers = headers.map(|(name, value)| (header::HeaderName::from_static(name), value.parse().unwrap()));
            origin(&headers.collect(), false)
        };
        assert_eq!(of(&[("host", "127.0.0.1:3000")]).unwrap(), "http://127.0.0.1:3000");
        let proxied = [("host", "api.sb.example"), ("x-forwarded-proto", "https")];
        assert_eq!(of(&proxied).unwrap(), "https://api.sb.example");
        assert!(of(&[]).is_err());
    }
}
