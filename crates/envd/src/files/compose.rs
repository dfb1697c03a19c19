//! `POST /files/compose`: one file of several, which the agent puts together. Knows no file's bytes.

use agent_api::FsRequest;
use agent_api::message::Reply;
use axum::body::Body;
use http::{Request, Response, StatusCode};
use serde::Deserialize;

use super::upload::Written;
use crate::agent::unexpected;
use crate::connect::{collect, json};
use crate::error::Error;
use crate::filesystem::ask;
use crate::sandbox;
use crate::state::State;

/// What is asked for.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Compose {
    source_paths: Vec<String>,
    destination: String,
    username: Option<String>,
}

/// Answers the request.
pub(super) async fn serve(state: &State, request: Request<Body>) -> Result<Response<Body>, Error> {
    let (bytes, _held) = collect(&state.memory, request.into_body()).await?;
    let compose: Compose = json::read(&bytes)?;
    check(&compose)?;
    let user = super::user(compose.username.as_deref())?;
    let request = FsRequest::Compose {
        sources: compose.source_paths.into_iter().map(Into::into).collect(),
        path: compose.destination.into(),
    };
    match ask(state, user.as_deref(), request).await?.2 {
        Reply::Entry(mut entry) => {
            entry.metadata.clear();
            Ok(sandbox::json(StatusCode::OK, &Written::from(*entry)))
        }
        other => Err(unexpected(&other)),
    }
}

fn check(compose: &Compose) -> Result<(), Error> {
    let invalid = |text: String| Err(Error::Invalid(text));
    if compose.source_paths.is_empty() || compose.source_paths.iter().any(String::is_empty) {
        return invalid("source_paths must not be empty, and no path in it".to_owned());
    }
    if compose.destination.is_empty() {
        return invalid("destination is required".to_owned());
    }
    match compose.source_paths.iter().find(|path| **path == compose.destination) {
        Some(path) => invalid(format!("source path {path:?} cannot be the same as destination")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_makes_no_file_is_refused() {
        let ask = |text: &str| check(&json::read(text.as_bytes()).unwrap());
        ask(r#"{"source_paths":["a","b"],"destination":"c"}"#).unwrap();
        for text in [
            "{}",
            r#"{"source_paths":["a"]}"#,
            r#"{"source_paths":[],"destination":"c"}"#,
            r#"{"source_paths":[""],"destination":"c"}"#,
            r#"{"source_paths":["a","c"],"destination":"c"}"#,
        ] {
            assert_eq!(ask(text).unwrap_err().status().as_u16(), 400, "{text}");
        }
    }
}
