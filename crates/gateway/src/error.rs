//! What can go wrong with a request, and how a client is told: `{code, message, error_code}`, as the E2B SDKs read it. What a node or a
//! store says of the host is for its operator: a client gets the number under which the log has it. Knows no endpoint.

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::{HeaderName, HeaderValue, StatusCode, header};
use node_api::{ApiError, ClientError, ErrorKind};
use serde::Serialize;
use utoipa::ToSchema;

/// The header by which the SDKs are told whether to try again.
pub(crate) const SHOULD_RETRY: HeaderName = HeaderName::from_static("should-retry");

/// Why a request was not carried out.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is malformed, or asks for what cannot be.
    #[error("{0}")]
    Invalid(String),
    /// It shows no key, or not one that is good.
    #[error("no valid API key was shown: send one in the header X-API-Key, which `basalt-gateway keys create` makes")]
    Unauthorized,
    /// It shows no token of the volume, or not one that is good.
    #[error(
        "no valid token of this volume was shown: send the one that GET /volumes/{{volumeID}} tells as Authorization: Bearer"
    )]
    NoVolumeToken,
    /// It is somebody else's to do.
    #[error("{0}")]
    Forbidden(String),
    /// No such sandbox, or not this tenant's.
    #[error("sandbox {0} was not found: it has ended, or never was")]
    NoSandbox(String),
    /// No such thing.
    #[error("{what} `{name}` was not found")]
    NotFound {
        /// What.
        what: &'static str,
        /// Which.
        name: String,
    },
    /// No such endpoint.
    #[error("there is no such endpoint: GET /openapi.json lists those that there are")]
    NoEndpoint,
    /// The endpoint has other methods.
    #[error("this endpoint has no such method: GET /openapi.json lists those that it has")]
    NoMethod,
    /// More bytes than there may be.
    #[error("{0}")]
    TooLarge(String),
    /// There is no space for it.
    #[error("{0}")]
    NoSpace(String),
    /// It does not fit the sandbox's state.
    #[error("{0}")]
    Conflict(String),
    /// The key of a request was used for another one.
    #[error("this Idempotency-Key was used for another request: use a new one for each")]
    OtherRequest,
    /// The first request of this key is not done yet.
    #[error("the first request with this Idempotency-Key is still being carried out: ask again in a moment")]
    InProgress,
    /// Too many requests.
    #[error("too many requests with this key: wait {after} s")]
    TooMany {
        /// Seconds.
        after: u64,
    },
    /// The gateway has too much to do.
    #[error("this gateway is busy ({0}): try again in a moment")]
    Busy(&'static str),
    /// An endpoint of the E2B API that is not there.
    #[error("{0} is not served by this version of Basalt")]
    NotServed(&'static str),
    /// The node refused.
    #[error(transparent)]
    Refused(#[from] ApiError),
    /// The node cannot be asked.
    #[error("the node's daemon cannot be reached")]
    NodeGone(#[source] ClientError),
    /// The node said something that fits no request.
    #[error("the node answered a request with something else ({0}): use basalt-gateway and basaltd of one build")]
    Unexpected(&'static str),
    /// The store refused or failed.
    #[error(transparent)]
    Store(#[from] control::Error),
    /// The host failed.
    #[error("cannot {what}: {source}")]
    Host {
        /// What was to be done.
        what: &'static str,
        /// Why not.
        source: std::io::Error,
    },
    /// A bug.
    #[error("an internal task ended early: {0}")]
    Task(String),
}

impl Error {
    /// Something cannot be.
    pub(crate) fn invalid(why: impl Into<String>) -> Self {
        Self::Invalid(why.into())
    }

    /// Something about this host.
    pub(crate) fn host(what: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Host { what, source }
    }

    /// The status that a client gets.
    pub(crate) fn status(&self) -> StatusCode {
        match self {
            Self::Invalid(_) => StatusCode::BAD_REQUEST,
            Self::Unauthorized | Self::NoVolumeToken => StatusCode::UNAUTHORIZED,
            Self::Forbidden(_) => StatusCode::FORBIDDEN,
            Self::NoSandbox(_) | Self::NotFound { .. } | Self::NoEndpoint => StatusCode::NOT_FOUND,
            Self::NoMethod => StatusCode::METHOD_NOT_ALLOWED,
            Self::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::NoSpace(_) => StatusCode::INSUFFICIENT_STORAGE,
            Self::Conflict(_) | Self::InProgress => StatusCode::CONFLICT,
            Self::OtherRequest => StatusCode::UNPROCESSABLE_ENTITY,
            Self::TooMany { .. } | Self::Store(control::Error::Quota(_) | control::Error::TooMany { .. }) => {
                StatusCode::TOO_MANY_REQUESTS
            }
            Self::Busy(_) | Self::NodeGone(_) => StatusCode::SERVICE_UNAVAILABLE,
            Self::NotServed(_) => StatusCode::NOT_IMPLEMENTED,
            Self::Refused(refused) => of_kind(refused.kind),
            Self::Unexpected(_) | Self::Store(_) | Self::Host { .. } | Self::Task(_) => {
                StatusCode::INTERNAL_SERVER_ERROR
            }
        }
    }

    /// It says something about the host that is not for clients.
    fn is_private(&self) -> bool {
        match self {
            Self::Refused(refused) => matches!(
                refused.kind,
                ErrorKind::Host | ErrorKind::Guest | ErrorKind::Deadline | ErrorKind::Internal
            ),
            Self::Store(control::Error::Quota(_) | control::Error::TooMany { .. }) => false,
            Self::NodeGone(_) | Self::Unexpected(_) | Self::Store(_) | Self::Host { .. } | Self::Task(_) => true,
            _ => false,
        }
    }

    /// What machines may know it by.
    fn error_code(&self) -> Option<&'static str> {
        match self {
            Self::OtherRequest => Some("idempotency_request_mismatch"),
            Self::InProgress => Some("idempotency_in_progress"),
            Self::Refused(refused) if refused.kind == ErrorKind::Host => Some("sandbox_capacity_unavailable"),
            _ if self.status() == StatusCode::INTERNAL_SERVER_ERROR => Some("internal_server_error"),
            _ => None,
        }
    }

    /// What a client is told; what is not for it is logged.
    pub(crate) fn told(&self) -> ErrorBody {
        let status = self.status();
        let message = match self.is_private() {
            false => self.to_string(),
            true => {
                let incident = control::random_hex::<4>().unwrap_or_else(|_| "unknown".into());
                log::error!("incident {incident}: {}", with_causes(self));
                format!("{}; the gateway's log has it as incident {incident}", public(status))
            }
        };
        ErrorBody {
            code: status.as_u16(),
            message,
            error_code: self.error_code(),
        }
    }
}

fn of_kind(kind: ErrorKind) -> StatusCode {
    match kind {
        ErrorKind::Invalid => StatusCode::BAD_REQUEST,
        ErrorKind::NotFound => StatusCode::NOT_FOUND,
        ErrorKind::Conflict | ErrorKind::WrongState => StatusCode::CONFLICT,
        ErrorKind::Host => StatusCode::SERVICE_UNAVAILABLE,
        ErrorKind::Deadline => StatusCode::GATEWAY_TIMEOUT,
        ErrorKind::Guest | ErrorKind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

fn public(status: StatusCode) -> &'static str {
    match status {
        StatusCode::SERVICE_UNAVAILABLE => "the node cannot do this now: try again later",
        StatusCode::GATEWAY_TIMEOUT => "the node took too long, and may have done it: look before trying again",
        _ => "this failed on the node",
    }
}

/// An error with what caused it, on one line.
pub(crate) fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let said = cause.to_string();
        if !text.ends_with(&said) {
            text = format!("{text}: {said}");
        }
        next = cause.source();
    }
    text
}

/// An error as a client gets it.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = Error)]
pub(crate) struct ErrorBody {
    /// The HTTP status.
    pub(crate) code: u16,
    /// A sentence.
    pub(crate) message: String,
    /// A name, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error_code: Option<&'static str>,
}

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let status = self.status();
        let mut response = (status, Json(self.told())).into_response();
        let headers = response.headers_mut();
        match self {
            Self::TooMany { after } => {
                headers.insert(header::RETRY_AFTER, after.into());
            }
            Self::Busy(_) => {
                headers.insert(header::RETRY_AFTER, 1.into());
            }
            // A second attempt finds the same, or does it twice.
            Self::Store(control::Error::Quota(_) | control::Error::TooMany { .. }) => {
                headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
            }
            Self::Refused(refused) if refused.kind == ErrorKind::Deadline => {
                headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
            }
            _ => (),
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(kind: ErrorKind) -> Error {
        Error::Refused(ApiError {
            kind,
            message: "see /var/lib/basalt/node.db".into(),
            exit_code: 125,
        })
    }

    #[test]
    fn what_concerns_the_host_is_kept_from_clients() {
        for (kind, status, private) in [
            (ErrorKind::Invalid, 400, false),
            (ErrorKind::NotFound, 404, false),
            (ErrorKind::Conflict, 409, false),
            (ErrorKind::WrongState, 409, false),
            (ErrorKind::Host, 503, true),
            (ErrorKind::Guest, 500, true),
            (ErrorKind::Deadline, 504, true),
            (ErrorKind::Internal, 500, true),
        ] {
            let told = refused(kind).told();
            assert_eq!(told.code, status, "{kind:?}");
            assert_eq!(
                !told.message.contains("/var/lib"),
                private,
                "{kind:?}: {}",
                told.message
            );
            assert_eq!(told.message.contains("incident"), private, "{kind:?}");
        }
    }

    #[test]
    fn the_sdks_are_told_whether_to_try_again() {
        let header = |error: Error, name: &str| {
            let response = error.into_response();
            let value = response.headers().get(name);
            value.map(|value| value.to_str().unwrap().to_owned())
        };
        assert_eq!(header(Error::TooMany { after: 7 }, "retry-after").as_deref(), Some("7"));
        assert_eq!(header(Error::Busy("x"), "retry-after").as_deref(), Some("1"));
        assert_eq!(
            header(refused(ErrorKind::Deadline), "should-retry").as_deref(),
            Some("false")
        );
        assert_eq!(header(refused(ErrorKind::Host), "should-retry"), None);
    }
}
