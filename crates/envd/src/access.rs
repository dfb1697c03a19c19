//! Who may ask: the sandbox's token in a header, or a signature in the address of a file. And as which of the sandbox's users. Knows no
//! service.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::HeaderMap;
use http::header::{AUTHORIZATION, HeaderName};
use subtle::ConstantTimeEq;

use crate::error::Error;

const TOKEN: HeaderName = HeaderName::from_static("x-access-token");

/// The longest name of a user that is asked for.
const MAX_USER: usize = 256;

/// Who may ask a sandbox.
#[derive(Clone, Default)]
pub struct Access {
    /// What the header `X-Access-Token` must say, and what signatures of files' addresses are made with. `None` lets everybody in who can
    /// reach the sandbox.
    pub token: Option<String>,
}

impl std::fmt::Debug for Access {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let token = self.token.as_ref().map(|_| "<redacted>");
        f.debug_struct("Access").field("token", &token).finish()
    }
}

/// What a request shows of its right to be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shown {
    /// There is a token and it is right, or none is needed.
    Token,
    /// There is none.
    Nothing,
}

impl Access {
    /// What a request's headers show.
    ///
    /// # Errors
    /// They show a token, and it is wrong.
    pub(crate) fn shown(&self, headers: &HeaderMap) -> Result<Shown, Error> {
        let Some(token) = &self.token else {
            return Ok(Shown::Token);
        };
        match headers.get(TOKEN) {
            None => Ok(Shown::Nothing),
            Some(shown) if bool::from(shown.as_bytes().ct_eq(token.as_bytes())) => Ok(Shown::Token),
            Some(_) => Err(Error::Unauthorized(
                "the access token in the header X-Access-Token is not this sandbox's",
            )),
        }
    }

    /// Checks that a request's headers show the token.
    pub(crate) fn check(&self, headers: &HeaderMap) -> Result<(), Error> {
        match self.shown(headers)? {
            Shown::Token => Ok(()),
            Shown::Nothing => Err(Error::Unauthorized(
                "this sandbox is answered for only with its access token, in the header X-Access-Token",
            )),
        }
    }
}

/// The user that a call asks for: the name in `Authorization: Basic`, whose password counts for nothing.
pub(crate) fn user(headers: &HeaderMap) -> Result<Option<String>, Error> {
    let Some(value) = headers.get(AUTHORIZATION) else {
        return Ok(None);
    };
    // Other schemes are for whoever is in between.
    let Some(coded) = value
        .to_str()
        .ok()
        .and_then(|value| value.split_once(' '))
        .and_then(|(scheme, rest)| scheme.eq_ignore_ascii_case("basic").then_some(rest.trim()))
    else {
        return Ok(None);
    };
    let decoded = STANDARD
        .decode(coded)
        .ok()
        .and_then(|bytes| String::from_utf8(bytes).ok());
    match decoded.as_deref().and_then(|pair| pair.split_once(':')) {
        Some((name, _)) => known(name).map(Some),
        None => Err(Error::Unauthorized(
            "the header Authorization is no `Basic` with the base64 of `USER:`",
        )),
    }
}

/// A user's name that can be one.
pub(crate) fn known(name: &str) -> Result<String, Error> {
    // The agent takes what is behind a colon for a group.
    if name.is_empty() || name.len() > MAX_USER || name.contains(|char: char| char == ':' || char.is_control()) {
        let shown: String = name.chars().filter(|char| !char.is_control()).take(40).collect();
        return Err(Error::NoUser(shown));
    }
    Ok(name.to_owned())
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn headers(name: HeaderName, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(name, HeaderValue::from_str(value).unwrap())])
    }

    #[test]
    fn only_the_right_token_opens() {
        let access = Access {
            token: Some("secret".to_owned()),
        };
        access.check(&headers(TOKEN, "secret")).unwrap();
        for wrong in ["", "secre", "secret2", "Secret"] {
            let error = access.check(&headers(TOKEN, wrong)).unwrap_err();
            assert_eq!(error.code().name(), "unauthenticated");
        }
        assert!(access.check(&HeaderMap::new()).is_err());
        assert_eq!(access.shown(&HeaderMap::new()).unwrap(), Shown::Nothing);
        assert_eq!(format!("{access:?}"), r#"Access { token: Some("<redacted>") }"#);
        Access::default().check(&HeaderMap::new()).unwrap();
    }

    #[test]
    fn a_user_comes_by_basic_authorization() {
        let ask = |value: &str| user(&headers(AUTHORIZATION, value));
        assert_eq!(ask("Basic dXNlcjo=").unwrap().as_deref(), Some("user"));
        assert_eq!(ask("basic cm9vdDpwYXNz").unwrap().as_deref(), Some("root"));
        assert_eq!(ask("Bearer x").unwrap(), None);
        assert_eq!(user(&HeaderMap::new()).unwrap(), None);
        // No base64, no colon, no name.
        for bad in ["Basic *", "Basic dXNlcg==", "Basic Og=="] {
            assert_eq!(ask(bad).unwrap_err().code().name(), "unauthenticated", "{bad}");
        }
    }

    #[test]
    fn a_name_is_no_group() {
        for bad in ["", "a:b", "a\nb", &"a".repeat(257)] {
            assert!(known(bad).is_err(), "{bad:?}");
        }
        assert_eq!(known("1000").unwrap(), "1000");
    }
}
