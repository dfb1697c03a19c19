//! Who is told when an operation on the store comes to one of [`base::points::IMAGE`], so that tests can end it there.
//!
//! Does not know what happens then: by itself nothing does.

use std::fmt;
use std::sync::Arc;

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
