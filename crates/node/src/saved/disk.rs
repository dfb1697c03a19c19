//! Writable disks: sparse files with an empty ext4, copied from one that is made once for each size. Where the file system
//! has reflinks a copy costs nothing; elsewhere only the blocks that mkfs wrote are copied. Knows no sandbox.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use base::ByteSize;
use rustix::fs::{CWD, Mode, OFlags, RenameFlags, SeekFrom, copy_file_range, ioctl_ficlone, renameat_with, seek};
use rustix::io::Errno;

use crate::Error;

/// Between two looks at the clock.
const COPIED_AT_ONCE: usize = 16 << 20;

/// The file system on it.
pub(crate) const FILE_SYSTEM: &str = "ext4";

/// No blocks for root alone, tables and journal written when they are used, a journal as small as it can be.
const MKFS_FLAGS: &[&str] = &[
    "-q",
    "-F",
    "-m",
    "0",
    "-J",
    "size=4",
    "-E",
    "lazy_itable_init=1,lazy_journal_init=1,nodiscard",
];

/// What mkfs writes to a new disk at most, with these flags.
const EMPTY: ByteSize = ByteSize::mib(8);

/// Makes a disk of `size` at `path`; templates are stored in `templates`. One that is there already stays.
pub(crate) fn create(templates: &Path, size: ByteSize, path: &Path) -> Result<(), Error> {
    if path.exists() {
        return Ok(());
    }
    let template = template(templates, size)?;
    replace(&template, path)
}

/// Makes the disk at `path` one that holds what the one at `from` does, whatever was there; or leaves it as it was.
pub(crate) fn replace(from: &Path, path: &Path) -> Result<(), Error> {
    Beside::new(from, path)?.put()
}

/// How much of the file system the file at `path` takes; nothing where there is none.
pub(crate) fn taken(path: &Path) -> ByteSize {
    // In units of 512 bytes, whatever the file system's are (stat(2)).
    ByteSize(fs::metadata(path).map_or(0, |metadata| metadata.blocks() * 512))
}

/// How much of the file system of `directory` a copy of the disk at `from` takes there.
pub(crate) fn copy_takes(from: &Path, directory: &Path) -> ByteSize {
    match shares(directory) {
        Ok(true) => ByteSize(0),
        Ok(false) => taken(from),
        Err(error) => {
            log::debug!(
                "whether {} shares what is copied is not known: {error}",
                directory.display()
            );
            ByteSize(0)
        }
    }
}

/// Whether copies on this file system take nothing (reflinks), as a copy of nothing shows.
fn shares(directory: &Path) -> io::Result<bool> {
    let nameless = || rustix::fs::open(directory, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, Mode::RUSR);
    let (from, to) = (nameless()?, nameless()?);
    match ioctl_ficlone(&to, &from) {
        Ok(()) => Ok(true),
        Err(Errno::OPNOTSUPP | Errno::NOTTY | Errno::INVAL | Errno::XDEV) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// How much of the file system of `templates` a disk of `size` takes that is made there.
pub(crate) fn new_takes(templates: &Path, size: ByteSize) -> ByteSize {
    let template = template_path(templates, size);
    match template.exists() {
        true => copy_takes(&template, templates),
        // As mkfs writes it, and its copy.
        false => ByteSize(EMPTY.bytes() * 2),
    }
}

/// What lies beside the disk at `path` where somebody who was to replace it died: removed.
pub(crate) fn clean_beside(path: &Path) -> Result<(), Error> {
    remove(&beside(path))
}

fn beside(path: &Path) -> PathBuf {
    path.with_extension("partial")
}

/// The disk at `path` is the one with the inode `own` again, where that lies beside it.
pub(crate) fn put_back(path: &Path, own: u64) -> Result<(), Error> {
    let is_own = |path: &Path| fs::metadata(path).is_ok_and(|metadata| metadata.ino() == own);
    let beside = beside(path);
    if !is_own(path) && is_own(&beside) {
        fs::rename(&beside, path).map_err(Error::file("rename", &beside))?;
    }
    Ok(())
}

/// A copy of a disk, beside the one whose place it is to take. Dropping it removes what lies beside then.
#[derive(Debug)]
pub(crate) struct Beside {
    /// A copy that was interrupted must not be taken for a disk.
    partial: PathBuf,
    path: PathBuf,
    put: bool,
}

impl Beside {
    pub(crate) fn new(from: &Path, path: &Path) -> Result<Self, Error> {
        let beside = Self {
            partial: beside(path),
            path: path.to_owned(),
            put: false,
        };
        let copied = File::create(&beside.partial).and_then(|target| copy(from, target));
        copied.map_err(Error::file("make a disk at", &beside.partial))?;
        Ok(beside)
    }

    /// The number of the one whose place it is to take, if there is one.
    pub(crate) fn inode(&self) -> Result<Option<u64>, Error> {
        match fs::metadata(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            metadata => Ok(Some(metadata.map_err(Error::file("look at", &self.path))?.ino())),
        }
    }

    /// Takes the other's place, which lies beside from then on, if there is one.
    pub(crate) fn put(&mut self) -> Result<(), Error> {
        if self.path.exists() {
            // After a power failure one of the two is there whole.
            sync(&self.partial)?;
        }
        let put = match self.exchange() {
            Err(Errno::NOENT) => fs::rename(&self.partial, &self.path),
            exchanged => exchanged.map_err(io::Error::from),
        };
        put.map_err(Error::file("rename", &self.partial))?;
        self.put = true;
        Ok(())
    }

    /// All is as it was before, if it took the other's place.
    pub(crate) fn put_back(&mut self) -> Result<(), Error> {
        if std::mem::take(&mut self.put) {
            self.exchange().map_err(Error::file("rename", &self.partial))?;
        }
        Ok(())
    }

    fn exchange(&self) -> Result<(), Errno> {
        renameat_with(CWD, &self.partial, CWD, &self.path, RenameFlags::EXCHANGE)
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        // A daemon that panics is as one that was killed: what lies here may be the only one of its kind.
        if std::thread::panicking() {
            return;
        }
        if let Err(error) = fs::remove_file(&self.partial)
            && error.kind() != io::ErrorKind::NotFound
        {
            log::warn!("{} stays behind: {error}", self.partial.display());
        }
    }
}

/// Removes the disk at `path`; it is fine if there is none.
pub(crate) fn remove(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Error::file("remove", path)(error)),
        _ => Ok(()),
    }
}

fn template_path(templates: &Path, size: ByteSize) -> PathBuf {
    templates.join(format!("{FILE_SYSTEM}-{}", size.bytes()))
}

fn template(templates: &Path, size: ByteSize) -> Result<PathBuf, Error> {
    let path = template_path(templates, size);
    if path.exists() {
        return Ok(path);
    }
    fs::create_dir_all(templates).map_err(Error::file("make", templates))?;
    let partial = templates.join(format!("partial-{}-{}", size.bytes(), crate::clock::now_ns()));
    let made = File::create(&partial)
        .and_then(|file| file.set_len(size.bytes()))
        .map_err(Error::file("make", &partial))
        .and_then(|()| make_file_system(&partial))
        // All later disks of this size are copies of it.
        .and_then(|()| sync(&partial))
        .and_then(|()| fs::rename(&partial, &path).map_err(Error::file("rename", &partial)));
    if made.is_err()
        && let Err(error) = fs::remove_file(&partial)
        && error.kind() != io::ErrorKind::NotFound
    {
        log::warn!("{} stays behind: {error}", partial.display());
    }
    made.map(|()| path)
}

fn sync(path: &Path) -> Result<(), Error> {
    let synced = File::open(path).and_then(|file| file.sync_all());
    synced.map_err(Error::file("write", path))
}

/// Makes an empty file system that fills the file at `path`.
pub(crate) fn make_file_system(path: &Path) -> Result<(), Error> {
    let output = Command::new("mkfs.ext4")
        .args(MKFS_FLAGS)
        .arg(path)
        .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| Error::Disk(format!("mkfs.ext4 cannot be run ({error})")))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().last().unwrap_or_default();
    Err(Error::Disk(format!("mkfs.ext4 ended with {}: {last}", output.status)))
}

/// Removes what interrupted makers left.
pub(crate) fn clean(templates: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(templates) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_name().as_encoded_bytes().starts_with(b"partial-") {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Makes an empty file one that holds what the one at `from` does, with the same holes.
pub(crate) fn copy(from: &Path, target: File) -> io::Result<()> {
    copy_until(from, target, None)
}

/// The same, which ends with an error (`TimedOut`) where it is not done by then.
pub(crate) fn copy_until(from: &Path, target: File, deadline: Option<Instant>) -> io::Result<()> {
    let source = File::open(from)?;
    match ioctl_ficlone(&target, &source) {
        Ok(()) => return Ok(()),
        Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::XDEV | Errno::NOTTY | Errno::NOSYS) => (),
        Err(error) => return Err(error.into()),
    }
    let length = source.metadata()?.len();
    target.set_len(length)?;
    let mut at = 0;
    loop {
        // NXIO: there is no data behind this.
        let data = match seek(&source, SeekFrom::Data(at)) {
            Err(Errno::NXIO) => return Ok(()),
            found => found?,
        };
        let hole = seek(&source, SeekFrom::Hole(data))?;
        copy_range(&source, &target, (data, hole), deadline)?;
        at = hole;
    }
}

fn copy_range(source: &File, target: &File, (from, to): (u64, u64), deadline: Option<Instant>) -> io::Result<()> {
    let (mut near, mut far) = (from, from);
    while near < to {
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let left = usize::try_from(to - near).unwrap_or(usize::MAX).min(COPIED_AT_ONCE);
        if copy_file_range(source, Some(&mut near), target, Some(&mut far), left)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn a_copy_that_takes_too_long_ends() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        fs::write(&path, vec![b'x'; 1 << 20]).unwrap();
        let source = File::open(&path).unwrap();
        let copied = |deadline| {
            let target = tempfile::tempfile().unwrap();
            let copied = copy_range(&source, &target, (0, 1 << 20), Some(deadline));
            copied.map(|()| target.metadata().unwrap().len())
        };
        let late = copied(Instant::now()).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        let minute = std::time::Duration::from_secs(60);
        assert_eq!(copied(Instant::now() + minute).unwrap(), 1 << 20);
    }

    #[test]
    fn a_disk_is_whole_sparse_and_made_once() {
        let directory = tempfile::tempdir().unwrap();
        let templates = directory.path().join("disks");
        let (one, two) = (directory.path().join("one"), directory.path().join("two"));
        create(&templates, ByteSize::gib(1), &one).unwrap();
        fs::write(templates.join("partial-1-2"), "left by a crash").unwrap();
        clean(&templates).unwrap();
        create(&templates, ByteSize::gib(1), &two).unwrap();
        assert_eq!(fs::read_dir(&templates).unwrap().count(), 1);
        let metadata = fs::metadata(&two).unwrap();
        assert_eq!(metadata.len(), 1 << 30);
        assert!(metadata.blocks() * 512 < 16 << 20, "{} blocks", metadata.blocks());
        let check = Command::new("/usr/sbin/e2fsck")
            .args(["-fn"])
            .arg(&two)
            .output()
            .unwrap();
        assert!(check.status.success(), "{}", String::from_utf8_lossy(&check.stdout));
        // What is there belongs to somebody.
        fs::write(&one, "mine").unwrap();
        create(&templates, ByteSize::gib(1), &one).unwrap();
        assert_eq!(fs::read(&one).unwrap(), b"mine");
    }

    #[test]
    fn what_is_too_small_for_a_file_system_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let error = create(directory.path(), ByteSize(4096), &directory.path().join("x")).unwrap_err();
        assert!(error.to_string().contains("mkfs.ext4 ended with"), "{error}");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
