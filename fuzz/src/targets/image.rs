//! Image archives: as they come, and layers wrapped into an archive whose digests are right, since nothing behind a
//! wrong digest is ever read.
//!
//! Knows `docker save`'s outer format; of layers only that they are tar.

use image::{Limits, convert_bytes};
use serde_json::json;
use sha2::{Digest, Sha256};
use tar::{Builder, EntryType, Header};

use crate::run::{Target, outcome};

/// Small, so that an input that asks for much is refused quickly.
fn limits() -> Limits {
    Limits {
        uncompressed: 16 << 20,
        entries: 10_000,
        ..Limits::default()
    }
}

/// A whole archive.
pub(crate) fn archive() -> Target {
    Target {
        name: "image-archive",
        seeds: vec![wrapped(&layer())],
        parse: convert,
    }
}

/// A layer.
pub(crate) fn layers() -> Target {
    Target {
        name: "image-layer",
        seeds: vec![layer(), Vec::new()],
        parse: |input| convert(&wrapped(&with_right_sums(input))),
    }
}

fn convert(archive: &[u8]) -> u64 {
    match convert_bytes(archive, &limits()) {
        // Images that differ in size differ in shape.
        Ok(erofs) => outcome("x".repeat(erofs.len() >> 12)),
        Err(error) => outcome(error),
    }
}

/// Headers' check sums made right again (POSIX.1-2017, pax, ustar interchange format), or every change would only be
/// found to be a wrong sum.
pub(super) fn with_right_sums(layer: &[u8]) -> Vec<u8> {
    const SUM: std::ops::Range<usize> = 148..156;
    let mut layer = layer.to_vec();
    for header in layer.chunks_exact_mut(512).filter(|block| block[257..262] == *b"ustar") {
        header[SUM].fill(b' ');
        let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
        header[SUM].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }
    layer
}

/// One of each: directory, file, links, device, whiteout, extended attribute, long name.
pub(super) fn layer() -> Vec<u8> {
    let mut tar = Builder::new(Vec::new());
    let long = format!("d/{}", "n".repeat(150));
    let entries: [(&str, EntryType, &str, &[u8]); 8] = [
        ("d/", EntryType::Directory, "", b""),
        ("d/file", EntryType::Regular, "", b"contents"),
        ("d/link", EntryType::Symlink, "file", b""),
        ("d/hard", EntryType::Link, "d/file", b""),
        ("d/null", EntryType::Char, "", b""),
        ("d/.wh.gone", EntryType::Regular, "", b""),
        ("d/.wh..wh..opq", EntryType::Regular, "", b""),
        (&long, EntryType::Regular, "", b"x"),
    ];
    let pax = [("SCHILY.xattr.user.a", &b"b"[..]), ("mtime", b"1.5")];
    for (path, kind, link, data) in entries {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(0o644);
        header.set_size(data.len() as u64);
        let added = match kind {
            EntryType::Symlink | EntryType::Link => tar.append_link(&mut header, path, link),
            EntryType::Char => {
                header
                    .set_device_major(1)
                    .and_then(|()| header.set_device_minor(3))
                    .expect("small numbers");
                tar.append_data(&mut header, path, data)
            }
            EntryType::Directory => tar.append_data(&mut header, path, data),
            _ => tar
                .append_pax_extensions(pax)
                .and_then(|()| tar.append_data(&mut header, path, data)),
        };
        added.expect("an entry in memory");
    }
    tar.into_inner().expect("a tar in memory")
}

/// An archive as `docker save` writes it, around one layer.
fn wrapped(layer: &[u8]) -> Vec<u8> {
    let diff_id = format!("sha256:{}", hex::encode(Sha256::digest(layer)));
    let config = json!({
        "architecture": "amd64", "os": "linux", "config": {"Cmd": ["sh"], "Env": ["A=b"]},
        "rootfs": {"type": "layers", "diff_ids": [diff_id]},
    });
    let config = config.to_string();
    let name = format!("{}.json", hex::encode(Sha256::digest(&config)));
    let manifest = json!([{"Config": name, "RepoTags": ["x:latest"], "Layers": ["l/layer.tar"]}]).to_string();
    let mut tar = Builder::new(Vec::new());
    for (path, data) in [
        (name.as_str(), config.as_bytes()),
        ("l/layer.tar", layer),
        ("manifest.json", manifest.as_bytes()),
    ] {
        let mut header = Header::new_gnu();
        header.set_mode(0o644);
        header.set_size(data.len() as u64);
        tar.append_data(&mut header, path, data).expect("an entry in memory");
    }
    tar.into_inner().expect("a tar in memory")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seeds_are_good_images() {
        for seed in [wrapped(&layer()), wrapped(&[0; 1024])] {
            convert_bytes(&seed, &limits()).unwrap();
        }
    }
}
