//! Text as the kernel has it: bytes without a zero, usually UTF-8. In JSON a string where it is UTF-8, else an array of
//! numbers, so that arguments and paths of any bytes get through unchanged. Does not check for zeros; the receiver does.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// An argument, a path, a `NAME=value`.
#[derive(Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OsText(Vec<u8>);

impl OsText {
    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The same as the standard library's type.
    pub fn as_os_str(&self) -> &OsStr {
        OsStr::from_bytes(&self.0)
    }
}

impl AsRef<[u8]> for OsText {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl From<&str> for OsText {
    fn from(text: &str) -> Self {
        Self(text.as_bytes().to_vec())
    }
}

impl From<String> for OsText {
    fn from(text: String) -> Self {
        Self(text.into_bytes())
    }
}

impl From<OsString> for OsText {
    fn from(text: OsString) -> Self {
        Self(text.into_vec())
    }
}

impl From<&OsStr> for OsText {
    fn from(text: &OsStr) -> Self {
        Self(text.as_bytes().to_vec())
    }
}

impl From<Vec<u8>> for OsText {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }
}

impl fmt::Display for OsText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        String::from_utf8_lossy(&self.0).fmt(f)
    }
}

impl fmt::Debug for OsText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_os_str(), f)
    }
}

impl Serialize for OsText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match str::from_utf8(&self.0) {
            Ok(text) => serializer.serialize_str(text),
            Err(_) => serializer.collect_seq(&self.0),
        }
    }
}

impl<'de> Deserialize<'de> for OsText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = OsText;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, or an array of bytes")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<OsText, E> {
                Ok(OsText::from(text))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<OsText, A::Error> {
                let mut bytes = Vec::new();
                while let Some(byte) = items.next_element::<u8>()? {
                    if bytes.len() >= wire::MAX_PAYLOAD {
                        return Err(A::Error::custom("more bytes than a frame holds"));
                    }
                    bytes.push(byte);
                }
                Ok(OsText(bytes))
            }
        }
        deserializer.deserialize_any(Either)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn utf8_is_a_string_and_the_rest_an_array() {
        assert_eq!(
            serde_json::to_string(&OsText::from("grüß\"\n")).unwrap(),
            r#""grüß\"\n""#
        );
        let odd = OsText::from(vec![b'a', 0xff]);
        assert_eq!(serde_json::to_string(&odd).unwrap(), "[97,255]");
        for text in [OsText::from("grüß\"\n"), odd, OsText::from("")] {
            let json = serde_json::to_vec(&text).unwrap();
            assert_eq!(serde_json::from_slice::<OsText>(&json).unwrap(), text);
        }
    }

    #[test]
    fn nothing_else_is_text() {
        for json in ["1", "null", "{}", "[256]", "[-1]", "[\"a\"]"] {
            assert!(serde_json::from_str::<OsText>(json).is_err(), "{json}");
        }
    }
}
