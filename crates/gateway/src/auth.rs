//! Who asks: the key that a request shows, looked up once in a layer around all endpoints that want one. Handlers take [`Principal`] as an
//! argument, so none can forget it. Knows no endpoint.

use std::sync::Arc;

use axum::extract::FromRequestParts;
use control::KeyHash;
use http::request::Parts;
use http::{HeaderMap, HeaderName, header};

use crate::Error;
use crate::gateway::Gateway;
use crate::node::Owner;
use crate::time_text;

/// The header of a key.
pub(crate) const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Who asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Principal {
    /// Whose key it is.
    pub(crate) tenant: Arc<str>,
    /// The key's id.
    pub(crate) key: Arc<str>,
}

impl Principal {
    /// On whose behalf the node is asked.
    pub(crate) fn owner(&self) -> Owner {
        Owner::Tenant(Arc::clone(&self.tenant))
    }
}

impl<S: Sync> FromRequestParts<S> for Principal {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Error> {
        parts.extensions.get().cloned().ok_or(Error::Unauthorized)
    }
}

/// What a request shows: X-API-Key, or a bearer token.
pub(crate) fn shown(headers: &HeaderMap) -> Option<&str> {
    if let Some(key) = headers.get(API_KEY) {
        return key.to_str().ok();
    }
    bearer(headers)
}

/// A bearer token that a request shows.
pub(crate) fn bearer(headers: &HeaderMap) -> Option<&str> {
    let text = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = text.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

/// Whose key a request shows.
pub(crate) async fn authenticate(gateway: &Gateway, headers: &HeaderMap) -> Result<Principal, Error> {
    let hash = shown(headers).and_then(KeyHash::of).ok_or(Error::Unauthorized)?;
    let now = time_text::now();
    let found = gateway.store.with(move |store| {
        let key = store.find_key(&hash)?;
        if let Some(key) = &key
            && key.last_used.is_none_or(|last| now.saturating_sub(last) >= 60)
        {
            store.touch_key(&key.id, now)?;
        }
        Ok(key)
    });
    let key = found.await?.ok_or(Error::Unauthorized)?;
    Ok(Principal {
        tenant: key.tenant.into(),
        key: key.id.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_shown_in_two_ways() {
        let headers = |pairs: &[(&'static str, &str)]| {
            let pairs = pairs
                .iter()
                .map(|(name, value)| (http::HeaderName::from_static(name), value.parse().unwrap()));
            pairs.collect::<HeaderMap>()
        };
        assert_eq!(shown(&headers(&[("x-api-key", "a")])), Some("a"));
        assert_eq!(shown(&headers(&[("authorization", "Bearer b")])), Some("b"));
        assert_eq!(shown(&headers(&[("authorization", "bearer  b ")])), Some("b"));
        assert_eq!(
            shown(&headers(&[("authorization", "Bearer b"), ("x-api-key", "a")])),
            Some("a")
        );
        for (name, value) in [("authorization", "Basic b"), ("authorization", "b"), ("x-token", "a")] {
            assert_eq!(shown(&headers(&[(name, value)])), None, "{name}: {value}");
        }
    }
}
