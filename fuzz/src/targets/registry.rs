//! What registries say: manifests and indices, configs, artifacts, challenges, tokens, errors; and what people write to name an image
//! in one.
//!
//! Knows neither HTTP nor a store.

use image::{Document, INDEX_TYPES, Limits, MANIFEST_TYPES};
use registry::{Challenge, Error, Location, Scheme, untrusted};
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

/// What HTTP says that it is and, after a NUL, the manifest of an artifact.
pub(crate) fn artifacts() -> Target {
    Target {
        name: "registry-artifact",
        seeds: vec![
            [MANIFEST_TYPES[0].as_bytes(), b"; charset=utf-8\0", &artifact(WANTED)].concat(),
            [b"text/plain\0", &artifact(WANTED)[..]].concat(),
            [b"\0", &artifact("application/vnd.test.else")[..]].concat(),
        ],
        parse: artifact_of,
    }
}

/// A token server's answer.
pub(crate) fn tokens() -> Target {
    Target {
        name: "registry-token",
        seeds: vec![
            br#"{"token": "abc.def", "access_token": null, "expires_in": 300}"#.to_vec(),
            br#"{"access_token": "x y"}"#.to_vec(),
            br#"{"token": "a\r\nb"}"#.to_vec(),
        ],
        parse: |input| outcome(untrusted::token(input).err().unwrap_or("token")),
    }
}

/// The body of an answer with an error.
pub(crate) fn complaints() -> Target {
    Target {
        name: "registry-error",
        seeds: vec![
            br#"{"errors": [{"code": "DENIED", "message": "not yours\u001b[31m", "detail": null}]}"#.to_vec(),
            br#"{"errors": [{"code": "UNAUTHORIZED"}, {}]}"#.to_vec(),
            br#"{"errors": []}"#.to_vec(),
        ],
        parse: |input| {
            let said = untrusted::complaint(input);
            assert!(!said.contains(char::is_control), "a terminal would obey {said:?}");
            let length = said.chars().count();
            assert!(length <= 200 + 3, "{length} characters");
            outcome("x".repeat(length.min(20)))
        },
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

/// The type that an artifact should have.
const WANTED: &str = "application/vnd.test.wanted";

fn artifact_of(input: &[u8]) -> u64 {
    let at = input.iter().position(|&byte| byte == 0).unwrap_or(input.len());
    let (header, manifest) = (&input[..at], input.get(at + 1..).unwrap_or_default());
    let place = "r.test/team/x:1".parse().expect("a location");
    match untrusted::artifact(&String::from_utf8_lossy(header), manifest, &place, WANTED) {
        Ok(manifest) => {
            assert_eq!(manifest.artifact_type, WANTED);
            // Digests become names of files.
            let parts = manifest.layers.iter().chain([&manifest.config]);
            parts.for_each(|part| assert!(part.hex().is_ok(), "{:?} is no digest", part.digest));
            outcome("x".repeat(manifest.layers.len().min(20)))
        }
        Err(error) => {
            let text = error.to_string();
            assert!(!text.contains(char::is_control), "a terminal would obey {text:?}");
            match error {
                Error::SomethingElse { .. } => outcome("something else"),
                // What was found stands behind it.
                _ => outcome(text.split(['"', '`']).next().unwrap_or_default()),
            }
        }
    }
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

fn artifact(artifact_type: &str) -> Vec<u8> {
    let part = |media_type: &str| json!({"mediaType": media_type, "digest": DIGEST, "size": 7});
    json!({"schemaVersion": 2, "mediaType": MANIFEST_TYPES[0], "artifactType": artifact_type,
        "config": part("application/vnd.test.config+json"), "layers": [part("application/vnd.test.blob"), part("a/b")],
        "annotations": {"k": "v"}})
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
        let ends = artifacts().seeds;
        let ends: Vec<_> = ends.iter().map(|seed| artifact_of(seed)).collect();
        assert_eq!(ends, [outcome("xx"), outcome("xx"), outcome("something else")]);
        assert_eq!(untrusted::token(&tokens().seeds[0]), Ok(()));
        assert_eq!(untrusted::complaint(&complaints().seeds[0]), " (not yours[31m)");
        assert_ne!(location(format!("r.test/x@{DIGEST}").as_bytes()), location(b"r.test/x"));
    }
}
