//! What a device is called by the Container Device Interface (CDI 1.1.0): `VENDOR/CLASS=NAME`. Knows no device and no specification file.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The most of a vendor, a DNS name (CDI 1.1.0, Kind).
const VENDOR: usize = 253;

/// The most of a class (CDI 1.1.0, Kind); of a name this too.
const LABEL: usize = 63;

/// The qualified name of a device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CdiName {
    kind: CdiKind,
    name: String,
}

/// Whose devices they are, and which: `VENDOR/CLASS`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CdiKind {
    vendor: String,
    class: String,
}

/// A text is no such name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CdiNameError {
    /// Not of a device.
    #[error(
        "`{0}` is no name of the Container Device Interface: write VENDOR/CLASS=NAME, such as vendor.com/net=card0, each of letters, digits, `_`, \
         `-` and `.` (a name has `:` too), with a letter or digit at both ends"
    )]
    Name(String),
    /// Not of a kind.
    #[error(
        "`{0}` is no kind of devices of the Container Device Interface: write VENDOR/CLASS, such as vendor.com/net, each of letters, digits, `_`, \
         `-` and `.`, with a letter first and a letter or digit last"
    )]
    Kind(String),
}

impl CdiKind {
    /// Whose they are, such as `vendor.com`.
    pub fn vendor(&self) -> &str {
        &self.vendor
    }

    /// What they are among that one's, such as `net`.
    pub fn class(&self) -> &str {
        &self.class
    }

    /// The device of this kind that is called so.
    ///
    /// # Errors
    /// [`CdiNameError::Name`].
    pub fn device(&self, name: &str) -> Result<CdiName, CdiNameError> {
        let is_name = name.len() <= LABEL
            && name.bytes().all(|byte| byte == b':' || may_be_inside(byte))
            && has_ends(name, |first| first.is_ascii_alphanumeric());
        match is_name {
            true => Ok(CdiName {
                kind: self.clone(),
                name: name.to_owned(),
            }),
            false => Err(CdiNameError::Name(format!("{self}={name}"))),
        }
    }
}

impl CdiName {
    /// Its vendor and class.
    pub fn kind(&self) -> &CdiKind {
        &self.kind
    }

    /// What it is called among those.
    pub fn name(&self) -> &str {
        &self.name
    }
}

fn may_be_inside(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"_-.".contains(&byte)
}

fn has_ends(text: &str, is_first: impl Fn(&u8) -> bool) -> bool {
    let bytes = text.as_bytes();
    bytes.first().is_some_and(is_first) && bytes.last().is_some_and(u8::is_ascii_alphanumeric)
}

fn is_label(text: &str, most: usize) -> bool {
    text.len() <= most && text.bytes().all(may_be_inside) && has_ends(text, u8::is_ascii_alphabetic)
}

impl fmt::Display for CdiKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.vendor, self.class)
    }
}

impl FromStr for CdiKind {
    type Err = CdiNameError;

    fn from_str(text: &str) -> Result<Self, CdiNameError> {
        let parts = text.split_once('/');
        let parts = parts.filter(|(vendor, class)| is_label(vendor, VENDOR) && is_label(class, LABEL));
        let (vendor, class) = parts.ok_or_else(|| CdiNameError::Kind(text.to_owned()))?;
        Ok(Self {
            vendor: vendor.to_owned(),
            class: class.to_owned(),
        })
    }
}

impl fmt::Display for CdiName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.kind, self.name)
    }
}

impl FromStr for CdiName {
    type Err = CdiNameError;

    fn from_str(text: &str) -> Result<Self, CdiNameError> {
        let parse = || -> Option<Self> {
            let (kind, name) = text.split_once('=')?;
            kind.parse::<CdiKind>().ok()?.device(name).ok()
        };
        parse().ok_or_else(|| CdiNameError::Name(text.to_owned()))
    }
}

macro_rules! text {
    ($($type:ident)*) => { $(
        impl TryFrom<String> for $type {
            type Error = CdiNameError;

            fn try_from(text: String) -> Result<Self, CdiNameError> {
                text.parse()
            }
        }

        impl From<$type> for String {
            fn from(name: $type) -> Self {
                name.to_string()
            }
        }
    )* };
}

text! { CdiKind CdiName }

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_read_as_it_is_written() {
        for text in [
            "vendor.com/net=card0",
            "nvidia.com/pgpu=0",
            "foo.bar.baz/foo-bar123.B_az=all",
            "basalt/pci=0000:01:00.0",
            "v/c=n",
        ] {
            let name: CdiName = text.parse().unwrap();
            assert_eq!(name.to_string(), text);
        }
        let name: CdiName = "nvidia.com/pgpu=GPU-1:0".parse().unwrap();
        assert_eq!(
            (name.kind().vendor(), name.kind().class(), name.name()),
            ("nvidia.com", "pgpu", "GPU-1:0")
        );
    }

    #[test]
    fn what_is_none_is_refused_with_what_was_given() {
        let long = format!("v/c={}", "x".repeat(64));
        for text in [
            "",
            "card0",
            "vendor.com/net",
            "vendor.com=card0",
            "/net=card0",
            "vendor.com/=card0",
            "vendor.com/net=",
            "vendor.com/a/b=c",
            "1vendor/net=a",
            "vendor./net=a",
            "vendor/-net=a",
            "vendor/net=a b",
            "vendor/net=:a",
            "vendor/net=a:",
            "vendor/net=../x",
            "vendor/net=ä",
            &long,
        ] {
            let error = text.parse::<CdiName>().unwrap_err().to_string();
            assert!(error.contains(&format!("`{text}`")), "{error}");
        }
        let error = "vendor.com/net=a".parse::<CdiKind>().unwrap_err().to_string();
        assert!(error.contains("VENDOR/CLASS, such as"), "{error}");
    }

    #[test]
    fn it_is_text_for_machines() {
        let name: CdiName = "vendor.com/net=card0".parse().unwrap();
        let deserializer = serde::de::value::StrDeserializer::<serde::de::value::Error>::new("vendor.com/net=card0");
        assert_eq!(CdiName::deserialize(deserializer).unwrap(), name);
        let deserializer = serde::de::value::StrDeserializer::<serde::de::value::Error>::new("card0");
        CdiName::deserialize(deserializer).unwrap_err();
    }
}
