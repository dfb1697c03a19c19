//! Temporary files that leave nothing behind: unnamed (O_TMPFILE) where the file system can, and given their name only
//! when they are whole and on disk.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{AtFlags, CWD, Mode, OFlags};

use crate::Error;

static COUNTER: AtomicU64 = AtomicU64::new(0);

/// A file without a name, or with one that it loses when dropped.
#[derive(Debug)]
pub(crate) struct Temp {
    file: File,
    directory: PathBuf,
    name: Option<PathBuf>,
}

impl Temp {
    /// In `directory`, which must be in the file system that the file is to stay in.
    pub(crate) fn new(directory: &Path) -> Result<Self, Error> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let (file, name) = match rustix::fs::open(directory, flags, Mode::RUSR | Mode::WUSR) {
            Ok(fd) => (File::from(fd), None),
            Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::ISDIR) => {
                let name = unique(directory);
                let mut options = File::options();
                let opened = options.read(true).write(true).create_new(true).mode(0o600).open(&name);
                (opened.map_err(Error::io("create", &name))?, Some(name))
            }
            Err(error) => return Err(Error::io("create a temporary file in", directory)(error.into())),
        };
        Ok(Self {
            file,
            directory: directory.to_owned(),
            name,
        })
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Only the open file; it is gone when that is closed.
    pub(crate) fn into_unnamed(mut self) -> Result<File, Error> {
        if let Some(name) = self.name.take() {
            fs::remove_file(&name).map_err(Error::io("remove", &name))?;
        }
        self.file
            .try_clone()
            .map_err(Error::io("use a temporary file in", &self.directory))
    }

    /// Brings it to disk and gives it the name `to`, in place of what has this name now.
    pub(crate) fn persist(mut self, to: &Path) -> Result<(), Error> {
        let failed = || Error::io("write", to);
        self.file.sync_all().map_err(failed())?;
        if self.name.is_none() {
            // A file can be linked only to a name that is free, so it gets one for the moment before the rename.
            let name = unique(&self.directory);
            link_fd(&self.file, &name).map_err(failed())?;
            self.name = Some(name);
        }
        if let Some(name) = &self.name {
            fs::rename(name, to).map_err(failed())?;
        }
        self.name = None;
        let parent = to.parent().unwrap_or(Path::new("."));
        File::open(parent)
            .and_then(|directory| directory.sync_all())
            .map_err(failed())
    }
}

impl Drop for Temp {
    fn drop(&mut self) {
        if let Some(name) = &self.name
            && let Err(error) = fs::remove_file(name)
        {
            log::warn!("cannot remove {}: {error}", name.display());
        }
    }
}

/// Replaces the file `to` by one with `contents`, at once.
pub(crate) fn replace(to: &Path, contents: &[u8], temporary: &Path) -> Result<(), Error> {
    let temp = Temp::new(temporary)?;
    temp.file().write_all(contents).map_err(Error::io("write", to))?;
    temp.persist(to)
}

fn link_fd(file: &File, name: &Path) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    let fd = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(rustix::fs::linkat(CWD, fd, CWD, name, AtFlags::SYMLINK_FOLLOW)?)
}

fn unique(directory: &Path) -> PathBuf {
    directory.join(format!(
        "{}.{}",
        std::process::id(),
        COUNTER.fetch_add(1, Ordering::Relaxed)
    ))
}
