//! Downloads: blobs that are not whole yet, each claimed by one writer at a time, whatever process it is in.
//!
//! ```text
//!            claim: lock taken             finish: length and digest are right
//! nothing ───────────────────▶ DIGEST.part ─────────────────▶ DIGEST ──commit──▶ content/DIGEST
//!                                   │ finish: digest is wrong
//!                                   └──────────▶ nothing
//! ```
//!
//! A writer that dies leaves what it has written, and the next claim goes on from there. Who holds a [`Staged`] blob holds
//! a shared lock on it, so that it is not swept away. Knows nothing of where the bytes come from.

use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use base::points;
use sha2::{Digest as _, Sha256};

use super::{Store, remove_file};
use crate::document::{Descriptor, hex_digest};
use crate::steps::Steps;
use crate::{Error, Limits};

/// An interrupted download is kept this long.
const KEPT: Duration = Duration::from_secs(24 * 3600);
/// And all of them together are no larger than this; the oldest go first.
const KEPT_BYTES: u64 = 8 << 30;

/// What became of a claim to a blob.
#[derive(Debug)]
pub enum Claim {
    /// It is here.
    Whole(Staged),
    /// The caller is to fetch it.
    Mine(Box<Partial>),
    /// Somebody else is fetching it and has come so far: try again soon.
    Busy(u64),
}

/// A whole blob whose digest is right; it stays as long as this lives.
#[derive(Debug)]
pub struct Staged {
    file: File,
}

impl Staged {
    /// The open file, which keeps the blob as well.
    ///
    /// # Errors
    ///
    /// The operating system refuses another descriptor.
    pub fn file(&self) -> Result<File, Error> {
        self.file
            .try_clone()
            .map_err(Error::io("use a file in", Path::new("partial")))
    }

    /// All of a small blob.
    ///
    /// # Errors
    ///
    /// It cannot be read, or is larger than a document may be.
    pub fn contents(&self) -> Result<Vec<u8>, Error> {
        let failed = || Error::io("read", Path::new("partial"));
        let len = self.file.metadata().map_err(failed())?.len();
        Limits::check(|| "the size of a document".to_owned(), len, Limits::default().document)?;
        let mut contents = vec![0; usize::try_from(len).unwrap_or(usize::MAX)];
        self.file.read_exact_at(&mut contents, 0).map_err(failed())?;
        Ok(contents)
    }
}

/// A download that is the caller's.
#[derive(Debug)]
pub struct Partial {
    file: File,
    path: PathBuf,
    whole: PathBuf,
    digest: String,
    size: u64,
    len: u64,
    hash: Sha256,
    steps: Steps,
}

impl Store {
    /// Claims the blob `digest` (`sha256:` and 64 digits) of `size` bytes.
    ///
    /// # Errors
    ///
    /// The digest is no SHA-256, or the disk refuses.
    pub fn claim(&self, digest: &str, size: u64) -> Result<Claim, Error> {
        let hex = hex_digest(digest)?;
        if let Some(file) = self.whole(hex, size)? {
            return Ok(Claim::Whole(Staged { file }));
        }
        let (path, whole) = (self.partial().join(format!("{hex}.part")), self.partial().join(hex));
        let mut options = File::options();
        let opened = options.read(true).append(true).create(true).mode(0o600).open(&path);
        let file = opened.map_err(Error::io("create", &path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let meta = file.metadata().map_err(Error::io("read", &path))?;
                return Ok(Claim::Busy(meta.len().min(size)));
            }
            Err(TryLockError::Error(error)) => return Err(Error::io("lock", &path)(error)),
        }
        // Between open and lock its last owner may have finished or removed it.
        if !same_file(&file, &path) {
            return Ok(Claim::Busy(0));
        }
        if whole.exists() || self.content().join(hex).exists() {
            remove_file(&path)?;
            return Ok(Claim::Busy(size));
        }
        self.steps.at(points::DOWNLOAD_CLAIMED);
        let (len, hash) = hashed(&file).map_err(Error::io("read", &path))?;
        let mut partial = Partial {
            file,
            path,
            whole,
            digest: digest.to_owned(),
            size,
            len,
            hash,
            steps: self.steps.clone(),
        };
        if len > size {
            partial.restart()?;
        }
        Ok(Claim::Mine(Box::new(partial)))
    }

    /// A whole blob of this digest, from an image or a download. One that is damaged is removed.
    fn whole(&self, hex: &str, size: u64) -> Result<Option<File>, Error> {
        for path in [self.content().join(hex), self.partial().join(hex)] {
            let file = match File::open(&path) {
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                opened => opened.map_err(Error::io("open", &path))?,
            };
            file.lock_shared().map_err(Error::io("lock", &path))?;
            let (len, hash) = hashed(&file).map_err(Error::io("read", &path))?;
            if len == size && hex::encode(hash.finalize()) == hex {
                return Ok(Some(file));
            }
            log::warn!("{} is damaged and fetched again", path.display());
            remove_file(&path)?;
        }
        Ok(None)
    }

    /// Bytes of a blob that are not here yet.
    pub fn missing(&self, blob: &Descriptor) -> u64 {
        let hex = blob.digest.trim_start_matches("sha256:");
        if self.has_part(blob) || self.partial().join(hex).exists() {
            return 0;
        }
        let here = fs::metadata(self.partial().join(format!("{hex}.part"))).map_or(0, |meta| meta.len());
        blob.size.saturating_sub(here)
    }

    /// Removes the downloads of these blobs, but for those that somebody else works at.
    ///
    /// # Errors
    ///
    /// The disk refuses.
    pub fn forget<'d>(&self, digests: impl Iterator<Item = &'d str>) -> Result<(), Error> {
        for digest in digests {
            let hex = hex_digest(digest)?;
            for name in [hex.to_owned(), format!("{hex}.part")] {
                remove_unlocked(&self.partial().join(name))?;
            }
        }
        Ok(())
    }

    /// Refuses early what cannot fit: `needed` more bytes.
    ///
    /// # Errors
    ///
    /// [`Error::NoRoom`], or the file system does not tell.
    pub fn check_room(&self, needed: u64) -> Result<(), Error> {
        let path = self.directory.clone();
        let stat =
            rustix::fs::statvfs(&path).map_err(|error| Error::io("ask for the free space of", &path)(error.into()))?;
        let free = stat.f_bavail.saturating_mul(stat.f_frsize);
        if needed > free {
            return Err(Error::NoRoom { needed, free, path });
        }
        Ok(())
    }

    /// Removes downloads that nobody works at and that are old, or too many; their bytes.
    ///
    /// # Errors
    ///
    /// The disk refuses.
    pub fn sweep(&self) -> Result<u64, Error> {
        self.sweep_older(KEPT, KEPT_BYTES)
    }

    pub(super) fn sweep_older(&self, age: Duration, bytes: u64) -> Result<u64, Error> {
        let directory = self.partial();
        let mut found = Vec::new();
        for entry in fs::read_dir(&directory).map_err(Error::io("list", &directory))? {
            let path = entry.map_err(Error::io("list", &directory))?.path();
            // What is gone meanwhile needs no sweeping.
            if let Ok(meta) = fs::metadata(&path) {
                found.push((meta.modified().unwrap_or(SystemTime::UNIX_EPOCH), meta.len(), path));
            }
        }
        found.sort();
        let mut total: u64 = found.iter().map(|(_, len, _)| len).sum();
        let mut freed = 0;
        for (modified, len, path) in found {
            // A time in the future is a clock that has jumped: as good as old.
            let old = modified.elapsed().map_or(true, |elapsed| elapsed >= age);
            if (old || total > bytes) && remove_unlocked(&path)? {
                total -= len;
                freed += len;
            }
        }
        Ok(freed)
    }
}

impl Partial {
    /// `sha256:` and 64 digits.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Whether what is here has the right digest.
    pub fn is_right(&self) -> bool {
        format!("sha256:{}", hex::encode(self.hash.clone().finalize())) == self.digest
    }

    /// How many bytes of it are here.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether all bytes are here.
    pub fn is_complete(&self) -> bool {
        self.len == self.size
    }

    /// Forgets what is here.
    ///
    /// # Errors
    ///
    /// The disk refuses.
    pub fn restart(&mut self) -> Result<(), Error> {
        self.file.set_len(0).map_err(Error::io("empty", &self.path))?;
        (self.len, self.hash) = (0, Sha256::new());
        Ok(())
    }

    /// Takes the next bytes.
    ///
    /// # Errors
    ///
    /// There are more than there should be, or the disk refuses.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let found = self.len + bytes.len() as u64;
        if found > self.size {
            return Err(Error::SizeMismatch {
                what: format!("blob {}", self.digest),
                expected: self.size,
                found,
            });
        }
        (&self.file)
            .write_all(bytes)
            .map_err(Error::io("download to", &self.path))?;
        self.hash.update(bytes);
        self.len = found;
        Ok(())
    }

    /// Checks length and digest, and brings the blob to disk. Of one that is wrong nothing is left.
    ///
    /// # Errors
    ///
    /// It is wrong, or the disk refuses.
    pub fn finish(self) -> Result<Staged, Error> {
        let found = hex::encode(self.hash.clone().finalize());
        if self.len != self.size || format!("sha256:{found}") != self.digest {
            let what = format!("blob {}", self.digest);
            let (expected, len, size) = (self.digest.clone(), self.len, self.size);
            self.discard()?;
            return Err(if len == size {
                Error::DigestMismatch { what, expected, found }
            } else {
                let (expected, found) = (size, len);
                Error::SizeMismatch { what, expected, found }
            });
        }
        let failed = || Error::io("write", &self.whole);
        self.file.sync_all().map_err(failed())?;
        fs::rename(&self.path, &self.whole).map_err(failed())?;
        self.steps.at(points::DOWNLOAD_WHOLE);
        // Others read it from now on; nobody writes.
        self.file.lock_shared().map_err(failed())?;
        let file = File::open(&self.whole).map_err(failed())?;
        file.lock_shared().map_err(failed())?;
        Ok(Staged { file })
    }

    /// Removes it.
    ///
    /// # Errors
    ///
    /// The disk refuses.
    pub fn discard(self) -> Result<(), Error> {
        remove_file(&self.path)
    }
}

/// Length and running hash of what is in the file, from its beginning.
fn hashed(mut file: &File) -> std::io::Result<(u64, Sha256)> {
    use std::io::Seek;
    file.rewind()?;
    let (mut len, mut hash, mut buf) = (0, Sha256::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut buf) {
            Ok(0) => return Ok((len, hash)),
            Ok(got) => {
                hash.update(&buf[..got]);
                len += got as u64;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn same_file(file: &File, path: &Path) -> bool {
    let of = |meta: fs::Metadata| (meta.dev(), meta.ino());
    match (file.metadata(), fs::metadata(path)) {
        (Ok(open), Ok(named)) => of(open) == of(named),
        _ => false,
    }
}

/// Whether it was removed: not while somebody holds its lock.
fn remove_unlocked(path: &Path) -> Result<bool, Error> {
    let Ok(file) = File::open(path) else { return Ok(false) };
    match file.try_lock() {
        Ok(()) => remove_file(path).map(|()| true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(Error::io("lock", path)(error)),
    }
}
