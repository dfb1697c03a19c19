//! An image that comes along with something else, which says by its digest which one it must be. Whoever sent it is not trusted:
//! no other image comes in by it, and none gets a name.

use std::fs::File;
use std::path::Path;

use super::{Image, Store};
use crate::Error;
use crate::import::Progress;
use crate::manifest::{select, select_docker};
use crate::source::Source;

impl Store {
    /// Imports the image `digest` (64 digits) from an archive in an open file, without a name, unless it is here.
    ///
    /// # Errors
    ///
    /// [`Error::DigestMismatch`] where the archive has another one; else as [`Store::import`].
    pub fn bring(&self, archive: File, digest: &str, progress: &mut dyn FnMut(Progress)) -> Result<Image, Error> {
        let _lock = self.lock()?;
        let temporary = self.temporary();
        let named = Path::new("the image that came along");
        let source = Source::archive(archive, named, Some(&temporary), &self.limits)?.until(&self.stop);
        let mut selected = select(&source)?;
        if selected.digest != digest && source.has("manifest.json") {
            // One that was a docker-archive once goes by its config, and what we save of it is that, too.
            selected = select_docker(&source)?;
        }
        if selected.digest != digest {
            return Err(Error::DigestMismatch {
                what: named.display().to_string(),
                expected: format!("sha256:{digest}"),
                found: selected.digest,
            });
        }
        self.adopt(&source, &selected, progress)?;
        self.load(digest, &self.names()?)
    }
}
