//! Whole files by HTTP: read, written, put together; and the few things that envd says of a sandbox by plain HTTP. Files' bytes go through
//! in pieces and are never all here. Knows no process.

mod body;
mod compose;
mod download;
mod info;
mod metadata;
mod range;
mod upload;

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::Query;
use http::{Method, Request, Response};
use serde::Deserialize;

use crate::access::{self, Access, Shown};
use crate::error::Error;
use crate::signature::Signed;
use crate::state::State;

/// What an address of `/files` says.
#[derive(Debug, Default, Deserialize)]
struct Address {
    path: Option<String>,
    username: Option<String>,
    signature: Option<String>,
    signature_expiration: Option<i64>,
}

impl Address {
    /// Reads it, and checks that it, or the headers, show a right to what is asked for.
    fn read(access: &Access, request: &Request<Body>, operation: &str) -> Result<Self, Error> {
        let Query(address) = Query::<Self>::try_from_uri(request.uri())
            .map_err(|error| Error::Invalid(format!("the address cannot be read: {error}")))?;
        if access.shown(request.headers())? == Shown::Nothing {
            address.check(access, operation)?;
        }
        Ok(address)
    }

    fn check(&self, access: &Access, operation: &str) -> Result<(), Error> {
        let (Some(signature), Some(token)) = (&self.signature, &access.token) else {
            return Err(Error::Unauthorized(
                "missing signature query parameter, or the sandbox's access token in the header X-Access-Token",
            ));
        };
        let signed = Signed {
            path: self.path.as_deref().unwrap_or_default(),
            operation,
            user: self.username.as_deref().unwrap_or_default(),
            expiration: self.signature_expiration,
        };
        signed.check(signature, token, now())
    }

    /// As which user; `None` is the sandbox's default one.
    fn user(&self) -> Result<Option<String>, Error> {
        user(self.username.as_deref())
    }
}

fn user(name: Option<&str>) -> Result<Option<String>, Error> {
    name.filter(|name| !name.is_empty()).map(access::known).transpose()
}

/// Seconds since 1970.
fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

/// Answers what is asked of `/files`, where an address may be signed.
pub(crate) async fn serve(
    state: &Arc<State>,
    access: &Access,
    request: Request<Body>,
) -> Result<Response<Body>, Error> {
    match *request.method() {
        Method::GET => {
            let address = Address::read(access, &request, "read")?;
            download::serve(state, &address, request.headers()).await
        }
        Method::POST => {
            let address = Address::read(access, &request, "write")?;
            upload::serve(state, &address, request).await
        }
        _ => Err(Error::Method("GET, POST")),
    }
}

/// Answers what is asked of the other addresses; who asks was let in.
pub(crate) async fn serve_more(state: &Arc<State>, request: Request<Body>) -> Result<Response<Body>, Error> {
    match (request.uri().path(), request.method()) {
        ("/files/compose", &Method::POST) => compose::serve(state, request).await,
        ("/files/compose", _) => Err(Error::Method("POST")),
        ("/metrics", &Method::GET) => info::metrics(state).await,
        ("/envs", &Method::GET) => info::variables(state).await,
        _ => Err(Error::Method("GET")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(address: &str, token: Option<&str>) -> Result<Address, Error> {
        let access = Access {
            token: Some("tok_1".to_owned()),
        };
        let mut request = Request::get(address);
        if let Some(token) = token {
            request = request.header("x-access-token", token);
        }
        Address::read(&access, &request.body(Body::empty()).unwrap(), "read")
    }

    /// The signature is one of those in `signature`.
    #[test]
    fn a_file_is_for_whoever_has_the_token_or_a_signature() {
        const SIGNED: &str =
            "/files?path=%2Fhome%2Fuser%2Fa.txt&signature=v1_cUxvKQnD4UQf4De1E3hKeEVTfJXny8U3pECIvUtvCNs";
        let address = read(SIGNED, None).unwrap();
        assert_eq!(address.path.as_deref(), Some("/home/user/a.txt"));
        read("/files?path=a", Some("tok_1")).unwrap();
        for (address, token) in [
            ("/files?path=a", None),
            ("/files?path=a", Some("tok_2")),
            // A token that is wrong is not made good by a signature.
            (SIGNED, Some("tok_2")),
            (&format!("{SIGNED}&username=root"), None),
            (&format!("{SIGNED}&signature_expiration=1"), None),
        ] {
            let error = read(address, token).unwrap_err();
            assert_eq!(error.status().as_u16(), 401, "{address}");
        }
        assert_eq!(
            read("/files?signature_expiration=x", Some("tok_1"))
                .unwrap_err()
                .status()
                .as_u16(),
            400
        );
    }

    #[test]
    fn an_empty_user_is_the_default_one() {
        assert_eq!(user(Some("")).unwrap(), None);
        assert_eq!(user(None).unwrap(), None);
        assert_eq!(user(Some("web")).unwrap().as_deref(), Some("web"));
        assert_eq!(user(Some("web:www")).unwrap_err().status().as_u16(), 401);
    }
}
