//! Why a request was not answered as it was meant, with what the Connect protocol and HTTP call it. Knows no request.

use std::time::Duration;

use agent_api::{ExecFailure, FailureKind, RequestFailure, RequestFailureKind};
use http::StatusCode;

use crate::connect::Code;

/// Why a request was not answered as it was meant.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// There is no such sandbox, or it does not run.
    #[error("The sandbox was not found")]
    NotRunning,
    /// The agent is of an older release; says what can be done.
    #[error("{0}")]
    AgentTooOld(String),
    /// There is no connection to the agent.
    #[error("cannot reach the sandbox's agent: {0}")]
    Unreachable(String),
    /// The connection to the agent is gone.
    #[error("the connection to the sandbox ended before this was complete: {0}")]
    Lost(String),
    /// The agent says nothing.
    #[error("the sandbox's agent did not answer within {} s; it may be busy or hang", .0.as_secs())]
    Silent(Duration),
    /// The agent says what makes no sense.
    #[error("the sandbox's agent does not keep to its protocol: {0}")]
    Agent(String),
    /// The agent refuses.
    #[error("{0}")]
    Refused(String),
    /// The agent could not do something about files or ports.
    #[error("{0}")]
    Failed(RequestFailure),
    /// The agent could not start a command.
    #[error("{0}")]
    NotStarted(ExecFailure),
    /// No such process.
    #[error("process with {0} was not found; it may have ended")]
    NoProcess(String),
    /// No such user in the sandbox.
    #[error("invalid username: '{0}' is no user of the sandbox")]
    NoUser(String),
    /// Who asks does not prove that they may.
    #[error("{0}")]
    Unauthorized(&'static str),
    /// What is asked for makes no sense.
    #[error("{0}")]
    Invalid(String),
    /// It cannot be done to this process.
    #[error("{0}")]
    Precondition(String),
    /// More than is answered.
    #[error("{0}")]
    TooMuch(String),
    /// Whoever leads to the agent has too much to do.
    #[error("{0}")]
    Overloaded(String),
    /// There are so many connections to the agent already.
    #[error(
        "{0} requests to this sandbox are under way, which is the most; end some, such as watches and streams of processes' output"
    )]
    Busy(usize),
    /// There is no memory left for it.
    #[error("{0}")]
    Memory(String),
    /// Something happened that was not seen.
    #[error("{0}")]
    DataLoss(String),
    /// No such method, watcher or path.
    #[error("{0}")]
    NotFound(String),
    /// Not here.
    #[error("{0}")]
    Unimplemented(String),
    /// Never from outside.
    #[error("{0}")]
    Forbidden(&'static str),
    /// The time that the client gave is over.
    #[error("the request was not complete within {} ms", .0.as_millis())]
    Deadline(Duration),
    /// The client stopped sending in the midst of a request.
    #[error("nothing more of the request came for {} s", .0.as_secs())]
    Stalled(Duration),
    /// The client's bytes end early or make no sense.
    #[error("the request's body could not be read: {0}")]
    Body(String),
    /// A method of HTTP that is not answered here.
    #[error("this is asked for by {0}")]
    Method(&'static str),
    /// A representation that is not spoken here.
    #[error("{0}")]
    MediaType(String),
    /// A range outside the file.
    #[error("the range is outside the file, which has {size} bytes")]
    Range {
        /// The file's size.
        size: u64,
    },
}

impl Error {
    /// What the Connect protocol calls it.
    pub(crate) fn code(&self) -> Code {
        match self {
            Self::NotRunning | Self::Unreachable(_) | Self::Lost(_) | Self::Overloaded(_) => Code::Unavailable,
            Self::AgentTooOld(_) | Self::Unimplemented(_) | Self::Method(_) | Self::MediaType(_) => Code::Unimplemented,
            Self::Silent(_) | Self::Deadline(_) | Self::Stalled(_) => Code::DeadlineExceeded,
            Self::Agent(_) | Self::Refused(_) => Code::Internal,
            Self::Failed(failure) => failed(failure.kind).0,
            Self::NotStarted(failure) => match failure.kind {
                FailureKind::NotFound => Code::NotFound,
                FailureKind::NotExecutable | FailureKind::BadCwd => Code::InvalidArgument,
                FailureKind::BadUser => Code::Unauthenticated,
                FailureKind::Other => Code::Internal,
            },
            Self::NoProcess(_) | Self::NotFound(_) => Code::NotFound,
            Self::NoUser(_) | Self::Unauthorized(_) => Code::Unauthenticated,
            Self::Invalid(_) | Self::Body(_) => Code::InvalidArgument,
            Self::Precondition(_) => Code::FailedPrecondition,
            Self::TooMuch(_) | Self::Busy(_) | Self::Memory(_) => Code::ResourceExhausted,
            Self::DataLoss(_) => Code::DataLoss,
            Self::Forbidden(_) => Code::PermissionDenied,
            Self::Range { .. } => Code::OutOfRange,
        }
    }

    /// What plain HTTP calls it.
    pub(crate) fn status(&self) -> StatusCode {
        match self {
            Self::NotRunning | Self::Unreachable(_) | Self::Lost(_) => StatusCode::BAD_GATEWAY,
            Self::Failed(failure) => failed(failure.kind).1,
            Self::Forbidden(_) => StatusCode::FORBIDDEN,
            Self::TooMuch(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Stalled(_) => StatusCode::REQUEST_TIMEOUT,
            Self::Method(_) => StatusCode::METHOD_NOT_ALLOWED,
            Self::MediaType(_) => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::Range { .. } => StatusCode::RANGE_NOT_SATISFIABLE,
            other => other.code().status(),
        }
    }

    /// Whether the agent says that something is missing, which may be the user.
    pub(crate) fn is_missing(&self) -> bool {
        matches!(self, Self::Failed(failure) if failure.kind == RequestFailureKind::NotFound)
    }
}

/// What a failure of the agent's is called by the Connect protocol and by HTTP. The SDKs take `resource_exhausted` for a limit of rate, so
/// a full disk is none.
fn failed(kind: RequestFailureKind) -> (Code, StatusCode) {
    match kind {
        RequestFailureKind::NotFound => (Code::NotFound, StatusCode::NOT_FOUND),
        RequestFailureKind::AlreadyExists => (Code::AlreadyExists, StatusCode::CONFLICT),
        RequestFailureKind::NotADirectory | RequestFailureKind::IsADirectory | RequestFailureKind::Invalid => {
            (Code::InvalidArgument, StatusCode::BAD_REQUEST)
        }
        RequestFailureKind::PermissionDenied => (Code::PermissionDenied, StatusCode::FORBIDDEN),
        RequestFailureKind::NoSpace => (Code::Internal, StatusCode::INSUFFICIENT_STORAGE),
        RequestFailureKind::Other => (Code::Internal, StatusCode::INTERNAL_SERVER_ERROR),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(kind: RequestFailureKind) -> Error {
        Error::Failed(RequestFailure {
            kind,
            message: "no".to_owned(),
        })
    }

    /// What `docs/e2b.md` and the SDKs' tables of errors say.
    #[test]
    fn failures_have_the_names_that_the_sdks_know() {
        for (kind, code, status) in [
            (RequestFailureKind::NotFound, "not_found", 404),
            (RequestFailureKind::AlreadyExists, "already_exists", 409),
            (RequestFailureKind::NotADirectory, "invalid_argument", 400),
            (RequestFailureKind::IsADirectory, "invalid_argument", 400),
            (RequestFailureKind::PermissionDenied, "permission_denied", 403),
            (RequestFailureKind::NoSpace, "internal", 507),
            (RequestFailureKind::Invalid, "invalid_argument", 400),
            (RequestFailureKind::Other, "internal", 500),
        ] {
            let error = failure(kind);
            assert_eq!(
                (error.code().name(), error.status().as_u16()),
                (code, status),
                "{kind:?}"
            );
        }
        assert_eq!(Error::NotRunning.status().as_u16(), 502);
        assert_eq!(Error::Unauthorized("no").status().as_u16(), 401);
        assert_eq!(Error::NoUser("x".to_owned()).code().name(), "unauthenticated");
        assert_eq!(Error::Range { size: 1 }.status().as_u16(), 416);
    }

    #[test]
    fn only_a_missing_file_may_be_a_missing_user() {
        assert!(failure(RequestFailureKind::NotFound).is_missing());
        assert!(!failure(RequestFailureKind::NoSpace).is_missing());
        assert!(!Error::NotFound("x".to_owned()).is_missing());
    }
}
