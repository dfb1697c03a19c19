//! What is to be pulled or pushed, as people write it: `HOST[:PORT]/REPOSITORY[:TAG][@sha256:DIGEST]`.
//!
//! Knows no default registry: a name without a host is not guessed at.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use image::Reference;

use crate::Error;

/// An image in a registry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Location {
    /// Host name, with a port if it is not the scheme's.
    pub(crate) host: String,
    pub(crate) repository: String,
    pub(crate) tag: Option<String>,
    /// `sha256:` and 64 digits.
    pub(crate) digest: Option<String>,
}

impl Location {
    /// The registry's host, as credentials and certificates are filed under.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The repository in the registry.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// What a manifest is asked for by: the digest if there is one, else the tag.
    pub(crate) fn reference(&self) -> &str {
        let named = self.digest.as_deref().or(self.tag.as_deref());
        named.unwrap_or("latest")
    }

    /// The name that the image gets in the store: none if it is asked for by digest alone.
    pub fn name(&self) -> Option<Reference> {
        let tag = self.tag.as_ref()?;
        format!("{}/{}:{tag}", self.host, self.repository).parse().ok()
    }
}

impl FromStr for Location {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let bad = |problem: &str| Error::BadLocation {
            text: text.chars().take(300).collect(),
            problem: problem.to_owned(),
        };
        let (name, digest) = match text.split_once('@') {
            Some((name, digest)) => (name, Some(digest)),
            None => (text, None),
        };
        if digest.is_some_and(|digest| !is_digest(digest)) {
            return Err(bad("after the @ there is no sha256: with 64 hexadecimal digits"));
        }
        let named = |first: &str| first.contains(['.', ':']) || first == "localhost";
        let Some((host, rest)) = name.split_once('/').filter(|(first, _)| named(first)) else {
            return Err(bad("it names no registry"));
        };
        let last = rest.rfind('/').map_or(0, |slash| slash + 1);
        let tagged = rest[last..].contains(':');
        // The store's names have the same grammar; what it refuses can have no name there.
        let whole = match name.parse::<Reference>() {
            Ok(whole) => whole.to_string(),
            Err(image::Error::BadReference { problem, .. }) => return Err(bad(problem)),
            Err(error) => return Err(bad(&error.to_string())),
        };
        let (repository, tag) = whole[host.len() + 1..]
            .rsplit_once(':')
            .ok_or_else(|| bad("it has no tag"))?;
        Ok(Self {
            host: host.to_owned(),
            repository: repository.to_owned(),
            tag: (tagged || digest.is_none()).then(|| tag.to_owned()),
            digest: digest.map(str::to_owned),
        })
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.host, self.repository)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        match &self.digest {
            Some(digest) => write!(f, "@{digest}"),
            None => Ok(()),
        }
    }
}

/// `sha256:` and 64 lower-case digits.
pub(crate) fn is_digest(text: &str) -> bool {
    text.strip_prefix("sha256:").is_some_and(|digits| {
        digits.len() == 64 && digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    })
}

/// Whether `host`, with or without a port, is this machine itself.
pub(crate) fn is_loopback(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let address = name.trim_start_matches('[').trim_end_matches(']');
    name == "localhost" || address.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIGEST: &str = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    #[test]
    fn a_location_is_taken_apart() {
        let of = |text: &str| {
            let location: Location = text.parse().unwrap();
            assert_eq!(
                location.to_string(),
                if text.ends_with("/a") {
                    format!("{text}:latest")
                } else {
                    text.to_owned()
                }
            );
            (
                location.host.clone(),
                location.repository.clone(),
                location.reference().to_owned(),
                location.name(),
            )
        };
        let name = |text: &str| Some(text.parse::<Reference>().unwrap());
        let parts = |host: &str, repository: &str, reference: &str, name| {
            (host.to_owned(), repository.to_owned(), reference.to_owned(), name)
        };
        assert_eq!(of("r.test/a"), parts("r.test", "a", "latest", name("r.test/a:latest")));
        assert_eq!(
            of("r.test:5000/a/b:1"),
            parts("r.test:5000", "a/b", "1", name("r.test:5000/a/b:1"))
        );
        assert_eq!(
            of(&format!("localhost:5000/a/b@{DIGEST}")),
            parts("localhost:5000", "a/b", DIGEST, None)
        );
        assert_eq!(
            of(&format!("r.test/b:1@{DIGEST}")),
            parts("r.test", "b", DIGEST, name("r.test/b:1"))
        );
    }

    #[test]
    fn what_names_no_image_in_a_registry_is_refused() {
        for text in [
            "",
            "python",
            "library/python",
            "r.test",
            "r.test/",
            "r.test/A",
            "r.test/a:",
            "r.test/a@sha256:0",
            "r.test/../a",
            "r.test/a?x=y",
            "r.test/a b",
            "https://r.test/a",
            "r.test:x/a@",
            "user@r.test/a",
        ] {
            let error = text.parse::<Location>();
            assert!(matches!(error, Err(Error::BadLocation { .. })), "{text:?}: {error:?}");
        }
    }

    #[test]
    fn this_machine_is_known() {
        for host in [
            "localhost",
            "localhost:5000",
            "127.0.0.1:5000",
            "127.1.2.3",
            "[::1]:5000",
            "[::1]",
        ] {
            assert!(is_loopback(host), "{host}");
        }
        for host in [
            "r.test",
            "localhost.r.test:1",
            "10.0.0.1",
            "128.0.0.1:127",
            "127.0.0.1.r.test",
        ] {
            assert!(!is_loopback(host), "{host}");
        }
    }
}
