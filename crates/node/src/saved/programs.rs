//! Which programs a VM is made with, told by their content: a machine that was saved goes on by the same ones. A file
//! is read once, for as long as it stays the same one.

use std::collections::HashMap;
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use node_api::{Programs, Sandbox};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::config::Config;

/// How much is read at a time.
const CHUNK: usize = 1 << 20;

/// A file as it is now: another one at its place, or other content, differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct Id {
    device: u64,
    inode: u64,
    length: u64,
    changed: (i64, i64),
}

impl Id {
    fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            length: metadata.len(),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

/// The files of the programs that a VM would be made with now; `None` for one that cannot be looked at.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Files([Option<Id>; 3]);

impl Files {
    pub(crate) fn of(config: &Config) -> Self {
        let id = |path: &PathBuf| std::fs::metadata(path).ok().map(|metadata| Id::of(&metadata));
        Self([&config.programs.vmm, &config.kernel, &config.initramfs].map(id))
    }
}

/// What is known of files that have been read.
#[derive(Debug, Default)]
pub(crate) struct Hashes(Mutex<HashMap<Id, String>>);

impl Hashes {
    /// What a sandbox's VM was made with. Its VMM's program is there for as long as it runs, whatever became of the file.
    pub(crate) fn of(&self, config: &Config, sandbox: &Sandbox) -> Programs {
        let since = sandbox.started_ns.unwrap_or(0);
        let running = sandbox.vmm.map(|vmm| PathBuf::from(format!("/proc/{}/exe", vmm.pid)));
        Programs {
            vmm: running.and_then(|path| self.hash_of(&path, None)),
            kernel: self.hash_of(&config.kernel, Some(since)),
            initramfs: self.hash_of(&config.initramfs, Some(since)),
        }
    }

    /// What a VM would be made with now.
    pub(crate) fn now(&self, config: &Config) -> Programs {
        Programs {
            vmm: self.hash_of(&config.programs.vmm, None),
            kernel: self.hash_of(&config.kernel, None),
            initramfs: self.hash_of(&config.initramfs, None),
        }
    }

    /// The hash of a file that has not changed after `since`.
    fn hash_of(&self, path: &Path, since: Option<u64>) -> Option<String> {
        let hash = File::open(path).and_then(|file| self.hash(&file, since));
        hash.unwrap_or_else(|error| {
            log::info!("what {} holds is not known: {error}", path.display());
            None
        })
    }

    fn hash(&self, file: &File, since: Option<u64>) -> io::Result<Option<String>> {
        let metadata = file.metadata()?;
        if since.is_some_and(|since| changed_ns(&metadata) > since) {
            return Ok(None);
        }
        let id = Id::of(&metadata);
        let known = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(hash) = known().get(&id) {
            return Ok(Some(hash.clone()));
        }
        let hash = read_all(file)?;
        known().insert(id, hash.clone());
        Ok(Some(hash))
    }
}

/// When the file was last changed or came to its place: what is moved there keeps the time of its content.
fn changed_ns(metadata: &Metadata) -> u64 {
    let seconds = u64::try_from(metadata.ctime()).unwrap_or(0);
    let rest = u64::try_from(metadata.ctime_nsec()).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(rest)
}

fn read_all(mut file: &File) -> io::Result<String> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; CHUNK];
    loop {
        let got = file.read(&mut buffer)?;
        if got == 0 {
            break;
        }
        hash.update(&buffer[..got]);
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_known_by_its_content_unless_it_changed_since() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vmlinux");
        std::fs::write(&path, "abc").unwrap();
        let hashes = Hashes::default();
        // FIPS 180-2, appendix B.1.
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let now = crate::clock::now_ns();
        assert_eq!(hashes.hash_of(&path, None).as_deref(), Some(abc));
        assert_eq!(hashes.hash_of(&path, Some(now)).as_deref(), Some(abc));
        assert_eq!(hashes.hash_of(&path, Some(1)), None, "it was replaced later");
        std::fs::write(&path, "abcd").unwrap();
        assert_ne!(hashes.hash_of(&path, None).as_deref(), Some(abc));
        assert_eq!(hashes.hash_of(&directory.path().join("none"), None), None);
    }
}
