//! Archives that tenants upload to have them copied into templates: kept by tenant and by the hash that their client has computed, in the
//! gateway's state directory. A hash is a name: what is in an archive nobody compares with it, and no tenant gets another's. Does not look
//! into archives.
//!
//! ```text
//!  DIRECTORY/TENANT/HASH          an archive; the store has a row for it
//!  DIRECTORY/TENANT/.NUMBER.part  one that is coming
//! ```

use std::collections::{HashMap, HashSet};
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use axum::body::Body;
use control::StoredFile;
use futures_util::StreamExt;
use tokio::io::AsyncWriteExt;

use super::BuildsConfig;
use crate::Error;
use crate::error::with_causes;
use crate::locks::Locks;
use crate::store::Store;
use crate::time_text;

/// A body of which nothing comes for so long is given up.
const SILENCE: Duration = Duration::from_secs(120);

/// Uploads of a tenant at once.
const AT_ONCE: usize = 4;

/// The most uploads of a tenant; empty ones take space too.
const MOST: u64 = 1000;

/// Tenants and hashes of uploads that must stay.
pub(crate) type Needed = HashSet<(String, String)>;

/// One that was of no use for so long goes; and where a tenant has no space left one that was not for so long.
const KEPT: u64 = 7 * 24 * 3600;
const NEEDED: u64 = 3600;

/// The name of one that is coming.
const PART: &str = ".part";

/// Checks what somebody calls a hash.
pub(crate) fn check_hash(text: &str) -> Result<(), Error> {
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    match text.len() == 64 && text.bytes().all(is_digit) {
        true => Ok(()),
        false => Err(Error::invalid("a hash of files has 64 hexadecimal digits")),
    }
}

/// The uploads.
pub(crate) struct Files {
    directory: PathBuf,
    /// The most bytes of one, and of all of a tenant.
    most: u64,
    quota: u64,
    /// How long one may wait until it is taken, and take then.
    turn: Duration,
    limit: Duration,
    store: Store,
    /// How many are coming, and bytes of them, by tenant.
    coming: Mutex<HashMap<String, (u64, u64)>>,
    turns: Locks,
}

/// Opens uploads of one tenant.
pub(crate) struct Opener(PathBuf);

impl Opener {
    /// Opens one.
    pub(crate) fn open(&self, hash: &str) -> io::Result<File> {
        File::open(self.0.join(hash))
    }
}

/// Bytes that are promised to an upload.
struct Promise<'f> {
    files: &'f Files,
    tenant: &'f str,
    bytes: u64,
}

impl Drop for Promise<'_> {
    fn drop(&mut self) {
        let mut coming = self.files.coming.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((count, bytes)) = coming.get_mut(self.tenant) {
            *bytes = bytes.saturating_sub(self.bytes);
            *count = count.saturating_sub(1);
            if *count == 0 {
                coming.remove(self.tenant);
            }
        }
    }
}

/// A file that goes unless it gets its name.
struct Part(PathBuf);

impl Drop for Part {
    fn drop(&mut self) {
        match fs::remove_file(&self.0) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                log::warn!("what has come of an upload stays at {}: {error}", self.0.display());
            }
            _ => (),
        }
    }
}

impl Files {
    pub(crate) fn new(config: &BuildsConfig, store: Store) -> Self {
        Self {
            directory: config.directory.clone(),
            most: config.upload,
            quota: config.uploads,
            turn: config.upload_turn,
            limit: config.upload_limit,
            store,
            coming: Mutex::default(),
            turns: Locks::new(AT_ONCE),
        }
    }

    fn path(&self, tenant: &str, hash: &str) -> PathBuf {
        self.directory.join(tenant).join(hash)
    }

    /// Whether it is there; it is of use now.
    pub(crate) async fn is_there(&self, tenant: &str, hash: &str) -> Result<bool, Error> {
        check_hash(hash)?;
        let (owned, now) = ((tenant.to_owned(), hash.to_owned()), time_text::now());
        let found = self
            .store
            .with(move |store| store.use_file(&owned.0, &owned.1, now))
            .await?;
        Ok(found.is_some() && self.path(tenant, hash).is_file())
    }

    /// What opens those of a tenant.
    pub(crate) fn opener(&self, tenant: &str) -> Opener {
        Opener(self.directory.join(tenant))
    }

    /// Takes one of this tenant and hash; where there is no space, others go that are not needed.
    pub(crate) async fn receive(
        &self,
        (tenant, hash): (&str, &str),
        length: u64,
        body: Body,
        needed: &(dyn Fn() -> Needed + Sync),
    ) -> Result<(), Error> {
        check_hash(hash)?;
        if length > self.most {
            return Err(Error::TooLarge(format!(
                "the archive has {length} bytes, and may have {}: leave out what is not needed, by a .dockerignore",
                self.most
            )));
        }
        let turn = tokio::time::timeout(self.turn, self.turns.lock(tenant)).await;
        let _turn = turn.map_err(|_| Error::Busy("other uploads of this tenant take long"))?;
        let _promise = self.promise((tenant, hash), length, needed).await?;
        let directory = self.directory.join(tenant);
        make_private(&directory).map_err(Error::host("make the directory of uploads"))?;
        let name = format!(".{}{PART}", control::random_hex::<8>()?);
        let part = Part(directory.join(name));
        let written = tokio::time::timeout(self.limit, write(&part.0, length, body)).await;
        written.map_err(|_| Error::invalid(format!("an upload may take {} s: try again", self.limit.as_secs())))??;
        fs::rename(&part.0, self.path(tenant, hash)).map_err(Error::host("keep an upload"))?;
        let file = StoredFile {
            tenant: tenant.to_owned(),
            hash: hash.to_owned(),
            bytes: length,
            used: time_text::now(),
        };
        self.store.with(move |store| store.put_file(&file)).await
    }

    /// Promises so many bytes to one that is coming; older ones go for it.
    async fn promise<'f>(
        &'f self,
        (tenant, hash): (&'f str, &str),
        bytes: u64,
        needed: &(dyn Fn() -> Needed + Sync),
    ) -> Result<Promise<'f>, Error> {
        // Those that are coming are counted before those that are there: one that comes to be there meanwhile is counted twice, and not
        // left out.
        let (promise, coming) = {
            let mut all = self.coming.lock().unwrap_or_else(PoisonError::into_inner);
            let coming = all.entry(tenant.to_owned()).or_default();
            *coming = (coming.0.saturating_add(1), coming.1.saturating_add(bytes));
            let promise = Promise {
                files: self,
                tenant,
                bytes,
            };
            (promise, *coming)
        };
        let owned = (tenant.to_owned(), hash.to_owned());
        let total = self.store.with(move |store| store.files_total(&owned.0, &owned.1));
        let mut total = total.await?;
        let fits = |(count, bytes): (u64, u64)| {
            count.saturating_add(coming.0) <= MOST && bytes.saturating_add(coming.1) <= self.quota
        };
        if !fits(total) {
            let owned = tenant.to_owned();
            let there = self.store.with(move |store| store.files(Some(&owned))).await?;
            let (idle, needed) = (time_text::now().saturating_sub(NEEDED), needed());
            let is_idle = |file: &&StoredFile| file.hash != hash && file.used < idle && !is_needed(&needed, file);
            for old in there.iter().filter(is_idle) {
                self.remove(old).await?;
                total = (total.0.saturating_sub(1), total.1.saturating_sub(old.bytes));
                if fits(total) {
                    break;
                }
            }
        }
        match fits(total) {
            true => Ok(promise),
            false => Err(Error::NoSpace(format!(
                "a tenant may have {MOST} uploads with {} bytes together: wait, as those that are of no use for an hour go",
                self.quota
            ))),
        }
    }

    async fn remove(&self, file: &StoredFile) -> Result<(), Error> {
        match fs::remove_file(self.path(&file.tenant, &file.hash)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(Error::host("remove an upload")(error));
            }
            _ => (),
        }
        let (tenant, hash) = (file.tenant.clone(), file.hash.clone());
        self.store.with(move |store| store.remove_file(&tenant, &hash)).await
    }

    /// Removes what is of no use any more. One that cannot be removed keeps no other.
    pub(crate) async fn sweep(&self, needed: &Needed) -> Result<(), Error> {
        let oldest = time_text::now().saturating_sub(KEPT);
        let all = self.store.with(|store| store.files(None)).await?;
        let is_old = |file: &&StoredFile| file.used < oldest && !is_needed(needed, file);
        for old in all.iter().filter(is_old) {
            if let Err(error) = self.remove(old).await {
                log::warn!(
                    "the upload {} of {} stays for a while: {}",
                    old.hash,
                    old.tenant,
                    with_causes(&error)
                );
            }
        }
        Ok(())
    }

    /// Removes what an earlier gateway has left: what was coming, and what the store does not name. Nothing is coming now.
    pub(crate) async fn clean(&self) -> Result<(), Error> {
        let known = self.store.with(|store| store.files(None)).await?;
        let known = known.iter().map(|file| self.path(&file.tenant, &file.hash));
        clean(&self.directory, &known.collect()).map_err(Error::host("look through uploads"))
    }
}

fn is_needed(needed: &Needed, file: &StoredFile) -> bool {
    needed.contains(&(file.tenant.clone(), file.hash.clone()))
}

/// What cannot be removed stays; what is no tenant's, such as `lost+found`, is left alone.
fn clean(directory: &Path, known: &HashSet<PathBuf>) -> io::Result<()> {
    let tenants = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        tenants => tenants?,
    };
    for tenant in tenants {
        let tenant = tenant?;
        let name = tenant.file_name();
        let is_tenant = name
            .to_str()
            .is_some_and(|name| control::check_tenant_name(name).is_ok());
        if !is_tenant || !tenant.file_type()?.is_dir() {
            continue;
        }
        for file in fs::read_dir(tenant.path())? {
            let path = file?.path();
            if !known.contains(&path)
                && let Err(error) = fs::remove_file(&path)
            {
                log::warn!("{} is no upload and stays: {error}", path.display());
            }
        }
    }
    Ok(())
}

fn make_private(directory: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(directory)
}

/// Writes exactly so many bytes, and has them reach the disk.
async fn write(path: &Path, length: u64, body: Body) -> Result<(), Error> {
    let make = tokio::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .await;
    let mut file = make.map_err(Error::host("make a file for an upload"))?;
    let mut stream = body.into_data_stream();
    let mut got: u64 = 0;
    loop {
        let next = tokio::time::timeout(SILENCE, stream.next()).await;
        let bytes = match next {
            Err(_) => return Err(Error::invalid("nothing came of the upload for too long: try again")),
            Ok(None) => break,
            Ok(Some(bytes)) => bytes.map_err(|error| Error::invalid(format!("the upload broke off: {error}")))?,
        };
        got = got.saturating_add(bytes.len() as u64);
        if got > length {
            break;
        }
        file.write_all(&bytes).await.map_err(Error::host("write an upload"))?;
    }
    if got != length {
        return Err(Error::invalid(format!(
            "the upload has other than the {length} bytes that Content-Length says"
        )));
    }
    file.flush().await.map_err(Error::host("write an upload"))?;
    file.sync_all().await.map_err(Error::host("write an upload"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_is_no_path() {
        assert!(check_hash(&"0a".repeat(32)).is_ok());
        let dots = format!("../{}", "0".repeat(61));
        for text in ["", "..", &"0".repeat(63), &"0".repeat(65), &"A".repeat(64), &dots] {
            assert!(check_hash(text).is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_not_known_is_cleaned_away() {
        let directory = tempfile::tempdir().unwrap();
        clean(&directory.path().join("none"), &HashSet::new()).unwrap();
        let tenant = directory.path().join("a");
        make_private(&tenant).unwrap();
        for name in ["kept", ".0.part", "lost"] {
            fs::write(tenant.join(name), "x").unwrap();
        }
        // What cannot be removed, and what is nobody's, stops nothing.
        fs::create_dir(tenant.join("aaa")).unwrap();
        fs::create_dir(directory.path().join("lost+found")).unwrap();
        fs::write(directory.path().join("lost+found/x"), "x").unwrap();
        clean(directory.path(), &HashSet::from([tenant.join("kept")])).unwrap();
        fs::remove_dir(tenant.join("aaa")).unwrap();
        assert!(directory.path().join("lost+found/x").exists());
        let left: Vec<_> = fs::read_dir(&tenant)
            .unwrap()
            .map(|one| one.unwrap().file_name())
            .collect();
        assert_eq!(left, ["kept"]);
    }
}
