//! What is asked of a sandbox's ports: the sandbox is found, let go on if it is paused and wants that, and then asked, at port 49983 by the
//! façade, at others by what listens there. Who is told that there is none learns nothing of why. Knows no endpoint of the API.

use std::sync::Arc;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use http::{HeaderName, HeaderValue, Method, Request, StatusCode, header};
use node_api::Sandbox;
use serde::Serialize;

use crate::Error;
use crate::auth::API_KEY;
use crate::envd_port::EnvdSandbox;
use crate::error::with_causes;
use crate::gateway::Gateway;
use crate::guest::{Guest, PortError};
use crate::labels::Said;
use crate::launch::{is_paused, is_there};
use crate::node::Owner;
use crate::proxy;
use crate::tokens::TokenKind;

/// The header of a sandbox's token for processes and files.
const ENVD_TOKEN: HeaderName = HeaderName::from_static("x-access-token");

/// The header of a sandbox's token for ports that are not public.
const TRAFFIC_TOKEN: HeaderName = HeaderName::from_static("e2b-traffic-access-token");

/// What the SDKs look for in answers with status 502.
const NOT_FOUND: &str = "The sandbox was not found";
const NOT_OPEN: &str = "The sandbox is running but port is not open";

/// An answer about a sandbox that was not asked itself.
#[derive(Debug, Serialize)]
struct Instead<'a> {
    #[serde(rename = "sandboxId")]
    sandbox_id: &'a str,
    message: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<u16>,
    code: u16,
}

impl Instead<'_> {
    fn response(&self) -> Response {
        let status = StatusCode::from_u16(self.code).unwrap_or(StatusCode::BAD_GATEWAY);
        (status, axum::Json(self)).into_response()
    }
}

/// There is no such sandbox, or it does not run.
pub(crate) fn not_found(id: &str) -> Response {
    instead(id, StatusCode::BAD_GATEWAY, NOT_FOUND)
}

fn instead(id: &str, status: StatusCode, message: &str) -> Response {
    let instead = Instead {
        sandbox_id: id,
        message,
        port: None,
        code: status.as_u16(),
    };
    let mut response = instead.response();
    if status == StatusCode::TOO_MANY_REQUESTS || status == StatusCode::SERVICE_UNAVAILABLE {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(1));
    }
    response
}

/// Answers a request to a port of a sandbox.
pub(crate) async fn serve(gateway: &Arc<Gateway>, id: &str, port: u16, request: Request<Body>) -> Response {
    let seat = match port {
        envd::PORT => gateway.limits.to_sandbox(id),
        _ => gateway.limits.to_ports(id),
    };
    let Some(seat) = seat else {
        let why = "too many requests to this sandbox are under way";
        return instead(id, StatusCode::TOO_MANY_REQUESTS, why);
    };
    let shown = Shown::of(gateway, id, &request);
    match gateway.awake(id, port, shown).await {
        Ok(Awake::Sandbox(sandbox)) => gateway.pass(&sandbox, port, request, seat).await,
        Ok(Awake::Instead(response)) => response,
        Err(Error::NoSandbox(_)) => not_found(id),
        // Strangers are not told what a tenant has left, or what the node says.
        Err(error) => {
            log::warn!("a request to sandbox {id} is refused: {}", with_causes(&error));
            let why = "The sandbox cannot be reached now";
            instead(id, StatusCode::SERVICE_UNAVAILABLE, why)
        }
    }
}

/// What a request shows of its right to be answered.
#[derive(Clone, Copy, Debug)]
struct Shown {
    /// The token for processes and files.
    envd: bool,
    /// The token for ports that are not public.
    traffic: bool,
    /// A browser asks whether it may ask, and shows nothing yet.
    preflight: bool,
}

impl Shown {
    fn of(gateway: &Gateway, id: &str, request: &Request<Body>) -> Self {
        let shown = |name: &HeaderName, kind| {
            let value = request.headers().get(name);
            value.is_some_and(|value| gateway.tokens.is_token(kind, id, value.as_bytes()))
        };
        Self {
            envd: shown(&ENVD_TOKEN, TokenKind::Envd),
            traffic: shown(&TRAFFIC_TOKEN, TokenKind::Traffic),
            preflight: is_preflight(request),
        }
    }
}

/// What a browser asks before it asks: nothing that a server would begin a stream at.
fn is_preflight(request: &Request<Body>) -> bool {
    let has = |name: HeaderName| request.headers().contains_key(name);
    request.method() == Method::OPTIONS
        && has(header::ORIGIN)
        && has(header::ACCESS_CONTROL_REQUEST_METHOD)
        && !has(header::UPGRADE)
}

/// A sandbox that runs, or what is answered instead.
enum Awake {
    Sandbox(Box<Sandbox>),
    Instead(Response),
}

impl Gateway {
    /// The sandbox that a request is to, if whoever asks may ask it.
    async fn awake(self: &Arc<Self>, id: &str, port: u16, shown: Shown) -> Result<Awake, Error> {
        // Nothing has been shown that is a tenant's: a sandbox's token says as much as its owner would.
        let sandbox = self.nodes.inspect_settled(&Owner::Gateway, id).await?;
        let said = Said::of(&sandbox);
        if !is_there(sandbox.state) {
            return Err(Error::NoSandbox(id.to_owned()));
        }
        if port != envd::PORT && said.private_traffic && !shown.preflight && !shown.traffic {
            let why = "this sandbox's ports want its traffic access token, in the header E2B-Traffic-Access-Token";
            return Ok(Awake::Instead(instead(id, StatusCode::FORBIDDEN, why)));
        }
        if !is_paused(sandbox.state) {
            return Ok(Awake::Sandbox(Box::new(sandbox)));
        }
        // Files may be asked for by a signature in place of the token, which the façade checks: it wakes nobody.
        let may_wake = said.auto_resume && !shown.preflight && (port != envd::PORT || shown.envd);
        if !may_wake {
            return Err(Error::NoSandbox(id.to_owned()));
        }
        // To its end also if this client leaves meanwhile: others wait for the same.
        let (gateway, its) = (Arc::clone(self), id.to_owned());
        let resumed = tokio::spawn(async move { gateway.resume(&Owner::Gateway, &its, None).await });
        let (sandbox, _) = resumed.await.map_err(|error| Error::Task(error.to_string()))??;
        Ok(Awake::Sandbox(Box::new(sandbox)))
    }

    /// Passes a request on.
    async fn pass(
        &self,
        sandbox: &Sandbox,
        port: u16,
        mut request: Request<Body>,
        seat: crate::limits::Seat,
    ) -> Response {
        let id = &sandbox.id;
        let guest = Guest::new(self.nodes.clone(), id);
        let token = self.tokens.token(TokenKind::Envd, id);
        if port == envd::PORT {
            let sandbox = EnvdSandbox {
                id: id.clone(),
                tenant: sandbox.config.owner.clone().unwrap_or_default(),
                started_ns: sandbox.started_ns.unwrap_or(sandbox.created_ns),
                token,
                guest,
            };
            let response = self.envd.handle(sandbox, request).await;
            return proxy::hold(response, seat);
        }
        // Tokens never enter a guest.
        let headers = request.headers_mut();
        headers.remove(TRAFFIC_TOKEN);
        let is_token = |value: &HeaderValue| self.tokens.is_token(TokenKind::Envd, id, value.as_bytes());
        if headers.get_all(ENVD_TOKEN).iter().any(is_token) {
            headers.remove(ENVD_TOKEN);
        }
        // Nor do keys, which a client may send along that has one address for the API and for sandboxes.
        for name in [API_KEY, header::AUTHORIZATION] {
            if headers.get_all(&name).iter().any(is_key) {
                headers.remove(name);
            }
        }
        let stream = match guest.connect_port(port).await {
            Ok(stream) => stream,
            Err(error) => return no_port(id, port, &error),
        };
        match proxy::pass(stream, request, seat).await {
            Ok(response) => response,
            Err(error) => {
                log::debug!("port {port} of sandbox {id}: {}", with_causes(&error));
                instead(id, error.status(), error.public())
            }
        }
    }
}

/// It has the form of a tenant's key.
fn is_key(value: &HeaderValue) -> bool {
    let text = value.to_str().unwrap_or_default();
    let word = text.split_whitespace().next_back().unwrap_or_default();
    word.strip_prefix("e2b_")
        .is_some_and(|digits| digits.len() == 64 && digits.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

fn no_port(id: &str, port: u16, error: &PortError) -> Response {
    let not_open = Instead {
        sandbox_id: id,
        message: NOT_OPEN,
        port: Some(port),
        code: StatusCode::BAD_GATEWAY.as_u16(),
    };
    match error {
        PortError::Closed(_) => not_open.response(),
        // It has ended, or been paused, since it was looked at.
        PortError::Agent(Error::Refused(refused))
            if matches!(
                refused.kind,
                node_api::ErrorKind::NotFound | node_api::ErrorKind::WrongState
            ) =>
        {
            not_found(id)
        }
        error => {
            log::warn!("port {port} of sandbox {id} cannot be reached: {}", with_causes(error));
            let message = match error {
                PortError::Old(_) => "The sandbox's agent is too old for requests to its ports: make the sandbox anew",
                PortError::Late => "The sandbox did not answer in time",
                _ => "The sandbox cannot be reached",
            };
            instead(id, StatusCode::BAD_GATEWAY, message)
        }
    }
}
