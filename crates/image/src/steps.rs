//! The moments between two lasting effects of an operation on the store, by name, so that tests can end a process at each.
//!
//! Does not know what happens there: by itself nothing does.

use std::fmt;
use std::sync::Arc;

/// All of them. A caller that watches finds every one in a life of pull or import, tag and removal.
pub const STEPS: &[&str] = &[
    DOWNLOAD_CLAIMED,
    DOWNLOAD_WHOLE,
    IMAGE_CONVERTED,
    IMAGE_KEPT,
    IMAGE_RECORDED,
    IMAGE_NAMED,
    IMAGE_UNNAMED,
    IMAGE_FORGOTTEN,
    IMAGE_REMOVED,
];

/// An empty or partial download is there, and its lock is taken.
pub(crate) const DOWNLOAD_CLAIMED: &str = "download.claimed";
/// It is whole and has its name.
pub(crate) const DOWNLOAD_WHOLE: &str = "download.whole";
/// The erofs image is there, without metadata.
pub(crate) const IMAGE_CONVERTED: &str = "image.converted";
/// What it came as is there too; no metadata refer to it.
pub(crate) const IMAGE_KEPT: &str = "image.kept";
/// The metadata are there.
pub(crate) const IMAGE_RECORDED: &str = "image.recorded";
/// It has its name.
pub(crate) const IMAGE_NAMED: &str = "image.named";
/// It has lost its last name.
pub(crate) const IMAGE_UNNAMED: &str = "image.unnamed";
/// The files are gone, what it came as is there.
pub(crate) const IMAGE_FORGOTTEN: &str = "image.forgotten";
/// Nothing of it is there.
pub(crate) const IMAGE_REMOVED: &str = "image.removed";

/// Who is told.
#[derive(Clone, Default)]
pub(crate) struct Steps(Option<Arc<dyn Fn(&'static str) + Send + Sync>>);

impl Steps {
    pub(crate) fn told(to: impl Fn(&'static str) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(to)))
    }

    pub(crate) fn at(&self, step: &'static str) {
        if let Some(to) = &self.0 {
            to(step);
        }
    }
}

impl fmt::Debug for Steps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Steps").field(&self.0.is_some()).finish()
    }
}
