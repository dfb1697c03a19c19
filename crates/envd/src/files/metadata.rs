//! What a client wants to be kept with a file that it writes: headers `X-Metadata-NAME`. Knows no file.

use std::collections::BTreeMap;

use http::HeaderMap;

use crate::error::Error;

const PREFIX: &str = "x-metadata-";

/// What Linux puts before the name: `user.e2b.`.
const NAMESPACE: usize = 9;

/// The longest name: Linux allows 255 bytes.
const MAX_NAME: usize = 255 - NAMESPACE;

/// What a file system keeps beside a file at least.
const MAX_ALL: usize = 4096;

/// What the headers say; names are in lower case, and of several with the same name the first counts.
pub(super) fn of(headers: &HeaderMap) -> Result<BTreeMap<String, String>, Error> {
    let mut metadata = BTreeMap::new();
    for name in headers.keys() {
        let Some(key) = name.as_str().strip_prefix(PREFIX).filter(|key| !key.is_empty()) else {
            continue;
        };
        let Some(value) = headers.get(name).and_then(|value| value.to_str().ok()) else {
            return Err(invalid(key, "has a value that is not of printable ASCII characters"));
        };
        if value.contains('\t') {
            return Err(invalid(key, "has a value that is not of printable ASCII characters"));
        }
        if key.len() > MAX_NAME {
            return Err(invalid(key, "is longer than 246 bytes"));
        }
        metadata.insert(key.to_owned(), value.to_owned());
    }
    let length = |(key, value): (&String, &String)| NAMESPACE + key.len() + value.len();
    if metadata.iter().map(length).sum::<usize>() > MAX_ALL {
        return Err(Error::Invalid(
            "invalid metadata: all of it together is longer than 4096 bytes".to_owned(),
        ));
    }
    Ok(metadata)
}

fn invalid(key: &str, what: &str) -> Error {
    let shown: String = key.chars().take(64).collect();
    Error::Invalid(format!("invalid metadata: {shown:?} {what}"))
}

#[cfg(test)]
mod tests {
    use http::{HeaderName, HeaderValue};

    use super::*;

    fn ask(headers: &[(&str, &str)]) -> Result<BTreeMap<String, String>, Error> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
            map.append(name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        of(&map)
    }

    #[test]
    fn headers_of_metadata_are_taken_and_no_others() {
        let got = ask(&[
            ("X-Metadata-Owner", "me"),
            ("X-Metadata-Owner", "you"),
            ("X-Other", "x"),
            ("X-Metadata-", "y"),
        ]);
        assert_eq!(got.unwrap(), [("owner".to_owned(), "me".to_owned())].into());
    }

    #[test]
    fn what_cannot_be_kept_is_refused() {
        let long = "v".repeat(MAX_ALL);
        let name = format!("x-metadata-{}", "n".repeat(MAX_NAME + 1));
        for headers in [
            [("x-metadata-a", "ü")],
            [("x-metadata-a", "a\tb")],
            [("x-metadata-a", &long)],
            [(name.as_str(), "v")],
        ] {
            assert_eq!(ask(&headers).unwrap_err().status().as_u16(), 400);
        }
    }
}
