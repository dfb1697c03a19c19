//! Images in archives: `basalt save`, and an import from standard input. Knows nothing of what is in them.

use std::fs::File;
use std::io::{self, IsTerminal};
use std::path::Path;

use anyhow::{Context, Result, bail};
use rustix::fs::{Mode, OFlags};
use serde::Serialize;

use super::store;
use crate::cli::SaveArgs;
use crate::output::Output;
use crate::{outlet, places};

/// An image that has been saved, for machines.
#[derive(Debug, Serialize)]
struct Saved<'a> {
    image: &'a str,
    file: &'a Path,
    bytes: u64,
}

/// `basalt save`.
pub(crate) fn save(args: &SaveArgs, output: &Output) -> Result<u8> {
    let words = format!("basalt save {}", args.image);
    let bytes = outlet::write(args.output.as_deref(), &words, |out, to| {
        Ok(store()?.save(&args.image, out, to)?)
    })?;
    let file = args.output.as_deref().filter(|path| *path != Path::new("-"));
    if let (Some(file), true) = (file, output.json()) {
        let image = args.image.as_str();
        output.result(&Saved { image, file, bytes }, String::new)?;
    }
    Ok(0)
}

/// All of standard input, as a file without a name: an archive is read at many places.
pub(super) fn spooled_input() -> Result<File> {
    if io::stdin().is_terminal() {
        bail!("an archive does not come from a terminal: name a file, or send one here");
    }
    let mut file = nameless()?;
    io::copy(&mut io::stdin().lock(), &mut file).context("cannot store standard input before it is imported")?;
    Ok(file)
}

/// A file beside the images that has no name and goes with its last holder.
pub(crate) fn nameless() -> Result<File> {
    let directory = places::images()?;
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = rustix::fs::open(&directory, flags, Mode::RUSR | Mode::WUSR);
    Ok(File::from(file.with_context(|| {
        format!("no file can be made in {}", directory.display())
    })?))
}
