//! One sandbox as it is served: which request goes where, and who may ask. Lives as long as the sandbox is served, for what outlives a
//! request (watchers that are polled). Knows of no other sandbox.

use std::sync::Arc;

use axum::body::Body;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Method, Request, Response, StatusCode};
use serde::Serialize;

use crate::access::Access;
use crate::agent::Reach;
use crate::error::Error;
use crate::filesystem::Watchers;
use crate::guest::Guest;
use crate::memory::Share;
use crate::state::State;
use crate::{connect, cors, files, filesystem, process};

/// What only those ask for who make sandboxes, and their machinery asks the agent itself.
const INTERNAL: [&str; 8] = [
    "/init",
    "/freeze",
    "/unfreeze",
    "/fsfreeze",
    "/fsthaw",
    "/collapse",
    "/upgrade",
    "/handover",
];

/// A sandbox that is served.
pub struct Sandbox {
    id: String,
    access: Access,
    state: Arc<State>,
}

impl Sandbox {
    /// Serves the sandbox `id`, whose agent is reached by `guest`, to those whom `access` lets in; what is held for them is of `memory`.
    pub fn new(id: impl Into<String>, guest: Arc<dyn Guest>, access: Access, memory: Share) -> Arc<Self> {
        let state = State {
            reach: Arc::new(Reach::new(guest, memory.clone())),
            watchers: Arc::new(Watchers::default()),
            memory,
        };
        Arc::new(Self {
            id: id.into(),
            access,
            state: Arc::new(state),
        })
    }

    /// Somebody polls what happens in it, and would lose that with this.
    pub fn is_watched(&self) -> bool {
        !self.state.watchers.is_empty()
    }

    /// Answers what is asked at the sandbox's port 49983.
    pub async fn handle(&self, request: Request<Body>) -> Response<Body> {
        let mut response = if request.method() == Method::OPTIONS {
            cors::preflight(request.headers())
        } else {
            self.answer(request).await
        };
        if response.extensions().get::<connect::NotRunning>().is_some() {
            response = self.not_running();
        }
        cors::open(&mut response);
        response
    }

    async fn answer(&self, request: Request<Body>) -> Response<Body> {
        let path = request.uri().path();
        let result = match path {
            "/health" => self.health().await,
            "/files" => files::serve(&self.state, &self.access, request).await,
            path if INTERNAL.contains(&path) => Err(Error::Forbidden(
                "this is between a sandbox and what runs it, and is never answered from outside",
            )),
            path if path.starts_with("/process.Process/") || path.starts_with("/filesystem.Filesystem/") => {
                return self.call(request).await;
            }
            "/files/compose" | "/metrics" | "/envs" => match self.access.check(request.headers()) {
                Ok(()) => files::serve_more(&self.state, request).await,
                Err(error) => Err(error),
            },
            path => Err(Error::NotFound(format!("nothing is at {path:?}"))),
        };
        result.unwrap_or_else(|error| refuse(&error))
    }

    async fn call(&self, request: Request<Body>) -> Response<Body> {
        if let Err(error) = self.access.check(request.headers()) {
            return connect::refuse_call(request.headers(), &error);
        }
        if request.uri().path().starts_with("/process.") {
            process::serve(&self.state, request).await
        } else {
            filesystem::serve(&self.state, request).await
        }
    }

    /// Whether the sandbox runs: its agent answers.
    async fn health(&self) -> Result<Response<Body>, Error> {
        self.state.reach.check().await?;
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::NO_CONTENT;
        Ok(response)
    }

    /// The answer that the SDKs take for the sandbox's end.
    fn not_running(&self) -> Response<Body> {
        #[derive(Serialize)]
        struct Gone<'a> {
            #[serde(rename = "sandboxId")]
            id: &'a str,
            message: String,
            code: u16,
        }
        let gone = Gone {
            id: &self.id,
            message: Error::NotRunning.to_string(),
            code: StatusCode::BAD_GATEWAY.as_u16(),
        };
        json(StatusCode::BAD_GATEWAY, &gone)
    }
}

/// The answer of plain HTTP that something failed.
fn refuse(error: &Error) -> Response<Body> {
    #[derive(Serialize)]
    struct Failed {
        code: u16,
        message: String,
    }
    let status = error.status();
    let failed = Failed {
        code: status.as_u16(),
        message: error.to_string(),
    };
    let mut response = json(status, &failed);
    match error {
        Error::NotRunning => drop(response.extensions_mut().insert(connect::NotRunning)),
        Error::Range { size } => {
            if let Ok(value) = HeaderValue::try_from(format!("bytes */{size}")) {
                response.headers_mut().insert(http::header::CONTENT_RANGE, value);
            }
        }
        Error::Method(method) => {
            if let Ok(value) = HeaderValue::try_from(*method) {
                response.headers_mut().insert(http::header::ALLOW, value);
            }
        }
        _ => {}
    }
    response
}

/// An answer in JSON.
pub(crate) fn json(status: StatusCode, value: &impl Serialize) -> Response<Body> {
    let text = serde_json::to_string(value).unwrap_or_default();
    let mut response = Response::new(Body::from(text));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
