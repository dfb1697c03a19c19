//! Signatures in the addresses of files: whoever has one may read or write one path as one user, for some time or for ever. The form is
//! that of the E2B SDKs: `v1_` and the base64 of a SHA-256. Knows no request.

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::error::Error;

/// What a signature is for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Signed<'a> {
    /// The path, as it is written in the address.
    pub(crate) path: &'a str,
    /// `read` or `write`.
    pub(crate) operation: &'a str,
    /// The user, as it is written in the address; empty if there is none.
    pub(crate) user: &'a str,
    /// When it ends: seconds since 1970.
    pub(crate) expiration: Option<i64>,
}

impl Signed<'_> {
    /// The signature with a token.
    fn with(&self, token: &str) -> String {
        let Self {
            path,
            operation,
            user,
            expiration,
        } = self;
        let mut text = format!("{path}:{operation}:{user}:{token}");
        if let Some(expiration) = expiration {
            text.push_str(&format!(":{expiration}"));
        }
        format!("v1_{}", STANDARD_NO_PAD.encode(Sha256::digest(text)))
    }

    /// Whether `signature` was made with `token` and has not ended at `now`. The messages are envd's, as programs compare them.
    pub(crate) fn check(&self, signature: &str, token: &str, now: i64) -> Result<(), Error> {
        if !bool::from(self.with(token).as_bytes().ct_eq(signature.as_bytes())) {
            return Err(Error::Unauthorized("invalid signature"));
        }
        if self.expiration.is_some_and(|end| end < now) {
            return Err(Error::Unauthorized("signature is already expired"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signed<'a>(path: &'a str, operation: &'a str, user: &'a str, expiration: Option<i64>) -> Signed<'a> {
        Signed {
            path,
            operation,
            user,
            expiration,
        }
    }

    /// Computed by `e2b.sandbox.signature.get_signature` of the Python SDK 2.63.0, with the token `tok_1` and `time.time` at
    /// 1795000000.
    #[test]
    fn signatures_are_those_of_the_python_sdk() {
        for (request, signature) in [
            (
                signed("/home/user/a.txt", "read", "", None),
                "v1_cUxvKQnD4UQf4De1E3hKeEVTfJXny8U3pECIvUtvCNs",
            ),
            (
                signed("/home/user/a.txt", "write", "user", None),
                "v1_0Fs5JP6TRIllzVfZAM9nnjovukyiaoPF9XvXihWH2cI",
            ),
            (
                signed("grüß dich.txt", "read", "root", Some(1_795_000_300)),
                "v1_IPJli3lW1HXV9fWftU/wBIwPGKiFk/ocVq62IoaA+Hs",
            ),
            (
                signed("", "write", "", Some(1_795_000_000)),
                "v1_p4KLtXYL/hmNvG/b7CvaR5Vf7s/9WQSjMw4J5lRMSEM",
            ),
        ] {
            assert_eq!(request.with("tok_1"), signature, "{request:?}");
            request.check(signature, "tok_1", 1_795_000_000).unwrap();
            assert!(request.check(signature, "tok_2", 1_795_000_000).is_err());
        }
    }

    #[test]
    fn a_signature_is_of_one_thing_and_ends() {
        let request = signed("/a", "read", "", Some(100));
        let signature = request.with("t");
        request.check(&signature, "t", 100).unwrap();
        assert!(request.check(&signature, "t", 101).is_err());
        for other in [
            signed("/b", "read", "", Some(100)),
            signed("/a", "write", "", Some(100)),
            signed("/a", "read", "root", Some(100)),
            signed("/a", "read", "", Some(101)),
            signed("/a", "read", "", None),
        ] {
            assert!(other.check(&signature, "t", 0).is_err(), "{other:?}");
        }
        assert!(request.check("", "t", 0).is_err());
    }
}
