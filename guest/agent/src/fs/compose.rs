//! A file of several. It is made beside its place and takes it when it is whole; what it was made of is removed then.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::copy_file_range;
use rustix::io::Errno;

use super::failure::{Result, failed, invalid};
use super::paths::{User, beside, parent};
use super::read::open_regular;

/// The most that is copied at once; in between the machine does other things.
const STEP: u64 = 16 << 20;

/// Makes `path` of the sources, and removes these.
pub(super) fn compose(user: &User, sources: &[PathBuf], path: &Path) -> Result<()> {
    if sources.is_empty() {
        return Err(invalid(format!(
            "nothing is named that {} could be made of: name one file at least",
            path.display()
        )));
    }
    for source in sources {
        open_regular(source)?;
    }
    user.make_directories(parent(path)?)?;
    let mut part = Part::create(user, path)?;
    for source in sources {
        part.append(source)?;
    }
    let made = part.finish(path)?;
    for source in sources {
        // The result may have taken a source's place.
        if fs::symlink_metadata(source).is_ok_and(|data| (data.dev(), data.ino()) == made) {
            continue;
        }
        match fs::remove_file(source) {
            // One that was named twice.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            result => result.map_err(failed("removing", source))?,
        }
    }
    Ok(())
}

/// The file that is being made; removed again unless it is finished.
struct Part {
    file: File,
    path: PathBuf,
    is_finished: bool,
}

impl Part {
    fn create(user: &User, path: &Path) -> Result<Self> {
        let path = beside(path)?;
        let mut options = OpenOptions::new();
        let file = options.write(true).create_new(true).mode(0o644).open(&path);
        let part = Self {
            file: file.map_err(failed("creating", &path))?,
            path,
            is_finished: false,
        };
        user.own(&part.file, &part.path)?;
        Ok(part)
    }

    /// As much as there is now: somebody may write to it without end.
    fn append(&mut self, source: &Path) -> Result<()> {
        let mut file = open_regular(source)?;
        let mut left = file.metadata().map_err(failed("looking at", source))?.size();
        while left > 0 {
            let step = usize::try_from(left.min(STEP)).unwrap_or(usize::MAX);
            match copy_file_range(&file, None, &self.file, None, step) {
                Ok(0) => break,
                Ok(count) => left = left.saturating_sub(u64::try_from(count).unwrap_or(left)),
                Err(Errno::INTR) => {}
                // From one file system to another, or one that cannot do it.
                Err(Errno::XDEV | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => break,
                Err(error) => return Err(failed(&format!("copying {} to", source.display()), &self.path)(error)),
            }
        }
        // Both are where that left them.
        let mut buffer = vec![0; 64 << 10];
        while left > 0 {
            let most = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
            match file.read(buffer.get_mut(..most).unwrap_or_default()) {
                Ok(0) => break,
                Ok(count) => {
                    let bytes = buffer.get(..count).unwrap_or_default();
                    self.file.write_all(bytes).map_err(failed("writing", &self.path))?;
                    left = left.saturating_sub(u64::try_from(count).unwrap_or(left));
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(failed("reading", source)(error)),
            }
        }
        Ok(())
    }

    /// Takes its place; which file it is, by device and inode.
    fn finish(mut self, path: &Path) -> Result<(u64, u64)> {
        let data = self.file.metadata().map_err(failed("looking at", &self.path))?;
        fs::rename(&self.path, path).map_err(failed("completing", path))?;
        self.is_finished = true;
        Ok((data.dev(), data.ino()))
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if !self.is_finished
            && let Err(error) = fs::remove_file(&self.path)
        {
            crate::say(format_args!("{} is left over: {error}", self.path.display()));
        }
    }
}
