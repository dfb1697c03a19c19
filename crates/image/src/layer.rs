//! Applies the entries of one layer to the tree: whiteouts, links, attributes, and file contents into the spool.
//!
//! OCI image-spec 1.1, "Image Layer Filesystem Changeset": `.wh.NAME` removes NAME, `.wh..wh..opq` all that is in its
//! directory, in both cases only what layers below have put there. Knows nothing of compression and digests.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::stream::Stream;
use crate::tar::{Entry, Kind, Reader};
use crate::tree::{Content, Meta, Node, Origin, ROOT, Tree};
use crate::{Error, Limits};

const WHITEOUT: &[u8] = b".wh.";
/// AUFS's own files, of which only the opaque marker means anything in an image.
const AUFS: &[u8] = b".wh..wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Larger symbolic link targets than PATH_MAX less its NUL cannot be read back by anybody.
const MAX_TARGET: u64 = 4095;

/// File contents, one after the other, in an unnamed temporary file.
#[derive(Debug)]
pub(crate) struct Spool<'a> {
    file: File,
    /// The directory it is in, for messages.
    directory: &'a Path,
    len: u64,
}

impl<'a> Spool<'a> {
    pub(crate) fn new(file: File, directory: &'a Path) -> Self {
        Self {
            file,
            directory,
            len: 0,
        }
    }

    /// The contents, by the positions in [`Content::File`].
    pub(crate) fn into_file(self) -> File {
        self.file
    }

    fn take(&mut self, reader: &mut Reader<'_, impl Stream>, buf: &mut [u8]) -> Result<Content, Error> {
        let offset = self.len;
        loop {
            let got = reader.read(buf)?;
            if got == 0 {
                return Ok(Content::File {
                    offset,
                    size: self.len - offset,
                });
            }
            let written = self.file.write_all_at(&buf[..got], self.len);
            written.map_err(Error::io("unpack a layer", self.directory))?;
            self.len += got as u64;
        }
    }
}

/// What all layers of an image are applied to.
pub(crate) struct Applier<'a> {
    pub(crate) tree: Tree,
    pub(crate) spool: Spool<'a>,
    limits: &'a Limits,
    entries: u64,
    layer: u32,
    buf: Vec<u8>,
}

impl<'a> Applier<'a> {
    pub(crate) fn new(spool: Spool<'a>, limits: &'a Limits) -> Self {
        Self {
            tree: Tree::new(limits),
            spool,
            limits,
            entries: 0,
            layer: 0,
            buf: vec![0; 256 << 10],
        }
    }

    /// Applies the layer that `stream` is, above all before it.
    pub(crate) fn layer(&mut self, stream: &mut impl Stream) -> Result<(), Error> {
        self.layer += 1;
        let what = stream.what().to_owned();
        let mut reader = Reader::new(stream, self.limits);
        while let Some(entry) = reader.next()? {
            self.entries += 1;
            Limits::check(
                || "the number of entries of all layers".to_owned(),
                self.entries,
                self.limits.entries,
            )?;
            self.entry(entry, &what, &mut reader)?;
        }
        Ok(())
    }

    fn entry(&mut self, mut entry: Entry, what: &str, reader: &mut Reader<'_, impl Stream>) -> Result<(), Error> {
        let path = std::mem::take(&mut entry.path);
        let origin = Origin {
            what,
            layer: self.layer,
            path: &path,
        };
        let components = components(&path, origin)?;
        if let Some(name) = components.last()
            && name.starts_with(WHITEOUT)
        {
            return self.whiteout(&components, origin);
        }
        let link = std::mem::take(&mut entry.link);
        if entry.kind == Kind::HardLink {
            return self.hard_link(&components, &link, origin);
        }
        let Some(place) = self.tree.place(&components, true, origin)? else {
            if entry.kind != Kind::Directory {
                return Err(origin.bad_name("which is the root directory's but no directory"));
            }
            self.tree.set_root(meta(entry));
            return Ok(());
        };
        let content = self.content(&entry, link, origin, reader)?;
        self.tree.put(
            place,
            Node {
                meta: meta(entry),
                content,
            },
            origin,
        )
    }

    fn content(
        &mut self,
        entry: &Entry,
        link: Vec<u8>,
        origin: Origin<'_>,
        reader: &mut Reader<'_, impl Stream>,
    ) -> Result<Content, Error> {
        let (major, minor) = (entry.major, entry.minor);
        let refused = |problem: String| {
            let (what, name) = (origin.what.to_owned(), Error::show(origin.path));
            Err(Error::UnsupportedEntry { what, name, problem })
        };
        match entry.kind {
            Kind::File => self.spool.take(reader, &mut self.buf),
            Kind::Directory => Ok(Content::Directory(Default::default())),
            Kind::Symlink if link.is_empty() || link.contains(&0) => refused("a symbolic link to nothing".to_owned()),
            Kind::Symlink => {
                let what = || format!("the length of the symbolic link {:?}", Error::show(origin.path));
                Limits::check(what, link.len() as u64, MAX_TARGET)?;
                Ok(Content::Symlink(link))
            }
            // The kernel's dev_t has 12 bits for the major and 20 for the minor number.
            Kind::Char | Kind::Block if major >= 1 << 12 || minor >= 1 << 20 => {
                refused(format!("the device number {major}:{minor} is more than Linux has"))
            }
            Kind::Char => Ok(Content::Char { major, minor }),
            Kind::Block => Ok(Content::Block { major, minor }),
            Kind::Fifo => Ok(Content::Fifo),
            Kind::Other(flag) => refused(format!("the tar entry type {:?}", char::from(flag))),
            Kind::HardLink => refused("a hard link has no contents".to_owned()),
        }
    }

    fn whiteout(&mut self, components: &[&[u8]], origin: Origin<'_>) -> Result<(), Error> {
        let Some((&name, parents)) = components.split_last() else {
            return Ok(());
        };
        if name == OPAQUE {
            if let Some(directory) = self.tree.directory(parents, false, origin)? {
                self.tree.clear(directory, origin);
            }
            return Ok(());
        }
        if name.starts_with(AUFS) {
            return Ok(());
        }
        let hidden = &name[WHITEOUT.len()..];
        if matches!(hidden, b"" | b"." | b"..") {
            return Err(origin.bad_name("a whiteout of nothing"));
        }
        let target: Vec<&[u8]> = parents.iter().copied().chain([hidden]).collect();
        if let Some(place) = self.tree.place(&target, false, origin)? {
            self.tree.remove(&place, origin);
        }
        Ok(())
    }

    fn hard_link(&mut self, names: &[&[u8]], target: &[u8], origin: Origin<'_>) -> Result<(), Error> {
        let target_origin = Origin { path: target, ..origin };
        let target_components = components(target, target_origin)?;
        let there = self.tree.place(&target_components, false, target_origin)?;
        let linked = match (self.tree.place(names, true, origin)?, there) {
            (Some(place), Some(there)) => self.tree.hard_link(place, &there, origin),
            (None, _) => Err("but the link is the root directory"),
            (_, None) => Err("which does not exist"),
        };
        linked.map_err(|problem| Error::BadHardLink {
            what: origin.what.to_owned(),
            name: Error::show(origin.path),
            target: Error::show(target),
            problem,
        })
    }
}

/// The components of an entry's path. A leading slash means the image's root, as it does to container runtimes; `..`
/// has no honest use.
fn components<'p>(path: &'p [u8], origin: Origin<'_>) -> Result<Vec<&'p [u8]>, Error> {
    if path.is_empty() {
        return Err(origin.bad_name("which is empty"));
    }
    if path.contains(&0) {
        return Err(origin.bad_name("which has a NUL in it"));
    }
    let components = path
        .split(|&byte| byte == b'/')
        .filter(|component| !matches!(*component, b"" | b"."));
    components
        .map(|component| match component {
            b".." => Err(origin.bad_name("which leads out of the image")),
            _ => Ok(component),
        })
        .collect()
}

fn meta(entry: Entry) -> Meta {
    let mode = u16::try_from(entry.mode & 0o7777).unwrap_or(0);
    let Entry {
        uid,
        gid,
        mtime,
        mtime_nsec,
        xattrs,
        ..
    } = entry;
    Meta {
        mode,
        uid,
        gid,
        mtime,
        mtime_nsec,
        xattrs,
    }
}

impl Applier<'_> {
    /// The finished tree and the file that its contents are in. It must have something in it.
    pub(crate) fn finish(self) -> (Tree, File) {
        debug_assert!(matches!(self.tree.node(ROOT).content, Content::Directory(_)));
        (self.tree, self.spool.into_file())
    }
}
