//! What the tests have in common: images made of noise, stores, options that do not wait long, a record of all log lines.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, Once, PoisonError};
use std::time::Duration;
use std::{fs, io};

use image::{Image, Store};
use registry::{BlobState, Credentials, Error, Location, Options, Progress, Pull, Push};
use serde_json::json;
use sha2::{Digest, Sha256};

/// More than anything that must come takes on a machine that does much else.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);

/// A directory for one test, in which all its things are.
pub(crate) struct Place {
    pub(crate) directory: tempfile::TempDir,
}

impl Place {
    pub(crate) fn new() -> Self {
        record_log();
        Self {
            directory: tempfile::tempdir().unwrap(),
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn store(&self, name: &str) -> Store {
        Store::open(&self.path(name)).unwrap()
    }

    /// A store with an image `x` whose layers have so many bytes.
    pub(crate) fn with_image(&self, name: &str, layers: &[(u64, usize)]) -> (Store, Image) {
        let store = self.store(name);
        let archive = self.path(&format!("{name}.tar"));
        fs::write(&archive, layout(layers)).unwrap();
        let image = store.import(&archive, Some("x"), &mut |_| {}).unwrap();
        (store, image)
    }
}

/// Bytes that do not compress, the same for the same seed (xorshift64).
pub(crate) fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

/// The blobs of an image, and its manifest's digest.
pub(crate) struct Parts {
    pub(crate) blobs: BTreeMap<String, Vec<u8>>,
    pub(crate) manifest: String,
}

impl Parts {
    pub(crate) fn add(&mut self, bytes: Vec<u8>, media_type: &str) -> serde_json::Value {
        let digest = sha256(&bytes);
        let descriptor = json!({"mediaType": media_type, "digest": format!("sha256:{digest}"), "size": bytes.len()});
        self.blobs.insert(digest, bytes);
        descriptor
    }

    /// Adds an image for `architecture` with layers of this media type; its manifest's descriptor.
    pub(crate) fn image(&mut self, layers: &[(u64, usize)], architecture: &str, layer_type: &str) -> serde_json::Value {
        let mut diff_ids = Vec::new();
        let mut descriptors = Vec::new();
        for (seed, len) in layers {
            let layer = layer(*seed, *len);
            diff_ids.push(format!("sha256:{}", sha256(&layer)));
            descriptors.push(self.add(layer, layer_type));
        }
        let config = json!({"architecture": architecture, "os": "linux", "config": {"Cmd": ["sh"]},
                            "rootfs": {"type": "layers", "diff_ids": diff_ids}});
        let config = self.add(config.to_string().into(), "application/vnd.oci.image.config.v1+json");
        let media_type = "application/vnd.oci.image.manifest.v1+json";
        let manifest = json!({"schemaVersion": 2, "mediaType": media_type, "config": config, "layers": descriptors});
        let manifest = self.add(manifest.to_string().into(), media_type);
        self.manifest = manifest["digest"]
            .as_str()
            .unwrap()
            .trim_start_matches("sha256:")
            .to_owned();
        manifest
    }
}

pub(crate) const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

pub(crate) fn parts(layers: &[(u64, usize)]) -> Parts {
    let mut parts = Parts {
        blobs: BTreeMap::new(),
        manifest: String::new(),
    };
    parts.image(layers, "amd64", LAYER);
    parts
}

/// A layer with one file of noise.
fn layer(seed: u64, len: usize) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    append(&mut tar, &format!("file{seed}"), &noise(seed, len)).unwrap();
    tar.into_inner().unwrap()
}

fn append(tar: &mut tar::Builder<Vec<u8>>, name: &str, data: &[u8]) -> io::Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_mode(0o644);
    header.set_size(data.len() as u64);
    tar.append_data(&mut header, name, data)
}

/// An OCI layout in a tar.
fn layout(layers: &[(u64, usize)]) -> Vec<u8> {
    let mut parts = parts(&[]);
    let manifest = parts.image(layers, "amd64", LAYER);
    let index = json!({"schemaVersion": 2, "manifests": [manifest]}).to_string();
    let mut tar = tar::Builder::new(Vec::new());
    append(&mut tar, "oci-layout", b"{}").unwrap();
    append(&mut tar, "index.json", index.as_bytes()).unwrap();
    for (digest, bytes) in &parts.blobs {
        append(&mut tar, &format!("blobs/sha256/{digest}"), bytes).unwrap();
    }
    tar.into_inner().unwrap()
}

/// Options with which a test that should fail does so soon, and one that should not does not because the machine is busy.
pub(crate) fn options() -> Options {
    Options {
        deadline: Duration::from_secs(120),
        certificates: Vec::new(),
        ..Options::default()
    }
}

pub(crate) fn with_credentials(username: &str, password: &str) -> Options {
    let mut options = options();
    options.registry.credentials = Some(Credentials::basic_of(username, password));
    options
}

pub(crate) fn location(text: &str) -> Location {
    text.parse().unwrap()
}

pub(crate) fn pull(store: &Store, from: &str, options: &Options) -> Result<Pull, Error> {
    registry::pull(store, &location(from), options, &|_| {})
}

pub(crate) fn push(store: &Store, to: &str, options: &Options) -> Result<Push, Error> {
    registry::push(store, "x", &location(to), options, &|_| {})
}

/// The error of a pull that must fail, which must be one sentence with a next step, and leave the store empty.
pub(crate) fn refused(place: &Place, from: &str, options: &Options) -> Error {
    let store = place.store("refused");
    let error = pull(&store, from, options).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains(": ") && text.len() < 400 && !text.contains('\n'),
        "{text}"
    );
    assert_eq!(store.list().unwrap().images.len(), 0);
    for directory in ["blobs", "content", "tmp"] {
        assert_eq!(
            names_in(&place.path("refused").join(directory)).len(),
            0,
            "{directory} after {text}"
        );
    }
    error
}

pub(crate) fn names_in(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

/// How the steps of each blob ended, and that none went backwards within one attempt's reports.
pub(crate) fn last_states(steps: &[Progress]) -> BTreeMap<String, (BlobState, u64, u64)> {
    let mut last = BTreeMap::new();
    for step in steps {
        if let Progress::Blob {
            digest,
            state,
            done,
            total,
        } = step
        {
            assert!(done <= total);
            last.insert(digest.clone(), (*state, *done, *total));
        }
    }
    last
}

static LOG: Mutex<String> = Mutex::new(String::new());
static RECORDING: Once = Once::new();

struct Recorder;

impl log::Log for Recorder {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let mut log = LOG.lock().unwrap_or_else(PoisonError::into_inner);
        log.push_str(&format!("{} {}\n", record.target(), record.args()));
    }

    fn flush(&self) {}
}

/// From now on everything that anybody logs, at any level, is kept.
fn record_log() {
    RECORDING.call_once(|| {
        log::set_logger(&Recorder).unwrap();
        log::set_max_level(log::LevelFilter::Trace);
    });
}

/// All that was logged.
pub(crate) fn logged() -> String {
    LOG.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Writes until nothing fits any more.
pub(crate) fn fill(path: &Path) {
    let mut file = fs::File::create(path).unwrap();
    for size in [1 << 16, 1 << 12, 1] {
        while file.write_all(&vec![1; size]).is_ok() {}
    }
}
