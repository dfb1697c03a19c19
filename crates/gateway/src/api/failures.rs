//! What endpoints answer when they do not do what they are asked for, as the API's document has it. Knows no endpoint.

use utoipa::IntoResponses;

use crate::error::ErrorBody;

/// Refusals that every endpoint has.
#[derive(IntoResponses)]
#[expect(
    dead_code,
    reason = "it is the shape of answers for the document; errors are made of `Error`"
)]
pub(crate) enum Failures {
    /// The request is malformed, or asks for what cannot be.
    #[response(status = 400)]
    Invalid(ErrorBody),
    /// No valid API key was shown.
    #[response(status = 401)]
    Unauthorized(ErrorBody),
    /// There is no such thing, or it is somebody else's.
    #[response(status = 404)]
    NotFound(ErrorBody),
    /// It does not fit the state of the sandbox.
    #[response(status = 409)]
    Conflict(ErrorBody),
    /// The Idempotency-Key was used for another request.
    #[response(status = 422)]
    OtherRequest(ErrorBody),
    /// Too many requests, or the quota is used up.
    #[response(status = 429)]
    TooMany(ErrorBody),
    /// Something failed here.
    #[response(status = 500)]
    Internal(ErrorBody),
    /// The node cannot do it now.
    #[response(status = 503)]
    Busy(ErrorBody),
    /// The node took too long.
    #[response(status = 504)]
    Late(ErrorBody),
}

/// A refusal of what is somebody else's to do, or whose address is good no more.
#[derive(IntoResponses)]
#[response(status = 403)]
#[expect(
    dead_code,
    reason = "it is the shape of answers for the document; errors are made of `Error`"
)]
pub(crate) struct Forbidden(ErrorBody);
