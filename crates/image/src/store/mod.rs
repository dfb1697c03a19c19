//! Images on this machine, each once by digest, and their names.
//!
//! ```text
//! blobs/DIGEST.erofs   the image; whole and on disk before it has this name
//! blobs/DIGEST.json    what the image says of itself; an image without this file was never finished
//! content/DIGEST       manifest, config and compressed layers as they came, so that an image can be sent on unchanged
//! partial/DIGEST.part  a download; whoever writes to it holds its lock (flock)
//! partial/DIGEST       a download that is whole and checked, until its image is complete
//! names.json           name to digest
//! lock                 held (flock) by whoever changes anything here but in partial/
//! tmp/                 files on their way; what an interrupted import left is removed by the next one that opens
//! ```
//!
//! Readers take no lock: everything they read appears and is replaced by one rename. The store knows nothing of VMs;
//! an image that is in use may be removed, its users keep the open file.

mod bring;
mod content;
mod save;
mod staging;
mod usage;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use base::points;
use serde::{Deserialize, Serialize};

use crate::erofs::ondisk::{self, BLOCK};
use crate::file::{self, Temp};
use crate::import::{Progress, convert, spool};
use crate::manifest::{ImageConfig, Selected, select};
use crate::source::Source;
use crate::steps::Steps;
use crate::stop::Stop;
use crate::{Error, Limits, Reference};

use content::Content;
pub use content::Pulled;
pub use save::{Export, Part};
pub use staging::{Claim, Partial, Staged};
pub use usage::{Footprint, Prune, Pruned, Usage};

/// Between two looks at a lock that somebody else holds.
const TICK: Duration = Duration::from_millis(20);

/// A stored image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// Of its OCI manifest (of a docker-archive: of its config), 64 hexadecimal digits of SHA-256.
    pub digest: String,
    /// The erofs image.
    pub path: PathBuf,
    /// Its names, e.g. `localhost/python:latest`; sorted.
    pub names: Vec<String>,
    /// Bytes of the erofs image.
    pub size: u64,
    /// When it was built, as it says itself (RFC 3339).
    pub created: Option<String>,
    /// The diff_id of each layer, the base's first, in hexadecimal.
    pub layers: Vec<String>,
    /// How it wants to be run.
    pub config: ImageConfig,
}

/// What is in a store.
#[derive(Debug)]
pub struct Listing {
    /// Whole, by name.
    pub images: Vec<Image>,
    /// What cannot be read, by digest: each error says what to do.
    pub damaged: Vec<Error>,
}

/// `DIGEST.json`.
#[derive(Debug, Serialize, Deserialize)]
struct Metadata {
    size: u64,
    created: Option<String>,
    layers: Vec<String>,
    config: ImageConfig,
    /// What it came as. An image that was brought here already converted (as into the lab) has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    content: Option<Content>,
}

type Names = BTreeMap<String, String>;

/// The images below one directory.
#[derive(Debug)]
pub struct Store {
    directory: PathBuf,
    limits: Limits,
    stop: Stop,
    steps: Steps,
}

/// Released when dropped.
struct Lock(#[expect(dead_code, reason = "the lock is the open file")] File);

impl Store {
    /// Opens the store in `directory`, which is made if it does not exist, and removes what interrupted imports left.
    ///
    /// # Errors
    ///
    /// The directory cannot be made or written to.
    pub fn open(directory: &Path) -> Result<Self, Error> {
        Self::open_with(directory, Limits::default())
    }

    /// The same with other limits.
    ///
    /// # Errors
    ///
    /// The directory cannot be made or written to.
    pub fn open_with(directory: &Path, limits: Limits) -> Result<Self, Error> {
        let store = Self {
            directory: directory.to_owned(),
            limits,
            stop: Stop::default(),
            steps: Steps::default(),
        };
        for directory in [store.blobs(), store.temporary(), store.content(), store.partial()] {
            let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&directory);
            made.map_err(Error::io("create", &directory))?;
        }
        let path = store.directory.join("lock");
        let file = lock_file(&path)?;
        match file.try_lock() {
            Ok(()) => store.clean()?,
            // An import is running: it cleans up after itself.
            Err(fs::TryLockError::WouldBlock) => {}
            Err(fs::TryLockError::Error(error)) => return Err(Error::io("lock", &path)(error)),
        }
        Ok(store)
    }

    /// The same store, whose operations end with [`Error::Stopped`] soon after `stop` has begun to say so, also while they
    /// wait for others.
    #[must_use]
    pub fn until(&self, stop: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self {
            directory: self.directory.clone(),
            limits: self.limits,
            stop: Stop::when(stop),
            steps: self.steps.clone(),
        }
    }

    /// The same store, which tells of each of [`IMAGE`](base::points::IMAGE) when it comes to it.
    #[must_use]
    pub fn telling(&self, to: impl Fn(&'static str) + Send + Sync + 'static) -> Self {
        Self {
            directory: self.directory.clone(),
            limits: self.limits,
            stop: self.stop.clone(),
            steps: Steps::told(to),
        }
    }

    /// Imports the linux/amd64 image at `path`: an OCI image layout (directory or tar) or a docker-archive. It gets
    /// `name`, else the name that it brings, else its file's. What is stored already is not stored again. Waits for
    /// imports of other processes.
    ///
    /// # Errors
    ///
    /// What is wrong with the image, its name, or the disk; then nothing is left behind.
    pub fn import(&self, path: &Path, name: Option<&str>, progress: &mut dyn FnMut(Progress)) -> Result<Image, Error> {
        let name = name.map(str::parse::<Reference>).transpose()?;
        let _lock = self.lock()?;
        let temporary = self.temporary();
        let source = Source::open(path, &temporary, &self.limits)?.until(&self.stop);
        let selected = select(&source)?;
        self.adopt(&source, &selected, progress)?;
        let mut names = self.names()?;
        if let Some(name) = name.or_else(|| default_name(&selected, path)) {
            names.insert(name.to_string(), selected.digest.clone());
            self.set_names(&names)?;
            self.steps.at(points::IMAGE_NAMED);
        }
        self.load(&selected.digest, &names)
    }

    /// Makes the image that is selected one of this store, unless it is. The lock is held.
    fn adopt(&self, source: &Source, selected: &Selected, progress: &mut dyn FnMut(Progress)) -> Result<(), Error> {
        let known = self.load(&selected.digest, &Names::new());
        if known.and_then(|image| verify(&image)).is_err() {
            return self.convert(source, selected, progress);
        }
        let (_, json) = self.paths(&selected.digest);
        let mut metadata = read_metadata(&json)?;
        let whole = metadata
            .content
            .as_ref()
            .is_some_and(|content| self.has_content(content));
        if !whole {
            metadata.content = Some(self.keep(source, selected)?);
            self.write_json(&json, &metadata)?;
        }
        Ok(())
    }

    fn convert(&self, source: &Source, selected: &Selected, progress: &mut dyn FnMut(Progress)) -> Result<(), Error> {
        let temporary = self.temporary();
        let (path, json) = self.paths(&selected.digest);
        let image = Temp::new(&temporary)?;
        let size = convert(source, selected, spool(&temporary)?, (image.file(), &path), progress)?;
        image.persist(&path)?;
        self.steps.at(points::IMAGE_CONVERTED);
        let finished = self.keep(source, selected).and_then(|content| {
            self.steps.at(points::IMAGE_KEPT);
            let metadata = Metadata {
                size,
                created: selected.created.clone(),
                layers: selected.layers.iter().map(|layer| layer.diff_id.clone()).collect(),
                config: selected.config.clone(),
                content: Some(content),
            };
            self.write_json(&json, &metadata)
        });
        if finished.is_err() {
            // Without metadata it would be removed only by the next who opens the store.
            self.collect()?;
            remove_file(&path)?;
        } else {
            self.steps.at(points::IMAGE_RECORDED);
        }
        finished
    }

    /// All images. One that is damaged does not hide the others.
    ///
    /// # Errors
    ///
    /// The store itself cannot be read.
    pub fn list(&self) -> Result<Listing, Error> {
        let names = self.names()?;
        let (mut images, mut damaged) = (Vec::new(), Vec::new());
        for digest in self.digests()? {
            match self.load(&digest, &names) {
                Ok(image) => images.push(image),
                // Removed meanwhile.
                Err(Error::NoSuchImage { .. }) => {}
                Err(error) => damaged.push(error),
            }
        }
        images.sort_by(|a, b| (&a.names, &a.digest).cmp(&(&b.names, &b.digest)));
        Ok(Listing { images, damaged })
    }

    /// The image that `reference` means: a name, short or whole, or a digest or the beginning of one.
    ///
    /// # Errors
    ///
    /// There is none, several match, or the stored file is damaged.
    pub fn get(&self, reference: &str) -> Result<Image, Error> {
        let names = self.names()?;
        let image = self.load(&self.resolve(reference, &names)?, &names)?;
        verify(&image)?;
        Ok(image)
    }

    /// Gives the image `reference` the name `name` as well; an image that had this name loses it.
    ///
    /// # Errors
    ///
    /// There is no such image, several match, or `name` is no name.
    pub fn tag(&self, reference: &str, name: &str) -> Result<Image, Error> {
        let name = name.parse::<Reference>()?;
        let _lock = self.lock()?;
        let mut names = self.names()?;
        let digest = self.resolve(reference, &names)?;
        self.load(&digest, &names)?;
        names.insert(name.to_string(), digest.clone());
        self.set_names(&names)?;
        self.load(&digest, &names)
    }

    /// Removes the name `reference`, and the image itself with its last name. By digest, removes the image and all its
    /// names. Returns its digest. A damaged image can be removed, too: nothing of it is read.
    ///
    /// # Errors
    ///
    /// There is none, several match, or the disk refuses.
    pub fn remove(&self, reference: &str) -> Result<String, Error> {
        self.remove_unless(reference, &BTreeSet::new())
    }

    /// The same, but an image whose digest is in `in_use` stays, and so does its last name.
    ///
    /// # Errors
    ///
    /// As before; [`Error::InUse`].
    pub fn remove_unless(&self, reference: &str, in_use: &BTreeSet<String>) -> Result<String, Error> {
        let _lock = self.lock()?;
        let mut names = self.names()?;
        let digest = self.resolve(reference, &names)?;
        match named(reference, &names)? {
            Some(name) => {
                names.remove(&name);
            }
            None => names.retain(|_, named| *named != digest),
        }
        let last = !names.values().any(|named| *named == digest);
        if last && in_use.contains(&digest) {
            return Err(Error::InUse {
                reference: reference.to_owned(),
            });
        }
        self.set_names(&names)?;
        if last {
            self.steps.at(points::IMAGE_UNNAMED);
            self.remove_metadata(&digest)?;
            self.steps.at(points::IMAGE_FORGOTTEN);
            self.collect()?;
            self.remove_orphan(&digest)?;
            self.steps.at(points::IMAGE_REMOVED);
        }
        Ok(digest)
    }

    /// Removes an image's metadata. The image without them tells whoever opens the store that there is more to remove, so
    /// it goes last, by [`Self::remove_orphan`].
    fn remove_metadata(&self, digest: &str) -> Result<(), Error> {
        remove_file(&self.paths(digest).1)
    }

    fn remove_orphan(&self, digest: &str) -> Result<(), Error> {
        remove_file(&self.paths(digest).0)
    }

    fn resolve(&self, reference: &str, names: &Names) -> Result<String, Error> {
        const SHORTEST: usize = 6;
        if let Some(name) = named(reference, names)? {
            return Ok(names[&name].clone());
        }
        let digits = reference.strip_prefix("sha256:").unwrap_or(reference);
        let mut found = self.digests()?;
        found.retain(|digest| digits.len() >= SHORTEST && digest.starts_with(digits));
        match (found.pop(), found.is_empty()) {
            (Some(digest), true) => Ok(digest),
            (None, _) => Err(Error::NoSuchImage {
                reference: reference.to_owned(),
            }),
            (Some(last), false) => {
                found.push(last);
                Err(Error::Ambiguous {
                    reference: reference.to_owned(),
                    candidates: found.join(", "),
                })
            }
        }
    }

    fn load(&self, digest: &str, names: &Names) -> Result<Image, Error> {
        let (path, json) = self.paths(digest);
        let Metadata {
            size,
            created,
            layers,
            config,
            content: _,
        } = read_metadata(&json)?;
        let names = names
            .iter()
            .filter(|(_, named)| *named == digest)
            .map(|(name, _)| name.clone())
            .collect();
        Ok(Image {
            digest: digest.to_owned(),
            path,
            names,
            size,
            created,
            layers,
            config,
        })
    }

    /// Of all finished images, sorted.
    fn digests(&self) -> Result<Vec<String>, Error> {
        let directory = self.blobs();
        let mut digests = Vec::new();
        for entry in fs::read_dir(&directory).map_err(Error::io("list", &directory))? {
            let name = entry.map_err(Error::io("list", &directory))?.file_name();
            let stem = name.to_str().and_then(|name| name.strip_suffix(".json"));
            // Whatever else has found its way here is no image.
            let is_digest = |stem: &&str| stem.len() == 64 && stem.bytes().all(|byte| byte.is_ascii_hexdigit());
            digests.extend(stem.filter(is_digest).map(str::to_owned));
        }
        digests.sort();
        Ok(digests)
    }

    fn names(&self) -> Result<Names, Error> {
        let path = self.directory.join("names.json");
        match fs::read(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Names::new()),
            read => {
                let text = read.map_err(Error::io("read", &path))?;
                serde_json::from_slice(&text).map_err(|error| Error::CorruptNames {
                    path,
                    problem: error.to_string(),
                })
            }
        }
    }

    fn set_names(&self, names: &Names) -> Result<(), Error> {
        self.write_json(&self.directory.join("names.json"), names)
    }

    fn write_json(&self, path: &Path, value: &impl Serialize) -> Result<(), Error> {
        let mut text = serde_json::to_vec_pretty(value).map_err(|source| Error::BadJson {
            document: path.display().to_string(),
            source,
        })?;
        text.push(b'\n');
        file::replace(path, &text, &self.temporary())
    }

    /// What a crash left: files on their way, and images whose metadata were not written or are removed already, with
    /// what they came as.
    fn clean(&self) -> Result<(), Error> {
        let is_orphan = |path: &PathBuf| {
            path.extension().is_some_and(|kind| kind == "erofs") && !path.with_extension("json").exists()
        };
        let mut orphans = entries(&self.blobs())?;
        orphans.retain(is_orphan);
        if !orphans.is_empty() {
            self.collect()?;
        }
        for path in entries(&self.temporary())?.iter().chain(&orphans) {
            remove_file(path)?;
        }
        Ok(())
    }

    fn lock(&self) -> Result<Lock, Error> {
        let path = self.directory.join("lock");
        let file = lock_file(&path)?;
        if !self.stop.is_possible() {
            file.lock().map_err(Error::io("lock", &path))?;
            return Ok(Lock(file));
        }
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Lock(file)),
                Err(fs::TryLockError::WouldBlock) => self.stop.check()?,
                Err(fs::TryLockError::Error(error)) => return Err(Error::io("lock", &path)(error)),
            }
            thread::sleep(TICK);
        }
    }

    fn blobs(&self) -> PathBuf {
        self.directory.join("blobs")
    }

    fn content(&self) -> PathBuf {
        self.directory.join("content")
    }

    fn partial(&self) -> PathBuf {
        self.directory.join("partial")
    }

    fn temporary(&self) -> PathBuf {
        self.directory.join("tmp")
    }

    fn paths(&self, digest: &str) -> (PathBuf, PathBuf) {
        let blobs = self.blobs();
        (
            blobs.join(format!("{digest}.erofs")),
            blobs.join(format!("{digest}.json")),
        )
    }
}

fn read_metadata(json: &Path) -> Result<Metadata, Error> {
    let text = match fs::read(json) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Err(Error::NoSuchImage {
                reference: json.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
            });
        }
        read => read.map_err(Error::io("read", json))?,
    };
    serde_json::from_slice(&text).map_err(|error| Error::CorruptStored {
        path: json.to_owned(),
        problem: error.to_string(),
    })
}

fn lock_file(path: &Path) -> Result<File, Error> {
    File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(path)
        .map_err(Error::io("open", path))
}

/// The paths of what is in a directory.
fn entries(directory: &Path) -> Result<Vec<PathBuf>, Error> {
    let list = Error::io("list", directory);
    fs::read_dir(directory)
        .and_then(|found| found.map(|entry| Ok(entry?.path())).collect())
        .map_err(list)
}

fn remove_file(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(Error::io("remove", path)(error)),
        _ => Ok(()),
    }
}

/// The name that `reference` is, if it is one: the whole name, or the only one of a registry that it is short for.
fn named(reference: &str, names: &Names) -> Result<Option<String>, Error> {
    let Ok(whole) = reference.parse::<Reference>() else {
        return Ok(None);
    };
    if names.contains_key(&whole.to_string()) {
        return Ok(Some(whole.to_string()));
    }
    let means = |name: &&String| name.parse::<Reference>().is_ok_and(|name| name.is_short(&whole));
    let mut matching: Vec<_> = names.keys().filter(means).cloned().collect();
    match matching.len() {
        0 | 1 => Ok(matching.pop()),
        _ => Err(Error::Ambiguous {
            reference: reference.to_owned(),
            candidates: matching.join(", "),
        }),
    }
}

/// A cheap check that the file is what was stored: its length, and its superblock's checksum.
fn verify(image: &Image) -> Result<(), Error> {
    let corrupt = |problem| Error::CorruptStored {
        path: image.path.clone(),
        problem,
    };
    let file = match File::open(&image.path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Err(corrupt("the file is gone".to_owned())),
        opened => opened.map_err(Error::io("open", &image.path))?,
    };
    let len = file.metadata().map_err(Error::io("read", &image.path))?.len();
    if len != image.size {
        return Err(corrupt(format!("{len} bytes instead of {}", image.size)));
    }
    let mut block0 = [0; BLOCK];
    file.read_exact_at(&mut block0, 0)
        .map_err(Error::io("read", &image.path))?;
    let blocks = ondisk::check_superblock(&block0).map_err(corrupt)?;
    if u64::from(blocks) * BLOCK as u64 != len {
        return Err(corrupt(format!(
            "{len} bytes where its superblock says {blocks} blocks"
        )));
    }
    Ok(())
}

/// The name that an image has in its source, if it is more than a tag, or its file's name.
fn default_name(selected: &Selected, path: &Path) -> Option<Reference> {
    let brought = selected.name.as_deref().filter(|name| name.contains([':', '/']));
    if let Some(name) = brought.and_then(|name| name.parse().ok()) {
        return Some(name);
    }
    let path = fs::canonicalize(path).ok()?;
    let name = path.file_name()?.to_str()?.to_ascii_lowercase();
    let stem = [".gz", ".zst", ".tar", ".oci"]
        .iter()
        .fold(name.as_str(), |name, end| name.trim_end_matches(end));
    stem.parse().ok()
}
