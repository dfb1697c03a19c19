//! What handlers are given of a request: its body, its query, a sandbox's id; what is wrong with these is told like every other error.
//! Knows no endpoint.

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Query as AxumQuery, Request};
use http::StatusCode;
use http::request::Parts;
use serde::de::DeserializeOwned;

use crate::Error;

/// Hexadecimal digits of a sandbox's id.
const ID: usize = 12;

/// A JSON body, whatever its content type is called. With none at all it is as if `{}` were sent.
pub(crate) struct Body<T>(pub(crate) T);

/// The same with the bytes that it was.
pub(crate) struct RawBody<T> {
    pub(crate) value: T,
    pub(crate) bytes: Bytes,
}

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for RawBody<T> {
    type Rejection = Error;

    async fn from_request(request: Request, state: &S) -> Result<Self, Error> {
        let bytes = Bytes::from_request(request, state).await.map_err(unreadable)?;
        let text: &[u8] = if bytes.is_empty() { b"{}" } else { &bytes };
        match serde_json::from_slice(text) {
            Ok(value) => Ok(Self { value, bytes }),
            Err(error) => Err(Error::invalid(format!("the body is not what it should be: {error}"))),
        }
    }
}

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Body<T> {
    type Rejection = Error;

    async fn from_request(request: Request, state: &S) -> Result<Self, Error> {
        RawBody::from_request(request, state).await.map(|raw| Self(raw.value))
    }
}

fn unreadable(rejection: BytesRejection) -> Error {
    match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => Error::invalid(format!(
            "the body is too large: it may have {} bytes",
            crate::limits::MAX_BODY
        )),
        _ => Error::invalid("the body could not be read"),
    }
}

/// The query.
pub(crate) struct Query<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Query<T> {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Error> {
        match AxumQuery::try_from_uri(&parts.uri) {
            Ok(AxumQuery(query)) => Ok(Self(query)),
            Err(error) => Err(Error::invalid(format!(
                "the query is not what it should be: {}",
                error.body_text()
            ))),
        }
    }
}

/// The sandbox that a path names.
pub(crate) struct Id(pub(crate) String);

impl<S: Send + Sync> FromRequestParts<S> for Id {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Error> {
        let text = Name::from_request_parts(parts, state).await?.0;
        match sandbox_id(&text) {
            Some(id) => Ok(Self(id.to_owned())),
            None => Err(Error::NoSandbox(text.chars().take(64).collect())),
        }
    }
}

/// A sandbox's id as clients write it: those of before add a client's behind a dash.
pub(crate) fn sandbox_id(text: &str) -> Option<&str> {
    let id = text.split_once('-').map_or(text, |(id, _)| id);
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    (id.len() == ID && id.bytes().all(is_digit)).then_some(id)
}

/// What else a path names.
pub(crate) struct Name(pub(crate) String);

impl<S: Send + Sync> FromRequestParts<S> for Name {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Error> {
        match Path::<String>::from_request_parts(parts, state).await {
            Ok(Path(name)) => Ok(Self(name)),
            Err(error) => Err(Error::invalid(format!(
                "the path is not what it should be: {}",
                error.body_text()
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_whole() {
        assert_eq!(sandbox_id("0123456789ab"), Some("0123456789ab"));
        assert_eq!(sandbox_id("0123456789ab-basalt"), Some("0123456789ab"));
        for text in [
            "",
            "0123456789a",
            "0123456789abc",
            "0123456789AB",
            "web",
            "..",
            "0123456789aé",
        ] {
            assert_eq!(sandbox_id(text), None, "{text}");
        }
    }
}
