//! Where an archive goes: a file that has its name only when it is whole, a pipe, or standard output. Knows nothing of what is
//! in one.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use registry::Cancel;
use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;

use crate::interrupt::until_signal;

/// Writes an archive by `work`, which is told the name of where it goes, until a signal ends it; its bytes. `words` is the verb for
/// those who send one to a terminal.
pub(crate) fn write(
    path: Option<&Path>,
    words: &str,
    work: impl FnOnce(&mut dyn Write, &Path) -> Result<()>,
) -> Result<u64> {
    let Some(path) = path.filter(|path| *path != Path::new("-")) else {
        if io::stdout().is_terminal() {
            bail!("an archive is nothing for a terminal: write `{words} -o FILE`, or send it on");
        }
        return counted(io::stdout().lock(), Path::new("standard output"), work);
    };
    if fs::metadata(path).is_ok_and(|meta| !meta.is_file()) {
        // A pipe or a device: nothing can take its place.
        let opened = File::options().write(true).open(path);
        return counted(opened.with_context(|| unwritable(path))?, path, work);
    }
    let draft = Draft::of(path).with_context(|| unwritable(path))?;
    let bytes = counted(&draft.file, path, work)?;
    draft.put(path).with_context(|| unwritable(path))?;
    Ok(bytes)
}

fn unwritable(path: &Path) -> String {
    format!("the archive {} cannot be written", path.display())
}

/// A file that is being written. It has no name, so that nothing of it is left by whoever is killed; where the file system has no such
/// files (`O_TMPFILE`, open(2)) it has one beside the one that it will get.
struct Draft {
    file: File,
    named: Option<Partial>,
}

impl Draft {
    fn of(path: &Path) -> io::Result<Self> {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
        match rustix::fs::open(parent.unwrap_or(Path::new(".")), flags, Mode::from_raw_mode(0o666)) {
            Ok(file) => Ok(Self {
                file: file.into(),
                named: None,
            }),
            // The latter two are what a kernel says that knows no such files, or whose file system thinks that it is a directory.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => Self::named(path),
            Err(error) => Err(error.into()),
        }
    }

    fn named(path: &Path) -> io::Result<Self> {
        let partial = Partial::beside(path);
        Ok(Self {
            file: File::create(&partial.0)?,
            named: Some(partial),
        })
    }

    /// Gives it its name, in place of whatever has it.
    fn put(self, path: &Path) -> io::Result<()> {
        let partial = match self.named {
            Some(partial) => partial,
            None => match link(&self.file, path) {
                Err(Errno::EXIST) => {
                    let partial = Partial::beside(path);
                    // What somebody has left who was killed between this and the next step, with this number.
                    match fs::remove_file(&partial.0) {
                        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                        _ => link(&self.file, &partial.0)?,
                    }
                    partial
                }
                linked => return Ok(linked?),
            },
        };
        fs::rename(&partial.0, path)
    }
}

fn link(file: &File, path: &Path) -> Result<(), Errno> {
    let nameless = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::linkat(CWD, nameless, CWD, path, AtFlags::SYMLINK_FOLLOW)
}

/// A name on its way to another, removed if it does not come there.
struct Partial(PathBuf);

impl Partial {
    fn beside(path: &Path) -> Self {
        let mut name = OsString::from(path);
        name.push(format!(".{}.partial", std::process::id()));
        Self(name.into())
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        match fs::remove_file(&self.0) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                log::warn!("{} is left behind: {error}", self.0.display());
            }
            _ => (),
        }
    }
}

fn counted(out: impl Write, to: &Path, work: impl FnOnce(&mut dyn Write, &Path) -> Result<()>) -> Result<u64> {
    until_signal(|cancel| {
        let mut out = Counted {
            out,
            bytes: 0,
            gone: false,
            cancel,
        };
        match work(&mut out, to) {
            // Unlike a list of which somebody has seen enough, half an archive is worth nothing.
            Err(_) if out.gone => Err(anyhow!(
                "the reader of the archive closed its end early: the archive is incomplete"
            )),
            written => written.map(|()| out.bytes),
        }
    })
}

struct Counted<'a, W> {
    out: W,
    bytes: u64,
    gone: bool,
    cancel: &'a Cancel,
}

impl<W: Write> Write for Counted<'_, W> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        if self.cancel.is_cancelled() {
            return Err(io::Error::other("interrupted"));
        }
        let written = self.out.write(buf);
        let written = written.inspect_err(|error| self.gone = error.kind() == io::ErrorKind::BrokenPipe)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).unwrap();
        let mut names: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_has_a_name_only_when_it_is_whole() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("archive");
        for (text, before) in [("first", vec![]), ("second", vec!["archive".to_owned()])] {
            let written = write(Some(&path), "save", |out, _| {
                out.write_all(text.as_bytes())?;
                // What would be left if this process were killed now.
                assert_eq!(names(directory.path()), before);
                Ok(())
            });
            assert_eq!(written.unwrap(), text.len() as u64);
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
            assert_eq!(names(directory.path()), ["archive"]);
        }
        write(Some(&path), "save", |_, _| bail!("no")).unwrap_err();
        assert_eq!(fs::read_to_string(&path).unwrap(), "second");
        assert_eq!(names(directory.path()), ["archive"]);
        let nowhere = directory.path().join("nowhere/archive");
        let error = write(Some(&nowhere), "save", |_, _| Ok(())).unwrap_err();
        assert!(
            format!("{error:#}").contains("nowhere/archive cannot be written: No such file"),
            "{error:#}"
        );
    }

    #[test]
    fn where_no_file_can_be_without_a_name_it_has_one_beside() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("archive");
        let draft = Draft::named(&path).unwrap();
        (&draft.file).write_all(b"whole").unwrap();
        assert_eq!(
            names(directory.path()),
            [format!("archive.{}.partial", std::process::id())]
        );
        draft.put(&path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "whole");
        drop(Draft::named(&path).unwrap());
        assert_eq!(names(directory.path()), ["archive"]);
    }
}
