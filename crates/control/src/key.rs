//! API keys: 256 random bits as `e2b_` and 64 hexadecimal digits, which is the form that the E2B SDKs accept in all their versions.
//! Only the SHA-256 is kept: a key has too many bits to be guessed, so nothing slower is needed. Knows no store.

use std::fmt;

use sha2::{Digest, Sha256};

use crate::Error;

/// What a key begins with.
pub const KEY_PREFIX: &str = "e2b_";

const KEY_BYTES: usize = 32;
const ID_BYTES: usize = 8;

/// The longest name of a key.
const MAX_NAME: usize = 64;

/// What a key is found by.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyHash([u8; 32]);

impl KeyHash {
    /// Of what somebody shows; `None` if that cannot be a key.
    pub fn of(shown: &str) -> Option<Self> {
        let digits = shown.strip_prefix(KEY_PREFIX)?;
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        let is_key = digits.len() == 2 * KEY_BYTES && digits.bytes().all(is_digit);
        is_key.then(|| Self(Sha256::digest(shown.as_bytes()).into()))
    }

    /// The bytes that are stored.
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyHash(redacted)")
    }
}

/// A new key, which is shown once and never kept.
pub struct Secret {
    /// By which it is listed and revoked.
    pub id: String,
    /// The key.
    pub text: String,
    /// What is kept of it.
    pub hash: KeyHash,
}

impl Secret {
    /// Another one.
    ///
    /// # Errors
    /// The host gives no random bytes.
    pub fn new() -> Result<Self, Error> {
        let text = format!("{KEY_PREFIX}{}", random_hex::<KEY_BYTES>()?);
        let hash = KeyHash(Sha256::digest(text.as_bytes()).into());
        let id = random_hex::<ID_BYTES>()?;
        Ok(Self { id, text, hash })
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Secret").field("id", &self.id).finish_non_exhaustive()
    }
}

/// So many random bytes, as hexadecimal digits.
///
/// # Errors
/// The host gives none.
pub fn random_hex<const BYTES: usize>() -> Result<String, Error> {
    let mut bytes = [0; BYTES];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| Error::Random(error.into()))?;
    Ok(hex::encode(bytes))
}

/// Checks a key's name.
///
/// # Errors
/// [`Error::KeyName`].
pub fn check_key_name(name: &str) -> Result<(), Error> {
    let printable = |byte: u8| byte == b' ' || byte.is_ascii_graphic();
    match (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(printable) {
        true => Ok(()),
        false => Err(Error::KeyName(name.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_found_by_its_hash_and_never_printed() {
        let (one, other) = (Secret::new().unwrap(), Secret::new().unwrap());
        assert_eq!(KeyHash::of(&one.text), Some(one.hash));
        assert!(one.hash != other.hash && one.id != other.id);
        assert_eq!(one.text.len(), 68);
        let printed = format!("{one:?} {:?}", one.hash);
        assert!(!printed.contains(&one.text[4..]), "{printed}");
        assert!(!printed.contains(&hex::encode(one.hash.bytes())), "{printed}");
    }

    #[test]
    fn what_is_no_key_has_no_hash() {
        let digits = "0".repeat(64);
        assert!(KeyHash::of(&format!("e2b_{digits}")).is_some());
        for text in [
            "",
            "e2b_",
            &digits,
            &format!("e2b_{digits}0"),
            &format!("E2B_{digits}"),
            &format!("e2b_{}", "A".repeat(64)),
            &format!("e2b_{}", "g".repeat(64)),
        ] {
            assert!(KeyHash::of(text).is_none(), "{text}");
        }
    }

    #[test]
    fn names_of_keys_are_printable() {
        assert!(check_key_name("ci, nightly").is_ok());
        for name in ["", "a\nb", "ü", &"a".repeat(65)] {
            assert!(check_key_name(name).is_err(), "{name}");
        }
    }
}
