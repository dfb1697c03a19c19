//! The verbs for images, and the image that a run is made of. Shows what crate `image` keeps.
//!
//! All of them work on the store itself, whether a daemon runs or not; several at once wait for each other there. Only what is
//! in use is the daemon's to say ([`removal`]).

mod archive;
mod progress;
mod removal;
mod transfer;
mod usage;

use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use base::{ByteSize, Points};
use image::{Image, Phase, Store};
use serde::Serialize;

use crate::bar::Bar;
use crate::cli::{ImportArgs, TagArgs};
use crate::output::{Output, table};
use crate::places;

pub(crate) use archive::{nameless, save};
pub(crate) use progress::Steps;
pub(crate) use removal::{Known, prune, remove};
pub(crate) use transfer::{Way, fetched, pull, push};
pub(crate) use usage::df;

/// A digest's first digits, as tables show it; enough to tell a few thousand images apart.
const SHORT_DIGEST: usize = 12;

/// An image that is to be run.
#[derive(Debug)]
pub(crate) struct Opened(Image);

/// One file of an image in the store.
#[derive(Debug)]
pub(crate) struct StoredFile {
    /// Its name below the store's directory.
    pub(crate) name: String,
    /// Where it is here.
    pub(crate) path: PathBuf,
}

impl Opened {
    /// Its digest, as it can be asked for.
    pub(crate) fn digest(&self) -> String {
        format!("sha256:{}", self.0.digest)
    }

    /// The files that make it an image of a store, in the order in which another store must get them: an image without
    /// metadata would be taken for the rest of an interrupted import.
    pub(crate) fn files(&self) -> [StoredFile; 2] {
        ["json", "erofs"].map(|kind| StoredFile {
            name: format!("blobs/{}.{kind}", self.0.digest),
            path: self.0.path.with_extension(kind),
        })
    }
}

/// An image, for machines.
#[derive(Debug, Serialize)]
struct Listed<'a> {
    names: Vec<&'a str>,
    digest: String,
    size: u64,
    created: Option<&'a str>,
    layers: &'a [String],
    config: &'a image::ImageConfig,
}

impl<'a> From<&'a Image> for Listed<'a> {
    fn from(image: &'a Image) -> Self {
        Self {
            names: image.names.iter().map(|name| short_name(name)).collect(),
            digest: format!("sha256:{}", image.digest),
            size: image.size,
            created: image.created.as_deref(),
            layers: &image.layers,
            config: &image.config,
        }
    }
}

pub(crate) fn store() -> Result<Store> {
    let directory = places::images()?;
    match Store::open(&directory) {
        // Of the reasons for which a store cannot be opened only this one does not say what to do.
        Err(error @ image::Error::Io { .. }) => Err(error).with_context(|| {
            format!(
                "the images in {} cannot be used: become its owner (the group basalt may ask the daemon, and images are \
                 root's), or set BASALT_STATE to a directory of your own",
                directory.display()
            )
        }),
        opened => {
            let points = Points::from_environment();
            Ok(opened?.telling(move |step| points.at(step)))
        }
    }
}

/// Finds the image that `reference` names.
pub(crate) fn open(reference: &str) -> Result<Opened> {
    Ok(Opened(store()?.get(reference)?))
}

/// `basalt images`.
pub(crate) fn list(output: &Output) -> Result<u8> {
    let image::Listing { images, damaged } = store()?.list()?;
    let listed: Vec<Listed<'_>> = images.iter().map(Listed::from).collect();
    output.result(&listed, || {
        let mut rows = vec![["NAME", "DIGEST", "SIZE", "CREATED"].map(str::to_owned).to_vec()];
        rows.extend(images.iter().flat_map(rows_of));
        table(&rows)
    })?;
    // As with podman, what is damaged is no failure of the list.
    for error in damaged {
        output.warning(&error.into());
    }
    Ok(0)
}

/// One row for each name; one for an image that has none.
fn rows_of(image: &Image) -> Vec<Vec<String>> {
    let names = if image.names.is_empty() {
        vec!["<none>"]
    } else {
        image.names.iter().map(|n| short_name(n)).collect()
    };
    // RFC 3339: the first ten characters are the date.
    let created = image
        .created
        .as_deref()
        .and_then(|text| text.get(..10))
        .unwrap_or("unknown");
    let row = |name: &str| {
        vec![
            name.to_owned(),
            short_digest(&image.digest).to_owned(),
            ByteSize(image.size).to_string(),
            created.to_owned(),
        ]
    };
    names.into_iter().map(row).collect()
}

/// Names without a registry are kept under `localhost`; nobody wants to read that.
fn short_name(name: &str) -> &str {
    name.strip_prefix("localhost/").unwrap_or(name)
}

pub(crate) fn short_digest(digest: &str) -> &str {
    let digits = digest.strip_prefix("sha256:").unwrap_or(digest);
    digits.get(..SHORT_DIGEST).unwrap_or(digits)
}

/// An image in one line.
fn line_of(image: &Image) -> String {
    let names: Vec<&str> = image.names.iter().map(|name| short_name(name)).collect();
    let names = if names.is_empty() {
        "<none>".to_owned()
    } else {
        names.join(", ")
    };
    format!("{names}  {}  {}\n", short_digest(&image.digest), ByteSize(image.size))
}

/// `basalt import`.
pub(crate) fn import(args: &ImportArgs, output: &Output) -> Result<u8> {
    let store = store()?;
    let input = (args.path == Path::new("-")).then(archive::spooled_input).transpose()?;
    let path = match &input {
        Some(file) => Path::new("/proc/self/fd").join(file.as_raw_fd().to_string()),
        None => args.path.clone(),
    };
    let mut bar = Bar::new(output);
    let imported = store.import(&path, args.name.as_deref(), &mut |progress| {
        bar.show(phase_name(progress.phase), progress.done, progress.total);
    });
    drop(bar);
    let image = imported?;
    output.result(&Listed::from(&image), || line_of(&image))?;
    Ok(0)
}

/// `basalt tag`.
pub(crate) fn tag(args: &TagArgs, output: &Output) -> Result<u8> {
    let store = store()?;
    let mut image = store.get(&args.image)?;
    // By digest: a name may be taken away from the image by which it was named.
    let digest = image.digest.clone();
    for name in &args.names {
        image = store.tag(&digest, name)?;
    }
    output.result(&Listed::from(&image), || line_of(&image))?;
    Ok(0)
}

fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Reading => "reading layers",
        Phase::Writing => "writing the image",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_digests_are_shown_short() {
        let image = Image {
            digest: "0123456789abcdef".repeat(4),
            path: "/s/blobs/x.erofs".into(),
            names: vec!["localhost/python:latest".into(), "quay.io/a/b:1".into()],
            size: 3 << 20,
            created: Some("2026-01-02T03:04:05Z".into()),
            layers: Vec::new(),
            config: image::ImageConfig::default(),
        };
        let rows = rows_of(&image);
        assert_eq!(rows[0], ["python:latest", "0123456789ab", "3 MiB", "2026-01-02"]);
        assert_eq!(rows[1][0], "quay.io/a/b:1");
        let json = serde_json::to_value(Listed::from(&image)).unwrap();
        assert_eq!(json["names"][0], "python:latest");
        assert_eq!(json["digest"], format!("sha256:{}", "0123456789abcdef".repeat(4)));
        let unnamed = Image {
            names: Vec::new(),
            created: None,
            ..image
        };
        assert_eq!(rows_of(&unnamed)[0], ["<none>", "0123456789ab", "3 MiB", "unknown"]);
        let opened = Opened(unnamed);
        let [first, second] = opened.files();
        assert!(
            first.name.ends_with(".json") && second.path.ends_with("x.erofs"),
            "{first:?} {second:?}"
        );
    }
}
