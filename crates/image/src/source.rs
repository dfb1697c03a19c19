//! What the user names, as documents and blobs by name: an OCI image layout directory, or a tar (possibly compressed)
//! with an OCI image layout or a docker-archive in it. Knows the containers, not what the documents say.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use crate::file::Temp;
use crate::stop::Stop;
use crate::stream::{Compression, FilePart, Stream, Unpacked};
use crate::tar::{Kind, Reader};
use crate::{Error, Limits};

/// Files that an archive may have: each layer is one or three.
const MAX_FILES: u64 = 4096;
/// An archive's symbolic links to other files of it (`docker save` of old has them for repeated layers).
const MAX_LINKS: usize = 8;

/// An opened image.
#[derive(Debug)]
pub(crate) struct Source {
    path: PathBuf,
    files: Files,
    limits: Limits,
    stop: Stop,
}

#[derive(Debug)]
enum Files {
    Directory,
    Archive {
        file: File,
        members: HashMap<String, Member>,
    },
    /// Files that are open already, and documents in memory.
    Parts {
        documents: HashMap<String, Vec<u8>>,
        blobs: HashMap<String, File>,
    },
}

#[derive(Debug, Clone)]
enum Member {
    File { start: u64, len: u64 },
    Link(String),
}

/// One file of an image.
#[derive(Debug)]
pub(crate) struct Blob {
    pub(crate) name: String,
    pub(crate) len: u64,
    file: File,
    start: u64,
}

impl Blob {
    /// Its bytes as they are stored.
    pub(crate) fn part(&self) -> FilePart<'_> {
        FilePart::new(&self.file, self.name.clone(), self.start, self.len)
    }

    /// Its SHA-256. `progress` gets the number of bytes of each step.
    pub(crate) fn sha256(&self, progress: &mut dyn FnMut(u64)) -> Result<[u8; 32], Error> {
        let (mut part, mut hash, mut buf) = (self.part(), Sha256::new(), vec![0; 1 << 20]);
        loop {
            let got = part.fill(&mut buf)?;
            hash.update(&buf[..got]);
            progress(got as u64);
            if got < buf.len() {
                return Ok(hash.finalize().into());
            }
        }
    }

    /// How it is compressed, by its first bytes.
    pub(crate) fn compression(&self) -> Result<Compression, Error> {
        let mut head = [0; 8];
        let got = self.part().fill(&mut head)?;
        Compression::sniff(&head[..got]).map_err(|media_type| Error::UnsupportedMediaType {
            what: self.name.clone(),
            media_type: media_type.to_owned(),
        })
    }
}

impl Source {
    /// Opens `path`. A compressed archive is decompressed into an unnamed file in `temporary`.
    pub(crate) fn open(path: &Path, temporary: &Path, limits: &Limits) -> Result<Self, Error> {
        let unopened = |cause| Error::NoSource {
            path: path.to_owned(),
            cause,
        };
        let meta = fs::metadata(path).map_err(unopened)?;
        if meta.is_dir() {
            let source = Self {
                path: path.to_owned(),
                files: Files::Directory,
                limits: *limits,
                stop: Stop::default(),
            };
            return if source.has("oci-layout") && source.has("index.json") {
                Ok(source)
            } else {
                Err(not_an_image(path))
            };
        }
        let file = File::open(path).map_err(unopened)?;
        if !meta.is_file() {
            return Err(not_an_image(path));
        }
        Self::archive(file, path, Some(temporary), limits)
    }

    /// An archive that is open already. Without `temporary` it must not be compressed.
    pub(crate) fn archive(file: File, path: &Path, temporary: Option<&Path>, limits: &Limits) -> Result<Self, Error> {
        let len = file.metadata().map_err(Error::io("read", path))?.len();
        let whole = Blob {
            name: path.display().to_string(),
            len,
            file,
            start: 0,
        };
        let file = match (whole.compression()?, temporary) {
            (Compression::None, _) => whole.file,
            (compression, Some(temporary)) => decompressed(&whole, compression, temporary, limits)?,
            (_, None) => return Err(not_an_image(path)),
        };
        let members = members(&file, path)?;
        let source = Self {
            path: path.to_owned(),
            files: Files::Archive { file, members },
            limits: *limits,
            stop: Stop::default(),
        };
        if source.has("index.json") || source.has("manifest.json") {
            Ok(source)
        } else {
            Err(not_an_image(path))
        }
    }

    /// An image whose parts somebody else has gathered, under the names that they have in a layout. `path` is for messages.
    pub(crate) fn parts(
        documents: HashMap<String, Vec<u8>>,
        blobs: HashMap<String, File>,
        path: &Path,
        limits: &Limits,
    ) -> Self {
        Self {
            path: path.to_owned(),
            files: Files::Parts { documents, blobs },
            limits: *limits,
            stop: Stop::default(),
        }
    }

    /// The same, but what is made of it ends when `stop` says so.
    pub(crate) fn until(mut self, stop: &Stop) -> Self {
        self.stop = stop.clone();
        self
    }

    pub(crate) fn stop(&self) -> &Stop {
        &self.stop
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        match &self.files {
            Files::Directory => self.path.join(name).is_file(),
            Files::Archive { members, .. } => find(members, name).is_some(),
            Files::Parts { documents, blobs } => documents.contains_key(name) || blobs.contains_key(name),
        }
    }

    /// The file `name`, which (of a directory) must be a name that we made, not one that a document contains.
    pub(crate) fn blob(&self, name: &str) -> Result<Blob, Error> {
        let missing = || Error::MissingBlob { name: name.to_owned() };
        let (file, start, len) = match &self.files {
            Files::Directory => {
                let path = self.path.join(name);
                let file = match File::open(&path) {
                    Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Err(missing()),
                    opened => opened.map_err(Error::io("open", &path))?,
                };
                let meta = file.metadata().map_err(Error::io("read", &path))?;
                if !meta.is_file() {
                    return Err(missing());
                }
                (file, 0, meta.len())
            }
            Files::Archive { file, members } => {
                let (start, len) = find(members, name).ok_or_else(missing)?;
                (file.try_clone().map_err(Error::io("read", &self.path))?, start, len)
            }
            Files::Parts { blobs, .. } => {
                let file = blobs.get(name).ok_or_else(missing)?.try_clone();
                let file = file.map_err(Error::io("read", &self.path))?;
                let len = file.metadata().map_err(Error::io("read", &self.path))?.len();
                (file, 0, len)
            }
        };
        Ok(Blob {
            name: name.to_owned(),
            len,
            file,
            start,
        })
    }

    /// The whole of a small file.
    pub(crate) fn document(&self, name: &str) -> Result<Vec<u8>, Error> {
        if let Files::Parts { documents, .. } = &self.files
            && let Some(document) = documents.get(name)
        {
            return Ok(document.clone());
        }
        let blob = self.blob(name)?;
        Limits::check(|| format!("the size of {name}"), blob.len, self.limits.document)?;
        let mut contents = vec![0; usize::try_from(blob.len).unwrap_or(usize::MAX)];
        blob.part().exact(&mut contents)?;
        Ok(contents)
    }
}

fn not_an_image(path: &Path) -> Error {
    Error::NotAnImage { path: path.to_owned() }
}

fn decompressed(whole: &Blob, compression: Compression, temporary: &Path, limits: &Limits) -> Result<File, Error> {
    let temp = Temp::new(temporary)?.into_unnamed()?;
    let decoder = compression.decoder(whole.part());
    let mut unpacked = Unpacked::new(decoder, whole.name.clone(), 0, limits.uncompressed);
    let mut buf = vec![0; 1 << 20];
    loop {
        let got = unpacked.fill(&mut buf)?;
        (&temp)
            .write_all(&buf[..got])
            .map_err(Error::io("unpack the archive", temporary))?;
        if got < buf.len() {
            return Ok(temp);
        }
    }
}

/// Where each file of the archive is. What begins like no tar is not an image rather than a damaged one.
fn members(file: &File, path: &Path) -> Result<HashMap<String, Member>, Error> {
    let len = file.metadata().map_err(Error::io("read", path))?.len();
    let mut stream = FilePart::new(file, path.display().to_string(), 0, len);
    // The limits are for what is in the image, not for the archive that it comes in.
    let limits = Limits::default();
    let mut reader = Reader::new(&mut stream, &limits);
    let mut members = HashMap::new();
    let mut count = 0;
    loop {
        let entry = match reader.next() {
            Ok(Some(entry)) => entry,
            Ok(None) => return Ok(members),
            Err(Error::BadTar { at: 0, .. } | Error::Truncated { at: 0..512, .. }) => return Err(not_an_image(path)),
            Err(error) => return Err(error),
        };
        count += 1;
        Limits::check(
            || format!("the number of files in {}", path.display()),
            count,
            MAX_FILES,
        )?;
        let Some(name) = normal(&entry.path) else { continue };
        match entry.kind {
            Kind::File => {
                let start = reader.position();
                members.insert(name, Member::File { start, len: entry.size });
            }
            Kind::Symlink | Kind::HardLink => {
                let beside = name.rsplit_once('/').map_or("", |(directory, _)| directory);
                let base = if entry.kind == Kind::Symlink { beside } else { "" };
                if let Some(target) = normal(&[base.as_bytes(), b"/", &entry.link].concat()) {
                    members.insert(name, Member::Link(target));
                }
            }
            _ => {}
        }
    }
}

fn find(members: &HashMap<String, Member>, name: &str) -> Option<(u64, u64)> {
    let mut name = name.to_owned();
    for _ in 0..=MAX_LINKS {
        match members.get(&name)? {
            Member::File { start, len } => return Some((*start, *len)),
            Member::Link(target) => name.clone_from(target),
        }
    }
    None
}

/// A path without `.`, `..` and repeated slashes. Archives of images have no other than UTF-8 names.
fn normal(path: &[u8]) -> Option<String> {
    let mut components = Vec::new();
    for component in std::str::from_utf8(path).ok()?.split('/') {
        match component {
            "" | "." => {}
            ".." => {
                components.pop()?;
            }
            other => components.push(other),
        }
    }
    Some(components.join("/"))
}
