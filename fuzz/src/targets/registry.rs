//! What registries say: manifests and indices, configs, challenges; and what people write to name an image in one.
//!
//! Knows neither HTTP nor a store.

use image::{Document, INDEX_TYPES, Limits, MANIFEST_TYPES};
use registry::{Challenge, Location, Scheme};
use serde_json::json;

use crate::run::{Target, outcome};

const DIGEST: &str = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

/// A manifest or an index, and after a NUL a config for it.
pub(crate) fn documents() -> Target {
    Target {
        name: "registry-document",
        seeds: vec![manifest(), index(), [&manifest()[..], b"\0", &config()].concat()],
        parse: document,
    }
}

/// The value of `WWW-Authenticate`.
pub(crate) fn challenges() -> Target {
    Target {
        name: "registry-challenge",
        seeds: vec![
            br#"Bearer realm="https://r.test/token",service="r.test",scope="repository:a/b:pull,push""#.to_vec(),
            br#"Negotiate abc==, Basic realm="a \"b\" c" , charset=UTF-8"#.to_vec(),
        ],
        parse: |input| {
            let parsed = Challenge::parse(&String::from_utf8_lossy(input));
            // Schemes that nobody knows are all alike.
            let shape = |challenge: &Challenge| match challenge.scheme {
                Scheme::Basic => 'a',
                Scheme::Bearer => 'b',
                Scheme::Other(_) => 'c',
            };
            let shapes = parsed
                .iter()
                .map(|challenge| format!("{}{}", shape(challenge), "x".repeat(challenge.parameters.len())));
            outcome(shapes.collect::<String>())
        },
    }
}

/// `HOST/REPOSITORY:TAG@DIGEST`.
pub(crate) fn locations() -> Target {
    Target {
        name: "registry-location",
        seeds: vec![
            format!("r.test:5000/team/x:1@{DIGEST}").into_bytes(),
            b"localhost/x".to_vec(),
        ],
        parse: location,
    }
}

fn document(input: &[u8]) -> u64 {
    let mut halves = input.splitn(2, |&byte| byte == 0);
    let (first, config) = (halves.next().unwrap_or_default(), halves.next());
    let limits = Limits::default();
    let mut ends = String::new();
    for media_type in [MANIFEST_TYPES[0], INDEX_TYPES[1]] {
        ends += &match Document::parse("it", media_type, first, &limits) {
            Ok(Document::Index(index)) => match index.for_this_machine().and_then(|found| found.hex()) {
                Ok(_) => "index".to_owned(),
                Err(error) => error.to_string(),
            },
            Ok(Document::Manifest(manifest)) => match manifest.check_config(config.unwrap_or_default(), &limits) {
                Ok(()) => "image".to_owned(),
                Err(error) => format!("manifest {error}"),
            },
            Err(error) => error.to_string(),
        };
    }
    outcome(ends)
}

fn location(input: &[u8]) -> u64 {
    let text = String::from_utf8_lossy(input);
    match text.parse::<Location>() {
        Ok(location) => {
            // What is written out means the same when it is read again.
            let again: Result<Location, _> = location.to_string().parse();
            assert!(again.is_ok_and(|again| again == location), "{text:?}");
            outcome(format!("{:?}", location.name().is_some()))
        }
        Err(error) => outcome(error.to_string().rsplit('(').next().unwrap_or_default()),
    }
}

fn manifest() -> Vec<u8> {
    let part = |media_type: &str| json!({"mediaType": media_type, "digest": DIGEST, "size": 7});
    let layer = part("application/vnd.oci.image.layer.v1.tar+gzip");
    json!({"schemaVersion": 2, "config": part("application/vnd.oci.image.config.v1+json"), "layers": [layer]})
        .to_string()
        .into_bytes()
}

fn index() -> Vec<u8> {
    let entry = |architecture: &str| {
        json!({"mediaType": MANIFEST_TYPES[0], "digest": DIGEST, "size": 7,
            "platform": {"os": "linux", "architecture": architecture}})
    };
    json!({"schemaVersion": 2, "manifests": [entry("arm64"), entry("amd64")]})
        .to_string()
        .into_bytes()
}

fn config() -> Vec<u8> {
    json!({"architecture": "amd64", "os": "linux", "config": {"Cmd": ["sh"], "Env": null},
        "rootfs": {"type": "layers", "diff_ids": [DIGEST]}})
    .to_string()
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seeds_are_good() {
        let whole = document(&[&manifest()[..], b"\0", &config()].concat());
        assert_ne!(whole, document(&manifest()));
        assert_ne!(document(&index()), document(b"{}"));
        assert_ne!(location(format!("r.test/x@{DIGEST}").as_bytes()), location(b"r.test/x"));
    }
}
