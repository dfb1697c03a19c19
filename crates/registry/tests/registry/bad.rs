//! Registries that say what is wrong: other bytes, other types, other machines, or nothing of sense.

use std::fs;
use std::io::{Seek, SeekFrom, Write};

use registry::{Error, Options};
use serde_json::json;

use crate::kit::{LAYER, Parts, Place, options, parts, pull, push, refused};
use crate::server::Registry;
use crate::wire::{Answer, Fake};

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";

fn few() -> Options {
    Options {
        attempts: 2,
        ..options()
    }
}

/// A registry that has `parts`, and for the tag `latest` this document.
fn serving(parts: Parts, media_type: &'static str, latest: Vec<u8>) -> Fake {
    Fake::start(move |asked| -> Answer {
        let path = asked.line.trim_start_matches("GET ");
        if path == "/v2/" {
            return (200, Vec::new(), Vec::new());
        }
        let typed = |kind: &str| vec![("content-type".to_owned(), kind.to_owned())];
        if path.ends_with("/manifests/latest") {
            return (200, typed(media_type), latest.clone());
        }
        let digest = path.rsplit(':').next().unwrap_or_default();
        match parts.blobs.get(digest) {
            Some(blob) if path.contains("/manifests/") => (200, typed(MANIFEST), blob.clone()),
            Some(blob) => (200, typed("application/octet-stream"), blob.clone()),
            None => (404, Vec::new(), Vec::new()),
        }
    })
}

fn name(fake: &Fake) -> String {
    format!("{}/x", fake.host())
}

#[test]
fn damage_in_the_registry_is_refused_and_nothing_of_it_is_kept() {
    let place = Place::new();
    let registry = Registry::start(&place);
    let (ours, _) = place.with_image("ours", &[(1, 100_000), (2, 100_000)]);
    let from = format!("{}/x", registry.host());
    push(&ours, &from, &options()).unwrap();
    let layer = ours.export("x").unwrap().layers[1].hex().to_owned();
    let mut file = fs::File::options().write(true).open(registry.blob(&layer)).unwrap();
    file.seek(SeekFrom::Start(50_000)).unwrap();
    file.write_all(b"damage").unwrap();
    let error = refused(&place, &from, &options());
    assert!(
        matches!(&error, Error::WrongDigest { expected, .. } if expected.ends_with(&layer)),
        "{error}"
    );
    assert!(!place.path("refused/partial").join(&layer).exists());
    assert!(!place.path("refused/partial").join(format!("{layer}.part")).exists());
    // Mended, it is pulled.
    let good = fs::read(place.path("ours/content").join(&layer)).unwrap();
    fs::write(registry.blob(&layer), good).unwrap();
    pull(&place.store("refused"), &from, &options()).unwrap();
}

#[test]
fn what_is_not_there_is_said_to_be_missing() {
    let place = Place::new();
    let registry = Registry::start(&place);
    let (ours, _) = place.with_image("ours", &[(1, 1000)]);
    push(&ours, &format!("{}/x:1", registry.host()), &options()).unwrap();
    for rest in ["x:2", "y:1", &format!("x@sha256:{}", "0".repeat(64))] {
        let error = refused(&place, &format!("{}/{rest}", registry.host()), &options());
        assert!(matches!(error, Error::NoSuchImage { .. }), "{error}");
    }
    // No registry, but a server.
    let error = refused(
        &place,
        &name(&Fake::start(|_| (404, Vec::new(), b"<html>".to_vec()))),
        &few(),
    );
    assert!(matches!(error, Error::BadAnswer { .. }), "{error}");
    let missing = registry::push(
        &ours,
        "nothing",
        &format!("{}/x", registry.host()).parse().unwrap(),
        &few(),
        &|_| {},
    );
    assert!(matches!(missing, Err(Error::Image(image::Error::NoSuchImage { .. }))));
}

#[test]
fn of_an_index_the_image_for_this_machine_is_taken() {
    let place = Place::new();
    let mut all = parts(&[]);
    let other = all.image(&[(1, 1000)], "arm64", LAYER);
    let ours = all.image(&[(2, 1000)], "amd64", LAYER);
    let digest = all.manifest.clone();
    let platform = |descriptor: &serde_json::Value, architecture: &str| {
        let mut descriptor = descriptor.clone();
        descriptor["platform"] = json!({"os": "linux", "architecture": architecture});
        descriptor
    };
    let index =
        |manifests: &[serde_json::Value]| json!({"schemaVersion": 2, "manifests": manifests}).to_string().into();
    let both = [platform(&other, "arm64"), platform(&ours, "amd64")];
    let fake = serving(all, INDEX, index(&both));
    assert_eq!(
        pull(&place.store("theirs"), &name(&fake), &few()).unwrap().image.digest,
        digest
    );
    let asked = fake.lines().join("\n");
    assert!(!asked.contains(other["digest"].as_str().unwrap()), "{asked}");

    let fake = serving(parts(&[]), INDEX, index(&both[..1]));
    let error = refused(&place, &name(&fake), &few());
    assert!(
        matches!(error, Error::Image(image::Error::WrongPlatform { .. })),
        "{error}"
    );

    // An index entry's size is checked, as is what an index promises of itself.
    let mut wrong = both[1].clone();
    wrong["size"] = json!(1);
    let mut all = parts(&[]);
    all.image(&[(2, 1000)], "amd64", LAYER);
    let error = refused(&place, &name(&serving(all, INDEX, index(&[wrong]))), &few());
    assert!(matches!(error, Error::WrongSize { .. }), "{error}");
}

/// An image for another machine is told by its config, before its layers are fetched.
#[test]
fn an_image_for_another_machine_is_refused_before_its_layers_come() {
    let place = Place::new();
    let mut all = parts(&[]);
    let manifest = all.image(&[(1, 1000)], "arm64", LAYER);
    let document = all.blobs[manifest["digest"].as_str().unwrap().trim_start_matches("sha256:")].clone();
    let fake = serving(all, MANIFEST, document);
    let error = refused(&place, &name(&fake), &few());
    assert!(
        matches!(error, Error::Image(image::Error::WrongPlatform { .. })),
        "{error}"
    );
    assert_eq!(fake.lines().iter().filter(|line| line.contains("/blobs/")).count(), 1);
}

#[test]
fn documents_that_cannot_be_used_are_refused() {
    let place = Place::new();
    let manifest = |parts: &Parts| parts.blobs[&parts.manifest].clone();
    let refuse = |parts: Parts, media_type: &'static str, latest: Vec<u8>| {
        refused(&place, &name(&serving(parts, media_type, latest)), &few())
    };
    let good = || parts(&[(1, 1000)]);
    for media_type in [
        "text/html",
        "application/vnd.docker.distribution.manifest.v1+prettyjws",
        "",
    ] {
        let error = refuse(good(), media_type, b"{}".to_vec());
        assert!(
            matches!(error, Error::Image(image::Error::UnsupportedMediaType { .. })),
            "{media_type}: {error}"
        );
    }
    for document in [
        &b"{"[..],
        b"{}",
        b"\xff",
        br#"{"config":{"digest":"x","size":-1},"layers":[]}"#,
    ] {
        let error = refuse(good(), MANIFEST, document.to_vec());
        assert!(matches!(error, Error::Image(image::Error::BadJson { .. })), "{error}");
    }
    let mut odd = parts(&[]);
    odd.image(&[(1, 1000)], "amd64", "application/vnd.oci.image.layer.v1.tar+xz");
    let document = manifest(&odd);
    let error = refuse(odd, MANIFEST, document);
    assert!(
        matches!(error, Error::Image(image::Error::UnsupportedMediaType { .. })),
        "{error}"
    );
    let traversal = String::from_utf8(manifest(&good()))
        .unwrap()
        .replace("sha256:", "sha256:../../");
    let error = refuse(good(), MANIFEST, traversal.into());
    assert!(
        matches!(error, Error::Image(image::Error::UnsupportedDigest { .. })),
        "{error}"
    );
    let huge = vec![b' '; 5 << 20];
    let error = refuse(good(), MANIFEST, huge);
    assert!(matches!(error, Error::BadAnswer { .. }), "{error}");
    // An index that names itself without end.
    let index = json!({"manifests": [{"mediaType": INDEX, "digest": format!("sha256:{}", "0".repeat(64)), "size": 1}]});
    let error = refuse(good(), INDEX, index.to_string().into());
    assert!(matches!(error, Error::NoSuchImage { .. }), "{error}");
}

/// Asked for by digest, other bytes are an error even where everything in them is right.
#[test]
fn a_manifest_must_have_the_digest_that_was_asked_for() {
    let place = Place::new();
    let mut all = parts(&[(1, 1000)]);
    let other = all.blobs[&all.manifest].clone();
    let asked = "1".repeat(64);
    all.blobs.insert(asked.clone(), other);
    let fake = serving(all, MANIFEST, Vec::new());
    let error = refused(&place, &format!("{}@sha256:{asked}", name(&fake)), &few());
    assert!(matches!(error, Error::WrongDigest { .. }), "{error}");
}

/// Blobs longer and shorter than the manifest says, and ranges that were not asked for.
#[test]
fn blobs_of_another_length_are_refused() {
    let place = Place::new();
    let good = parts(&[(1, 1000)]);
    let document = good.blobs[&good.manifest].clone();
    for change in [
        |blob: &mut Vec<u8>| blob.push(0),
        |blob: &mut Vec<u8>| blob.truncate(blob.len() - 1),
    ] {
        let mut bad = parts(&[(1, 1000)]);
        for (digest, blob) in &mut bad.blobs {
            if *digest != good.manifest && blob.len() > 1000 {
                change(blob);
            }
        }
        let error = refused(&place, &name(&serving(bad, MANIFEST, document.clone())), &few());
        assert!(
            matches!(
                error,
                Error::WrongSize { .. } | Error::Broken { .. } | Error::WrongDigest { .. }
            ),
            "{error}"
        );
    }
}
