//! Images in archives: `basalt save`, and an import from standard input. Knows nothing of what is in them.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use registry::Cancel;
use rustix::fs::{Mode, OFlags};
use serde::Serialize;

use super::store;
use crate::cli::SaveArgs;
use crate::interrupt::until_signal;
use crate::output::Output;
use crate::places;

/// An image that has been saved, for machines.
#[derive(Debug, Serialize)]
struct Saved<'a> {
    image: &'a str,
    file: &'a Path,
    bytes: u64,
}

/// `basalt save`.
pub(crate) fn save(args: &SaveArgs, output: &Output) -> Result<u8> {
    let Some(path) = args.output.as_deref().filter(|path| *path != Path::new("-")) else {
        if io::stdout().is_terminal() {
            bail!(
                "an archive is nothing for a terminal: write `basalt save -o FILE {}`, or send it on",
                args.image
            );
        }
        write(&args.image, io::stdout().lock(), Path::new("standard output"))?;
        return Ok(0);
    };
    let bytes = if fs::metadata(path).is_ok_and(|meta| !meta.is_file()) {
        // A pipe or a device: nothing can take its place.
        let opened = File::options().write(true).open(path);
        let file = opened.with_context(|| unwritable(path))?;
        write(&args.image, file, path)?
    } else {
        replace(&args.image, path)?
    };
    if output.json() {
        let image = args.image.as_str();
        output.result(
            &Saved {
                image,
                file: path,
                bytes,
            },
            String::new,
        )?;
    }
    Ok(0)
}

fn unwritable(path: &Path) -> String {
    format!("the archive {} cannot be written", path.display())
}

/// Writes a file that has its name only when it is whole.
fn replace(reference: &str, path: &Path) -> Result<u64> {
    let partial = Partial::beside(path);
    let file = File::create(&partial.0).with_context(|| unwritable(path))?;
    let bytes = write(reference, &file, path)?;
    fs::rename(&partial.0, path).with_context(|| unwritable(path))?;
    Ok(bytes)
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

/// Writes the archive; its bytes.
fn write(reference: &str, out: impl Write, to: &Path) -> Result<u64> {
    let store = store()?;
    until_signal(|cancel| {
        let mut out = Counted { out, bytes: 0, cancel };
        match store.save(reference, &mut out, to) {
            // Unlike a list of which somebody has seen enough, half an archive is worth nothing.
            Err(image::Error::Io { source, .. }) if source.kind() == io::ErrorKind::BrokenPipe => Err(anyhow!(
                "whoever reads the archive was gone before its end: nothing of it is of use"
            )),
            saved => Ok(saved.map(|()| out.bytes)?),
        }
    })
}

struct Counted<'a, W> {
    out: W,
    bytes: u64,
    cancel: &'a Cancel,
}

impl<W: Write> Write for Counted<'_, W> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        if self.cancel.is_cancelled() {
            return Err(io::Error::other("interrupted"));
        }
        let written = self.out.write(buf)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// All of standard input, as a file without a name: an archive is read at many places.
pub(super) fn spooled_input() -> Result<File> {
    if io::stdin().is_terminal() {
        bail!("an archive does not come from a terminal: name a file, or send one here");
    }
    let directory = places::images()?;
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = rustix::fs::open(&directory, flags, Mode::RUSR | Mode::WUSR);
    let mut file = File::from(file.with_context(|| format!("no file can be made in {}", directory.display()))?);
    io::copy(&mut io::stdin().lock(), &mut file).context("standard input cannot be kept until it is imported")?;
    Ok(file)
}
