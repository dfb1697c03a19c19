//! What can go wrong with an image, each with its numbers and, where a person meets it, the next step.

use std::io;
use std::path::{Path, PathBuf};

use base::ByteSize;

/// Why an image could not be imported, found or removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused something.
    #[error("cannot {action} {}", .path.display())]
    Io {
        /// What was tried, as a verb phrase.
        action: &'static str,
        /// The file it was tried on.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// What is to be imported cannot be opened.
    #[error(
        "{} cannot be opened: {cause}; give a file or directory that can be read, such as `podman save --format \
         oci-archive -o FILE IMAGE` makes", .path.display()
    )]
    NoSource {
        /// What was given.
        path: PathBuf,
        /// The operating system's reason.
        cause: io::Error,
    },
    /// The file system of the store is full; nothing was left behind.
    #[error(
        "no space left for the image (to {action} {} failed); remove what is not needed (`basalt prune`, `basalt image prune`; \
         `basalt system df` shows what takes how much)", .path.display()
    )]
    NoSpace {
        /// What was being written.
        action: &'static str,
        /// The directory or file that was being written to.
        path: PathBuf,
    },
    /// Less space than what is still to come.
    #[error(
        "no space left for the image: {} needed, {} free in {}; remove what is not needed (`basalt prune`, `basalt image prune`; \
         `basalt system df` shows what takes how much)", ByteSize(*.needed), ByteSize(*.free), .path.display()
    )]
    NoRoom {
        /// Bytes still to be written.
        needed: u64,
        /// Bytes free.
        free: u64,
        /// The store.
        path: PathBuf,
    },
    /// The path is neither of the three formats.
    #[error(
        "{} is not a container image: expected an OCI image layout (a directory or a tar with `oci-layout` and \
         `index.json`) or the output of `podman save` or `docker save`", .path.display()
    )]
    NotAnImage {
        /// What was given.
        path: PathBuf,
    },
    /// A JSON document of the image does not say what it must.
    #[error("{document} of the image is not valid: export the image again")]
    BadJson {
        /// Which document.
        document: String,
        /// What the parser found.
        source: serde_json::Error,
    },
    /// A document of the image contradicts itself or another one.
    #[error("{document} of the image is not valid ({problem}): export the image again")]
    BadDocument {
        /// Which document.
        document: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The image names a blob that its archive lacks.
    #[error("the image lacks the blob {name}: export it again, with all its layers")]
    MissingBlob {
        /// The blob's name inside the image.
        name: String,
    },
    /// A blob is not what its digest says.
    #[error("{what} has digest sha256:{found} where the image says {expected}: the copy is damaged, export it again")]
    DigestMismatch {
        /// Which blob.
        what: String,
        /// The digest that the image states.
        expected: String,
        /// The digest of what is there, in hexadecimal.
        found: String,
    },
    /// A blob's length is not what its descriptor says.
    #[error("{what} has {found} bytes where the image says {expected}: the copy is damaged, export it again")]
    SizeMismatch {
        /// Which blob.
        what: String,
        /// The length that the image states.
        expected: u64,
        /// The length of what is there.
        found: u64,
    },
    /// Not `sha256:` and 64 hexadecimal digits.
    #[error("{text:?} is not a digest that Basalt can check: only sha256 with 64 hexadecimal digits is supported")]
    UnsupportedDigest {
        /// What was found.
        text: String,
    },
    /// A media type that no image of ours has.
    #[error(
        "{what} has the media type {media_type:?}, which is not supported: build or export the image in OCI format"
    )]
    UnsupportedMediaType {
        /// Which blob.
        what: String,
        /// Its media type, or what its first bytes are.
        media_type: String,
    },
    /// No image for this machine.
    #[error(
        "the image is for {found}, not for linux/amd64: use one that was built for, or saved with, `--platform linux/amd64`"
    )]
    WrongPlatform {
        /// What there is, comma-separated.
        found: String,
    },
    /// More than one image in one file.
    #[error("{count} images are in {} ({names}): export the one you want alone", .path.display())]
    SeveralImages {
        /// How many linux/amd64 images.
        count: usize,
        /// Their names.
        names: String,
        /// The archive.
        path: PathBuf,
    },
    /// One of the limits of [`Limits`](crate::Limits).
    #[error("{what} is {found}, more than the limit of {limit}: this is no image that Basalt should run")]
    TooLarge {
        /// What is too large.
        what: String,
        /// How large it is, or says it is.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// An archive or layer ends inside an entry.
    #[error("{what} ends {missing} bytes too early (at byte {at}): the copy is truncated, export it again")]
    Truncated {
        /// Which archive.
        what: String,
        /// Where it ends.
        at: u64,
        /// How many more bytes the entry at its end claims.
        missing: u64,
    },
    /// The compressed stream cannot be read.
    #[error("{what} cannot be decompressed after {at} bytes: the copy is damaged, export it again")]
    BadCompression {
        /// Which layer.
        what: String,
        /// How many bytes came out before.
        at: u64,
        /// The decompressor's reason.
        source: io::Error,
    },
    /// A tar header that cannot be understood.
    #[error("{what} has a bad tar header at byte {at} ({problem}): the copy is damaged, export it again")]
    BadTar {
        /// Which archive.
        what: String,
        /// Where the header starts.
        at: u64,
        /// What is wrong.
        problem: String,
    },
    /// A name in a layer that must not be there: a `..`, an empty name, a NUL, a component over 255 bytes.
    #[error("{what} has an entry with the name {name:?}, {problem}: the image is malicious or broken, do not use it")]
    BadName {
        /// Which layer.
        what: String,
        /// The name, with unprintable bytes replaced.
        name: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A path in a layer leads through something that is no directory.
    #[error("{what} puts {name:?} below {through:?}, which is not a directory: the image is broken, build it again")]
    NotADirectory {
        /// Which layer.
        what: String,
        /// The entry's path.
        name: String,
        /// The component that is in the way.
        through: String,
    },
    /// Symbolic links in an entry's path go round.
    #[error(
        "{what} has the entry {name:?}, whose path follows more than {limit} symbolic links: the image is \
         broken, build it again"
    )]
    SymlinkLoop {
        /// Which layer.
        what: String,
        /// The entry's path.
        name: String,
        /// The limit.
        limit: u32,
    },
    /// A hard link to nothing or to a directory.
    #[error("{what} has a hard link {name:?} to {target:?}, {problem}: the image is broken, build it again")]
    BadHardLink {
        /// Which layer.
        what: String,
        /// The link.
        name: String,
        /// What it links to.
        target: String,
        /// Why that cannot be.
        problem: &'static str,
    },
    /// An entry that erofs, or this crate, cannot keep.
    #[error("{what} has the entry {name:?}, which cannot be stored ({problem}): build the image without it")]
    UnsupportedEntry {
        /// Which layer.
        what: String,
        /// The entry's path.
        name: String,
        /// Why.
        problem: String,
    },
    /// Not a name that an image can have.
    #[error("{text:?} is not an image name ({problem}): use a name like `python` or `localhost/tools/python:3.11`")]
    BadReference {
        /// What was given.
        text: String,
        /// What is wrong.
        problem: &'static str,
    },
    /// No image with this name.
    #[error(
        "there is no image {reference:?}: `basalt images` lists what there is, `basalt pull HOST/NAME` or `basalt import PATH` \
         adds one"
    )]
    NoSuchImage {
        /// What was asked for.
        reference: String,
    },
    /// Whoever wanted it does not want it any more.
    #[error("stopped before it was finished: nothing was changed, do it again")]
    Stopped,
    /// The image is in use and would be gone.
    #[error("the image {reference:?} is in use: remove the sandboxes that use it first, or force it")]
    InUse {
        /// What was to be removed.
        reference: String,
    },
    /// Only the converted image is here.
    #[error(
        "the image {reference:?} cannot be sent on ({problem}): pull or import it again, or do this where it was pulled \
         or imported"
    )]
    NoContent {
        /// What was asked for.
        reference: String,
        /// What is missing.
        problem: String,
    },
    /// Several images match.
    #[error("{reference:?} could be any of {candidates}: say which")]
    Ambiguous {
        /// What was asked for.
        reference: String,
        /// What matches, comma-separated.
        candidates: String,
    },
    /// The stored image was damaged after its import.
    #[error(
        "the stored image {} is damaged ({problem}): remove it with `basalt rmi {}` and import it again",
        .path.display(), short_digest(.path)
    )]
    CorruptStored {
        /// The image file or its metadata.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The file that says which name means which image was damaged.
    #[error(
        "the images' names in {} are damaged ({problem}): delete that file and import the images again, which gives them \
         their names", .path.display()
    )]
    CorruptNames {
        /// The file.
        path: PathBuf,
        /// What the parser found.
        problem: String,
    },
}

impl Error {
    /// For `map_err`: an I/O error with what was tried on which file. Running out of space or quota is its own kind.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::NoSpace { action, path },
            _ => Self::Io { action, path, source },
        }
    }

    /// Bytes of a name as a message shows them.
    pub(crate) fn show(name: &[u8]) -> String {
        const LONGEST: usize = 200;
        let mut text = String::from_utf8_lossy(&name[..name.len().min(LONGEST)]).into_owned();
        if name.len() > LONGEST {
            text.push('…');
        }
        text
    }
}

/// The beginning of the digest that a stored image's files have as their name; as much of it as `basalt images` shows.
fn short_digest(path: &Path) -> String {
    const DIGITS: usize = 12;
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    stem.chars().take(DIGITS).collect()
}
