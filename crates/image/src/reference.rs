//! Names of images as podman has them: `python` is `localhost/python:latest`.

use std::fmt;
use std::str::FromStr;

use crate::Error;

const LOCAL: &str = "localhost";
const DEFAULT_TAG: &str = "latest";

/// A whole name: registry, repository and tag.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Reference {
    /// Registry and repository.
    repository: String,
    tag: String,
}

impl Reference {
    /// Whether a user who says `short` may mean this: the same repository, whatever the registry, and the same tag.
    pub fn is_short(&self, short: &Reference) -> bool {
        let local = short.repository.strip_prefix("localhost/").unwrap_or(&short.repository);
        let ends = self
            .repository
            .strip_suffix(local)
            .is_some_and(|rest| rest.ends_with('/'));
        ends && self.tag == short.tag
    }
}

impl FromStr for Reference {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let bad = |problem| Error::BadReference {
            text: text.to_owned(),
            problem,
        };
        if text.len() > 255 {
            return Err(bad("it has more than 255 characters"));
        }
        if text.contains('@') {
            return Err(bad("a digest is no name"));
        }
        // A colon after the last slash is a tag's; before it, it is a registry's port.
        let last = text.rfind('/').map_or(0, |slash| slash + 1);
        let (name, tag) = match text[last..].rsplit_once(':') {
            Some((_, tag)) => (&text[..text.len() - tag.len() - 1], tag),
            None => (text, DEFAULT_TAG),
        };
        let tag_bytes = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-');
        if tag.is_empty() || tag.len() > 128 || !tag.bytes().all(tag_bytes) || tag.starts_with(['.', '-']) {
            return Err(bad("its tag has other than letters, digits, `_`, `.` and `-`"));
        }
        let (registry, path) = match name.split_once('/') {
            Some((first, rest)) if first.contains(['.', ':']) || first == LOCAL => (first, rest),
            _ => (LOCAL, name),
        };
        let host = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b':');
        let edge = |c: char| c.is_ascii_alphanumeric();
        if !registry.bytes().all(host) || !registry.starts_with(edge) || !registry.ends_with(edge) {
            return Err(bad("its registry is no host name"));
        }
        if !path.split('/').all(is_component) {
            return Err(bad(
                "it has other than lower-case letters, digits and single separators",
            ));
        }
        Ok(Self {
            repository: format!("{registry}/{path}"),
            tag: tag.to_owned(),
        })
    }
}

fn is_component(component: &str) -> bool {
    let alphanumeric = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let ends = component.bytes().next().is_some_and(alphanumeric) && component.bytes().last().is_some_and(alphanumeric);
    ends && component
        .bytes()
        .all(|byte| alphanumeric(byte) || matches!(byte, b'.' | b'_' | b'-'))
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.repository, self.tag)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_names_are_local_and_latest() {
        let whole = |text: &str| text.parse::<Reference>().unwrap().to_string();
        assert_eq!(whole("python"), "localhost/python:latest");
        assert_eq!(whole("python:3.11"), "localhost/python:3.11");
        assert_eq!(whole("team/python"), "localhost/team/python:latest");
        assert_eq!(whole("localhost/python"), "localhost/python:latest");
        assert_eq!(whole("registry.test:5000/a/b:c"), "registry.test:5000/a/b:c");
        assert_eq!(whole("registry.test:5000/a"), "registry.test:5000/a:latest");
    }

    #[test]
    fn what_is_no_name_is_refused() {
        for text in [
            "",
            ":x",
            "a:",
            "A",
            "a//b",
            "../a",
            "a/..",
            "-a",
            "a b",
            "a@sha256:0",
            "a:.x",
            "/a",
            "a/",
            "a\n",
        ] {
            assert!(text.parse::<Reference>().is_err(), "{text:?}");
        }
        assert!("a".repeat(256).parse::<Reference>().is_err());
    }

    #[test]
    fn a_short_name_may_mean_one_of_a_registry() {
        let of = |text: &str| text.parse::<Reference>().unwrap();
        assert!(of("registry.test/library/python:3").is_short(&of("python:3")));
        assert!(!of("registry.test/library/python:3").is_short(&of("python")));
        assert!(!of("registry.test/library/cpython:3").is_short(&of("python:3")));
    }
}
