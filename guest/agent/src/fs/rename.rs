//! Another name for a file or a tree. On another file system that is a copy beside its new place, which takes the place when it is whole;
//! then the original is removed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;

use agent_api::{EntryKind, RequestFailure, RequestFailureKind};
use archive::{Owner, ROOT, Target};

use super::attributes;
use super::entries::{Lister, Looker};
use super::failure::{Result, failed, invalid, of_archive};
use super::paths::{User, beside, parent};
use super::remove::remove_tree;
use crate::STACK_SIZE;

/// Gives what is at `from` the name `to`, and makes the directories above that.
pub(super) fn rename(user: &User, from: &Path, to: &Path) -> Result<()> {
    fs::symlink_metadata(from).map_err(failed("looking at", from))?;
    parent(from)?;
    if to != from && to.starts_with(from) {
        return Err(invalid(format!(
            "{} cannot be moved to {}, which is in it",
            from.display(),
            to.display()
        )));
    }
    user.make_directories(parent(to)?)?;
    match fs::rename(from, to) {
        Err(error) if error.raw_os_error() == Some(libc::EXDEV) => move_across(from, to),
        result => result.map_err(failed(&format!("renaming {} to", from.display()), to)),
    }
}

/// A copy that is not in its place yet; removed again unless it gets there.
struct Copy(Option<PathBuf>);

impl Drop for Copy {
    fn drop(&mut self) {
        if let Some(path) = self.0.take()
            && let Err(failure) = remove_tree(&path)
        {
            crate::say(format_args!("{} is left over: {failure}", path.display()));
        }
    }
}

fn move_across(from: &Path, to: &Path) -> Result<()> {
    let path = beside(to)?;
    let mut copied = Copy(Some(path.clone()));
    copy(from, &path)?;
    copy_attributes(from, &path)?;
    fs::rename(&path, to).map_err(failed(&format!("moving a copy of {} to", from.display()), to))?;
    copied.0 = None;
    remove_tree(from).map_err(|failure| RequestFailure {
        message: format!("all was copied to {}, but not removed: {failure}", to.display()),
        ..failure
    })
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    let (source, sink) = io::pipe().map_err(failed("making a pipe to copy", from))?;
    let target = Target::Root(to.to_owned());
    let (packed, unpacked) = thread::scope(|scope| {
        let pack = move || archive::pack(from, ROOT.as_ref(), io::BufWriter::new(sink));
        let packing = thread::Builder::new()
            .name("move".to_owned())
            .stack_size(STACK_SIZE)
            .spawn_scoped(scope, pack)
            .map_err(failed("starting a thread to copy", from))?;
        let mut source = source;
        let unpacked = archive::unpack(&mut source, &target, Owner::Kept, &|| false);
        // An archive has bytes behind its end, which whoever packs waits to be rid of.
        drop(unpacked.is_ok().then(|| io::copy(&mut source, &mut io::sink())));
        drop(source);
        let packed = packing.join().map_err(|_| RequestFailure {
            kind: RequestFailureKind::Other,
            message: format!("copying {}: the thread panicked", from.display()),
        })?;
        Ok((packed, unpacked))
    })?;
    let packed = match (packed, unpacked) {
        (Ok(packed), Ok(_)) => packed,
        // One side's end is the other's failure: the cause is what is not of the stream.
        (Err(error), Err(other)) if error.is_of_stream() => return Err(of_archive(&other)),
        (Err(error), _) | (Ok(_), Err(error)) => return Err(of_archive(&error)),
    };
    if packed.left_out > 0 || packed.changed > 0 {
        return Err(invalid(format!(
            "{} cannot be moved to another file system: {} devices, pipes or sockets in it cannot be copied, and {} files \
             were changed meanwhile; nothing was moved",
            from.display(),
            packed.left_out,
            packed.changed
        )));
    }
    Ok(())
}

/// What a tar stream does not have.
fn copy_attributes(from: &Path, to: &Path) -> Result<()> {
    let entry = Looker::new().look(from)?;
    attributes::copy(&entry.metadata, to)?;
    if entry.kind != EntryKind::Directory {
        return Ok(());
    }
    for entry in Lister::new(from, u32::MAX)? {
        let entry = entry?;
        let path = Path::new(entry.path.as_os_str());
        if let Ok(rest) = path.strip_prefix(from)
            && !entry.metadata.is_empty()
        {
            attributes::copy(&entry.metadata, &to.join(rest))?;
        }
    }
    Ok(())
}
