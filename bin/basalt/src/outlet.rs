//! Where an archive goes: a file that has its name only when it is whole, a pipe, or standard output. Knows nothing of what is
//! in one.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use registry::Cancel;

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
    let partial = Partial::beside(path);
    let file = File::create(&partial.0).with_context(|| unwritable(path))?;
    let bytes = counted(&file, path, work)?;
    fs::rename(&partial.0, path).with_context(|| unwritable(path))?;
    Ok(bytes)
}

fn unwritable(path: &Path) -> String {
    format!("the archive {} cannot be written", path.display())
}

/// A file on its way, removed if it does not come to its end.
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
                "whoever reads the archive was gone before its end: nothing of it is of use"
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
