//! Images made in the test: layers with the `tar` crate (an implementation other than the one under test), documents by
//! hand, and an archive or directory of them, whole or with whatever damage the test wants.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use tar::EntryType;

/// One tar entry; the defaults are a plain file of root's.
#[derive(Debug, Clone)]
pub(crate) struct Spec {
    pub(crate) path: Vec<u8>,
    pub(crate) kind: EntryType,
    pub(crate) mode: u32,
    pub(crate) uid: u64,
    pub(crate) gid: u64,
    pub(crate) mtime: u64,
    pub(crate) data: Vec<u8>,
    pub(crate) link: Vec<u8>,
    pub(crate) device: (u32, u32),
    pub(crate) pax: Vec<(String, Vec<u8>)>,
}

/// A file.
pub(crate) fn file(path: &str, data: &str) -> Spec {
    Spec {
        path: path.into(),
        kind: EntryType::Regular,
        mode: 0o644,
        uid: 0,
        gid: 0,
        mtime: 1_700_000_000,
        data: data.into(),
        link: Vec::new(),
        device: (0, 0),
        pax: Vec::new(),
    }
}

/// A directory.
pub(crate) fn dir(path: &str) -> Spec {
    Spec {
        kind: EntryType::Directory,
        mode: 0o755,
        ..file(path, "")
    }
}

/// A symbolic or hard link.
pub(crate) fn link(kind: EntryType, path: &str, target: &str) -> Spec {
    Spec {
        kind,
        mode: 0o777,
        link: target.into(),
        ..file(path, "")
    }
}

/// A symbolic link.
pub(crate) fn symlink(path: &str, target: &str) -> Spec {
    link(EntryType::Symlink, path, target)
}

/// A hard link.
pub(crate) fn hard_link(path: &str, target: &str) -> Spec {
    link(EntryType::Link, path, target)
}

/// A tar of the entries.
pub(crate) fn layer(specs: &[Spec]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (index, spec) in specs.iter().enumerate() {
        let mut pax = spec.pax.clone();
        let mut header = if index % 2 == 0 {
            tar::Header::new_ustar()
        } else {
            tar::Header::new_gnu()
        };
        header.set_entry_type(spec.kind);
        header.set_mode(spec.mode);
        for (value, key, set) in [
            (spec.uid, "uid", tar::Header::set_uid as fn(&mut tar::Header, u64)),
            (spec.gid, "gid", tar::Header::set_gid),
        ] {
            set(&mut header, value);
            if value >= 1 << 21 {
                pax.push((key.to_owned(), value.to_string().into_bytes()));
            }
        }
        header.set_mtime(spec.mtime);
        header.set_size(spec.data.len() as u64);
        if matches!(spec.kind, EntryType::Char | EntryType::Block) {
            header.set_device_major(spec.device.0).unwrap();
            header.set_device_minor(spec.device.1).unwrap();
        }
        // Names go in as bytes, for the tar crate refuses the bad ones. Half of the long ones are GNU's, half PAX's.
        for (name, long_type, key) in [(&spec.path, b'L', "path"), (&spec.link, b'K', "linkpath")] {
            let field = if key == "path" {
                &mut header.as_old_mut().name
            } else {
                &mut header.as_old_mut().linkname
            };
            let short = name.len().min(100);
            field[..short].copy_from_slice(&name[..short]);
            if name.len() > 100 && index % 2 == 0 {
                pax.push((key.to_owned(), name.clone()));
            } else if name.len() > 100 {
                let mut long = tar::Header::new_gnu();
                long.set_entry_type(EntryType::new(long_type));
                long.set_size(name.len() as u64 + 1);
                long.set_cksum();
                builder.append(&long, &[name, &b"\0"[..]].concat()[..]).unwrap();
            }
        }
        header.set_cksum();
        builder
            .append_pax_extensions(pax.iter().map(|(key, value)| (key.as_str(), &value[..])))
            .unwrap();
        builder.append(&header, &spec.data[..]).unwrap();
    }
    builder.into_inner().unwrap()
}

/// How the test stores a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Store {
    Plain,
    Gzip,
    Zstd,
}

/// Compresses as the layer is to be stored.
pub(crate) fn compressed(data: &[u8], store: Store) -> Vec<u8> {
    match store {
        Store::Plain => data.to_vec(),
        Store::Gzip => {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(data).unwrap();
            encoder.finish().unwrap()
        }
        // Two frames with a skippable one between them, as seekable layers have.
        Store::Zstd => {
            let (first, second) = data.split_at(data.len() / 2);
            let frame = |part| ruzstd::encoding::compress_to_vec(part, ruzstd::encoding::CompressionLevel::Fastest);
            let skippable = [0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, b'a', b'b', b'c'];
            [&frame(first)[..], &skippable, &frame(second)[..]].concat()
        }
    }
}

/// The files of an OCI layout or docker-archive by name.
#[derive(Debug, Clone, Default)]
pub(crate) struct Files(pub(crate) BTreeMap<String, Vec<u8>>);

/// SHA-256 in hexadecimal.
pub(crate) fn sha256(data: &[u8]) -> String {
    hex::encode(Sha256::digest(data))
}

/// A config object.
pub(crate) fn config(layers: &[Vec<u8>], architecture: &str) -> String {
    let diff_ids: Vec<_> = layers
        .iter()
        .map(|layer| format!("\"sha256:{}\"", sha256(layer)))
        .collect();
    format!(
        r#"{{"architecture":"{architecture}","os":"linux","created":"2024-01-02T03:04:05Z","config":{{
        "Entrypoint":["/bin/entry","-x"],"Cmd":["serve"],"Env":["A=b","PATH=/bin"],"User":"7:8","WorkingDir":"/srv",
        "ExposedPorts":{{"80/tcp":{{}}}},"Volumes":null,"StopSignal":"SIGINT","Labels":{{"k":"v"}}}},
        "rootfs":{{"type":"layers","diff_ids":[{}]}}}}"#,
        diff_ids.join(",")
    )
}

impl Files {
    /// An OCI layout with one image.
    pub(crate) fn oci(layers: &[Vec<u8>], stores: &[Store]) -> Self {
        let mut files = Self::default();
        let manifest = files.add_manifest(layers, stores, "amd64");
        files.set_index(&[manifest]);
        files
    }

    fn add(&mut self, contents: Vec<u8>, media_type: &str) -> String {
        let (digest, size) = (sha256(&contents), contents.len());
        self.0.insert(format!("blobs/sha256/{digest}"), contents);
        format!(r#"{{"mediaType":"{media_type}","digest":"sha256:{digest}","size":{size}}}"#)
    }

    /// Adds an image; its descriptor.
    pub(crate) fn add_manifest(&mut self, layers: &[Vec<u8>], stores: &[Store], architecture: &str) -> String {
        let mut descriptors = Vec::new();
        for (layer, store) in layers.iter().zip(stores.iter().cycle()) {
            let suffix = match store {
                Store::Plain => "",
                Store::Gzip => "+gzip",
                Store::Zstd => "+zstd",
            };
            let media_type = format!("application/vnd.oci.image.layer.v1.tar{suffix}");
            descriptors.push(self.add(compressed(layer, *store), &media_type));
        }
        let config = self.add(
            config(layers, architecture).into(),
            "application/vnd.oci.image.config.v1+json",
        );
        let manifest = format!(
            r#"{{"schemaVersion":2,"config":{config},"layers":[{}]}}"#,
            descriptors.join(",")
        );
        let descriptor = self.add(manifest.into_bytes(), "application/vnd.oci.image.manifest.v1+json");
        let platform = format!(r#","platform":{{"os":"linux","architecture":"{architecture}"}}}}"#);
        descriptor.trim_end_matches('}').to_owned() + &platform
    }

    /// Writes the index.
    pub(crate) fn set_index(&mut self, manifests: &[String]) {
        let index = format!(r#"{{"schemaVersion":2,"manifests":[{}]}}"#, manifests.join(","));
        self.0.insert("index.json".to_owned(), index.into_bytes());
        self.0
            .insert("oci-layout".to_owned(), br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec());
    }

    /// What `docker save` of old made.
    pub(crate) fn docker(layers: &[Vec<u8>], stores: &[Store], tag: &str) -> Self {
        let mut files = Self::default();
        let config = config(layers, "amd64");
        let config_name = format!("{}.json", sha256(config.as_bytes()));
        files.0.insert(config_name.clone(), config.into_bytes());
        let mut names = Vec::new();
        for (index, (layer, store)) in layers.iter().zip(stores.iter().cycle()).enumerate() {
            let name = format!("layer{index}/layer.tar");
            files.0.insert(name.clone(), compressed(layer, *store));
            names.push(format!("\"{name}\""));
        }
        let manifest = format!(
            r#"[{{"Config":"{config_name}","RepoTags":["{tag}"],"Layers":[{}]}}]"#,
            names.join(",")
        );
        files.0.insert("manifest.json".to_owned(), manifest.into_bytes());
        files
    }

    /// Replaces text in the documents `name` matches, without repairing any digest.
    pub(crate) fn edit(&mut self, from: &str, to: &str) {
        let mut edited = 0;
        for contents in self.0.values_mut() {
            if let Ok(text) = std::str::from_utf8(contents)
                && text.starts_with(['{', '['])
                && text.contains(from)
            {
                *contents = text.replace(from, to).into_bytes();
                edited += 1;
            }
        }
        assert!(edited > 0, "{from:?} is in no document");
    }

    /// Name of the largest blob: in these tests a layer's.
    pub(crate) fn largest(&self) -> String {
        self.0
            .iter()
            .max_by_key(|(_, contents)| contents.len())
            .unwrap()
            .0
            .clone()
    }

    /// As a directory.
    pub(crate) fn to_dir(&self, directory: &Path) -> PathBuf {
        for (name, contents) in &self.0 {
            let path = directory.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, contents).unwrap();
        }
        directory.to_owned()
    }

    /// As a tar.
    pub(crate) fn to_tar(&self) -> Vec<u8> {
        let specs: Vec<_> = self
            .0
            .iter()
            .map(|(name, data)| Spec {
                data: data.clone(),
                ..file(name, "")
            })
            .collect();
        layer(&specs)
    }
}
