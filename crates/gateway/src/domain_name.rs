//! A domain as its operator writes it: a name, and a port behind a colon where clients ask at another one than 443. Asks no name server.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The port that nobody has to name.
const USUAL: u16 = 443;

/// The longest name: with `<port>-<id>.` before it there is room left.
const LONGEST: usize = 190;

/// A domain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Domain {
    name: String,
    port: u16,
}

/// It is no domain.
#[derive(Clone, Debug, thiserror::Error)]
#[error("`{0}` is no domain: write one in lower case such as sandboxes.example, or with a port behind a colon")]
pub struct NoDomain(String);

impl Domain {
    /// Below which names are: lower case letters, digits, hyphens and single dots between them, so that it is a file's name, too.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// At which port clients ask.
    pub fn port(&self) -> u16 {
        self.port
    }
}

impl FromStr for Domain {
    type Err = NoDomain;

    fn from_str(text: &str) -> Result<Self, NoDomain> {
        let no = || NoDomain(text.chars().take(2 * LONGEST).collect());
        let (name, port) = match text.split_once(':') {
            Some((name, port)) => (name, port.parse().map_err(|_| no())?),
            None => (text, USUAL),
        };
        let is_label = |label: &str| {
            let good = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
            (1..=63).contains(&label.len()) && label.bytes().all(good)
        };
        if port == 0 || name.len() > LONGEST || !name.split('.').all(is_label) {
            return Err(no());
        }
        let name = name.to_owned();
        Ok(Self { name, port })
    }
}

impl fmt::Display for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            USUAL => f.write_str(&self.name),
            port => write!(f, "{}:{port}", self.name),
        }
    }
}

impl TryFrom<String> for Domain {
    type Error = NoDomain;

    fn try_from(text: String) -> Result<Self, NoDomain> {
        text.parse()
    }
}

impl From<Domain> for String {
    fn from(domain: Domain) -> Self {
        domain.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_has_a_name_and_a_port() {
        for (text, name, port, shown) in [
            ("sb.example", "sb.example", 443, "sb.example"),
            ("sb.example:443", "sb.example", 443, "sb.example"),
            ("localhost:8443", "localhost", 8443, "localhost:8443"),
        ] {
            let domain: Domain = text.parse().unwrap();
            assert_eq!((domain.name(), domain.port()), (name, port));
            assert_eq!(domain.to_string(), shown);
        }
        let long = ["a".repeat(63), "b".repeat(63), "c".repeat(63)].join(".");
        for text in [
            "",
            "a..b",
            ".",
            "../x",
            "a/b",
            "A.b",
            "a.b:",
            "a.b:0",
            "a.b:70000",
            "a.b:1:2",
            "a b",
            &long,
        ] {
            assert!(text.parse::<Domain>().is_err(), "{text}");
        }
    }
}
